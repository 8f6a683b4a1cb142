"""The image classifiers: their sizes, their definitions, and that they learn, load and repeat."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from hdnn import models
from hdnn.errors import HDNNError, ShapeError
from hdnn.models import base, baselines, star
from strategies import Random

SMALL = {
    "mnist_net": lambda **o: models.mnist_net("h1", 2, size=6, **o),
    "mnist_net_ms1": lambda **o: models.mnist_net("ms1", 2, size=6, **o),
    "mnist_net_none": lambda **o: models.mnist_net(None, 0, size=6, **o),
    "mnist_conv": lambda **o: models.mnist_conv(layers=1, channels=(4, 8), **o),
    "hdnn_star_h1": lambda **o: models.hdnn_star("h1", 2, (4, 8, 12), size=8, **o),
    "hdnn_star_by_unit": lambda **o: models.hdnn_star("h1", [3, 1], (4, 8), size=8, **o),
    "hdnn_star_h2": lambda **o: models.hdnn_star(
        "h2", 2, (4, 8), size=8, norm="inside", stem_norm=True, padding="halves", pool="mean", **o
    ),
    "resnet": lambda **o: models.resnet56(depth=8, **o),
}


def images(name, dtype=torch.float32, batch=3):
    size = 28 if name == "mnist_conv" else 6 if name.startswith("mnist") else 8
    return Random(0)(batch, 1 if name.startswith("mnist") else 3, size, size).to(dtype)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (models.hdnn_star, 973_930),
        (models.resnet56, 853_018),
        (models.alexnet, 57_044_810),
        (lambda **o: models.mnist_net("h1", 8, **o), 80 + 8 * (64 + 8) + 62_730),
        (lambda **o: models.mnist_net("ms1", 8, **o), 80 + 8 * (16 + 8) + 62_730),
        (lambda **o: models.mnist_net(None, **o), 80 + 62_730),
        (lambda **o: models.mnist_net("h2", 0, **o), 80 + 62_730),
    ],
)
def test_each_model_has_the_parameters_of_its_definition(make, parameters):
    assert count(make(device="meta")) == parameters


@pytest.mark.parametrize("name", SMALL)
def test_a_model_loads_repeats_and_has_gradients(name):
    def make(seed):
        return SMALL[name](generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    before = torch.get_rng_state()
    a, b, c = make(0), make(0), make(1)
    assert torch.equal(torch.get_rng_state(), before)
    x = images(name, torch.float64)
    out = a(x)
    assert out.shape == (3, 10)
    assert torch.equal(out, b(x))
    assert not torch.equal(out, c(x))
    c.load_state_dict(b.state_dict())
    assert torch.equal(c.eval()(x), b.eval()(x))
    torch.testing.assert_close(a.linear(a.features(x)), out, rtol=1e-9, atol=1e-9)
    (out.logsumexp(1).sum() + a.smoothness()).backward()
    for parameter, p in a.named_parameters():
        assert p.grad is not None, parameter
        assert torch.isfinite(p.grad).all(), parameter


@pytest.mark.parametrize("name", SMALL)
def test_a_model_learns_a_handful_of_images(name):
    model = SMALL[name](generator=torch.Generator().manual_seed(0))
    x, t = images(name, batch=8), torch.arange(8)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(model(x), t).backward()
        optimiser.step()
    assert (model(x).argmax(1) == t).all()


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_and_autocast_change_little(name):
    model = SMALL[name](generator=torch.Generator().manual_seed(0)).eval()
    x = images(name)
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x)
    torch.testing.assert_close(low.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "make",
    [
        partial(models.hdnn_star, "h1", 2, (4, 6), size=8),
        partial(models.hdnn_star, "h2", 2, (4, 6), size=8),
        partial(models.resnet56, depth=8),
    ],
)
def test_layers_are_left_out_while_training_only(make):
    with_all, without = make(), make(drop=0.6)
    without.load_state_dict(with_all.state_dict())
    x = Random(0)(1, 3, 8, 8).float().repeat(20, 1, 1, 1)
    assert torch.equal(without.eval()(x), with_all.eval()(x))
    torch.manual_seed(0)
    y = without.train()(x)
    assert (y - y[0]).abs().amax(1).unique().numel() > 3  # the images are alike, their ways are not
    assert "drop to 0.6" in repr(without)
    with pytest.raises(HDNNError, match="drop must be at least 0 and below 1"):
        make(drop=1.0)


def test_later_layers_are_left_out_more_often():
    units = models.hdnn_star("h2", 2, (4, 6), size=8, drop=0.4).units
    assert [unit.drop for unit in units] == [(0.1, 0.2), (pytest.approx(0.3), 0.4)]
    units = models.hdnn_star("h1", (3, 1), (4, 6), size=8, drop=0.4).units
    assert [unit.drop for unit in units] == [(0.1, 0.2, pytest.approx(0.3)), (0.4,)]
    blocks = models.resnet56(depth=8, drop=0.3).blocks
    assert [block.drop for block in blocks] == pytest.approx([0.1, 0.2, 0.3])


def test_the_mnist_net_mixes_the_channels_of_each_pixel():
    model = models.mnist_net("h1", 3, dtype=torch.float64)
    assert model.net.step == 0.5
    assert models.mnist_net("ms1", 3).net.step == 0.4
    x = Random(0)(2, 1, 28, 28)
    y = model.stem(x)
    for K, b in zip(model.net.K, model.net.b, strict=True):
        z = torch.tanh(F.conv2d(y, K[:, :, None, None], b))
        p, q = F.conv_transpose2d(z, K[:, :, None, None]).chunk(2, 1)
        y = y + 0.5 * torch.cat([-q, p], 1)
    torch.testing.assert_close(model.features(x), y.movedim(1, -1).flatten(1))
    torch.testing.assert_close(model.smoothness(), model.net.smoothness())
    assert models.mnist_net(None).net is None
    assert models.mnist_net(None).smoothness() == 0


def test_hdnn_star_pools_and_pads_between_its_units():
    model = models.hdnn_star(layers=1, channels=(4, 8), size=8, dtype=torch.float64)
    x = Random(0)(2, 3, 8, 8)
    first, second = model.units
    y = F.avg_pool2d(first(model.stem(x)), 2)
    y = second(torch.cat([y, torch.zeros(2, 4, 4, 4, dtype=y.dtype)], 1))
    y = F.avg_pool2d(y, 2)
    torch.testing.assert_close(model.features(x), y.flatten(1))
    model.pool = "scaled"
    torch.testing.assert_close(model.features(x), y.flatten(1) / y.shape[2])
    model.pool = "mean"
    torch.testing.assert_close(model.features(x), y.mean((2, 3)))
    assert [unit.guarantee().holds for unit in model.units] == [True, True]


def test_padding_by_halves_keeps_p_and_q_apart():
    y = Random(0)(1, 4, 2, 2)
    after = star.padded(y, 8, "halves")
    assert torch.equal(after[:, [0, 1, 4, 5]], y)
    assert not after[:, [2, 3, 6, 7]].any()


def test_the_shortcut_of_a_resnet_takes_every_other_pixel():
    make = base.LayerMaker(None, torch.float64, None)
    block = baselines.ResidualBlock(2, 4, 0.0, make).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = Random(0)(1, 2, 4, 4)
    out = block(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2].relu())
    assert not out[:, 2:].any()


@pytest.mark.slow
def test_alexnet_takes_small_images_or_its_own_size():
    model = models.alexnet(3).eval()
    x = Random(0)(1, 3, 32, 32).float()
    large = F.interpolate(x, (224, 224), mode="bilinear")
    expected = model(large)
    assert expected.shape == (1, 3)
    torch.testing.assert_close(model(x), expected)
    model.resize = False
    torch.testing.assert_close(model(large), expected)
    with pytest.raises(ShapeError, match="224"):
        model(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_hdnn_star_compiles_into_one_graph():
    torch._dynamo.reset()
    model = models.hdnn_star("h2", 1, (4, 8), size=8, dtype=torch.float64)
    x = Random(0)(2, 3, 8, 8)
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.mnist_net("h3"), "not known"),
        (lambda: models.mnist_net("h1", -1), "layers"),
        (lambda: models.hdnn_star(channels=(8, 4)), "must grow"),
        (lambda: models.hdnn_star(size=20), "halved 3 times"),
        (lambda: models.hdnn_star(layers=(6, 6)), "layers has 2 entries for 3 units"),
        (lambda: models.hdnn_star(layers=(6, 0, 6)), "layers must be a whole number >= 1"),
        (lambda: models.hdnn_star(layers=2.5), "layers must be a whole number >= 1"),
        (lambda: models.hdnn_star(padding="start"), "not known"),
        (lambda: models.hdnn_star(pool="max"), "not known"),
        (lambda: models.resnet56(depth=10), "6 n"),
        (lambda: models.alexnet(dropout=1.0), "dropout"),
        (lambda: models.hdnn_star(device="nowhere"), "device"),
    ],
)
def test_what_no_model_can_be_is_an_error(make, message):
    with pytest.raises(HDNNError, match=message):
        make()


def test_images_of_another_shape_are_an_error():
    with pytest.raises(ShapeError, match=r"\(B, 1, 28, 28\)"):
        models.mnist_net("h1", 1)(torch.zeros(2, 28, 28))
    with pytest.raises(ShapeError, match=r"\(B, 3, 32, 32\)"):
        models.hdnn_star(layers=1)(torch.zeros(2, 3, 28, 28))
    with pytest.raises(ShapeError, match="list"):
        models.resnet56(depth=8)([])
    with pytest.raises(NotImplementedError):
        models.ImageModel().features(torch.zeros(1))
