"""The users of MLflow as `deploy/mlflow.yaml` makes them: what that of the steps may do, and what it may not."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3 import free_ports
from tests.tracked import fresh_database
from tests.unit.test_deploy import found, mlflow_container

pytestmark = pytest.mark.slow
Ask = Callable[..., tuple[int, Any]]
PASSWORDS = {"admin": "password-of-the-admin", "csc": "password-of-the-steps", "guest": "password-of-a-guest"}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Start the server with the files of the manifest; ask it as one of its users."""
    folder, (port,) = tmp_path_factory.mktemp("mlflow"), free_ports(1)
    for name, content in found("ConfigMap", "mlflow-auth")[0]["data"].items():
        (folder / name).write_text(content.replace("/tmp/", f"{folder}/"))
    (folder / "flask_wtf").mkdir()  # which guards the page on which people sign up, and nothing that is asked here
    (folder / "flask_wtf" / "csrf.py").write_text("class CSRFProtect:\n    def init_app(self, app): pass\n")
    variables = os.environ | {
        "PYTHONPATH": str(folder),
        "STEPS_USERNAME": "csc",
        "STEPS_PASSWORD": PASSWORDS["csc"],
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "basic_auth.ini"),
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORDS["admin"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "any",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    subprocess.run([sys.executable, folder / "users.py"], env=variables, cwd=folder, check=True, capture_output=True)
    (named,) = (word for word in mlflow_container()["args"] if word.startswith("--app-name"))
    words = [sys.executable, "-m", "mlflow", "server", named, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--backend-store-uri", fresh_database(folder), "--artifacts-destination", str(folder)]
    words += ["--workers", "1"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(words, env=variables, cwd=folder, stdout=log, stderr=log, start_new_session=True)

    def ask(user: str, method: str, path: str, **content: object) -> tuple[int, Any]:
        login = base64.b64encode(f"{user}:{PASSWORDS[user]}".encode()).decode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/api/2.0/mlflow/{path}", method=method)
        request.add_header("Authorization", f"Basic {login}")
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, json.dumps(content).encode(), timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, None

    try:
        wait(port, server, folder / "log")
        yield ask
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when the server answers."""
    end = time.monotonic() + 240
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(log.read_text()[-2000:])


def test_the_user_of_the_steps_adds_and_changes_and_removes_its_own(ask: Ask):
    code, made = ask("csc", "POST", "experiments/create", name="csc-digits")
    assert code == 200
    own = {"experiment_id": made["experiment_id"]}
    assert ask("csc", "POST", "runs/create", **own)[0] == 200
    assert ask("csc", "POST", "registered-models/create", name="digits-b0c2-csc")[0] == 200
    _, others = ask("admin", "POST", "experiments/create", name="of others")
    assert ask("csc", "POST", "runs/create", **others)[0] == 200  # it may add to what others made, and not remove it
    assert ask("csc", "POST", "experiments/delete", **others)[0] == 403
    assert ask("csc", "POST", "experiments/delete", **own)[0] == 200


def test_only_the_administrator_makes_users_and_changes_rights(ask: Ask):
    guest = {"username": "guest", "password": PASSWORDS["guest"]}
    assert ask("csc", "POST", "users/create", **guest)[0] == 403
    assert ask("admin", "POST", "users/create", **guest)[0] == 200
    _, others = ask("admin", "POST", "experiments/create", name="of the administrator")
    more = {"username": "csc", "permission": "MANAGE", **others}
    refused = {
        "users/update-admin": ("PATCH", {"username": "csc", "is_admin": True}),
        "users/update-password": ("PATCH", {"username": "admin", "password": "another-password"}),
        "users/delete": ("DELETE", {"username": "guest"}),
        "experiments/permissions/create": ("POST", more),
    }
    for path, (method, content) in refused.items():
        assert ask("csc", method, path, **content)[0] == 403, path


def test_nobody_comes_in_without_a_password(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PASSWORDS, "csc", "a-wrong-password")
    assert ask("csc", "POST", "experiments/search", max_results=1)[0] == 401
