"""Lines that are written again go into their files when all recipes are done."""

from collections.abc import Iterator

import pytest

from tests.bad_input.recipes import rewrite


@pytest.fixture(scope="session", autouse=True)
def _rewritten() -> Iterator[None]:
    yield
    rewrite()
