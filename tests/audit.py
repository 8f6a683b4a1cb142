"""Who is connected to whom, and who listens where?

Read from /proc, on Linux, so that it does not rely on what a program says.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

End = tuple[str, int]  # address and port


ESTABLISHED, LISTEN = "01", "0A"  # as the kernel writes them


def connections(pid: int) -> set[tuple[End, End]]:
    """The TCP connections that a process has open, in any network namespace: near end, far end."""
    return _sockets(pid, ESTABLISHED)


def listeners(pid: int) -> set[End]:
    """Where a process waits for connections; 0.0.0.0 or :: is at all addresses of its machine."""
    return {near for near, _ in _sockets(pid, LISTEN)}


def _sockets(pid: int, wanted: str) -> set[tuple[End, End]]:
    held = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            held.add(os.readlink(entry.path))
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (
                Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            ):
                _, near, far, state, _, _, _, _, _, inode, *_ = line.split()
                if state == wanted and f"socket:[{inode}]" in held:
                    found.add((_end(near), _end(far)))
    return found


def tcp_peers(pid: int) -> set[End]:
    """The far ends of a process's connections."""
    return {far for _, far in connections(pid)}


def linked(pids: Sequence[int]) -> tuple[set[tuple[int, int]], list[set[End]]]:
    """Which of these processes are connected, as pairs of positions, and their other far ends."""
    every = [connections(pid) for pid in pids]
    owner = {pair: k for k, pairs in enumerate(every) for pair in pairs}
    links, others = set(), []
    for k, pairs in enumerate(every):
        known = {(near, far) for near, far in pairs if (far, near) in owner}
        links |= {(k, owner[far, near]) for near, far in known}
        others.append({far for _, far in pairs - known})
    return {(min(pair), max(pair)) for pair in links}, others


def _end(text: str) -> End:
    """One end from /proc/net/tcp, which prints 32-bit words in the machine's byte order."""
    hexadecimal, port = text.split(":")
    words = [hexadecimal[k : k + 8] for k in range(0, len(hexadecimal), 8)]
    packed = b"".join(
        int(word, 16).to_bytes(4, sys.byteorder) for word in words
    )
    if len(packed) == 4:
        return str(IPv4Address(packed)), int(port, 16)
    address = IPv6Address(packed)
    return str(address.ipv4_mapped or address), int(
        port, 16
    )  # IPv4 in a socket for both kinds
