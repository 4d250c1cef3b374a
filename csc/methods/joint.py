"""Joint training: the upper bound."""

from csc.config.schema import Config
from csc.methods import register
from csc.methods.base import Method

__all__ = ["Joint"]


@register
class Joint(Method):
    """L = L_cls over all n outputs, with all labels of all seen classes (`labels: seen`), from the initialisation.

    Each task is trained again on everything seen, which gives the upper bound at every point of the curve.
    """

    name = "joint"
    memory_settings = None
    continues = False

    @staticmethod
    def unread(config: Config) -> frozenset[str]:
        """Settings of tasks after the first: here every task starts from the initialisation."""
        later = ("freeze_grown_layers", "persist_optimizer", "legacy_bias_reset")
        return Method.unread(config) | {"train.lr", *(f"release_quirks.{name}" for name in later)}
