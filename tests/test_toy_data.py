"""The toy sets against scikit-learn's generators, and against the formula of the spirals written out point by point."""

import math

import numpy as np
import pytest

from reproduction.toy.points import CLASSES, points
from reproduction.toy.recipe import FULL
from secateur.errors import DataError


class Silent:
    """A generator that disturbs nothing."""

    def normal(self, scale=1.0, size=None):
        return np.zeros(size)

    def standard_normal(self, size=None):
        return np.zeros(size)


@pytest.mark.parametrize("count", [1, 2, 7, 200])
def test_moons_and_circles_lie_where_scikit_learn_puts_them(count):
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.make_moons(2 * count, shuffle=False)
    moons = points("moon", count, Silent())
    np.testing.assert_allclose(moons.x, x, atol=1e-12)
    assert moons.y.tolist() == y.tolist()
    x, y = datasets.make_circles(2 * count, shuffle=False, factor=0.3)
    circles = points("circle", count, Silent())
    np.testing.assert_allclose(circles.x, x, atol=1e-12)
    assert circles.y.tolist() == y.tolist()


def test_spirals_follow_their_formula():
    count = 5
    seen = points("multi", count, np.random.default_rng(3))
    again = np.random.default_rng(3)
    for arm in range(4):
        shifts = again.standard_normal(count)
        for i in range(count):
            radius = i / (count - 1)
            angle = 4 * arm + 4 * i / (count - 1) + 0.2 * shifts[i]
            expected = (radius * math.sin(angle), radius * math.cos(angle))
            assert seen.x[arm * count + i] == pytest.approx(expected, abs=1e-12)
            assert seen.y[arm * count + i] == arm


def test_one_point_per_spiral_is_the_origin():
    assert np.abs(points("multi", 1, np.random.default_rng(0)).x).max() == 0


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_disturbances_have_the_stated_size(name, noise):
    clean, seen = points(name, 4000, Silent()), points(name, 4000, np.random.default_rng(0), noise)
    own = 0.0 if name == "multi" else 0.1
    if name == "multi":  # the angle moves points along circles; only the further noise changes the radius
        spread = (np.linalg.norm(seen.x, axis=1) - np.linalg.norm(clean.x, axis=1))[clean.y == 3][2000:].std()
        assert spread == pytest.approx(noise, rel=0.1, abs=1e-9)
    else:
        assert (seen.x - clean.x).std() == pytest.approx(math.hypot(own, noise), rel=0.03)


def test_unknown_sets_and_empty_draws_are_refused():
    with pytest.raises(DataError, match="there are moon, circle, multi"):
        points("sun", 3, np.random.default_rng(0))
    with pytest.raises(DataError, match="at least one"):
        points("moon", 0, np.random.default_rng(0))


def test_sets_of_a_recipe_are_repeatable_and_apart():
    first, again = FULL.reference("moon", 5, 7), FULL.reference("moon", 5, 7)
    assert np.array_equal(first.x, again.x)
    others = [FULL.reference("moon", 5, 8), FULL.reference("circle", 5, 7), FULL.test("moon", 0.3, 7)]
    assert all(not np.array_equal(first.x, other.x[:10]) for other in others)
    assert len(FULL.training("multi")) == 4000
    assert len(FULL.test("multi", 0.1, 0)) == 2000
