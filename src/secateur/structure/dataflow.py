"""Which call read what another one made, and what each module was given and returned, in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.table import Call, Operation, Site
from secateur.running.tensor_facts import TensorFacts

# A value is what a tensor holds between two writes. Values and calls are known by their numbers.


@dataclass(eq=False, slots=True)
class Node:
    """One call: the values that it read and made. `scale` multiplies the second term of a sum."""

    site: Site
    operation: Operation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: bool
    scale: float


@dataclass(eq=False, slots=True)
class Visit:
    """One run of a module: its calls, from `begin` to `end`, and the values that it was given and returned.

    `given` has the tensors among its arguments, by position or name. `returned` has one value, or one for each item of
    a tuple (None where that is no tensor); `plain` says which.
    """

    begin: int
    end: int
    given: tuple[tuple[int | str, int], ...]
    returned: tuple[int | None, ...]
    plain: bool

    def __contains__(self, node: int) -> bool:
        return self.begin <= node < self.end


@dataclass
class DataFlow:
    """What a forward pass did. `ends` are the values that count in what the model returns."""

    nodes: list[Node] = field(default_factory=list)
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    #: By value: the call that made it (-1: none), the calls that read it, its shape.
    maker: list[int] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)
    _known: TensorFacts[int] = field(default_factory=TensorFacts)

    def value(self, tensor: Tensor) -> int:
        """The value that a tensor holds now."""
        found = self._known.get(tensor)
        return self._new(tensor, -1) if found is None else found

    def _new(self, tensor: Tensor, maker: int) -> int:
        number = self._known[tensor] = len(self.maker)
        self.maker.append(maker)
        self.readers.append([])
        self.shapes.append(tuple(tensor.shape))
        return number

    def add(self, call: Call, output: Any, written: Sequence[Tensor] = ()) -> None:
        """Note a call. One that returns what it was given, as dropout does in evaluation mode, is none.

        `written`: what it was seen to overwrite, beside what its entry says.
        """
        sources, number, writes = call.tensors(), len(self.nodes), call.writes
        inputs = tuple([self.value(tensor) for tensor in sources])
        made = sources[:1] if writes else list(written)
        new = [output] if isinstance(output, Tensor) else tensors_in(output)
        made = [*made, *[t for t in new if not any(t is source for source in sources)]]
        if not made:
            return
        for value in inputs:
            self.readers[value].append(number)
        outputs = tuple([self._new(tensor, number) for tensor in made])
        scale = float(call.get("alpha", 1)) * getattr(call.operation, "sign", 0)
        self.nodes.append(Node(call.site, call.operation, inputs, outputs, writes, scale))

    def enters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, tuple[tuple[int | str, int], ...]]:
        """A module begins to run."""
        items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        given = tuple([(key, self.value(item)) for key, item in items if isinstance(item, Tensor)])
        return len(self.nodes), given

    def leaves(self, path: str, begin: int, given: tuple[tuple[int | str, int], ...], output: Any) -> None:
        """The module is done."""
        plain = not isinstance(output, (tuple, list))
        items: Iterable[Any] = [output] if plain else output
        returned = tuple([self.value(item) if isinstance(item, Tensor) else None for item in items])
        self.visits.setdefault(path, []).append(Visit(begin, len(self.nodes), given, returned, plain))
