import io
import sys
import threading

import pytest
from hdnn.base import notice
from hdnn.base.notice import said_if_slow


class Terminal(io.StringIO):
    """Says when something is written to it."""

    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal, self.written = is_terminal, threading.Event()

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        super().write(text)
        self.written.set()
        return len(text)


def at(monkeypatch, is_terminal):
    monkeypatch.setattr(notice, "_said", set())
    made = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_what_is_slow_is_said_at_a_terminal(monkeypatch):
    terminal = at(monkeypatch, True)
    with said_if_slow("one moment", 0.0):
        assert terminal.written.wait(10)
    assert terminal.getvalue() == "one moment\n"
    with said_if_slow("one moment", 0.0):  # was said already
        pass
    assert terminal.getvalue() == "one moment\n"


def test_what_is_quick_is_not_said_even_if_it_fails(monkeypatch):
    terminal = at(monkeypatch, True)
    with pytest.raises(ValueError, match="wrong"), said_if_slow("one moment", 60.0):
        raise ValueError("wrong")
    assert terminal.getvalue() == ""


def test_a_pipe_stays_quiet(monkeypatch):
    terminal = at(monkeypatch, False)
    with said_if_slow("one moment", 0.0):
        pass
    assert terminal.getvalue() == ""
