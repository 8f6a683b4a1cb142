"""Messages between linked processes with gloo: rows of the state, and sums along a tree.

Gradients pass only through `exchange`, whose backward pass is the reverse exchange. There are no
collective operations, and gloo opens a connection only when it is first used, so processes that own
no linked nodes are never connected. Messages are neither encrypted nor authenticated.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn import functional

from hdnn.distributed.plan import Halo, Plan
from hdnn.errors import HDNNError, OptionError

PATIENCE = timedelta(seconds=2)  # seconds for the store, after a fault
LATE = re.compile("timed? ?out", re.IGNORECASE)  # as gloo and the store say


class LostError(HDNNError):
    """A process that was lost or fell silent during training; restarting all processes may help."""


def world() -> tuple[int, int]:
    """The rank of this process and the number of processes under torchrun; otherwise 0 and 1."""
    rank = int(os.environ.get("RANK", "0"))
    return rank, int(os.environ.get("WORLD_SIZE", "1"))


class Messages:
    """The messages of one process to its peers, counted.

    Args:
        plan: the plan of this process.
        store: the meeting point of all processes; None for a single process.
        timeout: seconds after which a silent process counts as lost.

    Attributes:
        sent: the number of messages to each peer.
        bytes: the number of bytes to each peer.
    """

    def __init__(
        self, plan: Plan, store: Any = None, timeout: float = 60.0
    ) -> None:
        self.plan = plan
        self.store = store
        self.timeout = timeout
        self.sent: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()

    def swap(
        self,
        out: Mapping[int, Tensor],
        into: Mapping[int, Tensor],
    ) -> None:
        """Send tensors to some processes and receive tensors from some, all at once."""
        pending = []
        peer = -1
        try:
            for peer, tensor in into.items():
                work = dist.irecv(tensor, peer)
                pending.append((peer, work))
            for peer, tensor in out.items():
                work = dist.isend(tensor, peer)
                pending.append((peer, work))
                self.sent[peer] += 1
                self.bytes[peer] += tensor.nbytes
            for peer, work in pending:  # noqa: B007
                work.wait()
        except RuntimeError as error:
            raise self.lost(peer, error) from error

    # Along the tree

    def up(self, x: Tensor) -> Tensor:
        """The sum over all processes at the root; elsewhere, over this process and those below."""
        received = {child: torch.empty_like(x) for child in self.plan.children}
        self.swap({}, received)
        total = x.contiguous()
        for other in received.values():
            total = total + other
        if self.plan.parent is not None:
            self.swap({self.plan.parent: total}, {})
        return total

    def down(self, x: Tensor) -> Tensor:
        """The root's x, on every process; the others pass a tensor of the same shape and dtype."""
        x = x.contiguous()
        if self.plan.parent is not None:
            x = torch.empty_like(x)
            self.swap({}, {self.plan.parent: x})
        self.swap(dict.fromkeys(self.plan.children, x), {})
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes, everywhere."""
        return self.down(self.up(x))

    def traffic(self) -> list[list[int]]:
        """The `[from, to, messages, bytes]` of all pairs that communicated, at the root."""
        size = self.plan.size
        counts = torch.zeros(size, size, 2, dtype=torch.int64)
        for peer, sent in self.sent.items():
            counts[self.plan.rank, peer, 0] = sent
            counts[self.plan.rank, peer, 1] = self.bytes[peer]
        counts = self.up(counts)
        pairs = counts[..., 0].nonzero().tolist()
        return [[i, k, *counts[i, k].tolist()] for i, k in pairs]

    # Beginning and end

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Wait for all processes, and raise unless all were started for the same training run.

        All links are opened here: later, gloo would wait much longer for a peer that is gone.
        """
        if self.store is None:
            return
        rank = self.plan.rank
        entries = []
        try:
            self.store.set(f"facts-{rank}", json.dumps(facts))
            for rank in range(self.plan.size):
                entries.append(_parsed(self.store.get(f"facts-{rank}")))
        except RuntimeError as error:
            raise self.lost(rank, error) from error
        # No process may leave, and close the store, before all have read.
        with contextlib.suppress(RuntimeError):
            self.store.set(f"read-{self.plan.rank}", "")
            done = [f"read-{rank}" for rank in range(self.plan.size)]
            self.store.wait(done, PATIENCE)
        first = entries[0]
        for rank, entry in enumerate(entries):
            differing = [k for k in facts if entry.get(k) != first.get(k)]
            if differing:
                names = " and ".join(differing)
                raise OptionError(
                    f"{self.plan.name(rank)} and {self.plan.name(0)} differ in {names}; start all "
                    "processes with the same values."
                )
        out = {peer: torch.ones(1) for peer in self.plan.peers}
        into = {peer: torch.ones(1) for peer in self.plan.peers}
        self.swap(out, into)

    def report(self, text: str) -> str:
        """Tell all processes why training stops; return the first reason."""
        if self.store is None:
            return text
        with contextlib.suppress(RuntimeError):
            self.store.set_timeout(PATIENCE)
            reason = self.store.compare_set("fault", "", text)
            return reason.decode(errors="replace")
        return text

    def lost(self, rank: int, error: RuntimeError) -> LostError:
        """The error for a lost process; all processes name the process that was lost first."""
        reason = f"{self.plan.name(rank)} is gone"
        if LATE.search(str(error)):
            silent = self.plan.name(rank)
            reason = f"{silent} sent nothing for {self.timeout:g} s"
        reason = self.report(reason).rstrip(".")
        return LostError(
            f"training stopped because {reason}; resume the training run to continue."
        )

    def close(self) -> None:
        """Close all connections."""
        if self.store is not None:
            dist.destroy_process_group()


