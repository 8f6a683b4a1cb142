"""Training on images: what is random comes from the epoch's number, all else from the recipe."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn

from hdnn import engine, models
from hdnn.data.images import ImageData
from hdnn.errors import CheckpointError, OptionError, TrainingError
from hdnn.experiments import runner, table_cifar, table_mnist
from hdnn.training import identity
from hdnn.training.images import ImageRecipe, ImageTraining, next_epoch, run_together
from hdnn.training.images import recipes as image_recipes


def images(count=120, channels=1, size=28, seed=0) -> ImageData:
    """Two classes: bright above, or bright below."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(count) % 2
    x = torch.randint(0, 100, (count, channels, size, size), generator=generator)
    half = size // 2
    for i, label in enumerate(t.tolist()):
        x[i, :, label * half : (label + 1) * half] += 100
    x, k = x.to(torch.uint8), count // 3
    parts = (x[k:], t[k:], x[:k], t[:k])
    return ImageData("Halves", *parts, tuple("0123456789"), (0.4,) * channels, (0.2,) * channels)


def small(seed=0) -> nn.Module:
    torch.manual_seed(seed)
    return models.mnist_net("h2", 2)


RECIPE = ImageRecipe(epochs=3, batch=20, optimizer="adam", learning_rate=3e-3, decay=0.8)


def train(model, recipe=RECIPE, data=None, **options):
    training = ImageTraining(model, data or images(), recipe, **options)
    return training, training.run(progress=False)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"optimizer": "sgd", "learning_rate": 0.01, "decay": None, "clip": 1.0, "pad": 2},
        {"cut": 8, "flip": True, "pad": 1},
        {"power": 0.5},
        {"smoothness": 1e-3, "weight_decay": 1e-3, "label_smoothing": 0.1, "learning_rate": 1e-3},
    ],
)
def test_a_small_net_learns_and_says_how_it_went(change):
    model = small()
    recipe = ImageRecipe(**{**vars(RECIPE), **change})
    training, history = train(model, recipe, smooth=(model.net,))
    assert history.test[-1] > 0.9
    assert history.loss[-1] < history.loss[0]
    assert len(history.accuracy) == 3
    assert training.accuracy(*images().holdout(20)[0]) > 0.9


