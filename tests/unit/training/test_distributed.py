"""Several processes train and score as one would: same losses, same weights, every image once."""

import contextlib
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from csc.config import resolve
from csc.data.order import epoch_batches
from csc.data.views import View
from csc.distributed.group import Group, join_group, no_sync, one_of_several
from csc.distributed.launch import _handled_signals, main, processes_for, raise_error, run_in_processes
from csc.errors import BadConfig, BadData
from csc.methods import build_head
from csc.methods.losses import asymmetric_loss, binary_cross_entropy, max_entropy
from csc.nets.backbone import build_backbone
from csc.nets.network import Network
from csc.replay.memory import Memory
from csc.replay.update import update
from csc.scenario import Task
from csc.training.checkpoint import EpochLog
from csc.training.inference import confidences
from tests.faults.starter import Forked
from tests.unit.training.bench import Bench, settings, without_speed
from tests.unit.training.ranks import dies_in_one, forked_ranks, refused_by_one

pytestmark = pytest.mark.xdist_group("distributed")  # launches are shared by many tests
ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
CLASSES = 5
CASES: dict[str, dict[str, Any]] = {
    "an uneven last batch": {"rows": 9, "batch": 5},  # of 4: of three ranks one has two of them
    "fewer rows than ranks": {"rows": 5, "batch": 3, "backbone": "test_byobnet"},  # of 2, for three ranks
    "accumulated batches": {"rows": 8, "batch": 3, "accumulate": 2},
    "channels last and unused parameters": {"rows": 6, "batch": 4, "channels_last": True, "unused": True},
    "a frozen backbone": {"rows": 7, "batch": 4, "frozen": True},
    "clipped gradients": {"rows": 7, "batch": 4, "clip": 0.1},
}


def tiny_network(backbone: str) -> Network:
    config = resolve("digits", {"head": "ci_gcn", "backbone": {"name": backbone}, "cigcn": {"width": 8}})
    torch.manual_seed(0)
    net = build_backbone(config.backbone)
    return Network(net, build_head(config, net.channels, (CLASSES,)), (0.5,) * 3, (0.25,) * 3).double()


def some_data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, (torch.rand(rows, CLASSES, generator=generator) < 0.4).double()


def train(
    group: Group,
    rows: int,
    batch: int,
    accumulate: int = 1,
    backbone: str = "test_resnet",
    *,
    channels_last: bool = False,
    unused: bool = False,
    frozen: bool = False,
    clip: float = 0.0,
) -> dict[str, Any]:
    """Two epochs in double precision, with a loss of a mean, a sum and a penalty; return losses and final state."""
    network, (images, targets) = tiny_network(backbone), some_data(rows)
    network.spare = nn.Linear(2, 2).double() if unused else nn.Identity()
    network.backbone.requires_grad_(not frozen)
    group.sync_batch_norms(network)
    if channels_last:
        network.to(memory_format=torch.channels_last)
    learner = group.learner(network.train())
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.02, momentum=0.9)
    losses = []
    for epoch in range(2):
        batches = epoch_batches(rows, batch, seed=3, epoch=epoch)
        for index, whole in enumerate(batches, start=1):
            part = group.shard(whole)
            last = index % accumulate == 0 or index == len(batches)
            with no_sync(learner, unless=last):
                logits = group.gather(learner(images[part]), len(whole))
                labels = group.gather(targets[part], len(whole))
                assert torch.equal(labels, targets[whole])
                loss = binary_cross_entropy(logits, labels) + 0.02 * asymmetric_loss(logits, labels)
                loss = loss - 0.05 * max_entropy(logits) + 0.001 * network.head.output.weight.square().sum()
                (loss / accumulate).backward()
            losses.append(loss.item())
            if last:
                if clip:
                    assert nn.utils.clip_grad_norm_(network.parameters(), clip) > clip
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return {"losses": losses, "state": {name: value.clone() for name, value in network.state_dict().items()}}


def score(group: Group, rows: int) -> list[list[float]]:
    """Confidences of all rows, from parts of them."""
    network, (images, _) = tiny_network("test_resnet").eval(), some_data(rows)
    with torch.inference_mode():
        return group.gather(network(images[group.shard(range(rows))]), rows).tolist()


