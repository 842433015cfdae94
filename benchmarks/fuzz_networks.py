"""Prune and explain random networks, and judge the outcome without the package's own check.

    python -m benchmarks.fuzz_networks --cases 10000 --workers 2
    python -m benchmarks.fuzz_networks --cases 500 --start 2000     # go on from there
    python -m benchmarks.fuzz_networks --only 4711                  # one network, with its source

A network (`tests/random_nets.py`) is analysed on its example, which may be poor: zeros, a single sample, half
precision. A random plan is applied. Then the smaller model is compared with the original in which everything that the
plan cuts is zero: in double precision, on fresh inputs of another batch size, of another size where the original takes
one, with optional inputs, in training mode too, and twice in a row. Now and then, all residual branches leave. How it
may end:

- exact: all outputs agree;
- kept: nothing may leave, and every layer has its reason;
- refused: an error of ours, by name.

What must not happen:

- SILENT: another output, or a smaller model that fails where the original runs;
- FOREIGN: an exception that is not ours, or a crash;
- ENDLESS: more than 20 s of computing;
- TOUCHED: the user's model, example or random numbers changed, or the new model's weights are not the old ones;
- COST: parameters or MACs differ from those of the plan;
- LEAK: relevance that is not finite or not conserved within 0.1 % (ε rules: 1 %), without a warning.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import secateur as sc
from secateur.errors import NothingToPruneError, TargetError
from secateur.nest import map_tensors, tensors_in
from secateur.ops.table import function_name
from secateur.plans import Limits
from secateur.plans.plan import plan_for
from secateur.structure.blocks import Block

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from oracle import norm_by_formula, random_scores
from random_nets import Network, network

SECONDS = 20
GOOD = ("exact", "kept", "refused")
BAD = ("SILENT", "FOREIGN", "ENDLESS", "TOUCHED", "COST", "LEAK", "INVALID")
CRITERIA = ("random", "random", "lrp", "lrp", "lrp", "weight", "taylor", "gradient", "activation")
COMPOSITES = ("alpha1beta0", "alpha1beta0", "epsilon_plus", "attnlrp")


@dataclass(frozen=True)
class Verdict:
    """How one network ended. `cause` is what failures of one kind have in common."""

    number: int
    ending: str
    cause: str = ""
    traits: tuple[str, ...] = ()
    family: str = ""
    relevance: str = "not asked for"
    seconds: float = 0.0


class _Stop(BaseException):
    """Too slow. Not an Exception, which the code under test may catch."""


class _Fault(Exception):
    """The judge's finding."""

    def __init__(self, ending: str, cause: str) -> None:
        super().__init__(cause)
        self.ending, self.cause = ending, cause


# -- running a model the same way on both sides ------------------------------------------------------------------------
_DRAWS = {torch.randn_like, torch.rand_like, torch.bernoulli, Tensor.bernoulli}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _Even(TorchFunctionMode):
    """Double precision throughout, and noise that does not depend on the shape: one number for each draw."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def _number(self) -> float:
        self.draws += 1
        return math.sin(self.draws) ** 2

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _DRAWS:
            return torch.full_like(args[0], self._number())
        if func in (torch.randn, torch.rand, torch.normal):
            shape = kwargs.get("size", args[0] if isinstance(args[0], tuple | list) else args)
            return torch.full(tuple(shape), self._number(), dtype=torch.float64)
        if name in ("normal_", "uniform_", "bernoulli_", "exponential_"):
            return args[0].fill_(self._number())
        if name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
            on = kwargs.get("training", args[2] if len(args) > 2 else True)
            return args[0] * self._number() if on else args[0]
        if func is F.multi_head_attention_forward:  # what it calls is not seen
            args = (*args[:10], 0.0, *args[11:])
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), {**kwargs}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        if name == "rrelu":
            return F.leaky_relu(args[0], 0.2)
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        wide = [torch.float64 if item in _NARROW else item for item in args] if _has_dtype(args) else args
        kwargs = {n: torch.float64 if type(i) is torch.dtype and i in _NARROW else i for n, i in kwargs.items()}
        return func(*wide, **kwargs)


def _has_dtype(args: tuple[Any, ...]) -> bool:
    return any(type(item) is torch.dtype for item in args)


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def doubled(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                vars(module)[name] = value.double()
    return model._apply(_wide)


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def each(function: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {name: function(t) for name, t in inputs.items()}
    return tuple(function(t) for t in inputs) if isinstance(inputs, tuple) else function(inputs)


def flat(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in an output, whatever it is wrapped in."""
    if isinstance(value, Tensor):
        yield torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    elif depth > 8 or isinstance(value, str | int | float | None | type):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from flat(item, depth + 1)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from flat(item, depth + 1)
    else:
        names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
        for name in names:
            yield from flat(getattr(value, name, None), depth + 1)


