"""Image classifiers: what they compute, and that they can be trained and made again."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from hdnn import models
from hdnn.errors import HDNNError, ShapeError

MODELS = {
    "mnist_net": lambda **o: models.mnist_net("h2", 2, size=6, **o),
    "mnist_linear": lambda **o: models.mnist_net(None, size=6, **o),
    "hdnn_star_h1": lambda **o: models.hdnn_star(
        "h1", [3, 1], (4, 8), size=8, **o
    ),
    "hdnn_star_h2": lambda **o: models.hdnn_star(
        "h2",
        2,
        (4, 8),
        size=8,
        norm="inside",
        stem_norm=True,
        pool="mean",
        **o,
    ),
    "resnet": lambda **o: models.resnet56(depth=8, **o),
}


def images(name, dtype=torch.float32, batch=3):
    size, channels = (6, 1) if name.startswith("mnist") else (8, 3)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(
        batch, channels, size, size, generator=generator, dtype=dtype
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_made_again_by_its_config_and_repeats_for_a_seed(name):
    first, second = (
        MODELS[name](generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    )
    x = images(name)
    assert torch.equal(first.eval()(x), second.eval()(x))
    twin = type(first)(**first.config()).eval()
    twin.load_state_dict(first.state_dict())
    assert torch.equal(twin(x), first(x))
    first.train()(x).square().sum().backward()
    assert all(p.grad is not None for p in first.parameters())
    empty = MODELS[name](device="meta").to_empty(device="cpu")
    empty.reset_parameters(torch.Generator().manual_seed(1))
    assert empty(x).isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        partial(models.hdnn_star, "h1", 2, (4, 6), size=8),
        partial(models.hdnn_star, "h2", 2, (4, 6), size=8),
        partial(models.resnet56, depth=8),
    ],
)
def test_layers_are_left_out_while_training_only(make):
    complete, dropping = make(), make(drop=0.6)
    dropping.load_state_dict(complete.state_dict())
    x = images("star", batch=1).repeat(20, 1, 1, 1)
    assert torch.equal(dropping.eval()(x), complete.eval()(x))
    torch.manual_seed(0)
    y = dropping.train()(x)
    assert (y - y[0]).abs().amax(
        1
    ).unique().numel() > 3  # equal images take different paths


def test_later_layers_are_left_out_more_often():
    units = models.hdnn_star("h1", (3, 1), (4, 6), size=8, drop=0.4).units
    assert [unit.drop for unit in units] == [
        (0.1, 0.2, pytest.approx(0.3)),
        (0.4,),
    ]
    blocks = models.resnet56(depth=8, drop=0.3).blocks
    assert [block.drop for block in blocks] == pytest.approx([0.1, 0.2, 0.3])


def test_the_mnist_net_mixes_the_channels_of_each_pixel():
    model = models.mnist_net("h1", 3, dtype=torch.float64, size=6)
    x = images("mnist", torch.float64)
    y = model.stem(x)
    for K, b in zip(model.net.K, model.net.b, strict=True):
        z = torch.tanh(F.conv2d(y, K[:, :, None, None], b))
        p, q = F.conv_transpose2d(z, K[:, :, None, None]).chunk(2, 1)
        y = y + 0.5 * torch.cat([-q, p], 1)
    torch.testing.assert_close(model.features(x), y.movedim(1, -1).flatten(1))
    torch.testing.assert_close(model.smoothness(), model.net.smoothness())
    assert models.mnist_net(None).smoothness() == 0
    assert models.mnist_net("h1", 0).net is None


def test_hdnn_star_pools_and_pads_between_its_units():
    model = models.hdnn_star(
        layers=1, channels=(4, 8), size=8, dtype=torch.float64
    )
    x = images("star", torch.float64)
    first, second = model.units
    before = F.avg_pool2d(first(model.stem(x)), 2)
    y = second(torch.cat([before, torch.zeros_like(before)], 1))
    y = F.avg_pool2d(y, 2)
    torch.testing.assert_close(model.features(x), y.flatten(1))
    model.pool = "mean"
    torch.testing.assert_close(model.features(x), y.mean((2, 3)))


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)
def test_hdnn_star_compiles_into_one_graph():
    torch._dynamo.reset()
    model = models.hdnn_star("h2", 1, (4, 8), size=8, dtype=torch.float64)
    x = images("star", torch.float64)
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: models.mnist_net("h3"), "not known"),
        (lambda: models.mnist_net("h1", -1), "layers"),
        (lambda: models.hdnn_star(channels=(8, 4)), "must not decrease"),
        (
            lambda: models.hdnn_star(layers=(6, 6)),
            "layers has 2 entries for 3 units",
        ),
        (
            lambda: models.hdnn_star(layers=(6, 0, 6)),
            "layers must be a whole number >= 1",
        ),
        (lambda: models.hdnn_star(pool="max"), "not known"),
        (lambda: models.hdnn_star(drop=1.0), "drop must be"),
        (lambda: models.resnet56(depth=10), "6 n"),
    ],
)
def test_what_no_model_can_be_is_an_error(make, text):
    with pytest.raises(HDNNError, match=text):
        make()


def test_images_of_another_shape_are_an_error():
    with pytest.raises(ShapeError, match=r"\(B, 1, 28, 28\)"):
        models.mnist_net("h1", 1)(torch.zeros(2, 28, 28))
    model = models.alexnet(device="meta")
    with pytest.raises(ShapeError, match=r"\(B, 3, height, width\)"):
        model(torch.zeros(1, 1, 32, 32, device="meta"))
    with pytest.raises(ShapeError, match="list"):
        models.resnet56(depth=8)([])
