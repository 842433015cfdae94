"""Experts: units among which a router chooses the best few for each token, and of which the others are not computed.

An expert that left can never be chosen. So its masked reference is a router without it: probabilities are those of the
experts that are left, and the choice is among them. Numbers that come from a choice are followed; where they look up an
axis of a parameter, that axis is one of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.activation import Identity
from secateur.ops.elementwise import Sum
from secateur.ops.layers import Labels, column, narrow
from secateur.ops.places import Gather
from secateur.ops.reduce import Best, TopK
from secateur.ops.table import Call, Site
from secateur.running.tensor_facts import TensorFacts
from secateur.structure.findings import Findings, NormSite


@dataclass(eq=False)
class Choice:
    """A softmax over units, or a choice of `least` of them. `used`: what was chosen looks up a parameter."""

    site: Site
    layer: Tensor
    reason: str
    least: int = 0
    used: bool = False

    @property
    def labels(self) -> Labels:
        """The units among which it chooses."""
        return np.abs(column(self.layer))


class Choices:
    """Follows what routers compute through one forward pass."""

    def __init__(self, found: Findings) -> None:
        self._found = found
        #: Probabilities over units that may turn out to be experts.
        self._shares = TensorFacts[Choice]()
        #: Numbers that come from a choice: which, how many of each, in which order.
        self._numbers = TensorFacts[Choice]()

    def share(self, layer: Tensor, output: Tensor, call: Call) -> None:
        """The units of this layer become shares of a whole. They can leave if they are experts."""
        choice = Choice(call.site, narrow(layer), f"{call.site} normalises over it")
        self._found.choices.append(choice)
        self._shares[output] = choice

    def choose(self, layer: Tensor, indices: Tensor, count: int, call: Call) -> None:
        """The `indices` of the best units of this layer are taken."""
        choice = Choice(call.site, narrow(layer), f"{call.site} runs along it", count)
        if isinstance(call.operation, Best):  # one after the other: there must be as many as are taken in the end
            same = [c for c in self._found.choices if c.least and c.labels.tobytes() == choice.labels.tobytes()]
            choice.least += max((c.least for c in same), default=0)
        self._found.choices.append(choice)
        self._numbers[indices] = choice

    def looks_up(self, units: Labels | None, index: Any, weight: bool) -> bool:
        """Whether an index comes from a choice among these units, which an axis holds. Of a weight, it is experts'."""
        choice = self._numbers.get(index) if isinstance(index, Tensor) else None
        if choice is None or units is None or len(units) != len(choice.labels):
            return False
        self._found.join(units, choice.labels)
        choice.used |= weight
        return True

    def observe(self, call: Call, output: Any) -> None:
        """Shares may be cast and shifted before a choice. Any other use needs all of them."""
        if not self._shares:
            return
        for tensor in call.tensors():
            choice = self._shares.get(tensor)
            if choice is None or isinstance(call.operation, TopK | Best | Gather):
                continue
            if isinstance(call.operation, Identity | Sum):
                for made in tensors_in(output):
                    self._shares[made] = choice
            else:
                self._found.freeze(choice.labels, choice.reason)

    def follow(self, given: Any, made: Any) -> None:
        """What is computed from chosen numbers alone, and whole numbers that are computed from some, come from them."""
        if not self._numbers:
            return
        sources = tensors_in(given)
        known = [choice for tensor in sources if (choice := self._numbers.get(tensor)) is not None]
        for tensor in tensors_in(made) if known else ():
            follows = len(known) == len(sources) or not tensor.is_floating_point()
            if follows and tensor not in self._numbers:
                self._numbers[tensor] = known[0]


def settle_choices(passes: Sequence[Findings]) -> None:
    """Units of which a choice looks up parameters are experts. Others that a router normalises over must stay."""
    used = {choice.site for found in passes for choice in found.choices if choice.used}
    for found in passes:
        experts = [choice.labels for choice in found.choices if choice.site in used]
        known = np.unique(np.concatenate([np.zeros(0, np.int64), *experts]))
        for choice in found.choices:
            units = choice.labels
            if not np.isin(units, known).all():
                found.freeze(units, choice.reason)
                continue
            found.norms.append(NormSite(choice.site, choice.layer.abs()))
            found.require(units, least=choice.least)
            if units.tobytes() in found.producers:
                found.producers[units.tobytes()] = replace(found.producers[units.tobytes()], kind="expert")
