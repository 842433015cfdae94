"""`specialize`: keep k of N outputs, physically; or merge outputs into groups by their summed or mean probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from secateur.analysis.analyze import analyze
from secateur.arguments import check_kind
from secateur.errors import PlanError, TargetError, UnsupportedModelError, VerificationError
from secateur.ops.layers import Labels
from secateur.plans.plan import Plan, plan_for
from secateur.running.copies import named_tensors, shared_copy, unwrap
from secateur.running.devices import device_of, dtype_of
from secateur.running.logits import logits_of
from secateur.running.sandbox import Example, check_weights, leaves_no_trace, quiet, run
from secateur.structure.findings import AxisTable
from secateur.structure.graph import Graph
from secateur.structure.label_pass import watch
from secateur.surgery.cut import cut
from secateur.surgery.provenance import remember

#: How the probabilities of outputs that mean the same become one.
Merge = Literal["sum", "mean"]


class MergedOutputs(nn.Module):
    """A classifier whose outputs are merged: the log of each group's summed (or mean) probability.

    `body` has N outputs; `members` is an N x groups matrix of zeros and ones, or of shares for the mean. Cross-entropy,
    softmax and argmax mean what they should on the result. To load a saved one, wrap a fresh model the same way:
    `load(path, MergedOutputs(build(), groups, N))`.
    """

    members: Tensor

    def __init__(
        self, model: nn.Module, groups: Mapping[str, Sequence[int]], outputs: int, merge: Merge = "sum"
    ) -> None:
        super().__init__()
        self.body = model
        self.names = tuple(groups)
        kind = dtype_of(model) or torch.float32
        members = torch.zeros(outputs, len(groups), dtype=kind, device=device_of(model))
        for column, indices in enumerate(groups.values()):
            members[list(indices), column] = 1 if merge == "sum" else 1 / len(indices)
        self.register_buffer("members", members)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Log-probabilities of the groups."""
        shares = logits_of(self.body(*args, **kwargs), warn=False).softmax(1)
        smallest = torch.finfo(shares.dtype).tiny
        return (shares @ self.members).clamp_min(smallest).log()


@leaves_no_trace
def specialize(
    model: nn.Module,
    outputs: Sequence[int] | Mapping[str, Sequence[int]],
    example: Example,
    *,
    merge: Merge = "sum",
    graph: Graph | None = None,
) -> nn.Module:
    """A copy of a classifier with only the given outputs, in the order given; the other rows are removed.

    With a mapping, e.g. `{"cat": [281, 282], "dog": [207]}`, outputs are merged: all named rows stay, and a
    `MergedOutputs` module turns them into one log-probability per group, the log of the members' summed probability
    (among the rows that are kept). With `merge="mean"` it is their mean: networks trained with smoothed labels spread
    some probability over all outputs, and in a sum that favours the larger group. The copy can be saved, loaded,
    exported, scored and pruned like any model.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 10))
    >>> x = torch.rand(2, 4)
    >>> narrow = specialize(net, [7, 3], example=x)
    >>> narrow[2], bool(torch.allclose(narrow(x), net(x)[:, [7, 3]]))
    (Linear(in_features=6, out_features=2, bias=True), True)
    >>> specialize(net, {"even": [0, 2, 4], "odd": [1, 3]}, example=x)(x).shape
    torch.Size([2, 2])
    """
    if merge not in get_args(Merge):
        raise TargetError(f"merge={merge!r} is not known; outputs are merged by their sum or their mean.")
    model = unwrap(model)
    if graph is not None:
        check_kind("graph", graph, Graph, "graph=analyze(model, example)")
    _check_outputs(outputs)
    check_weights(model)
    graph = graph if graph is not None else analyze(model, example)
    rows = _output_rows(model, graph, example)
    wanted = _wanted(outputs, len(rows))
    plan = _plan(model, graph, rows, wanted)
    if isinstance(outputs, Mapping):
        whole = MergedOutputs(model, outputs, len(rows), merge)
        plan = _prefixed(plan, len(rows), wanted, len(outputs))
        narrow = cut(whole, plan)
        _verify(model, narrow.get_submodule("body"), example, sorted(wanted), merged=True)
        remember(narrow, whole, plan)
    else:
        narrow = cut(model, plan)
        _reorder(narrow, graph, rows, wanted)
        _verify(model, narrow, example, wanted)
        remember(narrow, model, plan)
    return narrow


def _output_rows(model: nn.Module, graph: Graph, example: Example) -> Labels:
    """The group that makes each output, in order."""
    other = graph.shapes.items() - {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}.items()
    if other:
        what = f"the graph is of another model, in which `{min(other)[0]}` has the shape {min(other)[1]}."
        raise PlanError(what, fix="graph=analyze(model, example), of this model")
    watched, made = watch(shared_copy(model).eval(), example, AxisTable(graph.axes.axes))
    output = logits_of(made)
    found = watched.labels.along(output, 1) if output.ndim > 1 else None
    found = None if found is None else np.abs(found)
    if found is None or not found.all() or found.max() >= len(graph.root):
        raise UnsupportedModelError(
            f"{type(model).__name__} returns a tensor of shape {tuple(output.shape)} whose dimension 1 is not "
            "made by the rows of a conv or linear layer, so outputs cannot be removed.",
            fix="specialize the part that is",
        )
    return graph.root[found]


