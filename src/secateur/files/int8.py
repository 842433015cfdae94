"""Static int8 quantisation of an ONNX file, by ONNX Runtime: convolutional networks, with the user's own inputs.

Weights get one scale per output channel; they are unsigned where the processor needs that. Activations get the range
that the given inputs show. What int8 changes in the outputs is measured on these inputs; if that is too much, the
layers that add most of the error stay in float32. A softmax at the end stays in float32 with all that follows:
probabilities below 1/255 would become 0.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from secateur.errors import Argument, DataError, SecateurError, VerificationError
from secateur.files.session import session_of
from secateur.nest import select_samples, tensors_in
from secateur.running.batches import Data, as_data, batches, size_of

Array = npt.NDArray[Any]
Feeds = list[dict[str, Array]]

#: Layers with weights, which are worth quantising.
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: Those after which a softmax is a gate inside the network. (A product alone may merge its probabilities.)
_INNER = ("Conv", "ConvTranspose", "Gemm")
#: The error of the outputs that is allowed: root of the mean square, relative to their standard deviation.
_ERROR = 0.1
#: How many inputs are used: more change the ranges little.
SAMPLES = 256
_NOTE = "secateur_int8"  # where a file says how it was quantised


@dataclass(frozen=True)
class Int8:
    """How a file was quantised: how many layers it has, which of them stayed in float32, and the error of the outputs.

    A layer is called by the path of its module, where its weight has a name.
    """

    layers: int
    left_out: tuple[str, ...]
    error: float

    @classmethod
    def of(cls, file: Path) -> Int8:
        """What a file that `quantize` wrote says of itself, in its metadata."""
        import onnx

        note = json.loads({item.key: item.value for item in onnx.load(file).metadata_props}[_NOTE])
        return cls(note["layers"], tuple(note["left_out"]), note["error"])


def check(file: Path, name: str) -> None:
    """Refuse an ONNX file that int8 does not suit, whatever the inputs. `name` is that of the model."""
    with TemporaryDirectory() as folder, _quiet():
        _prepared(file, Path(folder) / "plain.onnx", name)


def quantize(file: Path, data: Data, name: str) -> Int8:
    """Replace an ONNX file by one that computes in int8. `name` is that of the model, for messages."""
    with TemporaryDirectory() as folder, _quiet():
        plain, made = Path(folder) / "plain.onnx", Path(folder) / "int8.onnx"
        graph, layers, tail = _prepared(file, plain, name)
        feeds = _feeds(graph, data)
        try:
            wanted, left_out, order = _answers(plain, feeds), list[str](), list[str]()
        except Exception as unfit:  # ONNX Runtime has errors of its own
            what = f"{{quantize}} does not fit the inputs of {name}: {' '.join(str(unfit).split())}"
            fix = "samples of the shape and number format of the example"
            raise DataError(what, fix=fix, quantize=Argument("quantize")) from unfit
        while True:
            with _explained(name):
                _quantized(plain, made, feeds, [*left_out, *tail])
            error = _error(_answers(made, feeds), wanted)
            if error <= _ERROR:
                break
            order = order or _by_added_error(plain, made, layers, feeds)
            if 2 * len(left_out) >= len(layers):
                raise VerificationError(
                    f"int8 changes the outputs of {name} by {100 * error:.0f} % of their spread (allowed "
                    f"{100 * _ERROR:.0f} %), although {len(left_out)} of its {len(layers)} layers stay in float32; no "
                    "file is written.",
                    fix="more varied inputs, or export in float32",
                )
            left_out = order[: max(1, 2 * len(left_out))]
        note = Int8(len(layers), _paths(graph, left_out), error)
        _write(made, file, note)
    return note


def _prepared(file: Path, plain: Path, name: str) -> tuple[Any, list[str], list[str]]:
    """The graph as it will be quantised, which is written to `plain`, and the names of its layers and of its tail."""
    try:
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process
    except ImportError as missing:
        raise SecateurError("int8 needs other packages.", fix="pip install 'secateur[export]'") from missing
    with _explained(name):
        quant_pre_process(str(file), str(plain), skip_symbolic_shape=True)  # folds batch norms
    graph = onnx.load(plain)
    for number, node in enumerate(graph.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"  # nodes are left out by name
    tail = _tail(graph)
    layers = _layers(graph, name, tail)
    onnx.save(graph, plain)
    return graph, layers, tail


def _paths(graph: Any, layers: Sequence[str]) -> tuple[str, ...]:
    """What the modules of these layers are called, in the order of the model; the layer's own name where unknown."""
    held, found = {item.name for item in graph.graph.initializer}, list[str]()
    for node in graph.graph.node:
        if node.name in layers:
            weight = next((item for item in node.input if item in held and item.endswith(".weight")), "")
            found.append(weight.removesuffix(".weight") or node.name)
    return tuple(found)


