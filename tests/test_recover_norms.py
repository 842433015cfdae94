"""Batch norms before training: their numbers become those of the data, and the model computes the same."""

import copy
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import secateur as sc
from secateur.recover import Recover
from secateur.recover.norms import settle
from secateur.recover.samples import Samples


class Net(nn.Module):
    """Two batch norms, of which the second is used twice, and one of vectors."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.again, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.last, self.norm3 = nn.Linear(width, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = F.relu(self.norm1(self.first(x)))
        x = F.relu(self.norm2(self.again(x)))
        x = F.relu(self.norm2(input=self.again(x)))
        return self.norm3(self.last(x.mean((2, 3))))


def known(seed=0, net=Net, **sizes):
    """A network that has learnt from other data than those of the tests."""
    torch.manual_seed(seed)
    made = net(**sizes)
    with torch.no_grad():
        for _ in range(5):
            made.train()(2 * torch.randn(20, 3, 5, 5) + 0.5)
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made.eval()


def images(count=40, seed=1):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 5, 5, generator=drawn), torch.randint(4, (count,), generator=drawn)


def samples(data, size=100, augment=None):
    return Samples(data, size, augment, None, torch.device("cpu"))


def settled(net, data, size=100):
    return settle(net, samples(data, size), 0, lambda model, x: model(x))


def state(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def changed(net, before):
    return [name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9), st.integers(2, 50))
def test_the_answers_stay_and_training_begins_with_them(seed, width, count):
    net, data = known(seed, width=width), images(count, seed)
    # Used twice, a batch norm cannot have the numbers of both calls.
    net.forward = lambda x: net.norm3(
        net.last(F.relu(net.norm2(net.again(F.relu(net.norm1(net.first(x)))))).mean((2, 3)))
    )
    before = net(data[0]).detach()
    assert settled(net, data)
    torch.testing.assert_close(net(data[0]), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    trained = net.train()(data[0])  # by the batch's own numbers
    torch.testing.assert_close(trained, before, rtol=1e-2, atol=1e-2 * float(before.abs().max()))


def test_the_numbers_are_mean_and_variance_of_all_inputs_of_all_calls():
    net, (x, y) = known(), images()
    sizes = state(net)
    with torch.no_grad():
        first = net.first(x)
        second = net.again(F.relu(net.norm1(first)))
        third = net.again(F.relu(net.norm2(second)))
        both = torch.cat([second, third])
        last = net.last(F.relu(net.norm2(third)).mean((2, 3)))
    assert settled(net, (x, y), size=7)  # the last batch is smaller
    for norm, seen in ((net.norm1, first), (net.norm2, both), (net.norm3, last)):
        rows = seen.transpose(0, 1).flatten(1)
        torch.testing.assert_close(norm.running_mean, rows.mean(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.running_var, ((rows - rows.mean(1, keepdim=True)) ** 2).mean(1))
    parts = ("weight", "bias", "running_mean", "running_var")
    assert changed(net, sizes) == [f"norm{number}.{part}" for number in (1, 2, 3) for part in parts]
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert not net.training


@pytest.mark.parametrize(
    ("kind", "mean", "close"), [(torch.float64, 1e6, 1e-9), (torch.float64, 0.0, 1e-12), (torch.float32, 1e4, 1e-3)]
)
def test_no_digits_are_lost(kind, mean, close):
    """Neither of inputs in double precision, nor of a variance that is small beside the mean, known or not."""
    (x, y), net = images(), nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(75, 4)).to(kind).eval()
    x = x.to(kind) + mean
    net[0].running_mean.fill_(0.5)
    net[0].running_var.fill_(max(mean**2, 1.0))
    before, rows = net(x).detach(), x.double().transpose(0, 1).flatten(1)
    assert settled(net, (x, y), size=7)
    torch.testing.assert_close(net[0].running_mean, rows.mean(1).to(kind), rtol=1e-7, atol=close)
    torch.testing.assert_close(net[0].running_var, rows.var(1, unbiased=False).to(kind), rtol=close, atol=0)
    torch.testing.assert_close(net(x), before, rtol=0, atol=max(close**0.5, 1e-9) * 1e-2)


def test_a_channel_that_never_changes_stays_finite_and_the_same():
    net, data = known(), images()
    with torch.no_grad():
        net.first.weight[2] = 0
    before = net(data[0]).detach()
    assert settled(net, data)
    torch.testing.assert_close(net(data[0]), before, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(tensor).all() for tensor in net.state_dict().values())
    assert net.norm1.running_var[2] == 0


def test_new_and_frozen_norms_and_those_without_numbers_are_left_alone():
    fresh, frozen, (x, y) = Net().eval(), known(), images()
    for norm in (frozen.norm1, frozen.norm2):
        norm.weight.requires_grad_(False)
    frozen.norm3.bias.requires_grad_(False)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False)
    )
    plain.train()(x)
    for net in (fresh, frozen, plain.eval()):
        before, drawn = state(net), torch.get_rng_state()
        assert not settled(net, (x, y))
        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("part", ["weight", "bias", "scaled"])
def test_norms_without_a_scale_or_shift_of_their_own_are_left_alone(part):
    """The others learn."""
    net, data = known(), images()
    if part == "scaled":
        nn.utils.parametrizations.weight_norm(net.norm1)
    else:
        net.norm1.register_parameter(part, None)
    before, sizes = net(data[0]).detach(), state(net)
    assert settled(net, data)
    torch.testing.assert_close(net(data[0]), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    assert {name.partition(".")[0] for name in changed(net, sizes)} == {"norm2", "norm3"}


class Freezing(Net):
    """Its second norm never learns, and of the third no scale is trained."""

    def train(self, mode=True):
        super().train(mode)
        self.norm2.eval()
        self.norm3.weight.requires_grad_(False)
        return self


def test_norms_that_a_model_keeps_in_evaluation_mode_are_left_alone():
    net, data = known(net=Freezing), images()
    with torch.no_grad():
        net.norm2.running_mean.add_(1)
    net.norm3.weight.requires_grad_(True)
    net.norm1.train()
    flags, sizes = [module.training for module in net.modules()], state(net)
    assert settled(net, data)
    assert {name.partition(".")[0] for name in changed(net, sizes)} == {"norm1"}
    assert [module.training for module in net.modules()] == flags


class Last(nn.BatchNorm1d):
    """Of sequences whose channels come last."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Larger(nn.BatchNorm1d):
    """Of other numbers than it is called on."""

    def forward(self, x):
        return torch.batch_norm(
            2 * x + 1, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, self.eps, True
        )


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(Last, lambda z: z.flatten(0, 1)), (Larger, lambda z: (2 * z + 1).transpose(1, 2).flatten(0, 1))],
)
@pytest.mark.parametrize("length", [5, 7])
def test_subclasses_learn_what_they_divide_by(kind, rows, length):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 5), kind(5 if kind is Last else length)), torch.randn(40, length, 3)
    for _ in range(5):
        net.train()(3 * torch.randn(40, length, 3) + 1)
    wanted = rows(net.eval()[0](x).detach())
    assert settle(net, samples((x, torch.zeros(40)), 7), 0, lambda model, x: model(x))
    torch.testing.assert_close(net[1].running_mean, wanted.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net[1].running_var, wanted.var(0, unbiased=False), rtol=1e-4, atol=1e-5)


