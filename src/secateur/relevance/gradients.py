"""AttnLRP (arXiv 2402.05602) as input times a modified gradient.

With ε → 0, the published rules for transformers give every number x the relevance x · g, where g is a gradient in which
some parts are treated as constants. So g flows back instead of relevance, torch differentiates most operations itself,
and nothing is divided by small sums. What is modified:

- a nonlinearity y = f(x) counts as the factor y / x, which is constant (the identity rule);
- the standard deviation of a norm is constant, the mean is not, and the bias absorbs;
- a product of two signals, a matrix product included, gives half to each factor; a gate is constant;
- a softmax keeps its gradient (its Taylor expansion), and its constant part absorbs.

Layers and sums keep their gradient: this is the ε-rule, by which biases and other constants absorb their share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from secateur.nest import map_tensors
from secateur.ops.protocols import Axes
from secateur.ops.table import Call, Site
from secateur.relevance._kernels import one_kernel
from secateur.relevance.backward import Backward, fitted
from secateur.relevance.layers import Layers, refuse_complex, refuse_learning
from secateur.relevance.ledger import HALF, total, wide
from secateur.relevance.linear_maps import Bilinear, DenseMap, LinearMap
from secateur.relevance.propagation import Propagation
from secateur.relevance.weights import LinearCall
from secateur.running.tensor_facts import TensorFacts

#: Operations between a signal and a statistic of it. (A norm written out has about five.)
_FAR = 32
#: Operations of torch that work number by number.
_ELEMENTWISE = {f"{name}Backward0" for name in ("Mul", "Add", "Sub", "Div", "Neg", "Relu")} | {"RsubBackward1"}
#: An operation in the autograd graph, and which of its outputs.
Edge = tuple[Any, int]


class GradientBackward(Backward):
    """A backward pass in which g flows, and x · g is relevance."""

    _sparse = True  # whether most rows of g may be zeros: relevance often starts at one token

    def rows(self, g: Tensor) -> Tensor | None:
        """Where g is not 0, if that is in a few rows; None if it is everywhere, and from then on."""
        if not self._sparse or g.is_cuda or g.dim() < 2 or not self.journal.plain:  # on a GPU asking would wait
            return None
        (found,) = g.reshape(-1, g.shape[-1]).any(-1).nonzero(as_tuple=True)
        self._sparse = self.gating or 4 * len(found) < g.numel() // g.shape[-1]
        return found if self._sparse else None

    def begin(self, output: Tensor, seed: Tensor) -> Tensor:
        return (seed / output).nan_to_num_(0.0, 0.0, 0.0)

    def end(self, leaf: Tensor, arrived: Tensor) -> Tensor:
        return torch.where(arrived == 0, 0, leaf * arrived)  # masks are minus infinity

    def absorbs(self, name: Site, kind: str, constant: Tensor | float, g: Tensor) -> None:
        """A constant summand absorbs its share."""
        if self.gating:
            return
        if isinstance(constant, Tensor) and constant.dim():
            g = fitted(g, constant.shape)
            share = total(torch.where(g == 0, 0, constant * g))  # a mask of minus infinity
        else:
            share = total(g) * constant
        self.flow(name, kind, share, None, absorbs=True)


class GradientLayers(Layers):
    """Layers that pass g through their transposed weight. The bias absorbs."""

    backward: GradientBackward

    def batch_norm(self, call: Call, x: Tensor) -> Tensor:
        refuse_learning(call)
        return differentiated(self.backward, call, x, "norm") if x.requires_grad else call.run()

    def _share(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        z = x.detach()
        return lambda g: z * g

    def _step(self, run: Callable[[], Tensor], record: LinearCall, build: Callable[[Tensor], LinearMap]) -> Tensor:
        backward, journal, use = self.backward, self.backward.journal, record.use
        leaf = backward.leaves.get(id(record.x))
        stop = leaf is not None and not leaf[2] and not self._heat_map
        layer, bias, made = build(record.x), record.bias, list[Tensor]()
        units: Tensor | None = None

        def compute() -> Tensor:
            output = run()
            made.append(output.detach())  # the output itself would hold what holds it
            return output

        def back(g: Tensor, *inputs: Tensor) -> tuple[Tensor | None]:
            nonlocal units
            shape, z, rows = g.shape, made[0], backward.rows(g) if isinstance(layer, DenseMap) else None
            if rows is not None:
                g, z = (t.reshape(-1, t.shape[-1])[rows] for t in (g, z))
            units, arrived = journal.unit_sums(use, z * g)
            if stop:
                backward.flow(use.path, "stop", arrived, None)
                backward.flow(use.path, use.kind, arrived, arrived)
                return (None,)
            passed = arrived
            if bias is not None and not backward.gating:
                others = [d for d in range(g.dim()) if d != use.channel % g.dim()]
                passed = total(arrived) - total(bias * (g.sum(others, dtype=wide(g)) if others else g))
            backward.flow(use.path, use.kind, arrived, passed, bias is not None)
            pulled = layer.adjoint(g, layer.weight, inputs[0] if inputs else g)
            if rows is not None:
                pulled = pulled.new_zeros(shape[:-1].numel(), pulled.shape[-1]).index_copy_(0, rows, pulled)
            return (pulled if rows is None else pulled.view(*shape[:-1], -1),)

        def gate(g: Tensor) -> None:
            journal.unit_sums(use, made[0] * g, besides=units)

        return backward.step(compute, back, record.x, saves=not isinstance(layer, DenseMap), gate=gate)


class GradientPropagation(Propagation):
    """The verbs, where g flows back. In-place calls always run on copies: layers still need their outputs."""

    native = True
    backward: GradientBackward

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._masks: TensorFacts[tuple[int, Tensor, Tensor | None]] = TensorFacts()

    def passes(
        self, call: Call, x: Tensor, *, nonneg: bool = False, gate: bool = False, gates: Sequence[Tensor] = ()
    ) -> Any:
        if not x.requires_grad:
            return self.stops(call)
        output = self.activations.run(call) if call.rectifies else self._factor(call, x)
        if gate:
            self.activations.gate[output] = False
        return output

    def _factor(self, call: Call, x: Tensor) -> Tensor:
        """y = f(x) as a constant factor y / x."""
        if x.is_complex():
            refuse_complex(call.site, self.backward.composite.name)
        made = list[Tensor]()

        def run() -> Tensor:
            output: Tensor = self.activations.run_on_copy(call) if call.writes else call.run()
            made.append(output.detach())
            return output

        def back(g: Tensor, x: Tensor) -> tuple[Tensor]:
            return (fitted(by_factor(made[0], x, g), x.shape),)

        output = self._step(call, back, x, run=run)
        if output.shape == x.shape and output.grad_fn is not None:  # the forward may switch gradients off
            output.grad_fn.elementwise = True  # type: ignore[attr-defined]
        return output

    def transforms(self, call: Call) -> Any:
        return self.moves(call)

    def scales(self, call: Call, x: Tensor) -> Any:
        return self._alone(call, x)

    def normalises(self, call: Call, x: Tensor, rows: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if not x.requires_grad:
            return self.stops(call)  # type: ignore[no-any-return]
        backward, site, eps = self.backward, call.site, float(call["eps"])
        width, made = x.numel() // rows, list[Tensor]()
        one_each = weight is not None and weight.shape == x.shape[-1:] == (width,)  # a layer norm over one dimension

        def run() -> Tensor:
            output, _, scale = torch.native_layer_norm(x, (width,), weight, bias, eps)
            made.append(scale)  # so that the input need not be kept
            return output

        def back(g: Tensor, *inputs: Tensor) -> tuple[Tensor]:
            if bias is not None:
                backward.absorbs(site, "norm", bias, g)
            if one_each:
                assert weight is not None
                return (centred(g, weight, (g @ weight).unsqueeze(-1) / width, made[0].to(g)),)
            pulled = (g if weight is None else g * weight).reshape(rows, -1)
            # Torch's own norm is the fastest way to the reciprocal of the standard deviation.
            _, _, scale = torch.native_layer_norm(inputs[0].reshape(rows, -1), (width,), None, None, eps)
            return ((pulled - pulled.mean(-1, keepdim=True)).mul_(scale).view(inputs[0].shape),)

        return self._step(call, back, x, saves=not one_each, run=run if one_each else None)

    def copies(self, call: Call, x: Tensor, scales: bool = False) -> Any:
        output = self.moves(call)
        self.activations.copied(x, output)
        return output

    def softmaxes(self, call: Call, x: Tensor, dim: int) -> Tensor:
        if not x.requires_grad:
            return self.stops(call)  # type: ignore[no-any-return]
        output = differentiated(self.backward, call, x, "attention")
        self.activations.gate[output] = True
        return output

    def averages(self, call: Call, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return self._alone(call, x)  # type: ignore[no-any-return]

    def pads(self, call: Call, x: Tensor, pad: Sequence[int], constant: bool) -> Tensor:
        if constant and x.requires_grad and call.get("value"):
            return differentiated(self.backward, call, x, "constant")
        return self.moves(call)  # type: ignore[no-any-return]

    def adds(self, call: Call, a: Any, b: Any, sign: float = 1.0) -> Tensor:
        output: Tensor = self.activations.run(call)
        first, second = (isinstance(t, Tensor) and t.requires_grad for t in (a, b))
        if not (first and second):
            backward, name = self.backward, call.site
            constant = b if first else a
            if output.is_complex():
                refuse_complex(name, backward.composite.name)
            if isinstance(constant, Tensor) or constant:
                share = constant * sign if first and sign != 1 else constant
                _on_gradient(output, lambda g: backward.absorbs(name, "constant", share, g))
        return output

    def gates(self, call: Call, factors: Sequence[Any]) -> Tensor:
        signals, backward = self._signals(factors), self.backward
        if all(t is signals[0] for t in signals):
            return self._alone(call, signals[0])  # type: ignore[no-any-return]
        if _functions_of_one(signals):  # a nonlinearity written out, such as x * (1 + tanh(...))
            return self._alone(call, signals[0], constants=signals[1:])  # type: ignore[no-any-return]
        count = len(signals)
        output: Tensor = self._alone(call, *signals)
        _on_gradient(output, lambda g: None if backward.gating else g / count)  # a gate's parts are scored by the whole
        return output

    def multiplies(self, call: Call, a: Tensor, b: Tensor, function: Bilinear, axes: Axes = (None, None)) -> Tensor:
        layer = self._layer(call, a, b, function, axes)
        if layer is not None:
            return layer
        output: Tensor = call.run()
        if a.requires_grad and b.requires_grad:
            backward = self.backward
            _on_gradient(output, lambda g: None if backward.gating else g / 2)
        return output

    def attends(self, call: Call, scale: float, mask: Callable[[], Tensor | None]) -> Tensor:
        """Torch differentiates the attention. Its kernels return NaN for rows in which everything is masked."""
        backward, name = self.backward, call.site
        inputs = (call["query"], call["key"], call["value"])
        with torch.enable_grad():
            own = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
            keep, dead = self._without_dead_rows(call["attn_mask"])
            options = {"is_causal": call["is_causal"], "scale": call["scale"], "enable_gqa": call["enable_gqa"]}
            q, k, v = own
            inner = F.scaled_dot_product_attention(q, k, v, keep, call["dropout_p"], **options)
            inner = inner if dead is None else inner.masked_fill(dead, 0)
        carrying = [t for t in own if t.requires_grad]

        def back(g: Tensor) -> tuple[Tensor | None, ...]:
            pulled = iter(torch.autograd.grad(inner, carrying, g, retain_graph=backward.gated))
            for_q, for_k, for_v = (next(pulled) if t.requires_grad else None for t in own)
            shares = [
                None if p is None else p.div_(n) for p, n in ((for_q, 4), (for_k, 4), (for_v, 2))
            ]  # queries and keys: twice
            arrived = _product(inner.detach(), g)
            # Queries and keys get the same, each entry of the logits being a sum of products; values get half.
            logits = next((_product(own[i].detach(), s) for i, s in enumerate(shares[:2]) if s is not None), 0)
            passed = logits * sum(s is not None for s in shares[:2]) + (arrived / 2 if for_v is not None else 0)
            backward.flow(name, "attention", arrived, passed, absorbs=True)  # type: ignore[arg-type]
            return tuple(shares)

        return backward.step(inner.detach, back, *inputs, saves=False)

    def _without_dead_rows(self, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """A mask that leaves something in every row, and the rows in which the given one left nothing."""
        if mask is None:
            return None, None
        known = self._masks.get(mask)  # many layers share a mask
        if known is None or known[0] != mask._version:
            dead = ~(mask if mask.dtype == torch.bool else mask > float("-inf")).any(-1, keepdim=True)
            if not dead.is_cuda and not bool(dead.any()):  # on a GPU asking would wait
                known = mask._version, mask, None
            else:
                keep = mask | dead if mask.dtype == torch.bool else mask.masked_fill(dead, 0)
                known = mask._version, keep, dead
            self._masks[mask] = known
        return known[1:]

    def _alone(self, call: Call, *signals: Tensor, constants: Sequence[Tensor] = ()) -> Any:
        """The call, with everything but the first occurrence of each signal as a constant."""
        if sum(t.requires_grad for t in call.tensors()) == 1:
            return self.activations.run(call)
        waiting = {id(t) for t in signals}

        def presented(tensor: Tensor) -> Tensor:
            if id(tensor) in waiting:
                waiting.remove(id(tensor))
                return tensor
            if any(tensor is t for t in constants):
                return tensor.detach()
            return self._gate(tensor, signals) if tensor.requires_grad else tensor

        args, kwargs = map_tensors(presented, (call.args, call.kwargs))
        if not call.writes:
            return call.function(*args, **kwargs)
        output = self.activations.run_on_copy(call.given(*args, **kwargs))
        self.activations.replace(call, output)
        return output

    def _gate(self, tensor: Tensor, signals: Sequence[Tensor]) -> Tensor:
        """A gate: a constant. What makes it is scored later, unless it is only a statistic of the signals."""
        backward = self.backward
        if any(tensor is t for t in signals) or not _has_layers(tensor, signals):
            return tensor.detach()
        backward.gated = True
        edge = get_gradient_edge(tensor)

        def back(g: Tensor) -> tuple[None]:
            backward.gates.append((edge, g))
            return (None,)

        return backward.step(tensor.detach, back, tensor, saves=False)


@one_kernel("template <typename T> T by_factor(T y, T x, T g) { T f = y / x; return f - f == T(0) ? f * g : T(0); }")
def by_factor(y: Tensor, x: Tensor, g: Tensor) -> Tensor:
    """g · y / x, and 0 where that is not finite."""
    return (y / x).nan_to_num_(0.0, 0.0, 0.0).mul_(g)


@one_kernel("template <typename T> T centred(T g, T w, T m, T s) { return (g * w - m) * s; }")
def centred(g: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """(g · weight − mean) · scale."""
    return (g * weight).sub_(mean).mul_(scale)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a · b, without the product in memory where torch can do that."""
    plain = a.dtype == b.dtype and a.dtype not in HALF and a.numel() < 2**31
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)) if plain and a.dim() == 4 else ():
        x, y = a.permute(order), b.permute(order)
        if x.is_contiguous() and y.is_contiguous():
            return torch.dot(x.view(-1), y.view(-1))
    return total(a * b)


