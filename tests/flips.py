"""Files with one bit flipped."""

from __future__ import annotations

import random
from collections.abc import Iterator


def flipped(
    content: bytes, header: int, tensors: int
) -> Iterator[tuple[int, bytes]]:
    """A safetensors file with a bit flipped, and which: so many in its header, so many behind."""
    end = 8 * (8 + int.from_bytes(content[:8], "little"))
    draw = random.Random(0)
    places = [draw.randrange(end) for _ in range(header)]
    places += [draw.randrange(end, 8 * len(content)) for _ in range(tensors)]
    for place in places:
        broken = bytearray(content)
        broken[place // 8] ^= 1 << place % 8
        yield place, bytes(broken)
