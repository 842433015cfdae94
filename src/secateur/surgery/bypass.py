"""What takes the place of modules whose residual branch left: no parameters, no computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from secateur.errors import PlanError
from secateur.running.copies import named_modules
from secateur.running.heads import names_read
from secateur.structure.blocks import StandIn, within

_PLAIN = (bool, int, float, str, type(None))
_OWN = frozenset(vars(nn.Module()))


class Bypass(nn.Module):
    """Returns what the module in whose place it is was given, or zeros of that shape, as that module did.

    The plain attributes of that module are kept: code around it may read them.
    """

    def __init__(self, item: StandIn, old: nn.Module) -> None:
        super().__init__()
        self.returns, self.place = item.returns, item.place
        #: Whether it notes the length of the text in the cache, as no layer does that is left.
        self.counts = False
        self.argument: int | str = int(item.argument) if item.argument.isdecimal() else item.argument
        for name in old._parameters:
            self.register_parameter(name, None)
        for name, value in vars(old).items():
            plain = isinstance(value, _PLAIN) or (
                isinstance(value, tuple | list) and all(isinstance(part, _PLAIN) for part in value)
            )
            if plain and name not in _OWN and name not in vars(self):
                setattr(self, name, value)
        self.training = old.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The argument itself, or zeros."""
        made: Tensor | None = None
        if self.returns != "nothing":
            x: Tensor = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]
            made = x
            if self.counts:
                _count((*args, *kwargs.values()), x)
            if self.returns == "zero":  # runtimes leave out the addition of a single 0
                made = x.new_zeros((1,) * x.ndim)
            elif self.returns == "zeros":
                made = x.new_zeros(()).expand(x.shape)
            elif self.returns == "own zeros":
                made = x.new_zeros(x.shape)
        if not self.place:
            return made
        position, length = self.place
        return (*[None] * position, made, *[None] * (length - position - 1))

    def extra_repr(self) -> str:
        """What is returned."""
        return f"returns={self.returns!r}"


def bypass(small: nn.Module, stand_ins: Sequence[StandIn]) -> None:
    """Put stand-ins in place of modules of a copy, under every name that these have."""
    if not stand_ins:
        return
    modules = dict(named_modules(small))
    fresh: dict[int, nn.Module] = {}
    for item in stand_ins:
        if not item.path or item.path not in modules or (item.place and item.place[0] >= item.place[1]):
            raise PlanError(
                f"the plan replaces `{item.path}`, which {type(small).__name__} does not have.",
                fix="build the same model that was analysed",
            )
        fresh[id(modules[item.path])] = Bypass(item, modules[item.path])
    for path, module in modules.items():
        for name, child in list(module._modules.items()):
            if child is not None and id(child) in fresh:
                module._modules[name] = fresh[id(child)]
        # The fused path of torch's own layer reads the weights of all its parts.
        if isinstance(module, nn.TransformerEncoderLayer) and any(within(i.path, path) for i in stand_ins):
            module.activation_relu_or_gelu = 0
    there = dict(named_modules(small))
    gone = [path for path, module in modules.items() if there.get(path) is not module and _caches(module)]
    if gone:
        _renumber(small, [there[i.path] for i in stand_ins if i.path in there and any(within(p, i.path) for p in gone)])


def _caches(module: nn.Module) -> bool:
    """Whether a module keeps keys and values in a cache, at the place that its number gives."""
    return type(vars(module).get("layer_idx")) is int and {"layer_idx", "update"} <= names_read(type(module).forward)


def _count(given: Sequence[Any], x: Tensor) -> None:
    """Note the length of the text in a cache: positions of what comes next depend on it."""
    caches = [getattr(item, "self_attention_cache", item) for item in given if hasattr(item, "get_seq_length")]
    for cache in caches[:1]:
        state = x.new_zeros(len(x), 1, x.shape[1], 1)
        cache.update(state, state, 0)


def _renumber(small: Any, instead: Sequence[nn.Module]) -> None:
    """Places in the cache without gaps: its first layer is asked how long the text is, and the first of each kind."""
    left: dict[str, list[Any]] = {}
    found: list[Any] = [module for _, module in named_modules(small) if _caches(module)]
    for module in found:
        left.setdefault(_cache_kind(module, module.layer_idx), []).append(module)
    config = getattr(small, "config", None)
    for kind, modules in left.items():
        highest = max(module.layer_idx for module in modules)
        places = [i for i in range(highest + 1) if _cache_kind(modules[0], i) == kind]
        # Some layers have two that share a place: one for the text itself, one for another text.
        rank = {old: places[i] for i, old in enumerate(sorted({module.layer_idx for module in modules}))}
        for module in modules:
            module.layer_idx = rank[module.layer_idx]
    if any(module.layer_idx == 0 for module in found):
        return
    able = [module for module in instead if isinstance(module, Bypass) and module.returns != "nothing"]
    if able:
        able[0].counts = True
    else:
        for settings in (config, getattr(small, "generation_config", None)):
            if settings is not None:
                settings.use_cache = False


def _cache_kind(module: Any, place: int) -> str:
    """Full attention, or within a window: caches differ."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return str(kinds[place]) if kinds and place < len(kinds) else ""