def outputs(model: nn.Module, inputs: Any, training: bool) -> list[Tensor]:
    """What a model in double precision returns in two calls, one after the other."""
    model = copy.deepcopy(model).train(training)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.random.fork_rng(), _Even():
            return [t.clone() for _ in range(2) for t in flat(called(model, each(lambda t: _wide(t.clone()), inputs)))]
    finally:
        torch.set_default_dtype(before)


def gap(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of any output, relative to its own largest number."""
    shapes = [[tuple(t.shape) for t in some] for some in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise _Fault("SILENT", f"outputs of shapes {shapes[0][:4]} instead of {shapes[1][:4]}")
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        a, b = a.double(), b.double()
        fine = b.isfinite()
        if not torch.equal(a[~fine].nan_to_num(), b[~fine].nan_to_num()):
            return math.inf
        if fine.any():
            difference = (a - b)[fine].abs().max() / (b[fine].abs().max() or 1.0)
            worst = max(worst, float(difference) if difference == difference else math.inf)
    return worst


# -- the reference -----------------------------------------------------------------------------------------------------
def zeroed(model: nn.Module, plan: sc.Plan) -> nn.Module:
    """The original in double precision with zeros where the plan cuts; norms that mix channels see the kept ones."""
    simple = {path for path, module in model.named_modules() if _mixes(module)}
    if {norm.path for norm in plan.norms} - simple:
        return doubled(sc.apply(model, plan, how="mask"))  # a norm without parameters: only the package knows
    masked = doubled(model)
    tensors = dict([*masked.named_parameters(), *masked.named_buffers()])
    with torch.no_grad():
        for name, dims in plan.cuts.items():
            for dim, indices in dims.items():
                tensors[name].index_fill_(dim, torch.tensor(indices), 0)
    for path, module in masked.named_modules():
        removed = plan.cuts.get(f"{path}.weight", {}).get(0, ()) if path in simple else ()
        if removed:
            module.register_forward_hook(partial(_over_kept, sorted(set(range(len(module.weight))) - set(removed))))
    return masked


def _mixes(module: nn.Module) -> bool:
    if isinstance(module, nn.GroupNorm):
        return module.num_groups == 1 and module.affine
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None and module.weight.ndim == 1


def _over_kept(kept: list[int], module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    last = args[0].movedim(1, -1) if isinstance(module, nn.GroupNorm) else args[0]
    made = torch.zeros_like(last)
    made[..., kept] = norm_by_formula(module, last[..., kept], kept)
    return made.movedim(-1, 1) if isinstance(module, nn.GroupNorm) else made


# -- what must stay as it was ------------------------------------------------------------------------------------------
def _kept(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict) and depth < 4:
        return [(str(k), _kept(v, depth + 1)) for k, v in value.items()]
    if isinstance(value, tuple | list) and depth < 4:
        return [_kept(v, depth + 1) for v in value]
    return repr(value) if isinstance(value, int | float | str | None) else id(value)


def snapshot(model: nn.Module, example: Any) -> dict[str, Any]:
    """Everything that the package must leave alone, by name."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            state[f"{path}.{name}"] = _kept(value)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                state[f"{path}.{name} as a parameter"] = id(parameter), parameter.requires_grad, parameter.grad is None
    state["example"] = _kept(example)
    state["torch's random numbers"] = _kept(torch.get_rng_state())
    state["Python's random numbers"] = hash(random.getstate())
    state["NumPy's random numbers"] = np.random.get_state()[1].tobytes()  # type: ignore[union-attr, index]
    state["default dtype"] = str(torch.get_default_dtype())
    state["gradients"] = torch.is_grad_enabled()
    return state


def check_untouched(before: dict[str, Any], model: nn.Module, example: Any, by: str) -> None:
    after = snapshot(model, example)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        raise _Fault("TOUCHED", f"by {by}: {', '.join(changed[:4])}")


def check_tensors(model: nn.Module, small: nn.Module, plan: sc.Plan) -> None:
    """The new model's tensors are the old ones without what the plan cuts."""
    old = dict([*model.named_parameters(), *model.named_buffers()])
    for name, new in [*small.named_parameters(), *small.named_buffers()]:
        wanted = old[name]
        learned = wanted.requires_grad
        for dim, indices in plan.cuts.get(name, {}).items():
            kept = [i for i in range(wanted.shape[dim]) if i not in set(indices)]
            wanted = wanted.index_select(dim, torch.tensor(kept, dtype=torch.long))
        if new.requires_grad != learned or _kept(new) != _kept(wanted):
            raise _Fault("TOUCHED", f"weights of the new model: {name}")
    modes = {path: module.training for path, module in model.named_modules()}
    for path, module in small.named_modules():
        if module.training != modes.get(path, module.training):
            raise _Fault("TOUCHED", f"the mode of the new model: {path}")


# -- the judge ---------------------------------------------------------------------------------------------------------
def probes(net: Network) -> Iterator[tuple[str, Any, bool]]:
    """Fresh inputs, and whether the model is in training mode."""
    yield "a fresh batch of 3", net.inputs(1), False
    yield "positive inputs", net.inputs(2, "positive", 2), False
    yield "negative inputs", net.inputs(3, "negative", 1), False
    if net.extra:
        yield "the optional input", net.inputs(4, extra=True), False
    if net.family != "vector":
        yield "another size", net.inputs(5, size=1), False
    yield "training mode", net.inputs(6), True


def check_formats(model: nn.Module, small: nn.Module, example: Any) -> None:
    """Outputs on the example have the number formats that they had."""
    with torch.no_grad(), torch.random.fork_rng():
        was, now = ([t.dtype for t in flat(called(copy.deepcopy(m).eval(), example))] for m in (model, small))
    if was != now:
        raise _Fault("SILENT", f"outputs of formats {now[:4]} instead of {was[:4]}")


def compare(net: Network, model: nn.Module, small: nn.Module, plan: sc.Plan) -> None:
    masked, small = zeroed(model, plan), doubled(small)
    tried = 0
    for what, inputs, training in probes(net):
        try:
            outputs(doubled(model), inputs, training)
            wanted = outputs(masked, inputs, training)
        except Exception:
            continue  # the original does not take it
        tried += 1
        try:
            found = outputs(small, inputs, training)
        except Exception as error:
            raise _Fault(
                "SILENT", f"{what}: the smaller model fails, {type(error).__name__}: {_line(error)}"
            ) from error
        off = gap(found, wanted)
        if not off <= 1e-7:
            raise _Fault("SILENT", f"{what}: off by {off:.1g}")
    if not tried:
        raise _Fault("INVALID", "the reference runs on no fresh input")


class _Silent(_Even):
    """Listed additions add zeros instead of a branch. `met`: how many were met."""

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        super().__init__()
        self.paths, self.stack = {id(module): path for path, module in model.named_modules()}, [""]
        self.operands = {(b.site.path, b.site.function, b.site.visit): b.operand for b in blocks}
        self.counts, self.met = Counter[tuple[str, str]](), 0
        for module in model.modules():
            module.register_forward_pre_hook(lambda m, args: self.stack.append(self.paths[id(m)]), prepend=True)
            module.register_forward_hook(lambda m, args, made: (self.stack.pop(), None)[1], always_call=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self.stack[-1], function_name(func)
        operand = self.operands.get((*key, self.counts[key]))
        self.counts[key] += 1
        if operand is not None and operand < len(args):
            self.met += 1
            args = (*args[:operand], args[operand] * 0, *args[operand + 1 :])
        return super().__torch_function__(func, types, args, kwargs)


def without_blocks(net: Network, model: nn.Module, graph: sc.Graph) -> None:
    """All residual branches leave. The reference is the original whose additions add 0, where it makes the same calls
    as on the example."""
    removed = np.zeros(len(graph.root), np.bool_)
    removed[[block.group for block in graph.blocks.prunable]] = True
    if not removed.any():
        return
    try:
        plan = plan_for(graph, graph.blocks.closed(removed))
        small = doubled(sc.apply(model, plan))
    except sc.SecateurError:
        return
    gone = graph.blocks.gone(removed)
    for what, inputs, training in probes(net):
        if training or what == "another size":
            continue
        before, copied = torch.get_default_dtype(), doubled(model).eval()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad(), torch.random.fork_rng(), _Silent(copied, gone) as silent:
                wanted = list(flat(called(copied, each(lambda t: _wide(t.clone()), inputs))))
        except Exception:
            continue  # the original does not take it
        finally:
            torch.set_default_dtype(before)
        if silent.met == len(gone):
            off = gap(outputs(small, inputs, False)[: len(wanted)], wanted)
            if not off <= 1e-7:
                raise _Fault("SILENT", f"without {gone[0].name}, {what}: off by {off:.1g}")


def went(model: nn.Module, example: Any) -> list[Any]:
    """The modules that run on the example, and on how much. The plan's MACs are those of the way that the original
    goes: fewer units may send other tokens to an expert."""
    ways: list[Any] = []
    model = doubled(model).eval()
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, args, path=path: ways.append((path, [t.shape for t in flat(args)])))
    with torch.no_grad(), torch.random.fork_rng():
        called(model, each(_wide, example))
    return ways


def explained(model: nn.Module, example: Any, dtype: torch.dtype, composite: str) -> str:
    """Relevance is refused by name, warned of, or finite and conserved."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen = sc.explain(model, example, lambda made: map_tensors(torch.ones_like, made), composite=composite)
        except sc.SecateurError as error:
            return f"refused: {type(error).__name__}"
    told = any(isinstance(item.message, sc.errors.ConservationWarning) for item in caught)
    heat = [t for t in (seen.input if isinstance(seen.input, list) else [seen.input]) if t is not None]
    if not all(bool(t.isfinite().all()) for t in [*heat, *seen.units.values()]):
        raise _Fault("LEAK", "relevance is not finite")
    if told or dtype not in (torch.float32, torch.float64):
        return "warned" if told else "in half precision"
    start = sum(t.numel() for t in tensors_in(seen.output) if t.is_floating_point())
    arrived = sum(float(t.double().sum()) for t in heat) if heat else seen.conservation.input
    missing = (start - arrived - seen.conservation.absorbed) / max(start, 1)
    if not abs(missing) <= (1e-2 if composite == "epsilon_plus" else 1e-3):  # ε takes a share, and 1 % is warned of
        raise _Fault("LEAK", f"{missing:.1%} of the relevance is missing")
    return "conserved"


def scored(model: nn.Module, graph: sc.Graph, inputs: Any, criterion: str) -> sc.Scores | None:
    """Scores, or None if they are refused by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            data = [(inputs, torch.zeros(len(next(flat(inputs))), dtype=torch.long))]
            scores = sc.score(model, data, criterion, graph=graph)
        except sc.SecateurError:
            return None
    if not all(np.isfinite(values).all() for values in scores.units.values()):
        raise _Fault("LEAK", f"scores of {criterion} are not finite")
    return scores


def repaired(model: nn.Module, small: nn.Module, net: Network, method: str) -> None:
    """Repair is refused by name, or gives a model that runs."""
    try:
        better = sc.repair(small, model, [(net.inputs(7), None)], method, copies=1, progress=False)
    except sc.SecateurError:
        return
    with torch.no_grad(), torch.random.fork_rng():
        called(better.eval(), net.inputs(8))


def runnable(net: Network) -> tuple[Network, nn.Module, Any]:
    """The network in its precision, or in single precision if torch has no such operation."""
    for dtype in dict.fromkeys((net.dtype, torch.float32)):
        net = replace(net, dtype=dtype)
        example = net.inputs(0, net.example, 2)
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError), torch.no_grad():
            called(net.build().eval(), example)
            return net, net.build(), example
    raise _Fault("INVALID", "the network does not run on its own example")


