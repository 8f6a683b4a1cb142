"""Weights of trained networks are kept and checked; their singular values are drawn."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from hdnn import models
from hdnn.analysis import chain_extremes
from hdnn.data import cifar10
from hdnn.data.images import ImageData
from hdnn.errors import CheckpointError
from hdnn.experiments import fig_cifar, runner, table_cifar
from hdnn.experiments.fig_cifar import depth, entering, extremes, stages
from hdnn.experiments.table_cifar import load_weights, save_weights

STAR = {"layers": 2, "channels": [4, 6], "size": 8, "activation": "gelu", "step": 0.5}
JOBS = {
    "h1": {"network": "h1", "seed": 0, "star": {"network": "h1", "norm": "after", **STAR}},
    "h2": {"network": "h2", "seed": 1, "star": {"network": "h2", "norm": "inside", **STAR}},
    "resnet56": {"network": "resnet56", "seed": 2},
}
JOBS = {name: {**job, "recipe": {"epochs": 3}} for name, job in JOBS.items()}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small networks with weights in a folder, and a few images of 8 x 8."""
    resnet = models.resnet56
    monkeypatch.setattr(models, "resnet56", lambda: resnet(depth=14))
    pixels = torch.randint(0, 256, (3, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    t, images = torch.arange(3), pixels.to(torch.uint8)
    both = (images, t, images, t)
    data = ImageData("tiny", *both, cifar10.CLASSES, cifar10.MEAN, cifar10.STD, remark="made up")
    monkeypatch.setattr(cifar10, "load", lambda **_: data)
    for name, job in JOBS.items():
        save_weights(table_cifar.network(job), job, tmp_path / "weights" / f"{name}.safetensors")
    return tmp_path


def options(folder, *more):
    places = {"--weights": "weights", "--out": "out", "--runs": "runs"}
    return [text for key, name in places.items() for text in (key, str(folder / name))] + [*more]


# Weights


@pytest.mark.parametrize("name", JOBS)
def test_weights_come_back_as_they_were(name, small):
    model = table_cifar.network(JOBS[name]).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8)
    model.train()(x)  # which moves the running statistics
    path = small / "new" / "folder" / "w.safetensors"
    save_weights(model, JOBS[name], path)
    before = torch.get_rng_state()
    again, job = load_weights(path)
    assert torch.equal(torch.get_rng_state(), before)
    assert job == JOBS[name]
    assert not again.training
    torch.testing.assert_close(again(x), model.eval()(x).detach())


def test_weights_that_are_none_are_one_sentence(small):
    folder, path = small / "weights", small / "w.safetensors"
    with pytest.raises(CheckpointError, match="hdnn reproduce table-cifar"):
        load_weights(folder / "nothing.safetensors")
    whole = (folder / "h1.safetensors").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated, damaged"):
        load_weights(path)
    state = table_cifar.network(JOBS["h1"]).state_dict()
    for job in (None, "{", "3", "[]", '{"network": "h1"}', '{"network": "vgg", "seed": 0}'):
        save_file(state, path, metadata=None if job is None else {"job": job})
        with pytest.raises(CheckpointError, match="of another kind"):
            load_weights(path)
    save_file(state, path, metadata={"job": json.dumps(JOBS["h2"])})
    with pytest.raises(CheckpointError, match="does not hold the weights"):
        load_weights(path)
    state["linear.bias"][0] = torch.nan
    save_file(state, path, metadata={"job": json.dumps(JOBS["h1"])})
    with pytest.raises(CheckpointError, match=r"linear\.bias has entries that are not finite"):
        load_weights(path)


# Stages


def test_the_stages_of_a_resnet_are_its_blocks_without_stride():
    model = models.resnet56()
    assert [depth(stage) for stage in stages(model)] == [9, 8, 8]
    assert all(block.stride == 1 for stage in stages(model) for block in stage)
    seen = entering(model.eval(), torch.zeros(1, 3, 16, 16))
    assert [tuple(y.shape[1:]) for y in seen] == [(16, 16, 16), (32, 8, 8), (64, 4, 4)]
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_from_block_j_on_the_blocks_before_are_run_and_left_out():
    model = models.resnet56(depth=20, dtype=torch.float64).eval().requires_grad_(False)
    x = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    stage, y = stages(model)[2], entering(model, x)[2]
    whole = chain_extremes(stage, y)
    for j in range(2):
        one = extremes(stage, y, j, 10)
        torch.testing.assert_close(one.largest[0], whole.largest[j], rtol=1e-3, atol=0)


# The figure


def test_the_figure_is_drawn_and_goes_on_where_it_was(small, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    assert fig_cifar.main(options(small, "--json", "--device", "cpu")) == 0
    result = json.loads(capsys.readouterr().out)
    names = [(row["network"], row["stage"], row["layers"]) for row in result["rows"]]
    assert names[:4] == [("h1", 1, 2), ("h1", 2, 2), ("h2", 1, 2), ("h2", 2, 2)]
    assert names[4:] == [("resnet56", 1, 2), ("resnet56", 2, 1), ("resnet56", 3, 1)]
    for row in result["rows"]:
        assert len(row["largest"]) == row["layers"]
        assert all(len(each) == 2 for each in row["largest"])
        assert row["promised"] == (row["network"] == "h2")
        if row["promised"]:
            assert min(map(min, row["largest"])) >= 1 - 1e-6
            assert row["product"] < 1e-4
    page = (small / "out" / "fig-cifar.md").read_text()
    assert "The images: made up." in page
    assert "- H2-DNN*: norm >= 1 is promised: at any depth" in page
    assert "- H1-DNN*: nothing is promised: forward Euler promises nothing for gelu" in page
    assert "are cut off by ReLU" in page
    assert json.loads((small / "out" / "fig-cifar.json").read_text()) == result
    assert (small / "out" / "fig-cifar.png").read_bytes().startswith(b"\x89PNG")

    kept = (small / "runs" / "results.jsonl").read_text()
    assert fig_cifar.main(options(small, "--quiet", "--device", "cpu")) == 0
    assert (small / "runs" / "results.jsonl").read_text() == kept
    assert capsys.readouterr().out == ""
    save_weights(  # other weights are other results
        table_cifar.network(JOBS["h1"] | {"seed": 5}),
        JOBS["h1"],
        small / "weights" / "h1.safetensors",
    )
    assert fig_cifar.main(options(small, "--quiet", "--device", "cpu")) == 0
    more = (small / "runs" / "results.jsonl").read_text().removeprefix(kept)
    assert more.count("\n") == more.count('"network": "h1"') == 4


def test_mistakes_are_one_sentence(small, capsys, monkeypatch):
    def told(*flags):
        assert runner.guarded(fig_cifar.main, options(small, *flags)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err

    assert "has 3 test images, not 4" in told("--images", "4")
    assert "'gpu' cannot be used" in told("--device", "gpu")
    assert "must be a whole number >= 1" in told("--steps", "0")
    (small / "weights" / "h2.safetensors").unlink()
    assert "made by `hdnn reproduce table-cifar`" in told()
    assert not (small / "out").exists()
