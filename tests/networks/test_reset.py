"""reset_parameters: the draw of the constructor again, also after the meta device."""

from __future__ import annotations

import copy

import pytest
import torch

import hdnn
from hdnn import models
from hdnn.errors import HDNNError
from law.test_contract import NETWORKS, RING, _skew

MODULES = {
    **{
        name: lambda make=make, **o: make(dtype=torch.float64, **o)
        for name, make in NETWORKS.items()
    },
    "paper": lambda **o: hdnn.H2(4, 3, init="paper", dtype=torch.bfloat16, **o),
    "learned steps": lambda **o: hdnn.H2(4, 3, step=[0.1, 0.2, 0.3], learn_step=True, **o),
    "learned J": lambda **o: hdnn.H1(5, 3, J=_skew(3, 5), learn_J=True, **o),
    "unit h1": lambda **o: hdnn.HamiltonianUnit(4, 3, norm="both", drop=0.5, **o),
    "unit h2": lambda **o: hdnn.HamiltonianUnit(6, 3, network="h2", sparsity=RING, **o),
    "LinearHead": lambda **o: hdnn.LinearHead(4, 2, **o),
    "SigmoidHead": lambda **o: hdnn.SigmoidHead(4, **o),
    "Augment": lambda **o: hdnn.Augment(2, 6),
    "Model": lambda **o: hdnn.Model(
        hdnn.Augment(3, 6), hdnn.MS2(6, 3, **o), hdnn.SoftmaxHead(6, 4, **o)
    ),
    "mnist_net": lambda **o: models.mnist_net("h2", 2, size=4, **o),
    "hdnn_star": lambda **o: models.hdnn_star(
        "h2", 2, (4, 6), norm="inside", stem_norm=True, size=8, **o
    ),
    "resnet": lambda **o: models.resnet56(depth=8, **o),
}


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def check_alike(a: torch.nn.Module, b: torch.nn.Module) -> None:
    mine, theirs = tensors(a), tensors(b)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", MODULES)
def test_made_on_the_meta_device_and_reset_is_a_normal_build_bit_for_bit(name):
    torch.manual_seed(7)
    normal = MODULES[name]()
    with torch.device("meta"):
        module = MODULES[name]()
    assert all(tensor.is_meta for tensor in tensors(module).values())
    module.to_empty(device="cpu")
    for p in module.parameters():  # whatever was in that memory
        torch.nn.init.constant_(p, torch.nan)
    torch.manual_seed(7)
    module.reset_parameters()
    check_alike(module, normal)
    assert repr(module) == repr(normal)


@pytest.mark.parametrize("name", MODULES)
def test_reset_draws_as_the_constructor_from_the_same_generator(name):
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    first = MODULES[name](generator=generator())
    module = copy.deepcopy(first)
    for p in module.parameters():
        torch.nn.init.constant_(p, 5.0)
    state = torch.get_rng_state()
    module.reset_parameters(generator())
    assert torch.equal(torch.get_rng_state(), state)
    check_alike(module, first)


@pytest.mark.parametrize("name", ["H1 with J a layer", "H2 with X", "Augment", "unit h2"])
def test_constants_survive_the_meta_device(name):
    module = MODULES[name]()
    there = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    for key, buffer in module.named_buffers():
        assert torch.equal(buffer, there.get_buffer(key)), key


def test_a_state_can_be_assigned_to_a_model_on_the_meta_device():
    normal = hdnn.Model(hdnn.Augment(2, 6), hdnn.H2(6, 2, sparsity=RING), hdnn.SigmoidHead(6))
    with torch.device("meta"):
        model = hdnn.Model(hdnn.Augment(2, 6), hdnn.H2(6, 2, sparsity=RING), hdnn.SigmoidHead(6))
    model.load_state_dict(normal.state_dict(), assign=True)
    x = torch.randn(5, 2)
    assert torch.equal(model(x), normal(x))


def test_an_interconnection_without_values_is_refused():
    with torch.device("meta"), pytest.raises(HDNNError, match="X is on the meta device"):
        hdnn.H2(4, 2, X=torch.eye(2))


def test_a_loaded_network_begins_again_with_the_learned_X_of_its_file(tmp_path):
    net = hdnn.H2(4, 2, X=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), learn_X=True)
    hdnn.save(net, tmp_path / "net.safetensors")
    loaded = hdnn.load(tmp_path / "net.safetensors")
    loaded.reset_parameters()
    assert torch.equal(loaded.X, net.X)


def test_parts_of_a_sharded_model_can_be_reset(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with torch.device("meta"):
            model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 3), hdnn.SigmoidHead(4))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        torch.manual_seed(2)
        model.reset_parameters()
        torch.manual_seed(2)
        normal = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 3), hdnn.SigmoidHead(4))
        x = torch.randn(5, 2)
        assert torch.equal(model(x), normal(x))
    finally:
        torch.distributed.destroy_process_group()
