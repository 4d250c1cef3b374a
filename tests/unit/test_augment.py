from collections import Counter

import numpy as np
import pytest
from PIL import Image

from benchmarks.load import _PLAIN_OPERATIONS, TOLERANCE, _plain_augment
from csc.data import augment as module
from csc.data.augment import OPERATIONS, Pixels, augment, cutout, rand_augment

WITHOUT_MAGNITUDE = ("autocontrast", "equalize", "invert")
MIRRORED = ("shearX", "shearY", "translateX", "translateY", "color", "contrast", "sharpness", "brightness")


@pytest.fixture
def image() -> Pixels:
    """A picture with structure, whose values leave room at both ends."""
    down, across = np.mgrid[0:60, 0:80]
    planes = [40 + down * 2, 50 + across, 60 + (down * across) % 97]
    return np.stack(planes, axis=-1).astype(np.uint8)


def noise(height: int, width: int, smooth: bool) -> Pixels:
    """Random pixels, or a smooth picture made of few of them, over the whole range of values."""
    rng = np.random.default_rng(height)
    if not smooth:
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    few = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return np.array(few.resize((width, height), Image.Resampling.BICUBIC))


PICTURES = {
    "smooth square": noise(64, 64, smooth=True),
    "smooth wide": noise(33, 90, smooth=True),
    "noise high": noise(91, 47, smooth=False),
    "one colour": np.full((32, 32, 3), (250, 7, 128), np.uint8),
    "two values": np.where(noise(40, 40, smooth=True) > 100, 255, 3).astype(np.uint8),
}


def apply(name: str, image: Pixels, index: int, seed: int = 0) -> Pixels:
    function, magnitudes = OPERATIONS[name]
    return function(image.copy(), magnitudes[index], np.random.default_rng(seed))


def pixels(image: Pixels) -> np.ndarray:
    return image.astype(int)


def seed_for(sign: int) -> int:
    """A seed whose first random sign is `sign`."""
    return next(s for s in range(99) if module._signed(1.0, np.random.default_rng(s)) == sign)


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_pixels_of_plain_pillow(name: str, picture: str):
    image = PICTURES[picture]
    for index, magnitude in enumerate(OPERATIONS[name].magnitudes):
        for seed in (seed_for(1), seed_for(-1)):
            ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
            result = OPERATIONS[name].function(image.copy(), magnitude, ours)
            plain = _PLAIN_OPERATIONS[name](Image.fromarray(image), magnitude, theirs)
            difference = abs(pixels(result) - np.asarray(plain))
            assert difference.max() <= name.startswith("shear"), (index, seed)
            assert (difference > 0).mean() <= TOLERANCE, (index, seed)
            assert ours.random() == theirs.random()  # drew as often


@pytest.mark.parametrize("picture", PICTURES)
def test_augmenting_gives_the_pixels_of_plain_pillow(picture: str):
    image = PICTURES[picture]
    for seed in range(150):
        ours, theirs = np.random.default_rng([0, 3, seed]), np.random.default_rng([0, 3, seed])
        plain = _plain_augment(Image.fromarray(image), theirs)
        assert (augment(image.copy(), ours) != np.asarray(plain)).mean() <= TOLERANCE, seed
        assert ours.random() == theirs.random()


def test_the_magnitudes_run_between_the_stated_ends():
    ends = {name: (operation.magnitudes[0], operation.magnitudes[-1]) for name, operation in OPERATIONS.items()}
    assert ends == {
        "invert": (0, 0),
        "cutout": (0, 20),
        "sharpness": (0, 0.9),
        "autocontrast": (0, 0),
        "posterize": (8, 4),
        "shearX": (0, 0.3),
        "translateX": (0, 150 / 331),
        "translateY": (0, 150 / 331),
        "shearY": (0, 0.3),
        "rotate": (0, 30),
        "equalize": (0, 0),
        "contrast": (0, 0.9),
        "color": (0, 0.9),
        "solarize": (256, 0),
        "brightness": (0, 0.9),
    }
    assert OPERATIONS["posterize"].magnitudes == (8, 8, 7, 7, 6, 6, 5, 5, 4, 4)
    assert OPERATIONS["cutout"].magnitudes == (0, 2, 4, 7, 9, 11, 13, 16, 18, 20)
    for name, operation in OPERATIONS.items():
        assert len(operation.magnitudes) == 10
        if name not in ("posterize", "cutout"):
            np.testing.assert_allclose(np.diff(operation.magnitudes, n=2), 0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in WITHOUT_MAGNITUDE])
