"""What else is promised: sparsity, certificates, the doctor, trainings, images, closed loops."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hdnn
from hdnn import Sparsity, analysis, control, models, sparsity, training
from law.strategies import Random, few, seeds

F64 = torch.float64


# Sparsity


def ring(M: int, reach: int = 1) -> torch.Tensor:
    """Node i and its neighbours within `reach` steps of a ring."""
    distance = (torch.arange(M)[:, None] - torch.arange(M)).abs()
    return torch.minimum(distance, M - distance) <= reach


@pytest.mark.parametrize("kind", ["H1", "H2", "ImplicitH2"])
def test_no_optimiser_moves_a_masked_entry(kind):
    nodes = 8 if kind == "H1" else 4
    net = getattr(hdnn, kind)(8, 3, sparsity=Sparsity(ring(nodes)), step=0.1, dtype=F64)
    names = ("K_p", "K_q") if kind == "H2" else ("K",)
    masks = {name: getattr(net, name).detach() != 0 for name in names}
    optimiser = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(4):
        optimiser.zero_grad()
        (net(Random(1)(5, 8)) - 1).square().mean().backward()
        optimiser.step()
    for name, mask in masks.items():
        K = getattr(net, name)
        assert not bool(mask.all())
        assert bool((K[~mask] == 0).all())
        assert bool((K[mask] != 0).all())


def test_a_ring_of_eight_has_the_parameters_of_the_errata():
    def count(net: nn.Module) -> int:
        return sum(p.numel() for p in net.parameters())

    n, R = 16, ring(8)
    assert count(hdnn.H2(n, 1, sparsity=R)) == 64
    assert count(hdnn.H2(n, 1)) == 144
    assert count(hdnn.ImplicitH2(n, 1, sparsity=R)) == 112
    assert count(hdnn.ImplicitH2(n, 1)) == 272
    assert count(hdnn.H2(n, 10, sparsity=R, tied=True)) == 64


def test_an_explanation_says_whether_updates_keep_to_the_graph():
    R, S = ring(8), ring(8, 2)
    assert not sparsity.explain(torch.eye(8), R, S)  # nothing that breaks it
    assert len(sparsity.explain(torch.eye(8), R, R)) == 16  # node i needs i - 2 and i + 2
    with pytest.raises(hdnn.HDNNError):
        hdnn.H2(16, 2, sparsity=Sparsity(R=R, S=R))


@few
@given(seeds, st.integers(2, 6))
def test_designed_patterns_are_local(seed, M):
    S = torch.rand(M, M, generator=torch.Generator().manual_seed(seed)) < 0.4
    S = S | S.mT | torch.eye(M).bool()
    found = sparsity.design(S)
    T = torch.eye(M) if found.T is None else torch.as_tensor(found.T)
    R = torch.as_tensor(found.R)
    for layer in R if R.ndim == 3 else R[None]:
        assert not sparsity.explain(T if T.ndim == 2 else T[0], layer, S)


@few
@given(seeds, st.integers(3, 6))
def test_a_layer_of_a_sparse_network_depends_on_neighbours_of_neighbours_only(seed, M):
    net = hdnn.H2(2 * M, 1, sparsity=ring(M), dtype=F64)
    y = Random(seed)(2 * M)
    found = torch.func.jacrev(net)(y)
    p_by_q = found[:M, M:]
    assert not p_by_q[~ring(M, 2)].any()


# Certificates


def test_certificates_say_what_is_not_known():
    y = Random(0)(20, 6)
    h1 = hdnn.H1(6, 4, activation="sin", dtype=F64)
    found = analysis.certify(h1, y)
    assert not found.guaranteed
    assert found.holds is None
    for net in (hdnn.H2(6, 30, dtype=F64), hdnn.MS3(6, 8, dtype=F64)):
        found = analysis.certify(net, y)
        assert found.guaranteed
        assert found.holds is True
        assert 1 - 1e-12 <= found.smallest_norm <= found.largest_norm
        assert found.samples == 20
        assert all(bound.holds is not False for bound in found.bounds)


def test_bounds_are_above_what_is_measured():
    net = hdnn.H2(6, 12, step=0.2, dtype=F64)
    Phi = analysis.backward_sensitivity(net, Random(0)(20, 6))
    low, high = analysis.gradient_bounds(net)
    values = torch.linalg.svdvals(Phi.detach())
    assert float(low) <= float(values.min())
    assert float(values.max()) <= float(high) * (1 + 1e-12)


# The doctor


def perceptron(depth: int = 12, activation: type[nn.Module] = nn.Tanh, gain: float = 1.0):
    parts: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(16, 16)
        nn.init.normal_(linear.weight, std=(gain / 16) ** 0.5)
        parts += [linear, activation()]
    return nn.Sequential(*parts, nn.Linear(16, 3))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.spare = nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh().detach())


def dead() -> nn.Module:
    model = perceptron(activation=nn.ReLU, gain=2.0)
    nn.init.constant_(model[6].bias, -50.0)
    return model


def saturated() -> nn.Module:
    model = perceptron(4, nn.Sigmoid, 2.0)
    nn.init.constant_(model[2].bias, 30.0)
    return model


FAULTS = {
    "vanishing": lambda: perceptron(gain=0.05),
    "exploding": lambda: perceptron(activation=nn.Identity, gain=16.0),
    "dead units": dead,
    "saturated": saturated,
    "detached": Detached,
    "unused": Detached,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_doctor_names_a_planted_fault(kind):
    found = hdnn.diagnose(FAULTS[kind](), torch.randn(8, 16))
    assert kind in [finding.kind for finding in found.findings]
    assert not found.healthy


@pytest.mark.parametrize(
    "make",
    [
        lambda: perceptron(5, nn.ReLU, 2.0),
        lambda: nn.Sequential(nn.Linear(16, 16), hdnn.H2(16, 30), nn.Linear(16, 3)),
        lambda: nn.Sequential(
            nn.Linear(16, 16),
            hdnn.Reversible([hdnn.Leapfrog(nn.Linear(8, 8), h=0.3) for _ in range(4)]),
        ),
    ],
)
def test_the_doctor_raises_no_alarm_for_a_healthy_model_and_leaves_no_trace(make):
    model, x = make(), torch.randn(8, 16)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert hdnn.diagnose(model, x).healthy
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# Training


def planar_model(seed: int = 0) -> hdnn.Model:
    like = {"generator": torch.Generator().manual_seed(seed)}
    return hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8, **like), hdnn.SigmoidHead(4, **like))


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """Two circles, one inside of the other."""
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    return x, (x.norm(dim=1) < 1.1).long()


def test_fit_learns_what_no_line_separates_and_repeats_itself():
    x, t = points()
    found = []
    for _ in range(2):
        model = planar_model()
        training.fit(model, x, t, epochs=10, batch=50, seed=0, progress=False)
        found.append(model)
    assert float((found[0].predict(x) == t).double().mean()) > 0.9
    for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_training_that_was_stopped_goes_on_to_the_same_weights(tmp_path):
    x, t = points()
    options = {"batch": 50, "seed": 0, "progress": False}

    class StopError(Exception):
        pass

    def stop(moment) -> None:
        if moment.epoch >= 3:
            raise StopError

    whole, stopped = planar_model(), planar_model()
    training.fit(whole, x, t, epochs=6, **options)
    with pytest.raises(StopError):
        training.fit(stopped, x, t, epochs=6, folder=tmp_path, callbacks=[stop], **options)
    resumed = planar_model(1)
    training.fit(resumed, x, t, epochs=6, folder=tmp_path, resume=True, **options)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("head", ["softmax", "sigmoid", "regression"])
def test_a_model_is_head_after_network_after_augmentation(head):
    heads = {
        "softmax": lambda: hdnn.SoftmaxHead(6, 3),
        "sigmoid": lambda: hdnn.SigmoidHead(6),
        "regression": lambda: hdnn.RegressionHead(6, 2),
    }
    model = hdnn.Model(hdnn.Augment(2, 6), hdnn.H2(6, 3), heads[head]())
    x = torch.randn(5, 2)
    torch.testing.assert_close(model(x), model.head(model.net(model.augment(x))))
    t = torch.randn(5, 2) if head == "regression" else torch.tensor([0, 1, 0, 1, 1])
    model.loss(x, t).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.predict(x).shape == ((5, 2) if head == "regression" else (5,))


# Images


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (models.hdnn_star, 973_930),
        (models.resnet56, 853_018),
        (lambda **o: models.mnist_net("h1", 8, **o), 80 + 8 * (64 + 8) + 62_730),
        (lambda **o: models.mnist_net("ms1", 8, **o), 80 + 8 * (16 + 8) + 62_730),
    ],
)
def test_image_models_have_the_parameters_of_their_definition(make, parameters):
    assert sum(p.numel() for p in make(device="meta").parameters()) == parameters


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_a_unit_is_the_network_whose_K_is_a_convolution(network):
    unit = hdnn.HamiltonianUnit(4, 2, network=network, step=0.2, dtype=F64)
    y = Random(0)(2, 4, 5, 6)

    def force(x: torch.Tensor, K: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sigma = hdnn.activations.get(unit.activation).sigma
        pad = K.shape[-1] // 2
        z = sigma(nn.functional.conv2d(x, K, b, padding=pad))
        return nn.functional.conv_transpose2d(z, K, padding=pad)

    wanted = y
    for j in range(2):
        if network == "h1":
            p, q = force(wanted, unit.K[j], unit.b[j]).chunk(2, 1)
            wanted = wanted + 0.2 * torch.cat([-q, p], 1)
        else:
            p, q = wanted.chunk(2, 1)
            p = p - 0.2 * force(q, unit.K_q[j], unit.b_q[j])
            q = q + 0.2 * force(p, unit.K_p[j], unit.b_p[j])
            wanted = torch.cat([p, q], 1)
    torch.testing.assert_close(unit(y), wanted)


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: models.mnist_net("h1", 2, size=8, **o),
        lambda **o: models.hdnn_star("h2", 1, (4, 8), size=8, **o),
    ],
)
def test_image_models_learn_a_handful_of_images(make):
    model = make(generator=torch.Generator().manual_seed(0))
    channels = next(p for p in model.parameters() if p.ndim == 4).shape[1]
    x = torch.randn(8, channels, 8, 8, generator=torch.Generator().manual_seed(1))
    t, optimiser, losses = torch.arange(8), torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(15):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


# Closed loops


def random_loop(seed: int, N: int, scale: float, h: float, engine: str):
    """A loop whose plant has random rows, ports, dissipation and couplings; weights likewise."""
    normal, p, m, c = Random(seed), 3, 2, 4

    def links() -> list[tuple[int, int]]:
        chosen = normal(N, N) > 0
        return [(i, k) for i in range(N) for k in range(i) if chosen[i, k]]

    joined, heat = links(), normal(N, p, p)
    plant = control.Plant(
        *(normal(N, p + 1, p), normal.skew(N, p), heat @ heat.mT, normal(N, p, m)),
        a=normal(N, p + 1),
        links=joined,
        couplings=normal(len(joined), p, p),
    )
    controller = control.Controller(
        *(N, 3),
        states=c,
        inputs=m,
        links=links(),
        J=normal.skew(c),
        dissipation=normal(N, c).square(),
    )
    with torch.no_grad():
        for parameter in controller.parameters():
            parameter.copy_(scale * normal(*parameter.shape))
    loop = control.ClosedLoop(plant, controller, h, engine=engine)
    return loop, 3 * normal(3, N, p + c), normal


@few
@given(seeds, st.integers(1, 4), st.floats(0.01, 5.0), st.floats(0.001, 1.0))
def test_the_energy_falls_by_what_is_dissipated_for_any_weights_and_any_step(seed, N, scale, h):
    loop, y, _ = random_loop(seed, N, scale, h, "reference")
    balance = loop.balance(y, horizons=2)
    assert balance.before.shape == (6, 3)
    assert float(balance.violation.amax()) < 1e-12
    assert float(balance.lost.amin()) >= 0
    torch.testing.assert_close(balance.after[:-1] + balance.jumps, balance.before[1:])


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_of_closed_loops_agrees_with_the_definition(seed):
    pytest.importorskip("numba")
    loop, y, normal = random_loop(seed, 3, 1.0, 0.1, "reference")
    y.requires_grad_()
    found, weight = [], None
    for name in ("reference", "fused"):
        loop.engine = name
        trajectory = loop(y)
        weight = normal(*trajectory.shape) if weight is None else weight
        leaves = [y, *loop.controller.parameters()]
        grads = torch.autograd.grad((trajectory * weight).sum(), leaves, allow_unused=True)
        kept = [g for g in grads if g is not None and g.numel()]
        found.append([trajectory.detach(), *kept])
    for want, got in zip(*found, strict=True):
        assert float((want - got).abs().amax()) <= 1e-10 * (1 + float(want.abs().amax()))


def test_robots_learn_to_change_places():
    problem = control.crossing("ring", steps=4)
    learning = control.LoopTraining(problem, iterations=30, batch=4)
    start = problem.cost(learning.loop, learning.loop(learning.starts(0)))
    learning.run()
    end = problem.cost(learning.loop, learning.loop(learning.starts(0)))
    assert float(end.detach()) < 0.95 * float(start.detach())
    assert learning.done == 30
