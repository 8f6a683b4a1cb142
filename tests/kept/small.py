"""The small things that were saved and trained for `files`: how each is made, and how it is run.

Both `write`, which wrote the files, and the tests, which read them, make them from here.
"""

from __future__ import annotations

import io
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hdnn
from hdnn import models
from hdnn.__main__ import main
from hdnn.data import ImageData
from hdnn.training import EarlyStopping, History
from hdnn.training.images import ImageRecipe, ImageTraining

FILES = Path(__file__).parent / "files"
PLACE = "FOLDER"  # in text files, where the path of the folder stood


def machine() -> dict[str, str]:
    """What decides the last bits of a training."""
    packages = {name: version(name) for name in ("torch", "numpy", "numba")}
    return {"processor": _processor(), **packages}


def _processor() -> str:
    """Its name, and a digest of what it can do: some names stand for several generations."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.processor()
    pairs = [line.partition(":") for line in file.read_text("utf-8").splitlines()]
    known = {name.strip(): value.strip() for name, _, value in pairs}
    words = [known.get(name, "") for name in ("cpu family", "model", "stepping", "flags")]
    return f"{known.get('model name')}, {sha256(' '.join(words).encode()).hexdigest()[:8]}"


def drawn(seed: int = 0) -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(seed)}


# Networks and models


def networks() -> dict[str, nn.Module]:
    """One of every network, with every kind of option that its file has to remember."""
    ring = torch.eye(4) + torch.eye(4).roll(1, 0)
    skew = torch.tensor([[0.0, 1.0, 2.0], [-1.0, 0.0, 0.5], [-2.0, -0.5, 0.0]])
    X = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
    integrators = ("semi_implicit_euler", "verlet", "yoshida4")
    return {
        "h1": hdnn.H1(4, 3, **drawn()),
        "h1_general": hdnn.H1(3, 2, J=skew, learn_J=True, step=[0.5, 0.25], **drawn()),
        "h1_sparse": hdnn.H1(8, 2, sparsity=hdnn.Sparsity(R=ring), **drawn()),
        "h2": hdnn.H2(4, 3, T=1.0, **drawn()),
        "h2_double": hdnn.H2(4, 2, X=X, activation="softplus", dtype=torch.float64, **drawn()),
        "h2_learned": hdnn.H2(4, 2, learn_X=True, learn_step=True, init="paper", **drawn()),
        "h2_sparse": hdnn.H2(8, 2, sparsity=hdnn.Sparsity(R=ring), **drawn()),
        "h2_tied": hdnn.H2(4, 3, tied=True, activation="relu", **drawn()),
        "implicit_h2": hdnn.ImplicitH2(4, 2, step=0.25, **drawn()),
        "mlp": hdnn.MLP(4, 3, **drawn()),
        "ms1": hdnn.MS1(4, 3, **drawn()),
        "ms2": hdnn.MS2(3, 2, **drawn()),
        "ms3": hdnn.MS3(4, 2, **drawn()),
        "net_forward_euler": hdnn.HamiltonianNet(4, 2, "forward_euler", **drawn()),
        "net_full": hdnn.HamiltonianNet(4, 2, "semi_implicit_euler_full", step=0.25, **drawn()),
        "net_midpoint": hdnn.HamiltonianNet(3, 2, "midpoint", J=skew, step=0.25, **drawn()),
        **{f"net_{name}": hdnn.HamiltonianNet(4, 2, name, **drawn()) for name in integrators},
    }


def whole_models() -> dict[str, nn.Module]:
    """A model with every head, with every way for the inputs to enter, and without one."""

    def h2() -> hdnn.H2:
        return hdnn.H2(4, 2, **drawn())

    sigmoid, softmax = hdnn.SigmoidHead(4, **drawn(1)), hdnn.SoftmaxHead(4, 3, **drawn(1))
    values = hdnn.RegressionHead(4, 2, **drawn(1))
    return {
        "sigmoid": hdnn.Model(hdnn.Augment(2, 4), h2(), sigmoid),
        "softmax": hdnn.Model(hdnn.Augment(2, 4, placement="first"), h2(), softmax),
        "regression": hdnn.Model(hdnn.Augment(2, 4, placement=[3, 0]), h2(), values),
        "no_augment": hdnn.Model(None, h2(), hdnn.SigmoidHead(4, **drawn(1))),
    }


def image_models() -> dict[str, nn.Module]:
    star: dict[str, Any] = {"channels": (2, 4), "layers": 2, "inputs": 1, "size": 8, "classes": 3}
    return {
        "mnist": models.mnist_net("h2", 2, channels=4, size=6, classes=3, **drawn()),
        "mnist_linear": models.mnist_net(None, 0, channels=4, size=6, classes=3, **drawn()),
        "star": models.hdnn_star("h2", norm="after", drop=0.3, **star, **drawn()),
        "star_inside": models.hdnn_star("h1", norm="inside", stem_norm=True, **star, **drawn()),
    }


def units() -> dict[str, nn.Module]:
    """Convolutional units, of which users save the state_dict."""
    return {
        "unit_h1": hdnn.HamiltonianUnit(4, layers=2, norm="both", **drawn()),
        "unit_h2": hdnn.HamiltonianUnit(4, layers=2, network="h2", step=0.1, **drawn()),
    }


# Trainings in Python


def fit_training(name: str) -> tuple[hdnn.Model, Tensor, Tensor, dict[str, Any]]:
    """Model, data and options of `hdnn.training.fit`; the data are the same on every machine."""
    x = torch.randint(-8, 9, (60, 2), **drawn()) / 8
    net = hdnn.HamiltonianNet(4, 3, "verlet", **drawn())
    options: dict[str, Any] = {"epochs": 3, "batch": 20, "progress": False}
    if name == "classes":
        t, head = (x.prod(1) > 0).long(), hdnn.SigmoidHead(4, **drawn(1))
        options |= {"callbacks": [EarlyStopping(5)], "clip": 1.0, "weight_decay": 1e-3}
    else:
        t, head = x.prod(1, keepdim=True), hdnn.RegressionHead(4, 1, **drawn(1))
        options |= {"optimizer": "sgd", "solver": "joint", "warmup": 0.2, "smoothing": "cosine"}
    return hdnn.Model(hdnn.Augment(2, 4), net, head), x, t, options


FITS = ("classes", "values")


def run_fit(name: str, folder: Path | None, *, resume: bool = False) -> tuple[nn.Module, History]:
    model, x, t, options = fit_training(name)
    return model, hdnn.training.fit(model, x, t, folder=folder, resume=resume, **options)


def image_training(name: str) -> ImageTraining:
    """A training on a few images of random pixels."""
    model = image_models()[name]
    size = 6 if name == "mnist" else 8
    pixels = torch.randint(0, 256, (50, 1, size, size), **drawn(), dtype=torch.uint8)
    t, names = torch.arange(50) % 3, ("a", "b", "c")
    data = ImageData("small", pixels[10:], t[10:], pixels[:10], t[:10], names, (0.5,), (0.25,))
    adam = {"optimizer": "adam", "learning_rate": 0.01} if name == "mnist" else {}
    recipe = ImageRecipe(epochs=2, batch=10, pad=1, flip=True, **adam)
    return ImageTraining(model, data, recipe)


IMAGE_TRAININGS = ("mnist", "star")


# Trainings from the command line

GRAPH = """nodes = 4
edges = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]]
R = [[0, 1], [1, 2], [2, 3], [3, 0]]
"""
RUNS = {
    "planar": "--data double_moons --network h2 --layers 3 --epochs 3 --batch 1000",
    "verlet": "--data swiss_roll --network verlet --layers 2 --dtype float64 --epochs 3",
    "classes": "--data classes.csv --target kind --layers 2 --features 8 --epochs 3 --patience 2",
    "values": "--data values.csv --target size --drop b --layers 2 --features 8 --epochs 3",
    "levels": "--data double_circles --layers 4 --multilevel 2 --epochs 2 --batch 1000",
    "graph": "--graph graph.toml --data double_circles --layers 2 --epochs 3 --batch 1000",
}
NODES = "--graph graph.toml --data nodes --network h1 --layers 2 --epochs 2 --batch 8"


class Ended(NamedTuple):
    code: int
    output: str
    said: str

    @property
    def result(self) -> Any:
        assert self.code == 0, self.said
        return json.loads(self.output)


def hdnn_command(command: str) -> Ended:
    """One command in this process."""
    output, said = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(said):
        code = main(command.split())
    return Ended(code, output.getvalue(), said.getvalue())


@contextmanager
def without_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield


@contextmanager
def broken_off(call: int) -> Iterator[None]:
    """Press Ctrl-C when a training draws the order of an epoch for that time."""
    order: Callable[..., Tensor] = torch.randperm
    calls = 0

    def counted(*args: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGINT)
        return order(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", counted)
        yield


# What networks compute


def inputs(model: nn.Module) -> Tensor:
    """A few states, points or images, whatever a model takes."""
    like = {"dtype": next(model.parameters()).dtype, **drawn(2)}
    if isinstance(model, hdnn.Model):
        return torch.randn(3, 4 if model.augment is None else 2, **like)
    if isinstance(model, models.ImageModel):
        size = 6 if isinstance(model, models.MNISTNet) else 8
        return torch.randn(3, 1, size, size, **like)
    if isinstance(model, hdnn.HamiltonianUnit):
        return torch.randn(2, 4, 5, 5, **like)
    return torch.randn(3, model.features, **like)  # pyright: ignore


def computed(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs for x, and the gradients of half their squares by x and by the weights, summed up."""
    model.eval()
    x = x.clone().requires_grad_()
    weights = [p for p in model.parameters() if p.requires_grad]
    y = model(x)
    of_x, *of_weights = torch.autograd.grad(y.square().sum() / 2, [x, *weights])
    sums = torch.stack([g.sum() for g in of_weights])
    return {"y": y.detach(), "gradient by x": of_x, "gradients by weights": sums}
