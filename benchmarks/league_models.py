"""The smaller ResNet-56s of the league: whose units were chosen how, and what their training shares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.league_steps import INPUTS
from benchmarks.resnet56 import ResNet
from secateur.loop import Schedule
from secateur.recover.samples import shifted
from secateur.recover.schedule import CURVES
from secateur.repair import Repair

SPEEDS, LENGTHS, SEEDS = (2.1, 2.55, 4.0), (0, 1, 5, 20, 100), (0, 1, 2)
# The defaults of `sc.recover`, of which the rate is 0.01 for batches of 64: what is known is not to be forgotten.
RATE, TEACHER = 0.08, 0.9
ERASED = 8  # the side of an erased square
# What widths are padded to. Matrix units read eight channels at a time. Blocks have few different widths, so that few
# programs are compiled; where images are small, so is what further channels cost.
ALIGNED = 8
MULTIPLES = {"layer1": ALIGNED, "layer2": 16, "layer3": 16}
SCORED = 500  # images that units are scored on, and that repair uses


def augment(images: Tensor) -> Tensor:
    """Shifted, mirrored, and a square of each image erased. The teacher sees the same."""
    images = shifted(images, 4)
    size, half = images.shape[-1], ERASED // 2
    middle = torch.randint(size, (2, len(images), 1), device=images.device)
    rows, columns = (torch.arange(size, device=images.device) - middle + half).unbind()
    inside = [(along >= 0) & (along < ERASED) for along in (rows, columns)]
    return images.masked_fill((inside[0][:, :, None] & inside[1][:, None])[:, None], 0.0)


def mixed(images: Tensor) -> Tensor:
    """Shifted, mirrored, and half of the images with a rectangle of another image. The teacher sees the same."""
    images = shifted(images, 4)
    count, device, size = len(images), images.device, images.shape[-1]
    # The area of a rectangle is uniform between nothing and everything, as in CutMix.
    half = size * torch.rand(count, 1, device=device).sqrt() / 2
    middle = size * torch.rand(2, count, 1, device=device)
    rows, columns = ((torch.arange(size, device=device) + 0.5 - middle).abs() < half).unbind()
    chosen = torch.rand(count, 1, 1, 1, device=device) < 0.5
    return torch.where((rows[:, :, None] & columns[:, None])[:, None] & chosen, images.flip(0), images)


def crops(images: Tensor) -> Tensor:
    """Shifted and mirrored, as everybody does it."""
    return shifted(images, 4)


def steps(done: float) -> float:
    """A tenth of the rate from 60 % of the training on, a hundredth from 80 % on."""
    return 0.1 ** ((done >= 0.6) + (done >= 0.8))


@dataclass(frozen=True)
class Recipe:
    """How students are trained. Those that differ in it are not trained together."""

    name: str = ""
    batch_size: int = 500
    augment: Callable[[Tensor], Tensor] = augment
    curve: Callable[[float], float] = CURVES["cosine"]
    #: The teacher's share in the loss, and whether it answers mirrored images too, so that the mean counts.
    share: float = TEACHER
    both: bool = False


DECAY = 5e-4  # of the weights, in all recipes
USUAL, MIXTURES = Recipe(), Recipe("mixtures", augment=mixed, share=1.0, both=True)
#: Teacher and labels count alike.
EQUAL = Recipe("equal shares", share=0.5)
#: That of DepGraph's experiments (`reproduce/main.py` of Torch-Pruning), with a rate of 0.01.
SMALL = Recipe("small batches", 128, crops, steps)


@dataclass(frozen=True)
class Row:
    """A line of the table: how units are chosen, whether they are repaired, whether there is a teacher, how it is
    trained, and whether the teacher's share goes down as the rate does."""

    choice: str
    repair: bool = False
    teacher: bool = False
    recipe: Recipe = USUAL
    rate: float = RATE
    fading: bool = False

    def __str__(self) -> str:
        teacher = "fading teacher" if self.fading else "teacher"
        named = {"repair": self.repair, teacher: self.teacher, self.recipe.name: bool(self.recipe.name)}
        more = [word for word, is_there in named.items() if is_there]
        rate = f", rate {self.rate:g}" if self.rate != RATE else ""
        return " + ".join([self.choice, *more]) + rate

    @property
    def share(self) -> float:
        """The teacher's share in the loss."""
        return self.recipe.share if self.teacher else 0.0


