"""Recurrent layers: what they read may shrink, their own state may not."""

from __future__ import annotations

from typing import Any

import torch

from secateur.errors import UnsupportedModelError
from secateur.ops.layers import varying
from secateur.ops.linear import read_by_weight
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


class Cell(Operation):
    """One step of a recurrent layer: the input width leaves with the input weights, the state stays."""

    name = "recurrent cell"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, weight = call["input"], call["w_ih"]
        read, taken = labels.along(x, -1), labels.along(weight, 1)
        read_by_weight(labels, call, read, taken)
        for layer in labels.others(x, [-1]):
            labels.freeze(layer, f"{call.site} runs along it")
        reason = f"state of {call.site}: hidden units of recurrent layers are not prunable"
        labels.freeze(labels.along(weight, 0), reason)
        for tensor in call.tensors():
            if tensor is not x and tensor is not weight:
                labels.freeze_tensor(tensor, reason)
        steps = x.numel() // x.shape[-1]
        labels.cost(call.site, float(steps * weight.numel()), taken)
        labels.cost(call.site, float(steps * call["w_hh"].numel()))


def _reads_input(name: str | None) -> bool:
    return name is not None and "weight_ih_l0" in name


register(
    "input hx w_ih w_hh b_ih=None b_hh=None",
    torch.lstm_cell,
    torch.gru_cell,
    torch.rnn_tanh_cell,
    torch.rnn_relu_cell,
    operation=Cell(),
)
register("input hx params *rest", torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, operation=Recurrent())
