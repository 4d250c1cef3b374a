"""`csc extend`: one more task on a registered model, with only the labels of its new classes."""

import json
import os
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

from csc.artifacts import RegisteredTask
from csc.cli.command import Command
from csc.cli.preflight import preflight
from csc.cli.run import display_for, local_run_arguments, overrides_of, run_here, show_results
from csc.cli.submit import check_edited, check_on_cluster, open_submission, start_run, submission_arguments
from csc.cli.workdir import use_profile, use_workdir
from csc.config import Config, differences, resolve
from csc.config.layers import method_class
from csc.config.tree import merged
from csc.data.dataset import Dataset
from csc.errors import BadConfig, BadData, BadModel
from csc.model import ModelCard
from csc.pipelines.local.display import Display
from csc.pipelines.profile import SHIPPED, Profile, on_this_machine, read_profile, run_defaults
from csc.scenario import Scenario
from csc.storage import absolute
from csc.tracking.names import run_title
from csc.tracking.versions import registered_card, registered_task_at
from csc.version import code_version

__all__ = ["EXTEND"]


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="registered model: models:/NAME@final, or models:/NAME/VERSION")
    parser.add_argument("--data", metavar="URI", required=True, help="data set of new classes, made by 'csc ingest'")
    parser.add_argument("--test", metavar="URI", help="data set that labels the old classes, to judge them as well")
    parser.add_argument("--method", help="learning method (default: the model's)")
    parser.add_argument("--seed", type=int, help="of all random choices (default: the model's)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="a setting")
    parser.add_argument(
        "--profile", help=f"YAML file, or one of {', '.join(SHIPPED)} (default: local, with --submit kubeflow)"
    )
    local_run_arguments(parser)
    parser.add_argument("--submit", action="store_true", help="run on a Kubeflow cluster; see 'csc submit'")
    submission_arguments(parser)


@dataclass(frozen=True)
class _Extension:
    """What is to be learned on top of which model."""

    prior: RegisteredTask
    card: ModelCard
    config: Config
    data: str
    test: str
    classes: tuple[str, ...]

    @property
    def scenario(self) -> Scenario:
        return Scenario.parse(self.card.scenario).extended(len(self.classes))

    @property
    def task(self) -> int:
        return self.card.task + 1

    @property
    def inputs(self) -> dict[str, str]:
        """The run-time arguments of the pipeline."""
        config = differences(self.scenario.dataset, self.config)
        return {"data": self.data, "test": self.test, "model": self.prior.model.uri, "config": config}

    def compile_to(self, package: Path, profile: Profile, on_cluster: bool = False) -> None:
        from csc.pipelines.extension import compile_extension

        extended = self.prior.model.fingerprint
        compile_extension(
            self.scenario,
            self.task,
            self.config,
            extended,
            package,
            tests_old=bool(self.test),
            profile=profile,
            on_cluster=on_cluster,
        )


def _extend(arguments: Namespace) -> int:
    profile = read_profile(arguments.profile or ("kubeflow" if arguments.submit else "local"))
    if arguments.submit:
        check_edited(arguments.profile or "kubeflow", profile)
        for uri in filter(None, (arguments.data, arguments.test)):
            check_on_cluster(uri)
        if profile.tracking.uri and not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_TRACKING_URI"] = profile.tracking.uri
    else:
        use_profile(profile)
    workdir = use_workdir(arguments.workdir)
    prior = registered_task_at(arguments.model)
    card, dataset = registered_card(prior), Dataset.open(absolute(arguments.data))
    if card.data_fingerprint == dataset.fingerprint:
        print(f"{prior.model.uri} has learned this data set already: {', '.join(card.new)}; nothing to do")
        return 0
    _check_classes(arguments, card, dataset)
    config = _settings(arguments, card)
    test = absolute(arguments.test) if arguments.test else ""
    extension = _Extension(prior, card, config, absolute(arguments.data), test, dataset.classes)
    display = display_for(arguments, [*card.task_sizes, len(dataset.classes)])
    new = ", ".join(dataset.classes)
    display.say(f"{prior.model.uri} knows {len(card.classes)} classes; task {extension.task} brings {new}")
    if not test:
        display.say("old classes have no labels in the new data and are not judged; --test names data that have some")
    if config.backbone.frozen and not method_class(config.method).solves:
        display.say("a model of --method ridge learns new classes in one pass, without epochs: docs/frozen-backbone.md")
    if arguments.submit:
        return _submit(arguments, profile, extension)
    return _run(arguments, profile, workdir, extension, display)


def _run(arguments: Namespace, profile: Profile, workdir: Path, extension: _Extension, display: Display) -> int:
    scenario, config, prior = extension.scenario.name, extension.config, extension.prior.model
    preflight(config, workdir, in_containers=arguments.runner == "docker")
    key = config.fingerprint(scenario, extension.data, extension.test, prior.fingerprint)
    name = f"{scenario}-{config.method}-seed{config.seed}-{key}"
    inputs = extension.inputs
    identity = {"scenario": scenario, "data": extension.data, "config": inputs["config"], "extended": prior.fingerprint}

    def compile_to(package: Path) -> None:
        extension.compile_to(package, on_this_machine(profile))

    run = run_here(arguments, workdir, name, identity, compile_to, inputs, display)
    if run is None:
        return 1
    fingerprint = Dataset.open(extension.data).fingerprint
    made_by = config.run_key(scenario, fingerprint, code_version(), prior.fingerprint)
    show_results(arguments, run, workdir / f"{name}.html", prior.name, made_by, extension.task)
    return 0


def _submit(arguments: Namespace, profile: Profile, extension: _Extension) -> int:
    from csc.pipelines.scenario import pipeline_name

    scenario, config = extension.scenario, extension.config
    endpoint = open_submission(arguments, profile)
    inputs = run_defaults(profile, scenario) | extension.inputs
    with tempfile.TemporaryDirectory(prefix="csc-submit-") as folder:
        package = Path(folder) / "pipeline.yaml"
        extension.compile_to(package, profile, on_cluster=True)
        name = run_title(scenario.name, config)
        return start_run(arguments, endpoint, profile, package, pipeline_name(scenario), name, inputs)


def _check_classes(arguments: Namespace, card: ModelCard, dataset: Dataset) -> None:
    """Refuse what cannot become the next task, before anything is written."""
    if card.task < card.tasks:
        raise BadModel(
            f"{arguments.model}: task {card.task} of {card.tasks}; the next one is that of {card.scenario}: "
            f"csc run {card.scenario} --tasks {card.task + 1}-"
        )
    if known := sorted(set(dataset.classes) & set(card.classes)):
        raise BadData(f"{dataset.uri}: {arguments.model} knows {', '.join(known)} already; expected new classes only")
    if arguments.test:
        old = Dataset.open(absolute(arguments.test))
        if missing := sorted(set(card.classes) - set(old.classes)):
            raise BadData(f"--test {arguments.test}: has no labels of {', '.join(missing)}, which the model knows")


def _settings(arguments: Namespace, card: ModelCard) -> Config:
    """The model's own settings with what the command line sets; cached maps are of the old data, so images are read."""
    dataset, then = Scenario.parse(card.scenario).dataset, card.resolved_config()
    own = json.loads(differences(dataset, then))
    chosen = {"method": own.pop("method"), "seed": own.pop("seed")} | overrides_of(arguments)
    config = resolve(dataset, merged(chosen, {"features": {"views": 0}}), shared=own)
    if not method_class(config.method).continues:
        raise BadConfig(f"method '{config.method}' begins from nothing in each task; choose another with --method")
    if config.memory.sampler != "none":
        raise BadConfig(
            f"method '{config.method}' replays images of earlier tasks, which csc extend has no data of; choose one "
            "without a memory with --method, for instance csc"
        )
    if (config.backbone, config.head) != (then.backbone, then.head):
        raise BadConfig(
            f"method '{config.method}' would need {config.backbone.name} with the head {config.head}; the model has "
            f"{then.backbone.name} with {then.head}"
        )
    return config


EXTEND = Command("teach a registered model the classes of one more data set", _extend, _arguments)
