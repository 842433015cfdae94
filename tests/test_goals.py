"""What counts where there is no class: boxes, pixels, quantities, embeddings, the next token, and a user's own."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.criteria import LRP, Detection, Goal, NextToken, Regression, Segmentation, Similarity, Taylor
from secateur.errors import CriterionError, DataError, SecateurWarning
from secateur.relevance import Epsilon


class Net(nn.Module):
    """Convolutions without biases, and what `read` makes of their answer."""

    def __init__(self, classes: int, read: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 12, 3, bias=False), nn.Conv2d(12, classes, 3, bias=False)
        self.read = read or (lambda x: x)

    def forward(self, x: Tensor) -> Any:
        return self.read(self.second(self.first(x).relu()))


X = torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def epsilon_relevance(net: Net, x: Tensor, start: Tensor) -> Tensor:
    """Gradient × activation of a network without biases is its relevance under the epsilon rule (ε → 0). The oracle."""
    hidden = net.first(x).relu().detach().requires_grad_()
    out = net.second(hidden)
    (slope,) = torch.autograd.grad(out, hidden, start / out.detach())
    return (slope * hidden).sum((0, 2, 3)).detach()


def units(net: Net, data: Any, start: Any) -> Tensor:
    scores = sc.score(net, data, LRP(composite=Epsilon(1e-9), start=start, absolute=None))
    return torch.tensor(next(iter(scores.units.values())))


MASKS = torch.randint(0, 3, (4, 8, 8), generator=torch.Generator().manual_seed(2))


def test_relevance_starts_at_the_true_class_of_each_pixel_and_nowhere_else() -> None:
    masks = MASKS.clone()
    masks[:, :2] = 255
    start = F.one_hot(torch.where(masks == 255, 0, masks), 3).movedim(-1, 1) * (masks != 255)[:, None]
    start = start / (masks != 255).flatten(1).sum(1).view(4, 1, 1, 1)
    net = Net(3)
    torch.testing.assert_close(
        units(net, (X, masks), Segmentation()).float(), epsilon_relevance(net, X, start), rtol=1e-3, atol=1e-6
    )


def test_masks_may_be_larger_than_the_output_and_have_one_class() -> None:
    net, large = Net(1, lambda x: {"out": x}), (torch.rand(4, 16, 16) > 0.5).long()
    goal = Segmentation()
    logits = F.interpolate(net(X)["out"], (16, 16), mode="bilinear", align_corners=False)
    expected = F.binary_cross_entropy_with_logits(logits[:, 0], large.float())
    torch.testing.assert_close(goal.loss(net(X), large), expected)
    assert sc.score(net, (X, large), Taylor(loss=goal)).units
    assert sc.prune(net, (X, large), LRP(start=goal), remove=0.3, progress=False).plan is not None


def test_a_quantity_starts_with_itself() -> None:
    net = Net(2, lambda x: x.mean((2, 3)))
    out = Net(2)(X).detach()
    expected = epsilon_relevance(net, X, out / 64)
    torch.testing.assert_close(units(net, (X, torch.rand(4, 2)), Regression()).float(), expected, rtol=1e-3, atol=1e-6)


def test_the_loss_of_a_quantity_is_its_squared_error() -> None:
    net, wanted = Net(2, lambda x: x.mean((2, 3))), torch.rand(4, 2)
    by_goal = sc.score(net, (X, wanted), Taylor(loss=Regression()))
    by_hand = sc.score(net, (X, wanted), Taylor(loss=F.mse_loss))
    for site, values in by_hand.units.items():
        assert values == pytest.approx(by_goal.units[site])


def test_an_embedding_is_like_itself_or_like_another() -> None:
    net = Net(5, lambda x: x.mean((2, 3)))
    out = net(X).detach()
    own = out / out.norm(dim=1, keepdim=True)
    found = sc.explain(net, X, Similarity(), composite=Epsilon(1e-9))
    assert float(found.input.sum()) == pytest.approx(4.0, rel=1e-2)  # the cosine of each with itself is 1
    other = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    expected = (own * F.normalize(other)).sum(1)
    torch.testing.assert_close(Similarity().value(out, other), expected)
    assert sc.score(net, (X, other), Taylor(loss=Similarity())).units
    assert sc.prune(net, (X, None), LRP(start=Similarity()), remove=0.3, progress=False).plan is not None


def test_the_next_token_of_a_plain_model() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 11))
    ids = torch.randint(11, (3, 6))
    expected = torch.stack([F.cross_entropy(net(ids)[i, :-1], ids[i, 1:]) for i in range(3)]).mean()
    torch.testing.assert_close(NextToken().loss(net(ids), ids), expected)
    logits = net(ids)
    expected = torch.stack([logits[i, torch.arange(5), ids[i, 1:]].mean() for i in range(3)])
    torch.testing.assert_close(NextToken().value(logits, ids), expected)
    assert sc.score(net, (ids, ids), LRP(start=NextToken())).units
    assert sc.score(net, (ids, ids), Taylor(loss=NextToken())).units


# -- boxes -------------------------------------------------------------------------------------------------------------
TARGETS = [
    {"boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]]), "labels": torch.tensor([1, 2])},
    {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
]


def test_scores_of_matched_boxes_count() -> None:
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6], requires_grad=True)
    found = [
        {
            "boxes": torch.tensor([[0.0, 0, 10, 9], [0, 0, 10, 10], [21, 20, 30, 30], [50, 50, 60, 60]]),
            "labels": torch.tensor([1, 2, 2, 1]),
            "scores": scores,
        },
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)},
    ]
    value = Detection().value(found, TARGETS)
    assert value.tolist() == pytest.approx([0.9 * 1.5 + 0.7 * 2, 0.0])  # what lies at 0 has no place to start from
    shares = torch.tensor([0.9, 9 / 10]), torch.tensor([0.7, 9 / 10])  # score and overlap
    assert float(Detection().loss(found, TARGETS).detach()) == pytest.approx(-float(sum(map(sum, shares))) / 2)
    (slope,) = torch.autograd.grad(value.sum(), scores)
    assert slope.tolist() == [1, 0, 1, 0]  # the second has another class, the last lies elsewhere
    assert Detection().value(found, None).tolist() == pytest.approx([0.9 * 1.5 + 0.8 * 1.5 + 0.7 * 2 + 0.6 * 2, 0.0])


def test_boxes_by_centre_and_size_of_all_places() -> None:
    centres = torch.tensor([[5.0, 5, 10, 10], [5, 5, 10, 8], [25, 25, 10, 10], [80, 80, 4, 4]])
    scores = torch.rand(1, 3, 4, requires_grad=True)
    value = Detection().value((torch.cat([centres.T[None], scores], 1), [torch.rand(2)]), TARGETS[:1])
    expected = 2 * (scores[0, 1, :2].mean() + scores[0, 2, 2])  # at the score and at the place
    assert value.tolist() == pytest.approx([float(expected.detach())])
    (slope,) = torch.autograd.grad(value.sum(), scores)
    assert slope[0].nonzero().tolist() == [[1, 0], [1, 1], [2, 2]]

    class Answer(dict):  # as transformers has it
        logits, pred_boxes = scores.transpose(1, 2), centres[None] / 100

    wanted = [{"boxes": torch.tensor([[0.25, 0.25, 0.1, 0.1]]), "class_labels": torch.tensor([0])}]
    assert Detection().value(Answer(), wanted).tolist() == pytest.approx([2 * float(scores[0, 0, 2].detach())])


def test_scores_that_are_logits_weigh_as_probabilities_however_sure_the_matched_box_is() -> None:
    class Answer(dict):  # as transformers has it: the first box is sure, and no logit of it is negative
        logits = torch.tensor([[[0.5, 3.2], [-1.0, -2.0]]])
        pred_boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.2], [0.2, 0.2, 0.1, 0.1]]])

    wanted = [{"boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]]), "class_labels": torch.tensor([1])}]
    sure = 1 / (1 + math.exp(-3.2))
    assert Detection().value(Answer(), wanted).tolist() == pytest.approx([2 * sure])
    assert Detection().value(Answer(), None).tolist() == pytest.approx([2 * sure])
    with pytest.raises(DataError, match="labels run from 5 to 5, but the model scores 2 classes"):
        Detection().value(Answer(), [wanted[0] | {"class_labels": torch.tensor([5])}])


class Detector(nn.Module):
    """Takes a list of images of any size, and returns the boxes that a threshold leaves, in dicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU())
        self.shared = nn.Conv2d(24, 24, 3, padding=1)
        self.scores, self.sizes = nn.Conv2d(24, 3, 1), nn.Conv2d(24, 4, 1)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        sides = [max(image.shape[d] for image in images) for d in (1, 2)]
        x = torch.stack([F.pad(i, (0, sides[1] - i.shape[2], 0, sides[0] - i.shape[1])) for i in images])
        x = self.body(x)
        maps = [self.shared(level).relu() for level in (x, F.max_pool2d(x, 2))]  # several sizes
        scores = torch.cat([self.scores(level).flatten(2) for level in maps], 2).sigmoid().transpose(1, 2)
        sizes = torch.cat([self.sizes(level).flatten(2) for level in maps], 2).exp().transpose(1, 2)
        places = torch.arange(scores.shape[1], device=x.device, dtype=x.dtype)[None, :, None] % 7
        boxes = torch.cat([places - sizes[..., :2], places + sizes[..., 2:]], 2)
        return [self._chosen(*one) for one in zip(scores, boxes, strict=True)]

    def _chosen(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        best, labels = scores.max(1)
        order = best.topk(20).indices
        return {"boxes": boxes[order], "scores": best[order], "labels": labels[order]}


def pictures(count: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.rand(3, 24, 24 + 8 * (i % 2), generator=draw) for i in range(count)]


def labelled(net: nn.Module, images: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[dict[str, Tensor], ...]]:
    """A batch as torchvision's loaders make it. Targets are some of the boxes that the network finds."""
    with torch.no_grad():
        found = net(images)
    return tuple(images), tuple({"boxes": one["boxes"][::3], "labels": one["labels"][::3]} for one in found)


@pytest.mark.parametrize("criterion", [LRP(), Taylor()])
def test_no_branch_of_a_detector_is_worthless(criterion: Any) -> None:
    net = Detector()
    scores = sc.score(net, [labelled(net, pictures(3))], criterion)
    assert {site.path for site, values in scores.units.items() if values.any()} >= {
        "shared",
        "scores",
        "sizes",
        "body.2",
    }


@pytest.mark.parametrize("criterion", [LRP(), Taylor()])
def test_what_only_chooses_starts_by_itself(criterion: Any) -> None:
    class Chooser(Detector):
        """The score that decides which boxes are returned is not returned itself."""

        def __init__(self) -> None:
            super().__init__()
            self.rpn = nn.ModuleDict({"head": nn.Conv2d(24, 3, 1)})

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            order = self.rpn["head"](self.body(torch.stack(images))).flatten(1).topk(4).indices
            found = super().forward(images)
            return [{name: t[i] for name, t in one.items()} for one, i in zip(found, order % 20, strict=True)]

    net = Chooser()
    images = [torch.rand(3, 24, 24) for _ in range(3)]
    scores = sc.score(
        net, [((images,), None)], replace(criterion, **{"start" if isinstance(criterion, LRP) else "loss": Detection()})
    )
    assert all(values.any() for site, values in scores.units.items() if site.path == "rpn.head")
    with pytest.raises(DataError, match="no module `nothing`"):
        sc.score(net, [((images,), None)], LRP(start=Detection(inner=("nothing",))))


@pytest.mark.parametrize("criterion", ["lrp", "taylor", "weight", "activation"])
def test_a_detector_with_lists_of_images_goes_through_everything(criterion: str) -> None:
    net = Detector()
    loader = [labelled(net, pictures(3, seed)) for seed in range(3)]
    result = sc.prune(net, loader, criterion, remove=0.4, repair=None, progress=False)
    images = pictures(2, 9)
    found = result.model(images)
    assert [sorted(one) for one in found] == [["boxes", "labels", "scores"]] * 2
    assert result.cost_after.macs < 0.8 * result.cost_before.macs


def test_a_repair_of_a_detector_needs_no_labels() -> None:
    net = Detector()
    loader = [((pictures(4, seed),), None) for seed in range(3)]
    result = sc.prune(net, loader, "weight", remove=0.4, repair="best", progress=False)
    plain = sc.prune(net, loader, "weight", remove=0.4, repair=None, progress=False)
    images = pictures(8, 5)

    def errors(model: nn.Module) -> float:
        wanted, made = [], []
        for one, into in ((net, wanted), (model, made)):
            hook = one.get_submodule("scores").register_forward_hook(lambda m, i, o, into=into: into.append(o))
            with torch.no_grad():
                one(images)
            hook.remove()
        return float((wanted[0] - made[0]).square().mean())

    assert errors(result.model) < 0.5 * errors(plain.model)


# -- own goals, and what is refused ------------------------------------------------------------------------------------
def test_a_function_starts_relevance_where_its_number_comes_from() -> None:
    net = Net(3)
    start = torch.zeros(4, 3, 8, 8)
    start[:, 1, 2:4] = 1.0
    by_number = units(net, (X, None), lambda output, targets: output[:, 1, 2:4].sum())
    by_relevance = units(net, (X, None), lambda output, targets: start)
    expected = epsilon_relevance(net, X, start)
    for found in (by_number, by_relevance):
        torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-6)