def connect(plan: Plan, timeout: float = 60.0) -> Messages:
    """Meet the other processes, according to torchrun's environment variables.

    Args:
        plan: the plan of this process.
        timeout: seconds after which a process that does not answer counts as lost.

    Raises:
        LostError: if the processes do not meet in time.
        OptionError: if this process already belongs to a process group.
    """
    rank, size = world()
    if size == 1:
        return Messages(plan)
    if dist.is_initialized():
        raise OptionError(
            "this process already belongs to a process group; destroy that group first."
        )
    # Otherwise every process connects to every other.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # On one machine, no message leaves the machine.
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    wait = timedelta(seconds=timeout)
    stores: list[Any] = []

    def meet() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            stores.extend(next(rendezvous("env://", timeout=wait)))

    # A thread, because PyTorch waits forever for a listener that accepts and never answers.
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(timeout)
    if not stores:
        host = os.environ.get("MASTER_ADDR", "?")
        port = os.environ.get("MASTER_PORT", "?")
        raise LostError(
            f"rendezvous of {size} processes at {host}:{port} failed in {timeout:g} s."
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"hdnn-{attempt}", stores[0])
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=wait
    )
    return Messages(plan, store, timeout)


def _parsed(entry: bytes) -> dict[str, Any]:
    """An entry of the store; empty if the entry is malformed."""
    try:
        value = json.loads(entry)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def exchange(
    x: Tensor,
    halo: Halo,
    messages: Messages,
    *,
    reverse: bool = False,
) -> Tensor:
    """The rows of this process and its neighbours; in reverse, sums for the rows of this process.

    Each direction is the transpose of the other, and therefore its backward pass.

    Args:
        x: the rows of this process `(rows, batch)`; in reverse, the extended rows.
        halo: the destinations of rows.
        messages: the messages of this process.
        reverse: add rows up instead of gathering them.

    Returns:
        The extended rows `(extended, batch)`; in reverse, the rows of this process.
    """
    if not halo.send and not halo.receive:
        return x
    return _Exchange.apply(x, halo, messages, reverse)


def collect(x: Tensor, messages: Messages) -> Tensor:
    """The sum over all processes, at the root; its gradient goes from the root to all processes."""
    return _Collect.apply(x, messages)  # pyright: ignore[reportReturnType]


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages) -> Tensor:
        ctx.messages = messages
        return messages.up(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.messages.down(gradients[0]), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        halo: Halo,
        messages: Messages,
        reverse: bool,
    ) -> Tensor:
        ctx.settings = halo, messages, reverse
        own = {k: x.index_select(0, rows) for k, rows in halo.send.items()}
        more = halo.extended - len(x)  # none in reverse
        extended = functional.pad(x, (0, 0, 0, more)).contiguous()
        others = {k: extended[i:j] for k, (i, j) in halo.receive.items()}
        if not reverse:
            messages.swap(own, others)
            return extended
        messages.swap(others, own)
        total = x[: halo.rows].contiguous()
        for peer, rows in halo.send.items():
            total = total.index_add(0, rows, own[peer])
        return total

    @staticmethod
    def backward(
        ctx: Any,
        *gradients: Tensor,
    ) -> tuple[Tensor, None, None, None]:
        halo, messages, reverse = ctx.settings
        gradient = exchange(gradients[0], halo, messages, reverse=not reverse)
        return gradient, None, None, None
