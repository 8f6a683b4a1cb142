"""The progress line: for a person who waits, never for a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from hdnn import progress
from hdnn.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_line_appears_after_two_seconds_and_is_removed_at_the_end(
    monkeypatch, clock
):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("training", 10) as line:
        clock[0] = 1.0
        line.update(1)
        assert sys.stderr.getvalue() == ""
        clock[0] = 3.0
        line.update(4, "loss 0.5")
        line.update(5, "drawn too soon")
        assert sys.stderr.getvalue() == "\r\x1b[Ktraining 4/10, 3 s, loss 0.5"
    assert sys.stderr.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_a_pipe_stays_quiet(monkeypatch, clock, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("training", 10) as line:
        clock[0] = 9.0
        line.update(4)
    assert stream is None or stream.getvalue() == ""
