"""Recurrent layers: what they read may shrink, their own state may not."""

from __future__ import annotations

from typing import Any

import torch

from secateur.errors import UnsupportedModelError
from secateur.ops.layers import varying
from secateur.ops.protocols import LabelVerbs
from secateur.ops.table import Call, Operation, register


class Recurrent(Operation):
    """LSTM, GRU, RNN as one fused call: the input width leaves with the first layer's input weights."""

    name = "recurrent layer"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, weights = call["input"], call["params"]
        if not isinstance(weights, tuple | list):
            raise UnsupportedModelError(f"{call.site} runs on packed sequences.", fix="analyse with a padded example")
        read = labels.along(x, -1)
        for layer in labels.others(x, [-1]):
            labels.freeze(layer, f"{call.site} runs along it")
        for weight in weights:
            first = weight.ndim == 2 and weight.shape[1] == x.shape[-1] and _reads_input(labels.parameter(weight))
            for layer in labels.layers(weight):
                if first and varying(layer) == [1] and read is not None:
                    taken = labels.along(weight, 1)
                    assert taken is not None
                    labels.join(taken, read)
                else:
                    labels.freeze(layer, f"state of {call.site}: hidden units of recurrent layers are not prunable")
            if weight.ndim == 2:
                steps = x.numel() // x.shape[-1]
                labels.cost(call.site, float(steps * weight.numel()), read if first else None)


def _reads_input(name: str | None) -> bool:
    return name is not None and "weight_ih_l0" in name


register("input hx params *rest", torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, operation=Recurrent())
