"""One block of the grid: a network, some seeds, all sizes of reference set, all criteria.

Scores, plans and removals come from the public API. Only the accuracies are computed in bulk. Every block compares some
of these with networks whose units were really removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import secateur as sc
from reproduction.criteria import CRITERIA
from reproduction.toy.evaluation import Evaluator, Layers, Removed, removed_by
from reproduction.toy.nets import Trained, trained
from reproduction.toy.ranking import doubled_ranks
from reproduction.toy.recipe import REMOVED, Reading, Recipe
from reproduction.toy.store import Arrays, digest, get, put
from secateur.criteria.criterion import Criterion
from secateur.criteria.scoring import score
from secateur.criteria.sensitivity import Gradient, Taylor
from secateur.criteria.weight import Weight
from secateur.errors import VerificationError
from secateur.plans.scores import Scores
from secateur.structure.graph import Graph

# The largest allowed difference between the logits of a pruned network and of the bulk evaluation, relative to the
# largest logit.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Task:
    """The inputs of a block. It is sent to another process. `code` identifies the code that computes it."""

    name: str
    reading: Reading
    recipe: Recipe
    seeds: tuple[int, ...]
    cache: Path
    code: str

    def path(self, weights: str) -> Path:
        """The file of the result. Its name depends on everything that the result depends on."""
        about = [self.name, self.reading.name, self.recipe.as_dict(), self.seeds, weights, self.code]
        return self.cache / "toy" / f"block-{digest('block 1', about)}.safetensors"


def block(task: Task) -> tuple[Arrays, bool]:
    """The block's arrays, and whether they were computed now (True) or found in the cache (False).

    - `accuracy` [sizes, seeds, criteria, views] in percent, `unpruned` [seeds, views]
    - `ranks` [sizes, seeds, criteria, units]: doubled ranks of the scores
    - `removed` [sizes, seeds, criteria, layers]: how many units each hidden layer lost
    - `variants` [variant sizes, seeds, ways to compute LRP]: accuracy on the training set
    - `gap`: the largest difference between bulk evaluation and a pruned network, relative to the largest logit
    """
    subject = trained(task.name, task.reading, task.recipe, task.cache)
    path = task.path(subject.name)
    found = get(path)
    if found is not None:
        return found[0], False
    arrays = _compute(task, subject)
    put(path, arrays, {"set": task.name, "reading": task.reading.name, "seeds": list(task.seeds)})
    return arrays, True


def _compute(task: Task, subject: Trained) -> Arrays:
    recipe, net = task.recipe, subject.net
    graph = sc.analyze(net, torch.zeros(1, 2))
    shape = (len(recipe.sizes), len(task.seeds), len(CRITERIA))
    accuracy = np.zeros((*shape, len(recipe.views)), np.float32)
    unpruned = np.zeros((len(task.seeds), len(recipe.views)), np.float32)
    ranks = np.zeros((*shape, graph.total_units), np.uint16)
    removed = np.zeros((*shape, 3), np.int32)
    ways = np.zeros((len(recipe.variant_sizes), len(task.seeds), len(task.reading.variants)), np.float32)
    checked = task.seeds[0] % len(recipe.sizes)  # a different size in each block
    gap = 0.0
    layers = Layers(net)
    training = _Views(layers, [recipe.training(task.name).tensors()])
    for j, seed in enumerate(task.seeds):
        tests = _Views(layers, [recipe.test(task.name, noise, seed).tensors() for noise in recipe.noises])
        unpruned[j] = training.accuracy(((), (), ())) + tests.accuracy(((), (), ()))
        for i, size in sorted(enumerate(recipe.sizes), reverse=True):  # large sets first, as a start
            scores = reference_scores(task, subject, size, seed, graph)
            for c, criterion in enumerate(CRITERIA):
                plan = sc.plan(graph, scores[criterion], remove=REMOVED)
                gone = removed_by(plan)
                if size == max(recipe.sizes):
                    tests.remember(gone)
                    if j == 0:
                        training.remember(gone)
                accuracy[i, j, c] = training.accuracy(gone) + tests.accuracy(gone)
                ranks[i, j, c] = doubled_ranks(scores[criterion].of(graph)[graph.candidates])
                removed[i, j, c] = [len(units) for units in gone]
                if j == 0 and i == checked:
                    gap = max(gap, tests.check(sc.apply(net, plan), gone))
            if size in recipe.variant_sizes:
                for v, variant in enumerate(task.reading.variants):
                    plan = sc.plan(graph, scores.get(variant.name, scores["lrp"]), remove=REMOVED)
                    ways[recipe.variant_sizes.index(size), j, v] = training.accuracy(removed_by(plan))[0]
    return {
        "accuracy": accuracy,
        "unpruned": unpruned,
        "ranks": ranks,
        "removed": removed,
        "variants": ways,
        "gap": np.array([gap]),
    }


def reference_scores(task: Task, subject: Trained, size: int, seed: int, graph: Graph) -> dict[str, Scores]:
    """Scores by all criteria on one reference set, as one batch."""
    reading = task.reading
    criteria: list[Criterion] = [Weight(norm=reading.norm), Taylor(), Gradient(), reading.variant.criterion("lrp")]
    if size in task.recipe.variant_sizes:
        criteria += [variant.criterion() for variant in reading.variants if variant != reading.variant]
    data = task.recipe.reference(task.name, size, seed).tensors()
    return score(subject.net, [data], criteria, graph=graph)


class _Views:
    """Several sets of points that are evaluated together and counted separately."""

    def __init__(self, layers: Layers, parts: list[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        self.sizes = [len(y) for _, y in parts]
        self.evaluator = Evaluator(layers, self.x)
        self.remember = self.evaluator.remember
        self._counted: dict[tuple[tuple[int, ...], ...], list[float]] = {}

    def accuracy(self, removed: Removed) -> list[float]:
        """The accuracy in percent on each set. Results are cached by pruning."""
        key = tuple(removed)
        if key not in self._counted:
            right = (self.evaluator.classes(removed) == self.y).double()
            self._counted[key] = [100 * float(part.mean()) for part in torch.split(right, self.sizes)]
        return self._counted[key]

    @torch.no_grad()
    def check(self, small: torch.nn.Module, removed: Removed) -> float:
        """The difference between bulk logits and those of the smaller network. More than rounding is an error."""
        exact, bulk = small(self.x), self.evaluator.logits(removed)
        largest = exact.abs().max()
        gap = float((exact - bulk).abs().max() / largest)
        if not gap <= _ROUNDING:
            raise VerificationError(f"bulk evaluation and the pruned network differ by {gap:.2g} of the largest logit.")
        best, second = exact.topk(2).values.T
        wrong = (self.evaluator.classes(removed) != exact.argmax(1)) & (best - second > _ROUNDING * largest)
        if bool(wrong.any()):
            raise VerificationError(f"bulk evaluation puts {int(wrong.sum())} points into other classes.")
        return gap
