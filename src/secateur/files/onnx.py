"""Export to ONNX and `torch.export`, with the result checked against PyTorch."""

from __future__ import annotations

import errno
import inspect
import io
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import check_flag, check_path
from secateur.atomic import naming_failures, replacing
from secateur.errors import SecateurError, SecateurWarning, VerificationError
from secateur.files.int8 import quantize as to_int8
from secateur.files.session import Session, answers, fixed_size, session_of
from secateur.nest import map_leaves, map_tensors, tensors_in
from secateur.running.batches import Data
from secateur.running.copies import shared_copy, unwrap
from secateur.running.devices import full_precision
from secateur.running.identity import digest
from secateur.running.sandbox import Example, arguments, leaves_no_trace, quiet, run_or_explain


@contextmanager
def _hooks_given_back() -> Iterator[None]:
    """torch 2.6 leaves its hook on the buffers of all modules behind if an export fails."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for key in set(hooks) - before:
            del hooks[key]


@leaves_no_trace
@full_precision()
@_hooks_given_back()
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Example,
    *,
    dynamic_batch: bool = True,
    quantize: Data = None,
) -> Path:
    """Write a model as `.onnx` (checked with ONNX Runtime) or `.pt2` (`torch.export`), by the ending of `path`.

    The exported model must give PyTorch's output on the example (relative 1e-4), or no file is written. An ONNX file
    takes any batch size and, for tokens, any length; with `dynamic_batch=False`, the sizes of the example only. Caches
    of a Hugging Face model are left out.

    `quantize` are inputs, alone or as `data` of `prune`: the file computes in int8, with ranges from these inputs. If
    the outputs change by more than 10 % of their spread, layers stay in float32, those first that add most error. For
    convolutional networks.
    """
    model = unwrap(model)
    check_path("path", path, "export(model, path, example), with a name that ends in .onnx or .pt2")
    check_flag("dynamic_batch", dynamic_batch)
    target = Path(path)
    if target.suffix not in (".onnx", ".pt2"):
        raise SecateurError(f"cannot export to {str(path)!r}.", fix="a name that ends in .onnx or .pt2")
    if quantize is not None and target.suffix != ".onnx":
        raise SecateurError("a .pt2 file cannot compute in int8.", where="quantize", fix="a name that ends in .onnx")
    model = shared_copy(model).eval()
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False  # type: ignore[union-attr]  # the copy's own
    args, kwargs = arguments(example)
    with quiet():
        expected = tensors_in(run_or_explain(model, example))
    if not expected:
        raise SecateurError(f"{type(model).__name__} returns no tensor, so there is nothing to export.")
    with naming_failures(target), replacing(target) as staged:
        if target.suffix == ".onnx":
            found = _to_onnx(model, staged, args, kwargs, dynamic_batch)
        else:
            found = _to_pt2(model, staged, args, kwargs)
        gap = _gap(found, expected)
        if gap > 1e-4:
            raise VerificationError(
                f"the exported model differs from PyTorch's by {gap:.2g} (allowed 1e-4); {target} is not written.",
                where=target,
                fix=_fix(model),
            )
        if quantize is not None:
            to_int8(staged, quantize, type(model).__name__)
    return target


class Exports:
    """ONNX files of the models of a run. Each is written and checked once: to be asked, timed and handed out."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()
        self._files: dict[str, Path] = {}
        self._fails = False

    def of(self, model: nn.Module, example: Example) -> Path:
        """The file of a model. The first one and the last one are kept."""
        key = digest(model)
        if key not in self._files:
            for step in list(self._files)[1:]:
                self._files.pop(step).unlink()
            self._files[key] = export(model, Path(self._folder.name, f"{key[:16]}.onnx"), example)
        return self._files[key]

    def module(self, model: nn.Module, example: Example) -> nn.Module:
        """What answers as a model does and is faster: its file. The model itself if that takes no other batch."""
        if self._fails:
            return model
        try:
            session = Session(self.of(model, example))
        except (SecateurError, RuntimeError):  # whoever needs the file says why
            self._fails = True
            return model
        return session if session.batch is None else model

    def write(self, model: nn.Module, path: Path, example: Example) -> Path:
        """The file of a model at another place."""
        source = self.of(model, example)
        with naming_failures(path), replacing(path) as staged:
            shutil.copyfile(source, staged)
        return path


def _gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest number of each output. NaN and infinities must be the same."""
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return math.inf
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.numel():
            a, b = a.detach().double().cpu(), b.detach().double().cpu()
            away = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
            largest = b.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-12)
            worst = max(worst, float((away / largest).max()))
    return worst


def _to_onnx(
    model: nn.Module, file: Path, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_batch: bool
) -> list[Tensor]:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SecateurError("exporting to ONNX needs other packages.", fix="pip install 'secateur[export]'") from error
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        model = _plain_norms(model)
    options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    wide = _in_batches(model, (args, kwargs)) if dynamic_batch else None
    if wide is not None:
        try:
            torch.onnx.export(
                model, wide[0], file, kwargs=wide[1] or None, dynamic_shapes=_free_shapes(model, *wide), **options
            )
        except Exception:
            wide = None
    if wide is None:
        # Some forwards fix the sizes, e.g. by reshaping with constants. A file for one batch size is still useful.
        try:
            torch.onnx.export(model, args, file, kwargs=kwargs or None, **options)
        except Exception as error:
            raise _untold(model, error, "torch.onnx", "a name that ends in .pt2, for torch.export") from error
    try:
        session = session_of(file)
        outputs = answers(session, (args, kwargs))
    except Exception as error:  # numpy has no bfloat16; ONNX Runtime has no kernels for some operations in other types
        raise VerificationError(
            f"ONNX Runtime cannot run the exported {type(model).__name__}, so it cannot be checked and is not "
            f"kept ({' '.join(str(error).split())}).",
            fix=_fix(model) or "a name that ends in .pt2, for torch.export",
        ) from error
    if dynamic_batch:
        _check_free(model, session, args, kwargs)
    return outputs


def _untold(model: nn.Module, error: Exception, who: str, fix: str) -> Exception:
    """What to do if torch cannot translate a model. Its own message is pages long; the cause says it in a line."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # not the model's fault
        return error
    reason = " ".join(str(error).split())[:300]
    what = f"{who} cannot translate {type(model).__name__} ({type(error).__name__}: {reason})."
    return SecateurError(what, where=type(model).__name__, fix=fix)


