"""`csc doctor --cluster` and the warning of `csc submit`, against a Kubernetes API that is a small HTTP server."""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from csc.cli import main
from csc.cli.cluster_doctor import cluster_checks, retry_warning
from csc.cli.doctor import Check
from csc.pipelines.profile import Profile, Retry

TOKEN = "token-of-the-person"
CONFIGMAP = "/api/v1/namespaces/kubeflow/configmaps/workflow-controller-configmap"
TEAM = "/api/v1/namespaces/team"
REVIEW = "/apis/authorization.k8s.io/v1/namespaces/team/localsubjectaccessreviews"

PROFILE = """
images: {pull_secrets: [regcred]}
storage: {volume: {claim: shared}}
secrets:
  s3: {name: s3-keys, keys: {access: AWS_ACCESS_KEY_ID, secret: AWS_SECRET_ACCESS_KEY}}
  mlflow: {name: mlflow-login, keys: {user: MLFLOW_TRACKING_USERNAME}}
retry: {times: 3, pods: 3}
cluster: {namespace: team, service_account: runner}
"""


def configmap(**strategy: Any) -> dict[str, Any]:
    """The workflow controller's, as Kubeflow Pipelines 2.17 has it."""
    defaults = {"spec": {"templateDefaults": {"retryStrategy": strategy}}}
    return {"data": {"artifactRepository": "archiveLogs: true", "workflowDefaults": yaml.safe_dump(defaults)}}


def secret(kind: str = "Opaque", *keys: str) -> dict[str, Any]:
    return {"type": kind, "data": dict.fromkeys(keys, "aHVudGVyMg==")}


def claim(mode: str = "ReadWriteMany", phase: str = "Bound") -> dict[str, Any]:
    return {"spec": {"accessModes": [mode]}, "status": {"phase": phase}}