@dataclass(frozen=True)
class Job:
    row: Row
    speed: float
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        name = f"{self.row} /{self.speed:g} {self.epochs} epochs seed {self.seed}"
        return name.replace(",", "").replace(" ", "-").replace("/", "by")

    @property
    def prepared(self) -> str:
        repair = "-repair" if self.row.repair else ""
        seed = "" if self.row.choice == MAGNITUDE.choice else f"-{self.seed}"  # which looks at no data
        return f"{self.row.choice.replace(' ', '-')}{repair}-{self.speed:g}{seed}.safetensors"


OURS = Row("lrp", True, True)
MAGNITUDE, TAYLOR = Row("Torch-Pruning magnitude"), Row("Torch-Pruning taylor")
PARTS = [Row("lrp", True), Row("lrp", False, True), Row("lrp")]
OTHERS = [Row(name, True, True) for name in ("taylor", "weight", "random")]
FAIR = [replace(MAGNITUDE, teacher=True), replace(TAYLOR, teacher=True)]
#: The same share of every layer, which is Torch-Pruning's own way for ResNet-50; for ResNet-56, all layers compete.
EVEN = [Row("Torch-Pruning even magnitude"), Row("Torch-Pruning even taylor")]
PATIENT, RIVAL = (replace(row, teacher=True, recipe=MIXTURES, rate=0.2) for row in (OURS, MAGNITUDE))
WHOLE = Row("nothing removed")  # the same training for the whole network: what the others could reach at best
#: The rate that this network is usually trained with from scratch (0.1 for batches of 256), for batches of 500: first
#: for the whole network, then for what is cut out of that.
HIGH = 0.2
FIRST = replace(WHOLE, rate=HIGH)
SECOND = [replace(row, recipe=EQUAL, rate=HIGH) for row in (OURS, MAGNITUDE)]
#: The field's rate for this network once it is pruned (0.01 for batches of 128), for batches of 500.
GENTLE = 0.04
THIRD = [replace(row, rate=GENTLE) for row in (PARTS[0], replace(OURS, fading=True), MAGNITUDE)]
FIELD = [replace(row, recipe=SMALL, rate=0.01) for row in (OURS, PARTS[0], MAGNITUDE, WHOLE)]
# Other rates, for short runs.
SWEEP = [replace(OURS, rate=rate) for rate in (0.005, 0.02, 0.2)]
SWEEP += [replace(MAGNITUDE, rate=rate) for rate in (0.02, 0.2)]


# -- smaller models ----------------------------------------------------------------------------------------------------
def shaped(state: dict[str, Tensor]) -> nn.Module:
    """A ResNet-56 with the widths of these tensors."""
    net = ResNet(len({name.split(".")[1] for name in state if name.startswith("layer1.")}))
    for path, module in net.named_modules():
        weight = state.get(f"{path}.weight")
        if isinstance(module, nn.Conv2d) and weight is not None:
            module.out_channels, module.in_channels = weight.shape[:2]
            module.weight = nn.Parameter(torch.empty_like(weight))
        elif isinstance(module, nn.BatchNorm2d) and weight is not None:
            module.__init__(len(weight))  # type: ignore[misc]
    net.linear = nn.Linear(state["linear.weight"].shape[1], 10)
    net.load_state_dict(state)
    return net


