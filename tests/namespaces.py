"""Computers that are wired along the edges of a graph, made of network namespaces on one machine.

Every node is a namespace of its own. Its data address is reached by its neighbours alone, each
through a cable of its own, and nobody forwards. A second interface leads to the host of the
rendezvous store and to nobody else, so that a process group can form without carrying data. All
interfaces lie inside the namespaces; the machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_runs import Process, Stem

PREFIX = "hdnn"
DATA = "data"  # the interface that carries a node's data address
CONTROL = "control"  # the interface that leads to the host of the store
STORE_ADDRESS = "10.78.0.254"
STORE_PORT = 29500  # always free: the host is a namespace of its own

STORE = f"""
import signal
from torch.distributed import TCPStore
store = TCPStore("{STORE_ADDRESS}", {STORE_PORT}, is_master=True, wait_for_workers=False)
signal.pause()
"""

_harnesses = itertools.count()


@dataclass(frozen=True)
class Ended:
    """How the command of one node ended; `killed` if it did not end by itself."""

    code: int
    killed: bool
    output: str
    errors: str


class Namespaces:
    """`nodes` namespaces 0, 1, ..., linked along `edges` only, for as long as a `with` lasts."""

    def __init__(self, edges: Iterable[tuple[int, int]], nodes: int) -> None:
        self.edges = sorted({(min(edge), max(edge)) for edge in edges})
        self.nodes = range(nodes)
        if not 0 < nodes < 254:
            raise ValueError(f"nodes is {nodes}; there are addresses for 1 to 253")
        for i, j in self.edges:
            if i == j or i not in self.nodes or j not in self.nodes:
                raise ValueError(f"edge {i, j} does not join two of the nodes 0 to {nodes - 1}")
        # The process is a part of the name, so that a later one can clean up after its death.
        self._stem = f"{PREFIX}-{os.getpid()}-{next(_harnesses)}-"
        self._processes: list[subprocess.Popen] = []

    @staticmethod
    @functools.cache
    def available() -> str | None:
        """None if namespaces can be made and linked here, or else the reason why not."""
        if not sys.platform.startswith("linux"):
            return "network namespaces need Linux"
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None:
            return "network namespaces need the program ip (iproute2)"
        try:
            with Namespaces([(0, 1)], 2):
                return None
        except RuntimeError as error:
            return f"no network namespaces here: {error}"

    def __enter__(self) -> Namespaces:
        _remove_abandoned()
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in the namespaces, and remove them."""
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        self._processes.clear()
        for name in _names():
            if name.startswith(self._stem):
                _remove(name)

    def neighbours(self, node: int) -> list[int]:
        return sorted({i + j - node for i, j in self.edges if node in (i, j)})

    def name(self, node: int | None) -> str:
        """The namespace of a node as `ip netns` knows it; None is the host of the store."""
        return self._stem + ("store" if node is None else str(node))

    def ip(self, node: int | None, *arguments: str) -> str:
        """What `ip` answers on a node, or on the host of the store if `node` is None."""
        return _ip("-n", self.name(node), *arguments)

    @staticmethod
    def address(node: int) -> str:
        """The data address of a node, to which only its neighbours have a route."""
        return f"10.77.0.{node + 1}"

    @staticmethod
    def control_address(node: int | None) -> str:
        return STORE_ADDRESS if node is None else f"10.78.0.{node + 1}"

    def environment(self, node: int) -> dict[str, str]:
        """What `torch.distributed.init_process_group("gloo")` reads, in the process of a node."""
        return {
            "RANK": str(node),
            "WORLD_SIZE": str(len(self.nodes)),
            "MASTER_ADDR": STORE_ADDRESS,
            "MASTER_PORT": str(STORE_PORT),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # or else rank 0 would start a store itself
            "GLOO_SOCKET_IFNAME": DATA,
            "TORCH_GLOO_LAZY_INIT": "1",  # connect only to the peers that are really used
        }

    def run(
        self,
        node: int | None,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen:
        """Start a command on a node, or on the host of the store if `node` is None.

        `env` is added to the environment of this process and of the node; `options` are those
        of Popen. The pid is the command's own, because `ip netns exec` becomes the command.
        """
        command = ["ip", "netns", "exec", self.name(node), *argv]
        extra = {} if node is None else self.environment(node)
        process = subprocess.Popen(command, env={**os.environ, **extra, **(env or {})}, **options)
        self._processes.append(process)
        return process

    def fork(
        self,
        stem: Stem,
        node: int | None,
        argv: Sequence[str],
        words: Path,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """The same for `python argv`, by a stem; what it says goes to files."""
        extra = {} if node is None else self.environment(node)
        environment = {**extra, **(env or {})}
        return stem.fork(argv, words, environment=environment, namespace=self.name(node))

    def run_all(
        self,
        argv: Sequence[str],
        env: Callable[[int], Mapping[str, str]] | None = None,
        *,
        limit: float = 60.0,
        grace: float = 5.0,
        stem: Stem | None = None,
    ) -> list[Ended]:
        """Run one command on all nodes at once, and return how each ended.

        With a stem the command is one of Python, without its name, and a new store is served.
        The environment tells a process its rank; `env(node)` is added to it. All are given
        `limit` seconds, and `grace` seconds once one has failed: the others may wait for it.
        """
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            processes: list[subprocess.Popen | Process] = []
            if stem is not None:
                # Clients wait until it answers.
                store = self.fork(stem, None, ["-c", STORE], folder / "store")
                stack.callback(store.wait)
                stack.callback(store.kill)
            for node in self.nodes:
                extra = env(node) if env else {}
                if stem is not None:
                    processes.append(self.fork(stem, node, argv, folder / f"{node}", extra))
                    continue
                # Files: a process held up by a full pipe would hold up the others.
                with (
                    (folder / f"{node}.out").open("w") as out,
                    (folder / f"{node}.err").open("w") as err,
                ):
                    processes.append(self.run(node, argv, extra, stdout=out, stderr=err))
            killed = _wait(processes, limit, grace)
            return [
                Ended(
                    process.returncode,
                    process in killed,
                    (folder / f"{node}.out").read_text(errors="replace"),
                    (folder / f"{node}.err").read_text(errors="replace"),
                )
                for node, process in enumerate(processes)
            ]

    def _create(self) -> None:
        for node in (None, *self.nodes):
            _ip("netns", "add", self.name(node))
            # A new namespace may inherit the machine's setting, and that of a router is 1.
            forward = "/proc/sys/net/ipv4/ip_forward"
            _ip("netns", "exec", self.name(node), "tee", forward, lines=["0"])
        # Ports of a bridge that are isolated reach the bridge itself but not each other.
        hub = [
            "link set lo up",
            "link add hub type bridge",
            f"addr add {STORE_ADDRESS}/24 dev hub",
            "link set hub up",
        ]
        for node in self.nodes:
            hub += [
                f"link add port{node} type veth peer name {CONTROL} netns {self.name(node)}",
                f"link set port{node} master hub",
                f"link set port{node} type bridge_slave isolated on",
                f"link set port{node} up",
            ]
        _ip("-n", self.name(None), "-batch", "-", lines=hub)
        for node in self.nodes:
            # An empty bridge stands for a dummy interface, which not every kernel has.
            lines = [
                "link set lo up",
                f"link add {DATA} type bridge",
                f"addr add {self.address(node)}/32 dev {DATA}",
                f"link set {DATA} up",
                f"addr add {self.control_address(node)} peer {STORE_ADDRESS} dev {CONTROL}",
                f"link set {CONTROL} up",
            ]
            for other in self.neighbours(node):
                if node < other:
                    peer = f"peer name to{node} netns {self.name(other)}"
                    lines.append(f"link add to{other} type veth {peer}")
                # The address of the peer is the only one that has a route through this link.
                peer = f"{self.address(node)} peer {self.address(other)}"
                lines += [f"addr add {peer} dev to{other}", f"link set to{other} up"]
            _ip("-n", self.name(node), "-batch", "-", lines=lines)


def _ip(*arguments: str, lines: Sequence[str] = ()) -> str:
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(["ip", *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {' '.join(done.stderr.split())}")
    return done.stdout


def _wait(
    processes: Sequence[subprocess.Popen | Process], limit: float, grace: float
) -> list[subprocess.Popen | Process]:
    """Wait until all have ended. Those that were too slow are killed and returned."""
    deadline, failed = time.monotonic() + limit, False
    while None in (codes := [process.poll() for process in processes]):
        if not failed and any(codes):
            deadline, failed = min(deadline, time.monotonic() + grace), True
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    slow = [process for process in processes if process.returncode is None]
    for process in slow:
        process.kill()
    for process in slow:
        process.wait()
    return slow


def _names() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _remove(name: str) -> None:
    """Remove a namespace and end what runs in it: nobody else can have started that."""
    # Another test process may remove the same abandoned one meanwhile.
    with contextlib.suppress(RuntimeError):
        while pids := _ip("netns", "pids", name).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):
        _ip("netns", "del", name)


def _remove_abandoned() -> None:
    """Remove what test processes left behind that were killed."""
    for name in _names():
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\w+", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(name)