def test_a_goal_sees_all_of_several_outputs_and_a_function_the_first() -> None:
    net = Net(3, lambda x: (x, x.mean((2, 3))))

    class Second(Goal):
        def value(self, output: Any, targets: Any) -> Tensor:
            return output[1][:, 0]

    found = units(net, (X, None), Second())
    out = Net(3)(X).detach()
    start = torch.zeros(4, 3, 8, 8)
    start[:, 0] = (out / 64 / out.mean((2, 3), keepdim=True))[:, 0]
    torch.testing.assert_close(found.float(), epsilon_relevance(net, X, start), rtol=1e-3, atol=1e-6)
    heat = sc.explain(net, X, Second(), composite=Epsilon(1e-9))
    assert heat.heat.shape == (4, 12, 12)
    assert sc.score(net, (X, None), Taylor(loss=Second())).units
    for how in (
        LRP(start=lambda output, targets: output[:, 1].sum()),
        Taylor(loss=lambda output, targets: output.mean()),
    ):
        with pytest.warns(SecateurWarning, match=r"output\[0\] is taken"):
            assert sc.score(net, (X, None), how).units
    with pytest.warns(SecateurWarning, match=r"output\[0\] is taken"):
        assert sc.explain(net, X, torch.ones_like).heat.shape == (4, 12, 12)


