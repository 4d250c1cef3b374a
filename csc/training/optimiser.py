"""torch's Adam, without torch's compiler.

At their first call torch's optimisers import the compiler, only to tell it to leave them alone. That takes longer than
training a head on cached maps, and nothing here compiles an optimiser.
"""

import inspect
from typing import Any

import torch
from torch.optim import Adam, Optimizer

__all__ = ["EagerAdam"]

for _name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    _plain = inspect.unwrap(getattr(Optimizer, _name))
    _plain.__dynamo_disable = _plain  # where torch keeps the version that its compiler has wrapped


class EagerAdam(Adam):
    """Adam whose step is called as it is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        return inspect.unwrap(Adam.step)(self, closure)
