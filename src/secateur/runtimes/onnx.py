"""ONNX Runtime as a runtime. A model is exported once; its smaller versions are made from the file, and checked."""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from secateur.files.int8 import session_of
from secateur.files.onnx import export
from secateur.nest import tensors_in
from secateur.plans.plan import Plan
from secateur.running.copies import named_tensors
from secateur.running.sandbox import Example, quiet, run
from secateur.runtimes.setup import Setup

_GAP = 1e-3  # between a smaller version and PyTorch, relative: enough to see that the right things were cut
_RUNS, _SECONDS, _KEPT = 4, 2.0, 8  # runs of a profile after a cold one, how long they may take, files that are kept
Cuts = dict[str, tuple[str, dict[int, int]]]


class Onnx:
    """Runs models in ONNX Runtime."""

    least = 1  # profiled passes: each is several runs

    def __init__(self, setup: Setup, example: Example, model: nn.Module) -> None:
        self.setup, self.inputs = setup, setup.inputs(example)
        self.file = _exported(model, self.inputs)
        self.origin = _origins(self.file, model)
        self._made: dict[tuple[int, ...], Any] = {}
        self._whole: Any = None

    def prepare(self, model: nn.Module, plan: Plan | None = None) -> Callable[[], object]:
        """A forward pass of the model, which is what the plan leaves of the whole one."""
        if plan is None or not plan.groups:  # timed again and again
            self._whole = self._whole or session_of(self.file.SerializeToString(), self.setup.threads)
            return partial(self._run, self._whole)
        return partial(self._run, session_of(self._content(model, plan).SerializeToString(), self.setup.threads))

    def profile(self, model: nn.Module, plan: Plan | None, paths: Collection[str]) -> Callable[[], dict[str, float]]:
        """Forward passes that say how many seconds the operations took that belong to each of these modules."""
        content = self._content(model, plan)
        homes = _Homes(content, self.origin, paths)
        data = content.SerializeToString()

        def forward() -> dict[str, float]:
            with TemporaryDirectory() as folder:
                session = session_of(data, self.setup.threads, folder)
                begin, runs = time.perf_counter(), 0
                while runs < 2 or (runs <= _RUNS and time.perf_counter() - begin < _SECONDS):
                    self._run(session)
                    runs += 1
                events = json.loads(Path(session.end_profiling()).read_text())
            seen: dict[str, list[float]] = defaultdict(list)
            for event in events:
                if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                    seen[event["name"].removesuffix("_kernel_time")].append(event["dur"] / 1e6)
            seconds: dict[str, float] = defaultdict(float)
            last = next(iter(paths), "")
            for name, times in seen.items():
                last = homes.of(name) or last
                seconds[last] += min(times[len(times) // runs :])
            return dict(seconds)

        return forward

    def _run(self, session: Any) -> Any:
        tensors = [tensor.detach().cpu().numpy() for tensor in tensors_in(self.inputs)]
        named = zip(session.get_inputs(), tensors, strict=True)
        return session.run(None, {item.name: numbers for item, numbers in named})

    def _content(self, model: nn.Module, plan: Plan | None) -> Any:
        if plan is None or not plan.groups:
            return self.file
        if plan.groups not in self._made:
            if len(self._made) >= _KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[plan.groups] = self._narrow(model, plan)
        return self._made[plan.groups]

    def _narrow(self, model: nn.Module, plan: Plan) -> Any:
        content = _narrowed(self.file, self.origin, plan)
        with quiet():
            expected = [t.detach().cpu().numpy() for t in tensors_in(run(model.eval(), self.inputs))]
        try:
            found = self._run(session_of(content.SerializeToString(), self.setup.threads))
            same = all(_close(a, b) for a, b in zip(found, expected, strict=True))
        except Exception:  # a size that is written into the file: ONNX Runtime may raise anything
            same = False
        return content if same else _exported(model, self.inputs)


def _close(found: Any, expected: Any) -> bool:
    return found.shape == expected.shape and bool(
        np.abs(found - expected).max(initial=0) <= _GAP * np.abs(expected).max(initial=1e-12)
    )


def _exported(model: nn.Module, example: Example) -> Any:
    import onnx

    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return onnx.load(export(model, Path(folder) / "model.onnx", example))


def _origins(file: Any, model: nn.Module) -> Cuts:
    """Of which parameter each tensor of the file is made, and which of its dimensions is which of the parameter's.

    A weight that a norm was folded into keeps its name. A bias that came out of it follows its weight. Others are
    found by their numbers.
    """
    from onnx import numpy_helper

    tensors = {name: tensor.detach().cpu().numpy() for name, tensor in named_tensors(model)}
    held = {item.name: item for item in file.graph.initializer}
    found: Cuts = {}
    for name, item in held.items():
        shape = tuple(item.dims)
        if name in tensors and tensors[name].shape == shape:
            found[name] = name, {dim: dim for dim in range(len(shape))}
            continue
        numbers = numpy_helper.to_array(item) if np.prod(shape) > 1 else np.zeros(())
        for other, tensor in tensors.items():
            if numbers.ndim and tensor.shape == shape and np.array_equal(tensor, numbers):
                found[name] = other, {dim: dim for dim in range(len(shape))}
            elif len(shape) == 2 and tensor.shape == shape[::-1] and np.array_equal(tensor.T, numbers):
                found[name] = other, {0: 1, 1: 0}
            else:
                continue
            break
    for node in file.graph.node:
        weight, bias = [*node.input[1:3], "", ""][:2]
        loose = bias in held and bias not in found and len(held[bias].dims) == 1
        if node.op_type in ("Conv", "Gemm") and weight in found and loose:
            name, dims = found[weight]
            found[bias] = name, {0: dims[0]}
    return found


def _narrowed(file: Any, origin: Cuts, plan: Plan) -> Any:
    """The file without what the plan removes."""
    import onnx
    from onnx import numpy_helper

    made = onnx.ModelProto()
    made.CopyFrom(file)
    for item in made.graph.initializer:
        name, dims = origin.get(item.name, ("", {}))
        cuts = plan.cuts.get(name)
        if cuts:
            numbers = numpy_helper.to_array(item)
            for own, theirs in dims.items():
                numbers = np.delete(numbers, list(cuts.get(theirs, ())), own)
            item.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(numbers), item.name))
    whole, sizes = ({item.name: item.dims[0] for item in f.graph.initializer if item.dims} for f in (file, made))
    for node in made.graph.node:
        weight = node.input[1] if node.op_type == "Conv" else ""
        if weight in origin:  # groups of channels stay as wide as they are
            before = whole[weight]
            for attribute in node.attribute:
                if attribute.name == "group" and attribute.i > 1:
                    attribute.i = attribute.i * sizes[weight] // before
    del made.graph.value_info[:]
    return made


class _Homes:
    """To which module each operation belongs: that of its weight, else that of what it reads."""

    def __init__(self, file: Any, origin: Cuts, paths: Collection[str]) -> None:
        self._paths, self._origin = paths, origin
        self._makers = {output: node for node in file.graph.node for output in node.output}
        self._nodes = {node.name: node for node in file.graph.node}
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """ONNX Runtime calls an operation by its name, or by what it makes."""
        name = name.removesuffix("_nchwc")
        node = self._nodes.get(name) or self._makers.get(name)
        return self._home(node) if node is not None else ""

    def _home(self, node: Any) -> str:
        waiting, seen = [node], set()
        while waiting:
            node = waiting.pop()
            for name in node.input:
                path = self._origin[name][0].rpartition(".")[0] if name in self._origin else ""
                while path and path not in self._paths:
                    path = path.rpartition(".")[0]
                if path:
                    return path
            for name in reversed(node.input):
                if name in self._makers and name not in seen:
                    seen.add(name)
                    waiting.append(self._makers[name])
        return ""
