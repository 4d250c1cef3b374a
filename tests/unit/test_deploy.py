"""The manifests in deploy/: valid, safe by default, without secrets, and in step with the profile that names them."""

import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLE = "secrets.example.yaml"
TLS = "tls.example.yaml"
SERVING = ("inference-service.yaml", "serving.yaml")  # of a model, which must be there first
JOBS = ("doctor.yaml", "volume-owner.yaml")  # that are run by hand
MANIFESTS = sorted(path.name for path in DEPLOY.glob("*.yaml") if path.name != "kustomization.yaml")
PROFILES = ("kubeflow", "kubeflow-airgapped")
VERSIONS = ("1.27", "1.32", "1.36")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


RESOURCES = [resource for name in MANIFESTS for resource in documents(name)]


def found(kind: str, name: str = "") -> list[dict[str, Any]]:
    return [one for one in RESOURCES if one["kind"] == kind and name in ("", one["metadata"]["name"])]


PREDICTORS = [one["spec"]["predictor"] for one in found("InferenceService")]
PODS = [one["spec"]["template"]["spec"] for kind in ("Deployment", "StatefulSet") for one in found(kind)] + PREDICTORS
CONTAINERS = [container for pod in PODS for container in pod["containers"]]
FIRST = [container for pod in PODS for container in pod.get("initContainers", ())]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_manifest_is_valid(name: str, version: str):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate, which has the API's schemas")
    for resource in documents(name):
        validate.validate(
            as_pod(resource) if resource["kind"] == "InferenceService" else resource, version, strict=True
        )


# The part of KServe's API that is not a pod's. Read in the repository kserve/kserve, pkg/apis/serving/v1beta1:
# component.go (ComponentExtensionSpec), predictor.go and podspec.go (a predictor adds these keys to those of a pod),
# predictor_custom.go (the container's name) and component.go (InvalidISVCNameFormatError).
KSERVE_KEYS: dict[str, type] = {
    "minReplicas": int,
    "maxReplicas": int,
    "scaleTarget": int,
    "scaleMetric": str,
    "containerConcurrency": int,
    "timeout": int,
    "labels": dict,
    "annotations": dict,
}


def as_pod(service: dict[str, Any]) -> dict[str, Any]:
    """Check what is KServe's in an InferenceService; return the rest of its predictor as a pod."""
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    assert service.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert service["spec"].keys() == {"predictor"}
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])
    predictor = service["spec"]["predictor"]
    own = {key: value for key, value in predictor.items() if key in KSERVE_KEYS}
    assert {key: type(value) for key, value in own.items()} == {key: KSERVE_KEYS[key] for key in own}
    assert 0 < own["minReplicas"] <= own["maxReplicas"]
    assert own["scaleMetric"] in ("cpu", "memory")  # `concurrency` and `rps` are Knative's
    assert [container["name"] for container in predictor["containers"]] == ["kserve-container"]
    pod = {key: value for key, value in predictor.items() if key not in own}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "predictor"}, "spec": pod}


def test_a_mistake_would_be_seen():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate, which has the API's schemas")
    wrong = documents("mlflow.yaml")[-1]
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, VERSIONS[-1], strict=True)
    (service,) = documents("inference-service.yaml")
    service["spec"]["predictor"]["maxReplica"] = 1  # neither KServe's nor a pod's
    with pytest.raises(validate.ValidationError):
        validate.validate(as_pod(service), VERSIONS[-1], strict=True)


def test_all_but_the_example_and_the_servers_of_models_is_applied():
    (kustomization,) = documents("kustomization.yaml")
    assert {*kustomization["resources"], EXAMPLE, TLS, *SERVING, *JOBS} == set(MANIFESTS)
    assert kustomization["namespace"] == found("Namespace")[0]["metadata"]["name"]
    accounts = [subject for binding in found("RoleBinding") for subject in binding["subjects"]]
    assert {account["namespace"] for account in accounts} == {kustomization["namespace"]}


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["containers"][0]["name"])
def test_pods_are_nobody_special(pod: dict[str, Any]):
    allowed = pod["securityContext"]
    assert allowed["runAsNonRoot"] is True
    assert allowed["runAsUser"] > 0
    assert allowed["fsGroup"] > 0
    assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False


