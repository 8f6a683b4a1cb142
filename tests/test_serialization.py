"""Saving and loading: bit for bit, all or nothing, and clear words for every broken file."""

from __future__ import annotations

import errno
import inspect
import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hdnn.base.files import write_atomically
from hdnn.serialization import FORMAT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch.nn.utils import parametrizations, prune

import hdnn
from flips import flipped
from hdnn import Augment, Model, models
from hdnn.errors import CheckpointError
from hdnn.training import checkpoint
from strategies import ACTIVATIONS, Random, seeds

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
files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def networks(draw):
    """Every kind of network with every option that it has."""
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
    if kind in ("ImplicitH2", "midpoint") and draw(st.booleans()):
        options |= {"tol": 1e-3, "max_iter": 17}
    if kind not in (*MS, "MLP") and draw(st.booleans()):
        M = 2 * m if kind in TAKES_J else m
        R = (torch.rand(N, M, M, generator=generator(seed)) < 0.5) | torch.eye(M).bool()
        options["sparsity"] = R if draw(st.booleans()) and not options["tied"] else R[0]
    if kind in INTEGRATORS:
        return hdnn.HamiltonianNet(2 * m, N, kind, **options)
    return getattr(hdnn, kind)(2 * m, N, **options)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    assert type(a) is type(b)
    assert repr(a) == repr(b)
    assert [n for n, _ in a.named_parameters()] == [n for n, _ in b.named_parameters()]
    first, second = a.state_dict(), b.state_dict()
    assert list(first) == list(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(bits(value), bits(second[name])), name


def model(seed: int = 0, dtype=torch.float32, head: str = "softmax") -> Model:
    options = {"generator": generator(seed), "dtype": dtype}
    heads = {
        "softmax": lambda: hdnn.SoftmaxHead(4, 3, **options),
        "sigmoid": lambda: hdnn.SigmoidHead(4, **options),
        "regression": lambda: hdnn.RegressionHead(4, 2, **options),
        "linear": lambda: hdnn.LinearHead(4, 2, **options),
    }
    return Model(Augment(2, 4, [3, 0]), hdnn.H2(4, 2, **options), heads[head]())


# Round trips


@settings(files, max_examples=50)
@given(networks())
def test_every_network_with_every_option_comes_back_bit_for_bit(tmp_path, net):
    path = tmp_path / "net"
    hdnn.save(net, path)
    again = hdnn.load(path)
    assert_same(net, again)
    assert again.config() == net.config()
    assert not any(p.grad is not None for p in again.parameters())
    assert all(p.requires_grad for p in again.parameters())
    for name, value in net.weights().items():
        other = again.weights()[name]
        assert torch.equal(value, other) if torch.is_tensor(value) else value == other
    if next(net.parameters()).dtype == F64:
        y = Random(3)(2, net.features)
        assert torch.equal(again(y), net(y))


@pytest.mark.parametrize("head", ["softmax", "sigmoid", "regression", "linear"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_comes_back_with_all_its_parts(tmp_path, head, dtype):
    saved = model(dtype=dtype, head=head)
    hdnn.save(saved, tmp_path / "m")
    again = hdnn.load(tmp_path / "m")
    assert_same(saved, again)
    assert again.augment.positions.tolist() == [3, 0]
    x = torch.ones(5, 2, dtype=dtype)
    assert torch.equal(again(x), saved(x))


def test_a_model_without_augmentation_comes_back_without(tmp_path):
    saved = Model(None, hdnn.H1(4, 2), hdnn.SoftmaxHead(4, 2))
    hdnn.save(saved, tmp_path / "m")
    again = hdnn.load(tmp_path / "m")
    assert again.augment is None
    assert_same(saved, again)


def test_net_and_head_may_have_different_dtypes(tmp_path):
    saved = Model(None, hdnn.H1(4, 2, dtype=F64), hdnn.SoftmaxHead(4, 2, dtype=torch.float32))
    hdnn.save(saved, tmp_path / "m")
    assert_same(saved, hdnn.load(tmp_path / "m"))


def test_weights_of_different_dtypes_in_one_network_come_back_as_they_were(tmp_path):
    net = hdnn.H2(4, 2)
    net.b_p.data = net.b_p.data.double() + 1e-12
    hdnn.save(net, tmp_path / "n")
    assert_same(net, hdnn.load(tmp_path / "n"))


@pytest.mark.parametrize(
    "make", [lambda: hdnn.MS2(1, 2), lambda: hdnn.H1(1, 2, J=torch.zeros(1, 1), learn_J=True)]
)
def test_the_smallest_networks_come_back(tmp_path, make):
    net = make()
    hdnn.save(net, tmp_path / "n")
    assert_same(net, hdnn.load(tmp_path / "n"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 5e-324, -0.0])
def test_odd_values_come_back_too(tmp_path, value):
    net = hdnn.H2(4, 2, dtype=F64)
    with torch.no_grad():
        net.K_p[0, 0, 0] = value
    hdnn.save(net, tmp_path / "n")
    assert_same(net, hdnn.load(tmp_path / "n"))


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
    assert_same(net, again)


def test_a_refined_network_can_be_saved(tmp_path):
    net = hdnn.H2(4, 2, learn_step=True, X=torch.randn(2, 2, 2)).refine(3)
    hdnn.save(net, tmp_path / "n")
    assert_same(net, hdnn.load(tmp_path / "n"))


def test_parameters_that_are_shared_can_be_saved(tmp_path):
    net = hdnn.H2(4, 2)
    net.K_q = net.K_p
    hdnn.save(net, tmp_path / "n")
    again = hdnn.load(tmp_path / "n")
    assert torch.equal(again.K_q, net.K_p)


def test_views_and_frozen_parameters_can_be_saved(tmp_path):
    net = hdnn.H1(4, 2)
    net.K = torch.nn.Parameter(net.K.detach().mT, requires_grad=False)  # not contiguous
    hdnn.save(net, tmp_path / "n")
    assert torch.equal(hdnn.load(tmp_path / "n").K, net.K)


def test_loading_goes_to_the_device_that_is_asked_for(tmp_path):
    hdnn.save(model(), tmp_path / "m")
    again = hdnn.load(tmp_path / "m", device="meta")
    assert {t.device.type for t in (*again.parameters(), *again.buffers())} == {"meta"}
    assert next(hdnn.load(tmp_path / "m").parameters()).device.type == "cpu"


def test_paths_may_be_strings(tmp_path):
    net = hdnn.H2(4, 2)
    hdnn.save(net, str(tmp_path / "n"))
    assert_same(net, hdnn.load(str(tmp_path / "n")))


# What the file is


def read(path: Path) -> tuple[dict, dict]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["hdnn"]), tensors


def test_the_file_is_safetensors_with_a_json_config_and_a_version(tmp_path):
    net = hdnn.H2(4, 2, X=torch.eye(2))
    hdnn.save(net, tmp_path / "n")
    config, tensors = read(tmp_path / "n")
    assert config["version"] == hdnn.__version__
    assert config["format"] == FORMAT
    assert config["kind"] == "H2"
    assert set(tensors) == {"K_p", "K_q", "b_p", "b_q", "X"}


@settings(files, max_examples=30)
@given(networks())
def test_the_same_network_is_the_same_bytes(tmp_path, net):
    hdnn.save(net, tmp_path / "a")
    hdnn.save(net, tmp_path / "b")
    hdnn.save(hdnn.load(tmp_path / "a"), tmp_path / "c")
    first = (tmp_path / "a").read_bytes()
    assert (tmp_path / "b").read_bytes() == first
    assert (tmp_path / "c").read_bytes() == first


def test_saving_and_loading_leave_the_random_numbers_alone(tmp_path):
    saved = model()
    before = torch.get_rng_state()
    hdnn.save(saved, tmp_path / "m")
    hdnn.load(tmp_path / "m")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_dtype_and_device_do_not_change_what_is_loaded(tmp_path):
    saved = model(dtype=torch.float32)
    hdnn.save(saved, tmp_path / "m")
    torch.set_default_dtype(F64)
    try:
        assert_same(saved, hdnn.load(tmp_path / "m"))
    finally:
        torch.set_default_dtype(torch.float32)


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
        source = path.read_text()
        assert "import pickle" not in source, path
        assert "torch.load" not in source, path


# Writing all or nothing


def test_saving_replaces_what_was_there_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"old")
    hdnn.save(hdnn.H2(4, 2), path)
    assert isinstance(hdnn.load(path), hdnn.H2)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch, call):
    path = tmp_path / "net"
    old = hdnn.H2(4, 2)
    hdnn.save(old, path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full_disk)
        with pytest.raises(CheckpointError, match=r"net: No space left on device.*unchanged"):
            hdnn.save(hdnn.H2(8, 3), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["net"]


def test_an_interruption_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "net"
    hdnn.save(hdnn.H2(4, 2), path)
    before = path.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hdnn.save(hdnn.H2(8, 3), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["net"]


def test_the_file_is_flushed_to_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    hdnn.save(hdnn.H2(4, 2), tmp_path / "net")
    assert calls[:2] == ["fsync", "replace"]


def test_the_file_has_the_rights_of_any_new_file(tmp_path):
    hdnn.save(hdnn.H2(4, 2), tmp_path / "net")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "net").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("where", ["missing/net", "file/net", "folder"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, where):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=rf"cannot write .*{where}.*[Cc]hoose a folder"):
        hdnn.save(hdnn.H2(4, 2), tmp_path / where)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_a_folder_without_the_right_to_write_is_named(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(CheckpointError, match="Permission denied"):
        hdnn.save(hdnn.H2(4, 2), tmp_path / "net")


@pytest.mark.parametrize("what", [torch.nn.Linear(2, 2), hdnn.SoftmaxHead(2, 2), None, "H2", {}])
def test_only_models_and_networks_can_be_saved(tmp_path, what):
    with pytest.raises(CheckpointError, match=f"got {type(what).__name__}"):
        hdnn.save(what, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    class MyNet(hdnn.H2):
        pass

    class MyHead(hdnn.SoftmaxHead):
        pass

    class MyModel(Model):
        pass

    net, head = hdnn.H2(4, 2), hdnn.SoftmaxHead(4, 2)
    for what, name in (
        (MyNet(4, 2), "MyNet"),
        (Model(None, net, MyHead(4, 2)), "MyHead"),
        (Model(None, MyNet(4, 2), head), "MyNet"),
        (MyModel(None, net, head), "MyModel"),
    ):
        with pytest.raises(CheckpointError, match=name):
            hdnn.save(what, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_class_of_ones_own_is_not_taken_for_hdnns_of_the_same_name(tmp_path):
    mine = type("H2", (hdnn.H2,), {})
    with pytest.raises(CheckpointError, match="H2"):
        hdnn.save(mine(4, 2), tmp_path / "x")


# Files that cannot be read


@pytest.fixture
def saved(tmp_path) -> Path:
    hdnn.save(hdnn.H2(4, 2, X=torch.eye(2)), tmp_path / "net")
    return tmp_path / "net"


def rewritten(path: Path, config=None, tensors=None, text: str | None = None) -> Path:
    """The same file with another config, other tensors or another text, and without a checksum."""
    old_config, old_tensors = read(path)
    config = {k: v for k, v in (config or old_config).items() if k != "sha256"}
    text = json.dumps(config) if text is None else text
    path.write_bytes(
        to_safetensors(old_tensors if tensors is None else tensors, metadata={"hdnn": text})
    )
    return path


def test_a_file_that_does_not_exist_is_said_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        hdnn.load(tmp_path / "nowhere")


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        hdnn.load(tmp_path)


@settings(files, max_examples=25)
@given(st.data())
def test_a_file_cut_anywhere_is_refused(saved, data):
    whole = saved.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    broken = saved.parent / "cut"
    broken.write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"cut cannot be read.*truncated"):
        hdnn.load(broken)


@settings(files, max_examples=25)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(tmp_path, content):
    path = tmp_path / "random"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="random"):
        hdnn.load(path)


@settings(files, max_examples=50)
@given(st.data())
def test_a_damaged_byte_is_noticed_or_harmless_but_never_a_crash(saved, data):
    whole = bytearray(saved.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    whole[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    broken = saved.parent / "damaged"
    broken.write_bytes(whole)
    try:
        message = f"damaged but harmless: {hdnn.load(broken)}"
    except CheckpointError as error:
        message = str(error)
    assert "damaged" in message  # the file's name


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_is_refused_and_not_run(tmp_path, protocol):
    path, ran = tmp_path / "evil", tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (open, (str(ran), "w"))

    path.write_bytes(pickle.dumps(Evil(), protocol=protocol))
    with pytest.raises(CheckpointError, match="evil cannot be read as a safetensors file"):
        hdnn.load(path)
    assert not ran.exists()


def test_a_file_of_torch_save_is_refused(tmp_path):
    torch.save(hdnn.H2(4, 2).state_dict(), tmp_path / "net.pt")
    with pytest.raises(CheckpointError, match=r"net\.pt cannot be read as a safetensors file"):
        hdnn.load(tmp_path / "net.pt")


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"hdnn": ""}, {"hdnn": "{"}])
def test_a_safetensors_file_of_another_program_is_refused(tmp_path, metadata):
    (tmp_path / "other").write_bytes(to_safetensors({"a": torch.ones(2)}, metadata=metadata))
    with pytest.raises(CheckpointError, match="other is a safetensors file of another kind"):
        hdnn.load(tmp_path / "other")


@pytest.mark.parametrize("text", ["null", "3", "[]", '"H2"', "{}", '{"format": null}'])
def test_metadata_of_another_kind_is_refused(saved, text):
    with pytest.raises(CheckpointError, match="another kind"):
        hdnn.load(rewritten(saved, text=text))


@pytest.mark.parametrize("number", [FORMAT + 1, 99])
def test_a_file_of_a_newer_version_says_which_and_what_to_do(saved, number):
    config, _ = read(saved)
    config |= {"format": number, "version": "9.8.7", "kind": "H3"}
    with pytest.raises(
        CheckpointError, match=rf"hdnn 9\.8\.7 in format {number}.*install a newer hdnn"
    ):
        hdnn.load(rewritten(saved, config))


def test_a_format_that_never_was_is_refused(saved):
    for number in (0, -1, 1.5, True, float("inf"), "x", [1]):
        config, _ = read(saved)
        with pytest.raises(CheckpointError):
            hdnn.load(rewritten(saved, config | {"format": number}))


@pytest.mark.parametrize(
    "kind", ["H3", "", None, ["H2"], {"a": 1}, "Augment", "Model", "MLP", "H1", "SoftmaxHead"]
)
def test_a_file_of_another_kind_is_refused(saved, kind):
    config, _ = read(saved)
    with pytest.raises(CheckpointError, match="net"):
        hdnn.load(rewritten(saved, config | {"kind": kind}))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: {}, "weights"),
        (lambda t: {k: v for k, v in t.items() if k != "K_p"}, "K_p"),
        (lambda t: t | {"zz": torch.ones(1)}, "zz"),
        (lambda t: t | {"K_p": torch.ones(3, 2, 2)}, "K_p"),
        (lambda t: t | {"K_p": torch.ones(8)}, "K_p"),
        (lambda t: {k: v.long() for k, v in t.items()}, "floating-point"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(saved, change, word):
    _, tensors = read(saved)
    with pytest.raises(CheckpointError, match=f"net.*{word}"):
        hdnn.load(rewritten(saved, tensors=change(tensors)))


def test_a_weight_of_whole_numbers_is_refused(saved):
    _, tensors = read(saved)
    with pytest.raises(CheckpointError, match="b_q"):
        hdnn.load(rewritten(saved, tensors=tensors | {"b_q": tensors["b_q"].long()}))


@pytest.mark.parametrize(
    "change",
    [
        {"features": 3},
        {"features": "4"},
        {"layers": 0},
        {"layers": 5},
        {"activation": "tan"},
        {"step": -1.0},
        {"step": float("nan")},
        {"step": [0.1]},
        {"sparsity": 3},
        {"sparsity": {"R": [[1]], "nonsense": 1}},
        {"learn_X": "x"},
        {"nonsense": 1},
    ],
)
def test_a_config_that_makes_no_network_is_refused(saved, change):
    config, _ = read(saved)
    with pytest.raises(CheckpointError, match="net"):
        hdnn.load(rewritten(saved, config | {"config": config["config"] | change}))


@pytest.mark.parametrize(
    "constants", [None, [1], {"X": "ab"}, {"X": [-1, 2]}, {"X": [3, 3]}, {"J": [4, 4]}, {"X": 1}]
)
def test_constants_that_do_not_fit_are_refused(saved, constants):
    config, _ = read(saved)
    with pytest.raises(CheckpointError, match="net"):
        hdnn.load(rewritten(saved, config | {"constants": constants}))


def test_a_huge_network_without_the_weights_for_it_is_refused_before_it_is_made(saved):
    config, _ = read(saved)
    huge = config["config"] | {"features": 2**14, "layers": 2**14}
    with pytest.raises(CheckpointError, match="net"):
        hdnn.load(rewritten(saved, config | {"config": huge}))


@pytest.mark.parametrize(
    "parts", [None, {}, {"net": None}, [], {"augment": 1, "net": 2, "head": 3}]
)
def test_a_model_without_its_parts_is_refused(tmp_path, parts):
    hdnn.save(model(), tmp_path / "m")
    config, _ = read(tmp_path / "m")
    with pytest.raises(CheckpointError, match="m"):
        hdnn.load(rewritten(tmp_path / "m", config | {"parts": parts}))


def test_an_activation_that_is_not_registered_any_more_is_named(tmp_path, monkeypatch):
    registry = hdnn.activations._REGISTRY
    monkeypatch.setattr(hdnn.activations, "_REGISTRY", dict(registry))
    tanh = hdnn.activations.get("tanh")
    mine = hdnn.activations.Activation("mine", tanh.sigma, tanh.slope, tanh.integral, 0.0, 1.0)
    hdnn.activations.register(mine)
    hdnn.save(hdnn.H2(4, 2, activation="mine"), tmp_path / "n")
    assert hdnn.load(tmp_path / "n").activation == "mine"
    monkeypatch.setattr(hdnn.activations, "_REGISTRY", registry)
    with pytest.raises(CheckpointError, match="activation 'mine' is not known"):
        hdnn.load(tmp_path / "n")


def test_a_loaded_network_does_not_hang_on_its_file(tmp_path):
    """Not even where the file is written over in place, as `cp` does."""
    net = hdnn.H2(16, 2)
    hdnn.save(net, tmp_path / "n")
    again = hdnn.load(tmp_path / "n")
    with open(tmp_path / "n", "r+b") as file:
        file.write(bytes(os.path.getsize(tmp_path / "n")))
    assert_same(net, again)


# Checksums


def of_every_kind() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "network": hdnn.H2(4, 2, X=torch.eye(2), learn_step=True, dtype=torch.bfloat16),
        "model": model(),
        "images": models.mnist_net("h1", 1, channels=2, size=4, classes=2),
    }


