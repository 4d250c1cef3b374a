"""docs/cluster.md says what is so: its commands parse, its files are there, its numbers and messages are the code's."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from csc.cli import _parser
from csc.pipelines.profile import read_profile
from csc.tracking import retry as patience

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/cluster.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^\$ csc (.*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def sizing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizing", ROOT / "docs/sizing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_estimates_are_what_the_script_computes(sizing: ModuleType):
    assert sizing.table() in PAGE
    assert f"| GPU memory | {sizing.memory():.1f} GB |" in PAGE
    assert f"{sizing.cores('A100'):.1f} for an A100, {sizing.cores('T4'):.1f} for a T4" in PAGE


def test_more_classes_at_once_mean_more_images_in_a_task(sizing: ModuleType):
    tasks, test = sizing.images("coco-b40c10")
    assert tasks[0] > 2 * tasks[1] > 2 * 1000
    assert tasks[0] < 82_081
    assert test == 40_137


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one(command: str):
    _parser().parse_args(shlex.split(command))


def test_the_commands_are_found():
    assert {command.split()[0] for command in COMMANDS} >= {"submit", "ingest", "doctor", "compile", "predict"}


def test_every_file_and_manifest_is_there():
    named = set(re.findall(r"\b(?:deploy|docs|tests|images|pipelines)/[\w./-]+\.\w+", PAGE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    manifests = {path.name for path in (ROOT / "deploy").glob("*.yaml")} - {"kustomization.yaml"}
    assert manifests <= set(re.findall(r"[\w.]+\.yaml", PAGE))


def test_the_cache_is_a_disk_of_the_pod_and_the_pages_say_so():
    profile = read_profile("kubeflow")
    cache, volume = profile.env["CSC_CACHE"], profile.storage.volume.path
    assert not Path(cache).is_relative_to(volume)  # others may drop there what is mapped here
    assert f"`CSC_CACHE`: in the\nprofile `{cache}`, on the pod's own disk" in PAGE
    assert f"`storage.data: {volume}/data/{{dataset}}`" in PAGE
    assert "On a cluster each pod has its own disk" in " ".join((ROOT / "README.md").read_text().split())


def test_the_manifest_in_the_page_is_valid():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate, which has the API's schemas")
    (text,) = [text for kind, text in BLOCKS if kind == "yaml"]
    validate.validate(yaml.safe_load(text), "1.32", strict=True)


@pytest.mark.parametrize("meaning", patience._UNANSWERED.values(), ids=lambda meaning: meaning.split(";")[0][:30])
def test_what_a_bad_server_looks_like_is_explained(meaning: str):
    begin = meaning.split("{")[0].split("_USERNAME")[0].strip("( ")
    assert begin in PAGE
