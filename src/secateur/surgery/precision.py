"""Running a copy of a model in a wider number format, with noise that does not depend on how wide its layers are."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from secateur.nest import SCALARS, map_leaves, map_tensors

_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double})
_DROPOUTS = frozenset(
    ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
     "feature_dropout")
)  # fmt: skip
_NOISE = frozenset(
    ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
     "multinomial", "poisson", "normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
     "geometric_", "random_", "gumbel_softmax", "rrelu", "rrelu_")
)  # fmt: skip
_CONTAINERS = frozenset({dict, OrderedDict, list, set})
#: Types of attributes that are no tensors and are not looked into.
_HOLD_NONE = frozenset({bool, int, float, str, type(None), OrderedDict, set})
#: A convolution of at least so many channels, each by itself, is computed tap by tap, if that takes fewer than so many
#: multiplications for each channel.
_MANY, _CHANNEL = 8, 20_000
#: A linear layer with a masked weight leaves out what is masked if it is given so many inputs.
_MANY_ROWS = 64
#: What stands for noise whose shape differs between two models: a value that all distributions can draw.
_EVEN = 0.375


#: By the identity of a parameter: the places along its dimensions at which it is 0.
Masks = Mapping[int, Mapping[int, Tensor]]
_UNMASKED: Masks = MappingProxyType({})
_TRANSPOSED = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__, Tensor.mH.__get__, Tensor.data.__get__)  # type: ignore[attr-defined]


class Precise(TorchFunctionMode):
    """Floats are computed in the format `wide`, whatever casts and constants the forward contains.

    Each call that draws noise gets a seed of its own, so that two models draw the same. The calls in `even`, counted
    from 0, have one value everywhere: noise of another shape would differ. Dropout drops nothing. `drawn` has the
    shapes of all noise, and `rows` how many rows the tables have that are read at the positions in a tensor, which is
    known by its address. `masks` has what is 0 in parameters, by their identity, although they do not show it.
    """

    def __init__(self, wide: torch.dtype, even: Collection[int] = (), masks: Masks = _UNMASKED) -> None:
        super().__init__()
        self.wide, self.even, self.masks = wide, even, masks
        self.drawn: list[tuple[int, ...]] = []
        self.rows: dict[int, int] = {}
        self._wider = dict.fromkeys({torch.float16, torch.bfloat16, torch.float32} - {wide}, wide)
        if wide == torch.float64:
            self._wider[torch.complex64] = torch.complex128

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, role = kwargs or {}, _role(func)
        if role == "attribute":
            masked = self.masks and id(args[0]) in self.masks and func in _TRANSPOSED
            return func(self._widened(args[0]) if masked else args[0], *args[1:], **kwargs)
        if role == "cast":
            return self._widened(args[0]).to(self.wide)
        if role == "linear" and len(args) > 1 and id(args[1]) in self.masks:
            return self._linear(*args, **kwargs)
        in_place, widened = role == "in place", self._widened
        args = tuple([item if in_place and not i else widened(item) for i, item in enumerate(args)])
        if kwargs:
            kwargs = {key: item if key == "out" else widened(item) for key, item in kwargs.items()}
        if role == "dropout":
            return args[0] if args else kwargs["input"]
        if role == "table":
            self._note(*args, **kwargs)
        elif role == "attention":
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, kwargs | {"dropout_p": 0.0}
            kwargs = {key: item for key, item in kwargs.items() if key != "dropout_p" or len(args) <= 4}
        elif role == "convolution" and self.wide == torch.float64 and (made := depthwise(*args, **kwargs)) is not None:
            return made
        noise = role == "noise" or (in_place and func.__name__ in _NOISE)
        made = self._noise(func, func.__name__, args, kwargs) if noise else func(*args, **kwargs)
        if isinstance(made, Tensor) and made.dtype in self._wider and not in_place and "out" not in kwargs:
            made = made.to(self._wider[made.dtype])
        return made

    def _widened(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            if self.masks and id(item) in self.masks:
                made = item.to(self.wide, copy=True)
                for dim, places in self.masks[id(item)].items():
                    made.index_fill_(dim, places, 0)
                return made
            wider = self._wider.get(item.dtype)
            return item if wider is None else item.to(wider)
        kind = type(item)
        if kind is torch.dtype:
            return self._wider.get(item, item)
        if item is None or kind in SCALARS or kind is torch.Size or _is_plain(item):
            return item
        return map_leaves(self._widened, item) if kind in (tuple, list, dict) else item

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose weight is masked: its inputs and outputs are, which are much smaller.

        Of many inputs, products with what is masked would take longer than a copy of the rest of the weight."""
        mask, x, size = self.masks[id(weight)], self._widened(x), weight.shape[0]
        if x.numel() >= _MANY_ROWS * x.shape[-1]:
            left = {dim: _others(weight.shape[dim], gone) for dim, gone in mask.items()}
            for dim, inside in left.items():
                weight = weight.index_select(dim, inside)
            y = F.linear(x.index_select(-1, left[1]) if 1 in left else x, weight.to(self.wide))
            if 0 in left:
                y = y.new_zeros((*y.shape[:-1], size)).index_copy_(-1, left[0], y)
        else:
            y = F.linear(x.index_fill(-1, mask[1], 0) if 1 in mask else x, weight.to(self.wide))
            y = y.index_fill_(-1, mask[0], 0) if 0 in mask else y
        return y if bias is None else y.add_(self._widened(bias))

    def _note(self, *args: Any, **kwargs: Any) -> None:
        values = [*args, *kwargs.values()]  # in order, however they are named
        if len(values) > 1 and isinstance(values[0], Tensor):
            count = len(values[1]) if isinstance(values[1], Tensor) else int(values[1])
            if count > 0:
                place = values[0].data_ptr()
                self.rows[place] = min(count, self.rows.get(place, count))

    def _noise(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, generator = len(self.drawn), kwargs.get("generator")
        if generator is None:
            seed(number)
            made = func(*args, **kwargs)
        else:  # the user's own: it stays where it is
            state = generator.get_state()
            generator.manual_seed(number)
            made = func(*args, **kwargs)
            generator.set_state(state)
        self.drawn.append(tuple(made.shape))
        if number in self.even and made.is_floating_point():
            made.fill_(1.0 if name.startswith("bernoulli") else _EVEN)
        return made


def _others(size: int, gone: Tensor) -> Tensor:
    """The places along a dimension that are not among these."""
    return torch.ones(size, dtype=torch.bool, device=gone.device).index_fill_(0, gone, False).nonzero().squeeze(1)


def depthwise(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
) -> Tensor | None:
    """A convolution of each channel by itself, tap by tap; None for any other. (In float64 torch calls a convolution
    for each channel, which takes ten times as long on small images.) Arguments have the names that torch gives them."""
    x = input
    if groups < _MANY or not isinstance(x, Tensor) or x.ndim != 4 or x.is_cuda or isinstance(padding, str):
        return None
    if not groups == x.shape[1] == weight.shape[0] or weight.shape[1] != 1 or weight.dtype != x.dtype:
        return None
    pads, steps, gaps = _pair(padding), _pair(stride), _pair(dilation)
    kernel = weight.shape[2:]
    sizes = [(x.shape[2 + i] + 2 * pads[i] - gaps[i] * (kernel[i] - 1) - 1) // steps[i] + 1 for i in (0, 1)]
    if min(sizes) < 1 or groups * _CHANNEL < math.prod(kernel) * x.shape[0] * x.shape[1] * math.prod(sizes):
        return None
    if math.prod(x.shape[2:]) == 1 < math.prod(sizes):  # one pixel has no format, and its surroundings have one
        return None
    # Channels lie side by side meanwhile: small images have more of them than pixels.
    wide = F.pad(x, (pads[1], pads[1], pads[0], pads[0])).permute(0, 2, 3, 1).contiguous()
    factors, shape = weight.reshape(groups, -1).t().contiguous(), (x.shape[0], *sizes, groups)
    # (Never the bias itself, even where it has the shape: it may be the user's.)
    made = x.new_zeros(shape) if bias is None else bias.expand(shape).clone(memory_format=torch.contiguous_format)
    # On small images many taps meet nothing but padding.
    rows, columns = (
        [
            tap * gaps[i]
            for tap in range(kernel[i])
            if any(pads[i] <= tap * gaps[i] + n * steps[i] < pads[i] + x.shape[2 + i] for n in range(sizes[i]))
        ]
        for i in (0, 1)
    )
    for top, left in itertools.product(rows, columns):
        factor = factors[top // gaps[0] * kernel[1] + left // gaps[1]]
        bottom, right = top + (sizes[0] - 1) * steps[0] + 1, left + (sizes[1] - 1) * steps[1] + 1
        made.addcmul_(wide[:, top : bottom : steps[0], left : right : steps[1]], factor)
    made = made.permute(0, 3, 1, 2)
    return made if _channels_last(x) or _channels_last(weight) else made.contiguous()  # code may ask for a view of it


def _channels_last(tensor: Tensor) -> bool:
    """Whether torch takes the numbers of an image for ones with channels side by side: by their strides."""
    least = 0
    for dim in (1, 3, 2, 0):
        stride, size = tensor.stride(dim), tensor.shape[dim]
        if not size or stride < max(least, dim == 1) or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(size, 1)
    return True


def _pair(value: Any) -> Sequence[int]:
    """Numbers for height and width."""
    return (value, value) if isinstance(value, int) else value * 2 if len(value) == 1 else value


def seed(number: int) -> None:
    """Seed what is in use. (`torch.manual_seed` keeps the stack for devices that are not, which takes milliseconds.)"""
    idle = not torch.cuda.is_initialized() and not torch.backends.mps.is_available()  # type: ignore[no-untyped-call]
    (torch.default_generator.manual_seed if idle else torch.manual_seed)(number)


@cache
def _role(func: Callable[..., Any]) -> str:
    """What a function is to `Precise`; "" if nothing special."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return "attribute"
    if func in _CASTS:
        return "cast"
    if name in _DROPOUTS:
        return "dropout"
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return "in place"
    if func is F.scaled_dot_product_attention:
        return "attention"
    if func is F.linear:
        return "linear"
    if func is F.conv2d:
        return "convolution"
    return "table" if func is F.embedding or name == "one_hot" else "noise" if name in _NOISE else ""


def _is_plain(item: Any) -> bool:
    """Whether it is a list or tuple of numbers, as a stride is."""
    return type(item) in (tuple, list) and all(type(part) in SCALARS for part in item)


def widen(modules: Iterable[nn.Module], wide: torch.dtype) -> None:
    """Put the buffers of the modules of a copy, and tensors that are plain attributes, into another format, in place.

    Calls cast the parameters they read: that takes no memory for long, and less time than a copy of them all.
    """
    for module in modules:
        if isinstance(module, nn.RNNBase):  # compares their format with that of its input, where nobody sees it
            module._flat_weights = [weight.to(wide) for weight in module._flat_weights if weight is not None]
        for key, value in module._buffers.items() if module._buffers else ():
            if value is not None and value.dtype != wide and value.is_floating_point():
                module._buffers[key] = value.to(wide)
        state = vars(module)
        for key in [key for key, value in state.items() if type(value) not in _HOLD_NONE]:
            value = state[key]
            nested = type(value) in (tuple, list, dict) and not key.startswith("_") and not _is_plain(value)
            if isinstance(value, Tensor) or nested:
                state[key] = map_tensors(lambda t: t.to(wide) if t.is_floating_point() else t, value)


class Pristine:
    """The state of the modules of a copy, from which each forward starts: what another wrote on them is taken back."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = [(vars(module), dict(vars(module))) for module in modules]
        items = [item for _, state in self._before for item in state.values() if type(item) in _CONTAINERS]
        self._empty = [item for item in items if not item]  # most are
        self._held = [(item, type(item)(item)) for item in items if item]
        self._buffers = [b for module in modules for b in module._buffers.values() if b is not None]
        self._numbers = [buffer.clone() for buffer in self._buffers]
        self._used = False

    def begin(self, training: bool) -> None:
        """Everything, hooks included, as it was; evaluation or training mode."""
        if self._used:  # most copies run once
            for item, content in [*self._before, *self._held]:
                item.clear()
                (item.extend if isinstance(item, list) else item.update)(content)
            for item in self._empty if any(self._empty) else ():
                item.clear()
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._numbers)
        self._used = True
        for module in self._modules:
            if module.training:
                module.training = False
        if training:
            self._modules[0].train()
            for module in self._modules:
                # Their own code draws, where nobody sees it.
                if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
                    module.dropout = 0.0
