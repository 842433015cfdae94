"""A run of `benchmarks.recover` that goes on only trains: the smaller model and the text are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.recover import every, kept, kept_text
from secateur.recover import Epoch


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 6)).eval()


def test_the_smaller_model_is_made_once(tmp_path: Path) -> None:
    calls, whole, x = [], build(), torch.rand(12, 3, 8, 8)
    model = sc.specialize(whole, [1, 4, 5], x[:2])

    def make() -> Any:
        calls.append(1)
        return sc.prune(model, (x, torch.arange(12) % 3), keep={"macs": 0.6}, progress=False)

    first, second = (kept(tmp_path / "small", whole, make) for _ in range(2))
    assert len(calls) == 1
    assert first[0].out_channels < 8
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)
    torch.testing.assert_close(whole(x), build()(x), rtol=0, atol=0)
    # A run that was begun with one goes on with the other.
    data, file = (x, torch.arange(12) % 3), tmp_path / "run.safetensors"
    begun, again = (
        sc.recover(small, model, data, epochs=2, checkpoint=file, progress=False) for small in (first, second)
    )
    assert [row.loss for row in begun.history] == [row.loss for row in again.history]


def test_the_text_is_written_once(tmp_path: Path) -> None:
    def write() -> dict[str, Tensor]:
        return {"input_ids": torch.randint(50, (4, 7))}

    first, second = (kept_text(tmp_path / "text.safetensors", write) for _ in range(2))
    assert torch.equal(first["input_ids"], second["input_ids"])
    (tmp_path / "text.safetensors").unlink()
    with pytest.raises(ZeroDivisionError):
        kept_text(tmp_path / "text.safetensors", lambda: {"input_ids": torch.zeros(1 // 0)})
    assert not (tmp_path / "text.safetensors").exists()


@pytest.mark.parametrize(("number", "told"), [(1, [1, 2, 3, 4]), (3, [1, 4]), (10, [1, 4])])
def test_epochs_are_told(number: int, told: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    for epoch in range(1, 5):
        every(number)(Epoch(epoch, 4, 0.5))
    lines = capsys.readouterr().out.splitlines()
    assert [f"epoch {epoch}/4" in line for epoch, line in zip(told, lines, strict=True)] == [True] * len(told)