def same_contents(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return (
        repr(a) == repr(b)
        and hdnn.serialization.describe(a) == hdnn.serialization.describe(b)
        and all(torch.equal(bits(first[name]), bits(second[name])) for name in first)
    )


@pytest.mark.parametrize("kind", ["network", "model", "images"])
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path, kind):
    saved, path = of_every_kind()[kind], tmp_path / "flipped"
    hdnn.save(saved, path)
    whole = path.read_bytes()
    assert same_contents(hdnn.load(path), saved)
    refused = 0
    for place, broken in flipped(whole, header=300, tensors=200):
        path.write_bytes(broken)
        try:
            assert same_contents(hdnn.load(path), saved), place
        except CheckpointError:
            refused += 1
    assert refused > 450  # names of fields that nobody needs are harmless


@pytest.mark.parametrize("kind", ["network", "model", "images"])
def test_a_file_from_before_there_were_checksums_is_loaded(tmp_path, kind):
    saved = of_every_kind()[kind]
    hdnn.save(saved, tmp_path / "m")
    config, _ = read(tmp_path / "m")
    assert len(config["sha256"]) == 64
    assert same_contents(hdnn.load(rewritten(tmp_path / "m")), saved)
    assert "sha256" not in read(tmp_path / "m")[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"K_p": t["K_q"], "K_q": t["K_p"]},
        lambda t: t | {"b_p": torch.full_like(t["b_p"], torch.nan)},
        lambda t: t | {"K_p": t["K_p"].double()},
    ],
)
def test_tensors_that_were_changed_afterwards_are_refused(saved, change):
    config, tensors = read(saved)
    content = to_safetensors(change(tensors), metadata={"hdnn": json.dumps(config)})
    saved.write_bytes(content)
    with pytest.raises(CheckpointError, match="net is damaged: its contents do not have the check"):
        hdnn.load(saved)