def test_one_seed_is_one_training():
    first, second = small(), small()
    train(first)
    train(second)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    other = small()
    train(other, ImageRecipe(**{**vars(RECIPE), "seed": 1}))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_a_training_goes_on_to_the_same_bits(tmp_path):
    whole, parts = small(), small()
    train(whole)
    training = ImageTraining(parts, images(), RECIPE)
    training.run(folder=tmp_path, until=0.0, progress=False)  # one epoch
    assert training.epoch == 1
    again = ImageTraining(small(3), images(), RECIPE)
    history = again.run(folder=tmp_path, resume=True, progress=False)
    assert len(history.test) == 3
    for a, b in zip(whole.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    other = ImageTraining(small(), images(), ImageRecipe(**{**vars(RECIPE), "batch": 40}))
    with pytest.raises(CheckpointError, match="batch"):
        other.run(folder=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"its model is '\w+ with [\d,]+ para.*', not 'ResN"):
        ImageTraining(models.resnet56(depth=8), images(), RECIPE).open(tmp_path)


def test_the_outline_of_a_network_is_not_that_of_the_pytorch_beneath(monkeypatch):
    star = partial(models.hdnn_star, layers=1, channels=(4,), stem_norm=True, norm="after")
    before = identity.outline(star())
    for kind in (torch.nn.BatchNorm2d, torch.nn.Conv2d, torch.nn.Linear):
        monkeypatch.setattr(kind.extra_repr, "__code__", (lambda self: "other words").__code__)
    assert "other words" in repr(star())
    assert identity.outline(star()) == before
    others = [{"pool": "scaled"}, {"padding": "halves"}, {"step": 0.2}, {"activation": "gelu"}]
    assert len({before, *(identity.outline(star(**options)) for options in others)}) == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.hdnn_star("h2", 2, (4, 8), size=12, inputs=1, drop=0.4),
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 10)),
    ],
)
def test_what_a_network_draws_is_the_same_after_a_break_and_beside_others(make, tmp_path):
    def new(seed=0):
        torch.manual_seed(seed)
        return ImageTraining(make(), data, RECIPE)

    data = images(size=12)
    whole = new()
    torch.manual_seed(5)  # nobody else's numbers are used, nor moved
    before = torch.get_rng_state()
    whole.run(progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    new().run(folder=tmp_path, until=0.0, progress=False)
    broken, beside = new(3), [new(), new(1)]
    broken.run(folder=tmp_path, resume=True, progress=False)
    run_together(beside)
    end, *others = (
        nn.utils.parameters_to_vector(one.model.parameters()) for one in (whole, broken, beside[0])
    )
    assert all(torch.equal(end, other) for other in others)


def test_together_is_as_alone():
    alone, beside = small(), [small(), small(1)]
    _, history = train(alone)
    longer = ImageRecipe(**{**vars(RECIPE), "epochs": 4, "seed": 1})
    recipes = (RECIPE, longer)
    trainings = [
        ImageTraining(m, images(), recipe) for m, recipe in zip(beside, recipes, strict=True)
    ]
    assert run_together(trainings)
    assert trainings[0].history.test == history.test
    assert [len(one.history.test) for one in trainings] == [3, 4]
    for a, b in zip(alone.parameters(), beside[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_together_goes_on_from_checkpoints(tmp_path):
    whole = [small(), small(1)]
    run_together([ImageTraining(m, images(), RECIPE) for m in whole])
    folders = [tmp_path / "a" / "b", tmp_path / "c"]
    first = [ImageTraining(small(k), images(), RECIPE) for k in (0, 1)]
    assert not run_together(first, folders=folders, until=-1.0)
    next_epoch(first[:1], folders[:1])  # the one is ahead of the other, which has no checkpoint
    again = [ImageTraining(small(k), images(), RECIPE) for k in (9, 1)]
    assert run_together(again, folders=folders)
    for a, b in zip(whole, again, strict=True):
        assert len(b.history.test) == 3
        for p, q in zip(a.parameters(), b.model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["h1", "h2", "ms1"])
def test_on_a_gpu_a_recorded_step_is_a_step(network):
    ends = []
    for graphs in (True, False):
        torch.manual_seed(0)
        model = models.mnist_net(network, 2).cuda()
        recipe = ImageRecipe(**{**vars(RECIPE), "pad": 1, "smoothness": 1e-3})
        train(model, recipe, smooth=(model.net,), graphs=graphs)
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("network", ["h1", "h2"])
def test_on_a_gpu_a_training_goes_on_where_it_was(network, drop, tmp_path):
    def make():
        torch.manual_seed(0)
        options = {"norm": "both", "stem_norm": True, "reversible": False, "drop": drop}
        model = models.hdnn_star(network, 2, (4, 8), size=12, inputs=1, **options)
        return model.cuda().to(memory_format=torch.channels_last)

    change = {"optimizer": "sgd", "learning_rate": 0.05, "decay": None, "clip": 1.0, "pad": 2}
    recipe = ImageRecipe(**{**vars(RECIPE), **change, "bf16": True})
    data = images(size=12)
    whole, _ = train(make(), recipe, data)
    ImageTraining(make(), data, recipe).run(folder=tmp_path, until=0.0, progress=False)
    again = ImageTraining(make(), data, recipe)
    again.run(folder=tmp_path, resume=True, progress=False)
    assert again.history.loss == pytest.approx(whole.history.loss, rel=1e-3)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_trainings_side_by_side_draw_what_each_draws_alone():
    def make(seed, data):
        torch.manual_seed(seed)
        shape = data.images_train.shape[1:]
        layers = [nn.Linear(shape.numel(), 256), nn.Dropout(0.5), nn.Linear(256, 2)]
        model = nn.Sequential(nn.Flatten(), *layers).cuda()
        return ImageTraining(model, data, ImageRecipe(**{**vars(RECIPE), "seed": seed}))

    data = images(600)
    together = [make(seed, data) for seed in range(4)]
    assert run_together(together)
    for seed, beside in enumerate(together):
        alone = make(seed, data)
        alone.run(progress=False)
        assert alone.history.loss == pytest.approx(beside.history.loss, rel=1e-5)


def test_rates_rise_fall_and_step():
    cosine = ImageRecipe(epochs=10, warmup=0.1)
    factors = [cosine.factor(step, 10) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(1.0)
    assert factors[-1] < 0.01
    steps = ImageRecipe(epochs=160, rates=((0, 1.0), (120, 0.1), (140, 0.01)))
    assert [steps.factor(epoch * 5, 5) for epoch in (0, 119, 120, 159)] == [1.0, 1.0, 0.1, 0.01]
    assert RECIPE.factor(25, 10) == pytest.approx(0.64)


def test_the_loss_of_a_power_is_bounded_and_ends_in_cross_entropy():
    scores, t = 9 * torch.randn(50, 4, dtype=torch.float64), torch.arange(50) % 4
    entropy = nn.functional.cross_entropy(scores, t)
    assert ImageRecipe().loss(scores, t) == entropy
    assert ImageRecipe(power=1e-9).loss(scores, t).item() == pytest.approx(entropy.item())
    p = scores.softmax(1)[torch.arange(50), t]
    assert ImageRecipe(power=0.4).loss(scores, t).item() == pytest.approx(
        ((1 - p**0.4) / 0.4).mean().item()
    )
    assert ImageRecipe(power=1.0).loss(1e6 * scores, t) <= 1.0


def test_what_cannot_be_trained_is_one_sentence():
    with pytest.raises(TrainingError, match="two losses"):
        ImageRecipe(power=0.3, label_smoothing=0.1).checked()
    with pytest.raises(TrainingError, match="label_smoothing must be finite and not negative"):
        ImageRecipe(label_smoothing=-0.1).checked()
    with pytest.raises(TrainingError, match="label_smoothing must be below 1, but got 1"):
        ImageRecipe(label_smoothing=1).checked()
    with pytest.raises(TrainingError, match="larger than the set of 80"):
        ImageTraining(small(), images(), ImageRecipe(batch=200))
    with pytest.raises(TrainingError, match="epochs"):
        ImageTraining(small(), images(), ImageRecipe(epochs=0))
    with pytest.raises(TrainingError, match="not finite in epoch 1"):
        train(small(), ImageRecipe(epochs=1, batch=20, learning_rate=1e30))


def test_the_mnist_table_has_a_row_for_each_network(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table_mnist.mnist, "load", lambda: images(30))
    monkeypatch.setattr(table_mnist, "ROWS", [("none", 0), ("h1", 2), ("h2", 2)])
    options = ["--seeds", "1", "--epochs", "1", "--device", "cpu", "--json", "--quiet"]
    options += ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(image_recipes, "MNIST_BATCH", 10)
    monkeypatch.setitem(image_recipes.MNIST_CONV, "batch", 10)
    with engine.use(engine="reference"):  # to compile kernels would take longer than the table
        assert table_mnist.main(options) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    kinds = ["none", "h1", "h2"]
    assert [row["network"] for row in rows] == [*kinds, *kinds, "conv"]
    assert [row["by"] for row in rows] == ["paper"] * 3 + ["ours"] * 4
    assert all(0 <= row["test"]["mean"] <= 100 for row in rows)
    page = (tmp_path / "table-mnist.md").read_text()
    assert "| ours | h1 | 2 |" in page
    assert "\nCPU with PyTorch 2" in page
    recorded = (tmp_path / "table-mnist.json").read_text()
    assert json.loads(recorded)["rows"] == rows
    assert f'"curves": [\n    [{rows[-1]["curves"][0][0]}]\n' in recorded  # a line for each


def test_only_long_trainings_leave_layers_out():
    for network in ("h1", "h2"):
        short, long = (image_recipes.star(network, image_recipes.LONG - 1 + k) for k in (0, 1))
        assert "drop" not in short
        assert long["drop"] > 0
        model = image_recipes.build("cifar10", network, {}, 0, image_recipes.LONG)
        assert sum(p.numel() for p in model.parameters()) <= 1_000_000
        assert model.stages[-1].drop[-1] == pytest.approx(long["drop"])
        (job,) = table_cifar.jobs_for([network], 1, image_recipes.LONG, validate=False)
        assert job["star"] == long
    assert image_recipes.star("resnet56", 160) is None
    assert image_recipes.star("h1_paper", 160) == image_recipes.star("h1_paper", 40)


def test_the_cifar_table_can_be_made_in_shares(tmp_path, monkeypatch, capsys):
    def few():
        return images(60, channels=3, size=32)

    monkeypatch.setattr(table_cifar.cifar10, "load", few)
    monkeypatch.setitem(image_recipes.CIFAR, "batch", 10)
    monkeypatch.setitem(image_recipes.CIFAR, "learning_rate", 1e-3)
    star = {"network": "h1", "layers": 1, "channels": [4, 6, 8], "step": 0.5, "drop": 0.2}
    monkeypatch.setitem(image_recipes.CIFAR_NETWORKS, "h1", {"star": star, "recipe": {"clip": 1.0}})
    options = ["--seeds", "1", "--epochs", "1", "--device", "cpu", "--quiet", "--networks", "h1"]
    options += ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    for wrong in ("much", "2/2", "1", "-1/2"):
        with pytest.raises(OptionError, match="--share must be given as in 0/4"):
            table_cifar.main([*options, f"--share={wrong}"])
    assert runner.guarded(table_cifar.main, [*options, "--minutes", "0"]) == 130
    assert runner.guarded(table_cifar.main, [*options, "--finished"]) == 2
    assert "no finished training" in capsys.readouterr().err
    assert table_cifar.main([*options, "--share", "0/2"]) == 0
    assert not (tmp_path / "table-cifar-1.md").exists()
    assert table_cifar.main(options) == 0
    page = (tmp_path / "table-cifar-1.md").read_text()
    assert "| H1-DNN* | " in page
    assert "on the test images" in page
    assert "left out (`drop`): H1-DNN* 0.2." in page
    assert (tmp_path / "table-cifar-1.png").stat().st_size > 1000
    assert table_cifar.main([*options, "--seeds", "2", "--finished"]) == 0  # one of two
    assert (tmp_path / "table-cifar-1.md").read_text() == page.replace(
        "seeds 1", "seeds 2 --finished"
    )
    assert table_cifar.main(options) == 0
    monkeypatch.setattr(table_cifar, "KEPT", 10)
    assert table_cifar.main([*options, "--validate"]) == 0
    assert (tmp_path / "table-cifar-1.md").read_text() == page
    assert "10 training images" in (tmp_path / "table-cifar-1-kept-aside.md").read_text()
    assert table_cifar.main([*options, "--minutes", "0"]) == 0  # all is there already
    monkeypatch.setattr(table_cifar, "find_spec", lambda _: None)
    assert table_cifar.main([option for option in options if option != "--quiet"]) == 0
    assert "no picture" in capsys.readouterr().err
    assert "png" not in (tmp_path / "table-cifar-1.md").read_text()


def test_the_cifar_table_has_three_seeds_of_all_but_alexnet():
    jobs = table_cifar.jobs_for(table_cifar.networks_for(40), 2, 40, validate=False)
    found = [(job["network"], job["seed"], job["recipe"]["epochs"]) for job in jobs]
    compared = [(name, seed, 40) for seed in range(2) for name in ("resnet56", "h1", "h2")]
    assert found == [*compared, ("h1_paper", 0, 40), ("h1_paper", 1, 40), ("alexnet", 0, 10)]
    (short,) = table_cifar.jobs_for(["alexnet"], 3, 5, validate=False)
    assert short["recipe"]["epochs"] == 5
    rows = [
        {
            "network": name, "parameters": 10, "epochs": 40, "paper": None, "drop": 0.0,
            "test": runner.summary([80.0 + k, 81.0 + k]),
        }
        for k, name in enumerate(("resnet56", "h1"))
    ]  # fmt: skip
    result = {"data": "X", "command": "", "device": "", "remark": "", "on": "", "picture": None}
    page = table_cifar.markdown({**result, "rows": rows})
    assert "81.50 ± 0.71 (81.00 to 82.00) | +1.00 |" in page