def judged(net: Network) -> Verdict:
    """Analyse, plan, apply, compare, explain."""
    rng = random.Random(net.number)
    criterion = rng.choice(CRITERIA)
    step, relevance = "build", "not asked for"
    try:
        net, model, example = runnable(net)
        before = snapshot(model, example)
        step = "analyze"
        ending, cause = "exact", ""
        graph = sc.analyze(model, example)
        check_untouched(before, model, example, step)
        step = f"score by {criterion}"
        scores = None if criterion == "random" else scored(model, graph, example, criterion)
        check_untouched(before, model, example, step)
        step = "plan"
        plan = None
        try:
            limits = Limits(scope=rng.choice(["global", "layer"]))
            scores = scores or random_scores(graph, net.number)
            plan = sc.plan(graph, scores, remove=rng.uniform(0.1, 0.8), limits=limits)
        except (NothingToPruneError, TargetError) as error:
            silent = [layer.name for layer in graph.layers if not layer.prunable and not layer.reason]
            if silent:
                raise _Fault("SILENT", f"{silent[0]} is kept without a reason") from None
            ending, cause = "kept", type(error).__name__
        if plan is not None:
            step = "apply"
            small = sc.apply(model, plan)
            check_untouched(before, model, example, step)
            step = "the judge"
            check_tensors(model, small, plan)
            check_formats(model, small, example)
            compare(net, model, small, plan)
            step = "measure"
            cost = sc.measure(small, example, latency=False)
            same = cost.macs == plan.after.macs or went(model, example) != went(zeroed(model, plan), example)
            if cost.params != plan.after.params or not same:
                raise _Fault("COST", f"planned {plan.after}, measured {cost}")
            if rng.random() < 0.3:
                step = "blocks"
                without_blocks(net, model, graph)
                check_untouched(before, model, example, step)
            if rng.random() < 0.15:
                step = "repair"
                repaired(model, small, net, rng.choice(["best", "mean", "norm", "ridge"]))
                check_untouched(before, model, example, step)
        if rng.random() < 0.4:
            step = "explain"
            relevance = explained(model, example, net.dtype, rng.choice(COMPOSITES))
            check_untouched(before, model, example, step)
    except _Fault as fault:
        ending, cause = fault.ending, fault.cause
    except (NothingToPruneError, TargetError) as error:
        ending, cause = "kept", type(error).__name__
    except sc.SecateurError as error:
        ending, cause = "refused", f"{type(error).__name__} in {step}: {_line(error)}"
    except _Stop:
        ending, cause = "ENDLESS", f"in {step}"
    except BaseException as error:
        at = next((f"{Path(f.filename).name}:{f.lineno}" for f in reversed(traceback.extract_tb(error.__traceback__))
                   if "secateur/" in f.filename), "")  # fmt: skip
        ending, cause = "FOREIGN", f"{type(error).__name__} in {step}, {at}: {_line(error)}"
        if isinstance(error, KeyboardInterrupt):
            raise
    return Verdict(net.number, ending, cause, net.traits, net.family, relevance)