# Files that promise more than they hold

HUGE = """
import json, resource, sys
from safetensors import safe_open
from safetensors.torch import save
import hdnn

sized = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (sized + 200 * 2**20, -1))
for line in sys.stdin:
    path, where, value = json.loads(line)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        config = json.loads(file.metadata()["hdnn"])
    config.pop("sha256", None)
    inner = config
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    open(path + ".huge", "wb").write(save(tensors, metadata={"hdnn": json.dumps(config)}))
    try:
        hdnn.load(path + ".huge")
        print("loaded", where, value)
    except hdnn.errors.CheckpointError as error:
        words = str(error)
        print(words if "memory" in words or "allocate" in words else "refused")
    except BaseException as error:
        print(type(error).__name__, where, value, error)
"""

C = "config"
PROMISES = {
    "h2": [
        ([C, "features"], 10**9),
        ([C, "features"], 40_000),
        ([C, "features"], 10**30),
        ([C, "layers"], 3 * 10**8),
        ([C, "layers"], 10**400),
        (["constants", "X"], [30_000, 30_000]),
        (["constants", "X"], [10**9, 2, 2]),
        ([C], {"features": 10**5, "layers": 1, "tied": True, "step": 0.1}),
        ([C, "sparsity"], {"R": [[1, 0], [0, 1]], "sizes": [10**9, 10**9]}),
    ],
    "h1": [([C, "features"], 60_000)],
    "ms2": [([C, "features"], 60_000), ([C, "layers"], 10**9)],
    "mlp": [([C, "features"], 60_000)],
    "model": [
        (["parts", "augment", C], {"inputs": 10**9, "features": 10**9}),
        (["parts", "head", C], {"features": 4, "classes": 10**10}),
        (["parts", "head", C], {"features": 10**10, "classes": 3}),
        (["parts", "net", C, "layers"], 10**9),
    ],
    "star": [
        ([C, "channels"], [10**5]),
        ([C, "classes"], 10**12),
        ([C, "size"], 2**40),
        ([C, "layers"], 10**9),
        ([C, "layers"], [10**9]),
        ([C, "inputs"], 10**12),
        (["kind"], "AlexNet"),
    ],
    "resnet": [([C, "depth"], 6 * 10**8 + 2), ([C, "classes"], 10**9), ([C], {"classes": 10**9})],
    "mnist": [
        ([C, "channels"], 10**8),
        ([C, "size"], 10**6),
        (["parts", "net", C, "features"], 10**9),
        (["kind"], "AlexNet"),
    ],
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system tells no sizes")
def test_a_config_is_compared_with_the_weights_before_there_is_memory_for_it(tmp_path):
    made = {
        "h2": hdnn.H2(4, 2, X=torch.eye(2)),
        "h1": hdnn.H1(4, 2, learn_J=True),
        "ms2": hdnn.MS2(4, 2),
        "mlp": hdnn.MLP(4, 2, tied=True),
        "model": model(),
        "star": models.hdnn_star("h2", 2, (4,), size=4),
        "resnet": models.resnet56(depth=8),
        "mnist": models.mnist_net("h1", 1, channels=2, size=4, classes=2),
    }
    changes = []
    for name, net in made.items():
        hdnn.save(net, tmp_path / name)
        changes += [(str(tmp_path / name), *change) for change in PROMISES[name]]
    done = subprocess.run(
        [sys.executable, "-c", HUGE],
        input="".join(json.dumps(change) + "\n" for change in changes),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["refused"] * len(changes)


def test_a_tied_network_of_any_depth_is_loaded_in_no_time(tmp_path):
    net = hdnn.H2(4, 10**12, tied=True, learn_step=True)
    hdnn.save(net, tmp_path / "n")
    assert hdnn.load(tmp_path / "n").layers == 10**12


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_an_absurd_length_is_refused(saved, length):
    whole = saved.read_bytes()
    saved.write_bytes(length.to_bytes(8, "little") + whole[8:])
    with pytest.raises(CheckpointError, match="net cannot be read"):
        hdnn.load(saved)


def test_a_config_that_is_nested_without_end_is_refused(saved):
    for text in ("[" * 10**5, '{"format": 1, "a": ' + "[" * 200 + "]" * 200 + "}"):
        (saved.parent / "deep").write_bytes(to_safetensors(read(saved)[1], metadata={"hdnn": text}))
        with pytest.raises(CheckpointError, match="deep is a safetensors file of another kind"):
            hdnn.load(saved.parent / "deep")


def test_a_tensor_that_is_there_twice_is_one_sentence_or_one_tensor(saved):
    whole = saved.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    text = json.dumps(header)[:-1] + f', "K_q": {json.dumps(header["K_p"])}}}'
    content = len(text).to_bytes(8, "little") + text.encode()
    saved.write_bytes(content + whole[8 + int.from_bytes(whole[:8], "little") :])
    with pytest.raises(CheckpointError, match="net"):
        hdnn.load(saved)


def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path):
    """Four TiB of zeros on a disk, as large as its header says, and nothing of it in memory."""
    size = 2**42
    tensors = {"K_p": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    tensors["__metadata__"] = {"hdnn": "{}", "hdnn-training": '{"format": 1, "options": {}}'}
    header = json.dumps(tensors).encode()
    for name in ("file", checkpoint.NAME):
        with open(tmp_path / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            try:
                file.truncate(8 + len(header) + size)
            except OSError:
                pytest.skip("this disk takes no such files")
    for read_it in (
        lambda: hdnn.serialization.read(tmp_path / "file"),
        lambda: checkpoint.read(tmp_path, {}),
    ):
        with pytest.raises(CheckpointError, match="memory"):
            read_it()


def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), ("/dev/zero", "a device"), ("a\0b", "null")):
        with pytest.raises(CheckpointError, match=f"cannot be read.*{what}"):
            hdnn.load(path)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="link does not exist"):
        hdnn.load(tmp_path / "link")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_what_is_no_plain_file_is_never_replaced_by_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for name in ("pipe", "link"):
        with pytest.raises(
            CheckpointError, match=r"cannot be written: it is a pipe; name a file\.$"
        ):
            write_atomically(tmp_path / name, b"new")
    assert pipe.is_fifo()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_link_to_a_file_is_that_file(saved):
    link = saved.parent / "link"
    link.symlink_to(saved)
    hdnn.save(hdnn.H1(2, 1), link)
    assert link.is_symlink()
    assert isinstance(hdnn.load(saved), hdnn.H1)


