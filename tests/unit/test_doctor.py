"""`csc doctor`: what it finds, what it advises, and what it must not tell."""

import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest

from csc.cli import doctor, main
from csc.cli.doctor import checks
from csc.data.ingest.coco import ingest_coco
from tests.builders import make_coco


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine whose folders are the test's own and that has no tracking server."""
    for name in ("MLFLOW_TRACKING_URI", "XDG_CACHE_HOME", "CSC_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))


def found(data: str | None = None) -> dict[str, doctor.Check]:
    return {check.name: check for check in checks(data)}


def torch_with(monkeypatch: pytest.MonkeyPatch, *gpus: str) -> None:
    """A torch that sees these GPUs."""
    cuda = types.SimpleNamespace(
        is_available=lambda: bool(gpus), device_count=lambda: len(gpus), get_device_name=lambda number: gpus[number]
    )
    fake = types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(cuda="13.2"))
    monkeypatch.setitem(sys.modules, "torch", fake)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """An environment that lacks packages."""
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: "" if name in names else real(name))
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_fine_machine_is_reported_line_by_line(monkeypatch, capsys):
    torch_with(monkeypatch, "A100", "A100")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["csc", "python", "torch", "timm", "mlflow", "kfp"]
    assert any(line.startswith("device    ok       A100, A100 · CUDA 13.2") for line in lines)
    assert [line.split()[:2] for line in lines[-4:-1]] == [["run", "ok"], ["gpu", "ok"], ["submit", "ok"]]
    assert lines[-1] == "everything needed is fine"


def test_an_image_without_torch_has_not_failed_but_is_told_what_it_is_not_for(monkeypatch, capsys):
    without(monkeypatch, "torch", "timm", "mlflow")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "run       missing  csc run needs what is not installed: torch, timm; run: pip install 'csc-mlcil[tr" in said
    assert "submit    ok" in said
    assert said.endswith("nothing failed, but not possible here: csc run, training on a GPU\n")
    assert "torch     missing  not in this image; embed, train and evaluate need it" in said
    assert "shm" not in said
    assert found()["device"].status == "ok"
    assert found()["mlflow"].status == "ok"  # the client alone, under its own name


@pytest.mark.parametrize(("attached", "status"), [(False, "missing"), (True, "failed")])
def test_no_gpu_is_no_failure_unless_there_is_one(monkeypatch, attached, status):
    torch_with(monkeypatch)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: attached if str(path) == "/dev/nvidiactl" else exists(path))
    device = found()["device"]
    assert device.status == status
    assert ("must support CUDA 13.2" in device.text) == attached


def test_a_machine_without_a_gpu_trains_on_the_cpu(monkeypatch, capsys):
    torch_with(monkeypatch)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "run       ok       csc run is possible here" in said
    assert "gpu       missing  training on a GPU needs one; csc run trains on the CPU" in said
    assert "everything" not in said


def test_a_torch_that_cannot_be_loaded_is_a_failure(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert found()["device"].status == "failed"
    assert "libcudart.so.13" in found()["device"].text


@pytest.mark.parametrize(("megabytes", "status"), [(64, "missing"), (4096, "ok")])
def test_little_shared_memory_is_noticed(monkeypatch, megabytes, status):
    torch_with(monkeypatch)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(megabytes << 20, 0, 1 << 30))
    shared = found()["shm"]
    assert shared.status == status
    assert ("mount a memory volume at /dev/shm" in shared.text) == (status == "missing")


@pytest.mark.parametrize(
    ("variable", "name"), [("TMPDIR", "temp"), ("HOME", "home"), ("CSC_CACHE", "cache"), ("XDG_CACHE_HOME", "cache")]
)
def test_a_folder_that_cannot_be_written_fails_with_what_to_set(monkeypatch, variable, name):
    monkeypatch.setenv(variable, "/proc/nowhere")
    check = found()[name]
    assert check.status == "failed"
    assert "to a folder that can be written" in check.text


def test_folders_that_are_made_when_needed_are_fine(monkeypatch, tmp_path):
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "not" / "yet"))
    assert found()["cache"].status == "ok"
    assert not list(tmp_path.iterdir())


def test_tracking_that_nobody_set_is_missing_and_a_new_database_is_fine(monkeypatch, tmp_path):
    assert found()["tracking"].status == "missing"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert found()["tracking"].status == "ok"
    assert not list(tmp_path.iterdir())  # looking makes nothing
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/mlflow.db")
    assert found()["tracking"].status == "failed"
    assert "MLFLOW_TRACKING_URI" in found()["tracking"].text


def test_a_server_that_does_not_answer_fails_without_showing_the_password(monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:hidden@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main(["doctor"]) == 1
    said = capsys.readouterr()
    assert "tracking  failed   MLflow at http://127.0.0.1:9" in said.out
    assert said.out.endswith("1 failed\n")
    assert "hidden" not in said.out + said.err


def test_tracking_without_its_client_fails(monkeypatch):
    without(monkeypatch, "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert found()["tracking"].status == "failed"


def test_data_are_looked_at_when_asked_for(tmp_path):
    data = str(tmp_path / "set")
    missing = found(data)["data"]
    assert (missing.status, "make one with 'csc ingest'" in missing.text) == ("failed", True)
    ingest_coco(make_coco(tmp_path / "raw"), tmp_path / "set", "animals")
    assert found(data)["data"].status == "ok"
    assert "animals, 4 classes" in found(data)["data"].text
    assert found("ftp://host/x")["data"].status == "failed"
