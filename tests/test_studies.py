"""The scripts behind the result pages: one number of each against a formula that is written out here."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import cifar, criteria, faithfulness, faithfulness_text, redundancy


class Line(nn.Module):
    """Two logits, s and -s, where s adds up weighted pixels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        s = (x[:, 0] * self.weight).sum((1, 2))
        return torch.stack([s, -s], 1)


def test_srg_of_a_linear_model() -> None:
    """What a region adds to s is known, so the curve is a sum of the smallest or the largest of them."""
    weight = torch.rand(14, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 50
    net, x = Line(weight), torch.ones(1, 1, 14, 14, dtype=torch.float64)
    found = faithfulness.region_perturbation(net, x, torch.zeros(1, dtype=torch.long), weight[None], 0 * x)
    parts = np.sort(weight.flatten().numpy())
    sure = lambda s: 1 / (1 + math.exp(-2 * s))  # noqa: E731
    expected = 0.0
    for level in range(1, 11):
        count = round(196 * level / 11)
        expected += (sure(parts[count:].sum()) - sure(parts[: 196 - count].sum())) / 11
    assert float(found[0]) == pytest.approx(expected, abs=1e-9)
    assert expected > 0.05


def test_gini_of_one_and_of_equal_pixels() -> None:
    heat = torch.zeros(2, 4, 4)
    heat[0, 1, 1], heat[1] = -3.0, 1.0
    assert faithfulness.gini(heat).tolist() == pytest.approx([15 / 16, 0])


def test_srg_of_words_that_add_up() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding.from_pretrained(torch.arange(8.0)[:, None] / 10)

        def forward(self, input_ids: Tensor) -> Tensor:
            s = self.table(input_ids).sum((1, 2))
            return torch.stack([s, -s], 1)

    ids = torch.tensor([[3, 1, 7, 5, 2, 6, 4, 1]])
    task = faithfulness_text.Task(Sum(), [ids], 0)
    found = faithfulness_text.srg(task, ids, ids[0] / 10, 0, torch.zeros_like(ids[0]))
    parts, sure = np.sort(ids[0].numpy() / 10), lambda s: 1 / (1 + math.exp(-2 * s))
    expected = sum(
        (sure(parts[level:].sum()) - sure(parts[: 8 - level].sum())) / 8
        for level in range(1, 8)  # seven levels of eight words
    )
    assert found == pytest.approx(expected, abs=1e-6)


def test_conductance_of_a_linear_model_is_what_it_adds() -> None:
    """Without a bias, a hidden unit adds its output times its weight to the logit: all of it, however it is summed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False)).double()
    x, y = torch.rand(6, 4, dtype=torch.float64), torch.arange(6) % 3
    found = criteria.conductance(net, [(x, y)])
    expected = (x @ net[0].weight.T * net[1].weight[y]).sum(0).abs()
    assert found["0"].tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def row(network: str, draw: int, method: str, right: float, **more: object) -> dict[str, object]:
    cell = {"network": network, "classes": 3, "draw": draw, "method": method, "share": 0.35}
    return {**cell, "before": 1.0, "removed": 0.5, "repaired": right, **more}


def test_the_table_has_means_and_paired_differences() -> None:
    rows = [row("alexnet", d, "lrp", r) for d, r in enumerate((0.90, 0.80, 0.70))]
    rows += [row("alexnet", d, "taylor", r) for d, r in enumerate((0.88, 0.79, 0.67))]
    rows += [row("vit", d, "lrp", r) for d, r in enumerate((1.0, 0.9, 0.8))]
    rows += [row("vit", d, "taylor", r) for d, r in enumerate((0.9, 0.9))]
    rows += [row("minilm", 0, "lrp", 0.1)]  # no picture
    rows.append({"network": "vit", "draw": 2, "method": "taylor", "share": 0.35, "failed": "OutOfMemoryError: much"})
    lines = criteria.table(rows).splitlines()
    assert "| | alexnet | vit | minilm | pictures |" in lines
    lrp, taylor = (next(line for line in lines if line.startswith(f"| {name} ")) for name in ("lrp", "taylor"))
    assert lrp == "| lrp | 80.0 ± 5.8 | 90.0 ± 5.8 | 10.0 | 85.0 ± 5.8 |"  # 10 / √3
    assert taylor == "| taylor | 78.0 ± 6.1 | 90.0 ± 0.0 (2) |  | 86.8 ± 2.2 (2) |"
    against = [line for line in lines if line.startswith("| taylor ")][1]
    # -2, -1, -3: mean -2, standard error 1 / √3, and 4.30 of them
    assert against.startswith(f"| taylor | -2.0 ± {4.30 / math.sqrt(3):.1f} | -5.0 ± {12.71 * 5:.1f} |")
    assert against.endswith("| -5.0 to -2.0 |")
    assert "OutOfMemoryError: much" in lines[-1]
    assert criteria.numbers("2:5") == [2, 3, 4]
    assert criteria.numbers("7") == [7]


def test_a_cell_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    data = torch.rand(9, 4), torch.arange(9) % 3
    known = criteria.sc.score

    def score(model: nn.Module, data: object, criterion: object, **more: object) -> object:
        if criterion == "taylor":
            raise RuntimeError("somebody else has the memory")
        return known(model, data, criterion, **more)

    monkeypatch.setattr(criteria.sc, "score", score)
    rows = list(criteria.measured(criteria.Scene(net, data, data), ["taylor", "weight"], 0, 0.6, None))
    assert rows[0] == {"method": "taylor", "share": 0.6, "failed": "RuntimeError: somebody else has the memory"}
    assert rows[1]["before"] == int((net(data[0]).argmax(1) == data[1]).sum()) / 9
    assert rows[1]["macs"] <= 0.6


def test_what_the_rest_cannot_make_up_for() -> None:
    """Of three channels, two are equal: one of these leaves first and for nothing, and the third is all that counts."""
    a, b = torch.randn(2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, weight = torch.stack([a, b, b], 1), torch.tensor([[[2.0], [1.0], [1.0]]], dtype=torch.float64)
    reader = redundancy.Reader(np.arange(3), weight, len(x), x.sum(0), x.T @ x)
    values, order = redundancy.eliminated([reader], [torch.ones(1, dtype=torch.float64)], np.arange(3), 1e-9)
    assert order[0] in (1, 2)
    assert values[order[0]] == pytest.approx(0, abs=1e-6)
    # The other one stands for both, with weight 2: what is lost is the variance that channel 0 does not explain.
    left = 4 * float(b.var(correction=0)) * (1 - float(torch.corrcoef(torch.stack([a, b]))[0, 1]) ** 2)
    only = 4 * float(a.var(correction=0)) * (1 - float(torch.corrcoef(torch.stack([a, b]))[0, 1]) ** 2)
    assert values[order[1]] == pytest.approx(min(left, only), rel=1e-6)


def test_a_small_cifar_of_the_official_files(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    files = {name: chance.integers(0, 256, (10_000, 3073), dtype=np.uint8) for name in cifar.NAMES}
    for name, rows in files.items():
        rows.tofile(tmp_path / f"{name}.bin")
    cifar.small(tmp_path, tmp_path / "small.npz", count=3)
    with np.load(tmp_path / "small.npz") as kept:
        assert kept["labels"].tolist() == [*files["test_batch"][:3, 0], *files["data_batch_1"][:3, 0]]
        assert np.array_equal(kept["images"][4], files["data_batch_1"][1, 1:].reshape(3, 32, 32))


def test_ten_classes_of_a_thousand_outputs_are_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 30)).eval()
    x, y = torch.rand(40, 3, 2, 2), torch.arange(40) % 4
    outputs = (3, 9, 20, 29)
    networks = criteria.Networks(Path("none"), "cpu", 2, 5, classes=4)
    monkeypatch.setattr(networks, "_built", lambda name: (net, outputs, (x, y), (x, y)))
    scene = networks.scene("resnet50", 0)
    assert torch.allclose(scene.model(x), net(x)[:, outputs], atol=1e-6)
