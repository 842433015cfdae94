"""Parts of the training: blocks of models that answer at positions, text as it is drawn, adapters, hits, identities."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.errors import FileFormatError, SecateurError
from secateur.plans import Limits
from secateur.recover import Recover, Recovered, write_text
from secateur.recover.blocks import Blocks
from secateur.recover.loss import Objective
from secateur.recover.text import merged, with_adapters
from secateur.running.identity import described
from secateur.running.targets import Reader


def tiny(kind: str, **options: Any) -> nn.Module:
    """A language model of transformers, at random."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2, **options
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, **options,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    # Random weights are all but the same for every token. So large ones make a language that has something to learn.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20) if parameter.ndim > 1 else None
    return model.eval()


# -- blocks ------------------------------------------------------------------------------------------------------------
class Segmenter(nn.Module):
    """(samples, classes, height, width), and two blocks. (No batch norm: the formula below has to be short.)"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 1)) for a, b in ((3, 6), (6, 8))
        )
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def case(kind: str) -> tuple[nn.Module, nn.Module, Any, list[str], Callable[[nn.Module], Tensor], int]:
    """A whole model, a smaller one with blocks of the same width, inputs, names of blocks, logits, and their axis."""
    if kind == "segmentation":
        torch.manual_seed(0)
        whole, x = Segmenter().eval(), torch.randn(10, 3, 6, 6)
        limits = Limits(only=["blocks.0.0", "blocks.1.0"])
        small = sc.prune(whole, (x, None), "weight", remove=0.3, limits=limits, repair=None, progress=False).model
        return whole, small, x, ["blocks.0", "blocks.1"], lambda model: model(x), 1
    whole, ids = tiny("llama"), torch.randint(40, (6, 7), generator=torch.Generator().manual_seed(1))
    limits = Limits(only=[f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("gate", "up")])
    small = sc.prune(whole, [({"input_ids": ids}, None)], "weight", remove=0.1, limits=limits, repair=None,
                     progress=False).model  # fmt: skip
    names = ["model.layers.0", "model.layers.1"]
    return whole, small, {"input_ids": ids}, names, lambda model: model(input_ids=ids, use_cache=False).logits, 2


def states(model: nn.Module, names: list[str], call: Callable[[nn.Module], Tensor]) -> tuple[list[Tensor], Tensor]:
    """What the blocks return, and what the model answers."""
    found: list[Tensor] = []
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, given, made: found.append(made if isinstance(made, Tensor) else made[0])
        )
        for name in names
    ]
    answer = call(model)
    for hook in hooks:
        hook.remove()
    return found, answer


def distance(
    whole: nn.Module, small: nn.Module, names: list[str], call: Callable[[nn.Module], Tensor], axis: int
) -> Tensor:
    """The mean over blocks of Σ w (s - t)² / Σ w t², w = mean |t · ∂(largest logits) / ∂t| by channel, 1 on average."""
    theirs, answer = states(whole, names, call)
    slopes = torch.autograd.grad(answer.amax(axis).sum(), theirs)
    mine, _ = states(small, names, call)
    parts = []
    for s, t, slope in zip(mine, theirs, slopes, strict=True):
        assert s.shape == t.shape
        others = [d for d in range(t.ndim) if d != axis]
        w = (t * slope).abs().sum(others, keepdim=True).detach()
        t = t.detach()
        parts.append((w * (s - t) ** 2).sum() / (w * t**2).sum())
    return sum(parts[1:], parts[0]) / len(parts)


@pytest.mark.parametrize("kind", ["segmentation", "llama"])
def test_blocks_of_models_that_answer_at_positions(kind: str) -> None:
    """(They "had no block": where the classes lie was found by another run, which overwrote what blocks returned.)"""
    whole, small, inputs, names, call, axis = case(kind)
    blocks = Blocks.of(small, whole, (small, whole), inputs)
    assert list(blocks.kept) == names
    with blocks:
        call(whole), call(small)
        found = blocks.loss()
    expected = distance(whole, small, names, call, axis)
    assert float(expected.detach()) > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["segmentation", "llama"])
def test_the_first_step_with_blocks_is_that_of_the_formula(kind: str) -> None:
    """In the first step it is found out where the student's classes lie. That runs it again, on one sample."""
    whole, small, inputs, names, call, axis = case(kind)
    settings = Recover(epochs=1, lr=0.1, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=0.0, teacher=1.0,
                       temperature=1.0, schedule="constant", batch_size=10, blocks=3.0)  # fmt: skip
    done = sc.recover(small, whole, (inputs, None), settings, progress=False)
    twin = copy.deepcopy(small)
    student, teacher = call(twin).movedim(axis, -1), call(whole).movedim(axis, -1).detach()
    p = teacher.softmax(-1)
    divergence = (p * (p.log() - student.log_softmax(-1))).sum(-1).mean()
    matched = 3 * distance(whole, twin, names, call, axis)
    alone = torch.autograd.grad(matched, twin.get_submodule(names[0]).parameters(), retain_graph=True)
    assert max(float(slope.abs().max()) for slope in alone) > 1e-3
    loss = divergence + matched
    loss.backward()
    assert done.history[0].loss == pytest.approx(float(loss.detach()), rel=1e-4)
    for (name, mine), theirs in zip(done.model.named_parameters(), twin.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(
            mine.detach(),
            (theirs - 0.1 * theirs.grad).detach(),
            rtol=1e-4,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_held_out_samples_do_not_take_the_place_of_those_that_are_trained_on() -> None:
    whole, small, x, *_ = case("segmentation")
    options = {"epochs": 2, "lr": 0.01, "blocks": 3.0, "batch_size": 10, "progress": False}
    plain = sc.recover(small, whole, (x, None), **options)
    held = sc.recover(small, whole, (x, None), test=(x[:3] * 2, None), **options)
    assert [row.loss for row in held.history] == [row.loss for row in plain.history]
    assert held.history[0].held_out is not None


# -- text --------------------------------------------------------------------------------------------------------------
ODD: list[dict[str, Any]] = [
    {"repetition_penalty": 5.0}, {"num_beams": 3}, {"no_repeat_ngram_size": 1}, {"min_p": 0.5}, {"typical_p": 0.2},
    {"suppress_tokens": list(range(3, 30))}, {"sequence_bias": [[[5], 20.0]]}, {"return_dict_in_generate": True},
    {"num_return_sequences": 3}, {"temperature": 0.1, "top_k": 1}, {"output_scores": True, "epsilon_cutoff": 0.3},
    {"guidance_scale": 3.0}, {"begin_suppress_tokens": list(range(3, 30))}, {"max_time": 1e-9}, {"max_length": 5},
]  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny("llama")


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: next(iter(odd)))
def test_text_is_drawn_whatever_the_generation_config_says(llama: nn.Module, odd: dict[str, Any]) -> None:
    plain = write_text(llama, 6, 12, seed=3)["input_ids"]
    model: Any = copy.deepcopy(llama)
    for name, value in odd.items():
        setattr(model.generation_config, name, value)
    before = model.generation_config.to_dict()
    assert torch.equal(write_text(model, 6, 12, seed=3)["input_ids"], plain)
    assert model.generation_config.to_dict() == before


def test_text_is_drawn_from_the_probabilities(llama: nn.Module) -> None:
    """The token after `bos` and a random one, against softmax without the mark of the end."""
    ids = write_text(llama, 6000, 4, batch_size=6000)["input_ids"]
    with torch.no_grad():
        logits = llama(input_ids=torch.stack([torch.ones(40, dtype=torch.long), torch.arange(40)], 1)).logits[:, -1]
    logits[:, 2] = -torch.inf
    expected = logits.softmax(-1)
    found = torch.zeros(40, 40).index_put_((ids[:, 1], ids[:, 2]), torch.ones(6000), accumulate=True)
    count = found.sum(1, keepdim=True)
    assert float(expected.max()) > 0.3  # not all the same
    # Pearson's χ² has as many degrees of freedom as there are cells less one in each row.
    wide = (count * expected) >= 5
    cells = ((found - count * expected) ** 2 / (count * expected))[wide]
    assert float(cells.sum()) < len(cells) + 5 * (2 * len(cells)) ** 0.5


# -- adapters ----------------------------------------------------------------------------------------------------------
def test_adapters_of_gpt2_are_trained_and_merged() -> None:
    """Its layers are `Conv1D`, whose weights lie the other way round."""
    pytest.importorskip("peft")
    model = tiny("gpt2")
    ids = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(1))
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    plain = model(input_ids=ids).logits.detach()
    net = with_adapters(copy.deepcopy(model), 2)
    torch.manual_seed(1)
    with torch.no_grad():
        trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        for _, parameter in trained:
            parameter.normal_(std=0.3)
    assert len(trained) == 2 * 2 * 4  # two matrices, of two blocks, at four layers
    adapted = net.eval()(input_ids=ids).logits.detach()
    whole = merged(net)
    torch.testing.assert_close(whole(input_ids=ids).logits.detach(), adapted, rtol=1e-4, atol=1e-4)
    assert float((adapted - plain).abs().max()) > 0.1
    changed = {name for name, tensor in whole.named_parameters() if not torch.equal(tensor, before[name])}
    assert changed == {
        f"transformer.h.{i}.{layer}.weight"
        for i in range(2) for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }  # fmt: skip
    text = write_text(model, 8, 12)
    small = sc.prune(model, [(text, None)], "weight", remove=0.2, progress=False, repair=None)
    done = sc.recover(small, model, text, epochs=1, lr=0.01, lora=2, progress=False)
    assert [n for n, _ in done.model.named_parameters()] == [n for n, _ in small.model.named_parameters()]
    for (name, a), b in zip(done.model.named_parameters(), small.model.parameters(), strict=True):
        rank = int(torch.linalg.matrix_rank((a - b).detach(), atol=1e-5)) if a.ndim == 2 else 0
        assert rank in ((1, 2) if ".c_" in name and a.ndim == 2 else (0,)), name


