"""The harness of network namespaces links nodes along the edges of a graph, and no others."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from audit import tcp_peers
from graph_runs import make_task
from namespaces import CONTROL, STORE_ADDRESS, STORE_PORT, Namespaces

FOLDER = Path(__file__).parents[1]
PLAIN = [sys.executable, "-S", "-c"]  # without packages, and so without a start of coverage
LIMIT = 300  # seconds for ranks that do not fail; a busy machine takes its time
PORT = 5000  # of the listeners below; nothing else listens in a new namespace

# Ends with its standard input. The kernel connects without an accept.
LISTEN = f"""
import socket, sys
listener = socket.create_server(("", {PORT}))
print("ready", flush=True)
sys.stdin.read()
"""

REACH = f"""
import json, socket, sys
reached = []
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, {PORT}), timeout=1).close()
    except OSError:
        continue
    reached.append(address)
print(json.dumps(reached))
"""

# The second exchange ends after the neighbours have looked: until then nobody disconnects.
EXCHANGE = """
import json, os
import torch
import torch.distributed as dist
from audit import tcp_peers

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
neighbours = (rank - 1) % size, (rank + 1) % size

def exchange():
    received = [torch.zeros(3) for _ in neighbours]
    work = [dist.irecv(x, other) for x, other in zip(received, neighbours)]
    work += [dist.isend(torch.full((3,), float(rank)), other) for other in neighbours]
    for one in work:
        one.wait()
    return [x.tolist() for x in received]

received = exchange()
peers = sorted(address for address, port in tcp_peers(os.getpid()))
exchange()
print(json.dumps({"received": received, "peers": peers}))
dist.destroy_process_group()
"""

# A group that has failed can hold up the end of the interpreter: _exit does not ask it.
BARRIER = """
import os
import torch.distributed as dist

try:
    dist.init_process_group("gloo")
    print("formed", flush=True)
    dist.barrier()
except RuntimeError as error:
    print(error, flush=True)
    os._exit(1)
