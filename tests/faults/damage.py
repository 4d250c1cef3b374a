"""Disks that are full, and files with a bit flipped."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.faults.commands import Lost, Moment
from tests.faults.judge import check_whole, judge
from tests.faults.lab import Lab

MIB = 1 << 20
SIZES = (0.3, 0.8, 1.5, 2.5, 4, 5.5)  # MiB that are left on the disk; a whole run takes some more than six


def fill_disk(lab: Lab, rng: Random) -> None:
    """A disk that is full in the middle of the work, at each of six sizes; more room, and the command goes on."""
    for size in SIZES:
        folder = lab.folder / f"{size}"
        folder.mkdir()
        with disk(folder) as resize:
            workspace = lab.run(folder=folder)
            room = int(size * MIB * rng.uniform(0.9, 1.1))

            def fill(_: object, room: int = room) -> None:
                resize(room)

            running = workspace.disturb(Moment(line="^ingest$"), rng, fill)
            lab.tried("disk full")
            if running.process.returncode != 2 or "Traceback" in running.output:
                raise Lost(f"{room} bytes: exit code {running.process.returncode}: {running.end_of_output}")
            check_whole(workspace.work)
            resize(900 * MIB)
            workspace.finish()
            judge(workspace, lab.undisturbed())
            lab.survived()


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Callable[[int], None]]:
    """A disk of its own at a folder, in memory, with room for what `csc run` asks for; yields what resizes it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    words = ["mount", "-t", "tmpfs", "-o", f"size={900 * MIB}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk here (CAP_SYS_ADMIN)")

    def resize(room: int) -> None:
        used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
        words = ["mount", "-o", f"remount,size={used + room}", str(folder)]
        subprocess.run(words, check=True, capture_output=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# Files of a finished run, by what they are: those that a step can make again, and those that are refused by name.
MADE_AGAIN = {
    "model weights": "work/pipeline/*/*/train*/model/model.safetensors",
    "model card": "work/pipeline/*/*/train*/model/model.json",
    "registered weights": "work/mlflow-artifacts/models/*/artifacts/data/model/model.safetensors",
    "split": "work/pipeline/*/*/split-labels*/split",
    "view": "work/pipeline/*/*/build-dataset*/*_view",
    "scores": "work/pipeline/*/*/evaluate*/scores/scores.parquet",
    "metrics": "work/pipeline/*/*/evaluate*/metrics",
    "record of a version": "work/pipeline/*/*/register*/registered",
    "cache entry": "work/cache/*/*/*.json",
    "digests of a cache entry": "work/cache/*/*/*.sha256",
}
REFUSED = {
    "image shard": "set/images/*.arrow",
    "labels": "set/labels.parquet",
    "data set card": "set/dataset.json",
    "database": "work/mlflow.db",
}


def flip_bits(lab: Lab, rng: Random) -> None:
    """A bit flipped in each kind of file of a finished run: what can be made again is, the rest is refused by name."""
    shutil.copytree(lab.data, lab.folder / "set")
    workspace = lab.run(data=lab.folder / "set")
    workspace.finish()
    for kind in lab.chosen(MADE_AGAIN):
        flip(rng.choice(sorted(lab.folder.glob(MADE_AGAIN[kind]))), rng)
        lab.tried(f"bit flipped: {kind}")
    workspace.finish()
    # What was damaged is still there, with what was made again next to it.
    judge(workspace, lab.undisturbed(), whole=False)
    lab.survived()
    for kind in lab.chosen(REFUSED):
        again = workspace if kind == "database" else lab.run(data=lab.folder / "set", folder=lab.folder / kind)
        file = rng.choice(sorted(lab.folder.glob(REFUSED[kind])))
        before = file.read_bytes()
        flip(file, rng, heads=kind == "database")
        lab.tried(f"bit flipped: {kind}")
        with again.start() as running:
            code = running.wait()
        if code == 0:  # the bit was one that nobody reads
            judge(again, lab.undisturbed(), whole=False)
        elif code != 2 or "Traceback" in running.output or file.name not in running.output:
            raise Lost(f"{file}: exit code {code}: {running.end_of_output}")
        file.write_bytes(before)
        lab.survived()


def flip(file: Path, rng: Random, *, heads: bool = False) -> None:
    """Flip a bit of a file; of a database in the head of a page, for SQLite keeps no digest of what the cells hold."""
    content = bytearray(file.read_bytes())
    offset = rng.randrange(len(content))
    if heads:
        offset = offset // 4096 * 4096 + rng.randrange(8)
    content[offset] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def flip_checkpoint(lab: Lab, rng: Random) -> None:
    """A bit flipped in the checkpoint of a run that was told to end: the task begins again."""
    workspace = lab.run()
    workspace.disturb(Moment(line=r"task 1/2 · epoch 2/3", within=0.2), rng, lambda running: running.terminate())
    (checkpoint,) = workspace.work.glob("checkpoints/*/*/*.safetensors")
    flip(checkpoint, rng)
    lab.tried("bit flipped: checkpoint")
    if "damaged checkpoint" not in workspace.finish():
        raise Lost(f"{checkpoint}: the damage was not noticed")
    judge(workspace, lab.undisturbed())


def flip_maps(lab: Lab, rng: Random) -> None:
    """A bit flipped in a shard of feature maps, and in the backbone that is kept with them: both are made again."""
    data = lab.folder / "data"
    data.mkdir()
    for item in lab.data.iterdir():
        if item.name != "features":
            (data / item.name).symlink_to(item)
    settings = ("backbone.frozen=true", "features.views=1", "input.augment=false")
    undisturbed = lab.undisturbed("maps", lambda: lab.run(*settings, data=data))
    for kind, pattern in (("feature maps", "view-00/*.arrow"), ("backbone of the maps", "backbone.safetensors")):
        file = rng.choice(sorted(data.glob(f"features/*/{pattern}")))
        before = file.read_bytes()
        flip(file, rng)
        lab.tried(f"bit flipped: {kind}")
        again = lab.run(*settings, data=data, folder=lab.folder / kind)
        again.finish()
        if file.read_bytes() != before:
            raise Lost(f"{file}: not made again as it was")
        judge(again, undisturbed)
        lab.survived()
