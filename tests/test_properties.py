"""Random networks, random removals: removal equals masking, whatever is composed."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import secateur as sc
from constructs import randomise
from oracle import outputs, random_scores, relative_gap, zeroed
from random_nets import RandomNet, networks
from secateur.errors import NothingToPruneError, TargetError
from secateur.plans import Limits

EXAMPLES = int(os.environ.get("SECATEUR_EXAMPLES", "200"))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(net=networks(), share=st.floats(0.05, 0.9), seed=st.integers(0, 99), scope=st.sampled_from(["global", "layer"]))
def test_removal_equals_masking(net: RandomNet, share: float, seed: int, scope: str) -> None:
    example = torch.randn(2, 3, 4, 4)
    graph = sc.analyze(net, example)
    try:
        plan = sc.plan(graph, random_scores(graph, seed), remove=share, limits=Limits(scope=scope))
    except (NothingToPruneError, TargetError):
        event("nothing or too little may leave")
        return
    small = sc.apply(net, plan)
    if plan.norms:
        event("a norm mixes channels")
        masked = sc.apply(net, plan, how="mask")
        assert relative_gap(outputs(small, example), outputs(masked, example)) < 1e-4
    assert relative_gap(outputs(small, example), outputs(zeroed(net, graph, plan), example)) < 1e-4
    assert sc.measure(small, example, latency=False) == plan.after
    assert plan.units[1] == plan.units[0] - sum(int(graph.units[g]) for g in plan.groups)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(net=networks(), seed=st.integers(0, 99), round_to=st.sampled_from([2, 4]))
def test_rounding_keeps_multiples(net: RandomNet, seed: int, round_to: int) -> None:
    """Where a layer's channels can be kept in multiples, they are."""
    example = torch.randn(1, 3, 4, 4)
    graph = sc.analyze(randomise(net), example)
    try:
        plan = sc.plan(graph, random_scores(graph, seed), remove=0.5, limits=Limits(round_to=round_to))
    except (NothingToPruneError, TargetError):
        return
    small = dict(sc.apply(net, plan).named_parameters())
    for name, dims in plan.cuts.items():
        if 0 in dims and name.endswith("stem.weight"):
            assert small[name].shape[0] % round_to == 0
