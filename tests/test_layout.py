"""Images are evaluated in the order in memory that convolutions like, where that changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.running import accuracy as evaluation
from secateur.running.layout import channels_last, in_best_order, unordered


class Net(nn.Module):
    """A small classifier, some of whose kinds look at the memory."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        if self.kind == "view":
            y = y.view(len(x), 8 * y.shape[-1] ** 2).unflatten(1, (8, -1)).unsqueeze(-1)
        if self.kind == "memory":  # reads what lies there, whatever it means
            y = torch.as_strided(y, y.shape, (y[0].numel(), y[0, 0].numel(), y.shape[-1], 1))
        return self.head(y.relu().mean((2, 3)))


@pytest.mark.parametrize(("kind", "chosen"), [("", channels_last), ("view", unordered), ("memory", unordered)])
def test_the_order_is_kept_where_code_depends_on_it(kind: str, chosen: Any) -> None:
    torch.manual_seed(0)
    model, sample = Net(kind).eval(), torch.randn(1, 3, 9, 9)
    with torch.no_grad():
        expected = model(sample)
        other, order = in_best_order(model, sample)
        found = other(order(sample))
    assert order is chosen
    torch.testing.assert_close(found, expected)
    assert model.conv.weight.is_contiguous()


def test_large_images_are_evaluated_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "together", lambda model, inputs: 4)
    seen: list[bool] = []

    class Watched(Net):
        def forward(self, x: Tensor) -> Any:
            seen.append(x.is_contiguous())
            return super().forward(x)

    torch.manual_seed(0)
    model, images = Watched().eval(), torch.randn(12, 3, 9, 9)
    with torch.no_grad():
        targets = model(images).argmax(1)
    targets[:3] = (targets[:3] + 1) % 4  # three wrong ones
    seen.clear()
    assert evaluation.accuracy(model, (images, targets)).overall == 0.75
    assert seen == [True, False, False, False, False]  # the sample in both orders, then three parts


def test_other_models_are_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    assert in_best_order(model, torch.randn(1, 3, 2, 2)) == (model, unordered)
