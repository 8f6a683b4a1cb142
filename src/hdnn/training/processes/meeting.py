"""Where the processes of one training meet: a store at one address, never at all addresses.

A store of PyTorch listens at every address that a machine has, whatever it is given. Here it gets
a socket that is bound already: to the loopback where all processes are on one machine, else to the
address that was asked for. The connections of gloo stay on the loopback of one machine, too. The
store also keeps what went wrong first, so that all processes report the same fault.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from hdnn.errors import TrainingError

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable by which users choose gloo's interface
FAULT = "fault"  # the key of the first one
PATIENCE = 2.0  # seconds that a connection of this machine to itself may take

TCPStore: Any = getattr(dist, "TCPStore", None)
PrefixStore: Any = getattr(dist, "PrefixStore", None)


class MeetingError(TrainingError):
    """Processes that cannot meet, because of the network of this machine."""


def check_loopback() -> None:
    """Raise unless this machine can connect to itself: otherwise all would wait silently."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), PATIENCE).close()
    except OSError as error:
        raise MeetingError(
            f"processes of one machine talk by its loopback, but {LOOPBACK} cannot be used here "
            f"({error.strerror or error}); bring the interface up, as in: ip link set lo up."
        ) from error


def serve(host: str = LOOPBACK, port: int = 0, **options: Any) -> Any:
    """A store that is kept by this process, at this address alone; 0 is any free port."""
    try:
        bound = _bind(host, port)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            raise MeetingError(
                f"the store cannot listen at {host[:99]}:{port} "
                f"({getattr(error, 'strerror', None) or error}); give an address of this machine."
            ) from error
        # This process may have opened it before: PyTorch knows, or says that it is taken.
        return TCPStore(host, port, is_master=True, multi_tenant=True, **options)
    number, place = bound.getsockname()[1], bound.detach()  # the store closes it
    return TCPStore(
        host, number, is_master=True, multi_tenant=True, master_listen_fd=place, **options
    )


def _bind(host: str, port: int) -> socket.socket:
    """A socket at the first address of a name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server(address, family=family)


def from_environment(rank: int, size: int, seconds: float) -> Any:
    """The store of MASTER_ADDR and MASTER_PORT: torchrun's own, or else kept by rank 0."""
    wait = timedelta(seconds=seconds)
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise MeetingError(
            "MASTER_ADDR and MASTER_PORT must be an address and a port, but are "
            f"{host[:99]!r} and {port[:99]!r}."
        )
    options: dict[str, Any] = {"world_size": size, "timeout": wait}
    if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(host, int(port), is_master=False, **options)
    if not on_one_machine() and "LOCAL_WORLD_SIZE" in os.environ and is_loopback(host):
        raise MeetingError(
            f"MASTER_ADDR={host} is the loopback here, which other machines cannot reach; give the "
            "address of this machine."
        )
    return serve(host, int(port), **options)


def is_loopback(host: str) -> bool:
    """Whether a name or an address stands for this machine alone."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in found)


def on_one_machine() -> bool:
    """Whether all processes are here, as torchrun says or as the address of their store does."""
    local, size = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if local is not None:
        return local == size
    return is_loopback(os.environ.get("MASTER_ADDR", ""))


def interface() -> str | None:
    """The name of the loopback."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return name if name in (known for _, known in socket.if_nameindex()) else None


def kept_here(wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, new gloo groups listen on the loopback only, unless the user chose an interface."""
    name = interface() if wanted and INTERFACE not in os.environ else None
    return contextlib.nullcontext() if name is None else variable(INTERFACE, name)


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Inside, a variable of the environment has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def gloo_group(store: Any, rank: int, size: int, seconds: float, *, lazy: bool = False) -> Any:
    """A group of processes apart from all others, which wait so long for each other.

    A `lazy` one opens connections when they are first used; all its processes must ask for that,
    because gloo crashes otherwise. It is said to the device: a variable of the environment would be
    shared with other threads, which may just be taking it back.
    """
    group: Any = dist.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
    # PyTorch before 2.8 cannot open connections later, and does not know the word.
    when = {"lazy_init": True} if lazy and "lazy_init" in group.create_device.__doc__ else {}
    names = [name for name in os.environ.get(INTERFACE, "").split(",") if name]
    options = group._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [group.create_device(interface=name, **when) for name in names]
    options._devices = options._devices or [group.create_default_device(**when)]
    options._threads = 2 * len(options._devices)
    return group(store, rank, size, options)


class Fault(NamedTuple):
    """What went wrong first; `lost` if all that is known is that a process is gone or silent."""

    text: str
    lost: bool = False


def first_fault(store: Any) -> Fault | None:
    """What went wrong first, if anything did."""
    if not store.check([FAULT]):
        return None
    return Fault(*json.loads(store.get(FAULT)))


def report_fault(store: Any, fault: Fault) -> Fault:
    """Make a fault known, unless another one came first; that is returned."""
    return Fault(*json.loads(store.compare_set(FAULT, "", json.dumps(fault))))
