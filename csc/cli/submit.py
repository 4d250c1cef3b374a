"""The command `csc submit`, and what a study that is submitted shares with it."""

import hashlib
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.cli.cluster import endpoint_arguments, open_endpoint
from csc.cli.command import Command
from csc.cli.run import class_count, overrides_of, scenario_arguments
from csc.config import differences, resolve
from csc.errors import BadConfig, BadData
from csc.pipelines.profile import SHIPPED, Profile, read_profile, run_defaults
from csc.pipelines.window import Window
from csc.scenario import CLASS_COUNTS, Scenario
from csc.tracking.names import run_title

if TYPE_CHECKING:
    from csc.pipelines.cluster.endpoint import Endpoint

__all__ = ["SUBMIT", "check_edited", "check_on_cluster", "open_submission", "start_run", "submission_arguments"]


def _submit_arguments(parser: ArgumentParser) -> None:
    scenario_arguments(parser, profile="kubeflow")
    submission_arguments(parser)


def submission_arguments(parser: ArgumentParser) -> None:
    """Declare to which cluster and under which names a run goes, and whether it is followed."""
    endpoint_arguments(parser)
    parser.add_argument("--experiment", help="of Kubeflow Pipelines (default: the profile's)")
    parser.add_argument("--namespace", help="where runs are, if Kubeflow has many users (default: the profile's)")
    parser.add_argument("--wait", action="store_true", help="tell every change until the run has ended")


def _submit(arguments: Namespace) -> int:
    scenario = Scenario.parse(arguments.scenario)
    overrides = overrides_of(arguments)
    config = resolve(scenario.dataset, overrides)
    profile = read_profile(arguments.profile)
    check_edited(arguments.profile, profile)
    data = arguments.data or run_defaults(profile, scenario).get("data")
    if data is None:
        raise BadData(f"csc submit {scenario.name}: --data is missing, and the profile has no storage.data")
    check_on_cluster(data)
    # The data set is the cluster's; it is looked at from here only if the number of classes cannot be known otherwise.
    classes = CLASS_COUNTS.get(scenario.dataset) or class_count(scenario, data)
    window = Window.parse(arguments.tasks, scenario, classes)
    endpoint = open_submission(arguments, profile)
    print(scenario.announcement(classes), flush=True)
    from csc.pipelines.package import checked_steps
    from csc.pipelines.scenario import compile_pipeline, pipeline_name

    # The others are ingest, report, finish, and one for maps or for the prior model of the window.
    checked_steps(scenario.name, window.last - window.first + 1, others=4)
    name = run_title(scenario.name, config) + ("" if window.is_complete else f" · tasks {window}")
    with tempfile.TemporaryDirectory(prefix="csc-submit-") as folder:
        package = Path(folder) / "pipeline.yaml"
        compile_pipeline(scenario, classes, package, overrides, profile, window, on_cluster=True)
        inputs = {"data": data, "config": differences(scenario.dataset, config)}
        return start_run(arguments, endpoint, profile, package, pipeline_name(scenario), name, inputs)


def start_run(
    arguments: Namespace,
    endpoint: "Endpoint",
    profile: Profile,
    package: Path,
    pipeline: str,
    name: str,
    inputs: Mapping[str, Any],
) -> int:
    """Start a run of a compiled pipeline, say where it is, and follow it if that is asked for; return the exit code.

    The version of a pipeline is called after the digest of its package, so that the same package is stored once.
    """
    from csc.pipelines.cluster.run import RemoteRun

    namespace = arguments.namespace or profile.cluster.namespace
    experiment = arguments.experiment or profile.cluster.experiment
    digest = hashlib.sha256(package.read_bytes()).hexdigest()[:16]
    experiment_id, new = endpoint.find_or_create("experiment", experiment, namespace)
    print(f"experiment  {experiment} ({'made' if new else 'was there'})", flush=True)
    pipeline_id, _ = endpoint.find_or_create("pipeline", pipeline, namespace)
    version_id, uploaded = endpoint.version(pipeline_id, digest, package)
    print(f"pipeline    {pipeline} · version {digest} ({'uploaded' if uploaded else 'reused'})", flush=True)
    run_id = endpoint.start(name, experiment_id, pipeline_id, version_id, inputs, profile.cluster.service_account)
    print(f"run         {endpoint.page(run_id)}", flush=True)
    remote = RemoteRun(run_id, endpoint, arguments, profile)
    print(f"status      {remote.command('status')}", flush=True)
    print(f"stop        {remote.command('stop')}", flush=True)
    return remote.wait() if arguments.wait else 0


def check_edited(name: str, profile: Profile) -> None:
    """Refuse to send what only exists as an example."""
    for kind, image in (("cpu", profile.images.cpu), ("train", profile.images.train)):
        if "example.com/" in image or image.endswith("0" * 64):
            file = SHIPPED.get(name, name)
            raise BadConfig(f"{file}: images.{kind} is an example; copy the file, name your images, and give --profile")


def open_submission(arguments: Namespace, profile: Profile) -> "Endpoint":
    """The cluster that a run goes to; prints a warning if it tries steps again otherwise than the profile expects."""
    endpoint = open_endpoint(arguments, profile)
    from csc.cli.cluster_doctor import retry_warning

    if warning := retry_warning(profile, arguments.namespace or ""):
        print(f"csc: {warning}", file=sys.stderr)
    return endpoint


def check_on_cluster(data: str) -> None:
    """Refuse a path that means another one on the cluster than here."""
    if not data.startswith(("/", "s3://")):
        raise BadData(f"--data {data}: expected what the cluster knows: an s3:// address, or a whole path on a volume")


SUBMIT = Command("run a scenario on a Kubeflow cluster", _submit, _submit_arguments)
