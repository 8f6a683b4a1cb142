"""Which part of the graph is this process, and where do all parts find each other?

Started by `hdnn launch`, the environment says so in HDNN_STORE, HDNN_PART, HDNN_PARTS and
HDNN_RESTART. Started by torchrun, its own variables do; the part is then the rank, unless HDNN_PART
says otherwise, because after a restart a process may have another rank but not another node.
HDNN_REPLICAS = k makes k replicas of the graph of all these processes, one after the other. Started
by mpiexec with HDNN_TRANSPORT=mpi, MPI knows it all. Started by hand, this process owns all nodes.
HDNN_TRANSPORT=tcp is for processes of one machine that send many short messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from hdnn.distributed.messages.gloo import Gloo
from hdnn.distributed.messages.mpi import Mpi, world
from hdnn.distributed.messages.replicas import Replicas
from hdnn.distributed.messages.tcp import Tcp
from hdnn.distributed.transport import DistributedError, Local, Transport, short
from hdnn.errors import OptionError, choose
from hdnn.training.processes import meeting


def parts_here() -> int:
    """The number of parts of the graph, from the environment."""
    if _by_mpi():
        return world().size
    processes, replicas = _whole("HDNN_PARTS", _whole("WORLD_SIZE", 1)), _whole("HDNN_REPLICAS", 1)
    if replicas < 1 or processes % replicas:
        raise OptionError(f"{processes} processes are no {replicas} replicas of a graph.")
    return processes // replicas


def number_here() -> int:
    """The number of this process, from the environment: parts of the first replica come first."""
    return world().rank if _by_mpi() else _whole("HDNN_PART", _whole("RANK", 0))


class Process(NamedTuple):
    """The connections to other parts of the graph, and to the same part in other replicas."""

    transport: Transport
    replicas: Replicas

    def close(self) -> None:
        """Close all connections."""
        self.transport.close()
        self.replicas.close()


def connect(*, timeout: float = 60.0, name: Callable[[int], str] = "part {}".format) -> Process:
    """Connect this process to the other parts of the graph, as the environment says.

    `hdnn launch`, torchrun and mpiexec set the environment for what they start; a process that was
    started by hand owns all nodes.

    Args:
        timeout: the seconds after which a silent part counts as lost.
        name: how to call a part in messages, given its number.

    Returns:
        Its `transport` to other parts of the graph and its `replicas`, the same part in other
        replicas of the graph; `close` closes both.

    Raises:
        OptionError: if the variables of the environment contradict each other.
        DistributedError: if the store cannot be reached, or a part was started twice.
        MissingExtraError: if MPI is asked for and is not there.

    Examples:
        >>> from hdnn import distributed
        >>> process = distributed.connect()
        >>> process.transport.part, process.transport.parts
        (0, 1)
        >>> process.close()
    """
    if _by_mpi():
        return Process(Mpi(timeout=timeout, name=name), Replicas())
    parts, replicas = parts_here(), _whole("HDNN_REPLICAS", 1)
    if parts * replicas == 1 and "HDNN_STORE" not in os.environ:
        return Process(Local(), Replicas())
    number = number_here()
    if not 0 <= number < parts * replicas:
        raise OptionError(f"HDNN_PART must lie in 0 .. {parts * replicas - 1}, but is {number}.")
    store = _store(number, parts * replicas, timeout)
    replica, part = divmod(number, parts)
    if store.add(f"part-{number}", 1) > 1:
        raise DistributedError(f"{name(part)} was started twice; each part is one process.")
    near = meeting.PrefixStore(f"graph-{replica}", store)
    if _transport() == "tcp":
        if replicas > 1 or not _on_one_machine():
            raise OptionError("HDNN_TRANSPORT=tcp is for one graph on one machine; take gloo.")
        direct = Tcp(part, parts, near, timeout=timeout, name=name, faults=store)
        return Process(direct, Replicas())
    where = f" of replica {replica}" if replicas > 1 else ""
    with meeting.kept_here(_on_one_machine()):
        transport = Gloo(
            part,
            parts,
            near,
            timeout=timeout,
            name=lambda p: name(p) + where,
            faults=store,
            everyone=parts * replicas,
        )
        copies = meeting.PrefixStore(f"alike-{part}", store)
        return Process(transport, Replicas(replica, replicas, copies, timeout))


def _transport() -> str:
    known = ("gloo", "mpi", "tcp")
    return choose("HDNN_TRANSPORT", os.environ.get("HDNN_TRANSPORT", "gloo"), known)


def _by_mpi() -> bool:
    if _transport() != "mpi":
        return False
    if "HDNN_STORE" in os.environ or _whole("HDNN_REPLICAS", 1) != 1:
        raise OptionError(
            "HDNN_TRANSPORT=mpi is for one graph that mpiexec starts; leave it out of `hdnn launch`"
            " and of replicas."
        )
    return True


def _store(number: int, processes: int, timeout: float) -> Any:
    """The store for this start: a restart must not find addresses of the last start."""
    where = os.environ.get("HDNN_STORE")
    restart = os.environ.get("HDNN_RESTART", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    try:
        if where is not None:
            host, _, port = where.rpartition(":")
            wait = timedelta(seconds=timeout)
            store = meeting.TCPStore(host, int(port), is_master=False, timeout=wait)
        else:
            store = meeting.from_environment(_whole("RANK", number), processes, timeout)
    except (ValueError, RuntimeError) as error:
        raise DistributedError(
            f"cannot reach the store {where or 'of torchrun'} ({short(error).removesuffix('.')})."
        ) from error
    return meeting.PrefixStore(f"hdnn-{restart}", store)


def _on_one_machine() -> bool:
    """Whether all processes are here: those of `hdnn launch` have their store on the loopback."""
    where = os.environ.get("HDNN_STORE")
    if where is None:
        return meeting.on_one_machine()
    return meeting.is_loopback(where.rpartition(":")[0])


def _whole(name: str, otherwise: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return otherwise
    try:
        return int(text)
    except ValueError as error:
        raise OptionError(f"{name} must be a whole number, but is {text!r}.") from error
