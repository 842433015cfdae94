"""Bulk evaluation against networks that were really cut, and the variants of LRP against their formulas."""

import numpy as np
import pytest
import torch

import secateur as sc
from secateur.criteria.scoring import score
from secateur.experiments.toy.evaluation import Evaluator, removed_by
from secateur.experiments.toy.nets import ToyNet
from secateur.experiments.toy.ranking import chosen, doubled_ranks
from secateur.experiments.toy.recipe import REMOVED
from secateur.experiments.toy.variants import ALL, Variant

WIDTH = 24


def small_net(third_relu):
    torch.manual_seed(1)
    return ToyNet(WIDTH, 3, third_relu, 0.5).eval()


def data(count=40):
    torch.manual_seed(2)
    return torch.randn(count, 2), torch.arange(count) % 3


@pytest.mark.parametrize("third_relu", [True, False])
def test_bulk_logits_are_those_of_the_smaller_network(third_relu):
    net, (x, y) = small_net(third_relu), data()
    graph = sc.analyze(net, torch.zeros(1, 2))
    evaluator = Evaluator(net, x)
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
    evaluator = Evaluator(net, x)
    rng = np.random.default_rng(0)
    for _ in range(6):
        gone = [tuple(np.flatnonzero(rng.random(WIDTH) < rng.random() * 0.9).tolist()) for _ in range(3)]
        keep = [torch.ones(WIDTH).index_fill_(0, torch.tensor(units, dtype=torch.long), 0) for units in gone]
        with torch.no_grad():
            h = net.first(x).relu() * keep[0]
            h = net.second(h).relu() * keep[1]
            h = net.third(h)
            h = (h.relu() if third_relu else h) * keep[2]
            torch.testing.assert_close(evaluator.logits(gone), net.output(h), rtol=1e-4, atol=1e-5)
        evaluator.remember(gone)
    with torch.no_grad():
        torch.testing.assert_close(evaluator.logits(((), (), ())), net(x), rtol=1e-4, atol=1e-5)


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