def _write(made: Path, file: Path, note: Int8) -> None:
    """Write what was made, with a note of how."""
    import onnx

    graph = onnx.load(made)
    onnx.helper.set_model_props(graph, {_NOTE: json.dumps(asdict(note))})
    onnx.save(graph, file)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """ONNX Runtime's quantiser raises errors of many kinds."""
    try:
        yield
    except Exception as error:
        what = f"ONNX Runtime cannot quantise {name} ({type(error).__name__}: {' '.join(str(error).split())[:300]})."
        raise SecateurError(what, where="quantize", fix="export in float32") from error


def _tail(graph: Any) -> list[str]:
    """The names of each softmax that no layer comes after, and of everything that depends on one."""
    before: set[str] = set()  # tensors that a layer depends on
    for node in reversed(graph.graph.node):
        if node.op_type in _INNER or before.intersection(node.output):
            before.update(filter(None, node.input))
    names, made = list[str](), set[str]()
    for node in graph.graph.node:
        last = node.op_type in ("Softmax", "LogSoftmax") and not before.intersection(node.output)
        if last or made.intersection(node.input):
            names.append(node.name)
            made.update(filter(None, node.output))
    return names


def _layers(graph: Any, name: str, tail: Sequence[str]) -> list[str]:
    """The names of the layers with weights, without those of the tail. Refuse what static int8 does not suit."""
    weights = {item.name for item in graph.graph.initializer}
    nodes = [node for node in graph.graph.node if node.op_type in _LAYERS and node.name not in tail]
    fix = "onnxruntime.quantization.quantize_dynamic on the float32 file, or keep float32"
    products = [node.name for node in nodes if not weights.intersection(node.input)]
    if products or any(node.op_type in ("Attention", "MultiHeadAttention") for node in graph.graph.node):
        raise SecateurError(
            f"{name} multiplies activations with each other ({', '.join(products[:2]) or 'attention'}), as attention "
            "does: ranges that a few inputs show do not hold there, and int8 is for convolutional networks.",
            where="quantize", fix=fix,
        )  # fmt: skip
    if any(item.type.tensor_type.elem_type != 1 for item in graph.graph.input):
        raise SecateurError(f"{name} does not take float32 numbers, so int8 has no range.", where="quantize", fix=fix)
    if not nodes:
        raise SecateurError(f"{name} has no convolution and no linear layer to quantise.", where="quantize")
    return [node.name for node in nodes]