def test_adapters_of_plain_networks() -> None:
    pytest.importorskip("peft")
    with pytest.raises(SecateurError, match=r"Linear is itself a linear layer.*Fix: lora=0"):
        with_adapters(nn.Linear(3, 3), 2)
    with pytest.raises(SecateurError, match="ReLU has no linear layer"):
        with_adapters(nn.ReLU(), 2)
    # "0" is a linear layer, and "1.0" ends with the same name, but is none.
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    adapted = with_adapters(net, 2)
    assert sum(p.requires_grad for p in adapted.parameters()) == 4


# -- accuracy ----------------------------------------------------------------------------------------------------------
def hits(logits: Tensor, targets: Any) -> tuple[float, float] | None:
    """How many are right, and how many there are, with a loss of one's own; None if targets are no classes."""
    objective = Objective(Reader(nn.Identity()), 0.0, 1.0, lambda output, known: output.sum())
    _, right = objective(torch.zeros(len(logits), 2), targets, logits, None)
    assert bool(right.isnan().all()) or bool(right.isfinite().all())
    return None if bool(right.isnan().all()) else (float(right[0]), float(right[1]))


def test_quantities_have_no_accuracy() -> None:
    """(A regression of numbers around 10 had one of 100 %.)"""
    logits = torch.tensor([[9.0], [11.0], [-1.0], [10.0]])
    quantities = torch.tensor([9.5, 10.5, 10.0, 0.0])
    for known in (quantities, quantities[:, None], quantities.long(), torch.tensor([0.0, 1.0, 0.5, 1.0])):
        assert hits(logits, known) is None
        assert hits(logits[:, 0], known) is None
    for known in (torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([1, 0, 0, 1]), torch.tensor([[1], [0], [0], [1]])):
        assert hits(logits, known) == (3, 4)
        assert hits(logits[:, 0], known) == (3, 4)
    assert hits(logits, torch.tensor([1, -100, 0, 0])) == (2, 3)
    assert hits(logits, torch.tensor([1.0, 0.0, 0.0, 1.0]).bool()) == (3, 4)


