"""The images' recipes: what they say and what they are made from; `make test-docker` builds and runs them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("cpu", "train")


def lock(name: str) -> set[str]:
    return set(re.findall(r"^(\S+)==", (ROOT / "requirements" / f"{name}.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_names_the_steps_that_run_in_an_image(kind: str):
    wanted = f"base_image={kind.upper()}_IMAGE"
    steps = {path.parent.name for path in (ROOT / "components").glob("*/component.py") if wanted in path.read_text()}
    row = re.search(rf"^\| `csc-{kind}` \| ([^|]+) \|", (ROOT / "images" / "README.md").read_text(), re.MULTILINE)
    assert row is not None
    assert set(row[1].split(", ")) == steps


def test_what_is_copied_is_not_ignored():
    let_in = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    recipe = (ROOT / "images" / "Dockerfile").read_text()
    copied = [line for line in recipe.splitlines() if re.match("COPY (?!--from)", line)]
    assert copied
    for name in " ".join(line.removeprefix("COPY ").rpartition(" ")[0] for line in copied).split():
        assert name in let_in
        assert (ROOT / name).exists()


def test_the_cpu_image_has_what_its_steps_import_and_nothing_large():
    cpu, train, tests = lock("cpu-image"), lock("train-image"), lock("dev")
    assert {"mlflow-skinny", "sqlalchemy", "alembic", "pyarrow", "msgspec", "scikit-learn", "boto3"} <= cpu
    assert not cpu & {"torch", "timm", "torchvision", "scipy", "pandas", "mlflow", "kubernetes"}
    assert {"torch", "timm", "torchvision", "simplejpeg", "mlflow-skinny"} <= train
    assert "kfp" in cpu & train  # without its own requirements
    assert cpu | train <= tests
