"""A typed program, as users of all four kinds write it.

`check_install.py` runs it where nothing but the wheel is installed, and has pyright and mypy read
it there: `assert_type` fails where hdnn promises less than users can tell from its documentation.
It prints what it found.
"""

# ruff: noqa: T201

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import hdnn
from hdnn import analysis, distributed, functional, sparsity, training
from hdnn.networks import Network


class Tower(nn.Module):
    """A model with a deep stack in its middle."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.lift = nn.Linear(inputs, 16)
        self.deep = hdnn.H2(
            features=16, layers=20, T=2.0, activation="tanh", engine="reference"
        )
        self.out = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.deep(self.lift(x)))
        return scores


def build_networks() -> float:
    """Layers and their states, functions, blocks, and the doctor; how exact an inverse is."""
    tower, x = Tower(inputs=4, classes=3), torch.randn(32, 4)
    tower(x).square().mean().backward()
    net, y = tower.deep, torch.randn(32, 16)
    states = assert_type(net.trajectory(y), Tensor).detach()
    start = assert_type(net.inverse(states[-1]), Tensor).detach()
    assert_type(net[0](y), Tensor)
    assert_type(net[:5].trajectory(y), Tensor)
    assert_type(len(net), int)

    K, b = 0.1 * torch.randn(5, 8, 8), torch.zeros(5, 8)
    z = assert_type(functional.h1(torch.randn(2, 8), K, b, h=0.1), Tensor)
    stack = hdnn.Reversible(
        [hdnn.Leapfrog(nn.Linear(8, 8)) for _ in range(4)], state="fixed"
    )
    w = assert_type(stack.inverse(stack(torch.randn(2, 16))), Tensor)
    diagnosis = assert_type(hdnn.diagnose(tower, x), analysis.Diagnosis)
    assert_type([finding.kind for finding in diagnosis.findings], list[str])
    assert z.shape == (2, 8)
    assert w.shape == (2, 16)
    return float((start - y).abs().max())


def learn_from_data(folder: Path) -> float:
    """Train, certify, save and load; the share of test points that are classified right."""
    data = hdnn.data.planar.double_moons(seed=0)
    net = hdnn.H2(features=4, layers=8, engine="reference")
    model = hdnn.Model(
        hdnn.Augment(inputs=2, features=4), net, hdnn.SigmoidHead(features=4)
    )
    history = training.fit(
        model,
        data.x_train,
        data.t_train,
        epochs=8,
        callbacks=[training.EarlyStopping(patience=5)],
        progress=False,
    )
    assert_type(history, training.History)
    assert_type(history.loss, list[float])
    certificate = assert_type(
        analysis.certify(model, data.x_test), analysis.Certificate
    )
    assert certificate.holds
    assert certificate.smallest_norm >= 1
    assert_type(analysis.certify(nn.Sequential(net)), analysis.Certificate)

    hdnn.save(model, folder / "moons.safetensors")
    again = hdnn.load(folder / "moons.safetensors")
    assert isinstance(again, hdnn.Model)
    assert_type(again.net, Network)
    predicted = assert_type(again.predict(data.x_test), Tensor)
    return float((predicted == data.t_test).double().mean())


def share_a_graph() -> bool:
    """Weights for the nodes of a ring, and whether its updates need neighbours only."""
    ring = torch.eye(8) + torch.eye(8).roll(1, 0) + torch.eye(8).roll(-1, 0)
    links = (ring @ ring > 0).int()
    net = hdnn.H2(
        features=16, layers=4, sparsity=hdnn.Sparsity(R=ring, S=links)
    )
    graph = assert_type(distributed.Graph.ring(8), distributed.Graph)
    told = assert_type(
        sparsity.explain(torch.eye(8), ring, links), sparsity.Explanation
    )
    assert graph.nodes == 8
    assert len(net) == 4
    return not told


def check_the_paper() -> float:
    """The smallest norm of dy_N/dy_j over some samples and all layers."""
    net = hdnn.HamiltonianNet(
        features=4, layers=16, integrator="verlet", dtype=torch.float64
    )
    Phi = analysis.backward_sensitivity(
        net, torch.randn(10, 4, dtype=torch.float64)
    )
    assert_type(Phi, Tensor)
    assert (
        float(assert_type(analysis.symplectic_defect(Phi, net.J), Tensor).max())
        < 1e-9
    )
    return float(assert_type(analysis.norms(Phi[:-1]), Tensor).min())


def use_scikit_learn() -> float:
    """An estimator on a small table; its accuracy there."""
    x = torch.randn(60, 3).numpy()
    y = (x[:, 0] > 0).astype(int)
    model = hdnn.HDNNClassifier(layers=4, epochs=5, random_state=0)
    assert_type(model.fit(x, y), hdnn.HDNNClassifier)
    return float((model.predict(x) == y).mean())


def main() -> None:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]  # torch says no type
    print(f"an inverse is exact to {build_networks():.1e}")
    with tempfile.TemporaryDirectory() as folder:
        print(f"accuracy {learn_from_data(Path(folder)):.3f}")
    print(f"the ring is local: {share_a_graph()}")
    print(f"no norm is below {check_the_paper():.6f}")
    if importlib.util.find_spec("sklearn") is not None:
        print(f"the estimator has {use_scikit_learn():.3f}")


if __name__ == "__main__":
    main()