def test_targets_of_another_shape_have_no_accuracy() -> None:
    logits = torch.eye(3)
    assert hits(logits, torch.tensor([0, 1, 1])) == (2, 3)
    assert hits(logits, torch.tensor([0, -100, 1])) == (1, 2)
    for known in (torch.eye(3).long(), torch.ones(3, 2).long(), torch.tensor(1), torch.ones(1).long()):
        assert hits(logits, known) is None
    assert hits(torch.zeros(4, 3), torch.ones(4, 3).long()) is None
    assert hits(torch.zeros(4, 1), torch.ones(4, 3).long()) is None
    positions = torch.eye(3).expand(2, 3, 3)  # (samples, classes, positions): each position has its own class
    assert Objective(Reader(nn.Conv1d(3, 3, 1)), 0.0, 1.0, lambda output, known: output.sum())(
        torch.zeros(2, 3, 3), torch.tensor([[0, 1, 2], [0, 0, -100]]), positions, None
    )[1].tolist() == [4, 5]


def test_a_regression_reports_no_accuracy() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x, y = torch.rand(8, 3), 10 + torch.rand(8)
    options = {"teacher": 0.0, "epochs": 1, "lr": 1e-3, "progress": False}
    done = sc.recover(net, None, (x, y), loss=lambda output, known: F.mse_loss(output[:, 0], known), **options)
    assert done.history[0].accuracy is None
    done = sc.recover(net, None, (x, (y > 10.5).float()), **options)
    expected = ((net(x)[:, 0] > 0) == (y > 10.5)).float().mean()
    assert done.history[0].accuracy == pytest.approx(float(expected))


