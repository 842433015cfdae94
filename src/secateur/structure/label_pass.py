"""The label pass: run the model once with labels beside every activation, and learn what must leave together."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.errors import SecateurError
from secateur.nest import tensors_in
from secateur.ops.elementwise import Blank
from secateur.ops.layers import column, varying
from secateur.ops.norm import ChannelNorm, GroupNorm
from secateur.ops.table import Call, Function, Opaque, Operation, Query, Readout, Site, SizeQuery, function_name, lookup
from secateur.running.copies import meta_copy, named_modules, named_tensors, set_mode, shared_copy, tensors_of
from secateur.running.heads import catches
from secateur.running.observer import Observer, Rehearsal
from secateur.running.sandbox import Example, quiet, run, run_or_explain, to_meta
from secateur.running.tensor_facts import version
from secateur.structure.dataflow import DataFlow
from secateur.structure.findings import AxisTable, Findings, Written
from secateur.structure.followed import Questions, Reading, Shape, Size, follow, plain
from secateur.structure.labels import NeedsNumbers, TensorLabels
from secateur.structure.trace import MAKERS, Step, numbers_made, numbers_of

log = logging.getLogger("secateur")


#: Show numbers to people.
_SHOWN = {Tensor.__repr__, Tensor.__format__}
#: Tell something about sizes.
_LAYOUT = frozenset(
    ("stride", "storage_offset", "data_ptr", "untyped_storage", "is_same_size", "is_contiguous", "dim_order",
     "is_set_to", "__repr__", "__format__", "__str__")
)  # fmt: skip
#: Functions that take any number of channels; those that do so with the weights that they are given; and the modules
#: that give them theirs.
_SUPPLE = frozenset(
    ("relu", "relu_", "relu6", "relu6_", "sigmoid", "sigmoid_", "hardsigmoid", "hardsigmoid_", "gelu", "silu", "silu_",
     "mish", "tanh", "tanh_", "hardswish", "hardswish_", "elu", "elu_", "leaky_relu", "leaky_relu_", "hardtanh",
     "hardtanh_", "softplus", "dropout", "dropout2d", "clone", "contiguous", "add", "add_", "__add__", "__radd__",
     "__iadd__", "mul", "mul_", "__mul__", "__rmul__", "__imul__", "cat", "concat", "flatten", "mean", "max_pool1d",
     "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
     "adaptive_avg_pool2d", "adaptive_avg_pool3d")
)  # fmt: skip
_SIZED_BY_WEIGHTS = frozenset(("conv1d", "conv2d", "conv3d", "linear", "batch_norm"))
_DROPOUTS = frozenset((F.dropout, F.dropout2d, torch.dropout, torch.dropout_))
_HOLD_NOTHING = frozenset((bool, int, float, str, type(None), tuple))
_LAYERS = frozenset((nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
#: Hold nothing beside their items.
_TABLES = frozenset((dict, list, set))
_OTHER_THINGS = (nn.Module, Tensor, type, FunctionType)
#: Must return numbers of Python's own types.
_NUMBERS = {Tensor.__int__, Tensor.__float__, Tensor.__index__}


class LabelPass(Observer):
    """Watches one forward pass: `labels` is what operations speak to, `found` what they said."""

    shortcuts = True

    def __init__(
        self, model: nn.Module, axes: AxisTable, questions: Questions | None = None, strict: bool = False
    ) -> None:
        super().__init__(model)
        #: Whether functions without an entry are refused. If not, what reaches them stays.
        self.strict = strict
        self.found = Findings(axes, lambda: self.path or "the forward")
        tensors = tensors_of(self._tour)
        self.labels = TensorLabels(self._tour, tensors, self.found)
        self.flow = DataFlow()
        #: Whether numbers that tensors hold steer the forward. Then a smaller model may well do other things.
        self.steered = False
        #: How many steps came before that.
        self.certain = 0
        #: Whether they decide shapes.
        self.counted = False
        #: Whether code reads sizes, so that it may do other things for another input.
        self.sized = False
        #: Whether code that nobody can see into, or that asks in a roundabout way, may know sizes too.
        self.opaque = False
        #: Whether a call may have a size written into it, which would show in a trial removal.
        self.rigid = False
        #: Whether a dropout drops numbers although the model does not train.
        self.noisy = False
        #: Whether it compares sizes in a way that only trial removals can judge.
        self.unsure = False
        self.questions = questions or Questions()
        self._modules = dict(self._tour)
        self._spelt_out, self._follows, self._watch = 0, False, _Watch(self)
        self._held, self._empty = list[tuple[Any, list[Any]]](), list[Any]()  # what modules held before; most is empty
        #: Whether the forward wrote attributes of the model's own modules, as code that computes something once does.
        self.wrote = False
        self.numberless = all(t.is_meta for _, t in tensors if t.is_floating_point())

    @property
    def steady(self) -> bool:
        """Whether the forward makes the same calls for inputs of all sizes, with all numbers."""
        asks = self.sized or self.opaque or self.steered or self.questions.asked
        return self.numberless and not asks and not any(map(catches, self._modules.values()))

    def passes_by(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operation = lookup(func)
        self.opaque |= getattr(func, "__name__", "") in _LAYOUT
        if isinstance(operation, SizeQuery):
            self.sized = True
        elif isinstance(operation, Readout):
            if not (self.steered or self.numberless):
                self.steered, self.certain = True, len(self.found.steps)
        elif func is Tensor.data_ptr:  # a kernel of somebody's own reads or writes its memory
            if args[0].is_meta:
                raise NeedsNumbers(str(self.site(func)))
            self.labels.freeze_tensor(args[0], f"its memory is handed to other code in {self.found.where()}")
            self.labels.overwritten(args)
        elif func in MAKERS:
            self.found.steps[self.site(func)] = Step(numbers_made(func, args, kwargs))

    def overwrites(self, names: Sequence[str]) -> None:
        self.found.overwritten.update(names)

    def enter(self, module: nn.Module) -> None:
        super().enter(module)
        self.found.ran.add(self.path)

    def runs(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():  # our own questions about sizes are none of the forward's
            begin, given = self.flow.enters(args, kwargs)
        output = super().runs(module, plain, args, kwargs)
        with torch._C.DisableTorchFunction():
            if isinstance(module, torch.jit.ScriptModule):
                self._stays_whole(module)
            self.flow.leaves(self.path, begin, given, output)
        return output

    def unknown(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What reaches a function without an entry stays; of what it makes nothing is known but the shape."""
        tensors = tensors_in((args, kwargs))
        if not tensors or func in MAKERS or self.strict:
            return super().unknown(func, args, kwargs)
        self.opaque, versions = True, [version(tensor) for tensor in tensors]
        call = Call(_OPAQUE, func, args, kwargs, self.site(func))
        if _in_transform():
            return self._unseen(call.site, tensors, call.run)
        made = call.run()
        self._learn(call, made, [t for t, before in zip(tensors, versions, strict=True) if version(t) != before])
        return self._readings(func, tensors, made) if _OPAQUE.counts(call) and not tensors_in(made) else made

    def transformed(self, func: Function, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
        """What reaches `torch.vmap` stays."""
        if self.strict:
            return super().transformed(func, tensors, run)
        # Other observers do not count such calls, so they must not count in the sites of others here.
        return self._unseen(Site(self.path, function_name(func), 0), tensors, run)

    def _unseen(self, site: Site, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
        """A call inside `torch.vmap` or its like: what it reads stays, and what it multiplies is counted."""
        self.opaque = True
        with temporarily_clear_interpreter_stack():  # labels are no tensors of the transform
            for tensor in tensors:
                self.labels.freeze_tensor(tensor, f"{site} runs inside torch.vmap, where nobody can follow it")
                self.flow.ends.add(self.flow.value(tensor))  # nobody knows who reads what becomes of it
        with _Multiplications() as counted:
            made = run()
        if counted.total:
            self.found.cost(site, counted.total)
        return made

    def _stays_whole(self, part: nn.Module) -> None:
        """All parameters of a part, inside which nothing can be seen, stay."""
        self.opaque = True
        for _, tensor in named_tensors(part):
            self.labels.freeze_tensor(tensor, f"`{self.path}` is TorchScript")
        self.found.ran |= {f"{self.path}.{path}" for path, _ in named_modules(part) if path}

    def observe(self, call: Call) -> Any:
        if _in_transform():  # even what it makes of plain tensors is none
            return self._unseen(call.site, call.tensors(), call.run)
        output = call.operation.rehearse(call)
        self._learn(call, output)
        return output

    def _learn(self, call: Call, output: Any, written: Sequence[Tensor] = ()) -> None:
        """What a call says. `written`: what it was seen to overwrite."""
        self.labels.overwritten(written)
        self.opaque |= not isinstance(output, Tensor)  # how many parts there are may depend on sizes
        self.counted |= not self.numberless and call.operation.counts(call)
        self.flow.add(call, output, written)
        self.labels.trace(call, output)
        call.operation.channels(self.labels, call, output)
        self.labels.choices.observe(call, output)
        if isinstance(call.operation, ChannelNorm):
            self._count_channels(call)
        self._count_written(call, output)
        self.rigid = self.rigid or not self._is_supple(call.site)
        self.noisy |= call.function in _DROPOUTS and bool(call.get("training", True))
        made = tuple((tuple(tensor.shape), self.labels.layers(tensor)) for tensor in tensors_in(output))
        self.found.steps[call.site] = Step(numbers_of(call), made)

    def _is_supple(self, site: Site) -> bool:
        """Whether a call takes tensors of any number of channels, and knows no such number itself."""
        name = site.function.rpartition(".")[2]
        return name in _SUPPLE or (name in _SIZED_BY_WEIGHTS and type(self._modules.get(site.path)) in _LAYERS)

    def __enter__(self) -> Self:
        held = _held_by(self._modules.values())
        self._held, self._empty = [(item, _content(item)) for item in held if item], [item for item in held if not item]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.wrote = any(self._empty) or any(not _same(_content(item), before) for item, before in self._held)
        self._held, self._empty, self.found.where = [], [], _nowhere  # what is found must not keep the pass
        self._watch.end()
        self.labels.close()

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            made = super().__torch_function__(func, types, args, kwargs)
        except Exception:
            self.opaque = True  # code that goes on after that is steered by what fails
            raise
        self.labels.choices.follow((args, kwargs), made)
        operation = lookup(func)
        if not isinstance(operation, Query):
            return made
        if isinstance(operation, Blank):
            self.labels.blank(made, operation.zero)
        elif self._spelt_out:
            return made
        elif isinstance(operation, SizeQuery):
            return self._sizes(func, (*args, *(kwargs or {}).values()), made)
        elif isinstance(operation, Readout):
            return self._readings(func, tensors_in((args, kwargs)), made)
        return made

    def present(
        self, operation: Operation | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor] | None]:
        if self._follows:  # what our own code compares is no question
            return plain(args), plain(kwargs), None
        return args, kwargs, None

    @contextmanager
    def again(self) -> Iterator[None]:
        self._spelt_out += 1
        try:
            with super().again():
                yield
        finally:
            self._spelt_out -= 1

    def _sizes(self, func: Function, args: tuple[Any, ...], made: Any) -> Any:
        """Sizes that may shrink, followed until the forward compares them."""
        tensor = args[0]
        name = self.labels.parameter(tensor)
        over = set(range(tensor.ndim)) if name else {d for layer in self.labels.layers(tensor) for d in varying(layer)}
        if not over:
            return made
        if func is Tensor.__len__:  # Python takes nothing but an int
            self.unsure |= 0 in over
            return made
        self._follows = True
        if isinstance(made, torch.Size):
            return Shape(follow(n, self._size(tensor, [d])) if d in over else n for d, n in enumerate(made))
        if len(args) == 1:
            return follow(made, self._size(tensor, over, "product"))
        dim = plain(args[1]) % tensor.ndim
        return follow(made, self._size(tensor, [dim])) if dim in over else made

    def _size(self, tensor: Tensor, dims: Collection[int], form: str = "size") -> Size:
        place = len(self._watch.sizes)
        self._watch.sizes.append((tensor, dims))
        return Size(partial(_compared, self._watch, place), partial(_unsure, self._watch), self._asked(), form)

    def _asked(self) -> Callable[[bool], bool]:
        return partial(_asked, self._watch, self.path)

    def _readings(self, func: Function, tensors: list[Tensor], made: Any) -> Any:
        """Numbers of tensors: what code decides by them, other numbers would decide otherwise."""
        if func in _SHOWN:
            return made
        for tensor in tensors:
            self.labels.freeze_tensor(tensor, f"its numbers are read one by one in {self.found.where()}")
        if isinstance(made, bool):
            return self._asked()(made)
        if func in _NUMBERS and isinstance(made, int | float):
            return self.questions.number(self.path, made)
        self._follows = True
        return follow(made, Reading(self._asked()))

    def _count_channels(self, call: Call) -> None:
        """What a norm without parameters remembers, and what only a module can."""
        layers = [layer for layer in self.labels.layers(call["input"]) if varying(layer) == [1]]
        module = self._modules.get(self.path)
        if not layers:
            return
        if not isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase):
            if isinstance(call.operation, GroupNorm) and call["num_groups"] > 1:
                self.found.freeze(layers[0], f"the number of groups is written into the forward ({call.site})")
        elif call["weight"] is None and call.get("running_mean") is None:
            name = "num_channels" if isinstance(module, nn.GroupNorm) else "num_features"
            self.found.counted[self.path, name] = np.abs(column(layers[0]))

    def _count_written(self, call: Call, output: Any) -> None:
        """What numbers the call writes. Views write none; what is done in place does."""
        sources = call.tensors()
        for tensor in tensors_in(output):
            layers = self.labels.layers(tensor)
            if layers and (any(tensor is source for source in sources) or not _is_view(tensor, sources)):
                self.found.written.append(Written(call.site, tuple(tensor.shape), layers))

    def concerns(self, value: Any) -> bool:
        return bool(self.labels.layers(value))


