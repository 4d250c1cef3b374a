"""What numbers are called in print, the same in every table, and which of them stand together."""

from collections.abc import Iterable

from csc.artifacts import TaskResult

__all__ = [
    "AT_THRESHOLD",
    "CALIBRATION",
    "COLUMNS",
    "COMPARED",
    "ECE_OLD_NEW",
    "EXPORTED",
    "SUMMARY",
    "TITLES",
    "calibration",
    "format_number",
    "titles",
]

SUMMARY = ("last_mAP", "last_CF1", "last_OF1", "avg_mAP")  # of the paper's tables 1 and 2

_ERRORS = [f"{name}{of}{scaled}" for name in ("ECE", "AECE") for scaled in ("", "_T") for of in ("", "_old", "_new")]
_NAMES = (
    *(*SUMMARY, "CF1", "OF1", "forgetting", "H", "FPR"),
    *(*_ERRORS, "CF1_own", "OF1_own", "temperature"),
    *("CP", "CR", "OP", "OR", "CR-CP", "OR-OP"),
)


def _title(name: str) -> str:
    words = name.removesuffix("_T") + ("/T" if name.endswith("_T") else "")
    for part, printed in {"avg": "average", "temperature": "T", "_": " ", "-": "−"}.items():
        words = words.replace(part, printed)
    return words


TITLES = {name: _title(name) for name in _NAMES}

# What a study may name. CF1 and OF1 after the last task are last_CF1 and last_OF1 there, as in the paper's tables.
COLUMNS = {name: title for name, title in TITLES.items() if name not in ("CF1", "OF1")}

COMPARED = ("last_mAP", "avg_mAP", "CF1", "OF1", "CF1_own", "forgetting", "FPR", "ECE", "H")  # of any runs

# How far confidences can be trusted: ECE and AECE (adaptive) of old and new classes, after scaling by the temperature
# too (T), and F1 at the thresholds that the model has from its training images (own).
ECE_OLD_NEW = ("ECE_old", "ECE_new", "ECE_old_T", "ECE_new_T", "temperature")
CALIBRATION = (
    *("ECE_old", "ECE_new", "ECE_old_T", "ECE_new_T"),
    *("AECE_old", "AECE_new", "AECE_old_T", "AECE_new_T"),
    *("temperature", "CF1_own", "OF1_own"),
)
AT_THRESHOLD = ("last_CF1", "last_OF1", "FPR", "CP", "CR", "OP", "OR", "CR-CP", "OR-OP")  # at the setting `threshold`
EXPORTED = (*CALIBRATION, "ECE", "ECE_T", "AECE", "AECE_T")  # what files have of every study


def calibration(task: TaskResult) -> dict[str, float]:
    """The numbers of `CALIBRATION` that a task has, by name.

    Old or new classes that do not exist, or that the test images do not label, have no error. A run of a version that
    computed none of this has no number at all.
    """
    if not any(task.metrics[name] for name in CALIBRATION if "ECE" in name):
        return {}
    absent = {"_old", "_new"} - {"_new" if name in task.new else "_old" for name in task.seen}
    return {name: task.metrics[name] for name in CALIBRATION if not any(part in name for part in absent)}


def titles(names: Iterable[str]) -> list[str]:
    """The heads of columns.

    >>> titles(["avg_mAP", "ECE_old_T"])
    ['average mAP', 'ECE old/T']
    """
    return [TITLES[name] for name in names]


def format_number(column: str, value: float) -> str:
    """A number as tables print it: H and temperature are no percentages, and small.

    >>> format_number("last_mAP", 74.123), format_number("H", 5.361)
    ('74.1', '5.36')
    """
    return f"{value:.2f}" if column in ("H", "temperature") else f"{value:.1f}"
