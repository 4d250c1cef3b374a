"""The commands `csc run` and `csc compile`, and what other commands that make pipelines share with them."""

import difflib
import json
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.cli.command import Command
from csc.cli.preflight import preflight
from csc.cli.workdir import use_profile, use_workdir, workdir_argument
from csc.config import Config, differences, parse_overrides, resolve
from csc.data.dataset import Dataset
from csc.data.ingest.digits import VERSION
from csc.errors import BadData, BadScenario
from csc.pipelines.local.display import Display, PlainDisplay
from csc.pipelines.local.interrupts import interruptible
from csc.pipelines.local.lock import close_runs_on_failure, exclusive_run
from csc.pipelines.profile import SHIPPED, Profile, on_this_machine, read_profile, run_defaults
from csc.pipelines.window import Window
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario
from csc.storage import absolute, local_path, write_bytes
from csc.tracking.names import changed_settings, model_name, page_name, settings_text
from csc.tracking.registry import find_registered_task, point_aliases
from csc.tracking.server import nothing_tracked
from csc.version import code_version

if TYPE_CHECKING:
    from csc.pipelines.local.runner import LocalRun

__all__ = [
    "COMPILE",
    "RUN",
    "class_count",
    "display_for",
    "local_run_arguments",
    "overrides_of",
    "run_here",
    "scenario_arguments",
    "show_results",
]


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
    if data is not None and Dataset.exists(data):
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
        + _did_you_mean(scenario)
    )


