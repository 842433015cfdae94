"""Criteria from outside: captum's layer attributions, and a user's own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from secateur.criteria.criterion import Absolute, Accumulator, Criterion, Norm, Subject, Sums
from secateur.errors import CriterionError, SecateurError
from secateur.nest import map_tensors
from secateur.ops.table import Site
from secateur.running.batches import Batch, size_of
from secateur.running.devices import precise
from secateur.running.logits import answer_of, logits_of, one_output
from secateur.running.sandbox import run
from secateur.running.targets import check_targets

_LAYERS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Linear


@dataclass(frozen=True)
class Captum(Criterion):
    """Any layer attribution of captum for the true class: "IntegratedGradients", "DeepLift", "GradientXActivation"…

    Scores are |Σ attribution| over samples and positions. `options` go to captum's `attribute`. Only layers that are
    modules and run once are scored: of several runs, captum sees the last. It runs the network once per layer.
    """

    name: str = "captum"
    absolute: Absolute = "after"
    norm: Norm = None
    method: str = "GradientXActivation"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def accumulate(self, subject: Subject) -> Accumulator:
        return _CaptumSums(subject, self)


class _CaptumSums(Accumulator):
    def __init__(self, subject: Subject, criterion: Captum) -> None:
        super().__init__(subject)
        self.criterion = criterion
        make = _captum_class(criterion.method)
        for module in subject.model.modules():  # captum's hooks would see what in-place functions overwrite
            if getattr(module, "inplace", False) is True:
                module.inplace = False  # type: ignore[assignment]
        modules = dict(subject.model.named_modules())
        self.layers: list[tuple[int, nn.Module, Any]] = []
        for i, producer in enumerate(subject.producers):
            layer = modules.get(producer.sites[0].path)
            if isinstance(layer, _LAYERS) and len(producer.sites) == 1:
                self.layers.append((i, layer, make(subject.model, layer)))
        if not self.layers:
            raise CriterionError("captum attributes to modules that run once, and no layer of this model is one.")

    def update(self, inputs: Any, targets: Any) -> None:
        if isinstance(inputs, dict):
            raise CriterionError("captum takes positional inputs, not a dict of named ones.")
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        with torch.no_grad():
            made = run(self.subject.model, inputs)
            output = logits_of(made)
        if output.ndim > 2:
            what = f"captum attributes one answer per sample, and the output has shape {tuple(output.shape)}."
            raise CriterionError(what, fix="another criterion, such as 'lrp' or 'taylor'")
        classes: Tensor | int | None = check_targets(targets, output, answer_of(made).entry)
        if one_output(output, size_of(inputs)):
            classes = 0 if output.ndim > 1 else None  # how captum names the only output
        for index, layer, method in self.layers:
            try:
                found = method.attribute(map_tensors(_fresh, inputs), target=classes, **self.criterion.options)
            except Exception as error:
                raise CriterionError(
                    f"captum's {self.criterion.method} failed at `{self.subject.producers[index].sites[0].path}`: "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                ) from error
            values: Tensor = found[0] if isinstance(found, tuple) else found
            channel = values.ndim - 1 if isinstance(layer, nn.Linear) else 1
            values = values.detach().to(precise(values.device)).movedim(channel, -1)
            values = values.square() if self.criterion.absolute == "square" else values
            sums = values.flatten(1, -2).sum(1) if values.ndim > 2 else values
            self.sums.add(index, sums.abs().sum(0) if self.criterion.absolute == "sample" else sums.sum(0))
        self.sums.samples += size_of(inputs)


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _captum_class(method: str) -> Any:
    try:
        from captum import attr
    except ImportError as error:
        raise CriterionError("criterion 'captum:…' needs captum.", fix="pip install 'secateur[captum]'") from error
    name = method if method.startswith("Layer") else f"Layer{method}"
    found = getattr(attr, name, None)
    if found is None:
        known = sorted(n.removeprefix("Layer") for n in dir(attr) if n.startswith("Layer") and n != "LayerAttribution")
        raise CriterionError(f"captum has no layer attribution {method!r}; it has {', '.join(known)}.")
    return found


#: `f(model, batches) -> {module path or Site: one number per output channel}`; numbers are sums over samples.
Scorer = Callable[[nn.Module, list[Batch]], Mapping[Any, Any]]


@dataclass(frozen=True)
class Custom(Criterion):
    """A user's function `f(model, batches)`: it returns, by module path, one number per output channel or neuron.

    `model` is a copy in evaluation mode that shares the weights. In several processes the numbers are added up.
    """

    data: ClassVar[bool | None] = None

    name: str = "custom"
    function: Scorer | None = None

    def accumulate(self, subject: Subject) -> Accumulator:
        """Batches are kept until the function is called at the end."""
        return _CustomSums(subject, self)


class _CustomSums(Accumulator):
    def __init__(self, subject: Subject, criterion: Custom) -> None:
        super().__init__(subject)
        self.criterion = criterion
        self.batches: list[Batch] = []

    def update(self, inputs: Any, targets: Any) -> None:
        self.batches.append((inputs, targets))
        self.sums.samples += size_of(inputs)

    def close(self) -> Sums:
        assert self.criterion.function is not None
        name = self.criterion.name
        try:
            found = self.criterion.function(self.subject.model, self.batches)
        except SecateurError:
            raise
        except Exception as error:
            raise CriterionError(f"the criterion {name!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Mapping):
            raise CriterionError(
                f"the criterion {name!r} returned a {type(found).__name__}; it must return {{module path: numbers}}."
            )
        paths: dict[Any, int] = {}
        for i, producer in enumerate(self.subject.producers):
            for site in producer.sites:
                paths.setdefault(site.path, i)
                paths[site] = i
        for key, values in found.items():
            index = paths.get(key)
            if index is None:
                what = key if isinstance(key, Site) else repr(key)
                raise CriterionError(f"the criterion {name!r} scores {what}, but no units are made there.")
            try:
                vector = torch.as_tensor(values).detach().to("cpu", torch.float64).reshape(-1)
            except (TypeError, ValueError, RuntimeError) as error:
                raise CriterionError(f"{name!r} gives no numbers for the units of {key!r}: {error}") from error
            count = int(np.count_nonzero(self.subject.kept[index]))
            if len(vector) != count:
                raise CriterionError(f"{name!r} gives {len(vector)} numbers for the {count} units of {key!r}.")
            self.sums.add(index, vector)
        self.sums.samples = max(self.sums.samples, 1)
        return self.sums