class _Affine(nn.Module):
    """A batch norm that is not training."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: Any, dims: int) -> None:
        super().__init__()
        scale = (norm.running_var + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight.detach())
        shift = (0 if norm.bias is None else norm.bias.detach()) - norm.running_mean * scale
        self.register_buffer("scale", scale.view(-1, *[1] * dims))
        self.register_buffer("shift", shift.view(-1, *[1] * dims))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def _plain_norms(model: nn.Module) -> nn.Module:
    """Spell out batch norms, in place: the tables that newer packages have for them do not fit torch 2.6."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            dims = 2 * isinstance(child, nn.BatchNorm2d) or 3 * isinstance(child, nn.BatchNorm3d)
            if dims and getattr(child, "running_mean", None) is not None:
                setattr(parent, name, _Affine(child, dims))
    return model


def _in_batches(model: nn.Module, inputs: Any) -> Any:
    """Inputs of at least two samples and, for tokens, two positions, without which no size is free; None if there are
    none, or the model takes no two samples."""
    tensors = tensors_in(inputs)
    if not tensors or any(not t.ndim or t.shape[0] != tensors[0].shape[0] for t in tensors) or not len(tensors[0]):
        return None
    if len(tensors[0]) > 1:
        return inputs
    twice = map_tensors(lambda t: torch.cat([t, t]), inputs)
    with quiet():
        try:
            model(*twice[0], **twice[1])
        except Exception:  # the user's forward may raise anything
            return None
    return twice


def _free_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Which sizes of the inputs are free: the batch, and the length of token ids and their masks."""
    # With an upper limit, since torch 2.6 refuses a size that might be the largest whole number.
    batch, length = (torch.export.Dim(name, min=1, max=2**31 - 1) for name in ("batch", "length"))
    count = _token_count((args, kwargs))

    def free(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        tokens = count is not None and value.ndim > 1 and value.shape[1] == count and not value.is_floating_point()
        return {0: batch, 1: length} if tokens else {0: batch}

    if kwargs:
        names = list(inspect.signature(model.forward).parameters)
        named = dict(zip(names, args, strict=False)) | kwargs
        return {name: map_leaves(free, value) for name, value in named.items()}
    return _in_place(model, tuple(map_leaves(free, value) for value in args))


def _token_count(inputs: Any) -> int | None:
    """The length of the first input of token ids; None if there is none."""
    ids = [t for t in tensors_in(inputs) if t.ndim == 2 and not t.is_floating_point() and t.shape[1] > 1]
    return ids[0].shape[1] if ids else None


def _check_free(model: nn.Module, session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn of sizes that are fixed although they should be free; raise if another size gives another output."""
    fact = f"the exported {type(model).__name__} takes"
    size, count = fixed_size(session), _token_count((args, kwargs))
    if size is not None and len(tensors_in((args, kwargs))[0]):
        what = f"{fact} batches of {size} only: its forward fixes the batch size."
        fix = "export with an example of the batch size that you need"
        warnings.warn(SecateurWarning(what, fix=fix), stacklevel=5)
        return
    if count is not None and any(item.shape[1:2] == [count] for item in session.get_inputs()):
        what = f"{fact} {count} tokens only: its forward fixes the length."
        warnings.warn(SecateurWarning(what, fix="export with an example of the length that you need"), stacklevel=5)
        return

    def larger(tensor: Tensor) -> Tensor:
        more = torch.cat([tensor, tensor[:1]])
        tokens = count is not None and tensor.ndim > 1 and tensor.shape[1] == count and not tensor.is_floating_point()
        return torch.cat([more, more[:, :1]], 1) if tokens else more

    other = map_tensors(larger, (args, kwargs))
    with quiet():
        try:
            expected = tensors_in(model(*other[0], **other[1]))
        except Exception:  # a size that the model itself does not take
            return
    try:
        gap = _gap(answers(session, other), expected)
    except Exception:  # ONNX Runtime stops in the middle
        gap = math.inf
    if gap > 1e-4:
        raise VerificationError(
            f"on inputs of another size the exported model differs from PyTorch's by {gap:.2g} (allowed 1e-4).",
            fix="dynamic_batch=False, for a file that takes the sizes of the example only",
        )


def _fix(model: nn.Module) -> str:
    """Other precisions than float32 are the usual reason why an export fails or differs."""
    kinds = {p.dtype for p in [*model.parameters(), *model.buffers()] if p.is_floating_point()} - {torch.float32}
    names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
    return f"export model.float() with a float32 example instead of {names}" if kinds else ""


def _in_place(model: nn.Module, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """One entry per parameter of the forward; what goes into its `*args` is nested."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return shapes
    named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*shapes[:named], shapes[named:])


def _to_pt2(model: nn.Module, file: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    with quiet():
        try:
            program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:
            raise _untold(model, error, "torch.export", "a forward whose path does not depend on numbers") from error
        outputs = tensors_in(program.module()(*args, **kwargs))
    content = io.BytesIO()  # torch's own writer says nothing useful about a full disk
    torch.export.save(program, content)
    file.write_bytes(content.getvalue())
    return outputs
