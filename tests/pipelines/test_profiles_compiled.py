"""Every shape of a pipeline with every shipped profile: what reaches the cluster is what the profile says.

The shapes are a scenario of five tasks, one with an embed step and one whose tasks train on several nodes.

Budgets, and what they come from:

- 512 KiB of YAML: the API server takes 32 MiB, but the Argo object made of it must fit into etcd's 1.5 MiB, and has
  about the size of the YAML.
- 100 container steps: 81 steps have been computed to a workflow status of 145 KiB compressed, of at most 1 MiB. The
  button Retry of Kubeflow writes it back uncompressed and fails from about 40 steps on; `--tasks` is there for that.
- 7 or 8 different containers, however many tasks there are: the cluster stores equal ones once.
"""

import json
import sys
from pathlib import Path

import pytest
import yaml

from csc.pipelines.profile import SHIPPED, Profile, read_profile
from csc.pipelines.scenario import compile_pipeline
from csc.scenario import CLASS_COUNTS
from tests.golden.write import scenario_of
from tests.kfp_server import parse_strictly

SIZE_BUDGET = 512 << 10
STEP_BUDGET = 100
TRAIN = ("exec-train", "exec-evaluate", "exec-embed")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("profiles")]  # compiled once, not once per process of the tests

SHAPES = {  # settings that change the shape of a scenario's pipeline
    "digits-b0c2": {},
    "digits-b0c5-features": {"backbone": {"frozen": True}, "features": {"views": 1}},
    "digits-b0c5-nodes": {"train": {"nodes": 2}},
}
CLUSTER = tuple(name for name in SHIPPED if name != "local")
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile a scenario with a profile once, on a machine that has secrets; return the text and both documents."""
    folder, known = tmp_path_factory.mktemp("profiles"), {}

    def compile_once(name, profile):
        if (name, profile) not in known:
            path, scenario = folder / f"{name}-{profile}.yaml", scenario_of(name)
            with pytest.MonkeyPatch.context() as environment:
                for variable in SECRETS:
                    environment.setenv(variable, "hunter2")
                compile_pipeline(
                    scenario, CLASS_COUNTS[scenario.dataset], path, SHAPES.get(name, {}), read_profile(profile)
                )
            known[name, profile] = path.read_text(), list(yaml.load_all(path.read_text(), yaml.CSafeLoader))
        return known[name, profile]

    return compile_once


def steps_of(documents):
    """(name, container, Kubernetes settings) of every executor."""
    spec, platform = documents
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for name, executor in spec["deploymentSpec"]["executors"].items():
        yield name, executor["container"], settings.get(name, {})


@pytest.mark.parametrize("profile", CLUSTER)
@pytest.mark.parametrize("name", SHAPES)
def test_both_documents_are_the_clusters_and_within_budget(compiled, name, profile):
    check_budget(name, *compiled(name, profile))


def test_the_longest_scenario_is_within_budget(compiled):
    check_budget("coco-b0c5", *compiled("coco-b0c5", "kubeflow"))


def check_budget(name, text, documents):
    assert len(documents) == 2
    spec = parse_strictly(documents)
    assert spec.pipeline_info.name == f"csc-{scenario_of(name).name}"
    containers = [json.dumps(container, sort_keys=True) for _, container, _ in steps_of(documents)]
    assert len(text.encode()) <= SIZE_BUDGET
    assert len(containers) <= STEP_BUDGET
    assert len(set(containers)) <= 8


@pytest.mark.parametrize("profile", CLUSTER)
@pytest.mark.parametrize("name", SHAPES)
def test_no_secret_value_and_no_path_of_this_machine_is_in_it(compiled, name, profile, tmp_path_factory):
    text, _ = compiled(name, profile)
    assert "hunter2" not in text
    for path in (Path.home(), Path(__file__).parents[2], Path(sys.prefix), tmp_path_factory.getbasetemp()):
        assert str(path) not in text


@pytest.mark.parametrize("profile", CLUSTER)
@pytest.mark.parametrize("name", SHAPES)
def test_train_pods_carry_accelerator_selector_toleration_and_shared_memory(compiled, name, profile):
    expected = read_profile(profile)
    _, documents = compiled(name, profile)
    for step, container, settings in steps_of(documents):
        trains = step.startswith(TRAIN)
        pod = expected.train if trains else expected.cpu
        resources = container["resources"]
        assert container["image"] == (expected.images.train if trains else expected.images.cpu)
        assert resources["resourceCpuRequest"] == pod.requests.cpu
        assert (resources["resourceMemoryRequest"], resources["resourceMemoryLimit"]) == (
            pod.requests.memory,
            pod.limits.memory,
        )
        assert ("accelerator" in resources) == trains
        assert ("emptyDirMounts" in settings) == trains
        assert settings.get("nodeSelector", {}).get("labels", {}) == pod.node_selector
        assert len(settings.get("tolerations", [])) == len(pod.tolerations)
        if trains:
            accelerator = resources["accelerator"]
            assert accelerator["resourceType"] == "nvidia.com/gpu"
            if step == "exec-embed":
                assert accelerator["resourceCount"] == "1"  # one process makes the maps, whatever others have
            else:
                assert "gpus" in accelerator["resourceCount"]  # the run-time argument
            assert settings["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
            assert settings["emptyDirMounts"] == [
                {"volumeName": "shm", "mountPath": "/dev/shm", "medium": "Memory", "sizeLimit": expected.shm_size}
            ]


@pytest.mark.parametrize("profile", CLUSTER)
@pytest.mark.parametrize("name", SHAPES)
def test_every_step_has_its_secrets_by_reference_and_its_volume_user_and_timeout(compiled, name, profile):
    expected = read_profile(profile)
    _, documents = compiled(name, profile)
    wanted = {secret.name: secret.keys for secret in (expected.secrets.s3, expected.secrets.mlflow) if secret.name}
    for step, container, settings in steps_of(documents):
        found = {
            secret["secretName"]: {item["secretKey"]: item["envVar"] for item in secret["keyToEnv"]}
            for secret in settings["secretAsEnv"]
        }
        assert found == wanted
        assert all("runtimeValue" in secret["secretNameParameter"] for secret in settings["secretAsEnv"])
        assert settings["pvcMount"][0]["mountPath"] == "/mnt/csc"
        assert settings["pvcMount"][0]["constant"] == "csc-shared"
        assert settings["securityContext"] == {"runAsUser": "10001", "runAsGroup": "10001", "runAsNonRoot": True}
        assert settings["activeDeadlineSeconds"] == ("86400" if step.startswith(TRAIN) else "7200")
        assert settings["imagePullPolicy"] == "IfNotPresent"
        plain = {item["name"]: item["value"] for item in container["env"]}
        assert plain == {**expected.env, "MLFLOW_TRACKING_URI": expected.tracking.uri, **expected.retry.environment()}


def steps_in(spec):
    """Every task of a compiled pipeline that is a step, not a sub-pipeline."""
    for dag in (spec["root"]["dag"], *(component.get("dag", {}) for component in spec["components"].values())):
        for task in dag.get("tasks", {}).values():
            if "dag" not in spec["components"][task["componentRef"]["name"]]:
                yield task


@pytest.mark.parametrize("profile", CLUSTER)
@pytest.mark.parametrize("name", SHAPES)
def test_every_step_waits_for_servers_itself_and_no_refused_one_is_tried_again(compiled, name, profile):
    _, documents = compiled(name, profile)
    for _, container, _ in steps_of(documents):
        found = {item["name"]: item["value"] for item in container["env"] if item["name"].startswith("CSC_RETRY_")}
        assert found == {"CSC_RETRY_TIMES": "3"}  # the rest is as by default
    assert not [task for task in steps_in(documents[0]) if "retryPolicy" in task]


def test_the_run_time_arguments_have_the_profiles_defaults(compiled):
    _, (spec, _) = compiled("digits-b0c2", "kubeflow")
    declared = spec["root"]["inputDefinitions"]["parameters"]
    assert declared["data"]["defaultValue"] == "s3://csc/data/digits"
    assert declared["checkpoints"]["defaultValue"] == "/mnt/csc/checkpoints"
    assert declared["gpus"]["defaultValue"] == "1"
    assert json.loads(declared["config"]["defaultValue"]) == {"method": "csc", "seed": 0}  # the rest is as by default


def test_the_airgapped_profile_pulls_by_digest_with_its_registrys_secret(compiled):
    _, documents = compiled("digits-b0c2", "kubeflow-airgapped")
    for _, container, settings in steps_of(documents):
        assert "@sha256:" in container["image"]
        assert settings["imagePullSecret"][0]["secretName"] == "registry-internal"
        assert {item["name"] for item in container["env"]} >= {"HF_HUB_OFFLINE", "HF_HOME"}


def compiled_with(tmp_path, text):
    """The documents of a small scenario with a profile of one's own."""
    (tmp_path / "mine.yaml").write_text(text)
    out, scenario = tmp_path / "mine-compiled.yaml", scenario_of("digits-b0c5")
    compile_pipeline(scenario, 10, out, {}, read_profile(str(tmp_path / "mine.yaml")))
    documents = list(yaml.load_all(out.read_text(), yaml.CSafeLoader))
    parse_strictly(documents)
    return documents


