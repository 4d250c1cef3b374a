"""What is installed, and from what."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path for path in (ROOT / "requirements").glob("*.txt") if path.stem != "limits")
HASHED = ("dev", "cpu-image", "train-image")  # what is installed from: make setup, the images


@pytest.mark.slow
def test_the_wheel_installs_one_top_level_name_with_everything_below_it(tmp_path):
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack what an earlier wheel left there
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path, ROOT], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"csc", "csc_mlcil"}
    sources = [path for folder in ("csc", "components", "pipelines") for path in (ROOT / folder).rglob("*.py")]
    assert len([name for name in names if name.endswith(".py")]) == len(sources)
    data = [path for folder in ("csc", "pipelines") for path in (ROOT / folder).rglob("*.yaml")]
    assert len([name for name in names if name.endswith(".yaml")]) == len(data) > 30


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_locks_pin_exact_versions_and_name_no_registry(lock):
    lines = lock.read_text().replace(" \\\n    --hash", " --hash").splitlines()
    assert lines
    hashes = r"( --hash=sha256:[0-9a-f]{64})" + ("+" if lock.stem in HASHED else "{0}")
    for line in lines:
        pinned = r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[A-Za-z0-9.+!]+( ; [^-]+)?"
        assert re.fullmatch(pinned + hashes, line), f"{line[:80]}: run 'make hashes'"


def test_all_locks_agree():
    versions = {}
    for lock in LOCKS:
        for name, version in re.findall(r"^(\S+)==(\S+)", lock.read_text(), re.MULTILINE):
            assert versions.setdefault(name, version) == version, f"{lock.name}: {name}"


def test_what_is_installed_is_compared_with_the_hashes():
    recipe, commands = ((ROOT / name).read_text().replace("\\\n", "") for name in ("images/Dockerfile", "Makefile"))
    installs = re.findall(r"pip.* install .*-r .*", recipe) + re.findall(r"pip (?:install|download) .*-r .*", commands)
    assert len(installs) == 4
    assert all("--require-hashes" in line for line in installs)


def test_make_help_lists_every_command():
    shown = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for target in re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}\s+\S", shown, re.MULTILINE), target
