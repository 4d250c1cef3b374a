"""Packages of Debian that some tests need; root on Debian with CSC_TEST_INSTALL=1 has them installed."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_SECONDS = 600  # for one call of apt-get


def install(*packages: str, missing: str) -> None:
    """Install packages; skips the test, with what is missing, where that is not allowed or fails.

    Test processes take turns: apt-get ends with an error if another one is at work.
    """
    names = " ".join(packages)
    if os.environ.get("CSC_TEST_INSTALL") != "1" or os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"{missing}: apt-get install {names}, or set CSC_TEST_INSTALL=1 to have root do so")
    quietly = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with Path(tempfile.gettempdir(), "csc-tests-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            command = ["apt-get", "--quiet", "-o", "DPkg::Lock::Timeout=300", *words]
            try:
                subprocess.run(command, env=quietly, timeout=_SECONDS, capture_output=True, text=True, check=True)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"{missing}, and installing {names} failed: {error.stderr.strip()[-300:]}")
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"{missing}, and installing {names} failed: {error}")
