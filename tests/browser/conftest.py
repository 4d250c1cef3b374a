"""A browser for the tests that look at pages: Debian's Chromium, headless."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def _browser() -> str:
    """The path of a browser; it is installed only where tests may install something."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None and os.environ.get("CSC_TEST_INSTALL") == "1":
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", "chromium"], check=True)
        found = shutil.which("chromium")
    if found is None:
        pytest.skip("no browser: install chromium, or set CSC_TEST_INSTALL=1 to have the tests install it")
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = _browser()
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])  # which root has to do without
        yield started
        started.close()
