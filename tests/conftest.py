"""Fixtures that several files use."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from browser import chromium

# No test depends on how busy the machine is, or on the day's luck.
settings.register_profile("calm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("calm")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tables of latencies that tests measure are not kept for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are explained by α1β0 unless a test asks for more: what it computes has only one rule."""
    monkeypatch.setattr(import_module("secateur.relevance.explain"), "PICTURES", "alpha1beta0")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium."""
    with chromium() as found:
        yield found
