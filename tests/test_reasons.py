"""Does a smaller model decide for the same reasons? Drift and SRG by their definitions; `max_drift` as a target."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.analysis.reasons import Drift, Viewer, correlation, drift, regional, some_of, srg
from secateur.criteria.registry import criterion_named
from secateur.errors import DataError, SecateurError
from secateur.loop.checkpoint import Checkpoint
from secateur.loop.settings import Settings
from secateur.plans.targets import Target
from secateur.report import Page


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(48, 3),
    ).eval()  # fmt: skip


def pictures(count: int = 9, side: int = 28) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


def blocks(heat: np.ndarray, side: int) -> np.ndarray:
    """Means over squares, written out."""
    step = heat.shape[0] // side
    return np.array(
        [[heat[i * step : (i + 1) * step, j * step : (j + 1) * step].mean() for j in range(side)] for i in range(side)]
    )


def test_drift_is_one_minus_the_correlation_of_regions() -> None:
    net, (x, y) = network(), pictures()
    small = sc.prune(net, (x, y), remove=0.5, repair=None, progress=False).model
    found = drift(net, small, (x, y), faithful=False)
    heats = [sc.explain(model, x, y).heat.double().numpy() for model in (net, small)]
    expected = [np.corrcoef(*(blocks(maps[i], 14).ravel() for maps in heats))[0, 1] for i in range(len(x))]
    assert found.agreement.tolist() == pytest.approx(expected, abs=1e-9)
    assert float(found) == pytest.approx(1 - np.mean(expected), abs=1e-9)
    assert found.by_class == pytest.approx({c: 1 - np.mean(expected[c::3]) for c in range(3)}, abs=1e-9)
    assert found.srg is None
    same = drift(net, net, (x, y), faithful=False)
    assert float(same) == pytest.approx(0, abs=1e-12)
    assert float(same) >= 0
    with pytest.raises(SecateurError, match="samples=0 must be at least 1"):
        drift(net, net, (x, y), samples=0)


def test_srg_by_definition() -> None:
    net, (x, y) = network(), pictures(4)
    heat = sc.explain(net, x, y).heat
    found = srg(net, x, heat, y)
    assert srg(net, x.repeat(12, 1, 1, 1), heat.repeat(12, 1, 1), y.repeat(12)).tolist() == pytest.approx(
        found.tolist() * 12
    )
    for i in range(len(x)):
        order = blocks(heat[i].double().numpy(), 14).ravel().argsort()
        areas = []
        for ranked in (order, order[::-1]):  # least relevant first, then most relevant first
            curve = []
            for level in range(5):  # from nothing to everything
                image = x[i].clone()
                for cell in ranked[: round(196 * level / 4)]:
                    row, column = divmod(int(cell), 14)
                    image[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = x[i].mean((1, 2))[:, None, None]
                curve.append(float(net(image[None]).detach().softmax(1)[0, y[i]]))
            areas.append(np.trapezoid(curve, dx=1 / 4))
        assert float(found[i]) == pytest.approx(areas[0] - areas[1], abs=1e-6)


def test_few_samples_cost_few_calls() -> None:
    """Small networks take longer to call than to run: one call for a heat map, one for its SRG."""
    calls = []

    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta:
                calls.append(len(x))
            return super().forward(x)

    net, (x, y) = Counted(*network()), pictures(4)
    assert drift(net, net, (x, y)).srg is not None
    assert sorted(calls) == [4, 4, 24, 24]


def test_an_oracle_beats_its_opposite() -> None:
    """A network that looks at one corner only."""

    class Corner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen = x[:, :, :4, :4].mean((1, 2, 3))
            return torch.stack([4 * seen, -4 * seen], 1)

    x, y = torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long)
    x[:, :, :4, :4] = 1
    heat = x[:, 0].clone()
    assert (srg(Corner(), x, heat, y) > 0.2).all()
    assert (srg(Corner(), x, -heat, y) < -0.2).all()


def test_right_for_other_reasons_is_named() -> None:
    alike = torch.tensor([0.9, 0.8, 0.7, 0.2, 0.3, 0.1, 0.1, 0.2, 0.0, 0.1])
    classes = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    yes, no = torch.ones(10, dtype=torch.bool), classes != 2
    found = Drift(alike, classes, (alike, 2 * alike), (yes, no))
    assert found.other_reasons == [1]  # class 0 has its reasons, class 2 is wrong now, one sample of class 3 is nothing
    lines = str(found).splitlines()
    assert lines[3].endswith("right for other reasons")
    assert lines[5].endswith("too few samples to judge")
    assert str(found).count("right for other reasons") == 1
    assert lines[5].split()[:5] == ["3", "1", "0.900", "0.100", "0.200"]  # class, samples, drift, SRG before and after
    told = found.to_dict("abcd".__getitem__)
    assert told["samples_by_class"] == {"a": 3, "b": 3, "c": 3, "d": 1}
    assert told["srg_by_class"]["b"] == pytest.approx({"before": 0.2, "after": 0.4})
    assert told["other_reasons"] == ["b"]
    assert Drift(alike[3:6]).other_reasons == [-1]
    assert Drift(alike[3:5]).other_reasons == []
    together = Drift(alike[3:6], torch.tensor([0, 1, 2]))  # no class has three, all together have
    assert together.other_reasons == [-1]
    assert "right for other reasons: all together" in together.summary()


class Words(nn.Module):
    """Adds up what it sees in the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.last = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = self.inner(self.table(input_ids)).relu() * attention_mask[:, :, None]
        return self.last(seen.sum(1))


