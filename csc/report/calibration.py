"""How far the confidences of a run can be trusted: errors of old and of new classes, before and after scaling."""

from csc.artifacts import TaskResult
from csc.report.columns import CALIBRATION

__all__ = ["calibration", "calibration_text"]


def calibration(task: TaskResult) -> dict[str, float]:
    """The numbers of `CALIBRATION` that a task has, by name.

    Old or new classes that do not exist, or that the test images do not label, have no error. A run of a version that
    computed none of this has no number at all.
    """
    if not any(task.metrics[name] for name in CALIBRATION if "ECE" in name):
        return {}
    kinds = {"_new" if name in task.new else "_old" for name in task.seen}
    absent = {"_old", "_new"} - kinds
    return {name: task.metrics[name] for name in CALIBRATION if not any(part in name for part in absent)}


def calibration_text(task: TaskResult) -> str:
    """The ECE of old and new classes in a sentence, also after scaling; empty if there is none."""
    found = calibration(task)
    groups = [group for group in ("old", "new") if f"ECE_{group}" in found]
    if not groups:
        return ""
    before = [f"{found[f'ECE_{group}']:.1f} % on {group}" for group in groups]
    text = f"The calibration error (ECE) is {before[0]} classes{''.join(f' and {more} ones' for more in before[1:])}"
    if found["temperature"] != 1:
        after = [f"{found[f'ECE_{group}_T']:.1f} %" for group in groups]
        text += f"; after scaling by the temperature {found['temperature']:.2f}, {' and '.join(after)}"
    return f"{text}."