def places(model: nn.Module, multiples: Mapping[str, int]) -> dict[str, list[tuple[Tensor, int]]]:
    """Where the numbers of each tensor lie in one with wider layers: indices along its dimensions, and their sizes.

    A shortcut that widens puts its zeros on both sides, so further channels of one stage lie within those of the next.
    """
    state, found = model.state_dict(), dict[str, list[tuple[Tensor, int]]]()

    def up(count: int, multiple: int) -> tuple[Tensor, int]:
        return torch.arange(count), -(-count // multiple) * multiple

    def note(conv: str, bn: str, outputs: tuple[Tensor, int], inputs: tuple[Tensor, int]) -> None:
        found[f"{conv}.weight"] = [outputs, inputs]
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{bn}.{part}"] = [outputs]

    stream = up(len(state["bn1.weight"]), ALIGNED)
    note("conv1", "bn1", stream, up(state["conv1.weight"].shape[1], INPUTS))
    for path, block in model.named_modules():
        if hasattr(block, "more"):
            inner = up(len(state[f"{path}.bn1.weight"]), multiples[path.partition(".")[0]])
            note(f"{path}.conv1", f"{path}.bn1", inner, stream)
            if half := block.more // 2:
                where, size = stream
                around = [torch.arange(half), half + where, half + size + torch.arange(half)]
                stream = torch.cat(around), size + 2 * half
            note(f"{path}.conv2", f"{path}.bn2", stream, inner)
    classes = up(len(state["linear.bias"]), 1)
    return found | {"linear.weight": [classes, stream], "linear.bias": [classes]}


def _within(tensor: Tensor, where: list[tuple[Tensor, int]]) -> tuple[Tensor, ...]:
    index = [along.to(tensor.device) for along, _ in where]
    return tuple(along.view([-1 if i == j else 1 for j in range(len(index))]) for i, along in enumerate(index))


def padded(model: nn.Module, multiples: Mapping[str, int] = MULTIPLES) -> nn.Module:
    """The same function with layers as wide as a multiple, which is what the GPU's matrix units need.

    The further channels are 0, and so are all their gradients: the zeros before and behind them keep each other.
    """
    state = dict(model.state_dict())
    for name, where in places(model, multiples).items():
        old = state[name]
        state[name] = old.new_zeros([size for _, size in where] + list(old.shape[len(where) :]))
        state[name][_within(old, where)] = old
    return shaped(state)


def unpadded(model: nn.Module, like: nn.Module, multiples: Mapping[str, int] = MULTIPLES) -> nn.Module:
    """What was padded, after a look at the other channels."""
    state = dict(model.state_dict())
    for name, where in places(like, multiples).items():
        rest = state[name].clone()
        inside = _within(rest, where)
        state[name] = rest[inside].clone()
        rest[inside] = 0
        assert not rest.any(), f"{name}: channels that were 0 are not any more"
    return shaped(state).to(rest.device)


def macs(model: nn.Module) -> int:
    """Multiplications of convolutions and the linear layer, from the sizes of their weights."""
    positions = {"layer1": 32**2, "layer2": 16**2, "layer3": 8**2, "conv1": 32**2, "linear": 1}
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(m.weight.numel() * positions[path.split(".")[0]] for path, m in layers)


def chosen(net: nn.Module, data: tuple[Tensor, Tensor], job: Job) -> nn.Module:
    """The smaller model of a job, before training."""
    if job.row.choice == WHOLE.choice:
        return copy.deepcopy(net)
    x, y = data
    index = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 + job.seed))[:SCORED].to(x.device)
    samples = x[index], y[index]
    if job.row.choice.startswith("Torch-Pruning"):
        # It cannot follow shortcuts that pad channels, so the layers that meet there are left alone.
        return by_torch_pruning(net, samples, job, macs, lambda p: p in ("conv1", "linear") or p.endswith("conv2"))
    criterion: Any = sc.criteria.Random(seed=job.seed) if job.row.choice == "random" else job.row.choice
    repair = Repair("ridge", copies=2, samples=SCORED) if job.row.repair else None
    schedule = Schedule(one_shot=True, rescore=False, seed=job.seed, batch_size=100)
    result = sc.prune(net, samples, criterion, keep={"macs": 1 / job.speed}, schedule=schedule, repair=repair,
                      progress=False)  # fmt: skip
    return result.model


def by_torch_pruning(
    net: nn.Module, samples: tuple[Tensor, Tensor], job: Any, count: Callable[[nn.Module], int],
    stays: Callable[[str], bool],
) -> nn.Module:  # fmt: skip
    """The same MACs (`count`) by a rival. Layers compete, but those that must stay; if "even", each gives as much."""
    import torch_pruning as tp

    whole, choice, known = count(net), getattr(job, "row", job).choice, copy.deepcopy(net)
    kinds = {"magnitude": tp.importance.GroupMagnitudeImportance, "taylor": tp.importance.GroupTaylorImportance}
    everywhere = " even " not in choice
    if choice.endswith("taylor"):
        nn.functional.cross_entropy(known(samples[0]), samples[1]).backward()

    def pruned(share: float) -> nn.Module:
        model = copy.deepcopy(known)
        pruner = tp.pruner.BasePruner(
            model, samples[0][:1], kinds[choice.split()[-1]](), global_pruning=everywhere, pruning_ratio=share,
            max_pruning_ratio=1.0, ignored_layers=[m for path, m in model.named_modules() if stays(path)],
        )  # fmt: skip
        for mine, theirs in zip(model.parameters(), known.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        pruner.step()
        model.zero_grad(set_to_none=True)
        return model

    low, high = 0.0, 0.99
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if count(pruned(middle)) > whole / job.speed else (low, middle)
    return pruned(high)


def folded(net: nn.Module) -> nn.Module:
    """The teacher with its batch norms inside its convolutions: the same answers, in half of the time."""
    made = copy.deepcopy(net).eval()
    for owner in [m for m in made.modules() if hasattr(m, "bn1")]:
        for conv, bn in (("conv1", "bn1"), ("conv2", "bn2")):
            if hasattr(owner, conv):
                setattr(owner, conv, nn.utils.fuse_conv_bn_eval(getattr(owner, conv), getattr(owner, bn)))
                setattr(owner, bn, nn.Identity())
    return made
