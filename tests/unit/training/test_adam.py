"""Adam without the compiler is Adam."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import OneCycleLR

from csc.training.optimiser import EagerAdam


@pytest.mark.parametrize("fused", [True, False])
def test_it_makes_the_same_updates_as_torch(fused: bool):
    def trained(kind: type[Adam]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(5, 3)
        groups = [{"params": [layer.weight], "weight_decay": 1e-2}, {"params": [layer.bias], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=1e-2, fused=fused)
        schedule = OneCycleLR(optimizer, 1e-2, total_steps=20)
        for _ in range(10):
            optimizer.zero_grad(set_to_none=True)
            layer(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            schedule.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return [value.detach().clone() for value in layer.parameters()]

    for ours, theirs in zip(trained(EagerAdam), trained(Adam), strict=True):
        assert torch.equal(ours, theirs)


def test_no_gradient_is_recorded_in_a_step():
    layer = nn.Linear(2, 1)
    optimizer = EagerAdam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.is_grad_enabled()
    assert layer.weight.is_leaf


@pytest.mark.slow
def test_a_step_leaves_the_compiler_alone():
    code = """
import sys, torch
from csc.training.optimiser import EagerAdam
layer = torch.nn.Linear(2, 1)
optimizer = EagerAdam(layer.parameters(), fused=True)
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