class FakeApi(ThreadingHTTPServer):
    """A Kubernetes API with some objects; what it does not have is 404, an object that is a number is that status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.asked: list[str] = []
        self.allowed: dict[str, bool] | int = {"create": True, "get": True, "delete": True}
        self.objects: dict[str, Any] = {
            "/version/": {"gitVersion": "v1.34.0", **dict.fromkeys(VERSION, "")},
            CONFIGMAP: configmap(limit="2", retryPolicy="OnError"),
            f"{TEAM}/secrets/s3-keys": secret("Opaque", "access", "secret"),
            f"{TEAM}/secrets/mlflow-login": secret("Opaque", "user", "password"),
            f"{TEAM}/secrets/regcred": secret("kubernetes.io/dockerconfigjson", ".dockerconfigjson"),
            f"{TEAM}/persistentvolumeclaims/shared": claim(),
            f"{TEAM}/serviceaccounts/runner": {},
        }


VERSION = ("buildDate", "compiler", "gitCommit", "gitTreeState", "goVersion", "major", "minor", "platform")


class Answering(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send(self.server.objects.get(self.path, 404))

    def do_POST(self) -> None:
        spec = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["spec"]
        assert self.path == REVIEW
        assert spec["user"] == "system:serviceaccount:team:runner"
        assert spec["resourceAttributes"]["group"] == "trainer.kubeflow.org"
        allowed = self.server.allowed
        answer = allowed if isinstance(allowed, int) else {"allowed": allowed[spec["resourceAttributes"]["verb"]]}
        self.send(answer if isinstance(answer, int) else {"spec": spec, "status": answer})

    def send(self, answer: Any) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            answer = 401
        status, content = (answer, {"message": "no"}) if isinstance(answer, int) else (200, answer)
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def write_kubeconfig(file: Path, server: str, token: str = TOKEN) -> Path:
    content = {
        "current-context": "lab",
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "anna"}}],
        "clusters": [{"name": "lab", "cluster": {"server": server}}],
        "users": [{"name": "anna", "user": {"token": token}}],
    }
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeApi]:
    """A cluster that the kubeconfig of this process leads to."""
    with FakeApi() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "team.yaml"
    file.write_text(PROFILE)
    return str(file)


def found(profile: str | None, namespace: str | None = None) -> dict[str, Check]:
    """The checks by name; of several with one name, by name and number."""
    checks: dict[str, Check] = {}
    for check in cluster_checks(profile, namespace):
        checks[check.name if check.name not in checks else f"{check.name} 2"] = check
    return checks


def test_a_cluster_that_has_everything_is_reported_line_by_line(api: FakeApi, profile: str):
    assert [str(check) for check in cluster_checks(profile, None)] == [
        "cluster   ok       context lab · Kubernetes v1.34.0 · namespace team",
        "retries   ok       OnError: pods that vanish are tried again, steps that fail are not; "
        "up to 3 times (retry.pods)",
        "secret    ok       s3-keys · access, secret",
        "secret    ok       mlflow-login · user",
        "pull      ok       regcred",
        "claim     ok       shared · ReadWriteMany · Bound",
        "account   ok       runner",
        "trainjobs ok       runner may start them: train.nodes above 1 is possible",
    ]


@pytest.mark.parametrize(
    ("strategy", "pods", "status", "words"),
    [
        ({"retryPolicy": "OnError", "limit": 2}, 3, "ok", "steps that fail are not; up to 3 times (retry.pods)"),
        ({"retryPolicy": "OnError", "limit": "2"}, 0, "ok", "steps that fail are not; up to 2 times (the cluster's"),
        ({"retryPolicy": "OnTransientError"}, 3, "ok", "whose end Argo calls transient"),
        ({"retryPolicy": "OnFailure"}, 3, "warning", "refused input too; pods that vanish are not; up to 3 times"),
        ({"retryPolicy": "OnFailure"}, 0, "ok", "but nothing here asks for it: retry.pods is 0"),
        ({"retryPolicy": "OnFailure", "limit": 2}, 0, "warning", "up to 2 times (the cluster's default); an admin"),
        (
            {"retryPolicy": "Always"},
            3,
            "warning",
            "sub-pipelines on top; up to 3 times (retry.pods); set retry",
        ),
        ({}, 3, "warning", "OnFailure: steps that fail are tried again"),  # Argo's own
        ({"expression": "lastRetry.status == 'Error'"}, 3, "ok", "Always: whatever fails is tried again"),
        ({"expression": "lastRetry.status == 'Error'"}, 3, "ok", "only where lastRetry.status == 'Error'"),
        ({"retryPolicy": "Sometimes"}, 3, "warning", "Sometimes: a policy that this version does not know"),
    ],
)
def test_the_policy_is_reported_with_what_it_means_for_the_profile(
    api: FakeApi, tmp_path: Path, strategy: dict[str, Any], pods: int, status: str, words: str
):
    api.objects[CONFIGMAP] = configmap(**strategy)
    (tmp_path / "mine.yaml").write_text(f"retry: {{pods: {pods}}}")
    check = found(str(tmp_path / "mine.yaml"))["retries"]
    assert check.status == status
    assert words in check.text
    assert ("an administrator can set OnError" in check.text) == (status == "warning")


def test_a_controller_of_an_old_installation_or_of_another_namespace_is_found(api: FakeApi, profile: str):
    removed = api.objects.pop(CONFIGMAP)
    whole = {"workflowDefaults": yaml.safe_load(removed["data"]["workflowDefaults"]), "parallelism": 4}
    path = f"{TEAM}/configmaps/workflow-controller-configmap"
    api.objects[path] = {"data": {"config": yaml.safe_dump(whole)}}
    assert found(profile)["retries"].text.startswith("OnError: ")
    api.objects[path] = {}  # without any setting
    assert found(profile)["retries"].text.startswith("OnFailure: ")


@pytest.mark.parametrize("broken", ["{", "[1]", "spec: 1", "spec: {templateDefaults: {retryStrategy: {limit: x}}}"])
def test_a_configmap_that_makes_no_sense_is_unknown(api: FakeApi, broken: str):
    api.objects[CONFIGMAP] = {"data": {"workflowDefaults": broken}}
    assert found(None)["retries"].status == "unknown"


@pytest.mark.parametrize(
    ("path", "content", "name", "status", "words"),
    [
        ("secrets/s3-keys", 404, "secret", "failed", "s3-keys: not in team; deploy/secrets.example.yaml shows one"),
        ("secrets/s3-keys", secret("Opaque", "access"), "secret", "failed", "s3-keys: has no key secret, which"),
        ("secrets/mlflow-login", secret(), "secret 2", "failed", "mlflow-login: has no key user"),
        ("secrets/regcred", 404, "pull", "failed", "kubectl -n team create secret docker-registry regcred"),
        ("secrets/regcred", secret(), "pull", "failed", "regcred: of type Opaque; images are pulled with"),
        ("persistentvolumeclaims/shared", 404, "claim", "failed", "shared: not in team; deploy/storage.yaml makes one"),
        ("persistentvolumeclaims/shared", claim("ReadWriteOnce"), "claim", "warning", "use a claim that is ReadWrite"),
        ("persistentvolumeclaims/shared", claim(phase="Pending"), "claim", "ok", "ReadWriteMany · Pending"),
        ("persistentvolumeclaims/shared", claim(phase="Lost"), "claim", "failed", "ReadWriteMany · Lost"),
        ("serviceaccounts/runner", 404, "account", "failed", "runner: not in team; check cluster.service_account"),
        ("serviceaccounts/runner", 404, "trainjobs", "unknown", "the account is not there; to look: kubectl -n team"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    api: FakeApi, profile: str, path: str, content: Any, name: str, status: str, words: str
):
    api.objects[f"{TEAM}/{path}"] = content
    check = found(profile)[name]
    assert check.status == status
    assert words in check.text
    assert "hunter2" not in check.text
    assert "aHVudGVyMg" not in check.text


def test_accounts_that_may_start_no_train_jobs_are_told_who_needs_it(api: FakeApi, profile: str):
    assert isinstance(api.allowed, dict)
    api.allowed["delete"] = False
    check = found(profile)["trainjobs"]
    assert check.status == "missing"
    assert check.text.endswith("only train.nodes above 1 needs that: deploy/rbac.yaml")


def test_without_a_profile_the_accounts_that_kubeflow_uses_are_looked_for(api: FakeApi):
    api.allowed = 403
    api.objects["/api/v1/namespaces/kubeflow/serviceaccounts/pipeline-runner"] = {}
    checks = found(None)
    assert checks["account"].text == "pipeline-runner, as the profile names none"
    assert checks.keys() == {"cluster", "retries", "account", "trainjobs"}


@pytest.mark.parametrize(
    ("path", "name", "command"),
    [
        (CONFIGMAP, "retries", "-n kubeflow get configmap workflow-controller-configmap -o yaml"),
        (f"{TEAM}/secrets/s3-keys", "secret", "-n team describe secret s3-keys"),
        (f"{TEAM}/secrets/regcred", "pull", "-n team get secret regcred"),
        (f"{TEAM}/persistentvolumeclaims/shared", "claim", "-n team get pvc shared"),
        (f"{TEAM}/serviceaccounts/runner", "account", "-n team get serviceaccount runner"),
        (
            "",
            "trainjobs",
            "-n team auth can-i create trainjobs.trainer.kubeflow.org --as system:serviceacc",
        ),
    ],
)
@pytest.mark.parametrize(("status", "reason"), [(403, "forbidden to you"), (500, "the cluster answers with error 500")])
def test_what_may_not_be_seen_is_unknown_with_the_command_to_look(
    api: FakeApi, profile: str, path: str, name: str, command: str, status: int, reason: str
):
    if path:
        api.objects[path] = status
    else:
        api.allowed = status
    check = found(profile)[name]
    assert check.status == "unknown"
    assert check.text.startswith(f"{reason}; to look: kubectl {command}")


def test_a_cluster_that_is_not_reached_leaves_the_commands_to_look(
    profile: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        checks = found(profile)
    assert (checks["cluster"].status, checks["cluster"].text[:20]) == ("failed", "the cluster does not")
    others = [check for name, check in checks.items() if name != "cluster"]
    assert len(others) == 7
    assert all(check.status == "unknown" for check in others)
    assert all("; to look: kubectl -n " in check.text for check in others)


@pytest.mark.parametrize("content", [None, "", "nonsense: [", f"users: {TOKEN}"], ids=["none", "empty", "cut", "odd"])
def test_a_kubeconfig_that_cannot_be_used_is_reported_without_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
):
    if content is not None:
        (tmp_path / "kubeconfig").write_text(content)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    check = found(None)["cluster"]
    assert check.status == "failed"
    assert "kubeconfig" in check.text
    assert TOKEN not in check.text


def test_a_token_that_is_too_old_is_reported(api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    write_kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{api.server_port}", token="old")
    assert found(None)["cluster"].text.startswith("not logged in; ")


def test_the_command_ends_as_its_checks_do(api: FakeApi, profile: str, capsys: pytest.CaptureFixture[str]):
    words = ["doctor", "--cluster", "--profile", profile]
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("\neverything needed is fine\n")
    api.objects[CONFIGMAP] = 403
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("\nnothing failed, 1 could not be looked at\n")
    assert main([*words, "--namespace", "elsewhere"]) == 1
    assert capsys.readouterr().out.endswith("\n5 failed, 2 could not be looked at\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "x.yaml"], "add --cluster"),
        (["--namespace", "team"], "add --cluster"),
        (["--cluster", "--data", "set"], "leave out --cluster"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_its_package_the_cluster_is_not_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert found(None)["cluster"].text.startswith("the package 'kubernetes' is not installed; ")


PODS = Profile(retry=Retry(pods=3))


@pytest.mark.parametrize(("policy", "warned"), [("OnError", False), ("OnFailure", True), ("Always", True)])
def test_submitting_warns_of_a_cluster_that_would_repeat_refused_input(api: FakeApi, policy: str, warned: bool):
    api.objects[CONFIGMAP] = configmap(retryPolicy=policy)
    line = retry_warning(PODS)
    assert line.startswith(f"warning: context lab has the retry policy {policy}: ") == warned
    assert bool(line) == warned
    assert "\n" not in line


def test_a_profile_without_pods_to_retry_looks_at_nothing(api: FakeApi):
    api.objects[CONFIGMAP] = configmap(retryPolicy="Always")
    assert retry_warning(Profile(retry=Retry(times=3))) == ""
    assert api.asked == []


@pytest.mark.parametrize("answer", [403, 404, 500])
def test_submitting_says_nothing_of_what_it_may_not_see(api: FakeApi, answer: int):
    api.objects[CONFIGMAP] = answer
    assert retry_warning(PODS) == ""


def test_submitting_says_nothing_without_a_cluster_to_look_at(capfd: pytest.CaptureFixture[str]):
    assert retry_warning(PODS) == ""
    assert capfd.readouterr() == ("", "")


def test_submitting_does_not_wait_for_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import kubernetes  # noqa: F401  importing it may take longer than this waits

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        start = time.monotonic()
        assert retry_warning(PODS, seconds=0.5) == ""
        assert time.monotonic() - start < 2
