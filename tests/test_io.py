"""Files come back bit for bit, are written as a whole or not at all, and damage is one sentence."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch.nn.utils import parametrizations, prune

import hdnn
from hdnn import Augment, Model, io
from hdnn.errors import CheckpointError, OptionError
from strategies import ACTIVATIONS, Random, seeds

F64 = torch.float64
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
files = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@st.composite
def networks(draw):
    """Networks of every kind, with the options that change what must be saved."""
    kind = draw(
        st.sampled_from(["H1", "H2", "ImplicitH2", "MLP", "verlet", "midpoint"])
    )
    m = draw(st.integers(1, 3))
    N = draw(st.integers(1, 3))
    seed = draw(seeds)
    normal = Random(seed)
    options = {
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "tied": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
        "generator": torch.Generator().manual_seed(seed),
    }
    if kind != "MLP":
        options["learn_step"] = draw(st.booleans())
        options["step"] = 0.1 / 3
    if kind in ("H1", "midpoint"):
        J = draw(
            st.sampled_from([None, normal.skew(2 * m), normal.skew(N, 2 * m)])
        )
        options |= {"J": J, "learn_J": draw(st.booleans())}
    elif kind != "MLP":
        options |= {
            "X": draw(st.sampled_from([None, normal(m, m), normal(N, m, m)]))
        }
    if kind in ("verlet", "midpoint"):
        return hdnn.HamiltonianNet(2 * m, N, kind, **options)
    return getattr(hdnn, kind)(2 * m, N, **options)


def bits(value):
    return value.contiguous().reshape(-1).view(torch.uint8)


def assert_same(a, b):
    assert type(a) is type(b)
    assert repr(a) == repr(b)
    first = a.state_dict()
    second = b.state_dict()
    assert list(first) == list(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(bits(value), bits(second[name])), name


def small_model(seed=0, dtype=torch.float32, head=None):
    options = {"generator": torch.Generator().manual_seed(seed), "dtype": dtype}
    head = head or hdnn.SoftmaxHead(4, 3, **options)
    return Model(
        augment=Augment(2, 4, [3, 0]), net=hdnn.H2(4, 2, **options), head=head
    )


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "net.safetensors"
    io.save(hdnn.H2(4, 3), path)
    return path


# Models


@settings(files, max_examples=40)
@given(networks())
def test_every_kind_of_network_comes_back_bit_for_bit(tmp_path, net):
    io.save(net, tmp_path / "net")
    again = io.load(tmp_path / "net")
    assert_same(net, again)
    assert again.config() == net.config()
    assert all(parameter.requires_grad for parameter in again.parameters())
    if next(net.parameters()).dtype == F64:
        y = Random(3)(2, net.features)
        assert torch.equal(again(y), net(y))


@pytest.mark.parametrize(
    "head", [hdnn.SoftmaxHead(4, 3), hdnn.SigmoidHead(4), hdnn.LinearHead(4, 2)]
)
def test_a_model_comes_back_with_its_head_and_positions(tmp_path, head):
    model = small_model(head=head)
    io.save(model, tmp_path / "m")
    again = io.load(tmp_path / "m")
    assert_same(model, again)
    x = torch.ones(5, 2)
    assert torch.equal(again(x), model(x))


def test_a_model_without_augmentation_comes_back_without(tmp_path):
    model = Model(augment=None, net=hdnn.H1(4, 2), head=hdnn.SoftmaxHead(4, 2))
    io.save(model, tmp_path / "m")
    assert io.load(tmp_path / "m").augment is None


def test_net_and_head_keep_different_dtypes(tmp_path):
    model = small_model(head=hdnn.LinearHead(4, 2, dtype=F64))
    io.save(model, tmp_path / "m")
    assert_same(model, io.load(tmp_path / "m"))


def test_parametrised_and_pruned_weights_are_saved_as_they_are_used(tmp_path):
    model = small_model()
    net = model.net
    parametrizations.weight_norm(net, "K_p")
    prune.random_unstructured(model.head, "weight", 0.5)
    x = torch.randn(5, 2)
    scores = model(x)
    io.save(model, tmp_path / "m")
    again = io.load(tmp_path / "m")
    assert list(again.state_dict()) == list(small_model().state_dict())
    assert torch.allclose(again(x), scores, atol=1e-6)
    assert torch.equal(model(x), scores)


def test_a_description_inside_another_file_builds_the_same_kind_of_network():
    net = hdnn.H1(4, 3, J=Random(0).skew(4), T=2.0)
    again = io.restore(json.loads(json.dumps(io.describe(net))))
    again.load_state_dict(net.state_dict(), assign=True)
    assert_same(net, again)


def test_a_note_stands_beside_the_model(tmp_path):
    io.save(hdnn.H2(4, 2), tmp_path / "net", note={"columns": ["a", "b"]})
    assert io.load_tensors(tmp_path / "net")[1]["note"] == {
        "columns": ["a", "b"]
    }


# Folders, and repositories of the Hugging Face Hub


@pytest.mark.parametrize(
    "model",
    [
        hdnn.H1(4, 3, J=Random(0).skew(4), T=2.0),
        hdnn.HamiltonianNet(4, 2, "verlet", learn_step=True),
        small_model(),
        hdnn.SigmoidHead(4, dtype=F64),
        hdnn.HamiltonianUnit(4, 2, norm="both"),
        hdnn.models.mnist_net("h2", layers=2),
        hdnn.Reversible(
            [
                hdnn.Coupling(None, torch.nn.Linear(2, 2)),
                hdnn.Leapfrog(torch.nn.Linear(2, 2), h=0.1),
            ],
            backprop="reversible",
        ),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_comes_back_from_its_folder(tmp_path, model):
    folder = tmp_path / "new" / "folder"
    model.save_pretrained(folder)
    again = type(model).from_pretrained(str(folder))
    assert_same(model, again)
    assert not again.training
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert io.read_json(folder / "config.json")["class"] == type(model).__name__
    assert_same(model, io.load(folder / "model.safetensors"))


def test_a_base_class_reads_its_subclasses_and_another_class_refuses(tmp_path):
    hdnn.H2(4, 2).save_pretrained(tmp_path)
    assert type(hdnn.networks.Network.from_pretrained(tmp_path)) is hdnn.H2
    with pytest.raises(CheckpointError, match="of the class H2, not H1; use"):
        hdnn.H1.from_pretrained(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .* choose a fold"):
        hdnn.H2(4, 2).save_pretrained(tmp_path / "file")


def test_a_folder_needs_no_hub_and_another_name_says_what_to_install(tmp_path):
    program = f"""
