"""What every network can do in PyTorch: one contract, which each of them inherits."""

from __future__ import annotations

import copy
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, stack_module_state, vmap

import hdnn
from hdnn import HDNNError, analysis

RING = [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
NETWORKS = {
    "H1": lambda **o: hdnn.H1(6, 3, **o),
    "H1 with J a layer": lambda **o: hdnn.H1(5, 3, J=_skew(3, 5), **o),
    "H1 that learns J": lambda **o: hdnn.H1(6, 3, learn_J=True, learn_step=True, **o),
    "H2": lambda **o: hdnn.H2(6, 3, **o),
    "H2 with X": lambda **o: hdnn.H2(6, 3, X=_matrix(3), step=[0.1, 0.2, 0.3], **o),
    "H2 that learns X": lambda **o: hdnn.H2(6, 3, learn_X=True, learn_step=True, **o),
    "H2 tied": lambda **o: hdnn.H2(6, 3, tied=True, activation="softplus", **o),
    "H2 sparse": lambda **o: hdnn.H2(6, 3, sparsity=RING, learn_X=True, **o),
    "H1 sparse": lambda **o: hdnn.H1(6, 3, sparsity=RING, learn_J=True, **o),
    "ImplicitH2": lambda **o: hdnn.ImplicitH2(6, 3, T=0.9, X=_matrix(3), **o),
    "MS1": lambda **o: hdnn.MS1(6, 3, **o),
    "MS2": lambda **o: hdnn.MS2(6, 3, **o),
    "MS3": lambda **o: hdnn.MS3(6, 3, activation="gelu", **o),
    "MLP": lambda **o: hdnn.MLP(6, 3, **o),
    "Verlet": lambda **o: hdnn.HamiltonianNet(6, 3, "verlet", X=_matrix(3), **o),
    "Yoshida": lambda **o: hdnn.HamiltonianNet(6, 3, "yoshida4", **o),
    "midpoint": lambda **o: hdnn.HamiltonianNet(5, 3, "midpoint", J=_skew(5), T=0.9, **o),
    "discrete gradient": lambda **o: hdnn.HamiltonianNet(6, 3, "discrete_gradient", T=0.9, **o),
}
IMPLICIT = ("ImplicitH2", "midpoint", "discrete gradient")
# Those that differ in operators; implicit layers iterate, which ONNX has no operator for.
EXPORTED = ("H1", "H2 with X", "H2 sparse", "MS1")


def _matrix(m: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(m, m, generator=generator, dtype=torch.float64, device="cpu")


def _skew(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    A = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64, device="cpu")
    return A - A.mT


@pytest.fixture(params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    return NETWORKS[name](init="paper" if seed else "scaled", generator=generator, dtype=dtype)


def state(net: nn.Module, *batch: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*batch, net.features, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("batch", [(), (4,), (2, 3), (0,)])
def test_any_batch_shape_gives_the_same_as_sample_by_sample(name, batch):
    net = make(name)
    y = state(net, *batch)
    out, path = net(y), net.trajectory(y)
    assert out.shape == y.shape
    assert path.shape == (net.layers + 1, *y.shape)
    torch.testing.assert_close(path[-1], out, rtol=0, atol=1e-12)
    torch.testing.assert_close(path[0], y, rtol=0, atol=0)
    for sample, expected in zip(y.reshape(-1, net.features), out.reshape(-1, net.features)):  # noqa: B905
        torch.testing.assert_close(net(sample), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1), (torch.float64, 1e-13)]
)
def test_every_dtype_computes_the_same_function(name, dtype, tolerance):
    exact = make(name)
    net = make(name, dtype)
    y = state(exact, 4)
    out = net(y.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact(y), rtol=tolerance, atol=tolerance)
    out.sum().backward()
    for p in net.parameters():
        assert p.grad is not None
        assert p.grad.dtype == dtype
        assert torch.isfinite(p.grad).all()


def test_to_moves_everything(name):
    net = make(name, torch.float32).to(torch.float64)
    assert {t.dtype for t in net.state_dict().values()} == {torch.float64}
    assert net(state(net, 2)).dtype == torch.float64
    meta = make(name).to("meta")
    tensors = [*meta.parameters(), *meta.buffers()]
    assert all(t.device.type == "meta" for t in tensors)
    assert all(t.device.type == "meta" for t in meta.weights().values() if torch.is_tensor(t))


def test_gradients_are_those_of_finite_differences(name):
    net = make(name)
    names = [n for n, _ in net.named_parameters()]
    values = tuple(p.detach().clone().requires_grad_() for p in net.parameters())

    def function(y, *parameters):
        return functional_call(net, dict(zip(names, parameters, strict=True)), (y,))

    y = state(net, 2).requires_grad_()
    quick = name in IMPLICIT  # along random directions, and not entry by entry
    assert torch.autograd.gradcheck(function, (y, *values), fast_mode=quick)
    assert torch.autograd.gradgradcheck(lambda y: function(y, *values), (y,), fast_mode=quick)


def test_two_backward_passes_agree(name):
    net = make(name)
    loss = net(state(net, 4)).square().sum()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(net.parameters()))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Dynamo itself makes an instance of each autograd function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "training"),
    [*((name, True) for name in NETWORKS), *((name, False) for name in ("H1", "H2", *IMPLICIT))],
)
def test_compiles_into_one_graph(name, training):
    torch._dynamo.reset()
    net = make(name)
    y = state(net, 4)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    if not training:
        with torch.no_grad():
            torch.testing.assert_close(compiled(y), net(y), rtol=1e-12, atol=1e-12)
        return
    compiled(y).square().sum().backward()
    ours = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(y).square().sum().backward()
    for grad, p in zip(ours, net.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["ImplicitH2"])  # H2 is in the tests of the engine