@pytest.mark.parametrize("read", [lambda x: {"a": x, "b": 2 * x}, lambda x: [x, 2 * x], lambda x: (x, 2 * x)])
def test_functions_of_the_output_are_as_before_where_there_are_several(read: Any) -> None:
    single, several = Net(3), Net(3, read)
    with pytest.warns(SecateurWarning, match="is taken for its answer"):
        found = sc.explain(several, X, torch.ones_like)
    torch.testing.assert_close(found.heat, sc.explain(single, X, torch.ones_like).heat)


@pytest.mark.parametrize("several", [lambda y, z: {"kind": y, "size": z}, lambda y, z: (y, z)])
def test_a_goal_may_read_several_targets_of_each_sample(several: Any, tmp_path: Path) -> None:
    """By the formula: relevance starts at what the class and the quantity of each sample choose."""

    class Both(Goal):
        def value(self, output: Any, targets: Any) -> Tensor:
            kind, size = targets.values() if isinstance(targets, dict) else targets
            return output.mean((2, 3)).gather(1, kind[:, None])[:, 0] + size * output[:, 0, 0, 0]

        def loss(self, output: Any, targets: Any) -> Tensor:
            return -self.value(output, targets).mean()

    net, y, z = Net(3), torch.tensor([2, 0, 1, 1]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    slope = torch.zeros(4, 3, 8, 8)  # what each answer adds to the value
    slope[torch.arange(4), y] = 1 / 64
    slope[:, 0, 0, 0] += z
    expected = epsilon_relevance(net, X, slope)
    for data in ((X, several(y, z)), [(X[:2], several(y[:2], z[:2])), (X[2:], several(y[2:], z[2:]))]):
        found = units(net, data, Both())
        torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-6)
    run = partial(sc.prune, net, criterion=Taylor(loss=Both()), remove=0.5, schedule=0.25, progress=False)
    assert run((X, several(y, z)), checkpoint=tmp_path / "run.safetensors").model.second.in_channels == 6
    with pytest.raises(DataError, match="4 inputs but 3 targets"):
        run((X, several(y, z[:3])))
    with pytest.raises(DataError, match="no tensor of class numbers"):
        sc.score(net, (X, several(y, z)), "taylor")
    with pytest.raises(DataError, match="no list of numbers"):  # boxes: a batch of a detector, which stands in a list
        run((X, ({"boxes": torch.rand(4, 4)}, *[{"boxes": torch.rand(1, 4)}] * 3)))


