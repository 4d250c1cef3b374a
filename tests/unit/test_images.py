"""The images' recipes: what they say and what they are made from; `make test-docker` builds and runs them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("cpu", "train")


def recipe(kind: str) -> str:
    return (ROOT / "images" / kind / "Dockerfile").read_text()


def lock(name: str) -> set[str]:
    return {line.partition("==")[0] for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_line_names_the_steps_that_run_in_the_image(kind: str):
    wanted = f"base_image={kind.upper()}_IMAGE"
    components = (ROOT / "components").glob("*/component.py")
    steps = {path.parent.name for path in components if wanted in path.read_text()}
    named = set(re.findall(r"\w+", recipe(kind).splitlines()[0].partition(":")[2].partition(".")[0]))
    assert named | {"train_on_nodes"} == steps | {"train_on_nodes"}


def test_the_recipes_differ_only_in_what_is_installed_and_said():
    cpu, train = (recipe(kind).splitlines() for kind in KINDS)
    different = set(cpu) ^ set(train)
    assert all(re.search(r"^# The steps|-image\.txt|image\.(title|desc)|USER=csc|NVIDIA", line) for line in different)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied_is_not_ignored(kind: str):
    let_in = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [line for line in recipe(kind).splitlines() if re.match("COPY (?!--from)", line)]
    assert copied
    for name in " ".join(line.removeprefix("COPY ").rpartition(" ")[0] for line in copied).split():
        assert name in let_in
        assert (ROOT / name).exists()


def test_the_light_image_has_what_its_steps_import_and_nothing_heavy():
    light, heavy, tests = lock("cpu-image"), lock("train-image"), lock("dev")
    assert {"mlflow-skinny", "sqlalchemy", "alembic", "pyarrow", "msgspec", "scikit-learn", "boto3"} <= light
    assert not light & {"torch", "timm", "torchvision", "scipy", "pandas", "mlflow", "kfp"}
    assert {"torch", "timm", "torchvision", "simplejpeg", "mlflow-skinny"} <= heavy
    assert light | heavy <= tests