def test_texts_and_vectors_have_a_drift_too() -> None:
    torch.manual_seed(0)
    net, other = Words().eval(), Words().eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    inputs = {"input_ids": torch.randint(20, (2, 6)), "attention_mask": mask}
    found = drift(net, other, [(inputs, torch.tensor([0, 1]))])
    maps = [sc.explain(model, inputs, [0, 1]).heat.double().numpy() for model in (net, other)]
    expected = [np.corrcoef(*(m[i, : int(mask[i].sum())] for m in maps))[0, 1] for i in range(2)]
    assert found.agreement.tolist() == pytest.approx(expected, abs=1e-6)
    assert found.srg is not None
    for model, heat, srgs in zip((net, other), maps, found.srg, strict=True):
        for i, count in enumerate((4, 6)):
            order, areas = heat[i, :count].argsort(), []
            for ranked in (order, order[::-1]):  # least relevant first, then most relevant first
                curve = []
                for level in (1, 2, 3):
                    left = mask[i].clone()
                    left[ranked[: round(count * level / 4)].tolist()] = 0
                    seen = model(inputs["input_ids"][i : i + 1], left[None]).detach()
                    curve.append(float(seen.softmax(1)[0, i]))
                areas.append(sum(curve) / 4)
            assert float(srgs[i]) == pytest.approx(areas[0] - areas[1], abs=1e-6)
    assert drift(net, other, [(inputs, torch.tensor([0, 1]))], faithful=False).srg is None


def test_a_text_of_one_word_keeps_it() -> None:
    net, ids = Words().eval(), torch.tensor([[3, 0]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1, 0]])}
    found = drift(net, net, [(inputs, torch.tensor([1]))])
    assert float(found.srg[0]) == 0
    assert float(found) == 0  # the same network


def test_what_cannot_be_explained_is_refused() -> None:
    net, (x, _) = network(), pictures(2)
    with pytest.raises(DataError, match="need a tensor"):
        drift(net, net, [({"a": x}, None)])
    with pytest.raises(DataError, match="at least one sample"):
        Viewer(net, (x[:0], None))


def test_a_few_samples_of_every_class() -> None:
    x, y = torch.arange(10.0).view(10, 1), torch.tensor([0, 0, 0, 1, 0, 2, 2, 1, 0, 0])
    chosen, classes = some_of((x, y), 4)
    assert chosen.ravel().tolist() == [0, 1, 3, 5]
    assert classes is not None
    assert classes.tolist() == [0, 0, 1, 2]
    assert some_of([(x, None)], 3)[0].ravel().tolist() == [0, 1, 2]
    loader = [(x[i : i + 3], y[i : i + 3]) for i in (0, 3, 6, 9)]
    assert some_of(loader, 4)[0].ravel().tolist() == [0, 1, 3, 5]  # those of the first two batches
    assert some_of([(x[:2], None), (x[2:4], None)], 3)[0].ravel().tolist() == [0, 1, 2]
    assert some_of([(x[:2], y[:2]), (x[2:4].T, y[2:4])], 3)[0].ravel().tolist() == [0, 1]  # of another form
    with pytest.raises(DataError, match="need a tensor"):
        some_of([({"a": x}, y)], 3)


