"""`apply`: carry out a plan, and return nothing that was not verified."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import nn

from secateur.arguments import check_choice, check_kind
from secateur.errors import PlanError
from secateur.plans.plan import Plan
from secateur.running.copies import unchanged, unwrap
from secateur.running.sandbox import Example, leaves_no_trace, uncollected
from secateur.surgery.cut import cut
from secateur.surgery.mask import mask
from secateur.surgery.provenance import remember
from secateur.surgery.verify import verify


@leaves_no_trace
def apply(
    model: nn.Module, plan: Plan, how: Literal["remove", "mask"] = "remove", example: Example = None
) -> nn.Module:
    """A new model without the units that the plan removes; `how="mask"` keeps the shapes and zeroes them instead.

    **Rule zero**: removal and masking must agree, or `VerificationError` is raised, which names the layers at fault
    (`error.layers`). They are compared on the example, and on random inputs of its kind, in other numbers and sizes
    where the model takes them; on small parts of large images alone if the code asks for no sizes. The example is the
    one given to `analyze`; a plan read from a file has none, so give it one here if you want the check.

    >>> import torch, secateur as sc
    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> graph = sc.analyze(net, torch.zeros(1, 4))
    >>> sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5))[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    model = unwrap(model)
    check_kind("plan", plan, Plan, "apply(model, plan), with the plan of `plan(…)` or result.plan", error=PlanError)
    check_choice("how", how, ("remove", "mask"))
    if how == "mask":
        return mask(model, plan)
    example = plan.example if example is None else example
    with unchanged(model):
        with uncollected:
            small = cut(model, plan)
        if example is not None and (plan.cuts or plan.stand_ins):
            verify(model, small, plan, example)
        remember(small, model, replace(plan, example=example))
    return small
