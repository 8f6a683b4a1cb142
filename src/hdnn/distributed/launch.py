"""Start all parts of a graph on this machine, watch them, and start them again after a fault."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from hdnn.errors import positive_int
from hdnn.training.processes import meeting

GRACE = 5.0  # seconds after the time-out for other parts to notice a fault themselves
MARK = "hdnn-progress "


@dataclass
class Ended:
    """How a launch ended.

    Attributes:
        code: 0 or an exit code.
        output: what the parts printed.
        fault: what went wrong first, in a sentence.
        restarts: how many times all parts were started again.
    """

    code: int
    output: str
    fault: str = ""
    restarts: int = 0


def launch(
    parts: int,
    command: Sequence[str],
    *,
    timeout: float = 60.0,
    restarts: int = 0,
    name: Callable[[int], str] = "part {}".format,
    show: Callable[[dict[str, Any]], None] = lambda _: None,
    environment: dict[str, str] | None = None,
    started: Callable[[list[subprocess.Popen[str]]], None] = lambda _: None,
    grace: float = GRACE,
) -> Ended:
    """Run a command once for each part on this machine; after a fault again, if asked.

    The parts find each other by a store that this process keeps: `connect` in each of them opens
    the connections. It and the parts listen on the loopback only.

    Args:
        parts: how many processes to start.
        command: the program and its arguments.
        timeout: the seconds after which a part that does not end, when another has failed, is
            killed.
        restarts: how many times all parts are started again after a fault.
        name: how to call a part in messages, given its number.
        show: called with each progress report of the root, and at each restart.
        environment: variables that the parts get besides those of this process.
        started: called with the processes.
        grace: the seconds that parts have to end by themselves after Ctrl-C; a second one kills
            them.

    Returns:
        The exit code `code`, the `output`, the first `fault` in words, and the number of
        `restarts`.

    Raises:
        ShapeError: if parts is no whole number >= 1.
        TrainingError: if processes of this machine cannot talk to each other.
        OSError: if the command cannot be started.

    Examples:
        >>> import sys
        >>> from hdnn import distributed
        >>> program = "import os; print('part', os.environ['HDNN_PART'])"
        >>> ended = distributed.launch(2, [sys.executable, "-c", program])
        >>> ended.code, sorted(ended.output.splitlines())
        (0, ['part 0', 'part 1'])
    """
    parts = positive_int("parts", parts)
    meeting.check_loopback()
    store = meeting.serve(wait_for_workers=False)
    common = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    common |= {"HDNN_STORE": f"{meeting.LOOPBACK}:{store.port}", "HDNN_PARTS": str(parts)}
    if (loopback := meeting.interface()) is not None:
        common[meeting.INTERFACE] = loopback
    for restart in range(restarts + 1):
        with _Watch(show) as watch:
            environment = {**common, "HDNN_RESTART": str(restart)}
            for part in range(parts):
                watch.start(command, {**environment, "HDNN_PART": str(part)})
            started(watch.processes)
            bad = watch.wait(timeout + GRACE, grace)
            if not bad:
                return Ended(0, watch.output, restarts=restart)
            fault = _fault(store, restart) or watch.last_words(bad, name)
        if bad[1] in (2, 130) or restart == restarts:
            code = bad[1] if bad[1] in (2, 130) else 1
            return Ended(code, watch.output, fault, restart)
        show({"restart": restart + 1, "fault": fault})
    raise AssertionError


def _fault(store: Any, restart: int) -> str:
    with contextlib.suppress(RuntimeError):
        found = meeting.first_fault(meeting.PrefixStore(f"hdnn-{restart}", store))
        return "" if found is None else found.text
    return ""


class _Watch(contextlib.ExitStack):
    """All processes of one start, for as long as a `with` lasts."""

    def __init__(self, show: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.output, self.show = "", show
        self.errors: list[IO[str]] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[threading.Thread] = []

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.errors.append(self.enter_context(words))
        process = subprocess.Popen(
            [*command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
        )
        self.processes.append(process)
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        self.readers.append(reader)
        self.callback(reader.join, GRACE)
        self.callback(self._end, signal.SIGKILL)  # at first, when the `with` ends

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if line.startswith(MARK):
                    self.show(json.loads(line.removeprefix(MARK)))
                else:
                    self.output += line

    def wait(self, patience: float, grace: float) -> tuple[int, int] | None:
        """The first part that failed and its exit code; None if all ended well."""
        bad, since = None, 0.0
        try:
            while self._running():
                if bad is None:
                    bad, since = self._failed(), time.monotonic()
                if patience > GRACE and self._running() == 1:  # there is nobody left to wait for
                    patience, since = GRACE, time.monotonic()
                if bad is not None and time.monotonic() - since > patience:
                    break
                time.sleep(0.02)
        except KeyboardInterrupt:
            self._end(signal.SIGINT, grace)
            raise
        self._end(signal.SIGKILL)
        for reader in self.readers:
            reader.join()
        return bad or self._failed()

    def _running(self) -> int:
        return sum(process.poll() is None for process in self.processes)

    def _failed(self) -> tuple[int, int] | None:
        codes = [(part, process.poll()) for part, process in enumerate(self.processes)]
        failed = [(part, code) for part, code in codes if code]
        # A part that was killed is the cause; the others only noticed.
        return min(failed, key=lambda pair: (pair[1] > 0, pair[1] != 2), default=None)

    def _end(self, how: signal.Signals, grace: float = GRACE) -> None:
        """Send a signal to all, and kill those that do not end."""
        try:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(how)
            deadline = time.monotonic() + grace
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also after a second Ctrl-C
            for process in self.processes:
                process.kill()
                process.wait()

    def last_words(self, bad: tuple[int, int], name: Callable[[int], str]) -> str:
        """What a failed part said last."""
        part, code = bad
        self.errors[part].seek(0)
        lines = self.errors[part].read().strip().splitlines()
        if code < 0:
            return f"{name(part)} was killed by signal {-code}"
        return lines[-1].removeprefix("hdnn: ") if lines else f"{name(part)} ended with {code}"


def tell_launcher(news: dict[str, Any]) -> None:
    """Report the root's progress, in a line that `launch` understands."""
    sys.stdout.write(MARK + json.dumps(news) + "\n")
    sys.stdout.flush()