def test_what_a_hook_makes_of_an_input_counts():
    net, (x, y) = nn.SyncBatchNorm.convert_sync_batchnorm(known()), images()
    net.norm1.register_forward_pre_hook(lambda module, args: (3 * args[0] - 1,))
    wanted = (3 * net.first(x) - 1).detach()
    assert settled(net, (x, y))
    torch.testing.assert_close(net.norm1.running_mean, wanted.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


class Gain(nn.BatchNorm2d):
    """Its scale is one more than its weight."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight + 1, self.bias, self.training)


class Always(nn.BatchNorm2d):
    """Divides by the numbers of the batch in evaluation mode, too."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean.clone(), self.running_var.clone(), self.weight, self.bias, True)


@pytest.mark.parametrize("kind", [Gain, Always])
def test_norms_that_use_their_numbers_in_another_way_are_left_alone(kind):
    """The others learn."""

    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.norm1 = kind(6)

    net, data = known(net=Odd), images()
    with torch.no_grad():
        net.norm1.running_mean.add_(1)
    before, sizes = net(data[0]).detach(), state(net)
    assert settled(net, data)
    torch.testing.assert_close(net(data[0]), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    assert {name.partition(".")[0] for name in changed(net, sizes)} == {"norm2", "norm3"}


def test_answers_that_are_masked_stay_masked():
    class Masked(Net):
        def forward(self, x):
            return super().forward(x).index_fill(1, torch.tensor([1]), -torch.inf)

    net, data = known(net=Masked), images()
    before = net(data[0]).detach()
    assert settled(net, data)
    torch.testing.assert_close(net(data[0]), before, rtol=1e-3, atol=1e-4)


class Own(nn.BatchNorm2d):
    """Uses its mean in another way."""

    def forward(self, x):
        return super().forward(x) + self.running_mean.view(1, -1, 1, 1).square()


class Noisy(nn.Module):
    """Answers that are never the same twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)) + torch.randn(4, 1, 1)


class Training(Net):
    """Does not run in evaluation mode."""

    def forward(self, x):
        if not self.training:
            raise RuntimeError("only in training")
        return super().forward(x)


class Structured(Net):
    """Its answers have another form in training."""

    def forward(self, x):
        y = super().forward(x)
        return (y[:2], y) if self.training else y


class Scaled(Net):
    """Its norms see other numbers in training."""

    def forward(self, x):
        return super().forward(x if self.training else 3 * x.pow(3) + 1)


class Noted(Net):
    """Notes the mode elsewhere."""

    mode = False

    def train(self, mode=True):
        self.mode = mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x if self.mode else x.exp())


@pytest.mark.parametrize("kind", [Training, Structured, Scaled, Noted])
def test_models_that_do_something_else_in_training_are_left_as_they_were(kind):
    net, data = known(net=kind), images()
    before = state(net)
    assert not settled(net, data)
    assert not changed(net, before)
    if kind is not Structured:
        assert len(sc.recover(net, None, data, epochs=1, teacher=0, progress=False).history) == 1


class Helped(Net):
    """Has a head that only helps in training, and drops numbers by hand."""

    def __init__(self):
        super().__init__()
        self.aside = nn.BatchNorm1d(4)

    def forward(self, x):
        y = F.dropout(super().forward(x), 0.3, self.training)
        return {"logits": y, "helps": self.aside(y.square())} if self.training else y


class Froze(Net):
    """Freezes a norm each time that it runs."""

    def forward(self, x):
        self.norm2.eval()
        return super().forward(x)


@pytest.mark.parametrize(("kind", "others"), [(Helped, ["norm1", "norm2", "norm3"]), (Froze, ["norm1", "norm3"])])
def test_norms_that_training_uses_in_another_way_are_left_alone(kind, others):
    net, data = known(net=kind), images()
    with torch.no_grad():
        for name in ("norm2", "aside") if kind is Helped else ("norm2",):
            getattr(net, name).running_mean.add_(1)
    before, sizes = net(data[0]).detach(), state(net)
    assert settled(net, data)
    torch.testing.assert_close(net(data[0]), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    assert sorted({name.partition(".")[0] for name in changed(net, sizes)}) == others


class Domains(Net):
    """Small and large numbers have norms of their own, which share a scale and a shift."""

    def __init__(self):
        super().__init__()
        self.other = nn.BatchNorm1d(4)
        self.other.weight, self.other.bias = self.norm3.weight, self.norm3.bias

    def forward(self, x):
        x = F.relu(self.norm1(self.first(x)))
        norm = self.norm3 if float(x.detach().mean()) > 0.6 else self.other
        return norm(self.last(x.mean((2, 3))))


def test_norms_that_share_a_scale_are_left_alone():
    """What one of them made up for, the other would divide by as well. They may meet in no batch."""
    net, (x, y) = known(net=Domains), images()
    with torch.no_grad():
        net.other.running_mean.add_(1)
    parts = [x, 3 * x]
    before, sizes = [net(part).detach() for part in parts], state(net)
    for first, second in ((x, 3 * x), (3 * x, x)):
        tried = copy.deepcopy(net)
        assert settled(tried, [(first, y), (second, y)])
        for part, answer in zip(parts, before, strict=True):
            torch.testing.assert_close(tried(part), answer, rtol=1e-3, atol=1e-3 * float(answer.abs().max()))
        assert {name.partition(".")[0] for name in changed(tried, sizes)} == {"norm1"}


def test_norms_that_do_not_track_any_longer_learn():
    """What they divide by in evaluation mode stays as it is while they are trained."""
    net, data = known(), images()
    for norm in (net.norm1, net.norm3):
        norm.track_running_stats = False
    before, sizes = net(data[0]).detach(), state(net)
    assert settled(net, data)
    torch.testing.assert_close(net(data[0]), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    assert {name.partition(".")[0] for name in changed(net, sizes)} == {"norm1", "norm2", "norm3"}


def test_norms_in_compiled_parts_learn():
    class Compiled(Net):
        def __init__(self):
            super().__init__()
            self.part = torch.compile(lambda x: F.relu(self.norm1(x)), backend="eager")

        def forward(self, x):
            return self.norm3(self.last(F.relu(self.norm2(self.again(self.part(self.first(x))))).mean((2, 3))))

    net, data = known(net=Compiled), images()
    before, sizes = net(data[0]).detach(), state(net)
    assert settled(net, data)
    torch.testing.assert_close(net(data[0]), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    assert {name.partition(".")[0] for name in changed(net, sizes)} == {"norm1", "norm2", "norm3"}


class Counting(Net):
    """Counts its calls in a buffer, and remembers its last input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last_seen", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.last_seen = x.flatten()
        return super().forward(x)


class Following(Net):
    """In training, a part without gradients follows another one."""

    def __init__(self):
        super().__init__()
        self.follows = nn.Linear(6, 4)
        self.follows.requires_grad_(False)

    def forward(self, x):
        if self.training:
            self.follows.weight.data.lerp_(self.last.weight.data, 0.1)
        return super().forward(x)


class Keeping(Net):
    """Counts its calls in an attribute, and keeps what it once made of a weight."""

    calls, kept = 0, None

    def forward(self, x):
        self.calls += 1
        if self.kept is None:
            self.kept = self.last.weight.sum()
        return super().forward(x) + self.kept


def test_attributes_are_as_before():
    """What is kept must have gradients in training."""
    net, data = known(net=Keeping), images()
    net.calls, net.kept = 3, None
    assert settled(net, data, size=9)
    assert (net.calls, net.kept) == (3, None)
    net.kept = known_before = torch.ones(())
    assert settled(net, data, size=9)
    assert net.kept is known_before


@pytest.mark.parametrize("kind", [Counting, Following, Noisy])
def test_nothing_else_is_changed(kind):
    net, data = known(net=kind), images()
    before, flags = state(net), [module.training for module in net.modules()]
    assert settled(net, data, size=9) is (kind is not Noisy)
    assert all("norm" in name and "tracked" not in name for name in changed(net, before))
    assert [module.training for module in net.modules()] == flags


@dataclass
class Held:
    """An answer with a field."""

    scores: object


class Plain:
    """An answer of the user's own."""

    def __init__(self, scores):
        self.scores = scores


Named = namedtuple("Named", ["scores"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, None), lambda y: {"deep": [{"scores": (y,)}]}, lambda y: Held({"a": Plain([y])}),
        Held, Plain, Named,
        lambda y: BaseModelOutput(last_hidden_state=y), lambda y: torch.complex(torch.zeros_like(y), y),
        torch.distributions.Exponential, lambda y: {"scores": y[y[:, 0] > y[:, 0].mean().round()]},
    ],
)  # fmt: skip
def test_every_kind_of_answer_is_compared(wrap):
    """With what is as it was, the answer is taken for the same; with numbers that are used otherwise, it is not."""

    class Wrapped(Net):
        used = 0.0

        def forward(self, x):
            return wrap(super().forward(x) + 5 + self.used * self.norm1.running_mean.sum())

    net, data = known(net=Wrapped), images()
    assert settled(copy.deepcopy(net), data)
    net.used, before = 1.0, state(net)
    assert not settled(net, data)
    assert not changed(net, before)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Own(4)), Noisy])