@pytest.mark.parametrize("size", [1, 3, 12])
def test_counts_have_no_accuracy_in_batches_of_any_size(size: int) -> None:
    """Numbers from 0 to 3: batches of a few may hold 0 and 1 alone."""
    torch.manual_seed(0)
    x, counts = torch.rand(12, 3), torch.tensor([0.0, 1, 2, 1, 0, 3, 1, 1, 0, 0, 1, 2])
    classes = counts.clamp_max(1)

    def accuracies(trained: Tensor, held: Tensor) -> tuple[float | None, float | None]:
        done = sc.recover(
            nn.Linear(3, 1), None, (x, trained), test=(x, held), teacher=0.0, epochs=1, batch_size=size,
            loss=lambda output, known: F.poisson_nll_loss(output[:, 0], known), progress=False,
        )  # fmt: skip
        return done.history[0].accuracy, done.history[0].held_out_accuracy

    assert accuracies(counts, counts) == (None, None)
    kept, known = accuracies(counts, classes), accuracies(classes, counts)
    assert kept[0] is None is known[1]
    assert kept[1] is not None is not known[0]


def test_batches_without_labels_take_no_part_in_the_accuracy() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 4), torch.rand(8, 3)
    right = net(x).argmax(1)
    batches = [(x[:4], right[:4]), (x[4:], None)]
    assert sc.recover(net, net, batches, epochs=1, lr=1e-6, progress=False).history[0].accuracy == 1


# -- by what a run is recognised ---------------------------------------------------------------------------------------
def scaled(images: Tensor, by: float = 1.0) -> Tensor:
    return images * by


class Jitter:
    """No transform of torchvision; its repr has an address."""

    def __call__(self, images: Tensor) -> Tensor:
        return images


