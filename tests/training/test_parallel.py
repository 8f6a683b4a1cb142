"""Several processes train as one does: by torch.distributed, on one machine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import hdnn
from hdnn.errors import OptionError
from hdnn.training import DataParallel, fit


def trained(group, folder=None, resume=False, stop=None):
    generator = torch.Generator().manual_seed(0)
    net = hdnn.H2(4, 4, generator=generator, dtype=torch.float64)
    head = hdnn.SigmoidHead(4, generator=generator, dtype=torch.float64)
    model = hdnn.Model(hdnn.Augment(2, 4), net, head)
    x = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    t = (x[:, 0] * x[:, 1] > 0).long()
    callbacks = [] if stop is None else [lambda moment: moment.epoch == stop]
    options = {
        "epochs": 3,
        "batch": 16,
        "validation": (x[:10], t[:10]),
        "progress": False,
    }
    fit(
        model,
        x,
        t,
        group=group,
        folder=folder,
        resume=resume,
        callbacks=callbacks,
        **options,
    )
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def process(rank, size, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size
    )
    weights = trained(DataParallel(), folder=f"{folder}/run")
    again = trained(DataParallel(), folder=f"{folder}/run", resume=True)
    assert torch.equal(weights, again)
    torch.save(weights, f"{folder}/weights-{rank}.pt")
    dist.destroy_process_group()


def test_processes_train_as_one_does(tmp_path):
    alone = trained(None)
    mp.start_processes(
        process, (3, str(tmp_path)), nprocs=3, start_method="spawn"
    )
    weights = [torch.load(tmp_path / f"weights-{rank}.pt") for rank in range(3)]
    for values in weights:
        torch.testing.assert_close(values, alone, rtol=1e-8, atol=1e-10)
        assert torch.equal(values, weights[0])


def test_a_group_needs_processes():
    with pytest.raises(OptionError, match="torchrun"):
        DataParallel()
