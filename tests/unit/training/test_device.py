"""What a process does with memory that it frees, and with threads that wait."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CODE = """
import os, resource
import torch
from csc.training.device import disable_malloc_trim

for keep in (True, False):
    if os.fork():
        os.wait()
        continue
    if keep:
        disable_malloc_trim()
    layers = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
    images = torch.rand(8, 8, 256, 256)  # 16 MB, and so is what each layer makes of them
    faults = []
    for _ in range(8):
        layers(images).sum().backward()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print(faults[-1] - faults[-4], flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told to keep memory")
def test_steps_after_the_first_ones_get_their_memory_without_the_system():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    kept, given_back = map(int, done.stdout.split())
    assert kept < 0.1 * given_back


@pytest.mark.parametrize(("set_by_user", "policy"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
def test_threads_that_wait_do_not_spin_unless_the_user_wants_it(set_by_user: str, policy: str):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true", **({"OMP_WAIT_POLICY": set_by_user} if set_by_user else {})}
    command = [sys.executable, "-c", "import csc.distributed.launch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
