"""A registered model behind HTTP: by `csc serve`, and by MLflow's own server."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from csc.data.shards import ImageShards
from tests.integration.conftest import command, environment, inside

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]

NAME = "digits-b0c4-csc"
MODEL = f"models:/{NAME}@final"


@pytest.fixture(scope="module")
def scene(scenes, tmp_path_factory):
    path = tmp_path_factory.mktemp("scene") / "scene.jpg"
    path.write_bytes(ImageShards(scenes / "images").jpeg(0, 0))
    return path


@pytest.fixture(scope="module")
def predicted(undisturbed, scene):
    """What `csc predict` says of the scene: classes and confidences, most confident first."""
    done = inside("predict", MODEL, scene, "--threshold", "0", "--workdir", undisturbed[0])
    assert done.returncode == 0, done.stderr
    pairs = [pair.split() for pair in done.stdout.strip().split("\t")[1].split(", ")]
    return {name: pytest.approx(float(value), abs=1e-3) for name, value in pairs}


def ask(address, body=None, media_type="application/json"):
    """Status and content of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": media_type})) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def serving(undisturbed):
    """A running `csc serve` and its address; the last test that takes it ends it."""
    words = command("serve", MODEL, "--port", "0", "--workdir", undisturbed[0])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        try:
            line = server.stdout.readline()
            found = re.fullmatch(rf"{NAME}, 10 classes, on (http://127\.0\.0\.1:\d+) \(stop with Ctrl-C\)\n", line)
            assert found, line
            yield server, found[1]
        finally:
            server.kill()


def test_csc_serve_says_what_csc_predict_says(serving, scene, predicted):
    _, address = serving
    assert ask(f"{address}/healthz") == (200, {"status": "ready"})
    body = json.dumps({"instances": [{"image": {"b64": base64.b64encode(scene.read_bytes()).decode()}}] * 2})
    status, answer = ask(f"{address}/v1/models/{NAME}:predict?threshold=0", body.encode())
    assert status == 200
    status, alone = ask(f"{address}/predict?threshold=0", scene.read_bytes(), "image/jpeg")
    assert status == 200
    for found in (*answer["predictions"], alone):
        assert [one["name"] for one in found["classes"]] == list(predicted)
        assert {one["name"]: one["confidence"] for one in found["classes"]} == predicted


def closed(address, seconds=30):
    """Whether a server ceases to accept connections."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            socket.create_connection(address).close()
        except ConnectionRefusedError:
            return True
        time.sleep(0.1)
    return False


def test_csc_serve_finishes_what_it_has_begun_when_it_is_told_to_stop(serving, scene):
    server, url = serving
    image = scene.read_bytes()
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {len(image)}\r\n\r\n"
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_connection(address) as begun:
        begun.sendall(head.encode() + image[:100])
        assert ask(f"{url}/healthz")[0] == 200  # by then it has seen the request before
        server.send_signal(signal.SIGTERM)
        assert closed(address)
        begun.sendall(image[100:])
        assert begun.recv(4096).startswith(b"HTTP/1.1 200 OK")
    assert server.wait(60) == 0


def test_csc_serve_says_in_one_line_why_it_cannot(undisturbed, tmp_path):
    workdir = undisturbed[0]
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        done = inside("serve", MODEL, "--port", taken, "--workdir", workdir)
    assert (done.returncode, done.stdout) == (2, "")
    wanted = f"port {taken} (Address already in use); choose another address or port\n"
    assert done.stderr == f"csc: cannot listen on 127.0.0.1, {wanted}"
    for model, reason in (
        ("models:/nothing@final", "name=nothing not found"),
        (tmp_path, "not a model of this project"),
    ):
        done = inside("serve", model, "--port", "0", "--workdir", workdir)
        assert done.returncode == 2
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def scoring(undisturbed):
    """The address of a running `mlflow models serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "mlflow", "models", "serve", "--env-manager", "local", "--host", "127.0.0.1"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # it calls uvicorn
    own = {"MLFLOW_TRACKING_URI": f"sqlite:///{undisturbed[0]}/mlflow.db", "PATH": path}
    with subprocess.Popen(
        [*words, "--port", str(port), "--model-uri", MODEL],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment() | own,
        start_new_session=True,
    ) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 120
            while True:
                try:
                    urllib.request.urlopen(f"{address}/ping", timeout=5).close()
                    break
                except OSError:
                    assert time.monotonic() < until
                    assert server.poll() is None
                    time.sleep(0.3)
            yield f"{address}/invocations"
        finally:
            os.killpg(server.pid, signal.SIGTERM)


FORMS = {
    "inputs": lambda images: {"inputs": images},
    "instances": lambda images: {"instances": images},
    "instances by name": lambda images: {"instances": [{"image": image} for image in images]},
    "KServe's instances": lambda images: {"instances": [{"image": {"b64": image}} for image in images]},
    "dataframe_split": lambda images: {
        "dataframe_split": {"columns": ["image"], "data": [[image] for image in images]}
    },
    "dataframe_records": lambda images: {"dataframe_records": [{"image": image} for image in images]},
}


@pytest.mark.parametrize("form", FORMS)
def test_mlflow_serves_it_in_every_form_of_its_protocol(scoring, scene, predicted, form):
    encoded = base64.b64encode(scene.read_bytes()).decode()
    status, answer = ask(scoring, json.dumps(FORMS[form]([encoded] * 2)).encode())
    assert status == 200
    for row in answer["predictions"]:
        assert row == predicted


@pytest.mark.parametrize("form", FORMS)
def test_mlflow_s_server_says_why_an_image_is_refused_and_opens_no_file(scoring, scene, form):
    """Each is one short line; MLflow of itself would send a traceback, or all that it was sent."""
    known = "JPEG, PNG, WEBP, BMP, TIFF, GIF"
    for image, reason in (
        (str(scene), "not base64 text"),
        ("!!!", "not base64 text"),
        ("eHh4", f"not an image of a known format ({known})"),
    ):
        status, answer = ask(scoring, json.dumps(FORMS[form]([image])).encode())
        assert (status, answer) == (400, {"error_code": "BAD_REQUEST", "message": f"image 1: {reason}"})
    status, answer = ask(scoring, json.dumps(FORMS[form]([])).encode())
    assert status == 400
    assert "stack_trace" not in answer


def test_mlflow_s_server_opens_no_file_named_in_a_table(scoring, scene):
    status, answer = ask(scoring, f"image\n{scene}\n".encode(), "text/csv")
    assert (status, answer["message"]) == (400, "image 1: not base64 text")
