"""ONNX Runtime as a runtime. A model is exported once; its smaller versions are made from the file, and checked."""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.files.onnx import export
from secateur.files.session import answers, session_of
from secateur.nest import tensors_in
from secateur.plans.plan import Plan
from secateur.running.copies import named_tensors
from secateur.running.sandbox import Example, evaluating, quiet, run
from secateur.runtimes.setup import Setup

_GAP = 1e-3  # between a smaller version and PyTorch, relative: enough to see that the right things were cut
_RUNS, _SECONDS, _KEPT = 4, 2.0, 8  # runs of a profile after a cold one, how long they may take, files that are kept
_SIZES = 64  # numbers: no shape is longer
Cuts = dict[str, tuple[str, dict[int, int]]]
File = tuple[bytes, Any, Cuts]  # what ONNX Runtime opens, its nodes, and of which parameters its tensors are made


class Onnx:
    """Runs models in ONNX Runtime."""

    least = 1  # profiled passes: each is several runs

    def __init__(self, setup: Setup, example: Example, model: nn.Module) -> None:
        self.setup, self.inputs = setup, setup.inputs(example)
        self.file = _exported(model, self.inputs)
        self.origin, self.shapes = _origins(self.file, model), _written_shapes(self.file, setup.batch)
        # What smaller versions are checked with: PyTorch is slow at large batches. Written shapes are for one batch.
        any_batch = not self.shapes and all(_open_batch(item) for item in self.file.graph.input)
        self.few = replace(setup, batch=1).inputs(example) if any_batch else self.inputs
        self._made: dict[tuple[int, ...], File] = {}
        self._open: dict[tuple[int, ...], Any] = {}

    def prepare(self, model: nn.Module, plan: Plan | None = None) -> Callable[[], object]:
        """A forward pass of the model, which is what the plan leaves of the whole one."""
        groups = () if plan is None else plan.groups
        data = b"" if groups in self._open else self._file(model, plan)[0]  # which may have been opened to check it
        if groups not in self._open:  # beside the whole model, which is timed again and again, one stays open
            self._open = {key: session for key, session in self._open.items() if not key}
            self._open[groups] = session_of(data, self.setup.threads)
            answers(self._open[groups], self.inputs)  # the first run is slow
        return partial(answers, self._open[groups], self.inputs)

    def profile(self, model: nn.Module, plan: Plan | None, paths: Collection[str]) -> Callable[[], dict[str, float]]:
        """Forward passes that say how many seconds the operations took that belong to each of these modules."""
        data, nodes, origin = self._file(model, plan)
        homes = _Homes(nodes, origin, paths)

        def forward() -> dict[str, float]:
            with TemporaryDirectory() as folder:
                session = session_of(data, self.setup.threads, folder)
                begin, runs = time.perf_counter(), 0
                while runs < 2 or (runs <= _RUNS and time.perf_counter() - begin < _SECONDS):
                    answers(session, self.inputs)
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

    def _file(self, model: nn.Module, plan: Plan | None) -> File:
        if plan is None or not plan.groups:
            return self.file.SerializeToString(), self.file.graph.node, self.origin
        if plan.groups not in self._made:
            if len(self._made) >= _KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[plan.groups] = self._narrow(model, plan) or self._anew(model)
        return self._made[plan.groups]

    def _anew(self, model: nn.Module) -> File:
        content = _exported(model, self.inputs)
        return _apart(content, _origins(content, model))

    def _narrow(self, model: nn.Module, plan: Plan) -> File | None:
        """The file of the whole model without what the plan removes; None if that is not the smaller model."""
        from onnxruntime.capi import onnxruntime_pybind11_state as raised

        file = _apart(_narrowed(self.file, self.origin, self.shapes, plan, self.setup.batch), self.origin)
        with quiet(), evaluating(model):
            expected = tensors_in(run(model, self.few))
        try:
            session = session_of(file[0], self.setup.threads)
            found = answers(session, self.few)
        except (raised.Fail, raised.InvalidArgument, raised.InvalidGraph, raised.RuntimeException):
            return None  # a size that is written into the file in another way
        if not all(_close(a, b) for a, b in zip(found, expected, strict=True)):
            return None
        self._open = {key: other for key, other in self._open.items() if not key} | {plan.groups: session}
        return file


def _apart(content: Any, origin: Cuts) -> File:
    """A file, and its nodes without the weights."""
    data = content.SerializeToString()
    content.graph.ClearField("initializer")
    return data, content.graph.node, origin