def test_a_file_that_may_not_grow_keeps_the_old_one(saved):
    before, limits = saved.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        with pytest.raises(CheckpointError, match=r"net: File too large.*unchanged"):
            hdnn.save(hdnn.H2(8, 3), saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["net"]


# Weights that others compute


def pruned(net):
    prune.l1_unstructured(net, "K_p", 0.5)
    prune.random_unstructured(net, "K_p", 0.3)
    prune.l1_unstructured(net, "b_q", 0.5)
    with torch.no_grad():
        net.K_p_orig.mul_(2)  # as an optimiser does: K_p itself is old until the next call


@pytest.mark.parametrize(
    "change",
    [
        pruned,
        lambda net: parametrizations.orthogonal(net, "K_p"),
        lambda net: parametrizations.weight_norm(net, "K_q"),
        lambda net: parametrizations.spectral_norm(net, "K_p"),
        lambda net: torch.nn.utils.spectral_norm(net, "K_p"),
    ],
)
@pytest.mark.parametrize("in_model", [False, True])
def test_pruned_and_parametrised_weights_are_saved_as_they_are_used(tmp_path, change, in_model):
    torch.manual_seed(0)
    net = hdnn.H2(4, 3)
    change(net)
    saved = Model(None, net, hdnn.SoftmaxHead(4, 2)) if in_model else net
    state = {name: t.clone() for name, t in saved.state_dict().items()}
    hdnn.save(saved, tmp_path / "n")
    assert saved.training
    for name, t in saved.state_dict().items():
        assert torch.equal(t, state[name]), name  # not even the iteration of a spectral norm
    again, y = hdnn.load(tmp_path / "n"), torch.randn(5, 4)
    assert type(again.net if in_model else again) is hdnn.H2
    saved.eval()
    assert torch.equal(again(y), saved(y))


def test_pruned_layers_of_images_are_saved_as_they_are_used(tmp_path):
    saved = models.hdnn_star("h2", 1, (4,), size=4, norm="both", stem_norm=True)
    prune.l1_unstructured(saved.stages[0], "K_q", 0.5)
    prune.l1_unstructured(saved.linear, "weight", 0.5)
    parametrizations.spectral_norm(saved.stem)
    hdnn.save(saved.eval(), tmp_path / "n")
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(hdnn.load(tmp_path / "n").eval()(x), saved(x))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: net.register_buffer("extra", torch.ones(1)), "extra is no weight of this H2"),
        (lambda net: net.add_module("more", torch.nn.Linear(1, 1)), "more.bias is no weight"),
        (lambda net: setattr(net, "K_p", torch.nn.Parameter(torch.ones(3, 5, 5))), "K_p has shape"),
        (lambda net: net.to("meta"), "no data"),
        (lambda net: delattr(net, "b_p"), "b_p is missing"),
        (lambda net: setattr(net, "features", 10), "has shape"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_before_anything_is_written(
    tmp_path, change, words
):
    net = hdnn.H2(4, 3)
    change(net)
    with pytest.raises(CheckpointError, match=f"this H2 cannot be saved.*{words}"):
        hdnn.save(net, tmp_path / "n")
    assert not list(tmp_path.iterdir())
