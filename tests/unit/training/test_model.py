"""Model folders."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from csc.data.views import View
from csc.errors import BadData, BadModel
from csc.model import fingerprint, load_network, read_card
from csc.scenario import Task
from csc.storage import sha256_file
from csc.storage.tensors import save_tensors
from csc.training.start import start_task
from tests.unit.training.bench import (
    LINEAR,
    NEW,
    SCENARIO,
    Bench,
    card_of,
    changed,
    fresh_network,
    one_line,
    saved_model,
    settings,
    state_of,
    truncate,
)


@pytest.fixture
def model(tmp_path: Path, tasks: tuple[Task, ...]) -> Path:
    return saved_model(tmp_path / "model", settings(), tasks[0])


def test_weights_that_do_not_fit_on_the_disk_are_one_line_and_leave_nothing(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk, a limit shows while writing
    try:
        with pytest.raises(BadData) as refusal:
            save_tensors({"weight": torch.zeros(1 << 16)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert one_line(refusal)
    assert str(refusal.value).startswith(f"cannot write {tmp_path}/model.safetensors: File too large; ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "item", ["cigcn.correlation=G->S", "cigcn.correlation=Z->S", "cigcn.plain=true", LINEAR, "train.channels_last=on"]
)
def test_a_saved_model_comes_back_with_identical_logits(bench: Bench, tasks: tuple[Task, ...], item: str):
    config = settings(item, "train.epochs=1")
    trainer = bench.trainer(config)
    trainer.run()  # batch-norm statistics and, with Z, the matrix are no longer the default
    folder = saved_model(bench.folder / "model", config, tasks[0], trainer.network)
    network, card = load_network(folder)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(network(images), trainer.network.to(memory_format=torch.contiguous_format).eval()(images))
    assert not network.training
    assert card == card_of(config, tasks[0])
    assert card.resolved_config() == config


def test_a_model_folder_holds_no_pickle(model: Path):
    assert sorted(path.name for path in model.iterdir()) == ["model.json", "model.safetensors"]
    assert not (model / "model.safetensors").read_bytes().startswith((b"PK", b"\x80"))


def test_all_files_of_a_model_can_be_read_by_the_same_people(model: Path):
    assert {path.stat().st_mode & 0o777 for path in model.iterdir()} == {0o644}


def test_a_model_of_an_earlier_version_has_no_digests_and_is_loaded(model: Path):
    edit_card(lambda card: card.pop("files"))(model)
    save_file(other_weights(model), model / "model.safetensors")
    load_network(model)


def test_equal_models_have_equal_fingerprints_and_others_not(model: Path, tmp_path: Path, tasks: tuple[Task, ...]):
    twin = saved_model(tmp_path / "twin", settings(), tasks[0])
    other = saved_model(tmp_path / "other", settings(), tasks[0], fresh_network(settings(), seed=1))
    assert fingerprint(model) == fingerprint(twin) != fingerprint(other)


def edit_card(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "model.json").read_text())
        change(content)
        (folder / "model.json").write_text(json.dumps(content))

    return edit


def other_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}


NAN = float("nan")
MODEL_DAMAGES = {
    "no card": (lambda folder: (folder / "model.json").unlink(), r"model\.json"),
    "card not JSON": (lambda folder: (folder / "model.json").write_text("{"), r"model\.json"),
    "card not an object": (lambda folder: (folder / "model.json").write_text("[1]"), r"model\.json"),
    "card without classes": (edit_card(lambda card: card.pop("classes")), r"model\.json"),
    "card with a stranger": (edit_card(lambda card: card.update(colour="red")), r"model\.json"),
    "other format": (edit_card(lambda card: card.update(format=2)), "format 2.*reads format 1"),
    "no format": (edit_card(lambda card: card.pop("format")), r"model\.json.*format"),
    "unknown scenario": (edit_card(lambda card: card.update(scenario="digits")), r"model\.json.*scenario 'digits'"),
    "classes of another task": (edit_card(lambda card: card.update(task=2)), "task 2 of digits-b0c5 cannot have"),
    "a class twice": (edit_card(lambda card: card["classes"].__setitem__(0, "1")), r"model\.json.*cannot have"),
    "new classes of others": (edit_card(lambda card: card.update(new=["x"])), "new classes are not the last"),
    "no settings": (edit_card(lambda card: card.update(config={})), r"model\.safetensors|model\.json"),
    "settings of nothing": (edit_card(lambda card: card.update(config=3)), r"model\.json.*object"),
    "a temperature of nothing": (edit_card(lambda card: card.update(calibration={"temperature": 0})), "calibration"),
    "text for thresholds": (edit_card(lambda card: card.update(calibration={"thresholds": "0.5"})), "calibration"),
    "no deviation": (edit_card(lambda card: card.update(std=[0, 0, 0])), "mean and std"),
    "text for a number": (edit_card(lambda card: card.update(mean="abc")), r"model\.json.*mean"),
    "a number that is none": (edit_card(lambda card: card.update(mean=[NAN] * 3)), r"model\.json"),
    "deep nesting": (lambda folder: (folder / "model.json").write_text("[" * 100_000), r"model\.json"),
    "backbone at an address": (
        edit_card(lambda card: card["config"]["backbone"].update(name="hf-hub:somebody/net")),
        r"model\.json: backbone\.name=hf-hub:somebody/net: expected a model of timm",
    ),
    "unknown backbone": (
        edit_card(lambda card: card["config"]["backbone"].update(name="no_such_net")),
        r"model\.json: backbone\.name=no_such_net",
    ),
    "other weights": (
        lambda folder: save_file(other_weights(folder), folder / "model.safetensors"),
        r"model\.safetensors: not the file that was saved with this model",
    ),
    "a state of somebody else's": (
        lambda folder: save_file({}, folder / "method.safetensors"),
        r"method\.safetensors: not the file",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors"),
    "truncated weights": (lambda folder: truncate(folder / "model.safetensors"), r"model\.safetensors"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"model\.safetensors"),
    "more classes": (edit_card(lambda card: card["classes"].append("x")), r"model\.json.*cannot have these 6 classes"),
    "other width": (edit_card(lambda card: card["config"]["cigcn"].update(width=9)), r"model\.safetensors.*fit"),
    "other head": (edit_card(lambda card: card["config"].update(head="linear")), r"cigcn.*another head"),
}


@pytest.mark.parametrize("damage", MODEL_DAMAGES)
def test_a_damaged_model_is_refused_in_one_line(model: Path, damage: str):
    harm, match = MODEL_DAMAGES[damage]
    harm(model)
    with pytest.raises(BadModel, match=match) as error:
        load_network(model)
    assert one_line(error)


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, folder: str):
    with pytest.raises(BadModel) as error:
        read_card(tmp_path / folder)
    assert one_line(error)


@pytest.fixture
def first_model(tmp_path: Path, tasks: tuple[Task, ...]) -> Path:
    """The model of the base task, with biases that no fresh layer has."""
    network = fresh_network(settings())
    with torch.no_grad():
        network.head.output.bias.fill_(9.0)
        network.head.specific_cm.bias.fill_(9.0)
    return saved_model(tmp_path / "prior", settings(), tasks[0], network)


@pytest.mark.parametrize("reset", [False, True])
def test_legacy_bias_reset_reaches_the_network_of_the_next_task(
    views: dict[int, View], tasks: tuple[Task, ...], first_model: Path, reset: bool
):
    config = settings(f"release_quirks.legacy_bias_reset={reset}")
    start = start_task(config, SCENARIO, tasks[1], views[2], first_model)
    before, _ = load_network(first_model)
    for bias in (start.network.head.output.bias, start.network.head.specific_cm.bias):
        assert (bias[:NEW] == 9).all() != reset
        assert bias[NEW:].abs().max() < 1
    assert torch.equal(start.network.head.output.weight[:NEW], before.head.output.weight)
    assert start.prior is not None
    assert changed(state_of(before), start.prior) == set()
    assert start.card.prior_fingerprint == fingerprint(first_model)


@pytest.mark.parametrize("quirk", [False, True])
def test_frozen_names_and_old_moments_reach_the_trainer_only_with_their_quirks(
    views: dict[int, View], tasks: tuple[Task, ...], first_model: Path, quirk: bool
):
    moments = first_model / "optimizer.safetensors"
    save_file({}, moments)
    edit_card(lambda card: card["files"].update({moments.name: sha256_file(moments)}))(first_model)
    config = settings(f"release_quirks.freeze_grown_layers={quirk}", f"release_quirks.persist_optimizer={quirk}")
    start = start_task(config, SCENARIO, tasks[1], views[2], first_model)
    assert ("head.general_cm" in start.frozen_parameters) == quirk
    assert start.moments == (moments if quirk else None)
