"""Both scenarios of the paper on small networks and made images: what must hold whatever the numbers are."""

import dataclasses
import json
import re
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import secateur.loop
from image_sets import classes, nets
from reproduction import campaign, networks, training
from reproduction.__main__ import _range, commands
from reproduction.few_shot import campaign as few
from reproduction.few_shot.draws import GROUPS, Source
from reproduction.few_shot.page import lead
from reproduction.fine_tune import campaign as fine
from reproduction.image_reference import margin, printed, rate
from reproduction.page import with_kept
from reproduction.runs import Folder, Run, at, filters
from reproduction.training import HeadTrainer, Images, Schedule, Trainer, crops
from reproduction.uncoupled import paper_cost, prune_uncoupled
from secateur.data.views import View
from secateur.errors import DataError, FileFormatError, UnsupportedModelError
from secateur.loop.prune import prune, run_loop
from secateur.loop.settings import Settings as LoopSettings
from secateur.models.zoo import fresh
from secateur.results.comparison import Curve
from secateur.results.history import History, Row

pytest.importorskip("PIL")
pytest.importorskip("matplotlib")

SCENES = ["coast", "forest", "street"]
FAST = {"prepare_epochs": 12, "epochs": 1, "batch_size": 6, "lr": 0.05, "step": 0.1, "steps": 4, "size": 16}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with networks, scenes, and ImageNet-like folders."""
    folder = tmp_path_factory.mktemp("images")
    nets(folder)
    classes(folder / "scenes", SCENES, 20)
    classes(folder / "inet" / "train", SCENES, 8)
    classes(folder / "inet" / "val", SCENES, 6, seed=1)
    return folder


def told(*arguments):
    done = CliRunner().invoke(commands, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def tuning(made, net, **changes):
    return fine.Settings(f"{made / 'nets.py'}:{net}", "scene15", str(made / "scenes"), **{**FAST, **changes})


def shooting(made, net, **changes):
    small = {"classes": 2, "per_class": 3, "step": 0.1, "steps": 4, "size": 16}
    return few.Settings(f"{made / 'nets.py'}:{net}?outputs=3", "ilsvrc", str(made / "inet"), **{**small, **changes})


def plain(history):
    """Rows without their times."""
    return [dataclasses.replace(row, score_seconds=0, seconds=0) for row in history]


# -- fine-tune ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tuned(made):
    """The command for both kinds of network; and its folder."""
    out = made / "tuned"
    shared = ["--data", "scene15", "--images", made / "scenes", "--criteria", "lrp,weight", "--out", out]
    for name, value in FAST.items():
        shared += [f"--{name.replace('_', '-')}", value]
    fine.fine_tune(tuning(made, "Residual"), out, ("lrp", "weight"), ("paper", "physical"))
    told("fine-tune", "--model", f"{made / 'nets.py'}:Split", *shared)
    return out


def test_fine_tuning_learns_and_costs_fall(tuned):
    runs = [run for name in ("Residual-scene15", "Split-scene15") for run in Folder(tuned / name).runs()]
    assert {(run.mode, run.criterion) for run in runs} == {
        (m, c) for m in ("paper", "physical") for c in ("lrp", "weight")
    }
    for run in runs:
        rows = list(run.history)
        assert rows[0].overall > 0.9  # three colours are easy to tell apart
        assert len(rows) == 5
        for before, after in pairwise(rows):
            assert after.macs < before.macs
            assert after.params < before.params
            assert sum(filters(after).values()) < sum(filters(before).values())
        assert run.curve.removed == pytest.approx([0, 0.1, 0.2, 0.3, 0.4], abs=0.06)
        assert all(np.isfinite(row.metrics["loss"]) for row in rows)


def test_the_paper_counts_only_the_masked_filters_themselves(tuned):
    """Costs by hand from the filters that each layer of `Residual` has left, at 16² pixels."""
    sizes = {"conv1": (3, 8), "conv2": (8, 10), "conv3": (10, 8)}
    batch_norms, fc = 2 * (8 + 10 + 8), 8 * 3
    for run in Folder(tuned / "Residual-scene15").runs():
        if run.mode != "paper":
            continue
        for row in run.history:
            left = filters(row)
            weights = sum(9 * sizes[name][0] * left[name] for name in sizes)
            assert paper_cost(row, "params") == weights + batch_norms + fc + 3
            assert paper_cost(row, "macs") == 256 * weights + fc
            assert row.macs <= paper_cost(row, "macs")
            assert row.params <= paper_cost(row, "params")


def test_physical_costs_are_those_of_the_smaller_network(tuned):
    for run in Folder(tuned / "Split-scene15").runs():
        for row in run.history:
            first, second = filters(row).values()
            head = second * 4 * 20 + 20 * 3
            assert row.macs == 27 * first * 256 + 9 * first * second * 64 + head
            assert row.params == 28 * first + 9 * first * second + second + head + 20 + 3


def test_the_page_has_the_tables_and_figures(tuned):
    page = (tuned / "fine-tune.md").read_text()
    assert "### paper mode: at 38 % of the filters gone (1 draw)" in page  # 10 of 26
    assert "### physical mode: at 40 % of the filters gone (1 draw)" in page  # 8 of 20
    pictures = re.findall(r"\]\((.*?\.png)\)", page)
    assert len(pictures) == 9  # curves, scatter and layers for three kinds of run
    assert all((tuned / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert page.count("|  | unpruned | weight | lrp |") == 3
    assert page.count("| accuracy (%) |") == 3


def test_later_draws_alone_stand_beside_the_first_one(tuned, tmp_path):
    """Also if the files of the first draw are no longer at hand: its section and its figures stay."""
    folder, first = tmp_path / "Split-scene15", tuned / "Split-scene15"
    folder.mkdir()
    (folder / "settings.json").write_bytes((first / "settings.json").read_bytes())
    for file in first.glob("00-*.json"):
        (folder / file.name.replace("00-", "02-", 1)).write_bytes(file.read_bytes())
    (tmp_path / "fine-tune.md").write_bytes((tuned / "fine-tune.md").read_bytes())
    told("fine-tune", "--table-only", "--out", tmp_path)
    page = (tmp_path / "fine-tune.md").read_text()
    assert page.startswith((tuned / "fine-tune.md").read_text().rstrip())
    section = page[page.index("## Split on scene15, draw 2\n") :]
    assert "--draws 2:3 --mode physical" in section
    figures = re.findall(r"\]\((.*?\.png)\)", section)
    assert len(figures) == 3
    assert all("-physical-2" in name and (tmp_path / name).exists() for name in figures)


def test_finished_runs_are_not_repeated_and_other_settings_are_refused(tuned, made, monkeypatch):
    def never(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr(campaign, "run_loop", never)
    monkeypatch.setattr(fine, "prepare", never)
    settings = tuning(made, "Split")
    fine.fine_tune(settings, tuned, ("lrp", "weight"), ("physical",))
    with pytest.raises(FileFormatError, match="epochs was 1, is now 2"):
        fine.fine_tune(dataclasses.replace(settings, epochs=2), tuned, ("lrp",), ("physical",))


@pytest.mark.parametrize(("net", "mode"), [("Residual", "paper"), ("Split", "physical")])
def test_a_stopped_run_goes_on_and_ends_the_same(made, tmp_path, monkeypatch, tuned, net, mode):
    settings = tuning(made, net)
    train, calls = Trainer.__call__, []

    def killed(self, model, step=0):
        calls.append(step)
        if step == 3 and calls.count(3) == 1:
            raise KeyboardInterrupt
        train(self, model, step)

    monkeypatch.setattr(Trainer, "__call__", killed)
    fine.prepared.cache_clear()
    with pytest.raises(KeyboardInterrupt):
        fine.fine_tune(settings, tmp_path, ("lrp",), (mode,))
    assert not Folder(tmp_path / settings.name).runs()
    fine.prepared.cache_clear()  # as a new process would begin
    folder = fine.fine_tune(settings, tmp_path, ("lrp",), (mode,))
    assert [step for step in calls if step] == [1, 2, 3, 3, 4]  # steps 1 and 2 were kept
    (resumed,) = folder.runs()
    whole = next(r for r in Folder(tuned / settings.name).runs() if (r.mode, r.criterion) == (mode, "lrp"))
    assert plain(resumed.history) == plain(whole.history)
    assert not list((folder.path / "unfinished").iterdir())


@pytest.mark.slow
def test_several_processes_give_the_same(made, tmp_path, tuned):
    settings = tuning(made, "Split")
    folder = fine.fine_tune(settings, tmp_path, ("lrp", "weight"), ("physical",), jobs=2)
    alone = {run.criterion: plain(run.history) for run in Folder(tuned / settings.name).runs()}
    assert {run.criterion: plain(run.history) for run in folder.runs()} == alone


# -- training ----------------------------------------------------------------------------------------------------------
def some_images(count=13, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, size + 1, size + 1), generator=generator, dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % 3, View(size, "squash"))


def small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def test_training_is_sgd_with_momentum():
    images, schedule = some_images(), Schedule(epochs=2, batch_size=4, lr=0.1, momentum=0.9)
    trained, by_hand = small(), small()
    torch.manual_seed(5)
    trainer = Trainer(images, schedule)
    trainer(trained)
    torch.manual_seed(5)
    speed = [torch.zeros_like(p) for p in by_hand.parameters()]
    for _ in range(2):
        losses = []
        for inputs, labels in crops(images, 4):
            assert len(labels) == 12  # the thirteenth waits for another epoch
            for i in range(0, 12, 4):
                output = by_hand(inputs[i : i + 4])
                loss = -output.log_softmax(1)[torch.arange(4), labels[i : i + 4]].mean()
                losses.append(loss.item())
                grads = torch.autograd.grad(loss, list(by_hand.parameters()))
                with torch.no_grad():
                    for p, g, v in zip(by_hand.parameters(), grads, speed, strict=True):
                        v.mul_(0.9).add_(g)
                        p.sub_(0.1 * v)
    for a, b in zip(trained.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert a.grad is None
    assert trainer.loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_recorded_step_does_what_the_steps_before_it_did(monkeypatch):
    """What CUDA does, with a recording that runs here: warm-up, recording and replay take every batch once."""
    images, schedule = some_images(), Schedule(epochs=3, batch_size=4, lr=0.1)
    one_by_one, recorded = small(), small()
    torch.manual_seed(5)
    plainly = Trainer(images, schedule)
    plainly(one_by_one)
    begin, replays = training.Steps.__init__, []

    class Recording:
        def __init__(self, steps):
            self.steps = steps

        def replay(self):
            replays.append(1)
            self.steps._compute(self.steps.inputs, self.steps.labels)

    def recording(self, *arguments):
        begin(self, *arguments)
        self.records = True

    monkeypatch.setattr(training.Steps, "__init__", recording)
    monkeypatch.setattr(training.Steps, "_aside", lambda self: nullcontext())
    monkeypatch.setattr(training.Steps, "_recorded", lambda self: Recording(self))
    torch.manual_seed(5)
    trainer = Trainer(images, schedule)
    trainer(recorded)
    assert len(replays) == 9 - 3
    assert trainer.loss == plainly.loss
    for a, b in zip(one_by_one.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_graphs_train_as_single_steps_do(monkeypatch):
    images = some_images()
    images = Images(images.pixels.cuda(), images.labels.cuda(), images.view)
    monkeypatch.setattr(training, "half", lambda device: nullcontext())
    found = []
    for warm_up in (3, 1000):
        monkeypatch.setattr(training, "_WARM_UP", warm_up)
        net = small().cuda()
        torch.manual_seed(5)
        Trainer(images, Schedule(epochs=4, batch_size=4, lr=0.05))(net)
        found.append([p.detach().cpu() for p in net.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_an_epoch_sees_every_image_once_in_its_own_crop():
    images = some_images(count=6)
    torch.manual_seed(0)
    ((inputs, labels),) = crops(images, 3)
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2]
    windows = {}
    for i, picture in enumerate(images.pixels):
        for top in range(2):
            for left in range(2):
                window = picture[:, top : top + 8, left : left + 8]
                for flip in (window, window.flip(2)):
                    windows[tuple(images.view.normalise(flip).flatten().tolist())] = i
    assert sorted(windows[tuple(x.flatten().tolist())] for x in inputs) == list(range(6))


def test_only_the_head_is_trained_when_the_features_are_frozen():
    images, net = some_images(), small()
    body, head = net[:3], net[3:]
    before = [p.clone() for p in body.parameters()]
    start = head[0].weight.clone()
    torch.manual_seed(2)
    trainer = HeadTrainer(images, Schedule(epochs=2, batch_size=4, lr=0.1))
    trainer(body, head)
    assert all(torch.equal(a, b) for a, b in zip(before, body.parameters(), strict=True))
    assert not torch.equal(start, head[0].weight)
    # the same as training the whole with the body's parameters left alone
    other = small()
    for parameter in other[:3].parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(2)
    Trainer(images, Schedule(epochs=2, batch_size=4, lr=0.1))(other)
    torch.testing.assert_close(other[3].weight, head[0].weight)


def test_accuracy_counts_right_answers():
    images = some_images(count=9)
    answers = torch.tensor([0, 1, 2, 0, 1, 0, 0, 0, 0])

    class Fixed(nn.Module):
        def forward(self, x):
            self.seen += len(x)
            return nn.functional.one_hot(answers[self.seen - len(x) : self.seen], 3).float()

    net = Fixed()
    net.seen = 0
    assert training.accuracy(net, images, batch_size=4) == pytest.approx(6 / 9)


def test_masked_filters_stay_silent_through_fine_tuning(made):
    torch.manual_seed(0)
    net = fresh(f"{made / 'nets.py'}:Residual?outputs=3")
    images = some_images(count=12, size=16)
    before = {name: p.clone() for name, p in net.named_parameters()}
    trainer = Trainer(images, Schedule(epochs=2, batch_size=4, lr=0.1))
    result = prune_uncoupled(net, images.batches(6), "weight", 0.5, 0.25, finetune=trainer)
    assert sum(mask.sum() for mask in result.masked.values()) == 13
    for layer, norm in (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3")):
        mask = torch.from_numpy(result.masked[layer])
        weight = result.model.get_submodule(layer).weight
        assert not weight[mask].any()
        assert not result.model.get_submodule(norm).weight[mask].any()
        assert not result.model.get_submodule(norm).bias[mask].any()
        assert not torch.equal(weight[~mask], before[f"{layer}.weight"][~mask])  # the others were trained
    assert all(torch.equal(before[name], p) for name, p in net.named_parameters())


# -- few-shot ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def shot(made):
    out = made / "shot"
    shared = ["--images", made / "inet", "--classes", 2, "--per-class", 3, "--step", 0.1, "--steps", 4, "--size", 16]
    shared += ["--draws", 3, "--criteria", "lrp,taylor,weight", "--out", out]
    few.few_shot(shooting(made, "Residual"), out, ("lrp", "taylor", "weight"), ("paper", "physical"), draws=3)
    told("few-shot", "--model", f"{made / 'nets.py'}:Split?outputs=3", "--mode", "physical", "--grid", 3, *shared)
    return out


def test_few_shot_runs_every_draw_criterion_and_mode(shot):
    runs = Folder(shot / "Residual-ilsvrc").runs()
    assert len({(run.draw, run.mode, run.criterion) for run in runs}) == 3 * 2 * 3
    for draw in range(3):  # one network, one test: all start from the same accuracy
        assert len({run.history[0].overall for run in runs if run.draw == draw}) == 1
    for run in runs:
        macs = [row.macs for row in run.history]
        assert all(after < before for before, after in pairwise(macs))
    page = (shot / "few-shot.md").read_text()
    for title in ("paper mode: accuracy at a share of filters gone (3 draws)", "MACs left as the paper counts them",
                  "physical mode: LRP's largest lead in points"):  # fmt: skip
        assert title in page
    assert (shot / "few-shot-Split-ilsvrc-grid.png").exists()


def test_all_criteria_and_modes_see_the_same_samples(made, tmp_path, monkeypatch):
    seen = {}

    def spy(real):
        def watched(model, data, criterion, *args, **kwargs):
            key = criterion.schedule.seed if isinstance(criterion, LoopSettings) else kwargs["seed"]
            seen.setdefault(key, []).append((data[0].clone(), data[1].clone()))
            return real(model, data, criterion, *args, **kwargs)

        return watched

    monkeypatch.setattr(campaign, "run_loop", spy(run_loop))
    monkeypatch.setattr(campaign, "prune_uncoupled", spy(prune_uncoupled))
    few.few_shot(shooting(made, "Residual", steps=1), tmp_path, ("lrp", "weight"), ("paper", "physical"), draws=3)
    assert [len(found) for found in seen.values()] == [4, 4, 4]
    for found in seen.values():
        assert all(torch.equal(x, found[0][0]) and torch.equal(y, found[0][1]) for x, y in found)
        assert found[0][1].tolist() == [0, 0, 0, 1, 1, 1]
    assert not torch.equal(seen[0][0][0], seen[1][0][0])


def test_draws_take_training_images_to_score_and_all_held_out_ones_to_test(made):
    source = Source.read("ilsvrc", made / "inet")
    draws = [source.draw(number, 2, 3, 3, False) for number in range(8)]
    assert len({tuple(d.outputs) for d in draws}) > 1
    for drawn in draws:
        assert all(path.parts[-3] == "train" for path in drawn.reference.source)
        assert all(path.parts[-3] == "val" for path in drawn.test.source)
        assert len(drawn.test) == 12
        assert len(set(drawn.reference.source)) == 6
        for samples in (drawn.reference, drawn.test):
            for path, label in zip(samples.source, samples.labels, strict=True):
                name = list(drawn.outputs)[label]
                assert path.parts[-2] == name
                assert drawn.outputs[name] == (SCENES.index(name),)
    assert source.draw(3, 2, 3, 3, False) == draws[3]
    with pytest.raises(DataError, match="9 were asked for"):
        source.draw(0, 2, 9, 3, False)


def test_cats_and_dogs_sum_the_probabilities_of_imagenet_outputs(made, tmp_path):
    for part in ("train", "test"):
        classes(tmp_path / "pets" / part, ["cat", "dog"], 5, seed=len(part))
    spec = f"{made / 'nets.py'}:Split?outputs=1000"
    settings = few.Settings(spec, "catsdogs", str(tmp_path / "pets"), per_class=3, step=0.1, steps=1, size=16)
    few.whole.cache_clear()
    few.scene.cache_clear()
    stage = few.scene(settings, tmp_path, 0, "cpu")
    model = few.whole(settings, tmp_path, "cpu")[0]
    with torch.no_grad():
        logits = model(stage.test[0])
        exp = {name: logits[:, list(GROUPS[name])].exp().sum(1) for name in ("cat", "dog")}
        expected = torch.stack([exp["cat"], exp["dog"]], 1) / (exp["cat"] + exp["dog"])[:, None]
        torch.testing.assert_close(stage.model(stage.test[0]).exp(), expected)
    assert stage.reference[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert (len(GROUPS["cat"]), len(GROUPS["dog"]), len(GROUPS["birds"])) == (5, 118, 59)
    folder = few.few_shot(settings, tmp_path / "out", ("lrp",), ("physical",), draws=1)
    assert len(folder.runs()[0].history) == 2


def test_the_grid_is_what_pruning_the_fully_connected_layers_gives(shot, made):
    """The row of the unpruned filters, by pruning the whole narrow network instead of its classifier alone."""
    settings = shooting(made, "Split", grid=3)
    stage = few.scene(settings, shot / "Split-ilsvrc", 1, "cpu")
    history = prune(
        stage.model, stage.reference, "lrp", 0.3, progress=False, evaluate=lambda net: few.right(net, *stage.test, 50),
        schedule=secateur.loop.Schedule(step=0.1, parts={"fc": ["classifier.*"]}, seed=1),
    ).history  # fmt: skip
    run = next(r for r in Folder(shot / "Split-ilsvrc").runs() if (r.draw, r.criterion) == (1, "lrp"))
    cells = few.grid(run, 0.1)
    assert [cells[0.0, round(0.1 * k, 1)] for k in range(4)] == [row.overall for row in history]
    for row in run.history:
        assert cells[round(0.1 * row.step, 4), 0.0] == row.overall
    assert len(cells) == 5 * 4


def test_weights_without_a_classifier_get_one_trained_on_the_images(made, tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(3)
    net = fresh(f"{made / 'nets.py'}:Split")
    state = {k: v.half() for k, v in net.state_dict().items() if k.startswith("features.")}
    save_file(state, tmp_path / "features.safetensors")
    settings = shooting(made, "Split", weights=str(tmp_path / "features.safetensors"), prepare_epochs=60, steps=1)
    few.few_shot(settings, tmp_path / "out", ("weight",), ("physical",), draws=1)
    model, own, _ = few.whole(settings, tmp_path / "out" / settings.name, "cpu")
    assert own
    assert model.classifier[3].out_features == 3
    torch.testing.assert_close(model.features[0].weight, state["features.0.weight"].float())
    assert (tmp_path / "out" / settings.name / "prepared" / "00.safetensors").exists()


def test_pairs_of_data_sets_use_groups_of_outputs(tmp_path):
    for name in ("aircraft", "cars"):
        if name == "cars":
            classes(tmp_path / name / "train", ["a", "b"], 3)
            classes(tmp_path / name / "test", ["a", "b"], 2)
            continue
        root = tmp_path / name / "data"
        classes(root, ["images"], 8)
        for part, rows in (("trainval", range(4)), ("test", range(4, 8))):
            for i in rows:
                (root / "images" / f"{i:03d}.png").rename(root / "images" / f"{i:03d}.jpg")
            (root / f"images_variant_{part}.txt").write_text("".join(f"{i:03d} x\n" for i in rows))
    drawn = Source.read("aircraft+cars", tmp_path).draw(0, 3, 2, 1000, False)
    assert drawn.outputs == {"aircraft": GROUPS["aircraft"], "cars": GROUPS["cars"]}
    assert (drawn.reference.labels, len(drawn.test)) == ((0, 0, 1, 1), 8)
    with pytest.raises(DataError, match="no pair"):
        Source.read("cars+boats", tmp_path)


# -- networks ----------------------------------------------------------------------------------------------------------
def test_the_networks_of_the_paper_have_its_filters():
    pytest.importorskip("torchvision")
    counts = {"alexnet": 1152, "vgg16": 4224, "resnet18": 4800, "resnet50": 26560}
    for name in ("alexnet", "resnet18", "resnet50"):
        model = networks.network(name)[0]
        assert sum(networks.kept(model).values()) == counts[name]
        assert list(networks.kept(model)) == networks.parts(model)["conv"]
    early = networks.network("resnet50", early_strides=True)[0]
    assert (early.layer2[0].conv1.stride, early.layer2[0].conv2.stride) == ((2, 2), (1, 1))
    assert (early.layer1[0].conv1.stride, early.layer2[1].conv1.stride) == ((1, 1), (1, 1))
    stem = networks.small_stem(networks.network("resnet18")[0])
    assert stem.layer1(stem.maxpool(stem.conv1(torch.zeros(1, 3, 32, 32)))).shape == (1, 64, 32, 32)


def test_new_classifiers(made):
    net = networks.with_classes(fresh(f"{made / 'nets.py'}:Split"), 7)
    assert net.classifier[3].out_features == 7
    assert networks.is_split(net)
    other = networks.with_classes(fresh(f"{made / 'nets.py'}:Residual"), 7)
    assert (other.fc.in_features, other.fc.out_features, networks.is_split(other)) == (8, 7, False)
    with pytest.raises(UnsupportedModelError, match="no linear layer"):
        networks.with_classes(nn.Sequential(nn.Conv2d(3, 2, 1)), 7)
    with pytest.raises(UnsupportedModelError, match="no bottlenecks"):
        networks.network(f"{made / 'nets.py'}:Split", early_strides=True)


# -- reading results ---------------------------------------------------------------------------------------------------
def history(*rows):
    return History([Row(i, 0, r, 1, m, {"overall": a, "kept a": k}) for i, (r, m, a, k) in enumerate(rows)])


def test_shares_are_of_filters_even_if_more_units_are_counted():
    run = Run(0, "physical", "lrp", history((0, 100, 0.9, 10), (0.01, 80, 0.8, 8), (0.02, 50, 0.5, 4)))
    assert run.curve.removed == pytest.approx([0, 0.2, 0.6])
    assert run.at(0.55).macs == 50
    assert at(run.curve, 0.4) == pytest.approx(0.65)
    assert at(run.curve, 0.65, "macs") == pytest.approx(0.65)
    assert at(run.curve, 0.9) is None


def test_files_that_have_the_papers_costs_as_columns_are_read(tmp_path):
    rows = [{"step": 0, "units": 9, "removed": 0.0, "params": 80, "macs": 90, "metrics": {"overall": 0.5},
             "macs_alone": 95, "params_alone": 85}]  # fmt: skip
    (tmp_path / "00-paper-lrp.json").write_text(json.dumps(rows))
    (run,) = Folder(tmp_path).runs()
    row = run.history[0]
    assert (row.macs, paper_cost(row, "macs"), row.params, paper_cost(row, "params")) == (90, 95, 80, 85)
    assert row.overall == 0.5
    for damaged in ("[", "7", '["a"]'):
        (tmp_path / "00-paper-lrp.json").write_text(damaged)
        with pytest.raises(FileFormatError):
            Folder(tmp_path).runs()


def test_the_largest_lead_is_found_where_it_is():
    x = np.array([0, 0.5, 1.0])
    better = Curve("lrp", x, 1 - x, np.array([1, 1, 0.2]))
    worse = Curve("weight", x, 1 - x / 2, np.array([1, 0.6, 0.2]))
    assert lead([better, better], [worse], "removed") == pytest.approx((40, 0.5))


def test_what_the_paper_prints():
    assert (rate("resnet18", "catsdogs"), rate("vgg16", "birds")) == (0.45, None)
    assert printed("vgg16", "scene15", "accuracy", "unpruned") == 88.59
    assert printed("resnet50", "scene15", "accuracy", "gradient") == 78.71
    assert printed("alexnet", "scene15", "flops", "unpruned") == pytest.approx(0.71151)
    assert (margin("resnet50", "gradient"), margin("alexnet", "taylor")) == (54.5, None)


def test_what_is_missing_is_said(made, tmp_path):
    for arguments, expected in (
        (["few-shot"], "--model is needed"),
        (["fine-tune", "--model", "vgg16"], "--images is needed"),
        (["fine-tune", "--table-only", "--out", str(tmp_path)], "no finished runs"),
        (["few-shot", "--model", "x", "--images", str(made), "--mode", "real"], "'real' is not known"),
    ):
        done = CliRunner().invoke(commands, arguments)
        assert done.exit_code == 1
        assert expected in done.output
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "settings.json").write_text("{")
    with pytest.raises(FileFormatError, match="damaged"):
        Folder(tmp_path / "x").settings()


@pytest.mark.parametrize("command", ["few-shot", "fine-tune"])
@pytest.mark.parametrize("option", ["--out", "--pages"])
def test_experiments_are_kept_apart_from_images(tmp_path, command, option):
    out = tmp_path.parent / "elsewhere"
    arguments = [command, "--model", "alexnet", "--images", tmp_path, "--out", out, option, tmp_path / "pages"]
    done = CliRunner().invoke(commands, list(map(str, arguments)))
    assert done.exit_code == 1
    assert "the folder of --images" in done.output
    assert list(tmp_path.iterdir()) == []


def test_sections_whose_runs_are_not_at_hand_stay() -> None:
    page = "# Title\n\ntext\n\n## a on x\n\nold a\n\n### table\n\n## b on x\n\nold b\n"
    made = [["## b on x", "", "new b", ""], ["## c on x", "", "new c", ""]]
    found = with_kept(page, made)
    assert found == ["## a on x", "", "old a", "", "### table", "", *made[0], *made[1]]
    assert with_kept("", made) == [*made[0], *made[1]]


def test_some_draws_are_asked_for() -> None:
    assert (list(_range("3")), list(_range("1:3"))) == ([0, 1, 2], [1, 2])
    for wrong in ("0", "3:1", "x", "-1:2", "1:"):
        with pytest.raises(typer.BadParameter, match="no number of draws"):
            _range(wrong)