import sys
sys.modules["huggingface_hub"] = None  # cannot be imported
import hdnn
hdnn.H2(4, 2).save_pretrained({str(tmp_path)!r})
print(hdnn.H2.from_pretrained({str(tmp_path)!r}))
for method in (hdnn.H2.from_pretrained, hdnn.H2(4, 2).push_to_hub):
    try:
        method("user/name")
    except hdnn.HDNNError as error:
        print(error)
"""
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    network, read, push = done.stdout.splitlines()
    assert network.startswith("H2(4 features, 2 layers")
    assert read.startswith("user/name is not a folder, and could not be read")
    assert "pip install 'hdnn[hub]'" in read
    assert "pip install 'hdnn[hub]'" in push


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The calls of a Hugging Face Hub that is a folder, and no network."""
    module = pytest.importorskip("huggingface_hub")
    calls = []

    def create_repo(self, repo_id, **options):
        calls.append((repo_id, options))
        return module.RepoUrl(f"https://huggingface.co/user/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, **options):
        calls.append((repo_id, options))
        repository = tmp_path / repo_id
        repository.parent.mkdir()
        os.rename(folder_path, repository)
        os.mkdir(folder_path)
        return f"https://huggingface.co/{repo_id}/commit/1"

    def hf_hub_download(repo_id, filename, **options):
        calls.append((repo_id, options))
        if not (tmp_path / repo_id).is_dir():
            raise module.errors.LocalEntryNotFoundError("no\nconnection")
        return str(tmp_path / repo_id / filename)

    monkeypatch.setattr(module.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(module.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(module, "hf_hub_download", hf_hub_download)
    return calls


def test_a_model_comes_back_from_the_hub(hub):
    model = small_model()
    url = model.push_to_hub("name", private=True, commit_message="First")
    assert url == "https://huggingface.co/user/name/commit/1"
    created, uploaded = hub
    assert created[0] == "name"
    assert created[1]["private"]
    assert uploaded[0] == "user/name"
    assert uploaded[1]["commit_message"] == "First"
    again = Model.from_pretrained("user/name", revision="main")
    assert_same(model, again)
    assert hub[-1] == ("user/name", {"revision": "main"})


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_one_sentence(hub):
    with pytest.raises(CheckpointError) as caught:
        hdnn.H2.from_pretrained("runs/nets")
    assert str(caught.value) == (
        "runs/nets is not a folder, and could not be read from the Hugging Face Hub: no connection"
    )


def test_a_class_of_a_user_with_the_mixin_keeps_its_guarantee(tmp_path):
    mixin = pytest.importorskip("huggingface_hub").PyTorchModelHubMixin

    class Mine(mixin, hdnn.H2):
        pass

    net = Mine(4, 3)
    assert net.guarantee().holds
    net.save_pretrained(tmp_path)
    assert torch.equal(Mine.from_pretrained(tmp_path).K_p, net.K_p)


class H2(hdnn.H2):
    """A class of a user, with the name of one of hdnn."""


@pytest.mark.parametrize(
    "module", [H2(4, 2), torch.nn.Linear(2, 2), torch.nn.ReLU()]
)
def test_other_classes_are_refused_before_anything_is_written(tmp_path, module):
    with pytest.raises(CheckpointError, match=r"save its state_dict\(\)"):
        io.save(module, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_saving_and_loading_leave_the_random_numbers_alone(tmp_path):
    net = hdnn.H2(4, 2)
    state = torch.get_rng_state()
    io.save(net, tmp_path / "net")
    io.load(tmp_path / "net")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_network_is_the_same_bytes(tmp_path):
    for name in "ab":
        io.save(small_model(seed=1), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_default_dtype_does_not_change_what_is_loaded(tmp_path, saved):
    torch.set_default_dtype(F64)
    try:
        assert io.load(saved).K_p.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


# Damage


@settings(files, max_examples=60)
@given(data=st.data())
def test_a_file_that_is_cut_or_changed_is_one_sentence(saved, data):
    content = bytearray(saved.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:place]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    damaged = saved.with_name("damaged")
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        io.load(damaged)
    assert "\n" not in str(caught.value)
    assert "damaged" in str(caught.value)


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    (tmp_path / "bomb").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="or of another kind"):
        io.load(tmp_path / "bomb")
    assert not (tmp_path / "run").exists()


def test_a_safetensors_file_of_another_program_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(
        to_safetensors({"a": torch.ones(2)}, metadata={"format": "pt"})
    )
    with pytest.raises(CheckpointError, match="not written by hdnn"):
        io.load(tmp_path / "f")


def test_tensors_without_a_model_are_no_model(tmp_path):
    io.save_tensors(tmp_path / "t", {"a": torch.ones(2)}, {"step": 3})
    with pytest.raises(CheckpointError, match="does not hold a model"):
        io.load(tmp_path / "t")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"class": "H7"}, "H7 is not a class"),
        ({"config": {"features": 4}}, "damaged"),
        ({"config": {"features": 6, "layers": 3}}, "size mismatch"),
        ({"config": {"features": 4, "layers": 0}}, "layers must be"),
        ({"modules": 3}, "damaged"),
    ],
)
def test_a_description_that_fits_nothing_is_refused(saved, change, words):
    tensors, metadata = io.load_tensors(saved)
    metadata["model"] |= change
    io.save_tensors(saved, tensors, metadata)
    with pytest.raises(CheckpointError, match=words):
        io.load(saved)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"does not exist, .* check the name"
    ):
        io.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="not a file"):
        io.load(tmp_path)


