"""What the command line said, for tests."""

from typing import Any


def told(capsys: Any) -> str:
    """The one sentence that was said, and nothing else."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return sentence(captured.err)


def sentence(said: str) -> str:
    """One line of hdnn's, and no traceback."""
    assert said.startswith("hdnn: ")
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert "mistake in hdnn itself" not in said
    return said