def test_no_step_is_the_administrator_of_mlflow():
    (mlflow,) = found("Deployment", "mlflow")
    (container,) = mlflow["spec"]["template"]["spec"]["containers"]
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"] if "valueFrom" in one}
    assert secrets["MLFLOW_AUTH_ADMIN_PASSWORD"] == "csc-mlflow-admin"
    others = [one for one in CONTAINERS + FIRST if one is not container]
    assert "csc-mlflow-admin" not in str(others)
    for name in PROFILES:
        assert "csc-mlflow-admin" not in (ROOT / f"pipelines/profiles/{name}.yaml").read_text()


def test_the_users_of_mlflow_are_made_where_it_looks_for_them():
    import configparser

    (settings,) = found("ConfigMap", "mlflow-auth")
    parsed = configparser.ConfigParser()
    parsed.read_string(settings["data"]["basic_auth.ini"])
    assert parsed["mlflow"]["default_permission"] == "EDIT"
    assert f'"{parsed["mlflow"]["database_uri"]}"' in settings["data"]["users.py"]
    compile(settings["data"]["users.py"], "users.py", "exec")
    (first,) = FIRST
    assert first["securityContext"] == mlflow_container()["securityContext"]
    assert first["image"] == mlflow_container()["image"]


def test_the_database_talks_to_mlflow_alone_and_every_server_is_behind_a_policy():
    policies = {one["metadata"]["name"]: one["spec"] for one in found("NetworkPolicy")}
    apps = {one["spec"]["template"]["metadata"]["labels"]["app"]: one for one in found("Deployment")}
    apps |= {one["spec"]["template"]["metadata"]["labels"]["app"]: one for one in found("StatefulSet")}
    assert {spec["podSelector"]["matchLabels"]["app"] for spec in policies.values()} == apps.keys()
    assert policies["postgres"]["ingress"][0]["from"] == [{"podSelector": {"matchLabels": {"app": "mlflow"}}}]
    assert policies["postgres"]["egress"] == []
    for name, spec in policies.items():
        (container,) = apps[name]["spec"]["template"]["spec"]["containers"]
        allowed = [port["port"] for rule in spec["ingress"] for port in rule["ports"]]
        assert allowed == [port["containerPort"] for port in container["ports"]]
        assert all(rule["from"] for rule in spec["ingress"])  # an empty list would be everybody