def _close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.double(), expected.detach().cpu().double()
    gap = _GAP * float(expected.abs().max()) if expected.numel() else 0.0
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0.0, atol=max(gap, 1e-12))


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


def _open_batch(item: Any) -> bool:
    """Whether an input takes any batch."""
    return bool(item.type.tensor_type.shape.dim and item.type.tensor_type.shape.dim[0].dim_param)


def _written_shapes(file: Any, batch: int) -> dict[str, list[int]]:
    """The shapes that are written into the file for Reshape with one size left open, as they are for this batch."""
    sizes, held = _sizes(file, batch), {item.name for item in file.graph.initializer}
    found = {
        node.input[1]: sizes.get(node.output[0], [])
        for node in file.graph.node
        if node.op_type == "Reshape" and node.input[1] in held
    }
    return {name: shape for name, shape in found.items() if shape and all(shape)}


def _sizes(file: Any, batch: int) -> dict[str, list[int]]:
    """The shape of each tensor inside, for this batch; 0 where a size is not known."""
    import onnx

    fixed = onnx.ModelProto()
    fixed.CopyFrom(file)
    _without_numbers(fixed)
    for item in fixed.graph.input:
        if _open_batch(item):
            item.type.tensor_type.shape.dim[0].dim_value = batch
    del fixed.graph.value_info[:]
    known = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    return {
        item.name: [dim.dim_value for dim in item.type.tensor_type.shape.dim]
        for item in (*known.value_info, *known.output)
    }


def _without_numbers(file: Any) -> None:
    """Weights become inputs of their shapes: which shapes follow depends on no large tensor, and copies take long."""
    from onnx import helper

    large = [item for item in file.graph.initializer if np.prod(item.dims) > _SIZES]
    file.graph.input.extend(helper.make_tensor_value_info(i.name, i.data_type, list(i.dims)) for i in large)
    small = [item for item in file.graph.initializer if np.prod(item.dims) <= _SIZES]
    del file.graph.initializer[:]
    file.graph.initializer.extend(small)


def _narrowed(file: Any, origin: Cuts, shapes: Mapping[str, Sequence[int]], plan: Plan, batch: int) -> Any:
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
    # A written shape leaves the batch open. What a cut makes of its sizes is found with the batch as it is. Then the
    # batch is left open again: ONNX Runtime fuses more where it is known, and the whole model has it open.
    cut = {plan.shapes[name][dim] for name, dims in plan.cuts.items() for dim in dims} | {h.heads for h in plan.heads}
    opened: dict[str, tuple[Any, int]] = {}
    for item in made.graph.initializer:
        if item.name in shapes:
            before = numpy_helper.to_array(item)
            places = [i for i, size in enumerate(before.tolist()) if size in cut]
            if places:
                after = np.array(shapes[item.name], before.dtype)
                after[places[-1]] = -1
                opened[item.name] = before, places[-1]
                item.CopyFrom(numpy_helper.from_array(after, item.name))
    whole, sizes = ({item.name: item.dims[0] for item in f.graph.initializer if item.dims} for f in (file, made))
    for node in made.graph.node:
        weight = node.input[1] if node.op_type == "Conv" else ""
        if weight in origin:  # groups of channels stay as wide as they are
            before = whole[weight]
            for attribute in node.attribute:
                if attribute.name == "group" and attribute.i > 1:
                    attribute.i = attribute.i * sizes[weight] // before
    del made.graph.value_info[:]
    found = _sizes(made, batch) if opened else {}
    for number, node in enumerate(made.graph.node):  # layers that shared a shape may have lost different heads
        name = node.input[1] if node.op_type == "Reshape" else ""
        before, place = opened.get(name, (np.zeros(1), 0))
        size = dict(enumerate(found.get(node.output[0], []))).get(place, 0)
        if name in opened and size:
            node.input[1] = f"{name}_{number}"
            after = np.array([size if i == place else one for i, one in enumerate(before)], before.dtype)
            made.graph.initializer.append(numpy_helper.from_array(after, node.input[1]))
    return made


class _Homes:
    """To which module each operation belongs: that of its weight, else that of what it reads."""

    def __init__(self, nodes: Any, origin: Cuts, paths: Collection[str]) -> None:
        self._paths, self._origin = paths, origin
        self._makers = {output: node for node in nodes for output in node.output}
        self._nodes = {node.name: node for node in nodes}

    def of(self, name: str) -> str:
        """ONNX Runtime calls an operation by its name, or by what it makes."""
        name = name.partition("/")[0].removesuffix("_nchwc")  # "node/Fusion" is what "node" became part of
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
