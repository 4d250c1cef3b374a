"""Settings: what there is to set, and how the settings of a run come together."""

from csc.config.layers import base_method, differences, methods, parse_overrides, preset_for, resolve
from csc.config.schema import Config

__all__ = ["Config", "base_method", "differences", "methods", "parse_overrides", "preset_for", "resolve"]
