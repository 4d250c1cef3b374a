"""Models at work."""

import base64
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from csc.errors import BadData
from csc.scenario import Task
from csc.serving import Predictor, above
from tests.unit.training.bench import (
    NEW,
    one_line,
    saved_model,
    settings,
)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory, tasks: tuple[Task, ...]) -> Predictor:
    return Predictor(saved_model(tmp_path_factory.mktemp("served") / "model", settings(), tasks[0]))


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def png(tmp_path_factory: pytest.TempPathFactory, picture: Image.Image) -> Path:
    path = tmp_path_factory.mktemp("images") / "picture.png"
    picture.save(path)
    return path


FORMS: dict[str, Callable[[Path], object]] = {
    "path": lambda path: path,
    "text path": str,
    "bytes": lambda path: path.read_bytes(),
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "base64": lambda path: base64.b64encode(path.read_bytes()).decode(),
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


@pytest.mark.parametrize("form", FORMS)
def test_a_data_frame_and_a_single_image_are_predicted_too(
    predictor: Predictor, png: Path, expected: np.ndarray, form: str
):
    frame = pd.DataFrame({"image": [FORMS[form](png), FORMS[form](png)]})
    two = predictor.predict(frame)
    assert list(two.columns) == list(predictor.card.classes)
    np.testing.assert_allclose(two.to_numpy(), np.concatenate([expected] * 2), rtol=1e-5)
    one = predictor.predict(FORMS[form](png))
    assert one.shape == expected.shape
    np.testing.assert_allclose(one.to_numpy(), expected, rtol=1e-5)


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
    assert above([0.2, 0.9, 0.8, 0.81], ["a", "b", "c", "d"], 0.8) == [("b", 0.9), ("d", 0.81)]
