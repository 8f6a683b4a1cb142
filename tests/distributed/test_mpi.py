"""The MPI transport: what four processes, started by mpiexec, send each other.

Run by Python itself, this file is the program of these processes: each of them makes all checks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from graph_runs import Task, make_task
from hdnn.distributed.graph.graph import Graph
from hdnn.distributed.graph.plan import Plan
from hdnn.distributed.messages import mpi
from hdnn.distributed.messages.connect import connect, parts_here
from hdnn.distributed.network.network import GraphNetwork
from hdnn.distributed.transport import DistributedError
from hdnn.errors import MissingExtraError, OptionError

RANKS = 4
LIMIT = 120  # seconds for what takes a few on an idle machine
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
EDGES = [(0, 1), (1, 2), (0, 2)]  # rank 3 has no peers
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
MPIEXEC = MPIEXEC or shutil.which("mpiexec")
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an mpiexec: pip install mpi4py mpich",
)


def mpiexec(
    *command: str, ranks: int = RANKS, **environment: str
) -> subprocess.CompletedProcess[str]:
    assert MPIEXEC is not None
    # Open MPI has to be told that it may; MPICH asks nobody.
    may = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    may |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    may |= {"PYTHONPATH": str(Path(__file__).parents[1])}  # where its helpers are
    return subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **may, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


# What each process checks


def letter(sender: int, receiver: int, dtype: torch.dtype) -> Tensor:
    """What one rank sends another: each pair has a size of its own."""
    generator = torch.Generator().manual_seed(10 * sender + receiver)
    return torch.randint(0, 2, (2 + sender, 3 + receiver), generator=generator).to(dtype)


def letters(me: int, edges: list[tuple[int, int]], dtype: torch.dtype = torch.float32):
    """What a rank sends, room for what it receives, and what that should be."""
    out = [(to, letter(me, to, dtype)) for sender, to in edges if sender == me]
    right = [letter(sender, me, dtype) for sender, to in edges if to == me]
    senders = [sender for sender, to in edges if to == me]
    into = [
        (sender, torch.full_like(tensor, 7)) for sender, tensor in zip(senders, right, strict=True)
    ]
    return out, into, right


def arrived(into: list[tuple[int, Tensor]], right: list[Tensor]) -> bool:
    return all(torch.equal(t, other) for (_, t), other in zip(into, right, strict=True))


def messages_from_point_to_point_arrive(transport: mpi.Mpi) -> None:
    for dtype in DTYPES:
        out, into, right = letters(transport.part, [*EDGES, (3, 0)], dtype)
        transport.exchange(out, into)
        assert arrived(into, right)


def messages_of_one_pair_keep_their_order(transport: mpi.Mpi) -> None:
    me = transport.part
    out = [(1, torch.tensor([k])) for k in range(5)] if me == 0 else []
    into = [(0, torch.zeros(1, dtype=torch.int64)) for _ in range(5)] if me == 1 else []
    transport.exchange(out, into)
    assert [int(tensor) for _, tensor in into] == ([*range(5)] if me == 1 else [])


def rounds_may_be_directed_and_leave_parts_out(transport: mpi.Mpi) -> None:
    there, back = object(), object()
    for dtype in DTYPES:
        for round, edges in ((there, EDGES), (back, [(b, a) for a, b in EDGES])):
            out, into, right = letters(transport.part, edges, dtype)
            transport.start_round(round, out, into).wait()
            assert arrived(into, right)


def rounds_of_the_same_peers_share_a_communicator(transport: mpi.Mpi) -> None:
    me = transport.part
    known = len(transport.graphs)
    # Ranks 1 and 2 cannot tell the first two rounds apart.
    for edges, new in (([(0, 1)], 1), ([(0, 1), (0, 3)], 2), ([(0, 1)], 2), ([], 3), ([], 3)):
        out, into, right = letters(me, edges)
        transport.start_round(object(), out, into).wait()
        assert arrived(into, right)
        assert len(transport.graphs) == known + new


def messages_cross_rounds_under_way(transport: mpi.Mpi) -> None:
    me = transport.part
    first, second, between = (letters(me, edges) for edges in (EDGES, EDGES[::-1], EDGES))
    pending = [
        transport.start_round(round, out, into)
        for round, (out, into, _) in ((object(), first), (object(), second))
    ]
    transport.exchange(between[0], between[1])
    for one in reversed(pending):
        one.wait()
    assert all(arrived(into, right) for _, into, right in (first, second, between))


def messages_may_be_empty(transport: mpi.Mpi) -> None:
    me = transport.part
    nothing = torch.zeros(0, 3)
    out, into = ([(1, nothing)] if me == 0 else []), ([(0, nothing.clone())] if me == 1 else [])
    transport.exchange(out, into)
    transport.start_round(object(), out, into).wait()


def messages_are_counted(transport: mpi.Mpi) -> None:
    own = mpi.Mpi()
    out, into, _ = letters(own.part, EDGES)
    own.exchange(out, into)
    own.start_round(object(), out, into).wait()
    own.close()
    assert own.traffic.messages == {to: 2 for to, _ in out}
    assert own.traffic.bytes == {to: 2 * tensor.nbytes for to, tensor in out}


def too_large_a_message_is_refused(transport: mpi.Mpi) -> None:
    before, mpi.LARGEST = mpi.LARGEST, 8
    with pytest.raises(DistributedError, match=r"has 12 bytes, but MPI takes 8 at most"):
        transport.exchange([(1, torch.zeros(3))], [])
    mpi.LARGEST = before


def a_layer_is_the_same_bit_for_bit(transport: mpi.Mpi) -> None:
    """R is directed and changes from layer to layer; X links nodes that R does not."""
    R = [[[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]], torch.eye(4).tolist()]
    T = [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]
    graph = Graph(torch.tensor([*R, R[0]]).bool(), torch.tensor(T).bool(), sizes=[1, 2, 1, 3])
    X = torch.eye(7)
    X[0, 4] = X[5, 0] = 0.5
    y, found = torch.randn(14, 5, generator=torch.Generator().manual_seed(0)), {}
    for plan, by in ((Plan.each(graph), transport), (Plan.whole(graph), None)):
        net = GraphNetwork(plan, 3, by, X=X)
        net.draw(3)
        rows = net.positions(net.part.number)
        state, tape = net.forward(net.split(y[rows]))
        start, gradients = net.backward(tape, tuple(state))
        own = {
            f"{node} {name}": block
            for node in net.part.nodes
            for name, block in net.blocks(node, gradients).items()
        }
        whole = torch.zeros(2, 14, 5)
        whole[:, rows] = torch.stack([net.join(state), net.join(start)])
        found[by] = whole, rows, own
    (here, rows, own), (alone, _, every) = found[transport], found[None]
    assert torch.equal(here[:, rows], alone[:, rows])
    assert all(torch.equal(block, every[name]) for name, block in own.items())


def a_message_of_another_size_is_an_error(transport: mpi.Mpi) -> None:
    own = mpi.Mpi()
    if own.part == 1:
        room = torch.zeros(64)  # what is cut off may be written all the same
        with pytest.raises(DistributedError, match=r"because part 1 lost part 0 \(.*trunc"):
            own.exchange([], [(0, room[:2])])
    elif own.part == 0:
        own.exchange([(1, torch.zeros(4))], [])


def a_silent_part_counts_as_lost(transport: mpi.Mpi) -> None:
    own = mpi.Mpi(timeout=0.2)
    late = torch.zeros(1)
    if own.part == 0:
        with pytest.raises(
            DistributedError, match=r"because part 0 got nothing from part 1 for 0.2 s"
        ):
            own.exchange([], [(1, late)])
        assert own.report("something else") == "part 0 got nothing from part 1 for 0.2 s"
    transport.comm.Barrier()
    if own.part == 1:
        time.sleep(0.2)  # part 0 has come to its end by then, and MPI writes there all the same
        own.exchange([(0, late)], [])


CHECKS = (
    messages_from_point_to_point_arrive,
    messages_of_one_pair_keep_their_order,
    rounds_may_be_directed_and_leave_parts_out,
    rounds_of_the_same_peers_share_a_communicator,
    messages_cross_rounds_under_way,
    messages_may_be_empty,
    messages_are_counted,
    too_large_a_message_is_refused,
    a_layer_is_the_same_bit_for_bit,
    a_message_of_another_size_is_an_error,
    a_silent_part_counts_as_lost,
)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    transport = mpi.Mpi(timeout=20)
    found = {}
    for check in CHECKS:
        try:
            check(transport)
            found[check.__name__] = "passed"
        except Exception:
            found[check.__name__] = traceback.format_exc()
    (folder / f"{transport.part}.json").write_text(json.dumps(found))
    transport.close()


@needs_mpi
def test_messages_by_mpi(tmp_path: Path) -> None:
    done = mpiexec("-m", "mpi4py", __file__, str(tmp_path))  # mpi4py ends all if one fails
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {check.__name__: "passed" for check in CHECKS}


# Training


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"), RANKS)


@needs_mpi
def test_training_by_mpi_is_that_of_one_process_bit_for_bit(task: Task, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(task.config.text())
    out = tmp_path / "out"
    worker = ("-m", "hdnn.distributed.worker", str(config), "--out", str(out))
    done = mpiexec(*worker, HDNN_TRANSPORT="mpi")
    assert done.returncode == 0, done.stderr
    assert (out / "model.safetensors").read_bytes() == task.model
    metrics = json.loads(done.stdout)
    assert metrics["parts"] == RANKS
    pairs = {(sender, to) for sender, to, messages, _ in metrics["traffic"] if messages}
    assert pairs == {(i, (i + d) % RANKS) for i in range(RANKS) for d in (1, -1)}


@needs_mpi
def test_a_part_that_stops_says_why_and_ends_all_others(task: Task, tmp_path: Path) -> None:
    data = shutil.copytree(task.config.data, tmp_path / "data")
    (data / "train" / "node-00002.safetensors").unlink()
    config = tmp_path / "config.json"
    config.write_text(replace(task.config, data=str(data)).text())
    worker = ("-m", "hdnn.distributed.worker", str(config), "--timeout", str(10 * LIMIT))
    done = mpiexec(*worker, ranks=2, HDNN_TRANSPORT="mpi")
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hdnn: ")]
    assert "node-00002.safetensors" in line


# Before MPI is asked


def test_the_extra_is_named_when_mpi4py_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setenv("HDNN_TRANSPORT", "mpi")
    for ask in (parts_here, connect):
        with pytest.raises(MissingExtraError, match=r"pip install 'hdnn\[mpi\]'"):
            ask()


def test_a_missing_MPI_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: object, **__: object) -> None:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open")

    monkeypatch.setattr(mpi, "require", no_library)
    with pytest.raises(MissingExtraError, match=r"library libmpi.so.*pip install mpich"):
        mpi.world()


@pytest.mark.parametrize("variable", mpi.SIZES)
def test_an_mpiexec_of_another_MPI_is_found(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=1))
    monkeypatch.setattr(mpi, "_library", lambda: alone)
    for other in mpi.SIZES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, "4")
    with pytest.raises(DistributedError, match="has started 4 processes, but mpi4py finds 1"):
        mpi.world()


def test_the_timeout_is_a_positive_number() -> None:
    with pytest.raises(OptionError, match="timeout must be"):
        mpi.Mpi(timeout=0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HDNN_TRANSPORT": "mip"}, "Did you mean 'mpi'"),
        ({"HDNN_TRANSPORT": "mpi", "HDNN_STORE": "127.0.0.1:1"}, "that mpiexec starts"),
        ({"HDNN_TRANSPORT": "mpi", "HDNN_REPLICAS": "2"}, "that mpiexec starts"),
    ],
)
def test_the_environment_is_checked(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for ask in (parts_here, connect):
        with pytest.raises(OptionError, match=message):
            ask()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
