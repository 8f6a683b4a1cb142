"""Eight processes train with their neighbours alone: by their own counters, and by the kernel."""

from __future__ import annotations

import signal
import sys

import pytest
import torch

from audit import linked
from graph_runs import BATCHES, EPOCHS, Fault, Group, make_task, ring, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (sys.platform.startswith("linux") and torch.distributed.is_gloo_available()),
        reason="needs Linux and gloo",
    ),
]

NODES, LAYERS = 8, 2
RING = [(i, (i + 1) % NODES) for i in range(NODES)]


# With one more link the same audit must find one more connection, or it would not see any.
@pytest.mark.parametrize("chord", [[], [(2, 6)]], ids=["ring", "ring with a chord"])
def test_each_process_is_connected_to_its_neighbours_and_the_store_alone(stem, tmp_path, chord):
    edges = {(min(edge), max(edge)) for edge in [*RING, *chord]}
    graph = {**ring(NODES), "R": [list(edge) for edge in sorted(edges)]}
    task = make_task(tmp_path, NODES, graph, layers=LAYERS)
    fault, home = Fault(signal.SIGSTOP, 7, 5), tmp_path / "out"
    with Group(stem, task.config, NODES) as group:
        group.start_all("--out", str(home), odd=0, fault=fault)
        until(group.processes[0].stopped)  # and so all wait for it, in the middle of a step
        links, others = linked([process.pid for process in group.processes])
        group.processes[0].send(signal.SIGCONT)
        all_ended = group.end()
    assert links == edges
    assert others == [{("127.0.0.1", group.store.port)}] * NODES
    assert [(ended.code, ended.errors) for ended in all_ended] == [(0, "")] * NODES
    assert (home / "model.safetensors").read_bytes() == task.model

    sent = {(a, b): messages for a, b, messages, _ in all_ended[0].metrics["traffic"]}
    assert set(sent) == edges | {(b, a) for a, b in edges}
    # The tree leaves out the link between 4 and 5, where so only a handshake and layers are heard:
    # 64 messages a layer and way on the 16 directed links of the ring, that is 4 on each of them.
    # The ways are forward and backward in a step, and at the end forward to fit and to test.
    ways = 2 * EPOCHS * BATCHES + 2
    assert sent[4, 5] == sent[5, 4] == 1 + ways * LAYERS * 64 // 16
