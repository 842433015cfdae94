"""`explain`: which inputs and which units made the model give its answer, in numbers and as a heat map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from secateur.arguments import check_choice
from secateur.errors import DataError, SecateurError
from secateur.nest import tensors_in
from secateur.relevance.composites import Composite
from secateur.relevance.conservation import Conservation
from secateur.relevance.engine import RelevancePass, Start
from secateur.relevance.ledger import Absolute
from secateur.relevance.rules import Rule
from secateur.relevance.weights import path_of
from secateur.running.batches import as_tensors
from secateur.running.copies import check_followed, shared_copy, unwrap
from secateur.running.logits import one_output
from secateur.running.sandbox import isolated, leaves_no_trace, run_or_explain

Target = int | Sequence[int] | Tensor | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Explanation:
    """Relevance of inputs and units for `target`.

    `input` is shaped like the inputs (a list if there were several). `units` has one number per output channel or
    neuron of each conv and linear layer (per column of an embedding), summed over samples and space, by module path;
    `weights` has the same by parameter name. Layers that only make gates (squeeze-and-excitation, queries and keys)
    take no relevance. They are scored by what the gate lets pass. These scores are not part of the total.
    """

    input: Tensor | list[Tensor | None]
    units: dict[str, Tensor]
    weights: dict[str, Tensor] = field(repr=False)
    output: Tensor = field(repr=False)
    conservation: Conservation
    images: Any = field(repr=False, default=None)

    @property
    def heat(self) -> Tensor:
        """The first input's relevance summed over channels: one map per sample."""
        first = self.input if isinstance(self.input, Tensor) else next(t for t in self.input if t is not None)
        return first.sum(1) if first.dim() == 4 else first.sum(-1) if first.dim() == 3 else first

    def plot(self, path: str | Path, *, clip: float = 0.995) -> Path:
        """A PNG: each image beside its heat map. Red speaks for the target, blue against it, white is 0.

        Colours saturate at the `clip` quantile of the absolute values, so that one pixel does not hide the rest.
        """
        return draw(self.images, self.heat, Path(path), clip)


@leaves_no_trace
def explain(
    model: nn.Module,
    inputs: Any,
    target: Target = None,
    *,
    composite: str | Composite | Rule = "alpha1beta0",
    start: Literal["one", "logit"] = "one",
    absolute: Absolute = False,
) -> Explanation:
    """Relevance of inputs and units for `target`: a class, one per sample, None for the predicted class, or a function
    from the output to the relevance it starts with. Each sample starts with 1, or with its logit. If a model has one
    output for two classes, relevance starts there whether a target is 0 or 1.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    >>> seen = explain(net, torch.rand(2, 3, 2, 2), target=1)
    >>> seen.input.shape, seen.units["1"].shape
    (torch.Size([2, 3, 2, 2]), torch.Size([4]))
    """
    check_choice("start", start, ("one", "logit"))
    check_choice("absolute", absolute, get_args(Absolute))
    _check_target(target)
    inputs = as_tensors(inputs)
    if not tensors_in(inputs):
        what = f"inputs is a {type(inputs).__name__} without a tensor."
        raise DataError(what, fix="a tensor, or a tuple or dict of tensors")
    original = unwrap(model)
    check_followed(original)  # before it is copied: what cannot be followed often cannot be copied
    engine = RelevancePass(shared_copy(original), composite, absolute=absolute)
    try:
        output, heat = engine.run(inputs, starter(target, start, samples_in(inputs)))
    except SecateurError:
        raise
    except Exception:
        with isolated(engine.model, tensors_in(inputs)), torch.no_grad():
            run_or_explain(engine.model, inputs)  # if the model itself fails, its error says so
        raise
    conservation = engine.conservation()
    conservation.warn()
    first = heat[0] if len(heat) == 1 and heat[0] is not None else heat
    units = {name: sums.to(output.dtype) for name, sums in engine.units.items()}
    images = next((tensor.detach() for tensor in tensors_in(inputs)), None)
    return Explanation(first, {path_of(n): u for n, u in units.items()}, units, output, conservation, images)


@leaves_no_trace
def unit_relevance(
    model: nn.Module,
    data: Iterable[tuple[Any, Any]],
    *,
    composite: str | Composite | Rule = "alpha1beta0",
    start: Literal["one", "logit"] = "one",
    absolute: Absolute = False,
) -> tuple[dict[str, Tensor], Conservation]:
    """Relevance per unit by parameter name, summed over batches of (inputs, targets), and conservation. No heat map."""
    check_choice("start", start, ("one", "logit"))
    check_choice("absolute", absolute, get_args(Absolute))
    engine = RelevancePass(shared_copy(unwrap(model)), composite, absolute=absolute, heat_map=False)
    for inputs, targets in data:
        engine.run(inputs, starter(targets, start, samples_in(inputs)))
    if not engine.samples:
        raise DataError("there is no batch in the data.")
    conservation = engine.conservation()
    conservation.warn()
    return engine.units, conservation