def test_without_gpus_no_accelerator_is_asked_for(tmp_path):
    for step, container, settings in steps_of(compiled_with(tmp_path, "gpu: {count: 0}")):
        assert "accelerator" not in container.get("resources", {})
        assert ("emptyDirMounts" in settings) == step.startswith(TRAIN)


def test_more_gpus_of_another_kind(tmp_path):
    spec, _ = compiled_with(tmp_path, "gpu: {resource: amd.com/gpu, count: 4}")
    assert spec["root"]["inputDefinitions"]["parameters"]["gpus"]["defaultValue"] == "4"
    kinds = {
        executor["container"]["resources"]["accelerator"]["resourceType"]
        for name, executor in spec["deploymentSpec"]["executors"].items()
        if name.startswith(TRAIN)
    }
    assert kinds == {"amd.com/gpu"}


def test_pods_are_tried_again_for_longer_than_a_step_may_take(tmp_path):
    spec, _ = compiled_with(tmp_path, "retry: {pods: 3, wait: 2m, within: 2d}")
    steps = list(steps_in(spec))
    assert len(steps) >= 7
    for task in steps:
        assert task["retryPolicy"] == {
            "maxRetryCount": 3,
            "backoffDuration": "120s",
            "backoffFactor": 2.0,
            "backoffMaxDuration": "172800s",
        }
    for executor in spec["deploymentSpec"]["executors"].values():
        assert "env" not in executor["container"]  # the steps themselves were not asked to


@pytest.mark.parametrize("caching", [True, False])
def test_caching_can_be_switched_off(tmp_path, caching):
    spec, _ = compiled_with(tmp_path, f"caching: {str(caching).lower()}")
    steps = spec["components"]["comp-base-task"]["dag"]["tasks"]
    assert {bool(step["cachingOptions"].get("enableCache")) for step in steps.values()} == {caching}
    assert not spec["root"]["dag"]["tasks"]["ingest"]["cachingOptions"].get("enableCache")


def test_the_default_is_the_local_profile(tmp_path, compiled):
    path = tmp_path / "default.yaml"
    compile_pipeline(scenario_of("digits-b0c2"), 10, path, profile=Profile())
    assert path.read_text() == compiled("digits-b0c2", "local")[0]
