"""An importance for Torch-Pruning's own pruners: theirs decide what is removed, secateur says what matters.

import torch_pruning as tp
from secateur.integrations.torch_pruning import SecateurImportance

importance = SecateurImportance(model, data, criterion="lrp")
pruner = tp.pruner.BasePruner(model, example_inputs, importance, pruning_ratio=0.5, global_pruning=True)
pruner.step()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from secateur.criteria.registry import Choice
from secateur.criteria.scoring import score
from secateur.errors import CriterionError
from secateur.running.batches import Data, repeatable


class SecateurImportance:
    """One number per channel of a Torch-Pruning group: the mean of our scores over the layers that make its channels.

    Takes the arguments of `secateur.score`. Torch-Pruning changes the model in place; scores are made anew once they no
    longer fit, so iterative pruners re-score at every step. Torch-Pruning itself is not imported: its pruners take any
    callable, which this is.
    """

    def __init__(self, model: nn.Module, data: Data, criterion: Choice = "lrp", **options: Any) -> None:
        self.model, self.data, self.criterion, self.options = model, repeatable(data), criterion, options
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._scores: dict[nn.Module, Tensor] = {}

    def refresh(self) -> None:
        """Score the model as it is now."""
        scores = score(self.model, self.data, self.criterion, **self.options)
        modules = dict(self.model.named_modules())
        self._scores = {}
        for site, values in scores.units.items():
            module = modules.get(site.path)
            if module is not None and hasattr(module, "weight"):
                self._scores.setdefault(module, torch.from_numpy(values))
        self._shapes = self._present()

    def _present(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def __call__(self, group: Any) -> Tensor | None:
        """The importance of each channel of a group; None for groups in which no layer makes channels."""
        if self._shapes != self._present():
            self.refresh()
        place = {root: i for i, root in enumerate(group[0].root_idxs)}
        total, count = torch.zeros(len(place), dtype=torch.float64), 0
        for item in group:
            values = self._scores.get(item.dep.layer)
            if values is None or not item.dep.pruning_fn.__name__.startswith("prune_out"):
                continue
            if max(item.idxs) >= len(values):
                raise CriterionError(f"Torch-Pruning asks for channel {max(item.idxs)} of {item.dep.layer}.")
            pairs = [(place[r], i) for r, i in zip(item.root_idxs, item.idxs, strict=True) if r in place]
            if pairs:
                where, which = zip(*pairs, strict=True)
                total.index_add_(0, torch.tensor(where), values[list(which)])
                count += 1
        return (total / count).float() if count else None