def _did_you_mean(scenario: Scenario) -> str:
    """A known scenario that is written almost like one of an unknown data set."""
    known = [] if scenario.dataset in CLASS_COUNTS else ["digits-b0c2", *PAPER_SCENARIOS]
    close = difflib.get_close_matches(scenario.name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


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
    output = local_path(arguments.output)
    print(scenario.announcement(classes))
    from csc.pipelines.scenario import compile_pipeline

    compile_pipeline(scenario, classes, output, overrides, profile, window, on_cluster=True)
    print(f"wrote {output}")
    return 0


def _run_arguments(parser: ArgumentParser) -> None:
    scenario_arguments(parser)
    local_run_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print settings and what would be done; run nothing")


def local_run_arguments(parser: ArgumentParser) -> None:
    """Declare where a run on this machine goes, how it is run, and what is shown of it."""
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


@dataclass(frozen=True)
class _Plan:
    """A run as the command line asks for it, checked as far as that is possible without its first step."""

    scenario: Scenario
    config: Config
    overrides: dict[str, Any]
    profile: Profile
    workdir: Path
    data: str
    classes: int
    window: Window

    @classmethod
    def of(cls, arguments: Namespace) -> "_Plan":
        """Read the command line and the profile, and point tracking at the work folder."""
        scenario = Scenario.parse(arguments.scenario)
        overrides = overrides_of(arguments)
        config = resolve(scenario.dataset, overrides)
        profile = read_profile(arguments.profile)
        use_profile(profile)
        workdir = use_workdir(arguments.workdir)
        uri = arguments.data or run_defaults(profile, scenario).get("data")
        if uri is None and scenario.dataset != "digits":
            raise BadData(
                f"csc run {scenario.name}: --data is missing; make a data set with 'csc ingest' and name its folder"
                + _did_you_mean(scenario)
            )
        data = absolute(uri or workdir / "data" / f"digits-{VERSION}")
        classes = class_count(scenario, data)
        window = Window.parse(arguments.tasks, scenario, classes)
        return cls(scenario, config, overrides, profile, workdir, data, classes, window)

    @property
    def name(self) -> str:
        """The name of the run's files in the work folder, without their endings."""
        fingerprint = self.config.fingerprint(self.scenario.name, self.data)
        return f"{self.scenario.name}-{self.config.method}-seed{self.config.seed}-{fingerprint}"

    @property
    def identity(self) -> dict[str, str]:
        """Inputs of the steps."""
        config = differences(self.scenario.dataset, self.config)
        return {"scenario": self.scenario.name, "data": self.data, "config": config}

    @property
    def key(self) -> str:
        """By which tracking knows the run; empty as long as there are no data."""
        if not Dataset.exists(self.data):
            return ""
        return self.config.run_key(self.scenario.name, Dataset.open(self.data).fingerprint, code_version())


def _run(arguments: Namespace) -> int:
    plan = _Plan.of(arguments)
    if arguments.dry_run:
        return _dry_run(plan)
    makes_digits = plan.scenario.dataset == "digits" and not Dataset.exists(plan.data)
    preflight(plan.config, plan.workdir, makes_digits=makes_digits, in_containers=arguments.runner == "docker")
    from csc.pipelines.scenario import compile_pipeline

    display = display_for(arguments, plan.scenario.sizes(plan.classes))
    display.say(plan.scenario.announcement(plan.classes))  # bad input is refused before anything is written

    def compile_to(package: Path) -> None:
        profile = on_this_machine(plan.profile)
        compile_pipeline(plan.scenario, plan.classes, package, plan.overrides, profile, plan.window)

    inputs = {"data": plan.data, "config": plan.identity["config"]}
    run = run_here(arguments, plan.workdir, plan.name, plan.identity, compile_to, inputs, display)
    if run is None:
        return 1
    page = plan.workdir / f"{page_name(plan.scenario.name, plan.config)}.html"
    model = model_name(plan.scenario.name, plan.config.method)
    show_results(arguments, run, page, model, plan.key, plan.window.last)
    if plan.window.last < plan.window.total and not arguments.json:
        print(f"next      the same command with --tasks {plan.window.last + 1}-")
    return 0


def run_here(
    arguments: Namespace,
    workdir: Path,
    name: str,
    identity: Mapping[str, str],
    compile_to: Callable[[Path], None],
    inputs: Mapping[str, str],
    display: Display,
) -> "LocalRun | None":
    """Run a pipeline on this machine, in one process at a time; none if a step crashed, which is told then.

    `name` is that of the run's files in the work folder, `identity` is what tracking knows it by, see
    `csc.tracking.tracked_run.close_run`; `inputs` are the run-time arguments, but for the checkpoints.
    """
    from csc.pipelines.local.runner import StepCrashed, run_compiled

    with interruptible(), exclusive_run(workdir, name, identity) as temporary:
        package, checkpoints = workdir / "runs" / f"{name}.yaml", workdir / "checkpoints" / name
        compile_to(package)
        given = {**inputs, "checkpoints": str(checkpoints)}
        variables = {"TMPDIR": str(temporary)} if arguments.runner != "docker" else {}
        try:
            with close_runs_on_failure(identity):
                run = run_compiled(package, given, workdir, display, runner=arguments.runner, variables=variables)
        except StepCrashed as error:
            print(error, file=sys.stderr)
            return None
        shutil.rmtree(checkpoints, ignore_errors=True)  # all tasks are registered, nothing is left to resume
        return run


def _dry_run(plan: _Plan) -> int:
    """Print what a run would do, and do nothing of it."""
    from csc.tracking.tracked_run import finished_tasks

    print(plan.scenario.announcement(plan.classes))
    changed = settings_text(changed_settings(plan.scenario.name, plan.config))
    print(f"method    {plan.config.method}, seed {plan.config.seed}, {', '.join(changed) or 'its own settings'}")
    print(f"data      {plan.data}" + ("" if plan.key else " (will be made)"))
    finished = finished_tasks(plan.key) if plan.key and not nothing_tracked() else {}
    for task in range(plan.window.first, plan.window.last + 1):
        print(f"task {task:<4} " + (f"finished, mAP {finished[task]:.1f}" if task in finished else "to run"))
    return 0


def display_for(arguments: Namespace, sizes: Sequence[int]) -> Display:
    """What the person sees: a live display on a terminal, plain lines elsewhere, or nothing."""
    out = sys.stderr if arguments.json else sys.stdout
    if arguments.quiet:
        return Display()
    if arguments.verbose or not out.isatty() or os.environ.get("TERM") == "dumb":
        return PlainDisplay(out, verbose=arguments.verbose)
    from csc.pipelines.local.live_display import LiveDisplay

    return LiveDisplay(out, dict(enumerate(sizes, start=1)))


def show_results(arguments: Namespace, run: "LocalRun", page: Path, model: str, key: str, task: int) -> None:
    """Print the results of a run and where everything is; with --json what the registry keeps of its last task.

    `page` is where its report goes, `model` the name of the registered model, and `key` is what tracking knows it by.
    """
    write_bytes(page, run.page.read_bytes())
    if arguments.json:
        shown, last = point_aliases(model, key), find_registered_task(model, task, key)
        results = {"summary": last.run.summary, "run": last.run.to_plain()} if last else {}
        files = {"model": shown.uri, "alias": shown.alias, "report": str(page)}
        print(json.dumps({**files, **results, "reused": run.reused, "seconds": run.seconds}))
        return
    print(f"\n{run.table}\n")
    if run.reused:
        print(f"reused from earlier runs: {len(run.reused)} of {len(run.reused) + len(run.seconds)} steps")
    print(f"report    {page}")
    shown = point_aliases(model, key)  # which another run may have moved since
    if not shown.uri:
        raise BadData(f"{page.parent}: the registry has no model of this run, although its steps were reused")
    for line in shown.moved:
        print(f"alias     {line}")
    print(f"model     {shown.uri}, " + (f"also models:/{model}@{shown.alias}" if shown.alias else shown.kept_back))
    print(f"MLflow    csc ui --workdir {arguments.workdir}")


COMPILE = Command("compile the pipeline of a scenario for a Kubeflow cluster", _compile, _compile_arguments)
RUN = Command("run a scenario on this machine through its compiled pipeline", _run, _run_arguments)