def samples_in(inputs: Any) -> int | None:
    """How many samples a batch has; None if it is a single vector, or has no tensor."""
    tensors = tensors_in(inputs)
    return len(tensors[0]) if tensors and tensors[0].dim() > 1 else None


def starter(target: Target, start: Literal["one", "logit"] = "one", samples: int | None = None) -> Start:
    """The relevance that an output starts with, as a function of the output.

    `samples` tells an output of one number per sample from that of a single sample without a batch dimension.
    """

    def begin(output: Tensor) -> Tensor:
        if callable(target) and not isinstance(target, Tensor):
            return _checked(target(output), output)
        if isinstance(target, Tensor) and target.is_floating_point():
            return _checked(target, output)
        if one_output(output, samples):
            _check_single(target, output)
            return torch.ones_like(output) if start == "one" else output
        classes = 1 if output.dim() > 1 else 0
        if target is None:
            index = output.argmax(classes, keepdim=True)
        else:
            index = torch.as_tensor(target, device=output.device)
            shape = [d for i, d in enumerate(output.shape) if i != classes]
            if index.dim() == 1 and len(shape) > 1:  # one class per sample, many positions
                index = index.view(-1, *[1] * (len(shape) - 1))
            outside = (index >= output.shape[classes]) | (index < -output.shape[classes])
            if bool(outside.any()):
                wrong = int(index[outside].reshape(-1)[0])
                raise DataError(f"target {wrong} is not among the {output.shape[classes]} outputs.")
            try:
                index = index.remainder(output.shape[classes]).expand(shape).unsqueeze(classes)
            except RuntimeError:
                raise DataError(
                    f"targets of shape {tuple(index.shape)} for an output of shape {tuple(output.shape)}."
                ) from None
        values = torch.ones_like(output) if start == "one" else output
        return torch.zeros_like(output).scatter(classes, index, values.gather(classes, index))

    return begin


def _check_target(target: Any) -> None:
    """Refuse what is no class, no list of classes and no function."""
    if target is None or callable(target) or isinstance(target, Tensor):
        return
    try:
        index = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        index = None
    if index is None or index.is_floating_point() or index.dtype == torch.bool:
        what = f"target is {target!r}, which is neither a class nor a list of classes."
        raise DataError(what, fix="a whole number, one per sample, or a function f(output)")


def _check_single(target: Any, output: Tensor) -> None:
    """Class numbers of a model with one output: 0 or 1, one for all, one per sample or one per number."""
    if target is None:
        return
    index = torch.as_tensor(target)
    if index.dim() and index.shape[0] != (output.shape[0] if output.dim() else 1):
        raise DataError(f"targets of shape {tuple(index.shape)} for an output of shape {tuple(output.shape)}.")
    if int(index.max()) > 1 or int(index.min()) < -1:
        raise DataError(f"target {int(index.max())} for a model with one output, whose classes are 0 and 1.")


def _checked(relevance: Tensor, output: Tensor) -> Tensor:
    if relevance.shape != output.shape:
        raise DataError(
            f"the starting relevance has shape {tuple(relevance.shape)}, the output has {tuple(output.shape)}: give "
            f"one number per output."
        )
    return relevance.to(output)


# -- pictures ---------------------------------------------------------------------------------------------------------
def draw(images: Any, heat: Tensor, path: Path, clip: float = 0.995) -> Path:
    """One row per sample: the image, and its relevance in the colours of `seismic`, white at 0."""
    if heat.dim() != 3:
        raise DataError(
            f"relevance of shape {tuple(heat.shape)} is no picture: only inputs of shape (N, C, H, W) can be drawn."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SecateurError("drawing needs matplotlib.", fix="pip install 'secateur[report]'") from error
    rows = heat.shape[0]
    figure = Figure(figsize=(6.4, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2, squeeze=False)
    for row, (image, relevance) in enumerate(zip(images, heat, strict=True)):
        axes[row][0].imshow(visible(image))
        flat = relevance.detach().float().cpu()
        limit = bound(flat, clip)
        axes[row][1].imshow(flat.numpy(), cmap="seismic", vmin=-limit, vmax=limit)
        for axis in axes[row]:
            axis.set_axis_off()
    figure.savefig(path, dpi=100, format="png")
    return path


def bound(heat: Tensor, clip: float = 0.995) -> float:
    """Where colours saturate: the `clip` quantile of the absolute values, so that one pixel does not hide the rest."""
    size = heat.detach().abs().flatten()
    return float(size.quantile(clip)) or float(size.max()) or 1.0


def visible(image: Tensor) -> Any:
    """An image tensor of any range as an array (H, W) or (H, W, 3) in [0, 1]."""
    picture = image.detach().float().cpu()
    low, high = picture.amin(), picture.amax()
    if low < 0 or high > 1:
        picture = (picture - low) / (high - low).clamp(min=1e-12)
    if picture.shape[0] >= 3:
        return picture[:3].permute(1, 2, 0).numpy()
    return torch.stack([picture[0]] * 3, -1).numpy()
