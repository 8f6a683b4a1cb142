"""What tests share: what was said, left and drawn, and somebody else there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdnn.training import checkpoint


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


def started_alone(monkeypatch: Any) -> None:
    """Nothing in the environment says that this is one of several processes."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "HDNN_STORE",
        "HDNN_PARTS",
        "HDNN_PART",
        "HDNN_REPLICAS",
    ):
        monkeypatch.delenv(name, raising=False)


def files(folder: str = ".") -> dict[str, bytes]:
    """Every file below a folder, with what is in it."""
    return {
        str(p): p.read_bytes()
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }


def scalars(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    """The values that TensorBoard shows: by name, with their steps."""
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    events = EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


@contextmanager
def trained_elsewhere(folder: str) -> Iterator[None]:
    """Somebody trains in the folder: a lock is as much another thread's as another process's."""
    locked, done = threading.Event(), threading.Event()

    def train() -> None:
        with checkpoint.locked(Path(folder)):
            locked.set()
            done.wait()

    thread = threading.Thread(target=train)
    thread.start()
    locked.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
