"""What a process does with memory that it frees."""

import subprocess
import sys

import pytest

CODE = """
import resource
import torch
from csc.training.device import keep_memory

if {keep}:
    keep_memory()
layers = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
images = torch.rand(8, 8, 256, 256)  # 16 MB, and so is what each layer makes of them
faults = []
for _ in range(8):
    layers(images).sum().backward()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-4])
"""


def faults(*, keep: bool) -> int:
    done = subprocess.run([sys.executable, "-c", CODE.format(keep=keep)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told to keep memory")
def test_steps_after_the_first_ones_get_their_memory_without_the_system():
    assert faults(keep=True) < 0.1 * faults(keep=False)
