"""One process that compares its share of networks with the same networks of all nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import audit
import hdnn
from hdnn.distributed import Graph, GraphNetwork, Plan, partition
from hdnn.distributed.exchange import connect, world


def randomised(net: GraphNetwork):
    """The network of all nodes, with random weights where there are any.

    They are of the size of initial weights, so that states and gradients stay near 1.
    """
    whole = net.whole()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in whole.parameters():
            weight.copy_(0.3 * torch.randn_like(weight))
    return whole


def compare(plan: Plan, messages, network: str, frozen: bool) -> float:
    """The largest difference of states, of gradients, and of weights after a step."""
    options = {"network": network, "layers": 3, "dtype": torch.float64}
    net = GraphNetwork(plan, messages, **options)
    whole = randomised(net)
    net.load(whole)
    net.requires_grad_(not frozen)
    y = torch.randn(
        10, plan.graph.features, dtype=torch.float64, requires_grad=True
    )
    g = torch.randn_like(y)
    own = y.detach()[:, net.positions].requires_grad_()
    out = net(own)
    out.backward(g[:, net.positions])
    expected = whole(y)
    expected.backward(g)
    pairs = [
        (out, expected[:, net.positions]),
        (own.grad, y.grad[:, net.positions]),
    ]
    if not frozen:
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        after = GraphNetwork(plan, messages, **options)
        after.load(whole)
        pairs += zip(net.parameters(), after.parameters(), strict=True)
    return max(difference(a.detach(), b.detach()) for a, b in pairs)


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a - b).abs().max())


def main() -> None:
    torch.set_num_threads(1)
    rank, size = world()
    graph = Graph.of(json.loads(os.environ["GRAPH"]))
    plan = Plan(graph, partition(graph, size), rank)
    messages = connect(plan, 60.0)
    messages.agree({})
    worst = [
        compare(plan, messages, network, False)
        for network in ("h1", "h2", "yoshida4")
    ]
    # Nobody may wait for a process whose weights are frozen.
    worst.append(compare(plan, messages, "verlet", frozen=rank == 0))
    connections = len(audit.connections(os.getpid()))
    assert connections == len(plan.peers) + 1 + (rank == 0) * size, (
        connections
    )  # and the store
    assert set(messages.sent) <= set(plan.peers)
    messages.total(torch.ones(1))
    sys.stdout.write(f"worst {max(worst)}\n")


with hdnn.engine.use(engine="reference"):  # nothing to compile
    main()
