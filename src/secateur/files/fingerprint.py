"""How a saved model is recognised: by the settings of its modules, and by its output on fixed inputs.

Two networks may have the same names and shapes and still compute different things, e.g. with another stride or
activation. For torch's own modules the settings show that, and say where. For everything else the output does.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from secateur.nest import tensors_of_output
from secateur.running.copies import named_modules, shared_copy
from secateur.running.sandbox import Example, quiet, run

_IGNORED = frozenset((
    # These change no number of the output in evaluation mode.
    "training", "p", "inplace", "dropout", "momentum", "padding_idx", "sparse", "scale_grad_by_freq",
    "enable_nested_tensor", "use_nested_tensor", "mask_check",
    # These are sizes that pruning changes. The shapes of the weights are checked elsewhere.
    "in_channels", "out_channels", "in_features", "out_features", "num_features", "num_channels", "normalized_shape",
    "num_parameters", "num_embeddings", "embedding_dim", "input_size", "hidden_size", "embed_dim", "kdim", "vdim",
    "in1_features", "in2_features",
))  # fmt: skip
_CONTAINERS = frozenset(("Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "Module"))
# Modules that may replace each other: in evaluation mode they compute the same.
_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
_ALIKE = dict.fromkeys(_DROPOUTS, "Identity") | dict.fromkeys(_NORMS, "BatchNorm")

_SIMPLE = bool | int | float | str
_LONGEST = 16  # settings; longer lists are data
_SHOWN = 32  # numbers kept of each output
_OUTPUTS = 8
_LARGEST_INPUT = 2**23  # numbers of all inputs; limits the memory that a file can make us use
_EXACT, _COARSE, _HALF = 1e-3, 1e-2, 5e-2  # relative to the largest output; processors and libraries round differently
_USELESS = 1e-3  # if random numbers or rounding change a model by so much, its output identifies nothing


# -- settings ----------------------------------------------------------------------------------------------------------
def settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """For every module its class and settings. `own` are the settings of the user's own classes, only for messages.

    Such a class may count its calls or keep the last input, so a difference there is no reason to refuse a file.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, module in named_modules(model):
        kind, values = type(module), _simple(module)
        declared = _declared(kind)
        known = {name: value for name, value in values.items() if name in declared}
        own = {n: v for n, v in values.items() if n not in declared and not isinstance(v, str)}
        if not _from_torch(kind):
            if known or own:
                found[path] = {"class": "", "is": known, "own": own}
        elif kind.__name__ not in _CONTAINERS:
            name = _ALIKE.get(kind.__name__, kind.__name__)
            found[path] = {"class": name, "is": known if name != "Identity" else {}}
    return found


def differences(saved: Mapping[str, Any], model: nn.Module, part: Literal["is", "own"]) -> Iterator[str]:
    """In words, which settings differ: those of torch's own modules ("is") or of the user's own classes ("own").

    Only settings that both have: torch adds new ones in new versions, and some attributes appear only when used.
    """
    for path, now in settings(model).items():
        was = saved.get(path)
        if not isinstance(was, Mapping):
            continue
        before, after = was.get("class"), now["class"]
        if part == "is" and before != after:
            if before and after:
                yield f"`{path or 'the model'}` was {before} and is {after}"
            continue
        old: Any = was.get(part)
        new = now.get(part, {})
        for name in new if isinstance(old, Mapping) else ():
            if name in old and old[name] != new[name]:
                first, second = (tuple(v) if isinstance(v, list) else v for v in (old[name], new[name]))
                yield f"`{path}{'.' if path else ''}{name}` was {first!r} and is {second!r}"


def _from_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


def _declared(kind: type[nn.Module]) -> set[str]:
    """The arguments and constants that torch declares for a class; not attributes that other code has set."""
    names: set[str] = set()
    for own in (vars(parent) for parent in kind.__mro__ if _from_torch(parent)):
        names.update(own.get("__constants__", ()))
        names.update(inspect.signature(own["__init__"]).parameters if "__init__" in own else ())
    return names


def _simple(module: nn.Module) -> dict[str, Any]:
    """Public attributes that JSON can hold, without sizes and without what has no effect in evaluation mode."""
    plain = {
        name: _plain(value) for name, value in vars(module).items() if not name.startswith("_") and name not in _IGNORED
    }
    return {name: value for name, value in plain.items() if value is not None or vars(module)[name] is None}


def _plain(value: Any) -> Any:
    """The value for JSON; None if it is not simple."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, tuple | list) and 0 < len(value) <= _LONGEST and all(isinstance(v, _SIMPLE) for v in value):
        # A window of 2 and one of (2, 2) are the same.
        return _plain(value[0]) if len(set(value)) == 1 else [_plain(v) for v in value]
    return None


def answer(model: nn.Module, form: str, macs: int = 0) -> dict[str, Any] | None:
    """A model's output on fixed inputs of that form; None if that would not identify it."""
    if not form or macs > 10**11:  # one pass over more takes seconds to minutes
        return None
    for samples in (1, 0):  # more show nothing new; 0 is for forwards that fix the number
        try:
            shape = json.loads(form)
            first, second = (_outputs(model, shape, samples, nudge) for nudge in (0.0, 1e-6))
        except Exception:  # the user's forward may raise anything
            continue
        gap = _gap(first, second)
        if gap is None or gap > _USELESS:
            return None
        return {"inputs": shape, "samples": samples, "slack": max(10 * gap, _rounding(model)), "outputs": first}
    return None


