"""Saving and loading: everything comes back, all or nothing, and no broken file gets through."""

from __future__ import annotations

import inspect
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import Augment, HDNNError, Model, models
from law.strategies import ACTIVATIONS, Random, few, seeds

F64 = torch.float64
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGRATORS = (
    "forward_euler",
    "semi_implicit_euler",
    "verlet",
    "yoshida4",
    "midpoint",
    "discrete_gradient",
)
TAKES_J = ("H1", "forward_euler", "midpoint", "discrete_gradient")
MS = ("MS1", "MS2", "MS3")
KINDS = ("H1", "H2", "ImplicitH2", *MS, "MLP", *INTEGRATORS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def networks(draw):
    """Every kind of network with the options that it has."""
    kind = draw(st.sampled_from(KINDS))
    m, N, seed = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(seeds)
    normal = Random(seed)
    options = {
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "tied": draw(st.booleans()),
        "init": draw(st.sampled_from(["paper", "scaled"])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "generator": generator(seed),
    }
    if kind != "MLP":
        options["learn_step"] = draw(st.booleans())
        each = draw(st.booleans()) and not (options["tied"] and options["learn_step"])
        options["step"] = [0.1 / (j + 3) for j in range(N)] if each else 0.1 / 3
    if kind in TAKES_J:
        J = draw(st.sampled_from([None, normal.skew(2 * m), normal.skew(N, 2 * m)]))
        options |= {"J": J, "learn_J": draw(st.booleans())}
    elif kind not in (*MS, "MLP"):
        X = draw(st.sampled_from([None, normal(m, m), normal(N, m, m)]))
        options |= {"X": X, "learn_X": draw(st.booleans())}
    if kind not in (*MS, "MLP") and draw(st.booleans()):
        M = 2 * m if kind in TAKES_J else m
        R = (torch.rand(N, M, M, generator=generator(seed)) < 0.5) | torch.eye(M).bool()
        options["sparsity"] = R if draw(st.booleans()) and not options["tied"] else R[0]
    if kind in INTEGRATORS:
        return hdnn.HamiltonianNet(2 * m, N, kind, **options)
    return getattr(hdnn, kind)(2 * m, N, **options)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return (
        type(a) is type(b)
        and repr(a) == repr(b)
        and [n for n, _ in a.named_parameters()] == [n for n, _ in b.named_parameters()]
        and list(first) == list(second)
        and all(value.dtype == second[name].dtype for name, value in first.items())
        and all(torch.equal(bits(value), bits(second[name])) for name, value in first.items())
    )


def model(seed: int = 0, dtype=torch.float32, head: str = "softmax") -> Model:
    options = {"generator": generator(seed), "dtype": dtype}
    heads = {
        "softmax": lambda: hdnn.SoftmaxHead(4, 3, **options),
        "sigmoid": lambda: hdnn.SigmoidHead(4, **options),
        "regression": lambda: hdnn.RegressionHead(4, 2, **options),
        "linear": lambda: hdnn.LinearHead(4, 2, **options),
    }
    return Model(Augment(2, 4, [3, 0]), hdnn.H2(4, 2, **options), heads[head]())


def of_every_kind() -> dict[str, torch.nn.Module]:
    return {
        "network": hdnn.H2(4, 2, X=torch.eye(2), learn_step=True, dtype=torch.bfloat16),
        "sparse": hdnn.H2(8, 2, sparsity=hdnn.Sparsity(torch.ones(4, 4).tril(1))),
        "model": model(),
        "mnist": models.mnist_net("h1", 1, channels=2, size=4, classes=2),
        "star": models.hdnn_star("h2", 1, (4, 8), size=8, classes=3),
    }


@settings(few, max_examples=60)
@given(networks())
def test_every_network_with_every_option_comes_back_bit_for_bit(tmp_path, net):
    path = tmp_path / "net"
    hdnn.save(net, path)
    again = hdnn.load(path)
    assert same(net, again)
    assert not any(p.grad is not None for p in again.parameters())
    assert all(p.requires_grad for p in again.parameters())
    for name, value in net.weights().items():
        other = again.weights()[name]
        assert torch.equal(value, other) if torch.is_tensor(value) else value == other
    if next(net.parameters()).dtype == F64:
        y = Random(3)(2, net.features)
        torch.testing.assert_close(again(y), net(y), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("head", ["softmax", "sigmoid", "regression", "linear"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_model_comes_back_with_all_its_parts(tmp_path, head, dtype):
    saved = model(dtype=dtype, head=head)
    hdnn.save(saved, tmp_path / "m")
    again = hdnn.load(tmp_path / "m")
    assert same(saved, again)
    x = torch.ones(5, 2, dtype=dtype)
    torch.testing.assert_close(again(x), saved(x))


@pytest.mark.parametrize("kind", of_every_kind())
def test_every_kind_of_file_comes_back(tmp_path, kind):
    saved = of_every_kind()[kind]
    hdnn.save(saved, str(tmp_path / "m"))
    assert same(hdnn.load(str(tmp_path / "m")), saved)


def test_a_model_without_augmentation_comes_back_without(tmp_path):
    saved = Model(None, hdnn.H1(4, 2, dtype=F64), hdnn.SoftmaxHead(4, 2))
    hdnn.save(saved, tmp_path / "m")
    again = hdnn.load(tmp_path / "m")
    assert again.augment is None
    assert same(saved, again)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 5e-324, -0.0])
def test_odd_values_come_back_too(tmp_path, value):
    net = hdnn.H2(4, 2, dtype=F64)
    with torch.no_grad():
        net.K_p[0, 0, 0] = value
    hdnn.save(net, tmp_path / "n")
    assert same(net, hdnn.load(tmp_path / "n"))


def test_training_goes_on_after_loading_as_it_would_have(tmp_path):
    def step(net):
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(3, 4)).square().sum().backward()
        optimiser.step()

    net = hdnn.H2(4, 2, learn_X=True, learn_step=True)
    hdnn.save(net, tmp_path / "n")
    again = hdnn.load(tmp_path / "n")
    step(net)
    step(again)
    assert same(net, again)


def test_a_refined_network_can_be_saved(tmp_path):
    net = hdnn.H2(4, 2, learn_step=True, X=torch.randn(2, 2, 2)).refine(3)
    hdnn.save(net, tmp_path / "n")
    assert same(net, hdnn.load(tmp_path / "n"))


def test_loading_goes_to_the_device_that_is_asked_for(tmp_path):
    hdnn.save(model(), tmp_path / "m")
    again = hdnn.load(tmp_path / "m", device="meta")
    assert {t.device.type for t in (*again.parameters(), *again.buffers())} == {"meta"}
    assert next(hdnn.load(tmp_path / "m").parameters()).device.type == "cpu"


def test_the_default_dtype_and_the_random_numbers_have_no_part_in_it(tmp_path):
    saved = model()
    before = torch.get_rng_state()
    hdnn.save(saved, tmp_path / "m")
    torch.set_default_dtype(F64)
    try:
        assert same(saved, hdnn.load(tmp_path / "m"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


# What the file is


def test_the_file_is_safetensors_and_nothing_else_is_left_behind(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "net.safetensors"
    path.write_bytes(b"old")
    hdnn.save(hdnn.H2(4, 2), path)
    with safe_open(path, framework="pt") as file:
        assert {"K_p", "K_q", "b_p", "b_q"} <= set(file.keys())
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_same_network_is_the_same_bytes(tmp_path):
    for net in of_every_kind().values():
        hdnn.save(net, tmp_path / "a")
        hdnn.save(hdnn.load(tmp_path / "a"), tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_nothing_is_ever_pickled(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("pickle was used")

    for module, name in (
        (pickle, "dumps"),
        (pickle, "dump"),
        (pickle, "loads"),
        (pickle, "load"),
        (pickle, "Unpickler"),
        (torch, "load"),
        (torch, "save"),
    ):
        monkeypatch.setattr(module, name, forbidden)
    hdnn.save(model(), tmp_path / "m")
    assert isinstance(hdnn.load(tmp_path / "m"), Model)
    for path in Path(inspect.getfile(hdnn)).parent.rglob("*.py"):
        source = path.read_text("utf-8")
        assert "import pickle" not in source, path
        assert "torch.load" not in source, path


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_interrupts_a_save_keeps_the_old_file_and_leaves_no_other(
    tmp_path, monkeypatch, error
):
    path = tmp_path / "net"
    hdnn.save(hdnn.H2(4, 2), path)
    before = path.read_bytes()

    def interrupted(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises((HDNNError, KeyboardInterrupt)):
            hdnn.save(hdnn.H2(8, 3), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["net"]


@pytest.mark.parametrize("what", [torch.nn.Linear(2, 2), None, "H2", {}])
def test_only_models_and_networks_can_be_saved(tmp_path, what):
    with pytest.raises(HDNNError):
        hdnn.save(what, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    class MyNet(hdnn.H2):
        pass

    for what in (MyNet(4, 2), Model(None, MyNet(4, 2), hdnn.SoftmaxHead(4, 2))):
        with pytest.raises(HDNNError):
            hdnn.save(what, tmp_path / "x")
    assert not list(tmp_path.iterdir())


# Files that cannot be read


@pytest.fixture
def saved(tmp_path) -> Path:
    hdnn.save(hdnn.H2(4, 2, X=torch.eye(2)), tmp_path / "net")
    return tmp_path / "net"


def test_what_is_no_file_is_refused(tmp_path):
    for where in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(HDNNError):
            hdnn.load(where)


@settings(few, max_examples=25)
@given(st.data())
def test_a_file_cut_anywhere_is_refused(saved, data):
    whole = saved.read_bytes()
    broken = saved.parent / "cut"
    broken.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(HDNNError):
        hdnn.load(broken)


@settings(few, max_examples=25)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(tmp_path, content):
    (tmp_path / "random").write_bytes(content)
    with pytest.raises(HDNNError):
        hdnn.load(tmp_path / "random")


def flipped(content: bytes, header: int, tensors: int):
    """The file with a bit flipped, and which: so many in its header, so many behind."""
    end = 8 * (8 + int.from_bytes(content[:8], "little"))
    draw = random.Random(0)
    places = [draw.randrange(end) for _ in range(header)]
    places += [draw.randrange(end, 8 * len(content)) for _ in range(tensors)]
    for place in places:
        broken = bytearray(content)
        broken[place // 8] ^= 1 << place % 8
        yield place, bytes(broken)


@pytest.mark.parametrize("kind", ["network", "model", "mnist"])
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path, kind):
    net, path = of_every_kind()[kind], tmp_path / "flipped"
    hdnn.save(net, path)
    refused = 0
    for place, broken in flipped(path.read_bytes(), header=150, tensors=100):
        path.write_bytes(broken)
        try:
            assert same(hdnn.load(path), net), place
        except HDNNError:
            refused += 1
    assert refused > 200  # names of fields that nobody needs are harmless


def test_pickles_and_files_of_other_programs_are_refused_and_not_run(tmp_path):
    from safetensors.torch import save_file

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    (tmp_path / "pickle").write_bytes(pickle.dumps(Trap()))
    torch.save({"K": Trap()}, tmp_path / "torch")
    save_file({"K": torch.zeros(2)}, tmp_path / "other")
    for name in ("pickle", "torch", "other"):
        with pytest.raises(HDNNError):
            hdnn.load(tmp_path / name)
    assert not (tmp_path / "sprung").exists()
