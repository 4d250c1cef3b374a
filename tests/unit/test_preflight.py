"""What is refused before a run starts."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from huggingface_hub import constants

from csc.cli.preflight import preflight as check_machine
from csc.config import parse_overrides, resolve
from csc.config.checks import _check_backbone, check_settings
from csc.errors import BadConfig, BadData, BadModel


def check(*items: str) -> None:
    check_settings(resolve("digits", parse_overrides(["init=scratch", *items])))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache of a machine that reaches no hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


def test_every_model_of_timm_passes_with_every_tag():
    for name in [*timm.list_models(), *timm.list_models(include_tags=True), "convnext_tiny_in22ft1k"]:
        _check_backbone(name)


@pytest.mark.parametrize(
    ("item", "kind", "message"),
    [
        ("backbone.name=resnet19", BadConfig, r"timm has no such model; did you mean resnet18"),
        ("backbone.name=resnet18.nobodys", BadConfig, r"timm has no weights 'nobodys'"),
        ("init=weights.pt", BadModel, r"expected a \.safetensors file"),
        ("init=/nowhere/w.safetensors", BadModel, r"no such file"),
    ],
)
def test_what_no_step_could_use_is_refused_in_one_line(item: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=f"^{re.escape(item)}: {message}"):
        check(item)


def test_a_hub_that_does_not_answer_is_noticed_unless_its_weights_are_here(hub: Path):
    with pytest.raises(BadConfig, match=r"^init=hub: http://127\.0\.0\.1:9 does not answer .*; on a machine without"):
        check("init=hub", "backbone.name=resnet18")
    weights = hub / "models--timm--resnet18.a1_in1k" / "snapshots" / "1" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.touch()
    check("init=hub", "backbone.name=resnet18")


def test_no_hub_is_asked_where_it_is_switched_off(hub: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadConfig, match="HF_HUB_OFFLINE is set"):
        check("init=hub", "backbone.name=resnet18")


def test_weights_in_a_file_pass(tmp_path: Path):
    (tmp_path / "w.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # a header, and no tensors
    check(f"init={tmp_path}/w.safetensors")


def test_a_file_of_something_else_is_refused_before_the_first_step(tmp_path: Path):
    (tmp_path / "w.safetensors").write_text("a page of somebody's login")
    with pytest.raises(BadModel, match="not readable as safetensors"):
        check(f"init={tmp_path}/w.safetensors")


def test_it_takes_no_torch():
    code = """
import sys
from csc.config import resolve
from csc.config.checks import check_settings
check_settings(resolve("digits"))
print(*sys.modules)
"""
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in modules


def test_a_run_that_lacks_packages_or_room_is_refused_with_what_to_do(monkeypatch, tmp_path):
    config = resolve("digits", {})
    check_machine(config, tmp_path / "not" / "yet")
    missing = {"torch", "timm", "kfp", "sklearn"}
    find_spec = importlib.util.find_spec
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
        line = "not installed: kfp, torch, timm; run: pip install 'csc-mlcil[pipelines,train]', or [all] for everything"
        with pytest.raises(BadConfig, match=re.escape(line)):
            check_machine(config, tmp_path)
        with pytest.raises(BadConfig, match=r"timm, sklearn; run: pip install 'csc-mlcil\[pipelines,train,data\]'"):
            check_machine(config, tmp_path, makes_digits=True)
        missing -= {"kfp"}
        check_machine(config, tmp_path, in_containers=True)
    usage = shutil.disk_usage(tmp_path)._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BadData, match=r"3 MB of disk are free; make room or choose another --workdir"):
        check_machine(config, tmp_path)
