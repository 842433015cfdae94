"""What makes the image experiments fit a GPU must not change them: wider layers, images scaled when needed, a part."""

import pytest
import torch
from torch import nn

from reproduction.alignment import aligned, take_back
from reproduction.published import scaled
from reproduction.training import Images, crops
from secateur.data.views import View
from secateur.errors import SecateurError

SGD = {"lr": 0.05, "momentum": 0.9}


class Split(nn.Module):
    """Features and a classifier with uneven numbers of filters, as they are after a removal."""

    def __init__(self, filters=(5, 11, 8), groups=1):
        super().__init__()
        first, second, third = filters
        self.features = nn.Sequential(
            nn.Conv2d(3, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1, groups=groups), nn.ReLU(inplace=True), nn.Conv2d(second, third, 1),
            nn.ReLU(),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(4 * third, 7), nn.ReLU(), nn.Linear(7, 3))

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def trained(net, steps=6):
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    torch.manual_seed(3)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(torch.randn(10, 3, 8, 8).double()), torch.arange(10) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("filters", [(5, 11, 8), (8, 16, 3), (1, 7, 9)])
def test_wider_layers_compute_and_train_the_same(filters):
    torch.manual_seed(0)
    net = Split(filters).double()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    wide = aligned(net)
    assert [m.out_channels for m in wide.modules() if isinstance(m, nn.Conv2d)] == [-(-n // 8) * 8 for n in filters]
    x = torch.randn(4, 3, 8, 8).double()
    torch.testing.assert_close(wide(x), net(x))
    trained(wide)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    take_back(wide, net)
    alone = Split(filters).double()
    alone.load_state_dict(before)
    trained(alone)
    assert not torch.equal(alone.features[0].weight, before["features.0.weight"])
    for a, b in zip(net.parameters(), alone.parameters(), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b)


def test_a_network_that_needs_no_wider_layers_or_has_others_is_left_alone():
    even, grouped, other = Split((8, 16, 8)), Split((6, 12, 8), groups=2), nn.Sequential(nn.Conv2d(3, 5, 3))
    assert all(aligned(net) is net for net in (even, grouped, other))


def test_frozen_layers_stay_frozen_in_the_wider_copy():
    net = Split()
    net.features[3].weight.requires_grad_(False)
    wide = aligned(net)
    flags = [[p.requires_grad for p in model.parameters()] for model in (net, wide)]
    assert flags[0] == flags[1]
    assert flags[0].count(False) == 1


def test_numbers_in_the_channels_that_were_added_are_refused():
    net = Split()
    wide = aligned(net)
    with torch.no_grad():
        wide.features[3].weight[0, 7, 0, 0] = 0.1
    with pytest.raises(SecateurError, match=r"features\.3\.weight"):
        take_back(wide, net)


def test_images_that_are_scaled_when_needed_are_those_that_were_scaled_before():
    view = View(12, "squash")
    pixels = torch.randint(256, (9, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    labels = torch.arange(9)
    small = Images(pixels, labels, view)
    found = torch.cat([inputs for inputs, _ in small.batches(4)])
    assert torch.equal(found, view.evaluation(scaled(pixels, view.side(training=False))))
    torch.manual_seed(1)
    ((now, order),) = crops(small, 3)
    torch.manual_seed(1)
    ((before, same),) = crops(Images(scaled(pixels, view.side(training=True)), labels, view), 3)
    assert torch.equal(order, same)
    assert torch.equal(now, before)


def test_some_images_are_drawn_in_order_and_by_the_seed():
    images = Images(torch.arange(30).byte().view(30, 1, 1, 1), torch.arange(30), View(1))
    some, again, other = images.take(7, seed=0), images.take(7, seed=0), images.take(7, seed=1)
    assert some.labels.tolist() == sorted(set(some.labels.tolist()))
    assert (len(some), some.pixels.flatten().tolist()) == (7, some.labels.tolist())
    assert torch.equal(some.labels, again.labels)
    assert not torch.equal(some.labels, other.labels)
    assert images.take(30, seed=0) is images