def _check_outputs(outputs: Any) -> None:
    """Refuse what is neither a list of whole numbers nor a mapping to such lists."""
    fix = "a list of outputs, such as [0, 2], or groups of them: {'cat': [281, 282], 'dog': [207]}"
    groups = dict(outputs) if isinstance(outputs, Mapping) else {"": outputs}
    for name, members in groups.items():
        what = f"outputs[{name!r}]" if name else "outputs"
        if isinstance(members, str) or not hasattr(members, "__iter__") or not hasattr(members, "__len__"):
            raise TargetError(f"{what} is a {type(members).__name__}.", where="outputs", value=members, fix=fix)
        wrong = [
            item
            for item in (members.tolist() if isinstance(members, Tensor | np.ndarray) else members)
            if isinstance(item, bool) or not isinstance(item, Integral)
        ]
        if wrong:
            raise TargetError(f"{what} holds {wrong[0]!r}, which is no whole number.", where="outputs", fix=fix)


def _wanted(outputs: Sequence[int] | Mapping[str, Sequence[int]], count: int) -> list[int]:
    """The outputs to keep, in order, if all of them exist."""
    groups = [list(members) for members in (outputs.values() if isinstance(outputs, Mapping) else [outputs])]
    wanted = [int(i) for members in groups for i in members]
    if not wanted or not all(groups):
        raise TargetError("there must be at least one output to keep, and one in each group.")
    if isinstance(outputs, Mapping) and len(groups) == 1:  # its probability among the outputs that are kept is 1
        what = f"{next(iter(outputs))!r} is the only group: its probability would be 1 for every input."
        raise TargetError(what, fix="two groups or more, or a list of outputs, which merges none")
    wrong = [i for i in wanted if not 0 <= i < count]
    if wrong:
        raise TargetError(f"outputs {wrong[:5]} do not exist: the model has {count}, numbered from 0.")
    if len(set(wanted)) < len(wanted):
        twice = sorted({i for i in wanted if wanted.count(i) > 1})
        raise TargetError(f"outputs {twice[:5]} are named more than once.")
    return wanted


def _plan(model: nn.Module, graph: Graph, rows: Labels, wanted: list[int]) -> Plan:
    removed = np.zeros(len(graph.root), np.bool_)
    removed[rows] = True
    removed[rows[wanted]] = False
    if np.count_nonzero(removed) != len(rows) - len(wanted):
        raise UnsupportedModelError("several outputs come from the same row of weights, so they cannot be kept apart.")
    plan = plan_for(graph, removed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = [name for name, parameter in model.named_parameters() if name in plan.cuts and id(parameter) in tables]
    if tied:
        raise UnsupportedModelError(
            f"the rows of `{tied[0]}` are also the entries of an embedding: outputs cannot leave without the inputs.",
            fix="untie the two weights first",
        )
    return plan


def _prefixed(plan: Plan, count: int, wanted: Sequence[int], groups: int) -> Plan:
    """The plan for the model inside a `MergedOutputs`."""
    gone = tuple(sorted(set(range(count)) - set(wanted)))

    def inside(path: str) -> str:
        return f"body.{path}" if path else "body"

    cuts = {inside(name): dims for name, dims in plan.cuts.items()}
    shapes = {inside(name): shape for name, shape in plan.shapes.items()}
    if gone:
        cuts["members"], shapes["members"] = {0: gone}, (count, groups)
    return replace(
        plan,
        cuts=cuts,
        shapes=shapes,
        heads=tuple(replace(head, path=inside(head.path)) for head in plan.heads),
        norms=tuple(replace(norm, path=inside(norm.path)) for norm in plan.norms),
        attributes=tuple(replace(item, path=inside(item.path)) for item in plan.attributes),
        layers={inside(name): counts for name, counts in plan.layers.items()},
        model="MergedOutputs",
    )


def _reorder(narrow: nn.Module, graph: Graph, rows: Labels, wanted: list[int]) -> None:
    """Put the rows into the order that was asked for."""
    if wanted == sorted(wanted):
        return
    rank = np.full(len(graph.root), -1, np.int64)
    rank[rows[wanted]] = np.arange(len(wanted))
    tensors = dict(named_tensors(narrow))
    for axis in graph.axes.axes:
        if axis.parameter not in tensors:
            continue
        own = rank[graph.root[axis.span]]
        own = own[own >= 0]
        if len(own):
            order = np.argsort(own, kind="stable")
            tensor = tensors[axis.parameter]
            tensor.data = tensor.data.index_select(axis.dim, torch.from_numpy(order).to(tensor.device))


def _verify(model: nn.Module, narrow: nn.Module, example: Example, wanted: list[int], merged: bool = False) -> None:
    """The kept outputs are what they were; models that end in a softmax share the whole among those that are left.

    Those cannot be `merged`: that takes a softmax of its own.
    """
    with quiet():
        output = logits_of(run(shared_copy(model).eval(), example), warn=False).double()
        small = logits_of(run(shared_copy(narrow).eval(), example), warn=False).double()
    if merged and bool((output >= 0).all()) and bool(((output.sum(1) - 1).abs() < 1e-3).all()):
        what = f"{type(model).__name__} returns probabilities, and merging takes them for logits."
        raise UnsupportedModelError(what, fix="the model without its softmax")
    whole = output[:, wanted]
    shared = whole / whole.sum(1, keepdim=True)
    scale = float(whole.abs().max()) or 1.0
    for expected in (whole, shared, whole.log_softmax(1)):
        if small.shape == expected.shape and float((small - expected).abs().max()) <= 1e-3 * scale:
            return
    raise VerificationError(
        f"after removing the other outputs, the {len(wanted)} kept ones differ from before; the smaller model is "
        f"withheld. The forward probably treats outputs by position."
    )