def all_of_it(folder: str) -> dict[str, Any]:
    """What each process of the launches below does; the first leaves the trained weights in the folder."""
    with join_group() as group:
        trained = {name: train(group, **case) for name, case in CASES.items()}
        for name, result in trained.items():
            state = {key: value.contiguous() for key, value in result.pop("state").items()}
            if group.is_main:
                save_file(state, Path(folder) / f"{name}.safetensors")
        scored = {str(rows): score(group, rows) for rows in (1, 2, 7)}
        agreed = [group.agree(5), group.agree(group.rank)]
    return {"world": group.world, "trained": trained, "scored": scored, "agreed": agreed, "folder": folder}


@pytest.fixture(autouse=True)
def _children_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return all_of_it(str(tmp_path_factory.mktemp("alone")))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three processes; the trainer's own tests below have two."""
    with forked_ranks():
        made = run_in_processes(all_of_it, {"folder": str(tmp_path_factory.mktemp("several"))}, 3)
    assert made["world"] == 3
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_one_process(alone: dict[str, Any], several: dict[str, Any], case: str):
    assert several["trained"][case]["losses"] == pytest.approx(alone["trained"][case]["losses"], rel=1e-10)
    one, many = (load_file(Path(made["folder"]) / f"{case}.safetensors") for made in (alone, several))
    assert many.keys() == one.keys()
    torch.testing.assert_close(many, one, atol=1e-10, rtol=1e-8)
    fresh = tiny_network(CASES[case].get("backbone", "test_resnet")).state_dict()
    assert all((one[name] != fresh[name]).any() for name in fresh if name.startswith("head.") and fresh[name].ndim > 1)


