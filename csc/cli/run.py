"""The commands of `csc` that need kfp: run and compile."""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.cli.command import Command
from csc.cli.workdir import use_workdir
from csc.config import differences, parse_overrides, resolve
from csc.data.dataset import Dataset
from csc.data.ingest.digits import VERSION
from csc.errors import BadData, BadScenario, CscError
from csc.pipelines.profile import SHIPPED, on_this_machine, read_profile, run_defaults
from csc.pipelines.window import Window
from csc.scenario import CLASS_COUNTS, Scenario
from csc.storage import absolute, exists, join, write_bytes
from csc.tracking.registry import model_name

if TYPE_CHECKING:
    from csc.pipelines.local.runner import LocalRun

__all__ = ["COMPILE", "RUN", "class_count", "interruptible", "make_writable", "overrides_of", "scenario_arguments"]


def scenario_arguments(parser: ArgumentParser, profile: str = "local") -> None:
    """Declare what every command that makes a pipeline takes."""
    parser.add_argument("scenario", help="<data set>-b<base classes>c<classes per task>, for instance digits-b0c2")
    parser.add_argument(
        "--data", metavar="PLACE", help="folder or s3:// of a data set made by 'csc ingest' (digits make themselves)"
    )
    parser.add_argument("--method", help="learning method (default: csc; 'csc methods' lists them)")
    parser.add_argument("--seed", type=int, help="of all random choices (default: 0)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="a setting")
    parser.add_argument("--tasks", metavar="A-B", help="only these, from the registered model before them: 3-5, 3-, -2")
    parser.add_argument(
        "--profile", default=profile, help=f"YAML file, or one of {', '.join(SHIPPED)} (default: {profile})"
    )


def overrides_of(arguments: Namespace) -> dict[str, Any]:
    """What the command line sets."""
    overrides = parse_overrides(arguments.overrides)
    given = {"method": arguments.method, "seed": arguments.seed}
    return overrides | {key: value for key, value in given.items() if value is not None}


def class_count(scenario: Scenario, data: str | None) -> int:
    """How many classes the tasks are cut from: those of the data set if it is at hand, else the benchmark's."""
    if data is not None and exists(join(data, "dataset.json")):
        dataset = Dataset.open(data)
        if dataset.name != scenario.dataset:
            raise BadData(
                f"{data}: holds the data set '{dataset.name}', '{scenario.name}' asks for '{scenario.dataset}'"
            )
        return len(dataset.classes)
    if scenario.dataset in CLASS_COUNTS:
        return CLASS_COUNTS[scenario.dataset]
    if data is not None:
        Dataset.open(data)  # says what is wrong with it
    raise BadScenario(
        f"scenario '{scenario.name}': how many classes '{scenario.dataset}' has is not known; give --data PATH"
    )


def _compile_arguments(parser: ArgumentParser) -> None:
    scenario_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="YAML file to write")


def _compile(arguments: Namespace) -> int:
    scenario = Scenario.parse(arguments.scenario)
    classes, overrides = class_count(scenario, arguments.data), overrides_of(arguments)
    resolve(scenario.dataset, overrides)
    window = Window.parse(arguments.tasks, scenario, classes)
    profile = read_profile(arguments.profile)
    if not arguments.output.endswith((".yaml", ".yml")):
        raise BadData(f"-o {arguments.output}: expected a file name that ends in .yaml")
    print(scenario.announcement(classes))
    from csc.pipelines.scenario import compile_pipeline

    compile_pipeline(scenario, classes, Path(arguments.output), overrides, profile, window, on_cluster=True)
    print(f"wrote {arguments.output}")
    return 0


def _run_arguments(parser: ArgumentParser) -> None:
    scenario_arguments(parser)
    parser.add_argument("--workdir", default="work", metavar="DIR", help="folder of runs and results (default: work)")
    parser.add_argument("--verbose", action="store_true", help="show all output of the steps")
    parser.add_argument(
        "--runner",
        choices=["forked", "subprocess", "docker"],
        default="forked",
        help="steps are forks of one process (default), fresh processes, or containers of their images",
    )


