"""Bulk evaluation against networks that were really cut, and the variants of LRP against their formulas."""

import numpy as np
import pytest
import torch

import secateur as sc
from reproduction.toy.cells import cells
from reproduction.toy.evaluation import Evaluator, Layers, removed_by
from reproduction.toy.nets import ToyNet
from reproduction.toy.ranking import chosen, doubled_ranks
from reproduction.toy.recipe import REMOVED
from reproduction.toy.variants import ALL, Variant
from secateur.criteria.scoring import score

WIDTH = 24


def small_net(third_relu):
    torch.manual_seed(1)
    return ToyNet(WIDTH, 3, third_relu, 0.5).eval()


def data(count=40):
    torch.manual_seed(2)
    return torch.randn(count, 2), torch.arange(count) % 3


def random_removals(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield [tuple(np.flatnonzero(rng.random(WIDTH) < rng.random() * 0.9).tolist()) for _ in range(3)]


def masked_logits(net, x, gone):
    """The network itself, with zeros for units that are gone."""
    keep = [torch.ones(WIDTH).index_fill_(0, torch.tensor(units, dtype=torch.long), 0) for units in gone]
    with torch.no_grad():
        h = net.first(x).relu() * keep[0]
        h = net.second(h).relu() * keep[1]
        h = net.third(h)
        return net.output((h.relu() if hasattr(net, "third_relu") else h) * keep[2])


@pytest.mark.parametrize("third_relu", [True, False])
def test_bulk_logits_are_those_of_the_smaller_network(third_relu):
    net, (x, y) = small_net(third_relu), data()
    graph = sc.analyze(net, torch.zeros(1, 2))
    evaluator = Evaluator(Layers(net), x)
    for step, criterion in enumerate(["weight", "taylor", "gradient", "lrp", "random"]):
        plan = sc.plan(graph, score(net, (x, y), criterion, graph=graph), remove=REMOVED)
        small = sc.apply(net, plan)
        with torch.no_grad():
            torch.testing.assert_close(evaluator.logits(removed_by(plan)), small(x), rtol=1e-4, atol=1e-5)
        if step == 1:  # later prunings start from the sums of this one
            evaluator.remember(removed_by(plan))


@pytest.mark.parametrize("third_relu", [True, False])
def test_bulk_logits_with_any_units_gone(third_relu):
    net, (x, _) = small_net(third_relu), data()
    evaluator = Evaluator(Layers(net), x)
    for gone in random_removals(6):
        torch.testing.assert_close(evaluator.logits(gone), masked_logits(net, x, gone), rtol=1e-4, atol=1e-5)
        evaluator.remember(gone)
    with torch.no_grad():
        torch.testing.assert_close(evaluator.logits(((), (), ())), net(x), rtol=1e-4, atol=1e-5)


def test_classes_are_exact_though_most_are_decided_by_polynomials():
    net, (x, _) = small_net(True), data(1500)
    evaluator = Evaluator(Layers(net), x)
    sure = []
    for gone in [((), (), ()), *random_removals(8)]:
        logits = masked_logits(net, x, gone)
        best, second = logits.topk(2).values.T
        told = best - second > 1e-5 * logits.abs().max()
        assert told.float().mean() > 0.99
        assert (evaluator.classes(gone) == logits.argmax(1))[told].all()
        sure.append(evaluator.decisions(gone)[1].float().mean())
    assert 0.5 < torch.stack(sure).mean() < 1  # both ways were taken


def test_reach_bounds_what_the_second_layer_can_do():
    net = small_net(True)
    reach = Layers(net).reach
    torch.manual_seed(3)
    largest = 0.0
    for gone in random_removals(200, seed=1):
        one = torch.rand(WIDTH) * 2
        two = one + torch.randn(WIDTH) * 10 ** float(torch.rand(()) * 3 - 2)
        keep = [torch.ones(WIDTH).index_fill_(0, torch.tensor(units, dtype=torch.long), 0) for units in gone]
        with torch.no_grad():
            moved = net.output(net.third(one * keep[1]).relu() * keep[2]) - net.output(
                net.third(two * keep[1]).relu() * keep[2]
            )
        change = float((moved[:, None] - moved[None]).abs().max() / (one - two).norm())
        assert change <= reach
        largest = max(largest, change)
    assert largest > reach / 20


def test_cells_hold_every_point_once_and_fit_polynomials_of_degree_four():
    x = torch.from_numpy(np.random.default_rng(4).normal(size=(1001, 2)) * [3, 0.1] + [5, -2]).float()
    made = cells(x)
    assert sorted(torch.cat([cell.points for cell in made]).tolist()) == list(range(1001))
    assert all(16 <= len(cell.points) <= 256 for cell in made)
    for cell in made:
        across, up = (x[cell.points] - torch.tensor([5, -2])).double().T
        values = (1 + 2 * across - up + across**2 * up - 3 * up**4 + across**3 * up / 4).float()[None]
        found = cell.fit(values).T @ cell.terms
        torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-4 * float(values.abs().max()))
        x_again = cell.middle[:, None] + cell.size[:, None] * cell.terms[1:3]
        torch.testing.assert_close(x_again.T, x[cell.points], rtol=1e-5, atol=1e-5)