class Shift(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by, self.calls = by, 0

    def extra_repr(self) -> str:
        return f"by={self.by}"

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images + self.by


def pairs() -> list[tuple[Any, Any]]:
    """Callables that differ in their arguments alone."""
    v1 = pytest.importorskip("torchvision.transforms")
    v2 = pytest.importorskip("torchvision.transforms.v2")
    flip, erase = v2.RandomHorizontalFlip(), v2.RandomErasing()
    found = [
        (v.RandomCrop(8, padding=1), v.RandomCrop(8, padding=4))
        for v in (v1, v2)
    ] + [
        (v.RandomCrop(8, padding=1), v.RandomCrop(8, padding=1, padding_mode="reflect"))
        for v in (v1, v2)
    ] + [(v.Compose([v.RandomHorizontalFlip()]), v.Compose([v.RandomErasing()])) for v in (v1, v2)]  # fmt: skip
    return [
        *found,
        (nn.Sequential(flip), nn.Sequential(erase)),
        (v2.RandomApply([erase], p=0.1), v2.RandomApply([erase], p=0.2)),  # its repr does not tell p
        (v2.ToDtype(torch.float32), v2.ToDtype(torch.float64)),
        (v2.Lambda(scaled), v2.Lambda(hits)),
        (v1.Compose([v1.Lambda(scaled)]), v1.Compose([v1.Lambda(hits)])),
        (functools.partial(scaled, by=2.0), functools.partial(scaled, by=3.0)),
        (functools.partial(scaled), functools.partial(hits)),
        (functools.partial(hits, torch.zeros(3)), functools.partial(hits, torch.ones(3))),
        (functools.partial(scaled, by=erase), functools.partial(scaled, by=flip)),
        (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.2)),
        (nn.CrossEntropyLoss(torch.ones(3)), nn.CrossEntropyLoss(torch.arange(3.0))),
        (Shift(0.1), Shift(0.2)),
    ]


def test_transforms_are_told_apart_by_their_arguments() -> None:
    for one, other in pairs():
        a, b = described(one), described(other)
        assert a != b, one
        assert described(copy.deepcopy(one)) == a
        assert " at 0x" not in a + b
    assert described(len) == "builtins.len"
    assert described({"epochs": 3, "of": ("a", 1.0, None), "one": (1,)}) == repr(
        {"epochs": 3, "of": ("a", 1.0, None), "one": (1,)}
    )
    assert described({"loss": scaled}) == "{'loss': " + f"{scaled.__module__}.scaled" + "}"
    assert described(Jitter()) == f"{Jitter.__module__}.Jitter"


def test_a_transform_that_has_run_is_still_the_same() -> None:
    """A counter, or the mode of training, is no setting."""
    transform = Shift(0.1)
    before = described(transform)
    transform.eval()(torch.zeros(2))
    assert described(transform) == before
    loss = nn.MSELoss()
    assert described(loss) == described(copy.deepcopy(loss).eval())


def test_identities_are_the_same_in_a_new_process() -> None:
    code = (
        "import test_recover_parts as t; from secateur.running.identity import described\n"
        "print([described(c) for p in t.pairs() for c in p], described(t.Jitter()), described({'a', 'b', 'c', 'd'}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PATH": ""},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1
    assert "RandomErasing" in found.pop()


def test_a_stopped_run_does_not_go_on_with_another_augmentation(tmp_path: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    data = torch.rand(8, 3, 8, 8), torch.arange(8) % 2
    file = tmp_path / "run.safetensors"

    def run(augment: Any) -> Recovered:
        return sc.recover(net, None, data, teacher=0.0, epochs=1, augment=augment, checkpoint=file, progress=False)

    first = run(v2.RandomCrop(8, padding=1))
    again = run(v2.RandomCrop(8, padding=1))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    with pytest.raises(FileFormatError, match="settings"):
        run(v2.RandomCrop(8, padding=4))
