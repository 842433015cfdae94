"""The relevance pass: Layer-wise Relevance Propagation through any model, batch after batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import RelevanceError, UnsupportedModelError
from secateur.nest import map_tensors
from secateur.ops.table import Site
from secateur.relevance import _kernels
from secateur.relevance._cuda_graphs import Recorder
from secateur.relevance._fusion import Fusion, Habits
from secateur.relevance._script import Script
from secateur.relevance.accelerators import Accelerators, Attempt, Attends, Deviation
from secateur.relevance.activations import Activations
from secateur.relevance.backward import Backward
from secateur.relevance.composites import PRESETS, Composite, Place, composite_named
from secateur.relevance.conservation import Conservation, slack
from secateur.relevance.forward import ForwardPass, check_input
from secateur.relevance.gradients import GradientBackward, GradientLayers, GradientPropagation
from secateur.relevance.layers import Layers
from secateur.relevance.ledger import HALF, Absolute, Batch, Journal, Ledger, Page, Watch
from secateur.relevance.propagation import Propagation
from secateur.relevance.rules import Rule
from secateur.relevance.starts import AtGoal
from secateur.relevance.weights import Weights, path_of
from secateur.running.copies import check_followed, unwrap
from secateur.running.goals import tapping
from secateur.running.logits import logits_of
from secateur.running.sandbox import isolated, run, spoilt

Start = Callable[[Tensor], Tensor]
_SAFE, _ATTENTIVE = "alpha1beta0", "attnlrp"


class _Deeper(Deviation):
    """The batch has another number of layers than the one before."""


class RelevancePass:
    """Propagates relevance through a model, batch after batch. Unit sums and conservation add up until `reset`.

    Without a `composite`, it is "attnlrp" if the model has attention and at most the share `least` of its weights
    belongs to convolutions, else `otherwise`.
    `units` maps the name of each weight to one number per output channel or neuron. `absolute` takes absolute values
    per "sample" (after summing over space) or per "element", or the "square" of each element, before they are summed;
    None leaves it to the composite. Without `heat_map`, relevance stops
    at the layers that read the input, which is faster. `watch` is called with each layer and the relevance of its
    outputs. `accelerators` are speed-ups that can be switched off.
    """

    def __init__(
        self,
        model: nn.Module,
        composite: str | Composite | Rule | None = None,
        *,
        absolute: Absolute | None = False,
        heat_map: bool = True,
        watch: Watch | None = None,
        otherwise: str = _SAFE,
        least: float = 0.5,
        accelerators: Accelerators = Accelerators(),  # noqa: B008 (frozen)
    ) -> None:
        self.model = unwrap(model)
        check_followed(self.model)
        self.composite = composite_named(otherwise if composite is None else composite)
        self._undecided = composite is None
        self._convolutional = self._undecided and _convolves(self.model, least)
        self.absolute, self.heat_map, self.watch, self.accelerators = absolute, heat_map, watch, accelerators
        #: Layers that once could not pass on all relevance.
        self.attentive: set[str] = set()
        self._rules: dict[tuple[Place, int], Rule] = {}
        self.weights = Weights(self.model)
        self.forward = ForwardPass(self.model, self.weights, Script() if accelerators.script else None)
        self._habits = Habits(accelerators.fusion and not self.composite.modified_gradient)
        self._depth = 0  # how many layers the batch before had
        self._seen = False  # whether a batch has run, so that the next one is expected to make the same calls
        self._regular = False  # whether the last batch did
        self.reset()

    def reset(self) -> None:
        """Forget all sums, keep the prepared weights."""
        self._ledger = Ledger()
        self._recorder = Recorder(self.accelerators.cuda_graphs and self.watch is None)
        self._forget_calls()

    @property
    def samples(self) -> int:
        """How many samples have run."""
        return self._ledger.samples

    @property
    def entry(self) -> str:
        """Which entry of the model's output is explained, as it would be written; empty if that is a tensor."""
        return self.forward.entry

    @property
    def places(self) -> dict[Site, tuple[str, int, int]]:
        """For each call of a layer: the name of its weight, and the first and last of the rows that it uses."""
        return self._ledger.places

    @property
    def units(self) -> dict[str, Tensor]:
        """One number per unit, by the name of the weight."""
        return self._ledger.units

    def conservation(self) -> Conservation:
        """What every operation received and passed on, in all batches so far."""
        return self._ledger.conservation(self.composite.name)

    def run(self, inputs: Any, start: Start) -> tuple[Tensor, list[Tensor | None]]:
        """One batch: returns the model's output and the relevance of each input tensor (None for those without)."""
        with _kernels.allowed(self.accelerators.kernels):
            batch = self._propagate(inputs, start)
            if self._got_stuck(batch):  # on a GPU this is known only now; from the next time on these layers check it
                batch = self._propagate(inputs, start)
            _check_finite(batch, self.model, self.composite)
            self._ledger.add(batch)
            if self._regular and not self.attentive:
                self._recorder.consider(self, inputs, start, batch)
        return batch.output, batch.heat

    # -- one batch -------------------------------------------------------------------------------------------------
    def begin(self, inputs: Any, attempt: Attempt) -> tuple[Propagation, Any]:
        """A new propagation, and the inputs as tensors that carry relevance."""
        absolute = self.composite.absolute if self.absolute is None else self.absolute
        known, journal = Activations(), Journal(absolute, self.watch)
        kinds: Any = (Backward, Layers, Propagation)
        if self.composite.modified_gradient:
            kinds = (GradientBackward, GradientLayers, GradientPropagation)
        backward: Backward = kinds[0](self.composite, self._rules, journal, self.attentive, self._depth)
        fusion = Fusion(self._habits, self.weights, known, attempt)
        layers = kinds[1](self.weights, self._ledger, known, backward, fusion, attempt, self.heat_map)

        def enter(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            check_input(tensor)
            return backward.add_leaf(tensor.detach().clone() if tensor.is_inference() else tensor.detach())

        with torch.inference_mode(False):
            entries = map_tensors(enter, inputs)
        leaves = [leaf for leaf, _, _ in backward.leaves.values()]
        if leaves and all(leaf.dim() and len(leaf) == 1 and leaf.device.type == "cpu" for leaf in leaves):
            backward.watch_memory()
        return kinds[2](self.forward.again, layers), entries

    def finish(self, value: Tensor, heat: list[Tensor | None], page: Page) -> Batch:
        """The results of a batch. Waits for the device."""
        flows, (wrong, begun, size, *reached), finite = page.read()
        if wrong:
            fix = "check the weights" if value.dtype not in HALF else _remedy(self.model, self.composite, value)
            raise RelevanceError(f"the output, where relevance starts, is not finite{_blame(self.model)}.", fix=fix)
        return Batch(value, heat, page.layout, page.units, flows, begun, size, sum(reached), finite)

    def _propagate(self, inputs: Any, start: Start) -> Batch:
        """One batch: replayed, or run as the batch before, or run without any expectation."""
        if self.attentive:
            self._recorder.refuse("layers that got stuck with relevance wait for the device")
        if isinstance(start, AtGoal):
            self._recorder.refuse("a goal looks at what the model returns")
        played = self._recorder.play(self, inputs, start)
        if played is not None:
            return played
        self._regular = self._seen
        if self._seen:
            try:
                return self._attempt(inputs, start, Attempt(expected=True))
            except Deviation:
                self._seen = self._regular = False
        self._forget_calls()
        batch: Batch | None = None
        try:
            batch = self._attempt(inputs, start, Attempt(False, self._undecided, self._convolutional))
        except _Deeper:
            pass
        except Attends:
            self._use(PRESETS[_ATTENTIVE])
        if batch is None:  # not above, where the exception would hold all that was computed until then
            self._forget_calls()
            batch = self._attempt(inputs, start, Attempt(expected=False))
        self._seen, self._undecided = True, False
        return batch

    def _use(self, composite: Composite) -> None:
        """From now on this composite. Nothing was added up with another one."""
        self.composite, self._undecided = composite, False
        self._ledger = Ledger()
        self._habits = Habits(self.accelerators.fusion and not composite.modified_gradient)

    def _attempt(self, inputs: Any, start: Start, attempt: Attempt) -> Batch:
        propagation, entries = self.begin(inputs, attempt)
        backward, fusion, goal = propagation.backward, propagation.fusion, start if isinstance(start, AtGoal) else None
        with isolated(self.model, [leaf for leaf, _, _ in backward.leaves.values()]):
            output = self.forward.run(propagation, attempt, entries, goal)
            if self._depth != backward.layers:
                self._depth = backward.layers
                if self.composite.attention_by_depth:  # which needs to know before
                    raise _Deeper
            doubtful = propagation.activations.doubtful
            if doubtful:
                self._recorder.refuse("a write through a view must be checked")
                _check_views(doubtful, _plain_output(self.model, inputs, goal), output)
            value = output.detach()
            heat, page = backward.run(output, start(value))
        del output
        batch = self.finish(value, heat, page)
        unchecked = fusion.count and self._habits.trusted is None
        if unchecked and not self._habits.trust(_plain_output(self.model, inputs, goal), value):
            raise Deviation
        return batch

    def _forget_calls(self) -> None:
        """The next batch may make other calls."""
        self.weights.uses.clear()
        self._habits.followed.clear()

    def _got_stuck(self, batch: Batch) -> bool:
        """Note the layers that could not pass everything on. Whether the batch must be repeated for new ones."""
        stuck = {
            flow.name
            for flow in batch.flows
            if flow.kind in ("conv", "linear", "pool")
            and not flow.absorbs
            and abs(flow.lost) > slack(flow.kind, batch.output) * abs(flow.arrived)
        }
        new = stuck - self.attentive
        self.attentive |= stuck
        return bool(new) and batch.output.is_cuda


def _convolves(model: nn.Module, least: float) -> bool:
    """Whether convolutions have more than this share of the weights. Those that cut an input into patches have none."""
    convolutions = (m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd) and m.weight is not None)
    counted = sum(m.weight.numel() for m in convolutions if m.stride != m.kernel_size or max(m.kernel_size) == 1)
    return counted > least * sum(p.numel() for p in model.parameters() if p.dim() > 1)


