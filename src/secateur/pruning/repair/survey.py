"""Which layers of a model can be repaired: where they are called, what norm follows, what is added to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from secateur.graph.shadow import Example, quiet, run_or_explain, twin
from secateur.ops.activation import Identity
from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.elementwise import Sum
from secateur.ops.linear import Linear
from secateur.ops.norm import BatchNorm, InstanceNorm
from secateur.ops.table import Call
from secateur.relevance.facts import About, writes
from secateur.tracing import Observer

#: The number of the model's own input among the calls.
INPUT = -1


@dataclass(frozen=True)
class Norm:
    """A batch norm that reads a layer's output and nothing else: names of its tensors, and eps."""

    mean: str
    variance: str
    weight: str | None
    eps: float

    def scale(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What it multiplies each channel with."""
        scale = (tensors[self.variance].detach().double() + self.eps).rsqrt()
        return scale if self.weight is None else scale * tensors[self.weight].detach().double()


@dataclass(frozen=True)
class LayerSite:
    """A call of a convolution or linear layer. `call` counts the calls of a forward pass."""

    call: int
    weight: str
    bias: str | None
    norm: Norm | None = None
    #: The call whose output, which is there before this layer runs, is added to what this layer gives.
    partner: int | None = None

    @property
    def shifts(self) -> bool:
        """Whether a constant per output can be added: by a bias, or by the mean of the batch norm behind."""
        return self.bias is not None or self.norm is not None


class Numbered(Observer):
    """Counts calls. What was analysed before is not refused."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.number = -1

    def observe(self, call: Call) -> Any:
        """Count, then hand over to `at`."""
        self.number += 1
        return self.at(self.number, call)

    def at(self, number: int, call: Call) -> Any:
        """What to do with call `number`; returns what the model gets to see."""
        return call.run()

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs as it is."""
        return func(*args, **kwargs)


class _Survey(Numbered):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        self.sites: dict[int, LayerSite] = {}
        self.uses: Counter[str] = Counter()
        self._made: About[int] = About()
        self._source: About[int] = About()

    def at(self, number: int, call: Call) -> Any:
        """Run the call and note whose output it is."""
        operation = call.operation
        read = call.get("input")
        source = self._source.get(read) if isinstance(read, Tensor) else None
        if isinstance(operation, Sum):
            self._add(call)
        output = call.run()
        if not isinstance(output, Tensor):
            return output
        if writes(call):
            self._source.forget(output)
        if isinstance(operation, Convolution | TransposedConvolution | Linear):
            self._layer(number, call)
            if number in self.sites:
                self._source[output] = number
        elif source is not None and isinstance(operation, BatchNorm) and not isinstance(operation, InstanceNorm):
            if self._norm(source, call):
                self._source[output] = source
        elif source is not None and isinstance(operation, Identity) and output.dtype == read.dtype:
            self._source[output] = source
        self._made[output] = number
        return output

    def _layer(self, number: int, call: Call) -> None:
        weight, bias = self._name(call["weight"]), self._name(call["bias"])
        if isinstance(call.operation, TransposedConvolution) and int(call["groups"]) > 1:
            return
        if weight is not None and (bias is not None or call["bias"] is None):
            self.uses[weight] += 1
            self.sites[number] = LayerSite(number, weight, bias)

    def _norm(self, source: int, call: Call) -> bool:
        if self.sites[source].norm is not None or call["training"]:
            return False
        mean, variance = self._name(call["running_mean"]), self._name(call["running_var"])
        weight = self._name(call["weight"])
        if mean is None or variance is None or (weight is None and call["weight"] is not None):
            return False
        self.sites[source] = replace(self.sites[source], norm=Norm(mean, variance, weight, float(call["eps"])))
        return True

    def _add(self, call: Call) -> None:
        """A layer's output meets a tensor that was there before the layer ran: the residual stream."""
        a, b = call["input"], call.get("other")
        name = call.function.__name__.strip("_")
        if name not in ("add", "iadd", "radd") or float(call.get("alpha", 1)) != 1:
            return
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
            return
        for mine, other in ((a, b), (b, a)):
            source = self._source.get(mine)
            made = self._made.get(other)
            made = INPUT if made is None else made
            fresh = source is not None and self.sites[source].partner is None and id(other) not in self._names
            if source is not None and fresh and made < source:
                self.sites[source] = replace(self.sites[source], partner=made)

    def _name(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self._names.get(id(tensor))


def survey(model: nn.Module, example: Example) -> list[LayerSite]:
    """The layers that can be repaired, in order of execution. Weights that are used more than once are left out."""
    copy = twin(model).eval()
    watched = _Survey(copy)
    with quiet(), watched:
        run_or_explain(copy, example)
    return [site for site in watched.sites.values() if watched.uses[site.weight] == 1]
