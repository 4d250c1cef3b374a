"""What numbers are called in print, the same in every table, and which of them stand together."""

from collections.abc import Iterable

__all__ = [
    "AT_THRESHOLD",
    "CALIBRATION",
    "COLUMNS",
    "COMPARED",
    "ECE_OLD_NEW",
    "EXPORTED",
    "SUMMARY",
    "TITLES",
    "titles",
]

TITLES = {
    "last_mAP": "last mAP",
    "last_CF1": "last CF1",
    "last_OF1": "last OF1",
    "avg_mAP": "average mAP",
    "CF1": "CF1",
    "OF1": "OF1",
    "forgetting": "forgetting",
    "H": "H",
    "FPR": "FPR",
    "ECE": "ECE",
    "ECE_old": "ECE old",
    "ECE_new": "ECE new",
    "ECE_T": "ECE/T",
    "ECE_old_T": "ECE old/T",
    "ECE_new_T": "ECE new/T",
    "AECE": "AECE",
    "AECE_old": "AECE old",
    "AECE_new": "AECE new",
    "AECE_T": "AECE/T",
    "AECE_old_T": "AECE old/T",
    "AECE_new_T": "AECE new/T",
    "CF1_own": "CF1 own",
    "OF1_own": "OF1 own",
    "temperature": "T",
    "CP": "CP",
    "CR": "CR",
    "OP": "OP",
    "OR": "OR",
    "CR-CP": "CR−CP",
    "OR-OP": "OR−OP",
}

# What a study may name. CF1 and OF1 after the last task are last_CF1 and last_OF1 there, as in the paper's tables.
COLUMNS = {name: title for name, title in TITLES.items() if name not in ("CF1", "OF1")}

SUMMARY = ("last_mAP", "last_CF1", "last_OF1", "avg_mAP")  # of the paper's tables 1 and 2
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


def titles(names: Iterable[str]) -> list[str]:
    """The heads of columns.

    >>> titles(["avg_mAP", "ECE_old_T"])
    ['average mAP', 'ECE old/T']
    """
    return [TITLES[name] for name in names]