# Tensors, JSON and plain files


@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_and_metadata_come_back(tmp_path, dtype):
    tensors = {
        "a": torch.arange(6).to(dtype).reshape(2, 3).T,
        "scalar": torch.ones((), dtype=dtype),
    }
    io.save_tensors(tmp_path / "t", tensors, {"epoch": 3, "loss": [0.5, None]})
    again, metadata = io.load_tensors(tmp_path / "t")
    assert metadata == {"epoch": 3, "loss": [0.5, None]}
    assert all(
        torch.equal(again[name], value) for name, value in tensors.items()
    )
    with safe_open(tmp_path / "t", framework="pt") as file:
        assert json.loads(file.metadata()["hdnn"])["metadata"]["epoch"] == 3


def test_loaded_tensors_do_not_change_with_the_file(tmp_path):
    io.save_tensors(tmp_path / "t", {"a": torch.ones(4)})
    again, _ = io.load_tensors(tmp_path / "t")
    content = (tmp_path / "t").read_bytes()
    with (tmp_path / "t").open("r+b") as file:
        file.write(bytes(len(content)))
    assert torch.equal(again["a"], torch.ones(4))


def test_json_comes_back_with_null_for_what_is_not_finite(tmp_path):
    io.write_json(
        tmp_path / "j", {"a": [1, float("nan")], "b": {"c": float("inf")}}
    )
    assert io.read_json(tmp_path / "j") == {"a": [1, None], "b": {"c": None}}


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\ufeff"])
def test_bad_json_is_one_sentence(tmp_path, text):
    (tmp_path / "j").write_text(text)
    with pytest.raises(CheckpointError, match="as JSON"):
        io.read_json(tmp_path / "j")


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(
    tmp_path, monkeypatch, function
):
    path = tmp_path / "f"
    io.write_atomically(path, "old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    target = os if function == "fsync" else type(path)
    monkeypatch.setattr(
        target, "fsync" if function == "fsync" else "replace", fail
    )
    with pytest.raises(CheckpointError, match="No space left on device"):
        io.write_atomically(path, b"new")
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["f"]
    assert path.read_text() == "old"


def test_a_link_stays_a_link_and_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    io.write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    with pytest.raises(CheckpointError, match="not a file"):
        io.write_atomically(tmp_path, "new")


def test_a_lock_keeps_other_processes_out_until_it_ends(tmp_path):
    program = (
        f"from hdnn import io\nwith io.lock({str(tmp_path)!r}): print('inside')"
    )
    run = [sys.executable, "-c", program]
    with io.lock(tmp_path):
        refused = subprocess.run(run, capture_output=True, text=True)
    assert "another process is using" in refused.stderr
    allowed = subprocess.run(run, capture_output=True, text=True)
    assert allowed.stdout == "inside\n"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Sequential(
            torch.nn.Linear(2, 4, bias=False),
            hdnn.H2(4, 3, activation=torch.nn.GELU(), h=0.2),
            torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 1)),
        ),
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
            torch.nn.BatchNorm2d(4, momentum=0.3),
            hdnn.HamiltonianUnit(4, 2, norm="both", step=[0.1, 0.2]),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.25),
        ),
        lambda: hdnn.HamiltonianUnit(4, 2, network="h1", drop=0.1),
    ],
)
def test_sequences_of_known_layers_and_units_come_back(make, tmp_path):
    model = make()
    hdnn.save(model, tmp_path / "model.safetensors")
    copy = hdnn.load(tmp_path / "model.safetensors")
    assert repr(copy) == repr(model)
    assert copy.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor)


def test_a_module_that_occurs_twice_in_a_sequence_comes_back_twice(tmp_path):
    relu = torch.nn.ReLU()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), relu, relu)
    hdnn.save(model, tmp_path / "model.safetensors")
    assert repr(hdnn.load(tmp_path / "model.safetensors")) == repr(model)


def test_a_block_of_a_function_is_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="this Coupling cannot be saved"):
        hdnn.save(hdnn.Coupling(torch.tanh), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_a_missing_gpu_is_named(saved):
    with pytest.raises(OptionError, match="no CUDA device is available"):
        io.load(saved, device="cuda")


def test_a_sequence_with_a_layer_of_ones_own_is_not_written(tmp_path):
    class Own(torch.nn.Module):
        pass

    with pytest.raises(CheckpointError, match="Own is not a class"):
        hdnn.save(torch.nn.Sequential(Own()), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
