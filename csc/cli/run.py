"""The commands of `csc` that need kfp: run and compile."""

import contextlib
import json
import os
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.cli.command import Command
from csc.cli.workdir import use_workdir, workdir_argument
from csc.config import Config, differences, parse_overrides, resolve
from csc.data.dataset import Dataset
from csc.data.ingest.digits import VERSION
from csc.errors import BadData, BadScenario, Terminated
from csc.pipelines.local.lock import closed_if_cut_short, locked
from csc.pipelines.local.view import PlainView, View
from csc.pipelines.profile import SHIPPED, on_this_machine, read_profile, run_defaults
from csc.pipelines.window import Window
from csc.scenario import CLASS_COUNTS, Scenario
from csc.storage import absolute, exists, join, write_bytes
from csc.tracking.registry import find_record, model_name
from csc.version import code_version

if TYPE_CHECKING:
    from csc.pipelines.local.runner import LocalRun

__all__ = ["COMPILE", "RUN", "class_count", "interruptible", "overrides_of", "scenario_arguments"]


def scenario_arguments(parser: ArgumentParser, profile: str = "local") -> None:
    """Declare what every command that makes a pipeline takes."""
    parser.add_argument("scenario", help="<data set>-b<base classes>c<classes per task>, for instance digits-b0c2")
    parser.add_argument(
        "--data", metavar="URI", help="folder or s3:// of a data set made by 'csc ingest' (digits make themselves)"
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
    workdir_argument(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--verbose", action="store_true", help="show all output of the steps")
    shown.add_argument("--quiet", action="store_true", help="show the results only")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, all else on stderr")
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
    uri = arguments.data or run_defaults(profile, scenario).get("data")
    if uri is None and scenario.dataset != "digits":
        raise BadData(
            f"csc run {scenario.name}: --data is missing; make a data set with 'csc ingest' and name its folder"
        )
    data = absolute(uri or workdir / "data" / f"digits-{VERSION}")
    classes = class_count(scenario, data)
    window = Window.parse(arguments.tasks, scenario, classes)
    from csc.pipelines.local.runner import StepCrashed, run_compiled
    from csc.pipelines.scenario import compile_pipeline

    view = _view(arguments, scenario.sizes(classes))
    view.say(scenario.announcement(classes))  # nonsense is refused before anything is written
    name = f"{scenario.name}-{config.method}-seed{config.seed}-{config.fingerprint(scenario.name, data)}"
    facts = {"scenario": scenario.name, "data": data, "config": differences(scenario.dataset, config)}
    with interruptible(), locked(workdir, name, facts) as temporary:
        package = workdir / "runs" / f"{name}.yaml"
        compile_pipeline(scenario, classes, package, overrides, on_this_machine(profile), window)
        checkpoints = workdir / "checkpoints" / name
        inputs = {"data": data, "config": facts["config"], "checkpoints": str(checkpoints)}
        variables = {"TMPDIR": str(temporary)} if arguments.runner != "docker" else {}
        try:
            with closed_if_cut_short(facts):
                run = run_compiled(package, inputs, workdir, view, runner=arguments.runner, variables=variables)
        except StepCrashed as error:
            print(error, file=sys.stderr)
            return 1
        shutil.rmtree(checkpoints, ignore_errors=True)  # all tasks are registered, nothing is left to resume
    page = workdir / f"{scenario.name}-{config.method}-seed{config.seed}.html"
    write_bytes(page, run.page.read_bytes())
    if arguments.json:
        _print_json(run, page, config, scenario, data, window)
        return 0
    alias = "final" if window.last == window.total else f"task-{window.last:02d}"
    _tell(run, page, f"models:/{model_name(scenario.name, config.method)}@{alias}", arguments.workdir)
    if window.last < window.total:
        print(f"next      the same command with --tasks {window.last + 1}-")
    return 0


def _view(arguments: Namespace, sizes: Sequence[int]) -> View:
    """What the person sees: a live view on a terminal, plain lines elsewhere, or nothing."""
    out = sys.stderr if arguments.json else sys.stdout
    if arguments.quiet:
        return View()
    if arguments.verbose or not out.isatty() or os.environ.get("TERM") == "dumb":
        return PlainView(out, verbose=arguments.verbose)
    from csc.pipelines.local.live import LiveView

    return LiveView(out, dict(enumerate(sizes, start=1)))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, so that whoever ends this process with `kill` leaves nothing open either."""

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: we are on our way out
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_json(run: "LocalRun", page: Path, config: Config, scenario: Scenario, data: str, window: Window) -> None:
    """Print the results for a program to read: everything that the registry keeps of the last task."""
    key = config.fingerprint(scenario.name, Dataset.open(data).fingerprint, code_version())
    record = find_record(model_name(scenario.name, config.method), window.last, key)
    kept = {"model": record.model.uri, "summary": record.run.summary, "run": record.run.to_plain()} if record else {}
    print(json.dumps({**kept, "report": str(page), "reused": run.reused, "seconds": run.seconds}))


def _tell(run: "LocalRun", page: Path, model: str, workdir: str) -> None:
    """Print the results and where everything is."""
    print(f"\n{run.table}\n")
    if run.reused:
        print(f"reused from earlier runs: {len(run.reused)} of {len(run.reused) + len(run.seconds)} steps")
    print(f"report    {page}")
    print(f"model     {model}")
    print(f"MLflow    csc ui --workdir {workdir}")


COMPILE = Command("compile the pipeline of a scenario for a Kubeflow cluster", _compile_arguments, _compile)
RUN = Command("run a scenario on this machine through its compiled pipeline", _run_arguments, _run)
