"""Processes that are killed, or told to end, in each phase of their work."""

import filecmp
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

import yaml

from tests.faults.commands import SCENARIO, SMALL, Lost, Moment, Workspace
from tests.faults.judge import check_whole, judge
from tests.faults.lab import Lab
from tests.tracked import fresh_database

# The phases of a run, in the order in which they come; {} is the number of a task.
PHASES = {
    "build": Moment(line=r"^task {} · (split-labels|build-dataset)$", within=0.3),
    "database": Moment(file=".mlflow.db.new", within=1.5),
    "epoch": Moment(line=r"task {}/2 · epoch 1/3", within=0.5),
    "checkpoint": Moment(file="checkpoints/*/*/.task-0{}*"),
    "evaluate": Moment(line=r"^task {} · evaluate$", within=0.3),
    "register": Moment(line=r"^task {} · register$", within=0.4),
    "report": Moment(line=r"^report$", within=0.5),
}
STEPS = {"epoch": ("train",), "build": ("split-labels", "build-dataset")}  # that phases are in, if named otherwise


def kill_run(lab: Lab, rng: Random) -> None:
    """One run that is killed in every phase, in one of its two tasks; the same command takes it up each time."""
    workspace, chosen = lab.run(), lab.chosen(PHASES)
    if "database" not in chosen:  # whose making takes as long as a run
        fresh_database(workspace.work)
    for task, phase in in_order(rng, chosen):
        moment = PHASES[phase]
        moment = Moment(moment.line.format(task), moment.file.format(task), moment.within)
        target = rng.choice(["everything", "everything", "command", "step"])
        running = workspace.disturb(moment, rng, lambda running: running.kill(target))  # noqa: B023
        if not running.came:
            raise Lost(f"{phase} of task {task} never came: {running.end_of_output}")
        if running.sent:
            # What was being written is left half-written; otherwise the command has said which step is at work.
            inside = (
                moment.seen((), workspace.work) if moment.file else running.step.endswith(STEPS.get(phase, (phase,)))
            )
            lab.tried(f"kill: {phase}" if inside else "kill: elsewhere")
            check_whole(workspace.work)
        if running.process.returncode == 0:  # this machine is fast: the run, or the step, had ended before the signal
            break
    workspace.finish()
    judge(workspace, lab.undisturbed())


def in_order(rng: Random, phases: list[str]) -> list[tuple[int, str]]:
    """The phases with a task each, as a run comes to them; the database is made in the first training, if at all."""
    tasks = {phase: 1 if phase == "database" else 3 if phase == "report" else rng.choice([1, 2]) for phase in phases}
    return sorted(((task, phase) for phase, task in tasks.items()), key=lambda it: (it[0], list(PHASES).index(it[1])))


def kill_ingest(lab: Lab, rng: Random) -> None:
    """A data set that is ingested with kills in between is the same to the byte."""
    whole, workspace = (
        Workspace(folder, ("ingest", "digits", "--out", folder / "work"), forked=False)
        for folder in (lab.shared / "ingest", lab.folder)
    )
    if not (whole.work / "dataset.json").exists():
        whole.finish()
    for _ in range(3):
        moment = Moment(file="partial/key", within=3.0)
        running = workspace.disturb(moment, rng, lambda running: running.kill(rng.choice(["everything", "command"])))
        if running.sent:
            lab.tried("kill: ingest")
            check_whole(workspace.work)
    workspace.finish()
    compared = filecmp.dircmp(whole.work, workspace.work)
    differing = [*compared.left_only, *compared.right_only, *_other_bytes(compared), *workspace.temporary.iterdir()]
    if differing:
        raise Lost(f"not the data set of an undisturbed ingest: {differing}")


def _other_bytes(compared: "filecmp.dircmp[str]") -> list[str]:
    _, other, unreadable = filecmp.cmpfiles(compared.left, compared.right, compared.common_files, shallow=False)
    inner = [name for below in compared.subdirs.values() for name in (*_other_bytes(below), *below.right_only)]
    return [*other, *unreadable, *inner]


def kill_study(lab: Lab, rng: Random) -> None:
    """A study of two cells side by side that is killed while they are at work."""
    file = lab.folder / "two.yaml"
    rows = [{"label": method, "method": method} for method in ("csc", "lwf")]
    file.write_text(yaml.safe_dump({"title": "Two", "scenarios": [SCENARIO], "seeds": [0], "rows": rows}))
    sets = [word for setting in SMALL for word in ("--set", setting)]
    work = ("--workdir", lab.folder / "work", "--parallel", "2", "--verbose")
    workspace = Workspace(lab.folder, ("study", file, "--data", lab.data, *work, *sets), forked=False)
    seen = [r"runs? to do", r"task 1/2 · epoch", r"task 2/2 · epoch", r"^\[1/"]
    for line in seen:
        running = workspace.disturb(
            Moment(line=line, within=3.0), rng, lambda running: running.kill(rng.choice(["everything", "command"]))
        )
        if running.sent:
            lab.tried("kill: study")
            check_whole(workspace.work)
    # A cell may have outlived the study by a moment, and have been at work on its run.
    workspace.finish(tries=2, failed=1)
    judge(workspace, lab.undisturbed())
    judge(workspace, lab.undisturbed("lwf", lambda: lab.run(folder=lab.shared / "lwf", method="lwf"), "lwf"), "lwf")


def terminate_run(lab: Lab, rng: Random) -> None:
    """One run that is told to end five times, mostly in its epochs; it says so, and exits with 143."""
    workspace = lab.run()
    epochs = sorted(rng.sample([(task, epoch) for task in (1, 2) for epoch in (1, 2)], 3))
    moments = [Moment(line=rf"task {task}/2 · epoch {epoch}/3", within=0.4) for task, epoch in epochs]
    moments.insert(0, Moment(line=r"^task 1 · train$", within=1.0))
    moments.append(Moment(line=rf"^task 2 · {rng.choice(['evaluate', 'register'])}$", within=0.3))
    for moment in moments:
        running = workspace.disturb(moment, rng, lambda running: running.terminate())
        if not running.sent:  # this machine is fast: the run has ended, or the signal before came after this epoch
            if running.process.returncode != 0:
                raise Lost(f"{moment}: neither came nor ended well: {running.end_of_output}")
            break
        training = running.step.endswith("train")
        lab.tried("SIGTERM: training" if training else "SIGTERM: elsewhere")
        if running.process.returncode != 143 or "csc: ended by SIGTERM" not in running.output:
            raise Lost(f"exit code {running.process.returncode} after SIGTERM: {running.end_of_output}")
        check_whole(workspace.work)
        if open_runs(workspace.work):
            raise Lost(f"RUNNING in MLflow after SIGTERM: {open_runs(workspace.work)}")
    workspace.finish()
    judge(workspace, lab.undisturbed())


def open_runs(work: Path) -> list[str]:
    """The runs that a work folder's database has as RUNNING."""
    database = work / "mlflow.db"
    if not database.exists():
        return []
    with closing(sqlite3.connect(database)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM runs WHERE status = 'RUNNING'")]
