"""Training state across a removal: optimizer moments and averaged weights shrink with their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from secateur.errors import PlanError, SecateurError
from secateur.plans.plan import Plan
from secateur.running.copies import unwrap
from secateur.structure.blocks import within
from secateur.surgery.cut import cut, sliced


def carry(state: Any, before: nn.Module, after: nn.Module, plan: Plan | None) -> None:
    """Make an optimizer (or `AveragedModel`) that served `before` serve `after`, the model that `plan` made of it.

    The object stays the same, so schedulers and gradient scalers that hold it go on working; param groups, learning
    rates and step counts stay; moments are sliced like their parameters. `plan=None` means an unpruned copy.

    >>> import secateur as sc
    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    >>> graph = sc.analyze(net, torch.zeros(1, 4))
    >>> plan = sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5)
    >>> small = sc.apply(net, plan)
    >>> carry(optimizer, net, small, plan)
    >>> optimizer.param_groups[0]["params"][0] is small[0].weight
    True
    """
    if isinstance(state, Optimizer):
        _carry_optimizer(state, unwrap(before), unwrap(after), plan)
    elif isinstance(state, AveragedModel):
        state.module = cut(state.module, plan) if plan is not None else state.module
    elif not isinstance(state, torch.optim.lr_scheduler.LRScheduler):  # holds the optimizer, which stays the same
        raise SecateurError(
            f"carry= takes optimizers, schedulers and torch.optim.swa_utils.AveragedModel, not {type(state).__name__}."
        )


def going_back(state: Any) -> Callable[[], None]:
    """A function that gives what `carry` takes its present state back, and the model that it serves now.

    Nothing large is copied: what `carry` leaves to be trained shares no tensor with the state before.
    """
    if isinstance(state, Optimizer):
        groups = [{**group, "params": list(group["params"])} for group in state.param_groups]
        moments = {parameter: dict(held) for parameter, held in state.state.items()}

        def back() -> None:
            for group, old in zip(state.param_groups, groups, strict=True):
                group.clear()
                group.update(old)
            state.state.clear()
            state.state.update(moments)

    elif isinstance(state, AveragedModel):
        module, count = state.module, state.n_averaged.clone()

        def back() -> None:
            state.module = module
            state.n_averaged.copy_(count)

    else:
        known = copy.deepcopy(state.state_dict())

        def back() -> None:
            state.load_state_dict(known)

    return back


def _carry_optimizer(optimizer: Optimizer, before: nn.Module, after: nn.Module, plan: Plan | None) -> None:
    names = {id(parameter): name for name, parameter in before.named_parameters()}
    fresh = dict(after.named_parameters())
    cuts = plan.cuts if plan is not None else {}
    left = [item.path for item in plan.stand_ins] if plan is not None else []
    if not any(id(parameter) in names for group in optimizer.param_groups for parameter in group["params"]):
        what = f"the {type(optimizer).__name__} optimizer trains no parameter of this {type(before).__name__}."
        raise SecateurError(what, fix="one made from the parameters of the model that is pruned")
    for group in optimizer.param_groups:
        for i, old in reversed(list(enumerate(group["params"]))):
            name = names.get(id(old))
            if name is None:  # not the model's: a temperature, a loss with weights
                if old in optimizer.state:
                    optimizer.state[old] = copy.deepcopy(dict(optimizer.state[old]))
                continue
            new = fresh.get(name)
            if new is None and any(within(name, path) for path in left):
                del group["params"][i]  # gone with its block
                optimizer.state.pop(old, None)
                continue
            if new is None:
                raise PlanError(f"the smaller model has no parameter `{name}` that the optimizer trains.")
            group["params"][i] = new
            if old in optimizer.state:
                optimizer.state[new] = _sliced_state(optimizer.state.pop(old), old, cuts.get(name, {}), name)


def _sliced_state(
    state: Mapping[str, Any], old: Tensor, dims: Mapping[int, tuple[int, ...]], name: str
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == old.shape:
            made[key] = sliced(value, dims)
        elif isinstance(value, Tensor) and value.numel() > 1 and dims:
            raise SecateurError(
                f"the optimizer keeps `{key}` of shape {tuple(value.shape)} for `{name}` of shape "
                f"{tuple(old.shape)}; such factored state cannot be sliced.",
                fix="make a new optimizer after the removal",
            )
        else:
            made[key] = copy.deepcopy(value)  # such as a number of steps, which is counted in place
    return made
