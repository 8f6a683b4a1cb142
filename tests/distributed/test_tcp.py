"""Messages over plain TCP: all arrive, in order, from those who may send them, or it is said."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from hdnn.distributed import DistributedError
from hdnn.distributed.messages import connect, stored
from hdnn.distributed.messages.tcp import Tcp
from hdnn.errors import OptionError, ShapeError
from hdnn.training.processes.meeting import TCPStore


def in_threads(*works: Callable[[Tcp], None], timeout: float = 20.0) -> None:
    """A part a thread; the first error of any is raised."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    failed: list[BaseException] = []

    def part(number: int) -> None:
        store = TCPStore("127.0.0.1", server.port, is_master=False)
        transport = Tcp(number, len(works), store, timeout=timeout)
        try:
            works[number](transport)
        except BaseException as error:
            failed.append(error)
        finally:
            transport.close()

    threads = [threading.Thread(target=part, args=(k,), daemon=True) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]


def test_long_messages_both_ways_do_not_wait_for_each_other():
    size = 2_000_000  # more than the system keeps

    def work(transport: Tcp) -> None:
        other, found = 1 - transport.part, torch.empty(size)
        transport.exchange([(other, torch.full((size,), transport.part + 0.5))], [(other, found)])
        assert bool((found == other + 0.5).all())
        assert transport.traffic.bytes == {other: 4 * size}

    in_threads(work, work)


def test_messages_arrive_in_their_order_even_if_the_last_is_waited_for_first():
    def first(transport: Tcp) -> None:
        for k in range(3):
            transport.exchange([(1, torch.full((k,), k))], [])

    def second(transport: Tcp) -> None:
        found = [torch.empty(k, dtype=torch.int64) for k in range(3)]
        pending = [transport.start([], [(0, tensor)]) for tensor in found]
        for each in reversed(pending):
            each.wait()
        assert [tensor.tolist() for tensor in found] == [[], [1], [2, 2]]

    in_threads(first, second)


def test_parts_that_do_not_talk_are_not_connected():
    def work(transport: Tcp) -> None:
        others = [1] if transport.part != 1 else [0, 2]
        into = [(k, torch.empty(1)) for k in others]
        transport.exchange([(k, torch.tensor([float(transport.part)])) for k in others], into)
        assert [float(tensor) for _, tensor in into] == others
        assert sorted(transport.lines) == others

    in_threads(work, work, work)


def test_strangers_are_not_heard():
    def first(transport: Tcp) -> None:
        port = json.loads(transport.store.get("line-0"))[0]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"x" * 16 + (1).to_bytes(4, "big"))
            found = torch.empty(1)
            transport.exchange([], [(1, found)])
            assert float(found) == 7
            assert stranger.recv(1) == b""

    def second(transport: Tcp) -> None:
        transport.exchange([(0, torch.tensor([7.0]))], [])

    in_threads(first, second)


@pytest.mark.parametrize("connected", [True, False])
def test_long_messages_leave_while_another_part_is_waited_for(connected):
    size = 2_000_000  # more than the system keeps

    def work(transport: Tcp) -> None:
        part = transport.part
        if connected:
            others, short = {0, 1, 2} - {part}, torch.zeros(1)
            transport.exchange([(k, short) for k in others], [(k, short.clone()) for k in others])
        time.sleep(0.3 * part)  # nobody listens while the first one sends
        found = torch.empty(size if part == 1 else 1)
        pending = transport.start([(1, torch.ones(size))], []) if part == 0 else None
        transport.exchange([], [((part - 1) % 3, found)])  # nobody goes on before the one before
        if part:
            transport.exchange([((part + 1) % 3, torch.ones(1))], [])
        if pending is not None:
            pending.wait()
        assert bool((found == 1).all())

    in_threads(work, work, work, timeout=5.0)


def test_strangers_who_say_nothing_are_not_waited_for():
    def first(transport: Tcp) -> None:
        port, word = json.loads(transport.store.get("line-0"))
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        strangers[1].sendall(bytes.fromhex(word)[:7])
        since, found = time.monotonic(), torch.empty(1)
        transport.exchange([], [(1, found)])
        assert float(found) == 7
        assert time.monotonic() - since < 2
        for stranger in strangers:
            stranger.close()

    def second(transport: Tcp) -> None:
        transport.exchange([(0, torch.tensor([7.0]))], [])

    in_threads(first, second, timeout=4.0)


def test_messages_are_of_any_type():
    sent = [torch.arange(6).reshape(2, 3).to(t) for t in (torch.bfloat16, torch.half, torch.bool)]
    sent += [torch.tensor(2.5), torch.tensor([1 + 2j, 3j]), torch.tensor(3.0, dtype=torch.bfloat16)]

    def first(transport: Tcp) -> None:
        transport.exchange([(1, tensor) for tensor in sent], [])

    def second(transport: Tcp) -> None:
        found = [torch.empty_like(tensor) for tensor in sent]
        transport.exchange([], [(0, tensor) for tensor in found])
        assert all(torch.equal(x, y) for x, y in zip(found, sent, strict=True))

    in_threads(first, second)


def test_messages_that_do_not_lie_side_by_side_are_refused_before_anything_is_sent():
    good, odd = torch.zeros(2), torch.zeros(2, 3).T

    def work(transport: Tcp) -> None:
        other = 1 - transport.part
        for out, into in (([good, odd], []), ([good], [odd]), ([torch.ones(2) * 1j], [])):
            tensors = [t.conj() if t.is_complex() else t for t in out]
            with pytest.raises(ShapeError, match="must be a contiguous tensor of the CPU"):
                transport.start([(other, t) for t in tensors], [(other, t) for t in into])
        assert not transport.traffic.bytes
        found = torch.empty(1)
        transport.exchange([(other, torch.ones(1))], [(other, found)])
        assert float(found) == 1

    in_threads(work, work)


def test_a_part_that_is_gone_or_silent_is_named(monkeypatch):
    monkeypatch.setattr(stored, "PATIENCE", 0.1)

    def leaves(transport: Tcp) -> None:
        transport.exchange([(0, torch.zeros(1))], [])

    def waits(transport: Tcp) -> None:
        transport.exchange([], [(1, torch.empty(1))])
        transport.exchange([], [(1, torch.empty(1))])

    with pytest.raises(DistributedError, match=r"stopped because part 1 is gone\."):
        in_threads(waits, leaves)
    over = threading.Event()

    def stays(transport: Tcp) -> None:
        leaves(transport)
        over.wait(60)

    def gives_up(transport: Tcp) -> None:
        try:
            waits(transport)
        finally:
            over.set()

    with pytest.raises(DistributedError, match=r"part 1 sent nothing for 0\.5 s"):
        in_threads(gives_up, stays, timeout=0.5)


def test_it_is_for_one_machine(monkeypatch):
    for name, value in {"HDNN_TRANSPORT": "tcp", "HDNN_PARTS": "2", "HDNN_REPLICAS": "2"}.items():
        monkeypatch.setenv(name, value)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("HDNN_STORE", f"127.0.0.1:{server.port}")
    with pytest.raises(OptionError, match="tcp is for one graph on one machine"):
        connect.connect(timeout=5.0)
    monkeypatch.setenv("HDNN_REPLICAS", "1")
    monkeypatch.setenv("HDNN_PARTS", "1")
    monkeypatch.setenv("HDNN_RESTART", "1")
    process = connect.connect(timeout=5.0)
    assert isinstance(process.transport, Tcp)
    process.close()
    with pytest.raises(OptionError, match="timeout must be a number of seconds > 0"):
        Tcp(0, 1, server, timeout=0.0)
