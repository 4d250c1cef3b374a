import pytest
import timm
import torch
from torch import Tensor, nn

from csc.config import resolve
from csc.nets.backbone import Backbone
from csc.nets.folding import fold_batch_norms
from csc.nets.network import Network
from csc.training.device import for_inference, to_device


def lived(net: nn.Module) -> nn.Module:
    """Give batch-norms statistics and weights as training leaves them behind."""
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 2)
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, 0, 0.1)
    return net.eval()


def timm_model(name: str, **options: int) -> nn.Module:
    torch.manual_seed(0)
    return lived(timm.create_model(name, num_classes=0, global_pool="", **options))


def batch_norms(net: nn.Module) -> int:
    return sum(isinstance(part, nn.BatchNorm2d) for part in net.modules())


def assert_folding_changes_nothing(net: nn.Module, size: int = 64) -> int:
    images = torch.randn(2, 3, size, size)
    with torch.inference_mode():
        before = net(images)
        folded = fold_batch_norms(net)
        after = net(images)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * before.abs().max().item())
    return folded


@pytest.mark.parametrize("name", ["tresnet_m", "tf_efficientnet_lite0", "test_resnet.r160_in1k", "resnet18"])
def test_all_batch_norms_are_folded_and_the_network_says_the_same(name: str):
    net = timm_model(name)
    count = batch_norms(net)
    assert assert_folding_changes_nothing(net) == count > 0
    assert batch_norms(net) == 0
    assert fold_batch_norms(net) == 0  # nothing is left to do


@pytest.mark.parametrize("stride", [8, 16])
def test_all_batch_norms_are_folded_at_any_stride(stride: int):
    net = timm_model("test_resnet.r160_in1k", output_stride=stride)
    assert assert_folding_changes_nothing(net) == 15
    assert batch_norms(net) == 0


@pytest.mark.parametrize("name", ["resnetv2_50", "densenet121", "repvgg_a0"])
def test_a_batch_norm_that_follows_no_convolution_stays(name: str):
    net = timm_model(name)
    count = batch_norms(net)
    folded = assert_folding_changes_nothing(net)
    assert 0 < folded == count - batch_norms(net) < count


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.convolution(images)
        return maps + self.norm(maps)


class CalledTwice(ReadTwice):
    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.convolution(images)) + self.norm(self.convolution(images.flip(3)))


class SharedNorm(ReadTwice):
    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.norm(self.convolution(images)))


class Untraceable(ReadTwice):
    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.convolution(images if images.mean() > 9 else -images))


class Branch(nn.Module):
    """Has no batch-norm, and code that cannot be traced."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images if images.mean() > 9 else -images)


class BranchBeforeNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.norm = Branch(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.branch(images))


class SharedWithBranch(ReadTwice):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch(self.convolution)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.convolution(images)) + self.branch(images)


class OwnWeights(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        return self._conv_forward(images, self.weight / self.weight.std(), self.bias)


@pytest.mark.parametrize("kind", [ReadTwice, CalledTwice, SharedNorm, Untraceable, BranchBeforeNorm, SharedWithBranch])
def test_what_cannot_be_folded_stays_as_it_is(kind: type[nn.Module]):
    assert assert_folding_changes_nothing(lived(kind())) == 0


def test_what_has_no_batch_norm_inside_need_not_be_traceable():
    class Branched(ReadTwice):
        def forward(self, images: Tensor) -> Tensor:
            return self.norm(self.convolution(images)) + self.branch(images)

    net = Branched()
    net.branch = Branch(nn.Conv2d(3, 4, 3))
    assert assert_folding_changes_nothing(lived(net)) == 1


def test_a_convolution_that_computes_its_weights_stays_as_it_is():
    net = nn.Sequential(OwnWeights(3, 4, 3), nn.BatchNorm2d(4))
    assert assert_folding_changes_nothing(lived(net)) == 0


def test_only_the_copy_that_does_not_learn_is_folded():
    config = resolve("voc", {"backbone": {"name": "test_resnet.r160_in1k"}, "init": "scratch"})
    cpu = torch.device("cpu")

    def network() -> Network:
        return Network(Backbone(timm_model(config.backbone.name)), nn.Identity(), (0.5,) * 3, (0.5,) * 3)

    learner = to_device(network(), config, cpu)
    teacher = for_inference(learner, config, cpu)
    assert batch_norms(learner) > 0 == batch_norms(teacher)
    assert not any(part.training for part in teacher.modules())
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    torch.testing.assert_close(teacher(images), learner.eval()(images), rtol=1e-4, atol=1e-4)
    stages = [each.backbone.intermediates(images / 255).stages for each in (learner, teacher)]  # also read by hooks
    assert len(stages[0]) == len(stages[1])