def _feeds(graph: Any, data: Data) -> Feeds:
    """The inputs as ONNX Runtime takes them, one sample each unless the file fixes another number."""
    names = [item.name for item in graph.graph.input]
    size = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value or 1
    found: Feeds = []
    data = (data, None) if isinstance(data, Tensor) else data
    for inputs, _ in batches(as_data(data)):
        for first in range(0, size_of(inputs) - size + 1, size):
            part = [t.detach().cpu().numpy() for t in tensors_in(select_samples(inputs, slice(first, first + size)))]
            if len(part) != len(names):
                what = f"{{quantize}} has samples of {len(part)} tensors, and the model takes {len(names)}."
                raise DataError(what, fix="samples as for `prune`", quantize=Argument("quantize"))
            found.append(dict(zip(names, part, strict=True)))
            if len(found) * size >= SAMPLES:
                return found
    if not found:
        raise DataError("{quantize} has no inputs.", fix="a few samples, as for `prune`", quantize=Argument("quantize"))
    return found


def _quantized(plain: Path, made: Path, feeds: Feeds, left_out: Sequence[str]) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Gives the inputs one by one."""

        def __init__(self) -> None:
            self._rest: Iterator[dict[str, Array]] = iter(feeds)

        def get_next(self) -> dict[str, Array] | None:
            """The next inputs."""
            return next(self._rest, None)

    weights = QuantType.QUInt8 if _saturates() else QuantType.QInt8
    quantize_static(
        str(plain), str(made), Reader(), quant_format=QuantFormat.QDQ, per_channel=True, weight_type=weights,
        activation_type=QuantType.QUInt8, nodes_to_exclude=list(left_out), extra_options={"WeightSymmetric": True},
    )  # fmt: skip


@cache
def _saturates() -> bool:
    """Whether sums of products overflow here if weights have a sign.

    Without the instructions named below, ONNX Runtime adds up pairs of products of a signed and an unsigned number in
    16 bits on x86 processors. Of unsigned numbers it does not.
    """
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return False
    with suppress(OSError):
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return not {"avx512_vnni", "avx_vnni", "amx_int8"} & {*known.split()}
    return True


def _answers(file: Path, feeds: Feeds) -> list[list[Array]]:
    """The outputs for each of the inputs."""
    session = session_of(file)
    return [session.run(None, feed) for feed in feeds]


def _error(found: Sequence[Sequence[Array]], wanted: Sequence[Sequence[Array]]) -> float:
    """The largest error of any output, relative to its spread. (Softmax does not see what all classes share.)"""
    errors = []
    for mine, theirs in zip(zip(*found, strict=True), zip(*wanted, strict=True), strict=True):
        a, b = (np.stack(side).astype(np.float64) for side in (mine, theirs))
        errors.append(np.sqrt(np.mean((a - b) ** 2)) / max(b.std(), 1e-12))
    return float(np.max(errors))  # NaN if one is NaN


def _by_added_error(plain: Path, made: Path, layers: Sequence[str], feeds: Feeds) -> list[str]:
    """The layers, first those after which the error of int8 grows most."""
    # The quantiser puts branches in another order.
    mine, theirs = (_inside(file, layers, feeds[:8]) for file in (made, plain))
    names = [name for name in theirs if name in mine]
    errors = [_error(mine[name], theirs[name]) for name in names]
    added = dict(zip(names, np.diff(errors, prepend=0.0).tolist(), strict=True))
    return sorted(layers, key=lambda layer: -added.get(layer, 0.0))


def _inside(file: Path, layers: Sequence[str], feeds: Feeds) -> dict[str, list[list[Array]]]:
    """What each layer of a file returns for each of the inputs, in the order of the file."""
    import onnx

    graph, target = onnx.load(file), file.with_suffix(".shown.onnx")
    known = {item.name for item in graph.graph.output}
    nodes = [node for node in graph.graph.node if node.name in layers and node.output[0] not in known]
    graph.graph.output.extend(onnx.ValueInfoProto(name=node.output[0]) for node in nodes)
    onnx.save(graph, target)
    rows = [row[len(known) :] for row in _answers(target, feeds)]
    return {node.name: [[row[i]] for row in rows] for i, node in enumerate(nodes)}


class _quiet:
    """ONNX Runtime's quantiser comments on what it does with the root logger."""

    def __enter__(self) -> None:
        self._before = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        logging.disable(self._before)
