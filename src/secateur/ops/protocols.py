"""What an entry of the table may say: how channels go through a call, and how relevance passes back through it.

`structure.labels` implements `LabelVerbs`, `relevance` implements `RelevanceVerbs`. Operations know only these names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from secateur.ops.layers import Labels, Layers, Mask

if TYPE_CHECKING:
    from secateur.ops.table import Call, Site


#: A dimension of each of two factors, None where there is none.
Axes = tuple[int | None, int | None]
#: Whether a result is 0, given which of its operands are. `all` and `any` are such functions.
Zero = Callable[[Sequence[bool]], bool]


def never(zeros: Sequence[bool]) -> bool:
    """What is computed may differ from 0 although the operands are 0."""
    return False


def first(zeros: Sequence[bool]) -> bool:
    """0 where the first operand is."""
    return zeros[0]


class LabelVerbs(Protocol):
    """What `Operation.channels` may ask and tell a label pass."""

    def layers(self, tensor: Any) -> Layers:
        """The labels that a tensor carries."""

    def set(self, tensor: Tensor, layers: Layers, compacted: bool = False) -> None:
        """Say what a tensor carries. `compacted`: layers have stride 0 wherever they do not vary."""

    def along(self, tensor: Tensor, dim: int) -> Labels | None:
        """The labels along one dimension, or None."""

    def others(self, tensor: Tensor, dims: Sequence[int]) -> Layers:
        """The layers that do not vary along any of `dims`."""

    def parameter(self, tensor: Any) -> str | None:
        """The name of a parameter or buffer, or None."""

    def is_weight(self, tensor: Any) -> bool:
        """Whether a tensor is a parameter or buffer, or computed from nothing else."""

    def add_weight(self, tensor: Tensor) -> None:
        """A tensor is a part of a weight, though data say which."""

    def fits(self, tensor: Any) -> frozenset[int]:
        """The dimensions along which a tensor repeats one number, and was made to fit whatever it meets."""

    def is_void(self, tensor: Tensor) -> bool:
        """Whether a tensor was made of zeros, and nothing was written into it since."""

    def bind(self, tensors: Sequence[Tensor], output: Tensor) -> None:
        """Tensors met: those that fitted anything are as large as what they met from now on."""

    def follows(self, sizes: Collection[int] = ()) -> bool:
        """Whether the module that runs computes places from its number of heads, which shrinks with them, or has some
        of these sizes as attributes. Then trial removals tell whether those can shrink."""

    def virtual(self, size: int) -> Labels:
        """New labels for channels that no parameter axis numbers one by one."""

    def join(self, a: Labels, b: Labels) -> None:
        """These labels leave together, pair by pair."""

    def tie_rows(self, labels: Labels) -> None:
        """The labels in each row of a 2-d array leave together."""

    def tied(self, layer: Tensor, dims: Sequence[int]) -> Tensor:
        """Tie the labels of a layer along `dims`, and return the layer, which no longer varies there."""

    def freeze(self, labels: Labels | Tensor | None, reason: str) -> None:
        """These labels can never leave."""

    def freeze_tensor(self, tensor: Any, reason: str) -> None:
        """Nothing that a tensor carries can ever leave."""

    def grid(
        self, layer: Tensor, reason: str, rigid: Sequence[int] = (), *, pinned: Sequence[tuple[int, Mask]] = ()
    ) -> None:
        """A layer that varies over several axes: those in `rigid` cannot shrink, of others the `pinned` slices stay."""

    def cost(self, site: Site, total: float, *axes: Labels | None) -> None:
        """Multiply-accumulates, proportional to what is kept along each of `axes`."""

    def produce(self, labels: Labels, site: Site, kind: str, rows: Labels | None = None) -> None:
        """These labels number units that are made here. `rows`, if not they: what holds their weights, in a column."""

    def attend(self, labels: Labels, site: Site) -> None:
        """An attention product with one label per head."""

    def require(self, labels: Labels | None, least: int = 1, multiple: int = 1) -> None:
        """At least so many of these labels stay, and a multiple of so many."""

    def share(self, layer: Tensor, output: Tensor, call: Call) -> None:
        """The units of this layer become shares of a whole: they stay, unless they are experts."""

    def choose(self, layer: Tensor, indices: Tensor, count: int, call: Call) -> None:
        """The best `count` units of this layer are chosen: they stay, unless they are experts."""

    def patch(self, base: Tensor, dim: int, part: Tensor, source: Tensor) -> list[Tensor] | None:
        """A part of an empty tensor is written. The parts in their order along `dim`, once all are known."""

    def looks_up(self, units: Labels | None, index: Any, weight: bool) -> bool:
        """Whether an index comes from a choice among these units, which an axis (of a `weight`) holds."""

    def mixes(self, tensor: Tensor, dims: Sequence[int], site: Site) -> None:
        """A norm over `dims`, in which units take part."""

    def sums(self, tensor: Tensor, dims: Sequence[int], site: Site) -> None:
        """A sum over `dims`, in which zeros do not count: units that are not 0 when they are masked cannot leave."""

    def move(self, call: Call, output: Any, dropped: Sequence[int] = ()) -> None:
        """The data are moved: move the labels by the same call. Those along dimensions in `dropped` end here."""

    def keep(self, source: Tensor, output: Tensor, zero: bool = True) -> None:
        """The output carries what the source carries, in the same places. `zero`: and is 0 where the source is."""

    def carry(self, source: Tensor, output: Tensor, mixed: Sequence[int], reason: str) -> None:
        """The dimensions in `mixed` are mixed: units along them are frozen, others go on."""

    def merge(
        self, output: Tensor, operands: Sequence[tuple[Layers, Sequence[int]]], site: Site, zero: Zero = never
    ) -> None:
        """Operands (layers and shape) meet position by position: labels that meet leave together.

        `zero`: whether the output is 0 at a masked unit, given which of the operands are surely 0 there.
        """

    def meets_lines(self, source: Tensor, dim: int, lines: Sequence[Labels | None], output: Tensor, zero: Zero) -> bool:
        """`merge` of a tensor with lines of labels along `dim`; False if it carries anything but one line there."""

    def match(self, layer: Tensor, rival: Tensor, dim: int, site: Site) -> None:
        """A layer meets another tensor that is joined to its own along `dim`."""


class RelevanceVerbs(Protocol):
    """What `Operation.relevance` may ask of a relevance pass. Each verb runs the call and returns its output."""

    def again(self) -> AbstractContextManager[Any]:
        """A context in which calls that the operation makes are observed too."""

    def dense(self, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool = False) -> Tensor:
        """A linear layer, by the rule of the composite. Its units are the rows of the weight, or the columns."""

    def convolves(self, call: Call, spatial: int, transposed: bool = False) -> Tensor:
        """A convolution over `spatial` dimensions, by the rule of the composite."""

    def batch_norm(self, call: Call, x: Tensor) -> Tensor:
        """A batch norm: part of the layer before it, or a scale that passes relevance."""

    def moves(self, call: Call) -> Any:
        """Data movement: relevance moves back the same way."""

    def transforms(self, call: Call) -> Any:
        """A linear function between real and complex numbers, for which only attnlrp has a rule."""

    def writes(self, call: Call) -> Any:
        """Numbers are written over others. Constants among them absorb what falls on them."""

    def passes(self, call: Call, x: Tensor, *, nonneg: bool = False, gate: bool = False) -> Any:
        """Relevance passes unchanged to `x`. The output may be known to be ≥ 0, or a gate where it multiplies."""

    def scales(self, call: Call, x: Tensor) -> Any:
        """`x` is scaled by something that takes no relevance."""

    def normalises(self, call: Call, x: Tensor, rows: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """A norm: each of the `rows` into which `x` falls gets mean 0 and variance 1. Weight and bias broadcast."""

    def copies(self, call: Call, x: Tensor, scales: bool = False) -> Any:
        """The same numbers again; `scales` where some may be scaled, as by dropout in training mode."""

    def stops(self, call: Call) -> Any:
        """Relevance ends here."""

    def refuses(self, call: Call, refusal: Exception) -> Any:
        """No rule is known: the call runs, but relevance that comes back to it is refused."""

    def averages(self, call: Call, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A linear function of `x` with weights ≥ 0."""

    def adds(self, call: Call, a: Any, b: Any, sign: float = 1.0) -> Tensor:
        """a + sign * b, shared by the rule of the composite."""

    def gates(self, call: Call, factors: Sequence[Any]) -> Tensor:
        """A product: relevance goes to the signal, none to gates and constants."""

    def multiplies(
        self, call: Call, a: Tensor, b: Tensor, function: Callable[[Tensor, Tensor], Tensor], axes: Axes = (None, None)
    ) -> Tensor:
        """A bilinear function of two tensors, such as a matrix product.

        `axes`: the dimension of each factor that is the last one of the output, unless the other factor has it too. If
        it is that of a constant, the constant is the weight of a layer.
        """

    def attends(self, call: Call, scale: float, mask: Callable[[], Tensor | None]) -> Tensor:
        """Scaled dot-product attention."""

    def softmaxes(self, call: Call, x: Tensor, dim: int) -> Tensor:
        """A softmax over `dim`: relevance passes; where the result multiplies, it is a gate."""

    def pads(self, call: Call, x: Tensor, pad: Sequence[int], constant: bool) -> Tensor:
        """Padding: a constant border absorbs what falls on it."""

    def enters_here(self, call: Call, weight: Tensor) -> Tensor:
        """An embedding: relevance of a discrete input ends here."""

    def tallies(self, call: Call, x: Tensor, weight: Tensor, first: int, width: int) -> Tensor:
        """`x` as it is. What reaches it is the score of some of the `width` units of the call, from `first` on. A
        weight gives them its name."""

    def constant(self, value: Any, call: Call) -> Any:
        """A constant (tensor or number) beside the signal; the relevance that it absorbs is recorded."""