def _run(arguments: Namespace) -> int:
    scenario = Scenario.parse(arguments.scenario)
    overrides = overrides_of(arguments)
    config = resolve(scenario.dataset, overrides)
    profile = read_profile(arguments.profile)
    os.environ.update(profile.env | ({"MLFLOW_TRACKING_URI": profile.tracking.uri} if profile.tracking.uri else {}))
    workdir = use_workdir(arguments.workdir)
    place = arguments.data or run_defaults(profile, scenario).get("data")
    if place is None and scenario.dataset != "digits":
        raise BadData(
            f"csc run {scenario.name}: --data is missing; make a data set with 'csc ingest' and name its folder"
        )
    data = absolute(place or workdir / "data" / f"digits-{VERSION}")
    classes = class_count(scenario, data)
    window = Window.parse(arguments.tasks, scenario, classes)
    print(scenario.announcement(classes), flush=True)  # nonsense is refused before anything is written
    from csc.pipelines.local.runner import StepCrashed, run_compiled
    from csc.pipelines.scenario import compile_pipeline

    name = f"{scenario.name}-{config.method}-seed{config.seed}-{config.fingerprint(scenario.name, data)}"
    with interruptible(), _locked(workdir, name) as package:
        compile_pipeline(scenario, classes, package, overrides, on_this_machine(profile), window)
        checkpoints = workdir / "checkpoints" / name
        inputs = {"data": data, "config": differences(scenario.dataset, config), "checkpoints": str(checkpoints)}
        try:
            with _closing(scenario.name, data, inputs["config"]):
                run = run_compiled(package, inputs, workdir, verbose=arguments.verbose, runner=arguments.runner)
        except StepCrashed as error:
            print(error, file=sys.stderr)
            return 1
        shutil.rmtree(checkpoints, ignore_errors=True)  # all tasks are registered, nothing is left to resume
    page = workdir / f"{scenario.name}-{config.method}-seed{config.seed}.html"
    alias = "final" if window.last == window.total else f"task-{window.last:02d}"
    _tell(run, page, f"models:/{model_name(scenario.name, config.method)}@{alias}", arguments.workdir)
    if window.last < window.total:
        print(f"next      the same command with --tasks {window.last + 1}-")
    return 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, so that whoever ends this process with `kill` leaves nothing open either."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _closing(scenario: str, data: str, config: str, extended: str = "") -> Iterator[None]:
    """Close the tracked runs of a run that ends early, as the exit handler of a pipeline does on a cluster."""
    try:
        yield
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a study sends it after Ctrl-C, which has reached us already
        from csc.steps.finish import close

        with contextlib.suppress(CscError):  # why the run ended matters more
            state = "CANCELED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            close(scenario, data, config, state, extended)
        raise


def _tell(run: "LocalRun", page: Path, model: str, workdir: str) -> None:
    """Write the report into the work folder and say where everything is."""
    write_bytes(page, run.page.read_bytes())
    print(f"\n{run.table}\n")
    if run.reused:
        print(f"reused from earlier runs: {len(run.reused)} of {len(run.reused) + len(run.seconds)} steps")
    print(f"report    {page}")
    print(f"model     {model}")
    print(f"MLflow    csc ui --workdir {workdir}")


def make_writable(workdir: Path) -> None:
    """Make the work folder, or say that it cannot be written."""
    try:
        (workdir / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadData(f"cannot write {workdir}: {error.strerror}; choose another --workdir") from None


@contextlib.contextmanager
def _locked(workdir: Path, name: str) -> Iterator[Path]:
    """Refuse a run that another process is at; give the file for its pipeline. Other runs share the folder."""
    make_writable(workdir)
    with (workdir / "runs" / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadData(
                f"{workdir}: the same run is going on there; wait for it or choose another --workdir"
            ) from None
        yield workdir / "runs" / f"{name}.yaml"


COMPILE = Command("compile the pipeline of a scenario for a Kubeflow cluster", _compile_arguments, _compile)
RUN = Command("run a scenario on this machine through its compiled pipeline", _run_arguments, _run)
