"""What transports over a store have in common: who has started, who is lost, and what came first.

One store for all parts holds their addresses, which of them have started, and the first fault.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hdnn.distributed.transport import DistributedError, Transport, short
from hdnn.errors import OptionError
from hdnn.training.processes import meeting
from hdnn.training.processes.meeting import Fault, first_fault

PATIENCE = 2.0  # seconds to wait for what a lost part reported about others
PAUSE = 0.2  # seconds between two looks at the store, at most


class LostError(DistributedError):
    """A part is gone or silent: it may help to start all parts again."""


class StoreTransport(Transport):
    """A transport of one process for each part, all of which reach one store.

    Args are those of `Gloo`.

    Raises:
        OptionError: if the timeout is not > 0.
    """

    def __init__(
        self,
        part: int,
        parts: int,
        store: Any,
        *,
        timeout: float = 60.0,
        name: Callable[[int], str] = "part {}".format,
        faults: Any = None,
        everyone: int | None = None,
    ) -> None:
        super().__init__(part, parts)
        self.store, self.faults, self.everyone = store, faults or store, everyone or parts
        if not timeout > 0:
            raise OptionError(f"timeout must be a number of seconds > 0, but got {timeout!r}.")
        self.name, self.timeout, self.met = name, timeout, False
        self.faulty = False  # whether anything went wrong

    def cards(self, name: str, card: list[int]) -> list[tuple[str, list[int]]]:
        """The card that was shown first, in any replica."""
        try:
            other, theirs = json.loads(
                self.faults.compare_set("card", "", json.dumps([name, card]))
            )
        except RuntimeError as error:
            raise LostError(f"the store is gone: {short(error)}") from error
        return [(other, theirs)]

    def meet(self) -> None:
        """Wait for all parts, because gloo would wait much longer for one that never comes."""
        deadline, pause = time.monotonic() + self.timeout, 0.01
        try:
            self.store.set(f"here-{self.part}", "")
            here, there = self.store.add("here", 1), self.faults.add("everyone", 1)
            while here < self.parts or there < self.everyone:
                known = first_fault(self.faults)
                if known is None and time.monotonic() > deadline:
                    absent = [p for p in range(self.parts) if not self.store.check([f"here-{p}"])]
                    names = ", ".join(map(self.name, absent[:4])) + ", .." * (len(absent) > 4)
                    names = names or "a part of another replica" * (there < self.everyone)
                    if names:  # otherwise the last one has just started
                        message = f"{names} did not start within {self.timeout:g} s"
                        known = self._report(message, True)
                if known is not None:
                    raise _stopped("did not start", known)
                time.sleep(pause)
                pause = min(2 * pause, PAUSE)
                here, there = self.store.add("here", 0), self.faults.add("everyone", 0)
        except RuntimeError as error:
            raise LostError(f"the store is gone: {short(error)}") from error
        self.met = True

    def lost(self, part: int, error: Exception) -> DistributedError:
        """The error when a neighbour does not answer: it names what went wrong first."""
        late = "imed out" in str(error)
        what = f"sent nothing for {self.timeout:g} s" if late else "is gone"
        seen = f"{self.name(part)} {what}"
        return _stopped("stopped", self._first(part, seen, late), seen)

    def _first(self, part: int, text: str, late: bool) -> Fault:
        """The first fault: follow the neighbour to the part that it lost itself, and so on."""
        # A slow part gives up later than those that wait for it.
        patience = max(PATIENCE, self.timeout / 10) if late else PATIENCE
        followed, silent = {self.part}, text if late else ""
        try:
            self.faults.set_timeout(timedelta(seconds=PATIENCE))
            self.store.set(f"lost-{self.part}", json.dumps([part, text, late]))
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                known = first_fault(self.faults)
                if known is not None:
                    return known
                if not self.store.check([f"lost-{part}"]):
                    time.sleep(0.02)
                    continue
                if part in followed:  # a circle of parts: one of them timed out first
                    return self._report(silent or text, True)
                followed.add(part)
                part, text, late = json.loads(self.store.get(f"lost-{part}"))
                silent, deadline = text if late else silent, time.monotonic() + patience
        except RuntimeError:  # the store is gone too
            return Fault(text, True)
        return self._report(text, True)

    def _report(self, message: str, lost: bool) -> Fault:
        self.faulty = True
        with contextlib.suppress(RuntimeError):
            self.faults.set_timeout(timedelta(seconds=PATIENCE))
            return meeting.report_fault(self.faults, Fault(message, lost))
        return Fault(message, lost)

    def report(self, message: str) -> str:
        """Report a fault, unless another one came first; the first one is returned."""
        return self._report(message, False).text


def _stopped(how: str, first: Fault, seen: str = "") -> DistributedError:
    """The error for a first fault; `seen` is what this part noticed of it."""
    kind = LostError if first.lost else DistributedError
    why = f" ({seen})" if seen not in ("", first.text) else ""
    return kind(f"the training {how} because {first.text}{why}.")