def smallest(net: Network, ending: str) -> Network:
    """A network with fewer blocks, a plain output and a plain example that ends in the same way."""
    tries = [(rf" *(self\.block{i} = Block{i}\(\)|x = self\.block{i}\(x\))\n", "") for i in range(len(net.blocks))]
    tries += [(r"return .*\n*\Z", "return y\n"), (r"x = [\w.]+\((self\.stem\(x\))\)", r"x = \1")]
    for pattern, new in tries:
        other = replace(net, source=re.sub(pattern, new, net.source))
        net = other if other.source != net.source and judged(other).ending == ending else net
    for change in ({"example": "random"}, {"dtype": torch.float32}, {"form": "tensor"}, {"training": False}):
        other = replace(net, **change)  # type: ignore[arg-type]
        net = other if judged(other).ending == ending else net
    blocks = [f"Block{i}" for i in range(len(net.blocks)) if f"= Block{i}()" not in net.source]
    for name in blocks:
        net = replace(net, source=re.sub(rf"class {name}\(.*?\n\n(?=class )", "", net.source, flags=re.DOTALL))
    return net


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:160]


def judged_in_time(number: int) -> Verdict:
    """`judged` with a limit on time, quietly."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _alarm)
    begin = time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        verdict = judged(network(number))
    except _Stop:
        verdict = Verdict(number, "ENDLESS", "", network(number).traits)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return replace(verdict, seconds=time.perf_counter() - begin)


def _alarm(*_: object) -> None:
    raise _Stop


# -- many of them ------------------------------------------------------------------------------------------------------
def _work(pipe: Connection) -> None:
    while (number := pipe.recv()) is not None:
        pipe.send(judged_in_time(number))


def verdicts(numbers: list[int], workers: int) -> Iterator[Verdict]:
    """Judge in processes of their own, so that a crash or an endless loop ends one network and not the run."""
    context = multiprocessing.get_context("fork")
    waiting, busy = list(reversed(numbers)), {}

    def hire() -> None:
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        give(mine, process)

    def give(pipe: Connection, process: Any) -> None:
        number = waiting.pop() if waiting else None
        pipe.send(number)
        if number is not None:
            busy[pipe] = process, number, time.monotonic()

    for _ in range(min(workers, len(numbers))):
        hire()
    while busy:
        for ready in wait(list(busy), timeout=1):
            process, number, _ = busy.pop(ready)  # type: ignore[call-overload]
            try:
                verdict = ready.recv()  # type: ignore[union-attr]
            except EOFError:
                yield Verdict(number, "FOREIGN", "the process crashed", network(number).traits)
                hire()
                continue
            yield verdict
            give(ready, process)  # type: ignore[arg-type]
        for pipe, (process, number, begin) in list(busy.items()):
            if time.monotonic() - begin > 15 * SECONDS:  # stuck outside of Python; others may be using the machine
                process.kill()
                del busy[pipe]
                yield Verdict(number, "ENDLESS", "stuck outside of Python", network(number).traits)
                hire()


def report(found: list[Verdict]) -> None:
    """Counts by family and by everything that a network contains."""
    counts = Counter(v.ending for v in found)
    endings = [e for e in (*GOOD, *BAD) if counts[e] or e != "INVALID"]
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for v in found:
        for name in dict.fromkeys(("all", f"family: {v.family}", *v.traits)):
            rows[name][v.ending] += 1
    print(f"| {len(found)} random networks | " + " | ".join(endings) + " |\n|---|" + "---:|" * len(endings))
    for name, row in sorted(rows.items(), key=lambda item: (item[0] != "all", item[0])):
        print(f"| {name} | " + " | ".join(str(row[e] or "") for e in endings) + " |")
    refused = Counter(v.cause.split(":")[0] for v in found if v.ending == "refused")
    print("\nrefused: " + ", ".join(f"{name} {count}" for name, count in refused.most_common()))
    relevance = Counter(v.relevance for v in found)
    print("relevance: " + ", ".join(f"{name} {count}" for name, count in relevance.most_common()))


def show(net: Network) -> None:
    """The source of a network, and how it ends."""
    verdict = judged(net)
    print(f"\n--- {net.number}: {verdict.ending} {verdict.cause}; {replace(net, source='')}")
    print(
        net.source[net.source.index("class Block") if "class Block" in net.source else net.source.index("class Net") :]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="other networks: seed 1 begins at number 1,000,000")
    parser.add_argument("--start", type=int, default=0, help="the first number, to go on with a run")
    parser.add_argument("--only", type=int, help="one network by its number, with its source")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--log", type=Path, help="add a line of JSON for every network to this file")
    parser.add_argument("--shown", type=int, default=40, help="how many failures are listed with their sources")
    options = parser.parse_args()
    if options.only is not None:
        verdict = judged_in_time(options.only)
        show(smallest(network(options.only), verdict.ending) if verdict.ending in BAD else network(options.only))
        print(verdict)
        return int(verdict.ending in BAD)
    first = options.seed * 1_000_000 + options.start
    numbers, found, begin = list(range(first, first + options.cases)), [], time.perf_counter()
    with options.log.open("a") if options.log else contextlib.nullcontext() as log:
        for verdict in verdicts(numbers, options.workers):
            found.append(verdict)
            if log:
                print(json.dumps(asdict(verdict)), file=log, flush=True)
            if verdict.ending in BAD:
                print(f"{verdict.number}: {verdict.ending} {verdict.cause} {list(verdict.traits)}", flush=True)
            if len(found) % 200 == 0:
                rate = len(found) / (time.perf_counter() - begin)
                bad = sum(v.ending in BAD for v in found)
                print(f"{len(found)} of {len(numbers)}, {bad} bad, {rate:.1f} networks/s", file=sys.stderr, flush=True)
    found.sort(key=lambda v: v.number)
    report(found)
    for verdict in [v for v in found if v.ending in BAD and v.ending != "ENDLESS"][: options.shown]:
        show(smallest(network(verdict.number), verdict.ending))
    return int(any(v.ending in BAD for v in found))


if __name__ == "__main__":
    sys.exit(main())
