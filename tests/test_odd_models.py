"""Models as people write them: removal equals zero-masking, the model stays as it was, and a file brings it back."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import secateur as sc
from oracle import fingerprint, random_scores, same, zeroed
from secateur.errors import NothingToPruneError, UnsupportedModelError
from secateur.running.observer import Observer
from secateur.surgery.precision import Precise

Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Three layers. `body` is the forward, and `parts` are further attributes."""

    def __init__(self, body: Body | None = None, **parts: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self._body = body or (lambda m, x: m.c(m.b(m.a(x).relu()).relu()))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self._body(self, x)


def through(change: Callable[[Any, Tensor], Tensor], **parts: Any) -> Callable[[], nn.Module]:
    """A model that changes its first activation in some way."""
    return lambda: Net(lambda m, x: m.c(m.b(change(m, m.a(x).relu())).relu()), **parts)


def returning(wrap: Callable[[Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
    """A model that wraps its logits and the sum of its last activation in some way."""

    def body(m: Any, x: Tensor) -> Any:
        h = m.b(m.a(x).relu()).relu()
        return wrap(m.c(h), h.sum(-1))

    return lambda: Net(body)


def changed(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A plain model of which something is changed afterwards."""

    def build() -> nn.Module:
        net = Net()
        change(net)
        return net

    return build


def tied(m: Any) -> None:
    m.d = nn.Linear(12, 12)
    m.d.weight = m.b.weight
    m._body = lambda m, x: m.c(m.d(m.b(m.a(x).relu()).tanh()))


def with_buffer(name: str, tensor: Tensor, persistent: bool = True) -> Callable[[], nn.Module]:
    def change(m: Any) -> None:
        m.register_buffer(name, tensor.clone(), persistent=persistent)
        m._body = lambda m, x: m.c(m.b(m.a(x).relu() * getattr(m, name)).relu())

    return changed(change)


class Delegating(nn.Module):
    """Looks for what it lacks in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x).relu()).relu())


class Listed(nn.Module):
    """Layers as bare parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((6, 12), (12, 12), (12, 3))
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(a, b) / 3) for a, b in shapes])
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(b)) for _, b in shapes])

    def forward(self, x: Tensor) -> Tensor:
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            x = x.relu() if i < 2 else x
        return x


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.c = nn.Linear(6, 12), nn.Parameter(torch.randn(12, 8, dtype=torch.cfloat)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c((self.a(x).to(torch.cfloat) @ self.w).abs())  # type: ignore[no-any-return]


class Narrowing(nn.Linear):
    """Falsy, and with a weight of the other orientation."""

    def __init__(self) -> None:
        super().__init__(12, 10)
        self.weight = nn.Parameter(torch.randn(12, 10) / 3)

    def __bool__(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def lora(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    return m.c((m.b(h) + h @ m.down.T @ m.up.T).relu())  # type: ignore[no-any-return]


def clamped(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.b.weight.clamp_(min=-0.1)
    return h


def clamped_data(m: Any, h: Tensor) -> Tensor:
    m.b.weight.data.clamp_(min=-0.1)
    return h


def momentum(m: Any, h: Tensor) -> Tensor:
    """A copy of the last layer that follows it in training, as in MoCo and BYOL."""
    if m.training:
        with torch.no_grad():
            m.slow.mul_(0.9).add_(m.c.weight, alpha=0.1)
    return h


def clamped_together(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_clamp_min_([m.c.bias], 0.0)
    return h


def same_width(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    g = m.b(h)
    return m.c(g + h if g.shape == h.shape else g)  # type: ignore[no-any-return]


GATE = torch.linspace(0.5, 1.5, 12)
ODD: dict[str, Callable[[], nn.Module]] = {
    "a layer called twice": lambda: Net(lambda m, x: m.c(m.b(m.b(m.a(x).relu()).relu()).relu())),
    "a weight with two biases": changed(tied),
    "an encoder that decodes": lambda: Net(
        lambda m, x: m.c(F.linear(m.b(m.a(x).relu()).relu(), m.a.weight.t())), c=nn.Linear(6, 3)
    ),
    "a buffer": with_buffer("gate", GATE),
    "a buffer that is not saved": with_buffer("gate", GATE, persistent=False),
    "a tensor that is no buffer": through(lambda m, h: h * m.gate, gate=GATE),
    "a tensor of the module": through(lambda m, h: h * GATE),
    "parameters in a list": Listed,
    "written in place": through(lambda m, h: (h * 2).add_(1).clamp_(max=3).mul_(0.5)),
    "a decision by numbers": through(lambda m, h: h * 2 if h.sum() > 0 else h),
    "a decision by sizes": lambda: Net(same_width),
    "a width that decides": through(lambda m, h: h.tanh() if h.shape[-1] >= 8 else h),
    "a width in a factor": through(lambda m, h: h * len(m.a.weight) ** -0.5),
    "a factor by position": through(lambda m, h: h * torch.arange(h.shape[-1], device=h.device)),
    "an old spectral norm": changed(lambda m: spectral_norm(m.b)),
    "a scaled weight": changed(lambda m: parametrize.register_parametrization(m.a, "weight", nn.Softsign())),
    "a weight that is computed": lambda: Net(lambda m, x: m.c(F.linear(m.a(x).relu(), m.b.weight * 0.5).relu())),
    "half precision": lambda: Net().bfloat16(),
    "double precision": lambda: Net().double(),
    "a layer in half precision": changed(
        lambda m: m.__dict__.update(_body=lambda m, x: m.c(m.b(m.a(x).relu().bfloat16()).float())) or m.b.bfloat16()
    ),
    "training mode": lambda: Net(lambda m, x: m.c(m.b(m.drop(m.a(x).relu()))), drop=nn.Dropout(0.5)).train(),
    "frozen parameters": changed(lambda m: m.a.requires_grad_(False)),
    "strange strides": changed(lambda m: setattr(m.b, "weight", nn.Parameter(torch.randn(12, 12).t()))),
    "a view of a larger memory": changed(
        lambda m: setattr(m.b, "weight", nn.Parameter(torch.randn(200)[20:164].view(12, 12)))
    ),
    "an empty sequence": lambda: Net(lambda m, x: m.c(m.b(h := m.a(x).relu()) + m.short(h)), short=nn.Sequential()),
    "modules in a plain dict": through(lambda m, h: m.hidden["it.self"](h), hidden={"it.self": nn.Tanh()}),
    "a hook that changes": changed(lambda m: m.a.register_forward_hook(lambda module, args, out: out * 2 + 1)),
    "a hook with a fixed size": changed(
        lambda m: m.b.register_forward_pre_hook(lambda module, args: (args[0] * GATE,))
    ),
    "attributes of another module": Delegating,
    "a falsy layer, turned round": lambda: Net(b=Narrowing(), c=nn.Linear(10, 3)),
    "low rank beside": lambda: Net(
        lora, down=nn.Parameter(torch.randn(4, 12)), up=nn.Parameter(torch.randn(12, 4))
    ),
    "numbers that count calls": changed(lambda m: m.register_buffer("calls", torch.tensor(0))),
    "complex numbers": Complex,
    "an autograd function": through(lambda m, h: _Clamp.apply(h)),
    "cosines": lambda: Net(lambda m, x: F.linear(F.normalize(m.b(m.a(x).relu())), F.normalize(m.c.weight))),
    "a weight that the forward clamps": through(clamped),
    "a weight whose data it clamps": through(clamped_data),
    "biases that it clamps together": through(clamped_together),
    "named arguments in place": through(lambda m, h: torch.relu_(input=h)),
    "a weight that follows in training": through(momentum, slow=nn.Parameter(torch.randn(3, 12), requires_grad=False)),
    "a list of outputs": returning(lambda y, s: [y, s]),
    "nested outputs": returning(lambda y, s: {"logits": y, "more": {"sum": (s,)}}),
    "a set": returning(lambda y, s: {y}),
    "a queue": returning(lambda y, s: collections.deque([y, s])),
    "the values of a dict": returning(lambda y, s: {"y": y, "s": s}.values()),
    "a function": returning(lambda y, s: lambda: y),
}  # fmt: skip


class _Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def answers(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return _tensors(copy.deepcopy(model).eval()(x))


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if callable(output):
        return _tensors(output())
    return [t for item in (output.values() if isinstance(output, dict) else output) for t in _tensors(item)]


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = ODD[name]()
    if name != "training mode":
        net.eval()
    kinds = {"half precision": torch.bfloat16, "double precision": torch.float64}
    return net, torch.randn(4, 6, dtype=kinds.get(name))


@pytest.mark.parametrize("name", ODD)
def test_removal_equals_masking(name: str) -> None:
    net, x = build(name)
    before, graph = fingerprint(net), sc.analyze(net, x)
    limit = 0.05 if "half" in name else 1e-4
    for share in (0.3, 0.6):
        plan = sc.plan(graph, random_scores(graph, 1), remove=share)
        small, reference = sc.apply(net, plan), zeroed(net, graph, plan)
        for inputs in (x, 2 * x.repeat(2, 1).roll(1, 1)):
            found, expected = answers(small, inputs), answers(reference, inputs)
            assert [t.shape for t in found] == [t.shape for t in expected]
            for a, b in zip(found, expected, strict=True):
                assert float((a - b).abs().max()) <= limit * max(float(b.abs().max()), 1e-9)
        assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in net.parameters()]
        assert [m.training for m in small.modules()] == [m.training for m in net.modules()]
    assert same(before, fingerprint(net))


@pytest.mark.filterwarnings("ignore:the model returns several tensors", "ignore:Listed has no")
@pytest.mark.parametrize("name", [name for name in ODD if name != "complex numbers"])
def test_a_run_leaves_the_model_and_is_saved(name: str, tmp_path: Path) -> None:
    net, x = build(name)
    before = fingerprint(net)
    sc.explain(net, x, target=0)
    result = sc.prune(net, (x, torch.arange(4) % 3), remove=0.4, progress=False)
    sc.save(result, tmp_path / "small")
    again = sc.load(tmp_path / "small", build(name)[0])
    for a, b in zip(answers(again, x), answers(result.model, x), strict=True):
        assert torch.equal(a, b)
    assert same(before, fingerprint(net))


WRITERS: dict[str, Callable[..., Tensor]] = {
    "hstack": lambda m, h, **to: torch.hstack([h[:, :6], h[:, 6:]], **to),
    "index_select": lambda m, h, **to: torch.index_select(h, 1, torch.arange(12), **to),
    "cumsum": lambda m, h, **to: torch.cumsum(h, 1, **to),
    "tensordot": lambda m, h, **to: torch.tensordot(h, m.d, ([1], [1]), **to),
    "tanh": lambda m, h, **to: torch.tanh(h, **to),
}


@pytest.mark.parametrize("size", [0, 12])
@pytest.mark.parametrize("name", WRITERS)
def test_a_result_in_a_given_tensor_is_one_that_is_returned(name: str, size: int) -> None:
    """`out=` beside a second way to the output, which alone would carry relevance and gradients."""

    def into(m: Any, h: Tensor) -> Tensor:
        made = h.new_zeros(len(h), size)
        WRITERS[name](m, h, out=made)
        return made + h

    scale, x, labels = torch.linspace(-1, 1, 144).view(12, 12), torch.randn(4, 6), torch.arange(4) % 3
    nets = [through(change, d=scale)().eval() for change in (into, lambda m, h: WRITERS[name](m, h) + h)]
    nets[0].load_state_dict(nets[1].state_dict())
    found, expected = (sc.explain(net, x, target=0).heat for net in nets)
    assert torch.allclose(found, expected, atol=1e-6)
    graphs = [sc.analyze(net, x) for net in nets]
    pairs = zip(nets, graphs, strict=True)
    numbers = [sc.score(net, (x, labels), "taylor", graph=graph).of(graph) for net, graph in pairs]
    assert np.allclose(*numbers, atol=1e-6, equal_nan=True)
    assert [len(layer.groups) for layer in graphs[0].layers] == [len(layer.groups) for layer in graphs[1].layers]


class Looked(nn.Module):
    """Its tables shorten their own rows when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(20, 12, max_norm=1.0), nn.EmbeddingBag(20, 12, max_norm=0.5)
        self.c = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.table(x).mean(1) + self.bag(x))  # type: ignore[no-any-return]


def test_tables_that_shorten_their_rows_stay_as_they_are() -> None:
    torch.manual_seed(0)
    net, x = Looked().eval(), torch.randint(20, (4, 5))
    before = fingerprint(net)
    sc.explain(net, x, target=0)
    graph = sc.analyze(net, x)
    plan = sc.plan(graph, random_scores(graph, 1), remove=0.5)
    small = sc.apply(net, plan)
    assert torch.equal(small.table.weight, net.table.weight[:, _kept(plan, "table.weight", 12)])
    sc.prune(net, (x, torch.arange(4) % 3), remove=0.4, progress=False)
    assert same(before, fingerprint(net))
    assert torch.allclose(answers(small, x)[0], answers(zeroed(net, graph, plan), x)[0], atol=1e-6)


class Rectified(nn.Module):
    """Rectifies its own weight in place."""

    def __init__(self, positional: bool) -> None:
        super().__init__()
        self.a, self.c, self.positional = nn.Linear(6, 12), nn.Linear(12, 3), positional

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a.weight.detach()
        weight = F.relu(weight, True) if self.positional else F.relu(weight, inplace=True)
        return self.c(F.linear(x, weight, self.a.bias))  # type: ignore[no-any-return]


@pytest.mark.parametrize("positional", [True, False])
def test_a_weight_that_is_rectified_in_place_stays_as_it_is(positional: bool) -> None:
    torch.manual_seed(0)
    net, x = Rectified(positional).eval(), torch.randn(2, 6)
    before = fingerprint(net)
    graph = sc.analyze(net, x)
    sc.apply(net, sc.plan(graph, random_scores(graph, 1), remove=0.4))
    sc.score(net, (x, torch.tensor([0, 1])), "taylor")
    assert same(before, fingerprint(net))


def _kept(plan: sc.Plan, name: str, size: int) -> list[int]:
    return sorted(set(range(size)) - set(plan.cuts[name][1]))


@pytest.mark.parametrize("name", ["a set", "a queue", "the values of a dict", "a function"])
def test_classes_stay_wherever_they_are_returned(name: str) -> None:
    graph = sc.analyze(*build(name))
    assert [layer.prunable for layer in graph.layers] == [True, True, False]


@pytest.mark.parametrize("wrap", [iter, lambda parts: (t for t in parts), lambda parts: map(torch.neg, parts)])
def test_outputs_that_can_be_read_once_are_refused(wrap: Callable[[Any], Any]) -> None:
    net = returning(lambda y, s: wrap([y, s]))()
    with pytest.raises(UnsupportedModelError, match="read only once"):
        sc.analyze(net.eval(), torch.randn(4, 6))


def test_marks_of_parameters_survive() -> None:
    net = Net()
    net.b.weight._no_weight_decay = True  # type: ignore[attr-defined]
    graph = sc.analyze(net, torch.randn(4, 6))
    assert sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.5)).b.weight._no_weight_decay


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "a", nn.LazyLinear(12)), "`a` is lazy"),
        (lambda m: setattr(m.b, "weight", nn.Parameter(m.b.weight.detach().to_sparse())), "`b.weight` is stored as"),
        (lambda m: prune.l1_unstructured(m.b, "weight", 0.3), "prune.remove"),
        (lambda m: weight_norm(m.b), "remove_weight_norm"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(change: Callable[[Any], Any], words: str) -> None:
    net, x = changed(change)().eval(), torch.randn(4, 6)
    for call in (lambda: sc.analyze(net, x), lambda: sc.prune(net, (x, torch.arange(4) % 3), remove=0.4)):
        with pytest.raises(UnsupportedModelError, match=words):
            call()


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_layers_with_computed_weights_stay(norm: Callable[..., nn.Module]) -> None:
    net, x = changed(lambda m: norm(m.b))().eval(), torch.randn(4, 6)
    with pytest.raises(NothingToPruneError):
        sc.prune(net, (x, torch.arange(4) % 3), remove=0.4, progress=False)


def test_statistics_of_a_batch_need_two_samples() -> None:
    net = Net(lambda m, x: m.c(m.b(m.norm(m.a(x)).relu())), norm=nn.BatchNorm1d(12, track_running_stats=False))
    result = sc.prune(net.eval(), (torch.randn(4, 6), torch.arange(4) % 3), remove=0.4, repair=False, progress=False)
    assert result.model.norm.num_features < 12


def test_weights_that_are_buffers_are_scored_by_their_size() -> None:
    net = Net(lambda m, x: m.c(F.linear(m.a(x).relu(), m.w).relu()), b=nn.Identity())
    net.register_buffer("w", torch.randn(12, 12))
    graph = sc.analyze(net.eval(), torch.randn(4, 6))
    found = {site.path: numbers for site, numbers in sc.score(net, None, "weight", graph=graph).units.items()}
    size = net.w.abs().sum(1)
    assert np.allclose(found[""], size / size.norm(), rtol=1e-5)


def test_an_expanded_buffer_is_cut_like_any_other() -> None:
    plain, expanded = (with_buffer("gate", torch.full((12,), 0.5))().eval() for _ in range(2))
    expanded.load_state_dict(plain.state_dict())
    expanded.gate = torch.tensor([0.5]).expand(12)
    x = torch.randn(4, 6)
    graph = sc.analyze(expanded, x)
    plan = sc.plan(graph, random_scores(graph, 1), remove=0.5)
    assert torch.allclose(answers(sc.apply(expanded, plan), x)[0], answers(zeroed(plain, graph, plan), x)[0], atol=1e-6)


def test_complex_numbers_are_not_explained() -> None:
    with pytest.raises(UnsupportedModelError, match="complex"):
        sc.explain(build("complex numbers")[0], torch.randn(4, 6), target=0)


def test_a_layer_without_inputs_is_scored() -> None:
    """Its relevance is nothing, and that of the others is what it is without it."""
    torch.manual_seed(0)
    net = Net(lambda m, x: m.c(m.b((m.a(x) + m.none(x[:, :0])).relu()).relu()), none=nn.Linear(0, 12, bias=False))
    plain, x = Net().eval(), torch.randn(4, 6)
    plain.load_state_dict(net.state_dict(), strict=False)
    found, expected = (sc.explain(m.eval(), x, target=0) for m in (net, plain))
    assert torch.allclose(found.heat, expected.heat)


class Written(Observer):
    """Which parameters are said to be written to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.names: list[str] = []

    def overwrites(self, names: Sequence[str]) -> None:
        self.names += names


def test_parameters_that_another_mode_widens_are_not_taken_for_what_is_written() -> None:
    """Copies that `Precise` makes live for one call. What is computed later may lie at the same place."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    before = [parameter.clone() for parameter in model.parameters()]
    with Precise(torch.float64), Written(model) as seen:
        sums = [torch.zeros(4).add_(1) for _ in range(40)]
    assert seen.names == []
    assert all(torch.equal(item, torch.ones(4)) for item in sums)
    assert all(map(torch.equal, before, model.parameters()))
    with Precise(torch.float64), torch.no_grad(), Written(model) as seen:
        model[3].bias.add_(1)
    assert seen.names == ["3.bias"]