def answer_gap(saved: Mapping[str, Any], model: nn.Module) -> float | None:
    """How much a model's output differs from the saved one, if by more than rounding explains; else None.

    A model that does not run on these inputs is accepted: its user will see the error.
    """
    gap = distance(saved, model)
    try:
        allowed = max(float(saved["slack"]), _rounding(model))
    except (LookupError, TypeError, ValueError):  # a damaged file
        return None
    return gap if gap is not None and gap > allowed else None


def distance(saved: Mapping[str, Any], model: nn.Module) -> float | None:
    """How much a model's output differs from the saved one; None if the model does not run on these inputs."""
    try:
        gap = _gap(saved["outputs"], _outputs(model, saved["inputs"], int(saved["samples"]), 0.0))
    except Exception:  # the user's forward may raise anything
        return None
    return math.inf if gap is None else gap


def made_inputs(form: str, like: Tensor) -> Example:
    """Fixed inputs of a form: one sample, in the number format and on the device of a tensor."""
    return _made(json.loads(form), 1, 0.0, like, np.random.RandomState(0))


def _rounding(model: nn.Module) -> float:
    like = _like(model)
    if like.dtype in (torch.float16, torch.bfloat16):
        return _HALF
    coarse = like.device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    return _COARSE if coarse else _EXACT


def _like(model: nn.Module) -> Tensor:
    numbers = (t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point())
    return next(numbers, torch.zeros(()))


def _outputs(model: nn.Module, form: Mapping[str, Any], samples: int, nudge: float) -> list[dict[str, Any]]:
    """Some numbers of each output in evaluation mode, and its shape."""
    if _size(form, samples) > _LARGEST_INPUT:
        raise ValueError("too large")
    with quiet(), torch.autocast(_like(model).device.type, enabled=False):
        torch.manual_seed(1 if nudge else 0)  # so that a forward that draws random numbers differs between two calls
        inputs = _made(form, samples, nudge, _like(model), np.random.RandomState(0))  # numpy guarantees these numbers
        found = run(shared_copy(model).eval(), inputs)
    kept = []
    for tensor in [t for t in tensors_of_output(found) if t.is_floating_point() and t.numel()][:_OUTPUTS]:
        flat = tensor.detach().flatten()
        index = torch.linspace(0, len(flat) - 1, min(_SHOWN, len(flat)), dtype=torch.float64).long()
        kept.append({"shape": list(tensor.shape), "values": flat[index.to(flat.device)].double().tolist()})
    return kept


def _size(form: Mapping[str, Any], samples: int) -> int:
    """How many numbers the inputs of a form have; an input counts at least once."""
    parts = form["named"].values() if "named" in form else form.get("items")
    if parts is not None:
        return 1 + sum(_size(part, samples) for part in parts)
    return max(1, math.prod(_shape(form, samples))) if "value" not in form else 1


def _shape(form: Mapping[str, Any], samples: int) -> list[int]:
    shape = [int(size) for size in form["shape"]]
    return [min(shape[0], samples), *shape[1:]] if shape and samples else shape


def _made(form: Mapping[str, Any], samples: int, nudge: float, like: Tensor, draw: np.random.RandomState) -> Example:
    """Inputs of a form. Real numbers have the model's own precision, and are scaled by `1 + nudge`."""
    if "named" in form:
        return {name: _made(item, samples, nudge, like, draw) for name, item in form["named"].items()}
    if "items" in form:
        return tuple(_made(item, samples, nudge, like, draw) for item in form["items"])
    if "value" in form:
        return form["value"]
    shape, low, high = _shape(form, samples), float(form["low"]), float(form["high"])
    shares = draw.random_sample(shape)
    if form["kind"] == "real":
        low, high = (low, high) if low < high else (-1.0, 1.0)
        return torch.as_tensor((low + (high - low) * shares) * (1 + nudge)).to(like)
    whole = torch.as_tensor(np.floor(low + (high - low + 1) * shares)).clamp(low, high)
    return whole.to(like.device, getattr(torch, str(form["kind"])))


def _gap(saved: list[Any], found: list[Any]) -> float | None:
    """The largest difference relative to the largest number of each output; None if they cannot be compared."""
    if not saved or [item["shape"] for item in saved] != [item["shape"] for item in found]:
        return None
    worst = 0.0
    for a, b in zip(saved, found, strict=True):
        before, after = np.array(a["values"], np.float64), np.array(b["values"], np.float64)
        if not np.isfinite(before).all():
            return None
        scale = float(np.abs(before).max()) or 1.0
        gap = float(np.abs(before - after).max()) / scale
        worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst
