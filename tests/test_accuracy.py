"""The accuracy of a model: overall and by class, in evaluation mode, with one output or many."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secateur.errors import DataError
from secateur.running.accuracy import accuracy


class Answers(nn.Module):
    """Returns its input; in training mode, something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x if self.training else x


def test_overall_and_by_class_by_hand() -> None:
    says = torch.tensor([0, 0, 1, 2, 2, 2])
    true = torch.tensor([0, 1, 1, 2, 0, 2])
    net = Answers().train()
    for data in ((torch.eye(3)[says], true), [(torch.eye(3)[says][:4], true[:4]), (torch.eye(3)[says][4:], true[4:])]):
        found = accuracy(net, data, batch_size=2)
        assert (found.overall, found.samples, float(found)) == (4 / 6, 6, 4 / 6)
        assert found.classes == {0: 1 / 2, 1: 1 / 2, 2: 1.0}
    assert net.training, "the mode is given back"
    assert found.named(lambda c: "abc"[c]) == {"overall": 4 / 6, "a": 0.5, "b": 0.5, "c": 1.0}


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_a_single_output_tells_one_from_zero(shape: tuple[int, ...]) -> None:
    output = torch.tensor([1.0, -1.0, 2.0, -3.0]).reshape(shape)
    for targets in (torch.tensor([1, 1, 0, 0]), torch.tensor([1.0, 1.0, 0.0, 0.0])):
        found = accuracy(Answers(), (output, targets))
        assert (found.overall, dict(found.classes)) == (0.5, {0: 0.5, 1: 0.5})
    with pytest.raises(DataError, match="0 or 1"):
        accuracy(Answers(), (output, torch.tensor([0.3, 1.0, 0.0, 0.0])))


def test_positions_of_an_image_count_one_by_one() -> None:
    output = torch.stack([torch.zeros(2, 2, 3), torch.tensor([[[1.0, -1.0, 1.0]] * 2] * 2)], 1)
    assert accuracy(Answers(), (output, torch.ones(2, 2, 3, dtype=torch.long))).overall == 2 / 3


def test_no_data_is_an_error() -> None:
    with pytest.raises(DataError, match="empty"):
        accuracy(Answers(), [])


def test_answers_are_kept_where_there_is_one_per_sample() -> None:
    net, x, y = nn.Linear(4, 3), torch.rand(11, 4), torch.arange(11) % 3
    found = accuracy(net, [(x[:6], y[:6]), (x[6:], y[6:])])
    assert list(found.targets) == y.tolist()
    assert list(found.answers) == net(x).argmax(1).tolist()
    one = accuracy(nn.Linear(4, 1), (x, y % 2))
    assert set(one.answers) <= {0, 1}
    assert len(one.answers) == 11
    pixels = accuracy(nn.Conv2d(2, 3, 1), (torch.rand(2, 2, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)))
    assert pixels.answers == ()


def test_nan_is_no_right_answer() -> None:
    wrong = nn.Linear(4, 3)
    nn.init.constant_(wrong.bias, float("nan"))
    assert float(accuracy(wrong, (torch.rand(6, 4), torch.zeros(6).long()))) == 0
    assert float(accuracy(nn.Flatten(0), (torch.tensor([float("nan"), -1.0]), torch.zeros(2).long()))) == 0.5


def test_batches_have_samples() -> None:
    for size in (0, -1, 2.5):
        with pytest.raises(DataError, match="batch_size"):
            accuracy(nn.Identity(), (torch.eye(3), torch.arange(3)), size)  # type: ignore[arg-type]