def test_own_goals_are_a_class_with_one_method() -> None:
    class Corner(Goal):
        def value(self, output: Any, targets: Any) -> Tensor:
            return output[:, 0, 0, 0]

    net = Net(3)
    assert sc.score(net, (X, None), LRP(start=Corner())).units
    assert sc.score(net, (X, None), Taylor(loss=Corner())).units


def test_what_does_not_fit_is_refused() -> None:
    net = Net(3)
    with pytest.raises(DataError, match="Segmentation does not fit"):
        sc.score(net, (X, torch.arange(4)), LRP(start=Segmentation()))
    with pytest.raises(DataError, match="masks hold classes from 0 to 7"):
        Segmentation().value(net(X), MASKS.clamp_max(0) + 7 * (MASKS > 0))
    with pytest.raises(DataError, match="NextToken does not fit"):
        NextToken().value(net(X), None)
    logits = torch.rand(1, 4, 5)
    for wrong in (7, -1):
        with pytest.raises(DataError, match=f"labels run from {min(wrong, 1)} to {max(wrong, 3)}"):
            NextToken().value(logits, torch.tensor([[0, 1, wrong, 3]]))
    with pytest.raises(DataError, match="masks hold real numbers"):
        Segmentation().value(net(X), torch.rand(4, 8, 8))
    with pytest.raises(DataError, match="Regression does not fit"):  # as many numbers, channels last
        Regression().loss(torch.rand(2, 3, 4, 4), torch.rand(2, 4, 4, 3))
    assert Similarity().value(torch.zeros(2, 3), None).tolist() == [0, 0]
    with pytest.raises(DataError, match="no list of boxes"):
        Detection().value(net(X), None)
    with pytest.raises(DataError, match="a dict with `boxes`"):
        Detection().value([{"boxes": torch.rand(1, 4), "scores": torch.rand(1)}], torch.arange(3))
    with pytest.raises(CriterionError, match="has no loss"):
        LRP(loss=F.mse_loss)
    with pytest.raises(DataError, match="the starting relevance has shape 3"):
        sc.score(net, (X, None), LRP(start=lambda output, targets: 3))
