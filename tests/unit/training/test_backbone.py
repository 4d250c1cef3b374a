"""Backbones and their first weights."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import msgspec
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from csc.errors import BadConfig, BadModel, HubUnavailable
from csc.methods import build_method
from csc.nets.backbone import Initialisation, build_backbone, initialise
from csc.storage import sha256_file
from tests.unit.training.bench import fresh_network, grown_network, one_line, settings, truncate


@pytest.mark.parametrize("init", ["scratch", "hub"])
@pytest.mark.parametrize("name", ["no_such_net", "test_resnet.no_such_tag", ""])
def test_an_unknown_backbone_is_refused_in_one_line(name: str, init: str):
    with pytest.raises(BadConfig, match=r"backbone\.name") as error:
        initialise(msgspec.structs.replace(settings().backbone, name=name), init, allow_leaky=False)
    assert one_line(error)


def test_a_backbone_that_cannot_have_the_output_stride_is_refused_in_one_line():
    with pytest.raises(BadConfig, match="output_stride") as error:
        build_backbone(msgspec.structs.replace(settings().backbone, name="test_vit"))
    assert one_line(error)


@pytest.mark.parametrize("method", ["agcn", "krt", "podnet"])
@pytest.mark.parametrize(("name", "size"), [("convmixer_768_32", 28), ("visformer_tiny", 224)])
def test_a_backbone_whose_stages_timm_does_not_name_has_one(name: str, size: int, method: str):
    config = settings(f"method={method}", f"backbone.name={name}", "backbone.output_stride=32")
    prior = fresh_network(config).eval()
    learner = grown_network(prior).eval()
    images = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
    with torch.inference_mode():
        answers = [network(images, intermediates=True) for network in (learner, prior)]
    assert [len(answer.stages) for answer in answers] == [1, 1]
    distances = build_method(config).distances(*answers)
    assert distances
    assert all(value.shape == (2,) and value.isfinite().all() for value in distances.values())


@pytest.mark.parametrize("name", ["cait_xxs24_224", "xcit_nano_12_p16_224"])
def test_a_transformer_that_does_not_say_how_many_tokens_have_no_position_gives_square_maps(name: str):
    backbone = build_backbone(settings(f"backbone.name={name}", "backbone.output_stride=32").backbone).eval()
    tokens = torch.arange(17.0).reshape(1, 17, 1).expand(1, 17, backbone.channels)  # the first is of the whole image
    backbone.net.forward_features = lambda images: tokens
    assert torch.equal(backbone(torch.zeros(1))[0, 0], torch.arange(1.0, 17.0).reshape(4, 4))


def weights_file(path: Path, **more: Tensor) -> Path:
    torch.manual_seed(5)
    save_file(build_backbone(settings().backbone).net.state_dict() | more, path)
    return path


def test_weights_from_a_file_are_taken_over_and_recorded(tmp_path: Path):
    path = weights_file(tmp_path / "weights.safetensors", **{"fc.weight": torch.zeros(1000, 96)})
    backbone, origin = initialise(settings().backbone, str(path), allow_leaky=False)
    weights = load_file(path)
    assert all(torch.equal(value, weights[name]) for name, value in backbone.net.state_dict().items())
    assert origin == Initialisation("file", "weights.safetensors", sha256_file(path), leaky=False)
    assert str(origin) == f"file weights.safetensors, sha256 {sha256_file(path)[:12]}"


def test_scratch_is_random_and_recorded():
    torch.manual_seed(0)
    one, origin = initialise(settings().backbone, "scratch", allow_leaky=False)
    two, _ = initialise(settings().backbone, "scratch", allow_leaky=False)
    assert str(origin) == origin.kind == "scratch"
    assert not torch.equal(next(one.parameters()), next(two.parameters()))


def wrong_shapes(path: Path) -> None:
    weights = load_file(weights_file(path))
    name = next(name for name, value in weights.items() if value.ndim == 4)
    save_file(weights | {name: torch.zeros(1, 1, 1, 1)}, path)


def missing_tensor(path: Path) -> None:
    weights = load_file(weights_file(path))
    weights.popitem()
    save_file(weights, path)


BAD_WEIGHTS = {
    "pickle": ("weights.pth", lambda path: path.write_bytes(b"\x80\x02}q\x00."), "safetensors"),
    "missing": ("weights.safetensors", lambda path: None, "no such file"),
    "folder": ("weights.safetensors", lambda path: path.mkdir(), "no such file"),
    "garbage": ("weights.safetensors", lambda path: path.write_bytes(b"\xff" * 999), "not readable"),
    "empty": ("weights.safetensors", lambda path: path.write_bytes(b""), "not readable"),
    "truncated": ("weights.safetensors", lambda path: truncate(weights_file(path)), "not readable"),
    "wrong shapes": ("weights.safetensors", wrong_shapes, "another shape"),
    "missing tensor": ("weights.safetensors", missing_tensor, "missing"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_unusable_weights_are_refused_in_one_line(tmp_path: Path, case: str):
    name, make, match = BAD_WEIGHTS[case]
    make(tmp_path / name)
    with pytest.raises(BadModel, match=match) as error:
        initialise(settings().backbone, str(tmp_path / name), allow_leaky=False)
    assert one_line(error)
    assert name in str(error.value)


LEAKY = {
    "zoo name": ("MS_COCO_TRresNet_M_224_81.8.safetensors", {}),
    "renamed as told": ("tresnet_m_224_21k.safetensors", {}),
    "80-way head": ("innocent.safetensors", {"head.fc.weight": torch.zeros(80, 96), "head.fc.bias": torch.zeros(80)}),
}


@pytest.mark.parametrize("case", LEAKY)
def test_weights_tuned_on_coco_are_refused_unless_allowed_and_then_marked(tmp_path: Path, case: str):
    name, head = LEAKY[case]
    path = weights_file(tmp_path / name, **head)
    with pytest.raises(BadModel, match="allow_leaky_init") as error:
        initialise(settings().backbone, str(path), allow_leaky=False)
    assert one_line(error)
    backbone, origin = initialise(settings().backbone, str(path), allow_leaky=True)
    assert origin.leaky
    assert "LEAKED" in str(origin)
    weights = load_file(path)
    assert all(torch.equal(value, weights[key]) for key, value in backbone.net.state_dict().items())


def test_without_internet_the_hub_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def offline(*_: object):
        raise OSError("Network is unreachable\nand a long trace")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(BadModel, match=r"init=/path/to/weights\.safetensors") as error:
        initialise(settings().backbone, "hub", allow_leaky=False)
    assert one_line(error)
    assert "test_resnet" in str(error.value)


@pytest.mark.parametrize(
    ("status", "kind"), [(503, HubUnavailable), (429, HubUnavailable), (404, BadModel), (None, HubUnavailable)]
)
def test_a_hub_that_is_down_may_be_asked_again(
    status: int | None, kind: type[BadModel], monkeypatch: pytest.MonkeyPatch
):
    def down(*_: str) -> str:
        cause: Exception = ConnectionError("no route")
        if status:
            answer = SimpleNamespace(status_code=status, headers={}, request=None)
            cause = HfHubHTTPError("broken", response=answer)  # type: ignore[arg-type]
        raise LocalEntryNotFoundError("not here") from cause

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", down)
    with pytest.raises(BadModel, match="could not be fetched") as error:
        initialise(settings().backbone, "hub", allow_leaky=False)
    assert type(error.value) is kind


def test_weights_from_the_hub_are_safetensors_and_recorded_by_name_and_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked: list[tuple[str, ...]] = []

    def hub(*words: str) -> str:
        asked.append(words)
        return str(weights_file(tmp_path / "model.safetensors"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    backbone, origin = initialise(settings().backbone, "hub", allow_leaky=False)
    assert asked == [("timm/test_resnet.r160_in1k", "model.safetensors")]
    assert (origin.kind, origin.source, origin.leaky) == ("hub", "test_resnet", False)
    assert origin.sha256 == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, weights[key]) for key, value in backbone.net.state_dict().items())