def test_compiles_with_the_default_backend(kind):
    torch._dynamo.reset()
    net = make(kind, torch.float32)
    y = state(net, 4, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own
        out = torch.compile(net, fullgraph=True)(y)
    torch.testing.assert_close(out, net(y), rtol=1e-5, atol=1e-5)


def test_exports_with_equal_outputs(name):
    net = make(name)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(net, (state(net, 4),), dynamic_shapes=({0: batch},))
    y = state(net, 7)
    torch.testing.assert_close(program.module()(y), net(y), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # the exporter's own, of many kinds
@pytest.mark.parametrize("name", EXPORTED)
def test_onnx_round_trip_has_equal_outputs(name, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    net = make(name, torch.float32).eval()
    y = state(net, 4, dtype=torch.float32)
    path = tmp_path / "net.onnx"
    torch.onnx.export(net, (y,), path, dynamo=True, input_names=["y"], verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"y": y.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), net(y).detach(), rtol=1e-5, atol=1e-5)


def test_vmap_over_samples_and_over_networks(name):
    net = make(name)
    y = state(net, 4)
    torch.testing.assert_close(vmap(net)(y), net(y), rtol=1e-12, atol=1e-12)
    nets = [make(name, seed=seed) for seed in (0, 0)]
    parameters, buffers = stack_module_state(nets)
    out = vmap(lambda p, b: functional_call(net, (p, b), (y,)))(parameters, buffers)
    torch.testing.assert_close(out, torch.stack([n(y) for n in nets]), rtol=1e-12, atol=1e-12)


def test_jacrev_equals_autograd(name):
    net = make(name)
    y = state(net)
    expected = torch.autograd.functional.jacobian(net, y)
    torch.testing.assert_close(jacrev(net)(y), expected, rtol=1e-12, atol=1e-12)
    assert vmap(jacrev(net))(state(net, 3)).shape == (3, net.features, net.features)


def test_autocast_keeps_the_state_in_full_precision(name):
    net = make(name, torch.float32)
    y = state(net, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(y)
    if name != "MLP":  # which has no state to keep: each layer replaces it
        assert out.dtype == torch.float32
    torch.testing.assert_close(out.float(), net(y), rtol=0.05, atol=0.05)
    out.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_copies_and_state_dicts_carry_everything(name):
    net = make(name, seed=1)
    y = state(net, 4)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(y), net(y))
    other = make(name)
    assert not torch.equal(other(y), net(y))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(y), net(y))
    assert repr(other) == repr(net)


def test_non_contiguous_input_is_fine(name):
    net = make(name)
    y = state(net, 2, 4)
    torch.testing.assert_close(
        net(y.transpose(0, 1)), net(y).transpose(0, 1), rtol=1e-12, atol=1e-12
    )


def test_inverse_brings_the_input_back_or_says_that_there_is_none(name):
    net = make(name)
    y = state(net, 2, 3)
    if not net.invertible:
        with pytest.raises(HDNNError):
            net.inverse(y)
        return
    torch.testing.assert_close(net.inverse(net(y)), y, rtol=1e-11, atol=1e-11)
    path = net.inverse(net(y), trajectory=True)
    torch.testing.assert_close(path, net.trajectory(y), rtol=1e-11, atol=1e-11)


def test_one_layer_after_the_other_is_the_stack(name):
    net = make(name)
    y = state(net, 4)
    for j in range(net.layers):
        y = net.layer(y, j)
    torch.testing.assert_close(y, net(state(net, 4)), rtol=1e-12, atol=1e-12)


def test_a_network_is_at_home_in_a_larger_module(name):
    net = make(name, torch.float32)
    n = net.features
    model = torch.nn.Sequential(torch.nn.Linear(3, n), net, torch.nn.Linear(n, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_layer_jacobians_multiply_to_that_of_the_network(name):
    net = make(name)
    y = state(net, 3)
    expected = vmap(jacrev(net))(y).mT  # in denominator layout, as all matrices of the analysis
    Phi = analysis.backward_sensitivity(net, y)
    assert Phi.shape == (net.layers + 1, 3, net.features, net.features)
    torch.testing.assert_close(Phi[0], expected, rtol=1e-10, atol=1e-10)
    eye = torch.eye(net.features, dtype=torch.float64).expand(3, -1, -1)
    torch.testing.assert_close(Phi[-1], eye)
    product = eye
    for layer in analysis.layer_sensitivity(net, y):
        product = product @ layer
    torch.testing.assert_close(product, expected, rtol=1e-10, atol=1e-10)


def test_a_guarantee_is_given_where_there_is_a_theorem_and_measured_norms_agree(name):
    net = make(name)
    promised = name not in ("MLP", "discrete gradient")
    assert net.guarantee().holds == promised
    found = analysis.certify(net, state(net, 20))
    assert found.status == ("holds" if promised else "not guaranteed")
    assert found.holds is (True if promised else None)
    least = float(analysis.norms(analysis.backward_sensitivity(net, state(net, 20))[:-1]).min())
    assert found.smallest_norm == pytest.approx(least, rel=1e-9)
    assert not promised or least >= 1 - 1e-12


def test_the_repr_says_what_the_network_is(name):
    text = repr(make(name))
    assert type(make(name)).__name__ in text
    assert f"{make(name).features} features" in text
    assert "3 layers" in text


def test_weights_have_the_dtype_of_the_network_and_steps_add_up_to_T(name):
    net = make(name)
    for value in net.weights().values():
        assert not torch.is_tensor(value) or value.dtype == torch.float64
    if name != "MLP":
        total = float(torch.as_tensor(net.steps()).detach().sum())
        assert total == pytest.approx(float(torch.as_tensor(net.T).detach()))


def test_a_refined_network_is_nearly_the_same_function():
    net = hdnn.H2(6, 4, T=0.4, dtype=torch.float64)
    finer = net.refine(4)
    assert finer.layers == 16
    error = (finer(state(net, 5)) - net(state(net, 5))).detach().abs().max()
    assert float(error) < 0.05


def test_generators_make_the_same_network_and_leave_the_random_numbers_alone(name):
    before = torch.get_rng_state()
    y = state(make(name), 4)
    assert torch.equal(make(name)(y), make(name)(y))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: hdnn.H2(5, 3),
        lambda: hdnn.H2(6, 0),
        lambda: hdnn.H2(6, 3, activation="tahn"),
        lambda: hdnn.H2(6, 3, X=torch.eye(4)),
        lambda: hdnn.H1(6, 3, J=torch.eye(6)),
        lambda: hdnn.H1(6, 3, engine="fussed"),
        lambda: hdnn.HamiltonianNet(6, 3, "euler"),
        lambda: hdnn.H2(6, 3)(torch.randn(4, 5)),
    ],
)
def test_mistakes_that_people_make_are_errors_of_hdnn(wrong):
    with pytest.raises(HDNNError):
        wrong()
