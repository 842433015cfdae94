"""What is known about tensors while a model runs. Nothing here keeps a tensor alive."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from secateur.relevance.weights import LayerSite, LinearCall, SumSite
from secateur.running.tensor_facts import TensorFacts


class Facts:
    """Facts about the activations of one forward pass."""

    def __init__(self) -> None:
        #: The tensor that took the place of one that was overwritten.
        self.newer: TensorFacts[Tensor] = TensorFacts()
        #: Tensors that are ≥ 0 everywhere.
        self.nonneg: TensorFacts[bool] = TensorFacts()
        #: Tensors that act as a gate when they multiply.
        self.gate: TensorFacts[bool] = TensorFacts()
        #: Unchanged outputs of conv and linear layers, which may meet a batch norm.
        self.linear: TensorFacts[LinearCall] = TensorFacts()
        #: The layer (batch norm included) or sum that has made this.
        self.made: TensorFacts[LayerSite | SumSite] = TensorFacts()
        #: Outputs that already are what a ReLU will make of them.
        self.ahead: TensorFacts[bool] = TensorFacts()
        #: The logits behind the output of a softmax.
        self.logits: TensorFacts[Tensor] = TensorFacts()
        #: The constant part of a sum.
        self.offset: TensorFacts[Tensor] = TensorFacts()

    def overwritten(self, tensor: Tensor) -> None:
        """Its numbers are no longer those that anything was known about."""
        known: tuple[TensorFacts[Any], ...] = (self.nonneg, self.gate, self.linear, self.made, self.logits, self.offset)
        for facts in known:
            facts.forget(tensor)

    def copy(self, source: Tensor, output: Any) -> None:
        """What was known of `source` holds for `output`, which has the same numbers."""
        if not isinstance(output, Tensor) or output is source:
            return
        known: tuple[TensorFacts[Any], ...] = (self.nonneg, self.gate, self.logits, self.offset)
        for facts in known:
            fact = facts.get(source)
            if fact is not None:
                facts[output] = fact
