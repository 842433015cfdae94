"""Rank statistics against definitions that count pairs and sets one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reproduction.toy.ranking import Spread, centred, chosen, doubled_ranks, over_pairs, overlap

scores = st.lists(st.integers(-4, 4).map(float), min_size=4, max_size=24)


def slow_rank(values, i):
    """One more than the number of lower scores, plus half of the other equal ones."""
    below = sum(v < values[i] for v in values)
    equal = sum(v == values[i] for v in values) - 1
    return 1 + below + equal / 2


def slow_correlation(a, b):
    ra, rb = ([slow_rank(v, i) for i in range(len(v))] for v in (a, b))
    ma, mb = sum(ra) / len(ra), sum(rb) / len(rb)
    product = sum((x - ma) * (y - mb) for x, y in zip(ra, rb, strict=True))
    size = (sum((x - ma) ** 2 for x in ra) * sum((y - mb) ** 2 for y in rb)) ** 0.5
    return product / size if size else 0.0


@given(scores)
@settings(max_examples=60, deadline=None)
def test_doubled_ranks_are_twice_the_mean_ranks(values):
    found = doubled_ranks(np.array(values))
    assert [r / 2 + 1 for r in found.tolist()] == [slow_rank(values, i) for i in range(len(values))]


@given(scores, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_products_of_centred_ranks_are_rank_correlations(values, random):
    other = [random.randint(-3, 3) for _ in values]
    rows = centred(np.stack([doubled_ranks(np.array(values)), doubled_ranks(np.array(other, float))]))
    assert (rows @ rows.T)[0, 1] == pytest.approx(slow_correlation(values, other), abs=1e-9)


def test_rank_correlation_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=300).round(1), rng.normal(size=300)
    rows = centred(np.stack([doubled_ranks(a), doubled_ranks(b)]))
    assert float(rows[0] @ rows[1]) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


@given(st.lists(scores.filter(lambda v: len(v) >= 8).map(lambda v: v[:8]), min_size=2, max_size=5), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_overlap_counts_common_members(table, k):
    ranks = np.stack([doubled_ranks(np.array(row)) for row in table])
    for end in ("first", "last"):
        orders = [sorted(range(8), key=lambda i, row=row: (row[i], i)) for row in table]
        sets = [set(order[:k] if end == "first" else order[8 - k :]) for order in orders]
        marks = chosen(ranks, k, end)
        found = overlap(marks, marks, k)
        for i, one in enumerate(sets):
            for j, two in enumerate(sets):
                assert found[i, j] == pytest.approx(len(one & two) / k)


def test_pairs_leave_out_the_diagonal():
    table = np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.8], [0.2, 0.8, 1.0]])
    assert over_pairs(table) == Spread(pytest.approx(0.5), pytest.approx(np.std([0.5, 0.2, 0.8])))
    assert np.isnan(over_pairs(np.ones((1, 1))).mean)
