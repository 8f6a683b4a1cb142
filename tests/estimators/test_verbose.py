"""`verbose=True` shows something at a terminal, in a notebook and in a log; `False` nothing."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn")

from hdnn import HDNNClassifier, HDNNRegressor

X = np.random.default_rng(0).normal(size=(40, 3))
QUICK = {"layers": 1, "features": 4, "batch": 64, "random_state": 0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_some_lines_and_how_it_ended(capsys):
    y = X[:, 0] > 0
    HDNNClassifier(**QUICK, epochs=100, verbose=True).fit(X, y)
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == ""
    assert 10 < len(lines) <= 20
    assert lines[0].startswith("HDNNClassifier: epoch 1/100, loss ")
    assert ", accuracy " in lines[0]
    assert lines[-1].startswith("HDNNClassifier: 100 epochs in ")


def test_held_out_samples_are_told_of(capsys):
    model = HDNNRegressor(**QUICK, epochs=4, verbose=1, early_stopping=True).fit(X, X[:, 0])
    lines = capsys.readouterr().out.splitlines()
    losses = [f"held-out loss {loss:.4f}" for loss in model.history_.validation_loss]
    assert all(loss in line for loss, line in zip(losses, lines, strict=False))
    assert len(lines) == len(losses) + 1
    assert f"; epoch {model.history_.best_epoch} is kept" in lines[-1]
    assert "accuracy" not in lines[0]


def test_a_terminal_has_one_line_that_is_redrawn(capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    HDNNRegressor(**QUICK, epochs=3, verbose=True).fit(X, X[:, 0])
    assert capsys.readouterr().out == ""
    shown = terminal.getvalue()
    assert shown.startswith("\r\x1b[KHDNNRegressor: epoch 1/3, loss ")
    assert shown.count("\n") == 1
    assert "HDNNRegressor: 3 epochs in " in shown


def test_nothing_is_said_by_default_or_without_a_console(capsys, monkeypatch):
    HDNNRegressor(**QUICK, epochs=2).fit(X, X[:, 0])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", None)
    HDNNRegressor(**QUICK, epochs=2, verbose=True).fit(X, X[:, 0])