def _check_finite(batch: Batch, model: nn.Module, composite: Composite) -> None:
    """Refuse a batch that is not finite, naming the layer nearest to the output."""
    wrong = [flow.name for flow in batch.flows if not math.isfinite(flow.arrived + flow.passed)]
    if not wrong and not batch.finite:  # the score of a gate, which is no flow
        parts = torch.split_with_sizes(batch.row, [stop - start for _, start, stop in batch.layout])
        named = zip(batch.layout, parts, strict=True)
        wrong = [path_of(name) for (name, _, _), part in named if not bool(torch.isfinite(part).all())]
    if wrong or not math.isfinite(batch.input):
        where = wrong[0] if wrong else "the input"
        raise RelevanceError(
            f"relevance became NaN or infinite at {where if '`' in where else f'`{where}`'}{_blame(model)}.",
            fix=_remedy(model, composite, batch.output),
        )


def _check_views(doubtful: str, plain: Tensor, output: Tensor) -> None:
    """In-place writes through views cannot be followed. Where there were any, the output must be right anyway."""
    if not torch.allclose(plain, output.detach(), rtol=1e-3, atol=1e-4):
        raise UnsupportedModelError(
            f"{doubtful} writes in place through a view, and the result is used under another name.",
            fix="write that operation out of place",
        )


def _plain_output(model: nn.Module, inputs: Any, goal: AtGoal | None) -> Tensor:
    """What the model itself answers."""
    with isolated(model, []), torch.no_grad(), tapping(model, None if goal is None else goal.aim) as tapped:
        made = run(model, inputs)
        return logits_of(made, warn=False) if goal is None else goal.pick(tapped(made))


def _remedy(model: nn.Module, composite: Composite, output: Tensor) -> str:
    """What can be done about relevance that is not finite, and was not done already."""
    if output.dtype in HALF and not _blame(model):
        return f"model.float() and float32 inputs; {str(output.dtype).removeprefix('torch.')} is too coarse here"
    other = "" if composite.name == _SAFE else f", or a composite that does not divide by small numbers: {_SAFE!r}"
    return f"check weights and inputs{other}"


def _blame(model: nn.Module) -> str:
    name = spoilt(model)
    return "" if name is None else f" (`{name}` has values that are not finite)"
