"""Stacks of blocks under `torch.compile`, over several processes, and sharded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hdnn import Coupling, GradientField, Leapfrog, Reversible
from hdnn.errors import OptionError

# PyTorch's compiler warns about what it does itself.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),
    pytest.mark.filterwarnings(
        "ignore:<class 'torch.autograd.function.Function'> should not"
    ),
]
D = 4


class Well(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, 7)

    def forward(self, x):
        return self.linear(x).cosh().log().sum(-1)


def mlp():
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh())


def made(backprop="stored", state="float"):
    torch.manual_seed(1)
    blocks = [
        Coupling(mlp(), mlp()),
        Leapfrog(GradientField(Well(), scale=-1.0), h=0.3),
    ]
    return Reversible(blocks, backprop=backprop, state=state).double()


def gradients(net, y, call=None):
    y = y.clone().requires_grad_()
    (call or net)(y).square().mean().backward()
    return [y.grad, *(p.grad for p in net.parameters())]


def same(ones, others):
    for one, two in zip(ones, others, strict=True):
        torch.testing.assert_close(one, two)


Y = torch.randn(
    6, 2 * D, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)
WAYS = [
    ("stored", "fixed"),
    ("reversible", "float"),
    ("reversible", "fixed"),
    ("checkpoint", "float"),
]


@pytest.mark.parametrize(("backprop", "state"), WAYS)
def test_a_compiled_stack_has_the_same_gradients(backprop, state):
    torch._dynamo.reset()
    net, twin = made(backprop, state), made(state=state)
    same(
        gradients(net, Y, torch.compile(net, backend="aot_eager")),
        gradients(twin, Y),
    )


@pytest.mark.slow
@pytest.mark.parametrize("backprop", ["stored", "reversible"])
def test_a_stack_compiled_by_inductor_has_the_same_gradients(backprop):
    torch._dynamo.reset()
    net = made(backprop)
    same(gradients(net, Y, torch.compile(net)), gradients(made(), Y))


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
def test_modules_that_are_compiled_one_by_one_have_the_same_gradients(backprop):
    torch._dynamo.reset()
    net = made(backprop)
    for block in net:
        block.F = torch.compile(block.F, backend="aot_eager")
    same(gradients(net, Y), gradients(made(), Y))


def test_a_compiled_step_of_training_has_the_same_gradients():
    torch._dynamo.reset()
    net = made("reversible")
    step = torch.compile(
        lambda: net(Y).square().mean().backward(), backend="aot_eager"
    )
    step()
    same([p.grad for p in net.parameters()], gradients(made(), Y)[1:])


# Several processes


def process(rank, store):
    """Compare gradients of two processes, each with half of the batch, with those of one."""
    dist = torch.distributed
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    wanted, mine = gradients(made(), Y)[1:], Y.chunk(2)[rank]
    for backprop, state in WAYS[1:]:
        for options in ({}, {"static_graph": True}):
            net = nn.parallel.DistributedDataParallel(
                made(backprop, state), **options
            )
            for _ in range(2):  # buckets are sorted anew after the first step
                net.zero_grad()
                found = gradients(net, mine)[1:]
            same(found, wanted)
        net = nn.parallel.DistributedDataParallel(made(backprop, state))
        with net.no_sync():
            gradients(net, mine)
        same([g / 2 for g in gradients(net, mine)[1:]], wanted)
        net = made(backprop, state)
        for field in (field for block in net for field in block.fields()):
            torch.distributed.fsdp.fully_shard(
                field, mesh=mesh, reshard_after_forward=True
            )
        torch.distributed.fsdp.fully_shard(net, mesh=mesh)
        for _ in range(2):
            net.zero_grad()
            found = [g.full_tensor() for g in gradients(net, mine)[1:]]
        same(found, wanted)
    net = made("reversible")
    torch.distributed.fsdp.fully_shard(net[0], mesh=mesh)
    with pytest.raises(
        OptionError, match=r"shard each F and G, as in fully_shard\(block.F\)"
    ):
        net(mine)
    os.write(1, b"equal")
    dist.barrier()  # nobody hangs up on the other
    os._exit(0)  # gloo's threads do not always survive an orderly end


@pytest.mark.skipif(
    not (
        torch.distributed.is_available()
        and torch.distributed.is_gloo_available()
    ),
    reason="needs gloo",
)
def test_two_processes_and_shards_find_the_gradients_of_the_joined_batch(
    tmp_path,
):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    program = "import sys; sys.path.insert(0, sys.argv[1]); import test_blocks_compiled as t; "
    program += "t.process(int(sys.argv[2]), sys.argv[3])"
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                program,
                str(Path(__file__).parent),
                str(rank),
                tmp_path / "s",
            ],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, error = rank.communicate(timeout=300)
        assert out == "equal", error
