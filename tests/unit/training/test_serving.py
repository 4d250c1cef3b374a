"""Models at work: in a program, as MLflow loads them, and behind HTTP."""

import base64
import io
import json
import socket
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from csc.data import FORMATS
from csc.data.ingest.images import checked_jpeg
from csc.errors import BadData
from csc.scenario import Task
from csc.serving import pyfunc, service
from csc.serving.packaging import EXAMPLE, package_model
from csc.serving.predictor import Predictor, above
from tests.unit.training.bench import (
    NEW,
    one_line,
    saved_model,
    settings,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tasks: tuple[Task, ...]) -> Path:
    made = saved_model(tmp_path_factory.mktemp("served") / "model", settings(), tasks[0])
    (made / "training.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return Predictor(folder)


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def png(tmp_path_factory: pytest.TempPathFactory, picture: Image.Image) -> Path:
    path = tmp_path_factory.mktemp("images") / "picture.png"
    picture.save(path)
    return path


def saved(picture: Image.Image, name: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, name)
    return file.getvalue()


def base64_of(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


FORMS: dict[str, Callable[[Path], object]] = {
    "path": lambda path: path,
    "text path": str,
    "bytes": lambda path: path.read_bytes(),
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "base64": base64_of,
    "pillow": Image.open,
    "array": lambda path: np.asarray(Image.open(path)),
}


@pytest.fixture(scope="module")
def expected(predictor: Predictor, picture: Image.Image) -> np.ndarray:
    resized = picture.resize((32, 32), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).unsqueeze(0)
    with torch.no_grad():
        return predictor.network(pixels).sigmoid().numpy()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_gives_the_same_confidences(
    predictor: Predictor, png: Path, expected: np.ndarray, form: str
):
    np.testing.assert_allclose(predictor.confidences([FORMS[form](png)]), expected, rtol=1e-5)


@pytest.mark.parametrize("name", [*FORMATS, "MPO"])
def test_what_can_be_ingested_can_be_predicted(predictor: Predictor, picture: Image.Image, name: str):
    """MPO is what telephones write under the name of JPEG."""
    assert checked_jpeg(saved(picture, name), "image").width == picture.width
    assert predictor.confidences([saved(picture, name)]).shape == (1, NEW)


@pytest.mark.parametrize("name", ["PPM", "ICO", "EPS"])
def test_other_formats_are_not_even_tried(predictor: Predictor, picture: Image.Image, name: str):
    with pytest.raises(BadData, match=r"image 2: not an image of a known format \(JPEG, PNG, WEBP, BMP, TIFF, GIF\)"):
        predictor.confidences([picture, saved(picture, name)])


def test_a_grey_or_transparent_image_is_read_as_rgb(predictor: Predictor, picture: Image.Image):
    for mode in ("L", "RGBA", "P"):
        other = picture.convert(mode)
        np.testing.assert_allclose(
            predictor.confidences([other]), predictor.confidences([other.convert("RGB")]), rtol=1e-5
        )


def test_many_images_keep_their_order(predictor: Predictor, picture: Image.Image, expected: np.ndarray):
    dark = Image.new("RGB", (32, 32))
    values = predictor.confidences([dark] * 33 + [picture])
    assert values.shape == (34, NEW)
    np.testing.assert_allclose(values[33:], expected, rtol=1e-4)
    assert not np.allclose(values[0], expected[0], rtol=1e-3)


def test_no_images_give_no_rows(predictor: Predictor):
    assert predictor.confidences([]).shape == (0, NEW)


BAD_IMAGES = {
    "garbage bytes": lambda png: b"not an image",
    "no bytes": lambda png: b"",
    "truncated bytes": lambda png: png.read_bytes()[:500],
    "missing file": lambda png: png.with_name("nowhere.png"),
    "text file": lambda png: Path(__file__),
    "not base64": lambda png: "!!!",
    "base64 of something else": lambda png: base64.b64encode(b"x" * 900).decode(),
    "truncated pillow": lambda png: Image.open(io.BytesIO(png.read_bytes()[:500])),
    "array of fractions": lambda png: np.zeros((8, 8, 3)),
    "array of one axis": lambda png: np.zeros(8, np.uint8),
    "nothing": lambda png: None,
    "a number": lambda png: 5.0,
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_a_bad_image_is_refused_in_one_line(predictor: Predictor, png: Path, case: str):
    with pytest.raises(BadData) as error:
        predictor.confidences([BAD_IMAGES[case](png)])
    assert one_line(error)
    assert len(str(error.value)) < 400


def test_above_lists_names_over_the_threshold_most_confident_first():
    assert above([0.2, 0.9, 0.8, 0.81], dict.fromkeys("abcd", 0.8)) == [("b", 0.9), ("d", 0.81)]


# As MLflow loads it


@pytest.fixture(scope="module")
def model(folder: Path) -> pyfunc.Model:
    return pyfunc._load_pyfunc(str(folder))


@pytest.mark.parametrize("form", FORMS)
def test_a_data_frame_and_a_single_image_are_predicted_too(
    model: pyfunc.Model, png: Path, expected: np.ndarray, form: str
):
    frame = pd.DataFrame({"image": [FORMS[form](png), FORMS[form](png)]})
    two = model.predict(frame)
    assert list(two.columns) == list(model.predictor.card.classes)
    np.testing.assert_allclose(two.to_numpy(), np.concatenate([expected] * 2), rtol=1e-5)
    one = model.predict(FORMS[form](png))
    assert one.shape == expected.shape
    np.testing.assert_allclose(one.to_numpy(), expected, rtol=1e-5)


@pytest.fixture(params=[*pyfunc.SERVER_VARIABLES, "mlserver", "read_files"])
def in_server(request: pytest.FixtureRequest, model: pyfunc.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the ways in which a process can be one that takes text from anyone."""
    if request.param == "mlserver":
        monkeypatch.setitem(sys.modules, "mlserver", types.ModuleType("mlserver"))
    elif request.param == "read_files":
        monkeypatch.setattr(model, "read_files", False)
    else:
        monkeypatch.setenv(request.param, "true")


@pytest.mark.usefixtures("in_server")
def test_a_server_takes_base64_and_opens_no_file(model: pyfunc.Model, png: Path, expected: np.ndarray):
    for given in (base64_of(png), {"b64": base64_of(png)}, np.array({"b64": base64_of(png)}), png.read_bytes()):
        np.testing.assert_allclose(model.predict([given]).to_numpy(), expected, rtol=1e-5)
    for text in (str(png), str(png.relative_to("/")), f"file://{png}"):
        with pytest.raises(pyfunc.BadRequest, match="image 2: not base64 text"):
            model.predict([base64_of(png), text])


@pytest.mark.usefixtures("in_server")
def test_a_path_that_happens_to_be_base64_is_base64(
    model: pyfunc.Model, png: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "abcd").write_bytes(png.read_bytes())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pyfunc.BadRequest, match="not an image of a known format"):
        model.predict(["abcd"])


def test_what_mlflow_s_server_answers_to_bad_images_is_one_line(model: pyfunc.Model, png: Path):
    for bad in ([], pd.DataFrame(), ["!!!"], [b"nothing"], [None], [{"path": str(png)}]):
        with pytest.raises(pyfunc.BadRequest) as error:
            model.predict(bad)
        error.value.message = "all that was sent"  # MLflow's server puts it in front
        answer = json.loads(error.value.serialize_as_json())
        assert answer == {"error_code": "BAD_REQUEST", "message": str(error.value)}
        assert "\n" not in answer["message"]
        assert error.value.get_http_status_code() == 400


def test_mlflow_loads_it_and_its_signature_lets_images_pass(
    folder: Path, png: Path, tmp_path: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    import mlflow

    monkeypatch.setattr(sys, "path", list(sys.path))  # MLflow puts the model's code in front
    package_model(folder, tmp_path / "package")
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "package"))
    for form in set(FORMS) - {"array", "path", "bytearray"}:
        np.testing.assert_allclose(loaded.predict([FORMS[form](png)]).to_numpy(), expected, rtol=1e-5)
    assert loaded.predict([EXAMPLE]).shape == (1, NEW)
    strict = mlflow.pyfunc.load_model(str(tmp_path / "package"), model_config={"read_files": False})
    with pytest.raises(mlflow.exceptions.MlflowException, match="not base64 text"):
        strict.predict([str(png)])


# Behind HTTP


@dataclass
class Server:
    """A server in a thread of this process."""

    port: int

    def ask(self, path: str, body: Any = None, media_type: str = "") -> tuple[int, Any]:
        """Status and content of an answer; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        if media_type:
            request.add_header("Content-Type", media_type)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def predict(self, *instances: Any, query: str = "") -> tuple[int, Any]:
        return self.ask(f"/v1/models/digits:predict{query}", {"instances": list(instances)})


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Server]:
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(service.application("digits", predictor), log_level="critical")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Server(listener.getsockname()[1])
        running.should_exit = True
        thread.join()


def classes_of(predictor: Predictor, row: np.ndarray, threshold: float) -> list[dict[str, Any]]:
    found = above(row.tolist(), dict.fromkeys(predictor.card.classes, threshold))
    return [{"name": name, "confidence": pytest.approx(value, abs=2e-6)} for name, value in found]


def test_it_says_that_it_is_there_and_for_which_model(server: Server):
    assert server.ask("/healthz") == (200, {"status": "ready"})
    assert server.ask("/v1/models") == (200, {"models": ["digits"]})
    assert server.ask("/v1/models/digits") == (200, {"name": "digits", "ready": True})
    assert server.ask("/v1/models/letters") == (404, {"error": "no model 'letters' here; this is 'digits'"})
    assert server.ask("/v1/models/letters:predict", {"instances": []})[0] == 404
    assert server.ask("/nowhere") == (404, {"error": "Not Found"})
    assert server.ask("/predict") == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize(("query", "threshold"), [("", None), ("?threshold=0", 0.0), ("?threshold=0.5", 0.5)])
def test_instances_are_answered_in_their_order(
    server: Server, predictor: Predictor, png: Path, query: str, threshold: float | None
):
    dark = saved(Image.new("RGB", (32, 32)), "PNG")
    images = [png.read_bytes(), dark, png.read_bytes()]
    encoded = [{"b64": base64.b64encode(image).decode()} for image in images]
    status, answer = server.predict({"image": encoded[0]}, encoded[1], {"image": encoded[2]}, query=query)
    assert status == 200
    limit = predictor.card.resolved_config().threshold if threshold is None else threshold
    expected = [{"classes": classes_of(predictor, row, limit)} for row in predictor.confidences(images)]
    assert answer == {"predictions": expected}
    if threshold == 0:
        assert [len(one["classes"]) for one in answer["predictions"]] == [NEW] * 3


def test_the_bytes_of_an_image_are_enough(server: Server, predictor: Predictor, png: Path, expected: np.ndarray):
    status, answer = server.ask("/predict?threshold=0", png.read_bytes(), "image/png")
    assert (status, answer) == (200, {"classes": classes_of(predictor, expected[0], 0.0)})
    status, answer = server.ask("/predict", png.read_bytes(), "text/plain")
    assert status == 415
    assert "expected image/jpeg, image/png" in answer["error"]


EMPTY_IMAGE = {"image": {"b64": ""}}
BAD_REQUESTS: dict[str, tuple[Any, int, str]] = {
    "not JSON": (b"{", 400, "not JSON"),
    "not UTF-8": (b"\xff\xfe{}", 400, "not JSON"),
    "nested for ever": (b"[" * 100_000, 400, "not JSON"),
    "a list": ([], 400, "expected {"),
    "no instances": ({"inputs": []}, 400, "expected {"),
    "an empty batch": ({"instances": []}, 400, "one image or more"),
    "a path": ({"instances": ["PATH"]}, 400, "image 1: expected {"),
    "a path as image": ({"instances": [{"image": "PATH"}]}, 400, "image 1: expected {"),
    "a path as base64": ({"instances": [{"image": {"b64": "PATH"}}]}, 400, "image 1: not base64 text"),
    "a number": ({"instances": [{"image": {"b64": 5}}]}, 400, "image 1: expected {"),
    "not base64": ({"instances": [{"b64": "!!!"}]}, 400, "image 1: not base64 text"),
    "beyond ASCII": ({"instances": [{"b64": "é"}]}, 400, "image 1: not base64 text"),
    "not an image": (
        {"instances": [{"b64": EXAMPLE}, {"b64": "eHh4"}]},
        422,
        "image 2: not an image of a known format",
    ),
    "no bytes": ({"instances": [EMPTY_IMAGE]}, 422, "image 1: not an image of a known format"),
    "half an image": ({"instances": [{"b64": EXAMPLE[:60]}]}, 422, "image 1: not readable as an image"),
    "too many": ({"instances": [EMPTY_IMAGE] * (service.INSTANCES + 1)}, 413, "65 instances: at most 64 at once"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_told_why(server: Server, png: Path, case: str):
    body, status, reason = BAD_REQUESTS[case]
    data = body if isinstance(body, bytes) else json.dumps(body).replace("PATH", str(png)).encode()
    got, answer = server.ask("/v1/models/digits:predict", data)
    assert got == status
    assert answer.keys() == {"error"}
    assert reason in answer["error"]
    assert len(answer["error"]) < 200


@pytest.mark.parametrize("text", ["2", "-0.1", "nan", "half", ""])
def test_a_threshold_is_a_share(server: Server, png: Path, text: str):
    status, answer = server.ask(f"/predict?threshold={text}", png.read_bytes(), "image/png")
    assert (status, answer) == (400, {"error": f"threshold {text}: expected a number from 0 to 1"})


def test_a_small_file_that_unfolds_to_many_pixels_is_refused(server: Server):
    side = 14_000
    huge = saved(Image.new("1", (side, side)), "PNG")
    assert len(huge) < 100_000
    status, answer = server.ask("/predict", huge, "image/png")
    assert status == 413
    assert "image 1: too large" in answer["error"]


def test_the_pixels_of_all_images_count(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "PIXELS", 2 * 64)
    assert server.predict({"b64": EXAMPLE}, {"b64": EXAMPLE})[0] == 200
    status, answer = server.predict({"b64": EXAMPLE}, {"b64": EXAMPLE}, {"b64": EXAMPLE})
    assert (status, answer) == (413, {"error": "image 3: 8 × 8; at most 128 pixels in a request"})


def test_a_large_body_is_refused_whether_or_not_its_length_is_declared(
    server: Server, png: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "BODY_BYTES", 1 << 20)
    body = bytes((1 << 20) + 1)
    refused = (413, {"error": "more than 1 MiB; send fewer or smaller images"})
    assert server.ask("/predict", body, "image/png") == refused
    chunked = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(chunked + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert server.ask("/predict", png.read_bytes(), "image/png")[0] == 200


def test_an_upload_that_stalls_is_given_up_and_others_are_answered_meanwhile(
    server: Server, png: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "UPLOAD_SECONDS", 0.5)
    begun = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\nabc"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(begun)
        assert server.ask("/predict", png.read_bytes(), "image/png")[0] == 200
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_health_is_reported_and_more_requests_are_sent_away_while_many_wait(
    server: Server, png: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "WAITING", 2)
    go_on, compute = threading.Event(), Predictor.confidences

    def slow(self: Predictor, images: Any) -> Any:
        go_on.wait(60)
        return compute(self, images)

    monkeypatch.setattr(Predictor, "confidences", slow)
    answers: list[tuple[int, Any]] = []
    askers = [
        threading.Thread(target=lambda: answers.append(server.ask("/predict", png.read_bytes(), "image/png")))
        for _ in range(3)
    ]
    for asker in askers:
        asker.start()
    end = time.monotonic() + 30
    while not answers and time.monotonic() < end:
        time.sleep(0.01)
    assert answers == [(503, {"error": "too many requests at once; try again"})]
    assert server.ask("/healthz")[0] == 200
    go_on.set()
    for asker in askers:
        asker.join()
    assert [status for status, _ in answers] == [503, 200, 200]


def test_an_error_of_ours_is_not_shown_to_strangers(server: Server, png: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(self: Predictor, images: Any) -> Any:
        raise RuntimeError("secret of the server")

    monkeypatch.setattr(Predictor, "confidences", broken)
    status, answer = server.ask("/predict", png.read_bytes(), "image/png")
    assert (status, answer) == (500, {"error": "internal error; the log of the server has more"})


def test_the_page_names_the_limits_that_there_are():
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    limits = f"{service.BODY_BYTES >> 20} MiB, {service.INSTANCES} images or {service.PIXELS:,} pixels"
    for text in (limits, f"more than {service.UPLOAD_SECONDS} s to arrive", f"{service.WAITING} requests wait already"):
        assert text in page
    for path in (route.path for route in service.application("digits-b0c2-csc", None).routes):  # type: ignore[arg-type]
        assert path.replace("{name}", "digits-b0c2-csc") in page or path == "/v1/models"