def test_the_first_third_of_the_ranks_is_what_a_plan_removes():
    net, (x, y) = small_net(True), data()
    graph = sc.analyze(net, torch.zeros(1, 2))
    for criterion in ("lrp", "taylor", "weight"):
        scores = score(net, (x, y), criterion, graph=graph)
        marks = chosen(doubled_ranks(scores.of(graph)[graph.candidates]), WIDTH, "first")
        gone = removed_by(sc.plan(graph, scores, remove=REMOVED))
        assert [np.flatnonzero(part).tolist() for part in marks.reshape(3, WIDTH)] == [list(units) for units in gone]


def slow_lrp(net, x, y, variant):
    """Relevance of all hidden units, one sample and one product at a time."""
    second, third, last = (m.weight.detach().double() for m in (net.second, net.third, net.output))
    total = [torch.zeros(WIDTH, dtype=torch.double) for _ in range(3)]
    for sample, label in zip(x, y, strict=True):
        with torch.no_grad():
            h1 = net.first(sample).relu().double()
            h2 = net.second(h1.float()).relu().double()
            h3 = net.third(h2.float()).double()
            h3 = h3.relu() if hasattr(net, "third_relu") else h3
            out = net(sample).double()
        relevance = torch.zeros_like(out)
        relevance[label] = 1 if variant.start == "one" else out[label]
        for layer, (a, w) in enumerate([(h3, last), (h2, third), (h1, second)]):
            z = a * (w.clamp(min=0) if variant.signed and layer == 0 else w)
            if not (variant.signed and layer == 0):
                z = z.clamp(min=0)
            relevance = (z / z.sum(1, keepdim=True) * relevance[:, None]).sum(0)
            total[2 - layer] += relevance
    return torch.cat(total)


@pytest.mark.parametrize("third_relu", [True, False])
@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.name)
def test_variants_of_lrp_follow_their_formulas(third_relu, variant):
    net, (x, y) = small_net(third_relu), data(6)
    graph = sc.analyze(net, torch.zeros(1, 2))
    found = score(net, [(x, y)], variant.criterion(), graph=graph).of(graph)[graph.candidates]
    expected = slow_lrp(net, x, y, variant).numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4 * np.abs(expected).max())


def test_both_rules_agree_behind_a_relu_and_differ_without():
    x, y = data(12)
    for third_relu, same in ((True, True), (False, False)):
        net = small_net(third_relu)
        graph = sc.analyze(net, torch.zeros(1, 2))
        one, two = (
            score(net, (x, y), Variant("one", s).criterion(), graph=graph).of(graph)[graph.candidates] for s in (0, 1)
        )
        assert np.allclose(one, two, rtol=1e-4, atol=1e-6) == same