_OPAQUE = Opaque()


def _in_transform() -> bool:
    """Whether `torch.vmap` or its like is running."""
    return torch._C._functorch.maybe_current_level() is not None


class _Multiplications(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiply-accumulates of matrix products and convolutions by the formulas of torch."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # takes a while, and few need it

        super().__init__()  # type: ignore[no-untyped-call]
        self.total, self._formulas = 0, flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        count = self._formulas.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=made) // 2
        return made


def _is_view(tensor: Tensor, sources: Sequence[Tensor]) -> bool:
    memory = tensor.untyped_storage()._cdata
    return any(source.untyped_storage()._cdata == memory for source in sources)


@dataclass
class _Watch:
    """A label pass while it runs. Code may keep followed numbers for longer, and shall keep nothing else alive."""

    running: LabelPass | None
    sizes: list[tuple[Tensor, Collection[int]]] = field(default_factory=list)

    def end(self) -> None:
        self.running = None
        self.sizes.clear()


def _compared(watch: _Watch, place: int) -> None:
    """A size is compared: it must stay."""
    if watch.running is None:
        return
    (tensor, dims), labels, found = watch.sizes[place], watch.running.labels, watch.running.found
    reason, name = f"its size is compared in {found.where()}", labels.parameter(tensor)
    with torch._C.DisableTorchFunction():  # the forward is running
        if name is None:
            for layer in labels.layers(tensor):
                found.grid(layer, reason, rigid=sorted(dims))
        else:
            for dim in dims:
                found.freeze(found.axes.of(name, dim, tensor.shape[dim]).labels, reason)


