"""The verbs of layers that have a weight: linear layers, convolutions with their batch norms, and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from secateur.errors import UnsupportedModelError
from secateur.ops.table import Call, Site
from secateur.relevance._fusion import Fusion
from secateur.relevance.accelerators import Attempt
from secateur.relevance.activations import Activations
from secateur.relevance.backward import Backward
from secateur.relevance.ledger import Ledger
from secateur.relevance.linear_maps import Bilinear, DenseMap, FunctionMap, Geometry, LinearMap
from secateur.relevance.weights import Build, LayerUse, LinearCall, Weights


class Layers:
    """The layers of one batch.

    A batch norm that reads the output of a layer is folded into it: the two are one step whose input is the layer's.
    """

    def __init__(
        self, weights: Weights, ledger: Ledger, activations: Activations, backward: Backward, fusion: Fusion,
        attempt: Attempt, heat_map: bool,
    ) -> None:  # fmt: skip
        self.activations, self.backward, self.fusion = activations, backward, fusion
        self._weights, self._ledger, self._attempt, self._heat_map = weights, ledger, attempt, heat_map

    def dense(self, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool = False) -> Tensor:
        if self._attempt.undecided and self.activations.gate.get(x) and _mixes_heads(x):
            self.meets_attention()  # in the first block, not in the last, when much of this try is in memory
        use = self._linear(call, weight, int(columns))
        return self._layer(call, call.run, x, weight.mT if columns else weight, bias, use)

    def product(self, call: Call, x: Tensor, weight: Tensor, function: Bilinear, axis: int) -> Tensor:
        """Any product of `x` with a weight. The units are along an axis of the weight, and last in the output."""
        record = LinearCall(x, weight, None, self._linear(call, weight, axis), self.backward.layers)
        self.backward.layers += 1
        return self._step(call.run, record, lambda a: FunctionMap(function, weight))

    def meets_attention(self, anyway: bool = False) -> bool:
        """The model attends. If the composite depends on that, this try is given up."""
        self._attempt.meets_attention(anyway)
        return True

    def convolves(self, call: Call, spatial: int, transposed: bool = False) -> Tensor:
        x, weight, use = call["input"], call["weight"], self._weights.uses.get(call.site)
        options = (call["stride"], call["padding"], call["dilation"], call["groups"])
        if use is None or use.source is not self._weights.source(weight) or use.options != options:
            further = call["output_padding"] if transposed else 0
            geometry = Geometry.of(tuple(weight.shape[2:]), *map(_hashable, options), transposed, _hashable(further))
            use = self._use(call, geometry, weight, "conv", 1, options)
        if x.dim() > spatial + 1 or not x.requires_grad:
            return self._layer(call, call.run, x, weight, call["bias"], use)
        single, run = x.unsqueeze(0), call.on(x)  # input without a batch dimension gets one
        return self._layer(call, lambda: run(single), single, weight, call["bias"], use)[0]

    def batch_norm(self, call: Call, x: Tensor) -> Tensor:
        record, weights = self.activations.linear.get(x), self._weights
        per_unit = record is not None and not (record.use.kind == "linear" and x.dim() > 2)
        if record is None or not per_unit or call["training"] or call["running_mean"] is None:
            return self._scale(call, x)
        norm = (call["running_mean"], call["running_var"], call["weight"], call["bias"]), float(call["eps"])
        fused = self.fusion.norm(x, record, norm, self._step)
        output = self._step(call.run, record, lambda a: weights.prepared(record, *norm)) if fused is None else fused
        self.fusion.normed(record, output, norm, fused is not None)
        self.activations.note_fresh(output)
        return output

    def enters_here(self, call: Call, weight: Tensor) -> Tensor:
        width = weight.shape[1]  # the units are the columns of the weight, and what reaches them is their score
        name, _ = self._weights.name(weight, call, width, axis=1)
        self._ledger.open(call.site, name, slice(0, width), width, weight.device)
        return self.backward.add_leaf(call.run().detach(), embedding=name)

    def _linear(self, call: Call, weight: Tensor, axis: int) -> LayerUse:
        """What `_use` says of a linear layer, or said in the batch before."""
        use = self._weights.uses.get(call.site)
        if use is None or use.source is not self._weights.source(weight):
            use = self._use(call, DenseMap, weight, "linear", -1, axis=axis)
        return use

    def tallies(self, call: Call, x: Tensor, weight: Tensor, first: int, width: int) -> Tensor:
        if not x.requires_grad:
            return x
        journal, (name, _) = self.backward.journal, self._weights.name(weight, call, len(weight))
        module, own, _ = name.partition(".weight_ih")  # the weight itself is a layer by that name
        name = f"{module}.weight" if own else f"{name}.state"
        self._ledger.open(call.site, name, slice(0, width), width, x.device)
        share, units = self._share(x), list[Tensor]()

        def back(r: Tensor) -> tuple[Tensor]:
            units.append(journal.columns(name, share(r), first))
            return (r,)

        def gate(r: Tensor) -> None:
            journal.columns(name, torch.where(units[0] == 0, share(r), 0) if units else share(r), first)

        return self.backward.step(x.clone, back, x, saves=False, gate=gate)

    def _share(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """From what comes back to the relevance of `x`."""
        return lambda r: r

    def _use(
        self, call: Call, build: Build, weight: Tensor, kind: str, channel: int, options: tuple[Any, ...] = (),
        axis: int = 0,
    ) -> LayerUse:  # fmt: skip
        """What there is to know about a layer before it runs. It stays true as long as the weight is the same."""
        if call.site in self._weights.uses:
            self._attempt.deviates()
        transposed = isinstance(build, Geometry) and build.transposed
        outputs = weight.shape[1] * build.groups if transposed else weight.shape[axis]  # type: ignore[attr-defined]
        name, rows = self._weights.name(weight, call, outputs, axis)
        height = rows.stop if transposed else max(rows.stop, self._weights.heights.get(name, 0))
        self._ledger.open(call.site, name, rows, height, weight.device)
        use = LayerUse(call.site, self._weights.source(weight), options, build, name, rows, kind, channel)
        if isinstance(use.source, nn.Parameter):
            self._weights.uses[call.site] = use
        return use

    def _layer(
        self, call: Call, run: Callable[[], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, use: LayerUse
    ) -> Tensor:
        """A conv or linear layer. Its output remembers how it was made, in case a batch norm follows."""
        index, weights = self.backward.layers, self._weights
        self.backward.layers += 1
        if not x.requires_grad:
            with torch.no_grad():
                return self.activations.run(call)  # type: ignore[no-any-return]
        record = LinearCall(x, weight, bias, use, index)
        output = self.fusion.layer(record, self._step)
        if output is None:
            output = self._step(run, record, lambda a: weights.prepared(record))
            if use.kind == "conv":
                self.fusion.made(call.site, output, raw=True)
        self.activations.linear[output] = record
        self.activations.note_fresh(output)
        return output

    def _step(self, run: Callable[[], Tensor], record: LinearCall, build: Callable[[Tensor], LinearMap]) -> Tensor:
        """A layer as part of the graph: `run` gives its output, `build` the linear map that its rule looks at.

        `build` must not hold what holds its output: torch would never free the two.
        """
        backward, journal, use, index = self.backward, self.backward.journal, record.use, record.index
        weights = self._weights
        if record.weight.is_complex():
            refuse_complex(use.path, backward.composite.name)
        leaf = backward.leaves.get(id(record.x))
        first = leaf is not None and not leaf[2]  # a constant is no input
        place = backward.place(use.kind, use.path, index, first or index == 0)
        nonneg, stop = record.x in self.activations.nonneg, first and not self._heat_map
        units: Tensor | None = None

        def back(r: Tensor, a: Tensor) -> tuple[Tensor | None]:
            nonlocal units
            units, arrived = journal.unit_sums(use, r)
            if stop:
                backward.flow(use.path, "stop", arrived, None)
                backward.flow(use.path, use.kind, arrived, arrived)
                return (None,)
            layer = build(a)
            shared = backward.share(r, a, layer, place, use.path, nonneg, arrived, use.channel)
            if weights.spares:
                layer.spare()
            return shared

        def gate(r: Tensor) -> None:  # units that got nothing: queries and keys, if this layer makes the values too
            journal.unit_sums(use, r, besides=units)

        return backward.step(run, back, record.x, gate=gate)

    def _scale(self, call: Call, x: Tensor) -> Tensor:
        """A batch norm that belongs to no layer passes relevance."""
        if self.fusion.reads(x):
            self._attempt.deviates()
        refuse_learning(call)
        if not x.requires_grad:
            with torch.no_grad():
                return call.run()  # type: ignore[no-any-return]
        output = self.backward.step(call.run, lambda r: (r,), x, saves=False)
        self.activations.note_fresh(output)
        return output


def _mixes_heads(x: Tensor) -> bool:
    """Whether a layer that reads these weights of attention mixes heads: what adds up to 1 is another dimension than
    the last, which it reads."""
    with torch.no_grad():
        one = x.new_ones(())
        return any(torch.allclose(x.sum(dim), one, atol=1e-2) for dim in range(1, x.dim() - 1) if x.dim() > 3)


def refuse_complex(site: Site | str, composite: str) -> NoReturn:
    """No rule is known for what happens to complex numbers here."""
    raise UnsupportedModelError(
        f"no relevance rule is known for the complex numbers in {site} under the composite {composite!r}.",
        fix="composite='attnlrp', or the criterion 'lrp:attnlrp', which have one for linear functions; or another "
        "criterion, such as 'taylor'",
    )


def refuse_learning(call: Call) -> None:
    """Refuse a batch norm that changes the model, and so what the next batch gets."""
    if call["training"] and call.get("running_mean") is not None:
        raise UnsupportedModelError(
            f"{call.site} updates its running statistics although the model is in evaluation mode.",
            fix="call batch_norm with training=False",
        )


def _hashable(option: Any) -> Any:
    return tuple(option) if isinstance(option, list) else option
