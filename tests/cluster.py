"""What tests of the cluster's commands share: a person's machine, and a way to type a command.

A test module that says `pytest_plugins = ["tests.cluster"]` can ask for `machine`, `csc` and `server`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csc.cli import main
from csc.pipelines import scenario
from csc.pipelines.cluster import endpoint, run
from csc.pipelines.cluster.endpoint import TOKEN_VARIABLE
from tests.kfp_server import COOKIE, TOKEN, KfpServer, running

_OF_A_CLUSTER = (TOKEN_VARIABLE, "KF_PIPELINES_UI_ENDPOINT", "SSL_CERT_FILE", "MLFLOW_TRACKING_URI")
_OF_A_STORE = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "MLFLOW_S3_ENDPOINT_URL")

Said = tuple[int, list[str], str]

_compile = scenario.compile_pipeline
_compiled: dict[str, bytes] = {}


def compile_once(scenario: object, classes: int, out: Path, *more: object, **options: object) -> None:
    """Compile a pipeline, or write again what the same arguments gave before in this process."""
    key = repr((scenario, classes, more, options))
    if key not in _compiled:
        _compile(scenario, classes, out, *more, **options)
        _compiled[key] = out.read_bytes()
    out.write_bytes(_compiled[key])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's machine: a profile, secrets in the environment, no cluster around, and no waiting."""
    monkeypatch.chdir(tmp_path)
    for name in (*_OF_A_CLUSTER, *_OF_A_STORE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setenv("MY_COOKIE", COOKIE)
    monkeypatch.setattr(endpoint, "TOKEN_FILE", tmp_path / "no-token")
    monkeypatch.setattr(run, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(scenario, "compile_pipeline", compile_once)
    (tmp_path / "mine.yaml").write_text("storage: {data: 's3://bucket/{dataset}'}\ncluster: {experiment: mine}\n")


@pytest.fixture
def server() -> Iterator[KfpServer]:
    """A server that wants a token."""
    with running(KfpServer(token=TOKEN)) as kfp:
        yield kfp


@pytest.fixture
def csc(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run a command; return its exit code, its lines and its error line, none of which may hold a secret."""

    def run(*words: object) -> Said:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        for secret in (TOKEN, COOKIE, COOKIE.partition("=")[2]):
            assert secret not in said.out + said.err
        return code, said.out.splitlines(), said.err.strip()

    return run