def _unsure(watch: _Watch) -> None:
    if watch.running is not None:
        watch.running.unsure = True


def _asked(watch: _Watch, path: str, answer: bool) -> bool:
    return answer if watch.running is None else watch.running.questions.answer(path, answer)


def _nowhere() -> str:
    return "the forward"


def _held_by(modules: Iterable[nn.Module]) -> list[Any]:
    """What modules hold; of the model's own modules also what is in their lists, tables and plain objects."""
    found: list[Any] = []
    for module in modules:
        state = vars(module)
        found.append(state)
        if not type(module).__module__.startswith("torch.nn."):
            values = [value for value in state.values() if type(value) not in _HOLD_NOTHING]
            found += [value for value in values if isinstance(value, dict | list | set)]
            others = [value for value in values if type(value) not in _TABLES and not isinstance(value, _OTHER_THINGS)]
            found += [vars(value) for value in others if hasattr(value, "__dict__")]
    return found


def _content(item: Any) -> list[Any]:
    return list(item.values() if isinstance(item, dict) else item)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def watch(
    model: nn.Module,
    example: Example,
    axes: AxisTable | None = None,
    questions: Questions | None = None,
    strict: bool = False,
) -> tuple[LabelPass, Any]:
    """Run a copy of a model under a label pass. Returns the pass and the model's output."""
    watched = LabelPass(model, AxisTable() if axes is None else axes, questions, strict)
    with quiet(), watched:
        return watched, run(model, example)


def watch_copy(model: nn.Module, example: Example, strict: bool = False) -> tuple[nn.Module, Example, LabelPass, Any]:
    """Watch a copy without numbers if the forward runs without them, else one that shares the parameters' memory.

    Returns the copy and its inputs, then what `watch` returns.
    """
    copy, inputs = set_mode(meta_copy(model)), to_meta(example)
    try:
        return copy, inputs, *watch(copy, inputs, strict=strict)
    except SecateurError:
        raise
    except Exception as error:  # numbers steer the forward, or tensors are made on a device of their own
        log.debug("no forward without numbers for %s: %s", type(model).__name__, error)
    with quiet():
        copy = set_mode(shared_copy(model))
        with Rehearsal(copy):
            run_or_explain(copy, example)
    copy = set_mode(shared_copy(model))  # the one that ran may keep what it computed, and would do other things
    return copy, example, *watch(copy, example, strict=strict)
