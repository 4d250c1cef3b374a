"""What MLflow's pages say in words: notes on experiments, runs and versions, in Markdown."""

from csc.artifacts import RunResults
from csc.tracking.names import settings_text

__all__ = ["NOTE", "experiment_note", "run_note", "task_note"]

NOTE = "mlflow.note.content"  # the tag that MLflow shows as a description
LONGEST = 5000  # characters that MLflow takes, of versions; of runs more
SHOWN = 20  # new classes, at most


def experiment_note(dataset: str) -> str:
    """What an experiment holds."""
    return (
        f"Multi-label class-incremental learning on **{dataset}**. One run per scenario run, whose metrics have the "
        "task as step; below it one run per task, whose metrics have the epoch as step. `csc ui` prints the addresses "
        "of two saved views: the results of all scenario runs, best first, and their curves by task."
    )


def task_note(run: RunResults, uri: str, prior: str, kept_back: str) -> str:
    """What a task's run and its model version at `uri` are.

    `prior` is the uri of the version before, if there is one; `kept_back` says why no alias names the version.
    """
    last = run.last
    numbers = " · ".join(f"{name} {last.metrics[name]:.1f}" for name in ("mAP", "CF1", "OF1", "forgetting"))
    new = ", ".join(last.new[:SHOWN]) + (", …" if len(last.new) > SHOWN else "")
    before = f"It started from {_linked(prior)}." if prior else "It is the first task."
    whole = "\n\n".join(
        [
            f"Task {last.task} of {_title(run)}: {_linked(uri)}.",
            f"**{numbers}** on {last.metrics.images:,} test images, {len(last.seen)} classes.",
            f"New classes: {new}. {before}",
            *([f"**{kept_back[:1].upper()}{kept_back[1:]}.**"] if kept_back else []),
            _snippet(uri),
        ]
    )
    return whole[:LONGEST]


def run_note(run: RunResults, table: str, uri: str) -> str:
    """What a scenario run is and what came out, as a table in Markdown; `uri` is the version of its last task."""
    settings = ", ".join(f"`{item}`" for item in settings_text(run.settings)) or "none: all are the method's own"
    provenance = f"Initialisation {run.initialisation} · data `{run.data_fingerprint[:12]}` · code `{run.code_version}`"
    with_table, without_table = (
        "\n\n".join([_title(run), results, f"Changed settings: {settings}.", _snippet(uri)])
        for results in (table, provenance)  # the table says this, too
    )
    return with_table if len(with_table) <= LONGEST else without_table[:LONGEST]


def _title(run: RunResults) -> str:
    return f"**{run.scenario}** by **{run.method}**, seed {run.seed}"


def _linked(uri: str) -> str:
    """A version as a link to its page."""
    name, _, version = uri.removeprefix("models:/").rpartition("/")
    return f"[{uri}](#/models/{name}/versions/{version})"


def _snippet(uri: str) -> str:
    return f"```\ncsc predict {uri} IMAGE…\n```"
