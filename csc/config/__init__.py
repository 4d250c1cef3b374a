"""Settings: what there is to set, and how the settings of a run come together."""

from csc.config.layers import differences, learns_like, methods, parse_overrides, preset_for, resolve
from csc.config.schema import Config

__all__ = ["Config", "differences", "learns_like", "methods", "parse_overrides", "preset_for", "resolve"]
