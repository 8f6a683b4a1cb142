"""Training on images: recipes, resuming, and what goes into a loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from hdnn.data import ImageData
from hdnn.errors import CheckpointError, ConvergenceError, OptionError
from hdnn.training import ImageRecipe, fit_images, recipes

RECIPE = ImageRecipe(
    epochs=3, batch=20, learning_rate=0.05, pad=1, flip=True, clip=1.0
)


def squares(count=120, size=8):
    """Images whose class is the half that is bright."""
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(count) % 2
    images = torch.randint(0, 60, (count, 1, size, size), generator=generator)
    images[t == 0, :, : size // 2] += 150
    images[t == 1, :, size // 2 :] += 150
    half = count // 2
    parts = (images[:half].byte(), t[:half], images[half:].byte(), t[half:])
    return ImageData("squares", *parts, ("up", "down"), (0.4,), (0.3,))


def network(seed=0):
    torch.manual_seed(seed)
    layers = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(256, 2))


def state(model):
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def test_images_are_learned():
    model = network()
    history = fit_images(model, squares(), RECIPE, progress=False)
    assert history.validation_score[-1] > 0.9
    assert (
        len(history.loss)
        == len(history.accuracy)
        == len(history.validation_loss)
        == 3
    )
    assert not model.training


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_interrupted_training_resumes_to_the_same_bits(tmp_path, optimizer):
    recipe = dataclasses.replace(RECIPE, optimizer=optimizer)
    straight, first, second = network(), network(), network(seed=1)
    fit_images(straight, squares(), recipe, progress=False)
    torch.manual_seed(99)  # the global state plays no part
    options = {"folder": tmp_path, "progress": False}
    fit_images(
        first,
        squares(),
        recipe,
        callbacks=[lambda moment: moment.epoch == 2],
        **options,
    )
    history = fit_images(second, squares(), recipe, resume=True, **options)
    assert torch.equal(state(straight), state(second))
    assert len(history.loss) == 3
    other = dataclasses.replace(recipe, seed=1)
    with pytest.raises(CheckpointError, match="its seed"):
        fit_images(network(), squares(), other, resume=True, **options)


def test_no_epoch_begins_after_the_time_is_over(tmp_path):
    history = fit_images(
        network(), squares(), RECIPE, seconds=-1.0, progress=False
    )
    assert history.loss == []


def test_a_training_that_diverges_says_so():
    recipe = dataclasses.replace(
        RECIPE, learning_rate=1e30, clip=None, epochs=20
    )
    with pytest.raises(ConvergenceError, match="not finite in epoch"):
        fit_images(network(), squares(), recipe, progress=False)


def test_mistakes_are_refused():
    with pytest.raises(OptionError, match="larger than the set of 60"):
        fit_images(network(), squares(), dataclasses.replace(RECIPE, batch=61))
    with pytest.raises(OptionError, match="optimizer"):
        ImageRecipe(optimizer="lbfgs")
    with pytest.raises(OptionError, match="weight_decay"):
        ImageRecipe(weight_decay=-1.0)


def test_rates_rise_and_fall():
    cosine = ImageRecipe(epochs=10, warmup=0.1)
    factors = [cosine.factor(step, 10) for step in range(100)]
    assert factors[9] == pytest.approx(1.0)
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] < 1e-3
    steps = ImageRecipe(epochs=4, rates=((0, 1.0), (2, 0.1)))
    assert [steps.factor(epoch * 5, 5) for epoch in range(4)] == [
        1.0,
        1.0,
        0.1,
        0.1,
    ]
    assert ImageRecipe(decay=0.5).factor(10, 5) == 0.25


def test_the_bounded_loss_tends_to_the_cross_entropy():
    scores = torch.randn(10, 3, dtype=torch.float64)
    t = torch.arange(10) % 3
    plain = ImageRecipe().loss(scores, t)
    assert ImageRecipe(power=1e-6).loss(scores, t) == pytest.approx(
        float(plain), rel=1e-4
    )
    assert ImageRecipe(power=1.0).loss(scores, t) < 1


@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_every_network_has_a_recipe(data):
    for name in recipes.NETWORKS[data]:
        recipe = recipes.image_recipe(data, name, epochs=2)
        assert recipe.epochs == 2
        settings = recipes.image_settings(data, name, epochs=160)
        assert recipes.image_network(data, name, **settings)
    with pytest.raises(OptionError, match="h2"):
        recipes.image_recipe(data, "h22")


def test_networks_have_the_parameters_of_the_tables():
    counts = {
        ("cifar10", "h1"): 974_762,
        ("mnist", "h1"): 63_290,
        ("mnist", "h2"): 63_034,
    }
    for (data, name), expected in counts.items():
        model = recipes.image_network(data, name)
        count = sum(p.numel() for p in model.parameters())
        assert abs(count - expected) < 0.01 * expected