@pytest.mark.slow
def test_every_image_is_scored_once_and_in_order(alone: dict[str, Any], several: dict[str, Any]):
    for rows, scores in alone["scored"].items():
        assert len(scores) == int(rows)
        torch.testing.assert_close(torch.tensor(several["scored"][rows]), torch.tensor(scores), atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_ranks_notice_when_they_disagree(several: dict[str, Any]):
    assert several["agreed"] == [True, False]


OVERRIDES = ("method=csc", "train.epochs=2", "train.batch_size=7", "train.accumulate=2", "input.augment=true")


class Stopped(Exception):
    """A trainer that did not come to its end."""


@dataclass(frozen=True)
class Case:
    """A training of the second task: its settings, and how far its numbers in two processes may be off."""

    method: str = "csc"
    more: tuple[str, ...] = ()
    exemplars: int = 0  # in the memory
    stop_after: int = -1  # the epoch after which one process stopped before two went on
    tolerance: float = 1e-3


TRAININGS = {
    "from the start": Case(tolerance=1e-4),
    "from a checkpoint": Case(stop_after=0, tolerance=1e-4),
    "in bfloat16, with clipped gradients": Case(more=("train.amp=bf16", "train.clip=0.05"), tolerance=2e-2),
    "derpp": Case("derpp", exemplars=1),
    "csc-r": Case("csc-r", exemplars=5),
    "krt-r": Case("krt-r", exemplars=5),
    "podnet": Case("podnet", exemplars=3),
}


def second_task(folder: Path, case: Case, group: Group, stop_after: int = -1) -> dict[str, Any]:
    """Train the second task with the first's model as teacher, on what the checkpoint has left; score the result."""

    def stop(epoch: int, log: EpochLog) -> None:
        if epoch == stop_after:
            raise Stopped

    config, view = settings(*OVERRIDES, f"method={case.method}", *case.more), View.read(str(folder / "view.parquet"))
    memory = Memory.read(folder / "memory.parquet") if case.exemplars else None
    trainer = Bench({2: view}, folder).second(config, group=group, on_epoch=stop, memory=memory)
    log = without_speed(trainer.run())
    scores = [batch for _, batch in confidences(trainer.network, view, config, group=group)]
    return {"log": log, "scores": torch.cat(scores).tolist()}


def all_trainings(folder: str) -> dict[str, Any]:
    """What each process of the launch below does."""
    with join_group() as group:
        return {name: second_task(Path(folder) / name, case, group) for name, case in TRAININGS.items()}


@pytest.fixture(scope="module")
def trainings(
    views: dict[int, View], tasks: tuple[Task, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trainings in one process, and in one launch of two."""
    wanted = msgspec.structs.replace(settings("method=er").memory, per_class=2)
    said = np.ones((len(views[1]), len(tasks[0].seen)), np.float32)
    kept = update(
        Memory.empty(views[1].fingerprint),
        views[1],
        tasks[0],
        wanted,
        seed=0,
        features=lambda: np.zeros((0, 0)),
        logits=lambda rows: said[: len(rows)],
    )
    alone, several = (tmp_path_factory.mktemp(name) for name in ("alone", "several"))
    for name, case in TRAININGS.items():
        for folder in (alone / name, several / name):
            folder.mkdir()
            views[2].write(folder / "view.parquet")
            if case.exemplars:
                memory = kept.take(np.arange(case.exemplars)).extended_to(views[2], tasks[1], wanted.labels)
                memory.write(folder / "memory.parquet")
        if case.stop_after >= 0:
            with pytest.raises(Stopped), join_group() as group:
                second_task(several / name, case, group, case.stop_after)
    with forked_ranks():
        return all_trainings(str(alone)), run_in_processes(all_trainings, {"folder": str(several)}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_the_trainer_learns_the_same_in_two_processes(trainings: tuple[dict[str, Any], dict[str, Any]], name: str):
    one, two = (made[name] for made in trainings)
    if TRAININGS[name].method == "csc":
        assert [epoch.keys() for epoch in two["log"]] == [{"ce", "kd", "H", "loss"}] * 2
    tolerance = TRAININGS[name].tolerance
    for mine, alone in zip(two["log"], one["log"], strict=True):
        assert mine == pytest.approx(alone, rel=tolerance)
    # Scores, not weights: Adam makes whole steps of gradients that are rounding errors, on weights without effect.
    torch.testing.assert_close(torch.tensor(two["scores"]), torch.tensor(one["scores"]), atol=tolerance, rtol=tolerance)


def test_a_process_alone_is_a_group_of_one():
    with join_group() as me:
        assert (me.rank, me.world, me.is_main, me.agree(3)) == (0, 1, True, True)
        module, logits = nn.BatchNorm1d(3), torch.rand(4, 3)
        me.sync_batch_norms(module)
        assert me.shard([4, 2, 7]) == [4, 2, 7]
        assert me.gather(logits, 4) is logits
        assert me.learner(module) is module
        with no_sync(module, unless=False):
            assert type(module) is nn.BatchNorm1d
    assert not dist.is_initialized()


@given(rows=st.lists(st.integers()), world=st.integers(1, 9))
def test_rows_are_dealt_out_without_loss_or_duplicate(rows: list[int], world: int):
    parts = [Group(rank, world, CPU).shard(rows) for rank in range(world)]
    assert [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)] == rows
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("gpus", "wanted", "processes"), [(0, "auto", 1), (1, "auto", 1), (4, "auto", 4), (0, 3, 3), (4, 2, 2), (4, 4, 4)]
)
def test_processes_are_as_many_as_gpus_unless_told(
    monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: Any, processes: int
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert processes_for(wanted) == processes
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert one_of_several()
    assert processes_for(wanted) == 1


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadConfig, match=r"train\.processes=3: each process needs a GPU of its own.* shows 2"):
        processes_for(3)
    assert processes_for(3, exactly=False) == 2  # scoring goes as well with fewer
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadConfig, match=r"train\.processes=3"), join_group():
        pass


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A real process group that has only this process in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (4, 3)),
        (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 2, 5)),
        (lambda: nn.BatchNorm2d(3, affine=False), (2, 3, 2, 2)),
        (lambda: BatchNormAct2d(3, act_layer=nn.PReLU), (4, 3, 2, 5)),
    ],
)
def test_the_batch_norm_of_the_cpu_is_batch_norm(layer: Any, shape: tuple[int, ...]):
    plain, shared = nn.Sequential(layer()), nn.Sequential(layer())
    names = list(shared.state_dict())
    Group(0, 2, CPU).sync_batch_norms(shared)
    assert type(shared[0]) is not type(plain[0])
    assert list(shared.state_dict()) == names
    for _ in range(2):
        x = torch.randn(shape)
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        outputs = [plain(inputs[0]), shared(inputs[1])]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            (output * torch.arange(output.numel()).view(shape)).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shared.state_dict(), plain.state_dict())
    for parameters in zip(plain.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(*(parameter.grad for parameter in parameters), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shared.eval()(x), plain.eval()(x))


def test_gpus_get_the_batch_norm_of_torch_under_the_same_names():
    network = tiny_network("test_byobnet").float()
    names, parameters = list(network.state_dict()), list(network.parameters())
    Group(0, 2, torch.device("cuda")).sync_batch_norms(network)
    layers = [layer for layer in network.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    assert len(layers) > 1
    assert all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    for rows, kind in ((0, torch.float32), (2, torch.bfloat16)):  # no rows are counted in the type that counts come in
        assert layers[0].eval()(torch.rand(rows, layers[0].num_features, 4, 4).bfloat16()).dtype is kind
    assert list(network.state_dict()) == names
    assert all(mine is given for mine, given in zip(network.parameters(), parameters, strict=True))


@pytest.mark.slow
def test_an_error_of_one_process_is_the_error_of_all(capfd: pytest.CaptureFixture[str]):
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(BadData) as caught:
        run_in_processes(refused_by_one, {"path": "/nowhere"}, 2)
    assert str(caught.value) == "/nowhere: no such file"
    assert capfd.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ


@pytest.mark.parametrize(("how", "end"), [("exit", "with exit code 7"), ("killed", "by SIGKILL")])
def test_a_crash_of_one_process_is_reported_by_its_number(how: str, end: str):
    with forked_ranks(), pytest.raises(RuntimeError, match=f"^dies_in_one: process 2 of 2 ended {end}"):
        run_in_processes(dies_in_one, {"how": how}, 2)


RANK = """
import os, time

def wait():
    os.write(1, b"%d\\n" % os.getpid())  # at once: two ranks share the pipe
    time.sleep(300)
"""
LAUNCHER = """
import contextlib, os, signal, sys
from csc.distributed.launch import run_in_processes
from rank import wait
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

def monitor(agent, group, monitor=LocalElasticAgent._monitor_workers):
    LocalElasticAgent._monitor_workers = monitor
    os.write(1, b"0\\n")  # all ranks are started
    return monitor(agent, group)

LocalElasticAgent._monitor_workers = monitor

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were told to ignore
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "forked":
    from tests.unit.training.ranks import forked_ranks
else:
    forked_ranks = contextlib.nullcontext
try:
    with forked_ranks():
        run_in_processes(wait, {}, 2)
except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
"""


@pytest.fixture
def launcher(tmp_path: Path, how: signal.Signals) -> Iterator[Forked]:
    """A process that waits for two others; its temporary files are in `temp`.

    Only a launcher that is killed cannot end its ranks itself: those are started as they are without a test, because
    torch asks the kernel to end forks too. A signal in the midst of a fork could be lost: what it raises there, in a
    hook of `os.fork`, Python ignores.
    """
    (tmp_path / "rank.py").write_text(RANK)
    ranks = "started" if how == signal.SIGKILL else "forked"
    (tmp_path / "temp").mkdir()
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path / "temp")}
    words = [sys.executable, str(tmp_path / "launcher.py"), ranks]
    process = Forked(words, {**os.environ, **variables}, str(tmp_path / "errors"))
    with process.stdout:
        numbers = {int(process.stdout.readline()) for _ in range(3)} - {0}
        yield process
        for number in (process.pid, *numbers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGINT, 128 + signal.SIGINT),  # by KeyboardInterrupt
    ],
    ids=["SIGKILL", "SIGTERM", "SIGINT"],
)
def test_ranks_end_with_their_launcher(launcher: Forked, tmp_path: Path, how: signal.Signals, code: int):
    os.kill(launcher.pid, how)
    assert select.select([launcher.stdout], [], [], 10)[0]  # the last one that could write to its output is gone
    assert launcher.stdout.read() == ""
    assert launcher.wait() == code
    assert how == signal.SIGKILL or list((tmp_path / "temp").iterdir()) == []


def test_a_rank_whose_launcher_is_already_gone_does_nothing(tmp_path: Path):
    (tmp_path / "arguments.json").write_text("{}")
    for launcher, ends in ((os.getpid(), (0, True)), (os.getppid(), (1, False))):
        rank = multiprocessing.get_context("fork").Process(
            target=lambda launcher: sys.exit(main("os:getpid", tmp_path / "arguments.json", launcher)), args=(launcher,)
        )
        rank.start()
        rank.join()
        assert (rank.exitcode, (tmp_path / "result.json").is_file()) == ends
        (tmp_path / "result.json").unlink(missing_ok=True)


def test_a_hangup_that_nohup_holds_off_does_not_stop_the_ranks():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert _handled_signals() == [signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert _handled_signals() == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_that_nobody_left_is_not_raised(tmp_path: Path):
    raise_error(tmp_path / "arguments.json")