def test_an_operation_at_its_weakest_changes_nothing(name: str, image: Pixels):
    for sign in (-1, 1):
        assert abs(pixels(apply(name, image, 0, seed_for(sign))) - pixels(image)).max() <= 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_the_form_and_repeats_itself(name: str, image: Pixels):
    for index in range(10):
        result = apply(name, image, index)
        assert (result.shape, result.dtype) == (image.shape, image.dtype)
        assert result.flags.writeable
        assert result.flags.c_contiguous
        assert np.array_equal(result, apply(name, image, index))
    assert not np.array_equal(apply(name, image, 9), image)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "cutout"])
def test_only_a_cutout_paints_on_what_it_is_given(name: str, image: Pixels):
    before = image.copy()
    function, magnitudes = OPERATIONS[name]
    function(image, magnitudes[9], np.random.default_rng(0))
    assert np.array_equal(image, before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_only_some_operations_have_two_directions(name: str, image: Pixels):
    forth, back = (apply(name, image, 9, seed_for(sign)) for sign in (1, -1))
    assert np.array_equal(forth, back) != (name in MIRRORED or name == "cutout")


def test_shifting_moves_by_a_part_of_the_side_and_leaves_grey(image: Pixels):
    left = pixels(apply("translateX", image, 9, seed_for(1)))  # 150 / 331 of 80 columns: 36
    assert (left[:, :44] == pixels(image)[:, 36:]).all()
    assert (left[:, 44:] == 128).all()
    down = pixels(apply("translateY", image, 9, seed_for(-1)))  # of 60 rows: 27
    assert (down[27:] == pixels(image)[:33]).all()
    assert (down[:27] == 128).all()


def test_shearing_holds_the_upper_left_corner_and_leaves_grey(image: Pixels):
    sheared = pixels(apply("shearX", image, 9, seed_for(1)))
    assert abs(sheared[0, :70] - pixels(image)[0, :70]).max() <= 2
    assert (sheared[-1, -10:] == 128).all()
    assert (pixels(apply("shearY", image, 9, seed_for(-1)))[:10, -1] == 128).all()


def test_rotating_turns_counter_clockwise_over_grey():
    bar = np.zeros((61, 61, 3), np.uint8)
    bar[:30, 30] = 255  # from the centre straight up
    turned = pixels(apply("rotate", bar, 9))
    white = np.argwhere((turned == 255).all(axis=-1))
    assert len(white) > 20
    assert (white[:, 1] <= 31).all()  # now leaning to the left
    corners = turned[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 128).all()
    assert set(np.unique(turned)) == {0, 128, 255}


def test_colour_operations_compute_what_they_say(image: Pixels):
    values = pixels(image)
    assert (pixels(apply("invert", image, 5)) == 255 - values).all()
    assert (pixels(apply("posterize", image, 9)) == values // 16 * 16).all()
    threshold = OPERATIONS["solarize"].magnitudes[5]
    assert (pixels(apply("solarize", image, 5)) == np.where(values < threshold, values, 255 - values)).all()
    assert (pixels(apply("solarize", image, 9)) == 255 - values).all()
    brighter = pixels(apply("brightness", image, 5, seed_for(1)))
    assert abs(brighter - np.minimum(values * 1.5, 255)).max() <= 1
    grey = pixels(apply("color", image, 9, seed_for(-1)))
    assert np.ptp(grey, axis=-1).mean() < 0.2 * np.ptp(values, axis=-1).mean()
    assert pixels(apply("contrast", image, 9, seed_for(-1))).std() < 0.2 * values.std()
    assert pixels(apply("autocontrast", image, 9)).min() == 0


def test_the_small_cutout_is_a_square_of_the_stated_colour(image: Pixels):
    areas = []
    for seed in range(100):
        hit = (pixels(apply("cutout", image, 9, seed)) == (125, 122, 113)).all(axis=-1)
        rows, columns = np.flatnonzero(hit.any(axis=1)), np.flatnonzero(hit.any(axis=0))
        areas.append(hit.sum())
        assert hit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    assert max(areas) == 20 * 20
    assert min(areas) >= 10 * 10  # the centre is always inside


def test_the_large_cutout_has_half_of_each_side_and_any_colour():
    black = np.zeros((60, 90, 3), np.uint8)
    rng = np.random.default_rng(0)
    widths, heights, colours = [], [], []
    for _ in range(600):
        result = pixels(cutout(black.copy(), rng))
        hit = result.any(axis=-1)
        rows, columns = np.flatnonzero(hit.any(axis=1)), np.flatnonzero(hit.any(axis=0))
        assert hit.sum() == len(rows) * len(columns)
        assert len(np.unique(result[hit], axis=0)) == 1
        widths.append(len(columns))
        heights.append(len(rows))
        colours.append(result[hit][0])
    assert (max(widths), max(heights)) == (45, 30)
    assert min(widths) >= 22
    assert min(heights) >= 15
    # Near the border a uniform centre loses up to half of the rectangle: 1/8 of each side on average.
    assert np.mean(widths) == pytest.approx(45 * 7 / 8, rel=0.03)
    assert np.mean(heights) == pytest.approx(30 * 7 / 8, rel=0.03)
    np.testing.assert_allclose(np.mean(colours, axis=0), 127.5, atol=10)
    np.testing.assert_allclose(np.std(colours, axis=0), 255 / 12**0.5, atol=6)
    assert abs(np.corrcoef(np.array(colours).T) - np.eye(3)).max() < 0.15


def test_the_large_cutout_takes_its_fraction_and_rounds_half_up():
    black = np.zeros((31, 33, 3), np.uint8)
    hits = [cutout(black.copy(), np.random.default_rng(seed)).any(axis=-1) for seed in range(200)]
    assert max(hit.any(axis=0).sum() for hit in hits) == 17
    assert max(hit.any(axis=1).sum() for hit in hits) == 16
    assert not cutout(black, np.random.default_rng(0), fraction=0.0).any()


def test_cutout_paints_in_place(image: Pixels):
    before = image.copy()
    assert cutout(image, np.random.default_rng(0)) is image
    assert not np.array_equal(image, before)


def test_a_quarter_of_the_images_is_left_alone(monkeypatch: pytest.MonkeyPatch, image: Pixels):
    monkeypatch.setattr(module, "_COMBINATIONS", [(lambda image, magnitude, rng: image.copy(), 0.0)] * 5)
    rng = np.random.default_rng(0)
    same = np.mean([rand_augment(image, rng) is image for _ in range(4000)])
    assert same == pytest.approx(0.25, abs=0.02)


def test_two_different_combinations_are_drawn_uniformly(monkeypatch: pytest.MonkeyPatch, image: Pixels):
    applied: list[int] = []

    def recorder(index: int):
        return lambda image, magnitude, rng: applied.append(index) or image

    monkeypatch.setattr(module, "PROBABILITY", 1.0)
    monkeypatch.setattr(module, "_COMBINATIONS", [(recorder(index), 0.0) for index in range(5)])
    rng = np.random.default_rng(0)
    for _ in range(4000):
        rand_augment(image, rng)
    pairs = Counter(zip(applied[::2], applied[1::2], strict=True))
    assert set(pairs) == {(one, two) for one in range(5) for two in range(5) if one != two}
    assert all(count == pytest.approx(200, abs=60) for count in pairs.values())


def test_every_operation_takes_part_at_every_magnitude_but_the_first():
    assert len(module._COMBINATIONS) == 15 * 9
    expected = [(op.function, magnitude) for op in OPERATIONS.values() for magnitude in op.magnitudes[1:]]
    assert expected == module._COMBINATIONS


def test_augmenting_repeats_with_the_generator(image: Pixels):
    for seed in range(200):
        one, two = (augment(image.copy(), np.random.default_rng(seed)) for _ in range(2))
        assert (one.shape, one.dtype) == (image.shape, image.dtype)
        assert np.array_equal(one, two)
        assert not np.array_equal(one, image)


def test_augmenting_leaves_the_global_random_state_alone(image: Pixels):
    np.random.seed(0)
    expected = np.random.random()
    np.random.seed(0)
    augment(image, np.random.default_rng(1))
    assert np.random.random() == expected
