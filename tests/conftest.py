"""Fixtures that several files use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser import chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium."""
    with chromium() as found:
        yield found
