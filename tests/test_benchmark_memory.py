"""`benchmarks.memory`: the largest classifier of each family of timm, however it is built; passes up to the peak."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.memory import largest, parameters_of, until_the_peak

timm = pytest.importorskip("timm")


def reads_its_numbers() -> nn.Module:
    """A model that some versions of timm have: it is built from numbers, which a meta tensor has none of."""
    layer = nn.Linear(3, 5)
    return nn.Linear(3, 5 + int(torch.ones(2).sum().item())) if float(layer.weight.detach().abs().sum()) else layer


def fails() -> nn.Module:
    raise ImportError("this model needs another package")


def test_parameters_are_counted_however_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    made, devices = {"plain": lambda: nn.Linear(3, 7), "reads": reads_its_numbers, "fails": fails}, list[str]()

    def create(name: str) -> nn.Module:
        devices.append(torch.empty(0).device.type)
        return made[name]()

    monkeypatch.setattr(timm, "create_model", create)
    assert [parameters_of(name) for name in made] == [28, 28, None]
    assert devices == ["meta", "meta", "cpu", "meta", "cpu"], "numbers are made only where they are needed"


def test_the_largest_of_each_family_that_is_not_too_large() -> None:
    families = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "c1": "c", "d1": "d"}
    named, unknown = largest(families, [10, 30, 101, 100, None, 200], 100)
    assert named == ["timm:b1", "timm:a2"]
    assert unknown == ["timm:c1"]


def test_both_models_pass_a_timed_batch_and_the_first_once_more() -> None:
    """In a second turn it comes upon what malloc has kept of the first, which is where the peak was."""
    ran = list[str]()
    seconds = until_the_peak([lambda: ran.append("before"), lambda: ran.append("after")], 20)
    assert ran == ["before", "after", "before"]
    assert seconds == [[1.0], [1.0]]