def test_a_model_that_would_compute_something_else_is_left_as_it_was(make):
    net, data = known(net=make), images()
    before = state(net)
    assert not settled(net, data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_inputs_that_are_not_finite_change_nothing_and_are_refused_in_training():
    net, (x, y) = known(), images()
    x[3, 0, 0, 0] = torch.nan
    before = state(net)
    assert not settled(net, (x, y))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    with pytest.raises(sc.errors.DataError, match=r"NaN|infinite"):
        sc.recover(net, None, (x, y), epochs=1, teacher=0, progress=False)


def test_recover_begins_with_the_answers_of_the_model_it_is_given():
    """With a rate of nearly 0, only the numbers of the batch norms could change the answers."""
    net, data = known(), images()
    small = sc.prune(net, data, remove=0.5, repair=None, progress=False).model
    norms = [module for module in small.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:  # far from what it reads
            norm.running_var.mul_(9)
            norm.running_mean.add_(1)
    before, kept = small(data[0]).detach(), state(small)
    asked = Recover(epochs=3, lr=1e-9, batch_size=40, ema=0.9)
    for settings_ in (asked, Recover(epochs=3, lr=1e-9, batch_size=40)):
        found = sc.recover(small, net, data, settings_, progress=False).model.eval()
        torch.testing.assert_close(found(data[0]), before, rtol=0, atol=0.05 * float(before.std()))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in small.state_dict().items())
    # What it would be without: the batch norms learn other numbers, and the answers move by a multiple of that.
    other = copy.deepcopy(small).train()
    with torch.no_grad():
        for _ in range(3):
            other(data[0])
    assert (other.eval()(data[0]) - before).abs().max() > 0.2 * before.std()