def differentiated(backward: GradientBackward, call: Call, x: Tensor, kind: str) -> Tensor:
    """A call of which torch takes the gradient. What that does not pass on, constants in it absorb."""
    site = call.site
    with torch.enable_grad():
        source = x.detach().requires_grad_(True)
        inner: Tensor = call.on(x)(source.clone() if call.writes else source)

    def back(g: Tensor) -> tuple[Tensor]:
        (pulled,) = torch.autograd.grad(inner, source, g, retain_graph=backward.gated)
        # Masks, and borders before a pooling, are minus infinity.
        arrived, passed = (torch.where(s == 0, 0, t.detach() * s) for t, s in ((inner, g), (source, pulled)))
        backward.flow(site, kind, total(arrived), total(passed), absorbs=True)
        return (pulled,)

    return backward.step(inner.detach, back, x, saves=False)


def _on_gradient(output: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Show g to a function, which may replace it. A gate to which no relevance goes gets none."""
    if output.requires_grad:  # the forward may switch gradients off
        output.register_hook(lambda g: None if g is None else hook(g))  # type: ignore[no-untyped-call]


def _functions_of_one(signals: Sequence[Tensor]) -> bool:
    """Whether all signals are made from the same tensor, number by number."""
    edges = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, signals)]
    passed, ends = _origins(edges[0])
    return any(all(_origins(edge, stop)[1] == {stop} for edge in edges) for stop in [*passed, *ends])


def _origins(edge: Edge, stop: Edge | None = None) -> tuple[list[Edge], set[Edge]]:
    """The elementwise operations that made a tensor, and what they read. The search ends at `stop`."""
    passed: list[Edge] = []
    ends: set[Edge] = set()
    waiting = [edge]
    while waiting:
        at = waiting.pop()
        node = at[0]
        if at in ends or at in passed:
            continue
        further = (
            at != stop and len(passed) <= _FAR and (node.name() in _ELEMENTWISE or getattr(node, "elementwise", False))
        )
        if further:
            passed.append(at)
            waiting += [(parent, nr) for parent, nr in node.next_functions if parent is not None]
        else:
            ends.add(at)
    return passed, ends


def _has_layers(tensor: Tensor, signals: Sequence[Tensor]) -> bool:
    """Whether there are layers between the signals and a tensor, or too much to say."""
    ends = {signal.grad_fn for signal in signals}
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in ends or node in seen:
            continue
        if getattr(node, "gate", None) is not None or len(seen) > _FAR:
            return True
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
    return False