WORKLOADS = [one for kind in ("Deployment", "StatefulSet") for one in found(kind)]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])
def test_names_selectors_and_ports_agree(workload: dict[str, Any]):
    name, spec = workload["metadata"]["name"], workload["spec"]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    assert labels.items() >= spec["selector"]["matchLabels"].items()
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (service,) = found("Service", spec.get("serviceName", name))
    assert labels.items() >= service["spec"]["selector"].items()
    others = [one for one in WORKLOADS if one is not workload]
    for other in others:  # a service leads to one server only
        assert not other["spec"]["template"]["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    for port in service["spec"]["ports"]:
        target = port.get("targetPort", port["port"])
        assert target in (*ports, *ports.values())
    for probe in (container[key] for key in container if key.endswith("Probe")):
        assert probe.get("httpGet", {}).get("port", "postgres") in (*ports, *ports.values())
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"]: claim for claim in spec.get("volumeClaimTemplates", ())}
    mounted = {mount["name"] for one in (container, *pod.get("initContainers", ())) for mount in one["volumeMounts"]}
    assert mounted == set(volumes)
    for volume in volumes.values():
        assert "configMap" not in volume or found("ConfigMap", volume["configMap"]["name"])


def test_mlflow_calls_the_database_by_its_name_and_port():
    (service,) = found("Service", "postgres")
    values = {variable["name"]: variable.get("value", "") for variable in mlflow_container()["env"]}
    address = urlsplit(values["MLFLOW_BACKEND_STORE_URI"].replace("$(POSTGRES_PASSWORD)", "x"))
    assert (address.hostname, address.port) == ("postgres", service["spec"]["ports"][0]["port"])
    database = {variable["name"]: variable.get("value") for variable in _container("postgres")["env"]}
    assert (address.username, address.path) == (database["POSTGRES_USER"], f"/{database['POSTGRES_DB']}")


def _container(name: str) -> dict[str, Any]:
    return next(container for container in CONTAINERS if container["name"] == name)


def test_the_example_of_https_leads_to_mlflow():
    (ingress,) = documents(TLS)
    (rule,) = ingress["spec"]["rules"]
    assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"]]
    (path,) = rule["http"]["paths"]
    (service,) = found("Service", path["backend"]["service"]["name"])
    assert path["backend"]["service"]["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: container["name"])
def test_containers_can_write_only_where_they_must_and_say_what_they_need(container: dict[str, Any]):
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    assert {"readinessProbe", "livenessProbe"} <= set(container)
    assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+:v?\d+\.\d+[\w.-]*", container["image"]), "a registry, a name, a version"


def test_no_secret_is_here():
    for container in CONTAINERS:
        for variable in container["env"]:
            if re.search("PASSWORD|SECRET|TOKEN|ACCESS_KEY", variable["name"]):
                assert variable.keys() == {"name", "valueFrom"}, variable["name"]
            assert not re.search(r"://\w+:[^$]", variable.get("value", "")), "a password in an address"
    for secret in found("Secret"):
        assert "data" not in secret
        for key, value in secret["stringData"].items():
            assert re.fullmatch(r"<.*>", value) or (key, value) == ("username", "csc")
    assert found("Secret") == documents(EXAMPLE)


def test_every_secret_that_is_used_is_explained():
    kept = {(one["metadata"]["name"], key) for one in found("Secret") for key in one["stringData"]}
    references = [
        variable["valueFrom"]["secretKeyRef"]
        for one in CONTAINERS + FIRST
        for variable in one["env"]
        if "valueFrom" in variable
    ]
    used = {(reference["name"], reference["key"]) for reference in references}
    for name in PROFILES:
        secrets = yaml.safe_load((ROOT / f"pipelines/profiles/{name}.yaml").read_text())["secrets"]
        used |= {(secret["name"], key) for secret in secrets.values() for key in secret["keys"]}
    assert used == kept


@pytest.mark.parametrize("name", PROFILES)
def test_the_profile_finds_what_is_deployed(name: str):
    profile = yaml.safe_load((ROOT / f"pipelines/profiles/{name}.yaml").read_text())
    (claim,) = found("PersistentVolumeClaim", profile["storage"]["volume"]["claim"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    address = urlsplit(profile["tracking"]["uri"])
    service, namespace, rest = str(address.hostname).split(".", 2)
    assert (namespace, rest) == (documents("kustomization.yaml")[0]["namespace"], "svc.cluster.local")
    (mlflow,) = found("Service", service)
    assert [port["port"] for port in mlflow["spec"]["ports"]] == [address.port]
    (deployment,) = found("Deployment", service)
    assert deployment["spec"]["template"]["metadata"]["labels"].items() >= mlflow["spec"]["selector"].items()


def mlflow_container() -> dict[str, Any]:
    return next(container for container in CONTAINERS if container["name"] == "mlflow")


def test_mlflow_has_the_version_of_the_tests_and_knows_its_options():
    from mlflow import environment_variables
    from mlflow.cli import server

    container = mlflow_container()
    version = re.search(r"^mlflow==(.*)$", (ROOT / "requirements/tracking.txt").read_text(), re.MULTILINE)
    assert version is not None
    assert container["image"] == f"ghcr.io/mlflow/mlflow:v{version[1]}-full"
    options = {name for option in server.params for name in option.opts}
    assert {argument.partition("=")[0] for argument in container["args"]} <= options
    known = {str(option.envvar) for option in server.params} | set(dir(environment_variables))
    own = {variable["name"] for variable in container["env"] if variable["name"].startswith("MLFLOW_")}
    assert own <= known | {"MLFLOW_S3_ENDPOINT_URL", "MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_DISABLE_TELEMETRY"}


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("mlflow.csc.svc.cluster.local:5000", True),
        ("mlflow.some-namespace.svc:5000", True),
        ("mlflow:5000", True),
        ("localhost:8080", True),
        ("mlflow.evil.example:5000", False),
        ("evil.example", False),
    ],
)
def test_mlflow_answers_to_its_names_in_the_cluster_and_to_no_others(host: str, allowed: bool):
    from mlflow.server.security_utils import is_allowed_host_header

    (names,) = [words.partition("=")[2] for words in mlflow_container()["args"] if words.startswith("--allowed-hosts=")]
    assert is_allowed_host_header(names.split(","), host) is allowed


def test_a_train_step_may_do_what_several_nodes_take_and_no_more():
    (role,) = found("Role")
    rules = {(tuple(rule["apiGroups"]), tuple(rule["resources"])): set(rule["verbs"]) for rule in role["rules"]}
    assert rules == {
        (("trainer.kubeflow.org",), ("trainjobs",)): {"get", "create", "delete"},
        (("",), ("pods",)): {"get"},
    }


def serving_pods() -> list[dict[str, Any]]:
    """The same server twice, by KServe and without."""
    (deployment,) = found("Deployment", "csc-serving")
    return [deployment["spec"]["template"]["spec"], *PREDICTORS]


def test_models_are_served_alike_with_and_without_kserve():
    plain, kserve = ({**pod, **pod["containers"][0]} for pod in serving_pods())
    for key in (
        "image",
        "command",
        "args",
        "env",
        "resources",
        "lifecycle",
        "volumes",
        "terminationGracePeriodSeconds",
    ):
        assert plain[key] == kserve[key], key
    for key in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert plain[key]["httpGet"]["path"] == kserve[key]["httpGet"]["path"]
        assert (
            kserve[key]["httpGet"]["port"] == kserve["ports"][0]["containerPort"] == plain["ports"][0]["containerPort"]
        )
    (service,) = found("Service", "csc-serving")
    (deployment,) = found("Deployment", "csc-serving")
    assert deployment["spec"]["template"]["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    assert service["spec"]["ports"][0]["targetPort"] == plain["ports"][0]["name"]


def test_the_servers_of_models_use_what_there_is():
    from csc import __version__
    from csc.cli import serve
    from csc.serving.service import application
    from csc.tracking.names import model_name

    parser = ArgumentParser()
    serve.SERVE.arguments(parser)
    for pod in serving_pods():
        (container,) = pod["containers"]
        assert container["image"].endswith(f"/csc-train:{__version__}")
        assert container["command"][:2] == ["csc", "serve"]
        arguments = parser.parse_args([*container["command"][2:], *container["args"]])
        assert (arguments.host, arguments.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
        assert arguments.model == f"models:/{model_name('digits-b0c2', 'csc')}@final"
        paths = {route.path for route in application("digits", None).routes}  # type: ignore[arg-type, attr-defined]
        assert container["readinessProbe"]["httpGet"]["path"] in paths
        address = next(one["value"] for one in container["env"] if one["name"] == "MLFLOW_TRACKING_URI")
        assert address == yaml.safe_load((ROOT / "pipelines/profiles/kubeflow.yaml").read_text())["tracking"]["uri"]
        assert pod["terminationGracePeriodSeconds"] > serve.STOP_SECONDS + 5
    (service,) = found("InferenceService")
    assert service["metadata"]["name"] == model_name("digits-b0c2", "csc")
