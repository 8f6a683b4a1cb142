"""A program that torchrun has started in several processes: they meet, work, and end together.

Until they have met, and when they fail, they communicate through the store that torchrun keeps: it
outlives each of them, and a process that waits there still receives signals.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hdnn.base.launched import is_as_one as is_as_one
from hdnn.base.launched import is_first as is_first
from hdnn.base.launched import several, speak_alone, speak_as_one
from hdnn.base.portable import pack, unpack
from hdnn.errors import OptionError, TrainingError
from hdnn.training.processes import meeting
from hdnn.training.processes.meeting import Fault, first_fault, report_fault
from hdnn.training.processes.parallel import Attempt, ProcessLostError, Ranks

T = TypeVar("T")

TIMEOUT = 300.0  # seconds that a process waits for the others, unless HDNN_TIMEOUT says otherwise
GRACE = 3.0  # seconds for the first process to report why all of them end
LATE = 30.0  # seconds that a failing process waits for the others to start
PAUSE = 0.02  # seconds between two looks at the store

_known: dict[str, Any] = {}  # the store, once found, and whether a process has failed


class OneProcess:
    """A program in one process."""

    several, is_first, size = False, True, 1

    def first(self, make: Callable[[], T]) -> T:
        return make()

    def device(self, name: str) -> str:
        return name


class SeveralProcesses:
    """This process, among those that were started together."""

    several = True

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_first = self.rank == 0
        self.timeout, self.calls = timeout(), 0
        self.store = _store(self.timeout)
        self.ranks: Ranks | None = None

    def first(self, make: Callable[[], T]) -> T:
        """What the first process makes, or its error, in all of them; it may take its time.

        Before the device is known it comes by the store, so it must be small.
        """
        self.calls += 1
        word, attempt = f"made-{self.calls}", None
        if self.is_first:
            attempt = Attempt.of(make)
            self.store.set(word, pack(attempt) if self.ranks is None else "")
        else:
            self._wait([word])
        if self.ranks is not None:
            return self.ranks.broadcast(attempt).result()
        return (attempt or unpack(self.store.get(word))).result()

    def device(self, name: str) -> str:
        """The device of this process, once the options are known; also joins the process group."""
        here = self._device(name)
        if self.ranks is None:
            self._all_say("ready", self.timeout)
            try:
                with meeting.kept_here(meeting.on_one_machine()):
                    dist.init_process_group(
                        "gloo" if here == name else "cpu:gloo,cuda:nccl",  # messages by gloo
                        store=self.store,
                        rank=self.rank,
                        world_size=self.size,
                        timeout=timedelta(seconds=self.timeout),
                    )
            except RuntimeError as error:
                raise _unmet(error) from error
            self.ranks = Ranks()
        return here

    def _device(self, name: str) -> str:
        """For cuda, the GPU of its own number on its machine."""
        device = torch.device(name)
        if device.type != "cuda":
            return name
        if device.index is not None:
            raise OptionError(
                f"{name} is one GPU, but there are {self.size} processes; give each its own by "
                "--device cuda."
            )
        number, gpus = int(os.environ.get("LOCAL_RANK", self.rank)), torch.cuda.device_count()
        if number >= gpus:
            raise OptionError(
                f"there are more processes on a machine than GPUs, of which PyTorch finds {gpus}; "
                f"start no more than that, by torchrun --nproc-per-node {max(gpus, 1)}."
            )
        torch.cuda.set_device(number)
        return f"cuda:{number}"

    def leave_together(self) -> None:
        """Wait until all are done, then leave."""
        with suppress(ProcessLostError):  # then the first is done, and its store is gone
            self._all_say("done", self.timeout)
        self.close()

    def close(self) -> None:
        """Leave at once; processes that wait for this one see its connections close."""
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def _all_say(self, word: str, limit: float) -> None:
        self.store.set(f"{word}-{self.rank}", "")
        self._wait([f"{word}-{rank}" for rank in range(self.size)], limit)

    def _wait(self, words: list[str], limit: float | None = None) -> None:
        """Wait until all these keys are in the store; an error if some process has failed."""
        end = None if limit is None else time.monotonic() + limit
        try:
            while not self.store.check(words):
                if (fault := first_fault(self.store)) is not None:
                    raise ProcessLostError(fault.text)
                if end is not None and time.monotonic() > end:
                    raise ProcessLostError(
                        f"not all of the {self.size} processes are here after {limit:.0f} s; start "
                        "all of them, or give them more time by HDNN_TIMEOUT."
                    )
                time.sleep(PAUSE)
        except RuntimeError as error:
            raise _unmet(error) from error


Processes = OneProcess | SeveralProcesses


@contextmanager
def joined() -> Iterator[Processes]:
    """Do the work of a block together with the other processes, if there are any."""
    if not several():
        yield OneProcess()
        return
    speak_as_one()
    before = signal.signal(signal.SIGTERM, _as_interrupt)
    processes = None
    try:
        processes = SeveralProcesses()
        yield processes
        processes.leave_together()
        signal.signal(signal.SIGTERM, before)
        _known.clear()
        speak_alone()
    finally:  # after an error the handler stays, for the signal of torchrun
        if processes is not None:
            processes.close()


def last_word(message: object, say: Callable[[object], None]) -> None:
    """Let one process report why all of them end: the first, or another if the first is gone."""
    with suppress(ValueError):  # in another thread
        for number in (signal.SIGTERM, signal.SIGINT):  # torchrun ends those that are left
            signal.signal(number, signal.SIG_IGN)
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    _known["failed"] = True
    try:
        store = _store(LATE)
        if isinstance(message, ProcessLostError):  # the one that was lost may have said why
            _within(1.0, lambda: first_fault(store) is not None)
            fault = first_fault(store)
            message = message if fault is None else fault.text
        else:
            where = f"process {rank} of {size}: " if rank != "0" else ""
            report_fault(store, Fault(f"{where}{message}"))
        if rank != "0":
            _within(GRACE, lambda: store.check(["said"]))
        if store.add("said", 1) == 1:
            say(message)
        if rank == "0":  # the store may end with this process: let the others leave first
            left = [f"left-{other}" for other in range(1, int(size))]
            _within(GRACE, lambda: store.check(left))
        else:
            store.set(f"left-{rank}", "")
    except (RuntimeError, TrainingError):  # the others cannot be reached
        say(message)


def leave(code: int) -> int:
    """The exit code; after a failure of several processes, end with it here and now.

    The connections to processes that are gone would fail once more while Python ends, and abort it.
    """
    if _known.get("failed"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def timeout() -> float:
    """Seconds that a process waits for the others."""
    given = os.environ.get("HDNN_TIMEOUT", "")
    with suppress(ValueError):
        if 0 < (seconds := float(given or TIMEOUT)) < 1e9:
            return seconds
    raise OptionError(f"HDNN_TIMEOUT must be a number of seconds > 0, but is {given!r}.")


def _within(seconds: float, there: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not (found := there()) and time.monotonic() < end:
        time.sleep(PAUSE)
    return found


def _store(limit: float) -> Any:
    """The store by which the processes meet, as the environment says."""
    if "store" not in _known:
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            _known["store"] = meeting.from_environment(rank, size, limit)
        except (RuntimeError, ValueError) as error:
            raise _unmet(error) from error
    return _known["store"]


def _unmet(error: Exception) -> TrainingError:
    reason = " ".join(str(error).split())[:160].removesuffix(".")
    return ProcessLostError(
        f"the {os.environ['WORLD_SIZE']} processes of which the environment tells cannot meet "
        f"({reason}); start them by torchrun, or unset RANK and WORLD_SIZE."
    )


def _as_interrupt(number: int, frame: Any) -> None:
    """Take the end that torchrun asks for as a Ctrl-C."""
    heard = signal.getsignal(signal.SIGINT)
    (heard if callable(heard) else signal.default_int_handler)(number, frame)