print("passed", flush=True)
os._exit(0)
"""

KILLED = """
import os, signal, subprocess
from namespaces import Namespaces
with Namespaces([(0, 1)], 2) as net:
    process = net.run(0, ["sh", "-c", "echo up; exec sleep 60"], stdout=subprocess.PIPE)
    process.stdout.readline()
    print(net.name(0), process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def ring(nodes: int) -> list[tuple[int, int]]:
    return [(node, (node + 1) % nodes) for node in range(nodes)]


@pytest.fixture
def namespaces() -> type[Namespaces]:
    if reason := Namespaces.available():
        pytest.skip(reason)
    return Namespaces


def listen(net: Namespaces, node: int | None) -> None:
    pipe = subprocess.PIPE
    process = net.run(node, [*PLAIN, LISTEN], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "ready\n"


def reached(net: Namespaces, node: int | None, addresses: Sequence[str]) -> list[str]:
    argv = [*PLAIN, REACH, *addresses]
    process = net.run(node, argv, stdout=subprocess.PIPE, text=True)
    return json.loads(process.communicate(timeout=30)[0])


def left(net: Namespaces) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    return [name for name in names if name in map(net.name, (None, *net.nodes))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("edges", [[(0, 0)], [(0, 2)], [(-1, 0)]])
def test_an_edge_joins_two_nodes(edges):
    with pytest.raises(ValueError, match="does not join two of the nodes 0 to 1"):
        Namespaces(edges, 2)


def test_there_are_addresses_for_the_nodes():
    with pytest.raises(ValueError, match="1 to 253"):
        Namespaces([], 254)


def test_a_node_reaches_its_neighbours_and_nobody_else(namespaces):
    with namespaces(ring(8), 8) as net:
        for node in net.nodes:
            listen(net, node)
        for node in net.nodes:
            others = [net.address(other) for other in net.nodes if other != node]
            neighbours = [net.address(other) for other in sorted({(node - 1) % 8, (node + 1) % 8})]
            assert reached(net, node, others) == neighbours


def test_the_control_link_leads_to_the_host_of_the_store_alone(namespaces):
    with namespaces([(0, 1)], 3) as net:
        for node in (None, *net.nodes):
            listen(net, node)
        control = [net.control_address(node) for node in net.nodes]
        assert reached(net, None, control) == control
        for node in net.nodes:
            others = [address for address in control if address != control[node]]
            assert reached(net, node, [*others, STORE_ADDRESS]) == [STORE_ADDRESS]


def test_the_control_link_carries_nothing_between_nodes_even_along_forged_routes(namespaces):
    with namespaces([], 3) as net:
        listen(net, 1)
        listen(net, 2)
        for node, other in itertools.permutations(net.nodes, 2):
            net.ip(node, "route", "add", net.control_address(other), "dev", CONTROL)
            net.ip(node, "route", "add", net.address(other), "via", STORE_ADDRESS, "dev", CONTROL)
        for node in net.nodes:  # the host knows the way, and still forwards nothing
            net.ip(None, "route", "add", net.address(node), "via", net.control_address(node))
        assert reached(net, 0, [net.control_address(1), net.address(1)]) == []
        # The bridge is what stops the first of them: with open ports the same attempt succeeds.
        for node in (0, 2):
            net.ip(None, *f"link set port{node} type bridge_slave isolated off".split())
        assert reached(net, 0, [net.control_address(2)]) == [net.control_address(2)]


@pytest.mark.slow
def test_eight_ranks_on_a_ring_exchange_with_their_neighbours_alone(namespaces, stem):
    with namespaces(ring(8), 8) as net:
        all_ended = net.run_all(["-c", EXCHANGE], limit=LIMIT, stem=stem)
    for node, ended in enumerate(all_ended):
        assert ended.code == 0, ended.errors
        found = json.loads(ended.output)
        neighbours = (node - 1) % 8, (node + 1) % 8
        assert found["received"] == [[float(other)] * 3 for other in neighbours]
        assert found["peers"] == sorted([*map(net.address, neighbours), STORE_ADDRESS])


@pytest.mark.slow
def test_eight_parts_on_a_ring_train_to_the_bits_of_one_process(namespaces, stem, tmp_path):
    task, home = make_task(tmp_path, 8), tmp_path / "out"
    config = tmp_path / "config.json"
    config.write_text(task.config.text())
    worker = ["-m", "hdnn.distributed.worker", str(config), "--out", str(home)]
    group = {"HDNN_STORE": f"{STORE_ADDRESS}:{STORE_PORT}", "HDNN_PARTS": "8"}
    with namespaces(ring(8), 8) as net:
        argv = [*worker, "--timeout", str(LIMIT)]
        all_ended = net.run_all(
            argv, lambda node: {**group, "HDNN_PART": str(node)}, limit=LIMIT, stem=stem
        )
    assert [ended.code for ended in all_ended] == [0] * 8, all_ended
    assert (home / "model.safetensors").read_bytes() == task.model


# A barrier needs the ranks ±1, ±2, ±4, ... of every rank, and an eager start needs all. Not every
# collective would do: gloo's all_reduce, all_gather and reduce_scatter go around the ring.
@pytest.mark.slow
@pytest.mark.parametrize(("lazy", "first"), [("0", ""), ("1", "formed\n")])
def test_what_needs_more_than_neighbours_fails_on_a_ring(namespaces, stem, lazy, first):
    with namespaces(ring(4), 4) as net:
        argv = ["-c", BARRIER]
        all_ended = net.run_all(
            argv, lambda _: {"TORCH_GLOO_LAZY_INIT": lazy}, limit=LIMIT, grace=1, stem=stem
        )
    assert all(ended.code != 0 for ended in all_ended)
    # Of two ranks without a link, the higher sees an error at once and the lower waits for it.
    failed = [ended for ended in all_ended if not ended.killed]
    assert failed
    for ended in failed:
        assert ended.output.startswith(first)
        assert "Network is unreachable" in ended.output.removeprefix(first)


@pytest.mark.slow
def test_what_needs_all_pairs_passes_where_all_are_linked(namespaces, stem):
    with namespaces(itertools.combinations(range(3), 2), 3) as net:
        argv = ["-c", BARRIER]
        all_ended = net.run_all(
            argv, lambda _: {"TORCH_GLOO_LAZY_INIT": "0"}, limit=LIMIT, stem=stem
        )
    assert [ended.output for ended in all_ended] == ["formed\npassed\n"] * 3


def test_a_command_on_all_nodes_gives_what_each_of_them_wrote(namespaces):
    program = "import os, sys; print(os.environ['RANK']); sys.exit(os.environ['HELLO'])"
    with namespaces([], 3) as net:
        argv = [*PLAIN, program]
        all_ended = net.run_all(argv, lambda node: {"HELLO": f"from {node}"})
    assert [ended.output for ended in all_ended] == ["0\n", "1\n", "2\n"]
    assert [ended.errors for ended in all_ended] == ["from 0\n", "from 1\n", "from 2\n"]
    assert [ended.code for ended in all_ended] == [1, 1, 1]
    assert not any(ended.killed for ended in all_ended)


def test_commands_do_not_outlast_the_limit_or_the_failure_of_another(namespaces):
    program = (
        "import os, signal; os.environ['RANK'] == '1' and os.environ['FAIL'] or signal.pause()"
    )
    argv = [*PLAIN, program]
    with namespaces([], 2) as net:
        slow = net.run_all(argv, lambda _: {"FAIL": ""}, limit=0.5)
        failed = net.run_all(argv, limit=60, grace=0.1)
    assert [ended.killed for ended in slow] == [True, True]
    assert [ended.killed for ended in failed] == [True, False]
    assert "KeyError: 'FAIL'" in failed[1].errors


def test_nothing_is_left_behind_an_error(namespaces):
    net = namespaces([(0, 1)], 2)
    fork = "import os, signal; os.fork() and print(os.getpid(), flush=True); signal.pause()"
    with contextlib.suppress(ZeroDivisionError), net:
        assert len(left(net)) == 3
        process = net.run(0, [*PLAIN, fork], stdout=subprocess.PIPE, text=True)
        assert int(process.stdout.readline()) == process.pid
        inside = subprocess.run(["ip", "netns", "pids", net.name(0)], stdout=subprocess.PIPE)
        pids = [int(pid) for pid in inside.stdout.split()]
        assert len(pids) == 2
        raise ZeroDivisionError
    assert left(net) == []
    assert process.returncode == -signal.SIGKILL
    assert not any(map(alive, pids))


def test_nothing_is_left_behind_an_error_while_it_is_made(namespaces, monkeypatch):
    net = namespaces([(0, 1)], 2)
    monkeypatch.setattr(net, "neighbours", None)
    with pytest.raises(TypeError):
        net.__enter__()
    assert left(net) == []


def test_what_a_killed_test_process_left_is_removed_by_the_next(namespaces):
    env = {**os.environ, "PYTHONPATH": str(FOLDER)}
    killed = subprocess.run([*PLAIN, KILLED], env=env, stdout=subprocess.PIPE)
    name, pid = killed.stdout.decode().split()
    with namespaces([], 1):
        assert not Path("/run/netns", name).exists()
        assert not alive(int(pid))


@linux
@pytest.mark.parametrize(
    ("user", "program", "reason"),
    [
        (1000, "", "need root"),
        (0, None, "need the program ip"),
        (0, "echo Operation not permitted >&2; exit 1", "here: .*: Operation not permitted"),
    ],
)
def test_the_reason_is_told_where_there_are_none(monkeypatch, tmp_path, user, program, reason):
    if program is not None:
        (tmp_path / "ip").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert re.search(reason, Namespaces.available.__wrapped__())


@linux
@pytest.mark.parametrize("listening", ["127.0.0.1", "::"])
def test_the_peers_of_a_process_are_the_far_ends_of_its_own_connections(listening):
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    both = family is socket.AF_INET6
    if both and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    server = socket.create_server((listening, 0), family=family, dualstack_ipv6=both)
    with server, socket.create_connection(("127.0.0.1", server.getsockname()[1])) as near:
        far, _ = server.accept()
        with far:
            ends = {near.getsockname(), near.getpeername()}
            assert ends <= tcp_peers(os.getpid())
            argv = [*PLAIN, "input()"]
            with subprocess.Popen(argv, stdin=subprocess.PIPE) as other:
                assert tcp_peers(other.pid) == set()
                other.communicate(b"\n")
        assert not ends & tcp_peers(os.getpid())