def test_a_few_texts_of_every_class() -> None:
    """Texts often lie in a file class by class."""
    ids, y = torch.arange(12).view(6, 2), torch.tensor([0, 0, 0, 0, 1, 1])
    chosen, classes = some_of(({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, y), 2)
    assert classes is not None
    assert classes.tolist() == [0, 1]
    assert chosen["input_ids"].tolist() == [[0, 1], [8, 9]]
    assert chosen["attention_mask"].shape == (2, 2)


def test_where_both_maps_are_flat_nothing_changed() -> None:
    flat, other = torch.full((1, 5), 0.1, dtype=torch.float64), torch.arange(5.0, dtype=torch.float64)[None]
    zero, nan = torch.zeros_like(flat), torch.full_like(flat, torch.nan)
    assert [float(correlation(a, b)) for a, b in ((zero, zero), (flat, zero), (flat, 3 * flat))] == [1, 1, 1]
    assert [float(correlation(a, b)) for a, b in ((other, zero), (flat, other), (nan, other), (nan, nan))] == [0] * 4
    assert float(correlation(flat[:, :1], -flat[:, :1])) == 1  # a text of one word


def test_regions_of_small_pictures_are_pixels() -> None:
    heat = torch.rand(2, 9, 9)
    assert torch.equal(regional(heat), heat.double().reshape(2, 81))


# -- as a target -------------------------------------------------------------------------------------------------------
def drifts(result: sc.Result) -> list[float]:
    return [row.drift for row in result.history]


def test_max_drift_ends_a_run() -> None:
    net, (x, y) = network(), pictures(12)
    free = sc.prune(net, (x, y), remove=0.8, schedule=0.1, watch=(x, y), progress=False)
    moved = drifts(free)
    assert moved[0] == pytest.approx(0, abs=1e-9)
    assert moved[-1] > 0.01
    limit = (moved[3] + max(moved)) / 2
    first = next(i for i, value in enumerate(moved) if value > limit)
    held = sc.prune(net, (x, y), max_drift=limit, schedule=0.1, watch=(x, y), progress=False)
    assert drifts(held) == pytest.approx(moved[: first + 1], abs=1e-6)
    assert [row.held for row in held.history] == [True] * first + [False]
    assert "changed the reasons more than allowed" in held.stopped
    assert float(drift(net, held.model, (x, y), faithful=False)) == pytest.approx(moved[first - 1], abs=1e-6)
    assert held.settings["max_drift"] == limit
    assert set(held.seen) == set(range(first + 1))


def test_max_drift_by_class_beside_another_target() -> None:
    net, (x, y) = network(), pictures(12)
    free = sc.prune(net, (x, y), remove=0.6, schedule=0.1, watch=(x, y), progress=False)
    worst = [max(_by_class(net, free, step, y)) for step in range(len(free.history))]
    limit = worst[2] + 1e-9
    held = sc.prune(net, (x, y), remove=0.6, max_drift={"worst": limit}, schedule=0.1, progress=False)
    kept = sum(row.held for row in held.history)
    assert kept == next((i for i, value in enumerate(worst) if value > limit), len(worst))
    with pytest.raises(sc.errors.EvaluationError, match="max_drift names '7'"):
        sc.prune(net, (x, y), remove=0.6, max_drift={"7": 0.5}, schedule=0.1, progress=False)


def _by_class(net: nn.Module, result: sc.Result, step: int, y: Tensor) -> list[float]:
    a, b = (maps.double().numpy() for maps in (result.seen[0], result.seen[step]))
    alike = [np.corrcoef(blocks(p, 14).ravel(), blocks(q, 14).ravel())[0, 1] for p, q in zip(a, b, strict=True)]
    return [1 - np.mean([r for r, c in zip(alike, y.tolist(), strict=True) if c == k]) for k in range(3)]


def test_a_run_that_goes_on_remembers_its_heat_maps(tmp_path: Path) -> None:
    net, data = network(), pictures(6)
    options = {"remove": 0.4, "schedule": 0.1, "watch": data, "progress": False, "checkpoint": tmp_path / "run.pt"}
    once, again = sc.prune(net, data, **options), sc.prune(net, data, **options)
    assert drifts(once) == drifts(again)
    assert once.seen.keys() == again.seen.keys()
    assert all(torch.equal(once.seen[step], again.seen[step]) for step in once.seen)
    with pytest.raises(sc.errors.SecateurError, match="watch"):
        sc.prune(net, data, **{**options, "watch": (data[0] + 1, data[1])})


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_goes_on_may_be_watched_or_not(tmp_path: Path, first: bool) -> None:
    """The same network either way. Heat maps are those of one set of samples: what others showed is forgotten."""
    net, data, calls = network(), pictures(6), []

    def evaluate(model: nn.Module) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 0.5

    file = {"checkpoint": tmp_path / "run.pt"}
    options = {"remove": 0.4, "schedule": 0.1, "progress": False, "evaluate": evaluate}
    watched = [{"watch": data}, {}] if first else [{}, {"watch": data}]
    with pytest.raises(KeyboardInterrupt):
        sc.prune(net, data, **options, **file, **watched[0])
    result, whole = (sc.prune(net, data, **options, **more, **watched[1]) for more in (file, {}))
    assert len(calls) == 3 + 3 + 5  # it went on after step 1
    states = [found.model.state_dict() for found in (result, whole)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    known = set() if first else {2, 3, 4}
    assert set(result.seen) == {row.step for row in result.history if row.drift is not None} == known
    assert all(torch.equal(result.seen[step], whole.seen[step]) for step in known)
    result.report(tmp_path / "report.html", data=data)
    # Nor is training that was interrupted begun again.
    settings = [Settings(criterion_named("lrp"), Target(0.4), watch=watch) for watch in (None, data)]
    files = [Checkpoint(tmp_path / "run.pt", net, result.graph, each, data).training for each in settings]
    assert files[0].identity == files[1].identity
    # A limit for the drift depends on the samples.
    net, calls = network(), [1, 1, 1]
    options |= {"max_drift": 2.0, "checkpoint": tmp_path / "other.pt"}
    sc.prune(net, data, **options, watch=data)
    with pytest.raises(sc.errors.SecateurError, match="other watch"):
        sc.prune(net, data, **options)


def test_what_max_drift_may_be() -> None:
    net, data = network(), pictures(3)
    for wrong in (-0.1, {}, {"overall": -1}, "much"):
        with pytest.raises(sc.errors.TargetError, match="max_drift"):
            sc.prune(net, data, max_drift=wrong, progress=False)
    with pytest.raises(sc.errors.SecateurError, match="watch"):
        sc.prune(net, data, remove=0.5, watch=data[0], progress=False)


def test_a_result_tells_its_drift() -> None:
    net, data = network(), pictures(6)
    result = sc.prune(net, data, remove=0.3, progress=False)
    found = result.drift(data)
    assert torch.equal(found.agreement, drift(net, result.model, data).agreement)
    assert found.srg is not None


# -- after every run ---------------------------------------------------------------------------------------------------
def test_every_run_tells_whether_its_reasons_stayed() -> None:
    net, (x, y) = network(), pictures(30)
    result = sc.prune(net, (x, y), remove=0.2, progress=False)
    found = result.reasons
    assert found is not None
    count = len(found.agreement)
    assert 3 <= count < len(x)
    assert found.classes.tolist() == y[:count].tolist()  # the first of each class, then the second, …
    heats = [sc.explain(model, x[:count], y[:count]).heat.double().numpy() for model in (net, result.model)]
    expected = [np.corrcoef(*(blocks(maps[i], 14).ravel() for maps in heats))[0, 1] for i in range(count)]
    assert found.agreement.tolist() == pytest.approx(expected, abs=1e-9)
    assert found.srg is not None
    line = str(result).splitlines()[-1]
    assert line.startswith(f"drift of the heat maps of {count} samples: {1 - np.mean(expected):.2f} (")
    assert f"SRG {float(found.srg[0].mean()):.2f} → {float(found.srg[1].mean()):.2f}" in line
    again = sc.prune(net, (x, y), remove=0.2, progress=False)
    assert torch.equal(again.reasons.agreement, found.agreement)


def test_targets_that_the_unpruned_model_never_answers_are_doubted() -> None:
    """Such as the numbers of folders beside a model with a thousand outputs."""
    net, (x, _) = network(), pictures(30)
    answers = net.eval()(x).detach()
    for targets, doubted in ((answers.argmax(1), False), (answers.argmin(1), True)):
        result = sc.prune(net, (x, targets), remove=0.2, watch=(x[:6], targets[:6]), progress=False)
        told = "the unpruned model is right on none of them: are targets numbered as its outputs are?"
        assert (told in str(result).splitlines()[-1]) == doubted


def test_samples_that_are_watched_are_looked_at() -> None:
    net, (x, y) = network(), pictures(5)
    result = sc.prune(net, (x, y), remove=0.2, repair=None, watch=(x[:4], y[:4]), progress=False)
    assert torch.equal(result.reasons.agreement, drift(net, result.model, (x[:4], y[:4])).agreement)


def test_no_samples_no_reasons() -> None:
    net, (x, y) = network(), pictures(30)
    assert sc.prune(net, [(x, None)], "weight", remove=0.2, progress=False).reasons is None
    # Scored once and not repaired, this run took less than twenty times what two heat maps take.
    assert sc.prune(net, (x[:6], y[:6]), remove=0.2, repair=None, progress=False).reasons is None
    worse = iter((1.0, 0.0))
    assert sc.prune(net, (x, y), max_drop=0.0, evaluate=lambda model: next(worse), progress=False).reasons is None


class Halves(nn.Module):
    """Sees the left half and, much weaker, the right half of a picture; both say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.say = nn.Conv2d(1, 2, (1, 8), (1, 8), bias=False), nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.look.weight.zero_()
            self.look.weight[0, 0, 0, :4], self.look.weight[1, 0, 0, 4:] = 1, 0.01
            self.say.weight[0], self.say.weight[1] = 1.0, -1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.say(self.look(x).relu().mean((2, 3)))


def _keep_the_right_half(small: nn.Module, original: nn.Module, data: object) -> nn.Module:
    """A repair that is as accurate as the original."""
    with torch.no_grad():
        small.look.weight.copy_(100 * original.look.weight[1:])
    return small


def test_a_run_warns_of_other_reasons() -> None:
    net, x, y = Halves().eval(), torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)
    options = {"remove": 0.5, "repair": _keep_the_right_half, "progress": False, "watch": (x, y)}
    with pytest.warns(sc.errors.SecateurWarning, match="right for other reasons: class 0"):
        result = sc.prune(net, (x, y), **options)
    assert "right for other reasons: 0" in str(result)
    # Two samples are too few to judge, and a model that became worse is not "right".
    few = sc.prune(net, (x, y), **{**options, "watch": (x[:2], y[:2])})
    assert few.reasons.other_reasons == []
    assert "other reasons" not in str(few)
    worse = iter((0.9, 0.5))
    assert sc.prune(net, (x, y), evaluate=lambda model: next(worse), **options).reasons.other_reasons == [0]


def test_what_cannot_be_explained_ends_no_run() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 3)

        def forward(self, given: dict[str, Tensor]) -> Tensor:
            return self.last(self.first(given["a"]).relu())

    data = [({"given": {"a": torch.rand(64, 4)}}, torch.arange(64) % 3)]
    result = sc.prune(Odd(), data, remove=0.5, progress=False)
    assert result.reasons is None
    assert "heat maps need a tensor" in result.settings["reasons"]


def test_texts_have_reasons_after_every_run() -> None:
    net, x = Words().eval(), torch.randint(20, (60, 6), generator=torch.Generator().manual_seed(0))
    inputs, y = {"input_ids": x, "attention_mask": torch.ones_like(x)}, torch.arange(60) % 2
    result = sc.prune(net, [(inputs, y)], remove=0.1, progress=False)
    found = result.reasons
    assert found is not None
    assert found.srg is not None
    few = {name: values[: len(found.agreement)] for name, values in inputs.items()}
    assert len(few["input_ids"]) >= 4
    maps = [sc.explain(model, few, y[: len(found.agreement)]).heat.double().numpy() for model in (net, result.model)]
    expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(*maps, strict=True)]
    assert found.agreement.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_report_does_not_explain_again_what_the_run_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody wrote to a model, as training does, or other samples are shown."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 2),
    ).eval()  # fmt: skip
    x, y = torch.rand(6, 3, 16, 16), torch.arange(6) % 2
    result = sc.prune(net, (x, y), remove=0.3, watch=(x[:4], y[:4]), progress=False)
    home, made = sys.modules["secateur.report.changes"], list[int]()
    usual = home.Viewer
    monkeypatch.setattr(home, "Viewer", lambda *args: made.append(1) or usual(*args))

    def page(**options: Any) -> str:
        made.clear()
        text = result.report(tmp_path / "page.html", page=Page(latency=False), **options).read_text()
        return text.partition("</head>")[2]

    shown = (x[:4].clone(), y[:4].clone())
    known = page(inputs=shown)
    assert not made
    assert result.reasons is not None
    object.__setattr__(result.reasons, "look", None)
    again = page(inputs=shown)
    assert made == [1]
    assert known == again, "the same page"
    result = sc.prune(net, (x, y), remove=0.3, watch=(x[:4], y[:4]), progress=False)
    page(inputs=(x[1:5], y[1:5]))
    assert made == [1]
    assert copy.deepcopy(result.reasons).look is None
    result.model[0].weight.data.mul_(1.01)  # which torch does not count
    page(inputs=shown)
    assert made == [1]
