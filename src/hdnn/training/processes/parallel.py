"""One training in several processes, each with its slice of every minibatch.

The training is that of one process, up to rounding. The features of all slices are gathered, so
that every process solves the same output layer; the gradients of the hidden layers are summed, so
that every process takes the same step. What happens in one process alone (an error, Ctrl-C, a
callback that ends the training) is sent along with its features, so that all end at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdnn.base import portable
from hdnn.base import process_groups as process_groups
from hdnn.errors import TrainingError, flag
from hdnn.training import identity

T = TypeVar("T")

STOP, INTERRUPT, FAILED = 1, 2, 4  # flags that a process sends with its features


class ProcessLostError(TrainingError):
    """Another process has ended, or does not answer in time."""


@portable.portable
@dataclass
class Attempt(Generic[T]):
    """What a function returned in one process, or its error, to be sent to the others."""

    value: T
    error: Exception | None = None

    @classmethod
    def of(cls, make: Callable[[], T]) -> Attempt[T]:
        try:
            return cls(make())
        except Exception as error:
            return cls(None, error)  # pyright: ignore[reportArgumentType]

    def result(self) -> T:
        """The value, or the error once more."""
        if self.error is not None:
            raise self.error
        return self.value


class Alone:
    """The team of a training in one process, with no others to ask or to tell."""

    first, over, patience = True, False, 0.0

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    holding = together

    def from_first(self, make: Callable[[], T]) -> T:
        return make()

    def agreed(self, stop: bool, interrupted: bool) -> tuple[bool, bool]:
        return stop, interrupted

    def anyone(self, value: bool) -> bool:
        return value

    def features(self, run: Callable[[Tensor], Tensor], y_0: Tensor) -> Tensor:
        return run(y_0)

    def gradients(
        self, run: Callable[[Tensor], None], g: Tensor, parameters: list[nn.Parameter]
    ) -> None:
        run(g)

    def share(self, model: nn.Module) -> None:
        pass

    def check_alike(self, make: Callable[[], dict[str, Any]]) -> None:
        pass

    def check_weights(self, model: nn.Module, epoch: int) -> None:
        pass


class Ranks:
    """The team of a training in all processes of torch.distributed; all must call every method."""

    patience = 1.0  # torchrun may pass on a Ctrl-C that the terminal sends to everybody

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.first = self.rank == 0
        self.wishes = self.heard = 0
        self.trouble: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether some process asked to end the training before this step."""
        return bool(self.heard & (STOP | INTERRUPT))

    # Going on together, or not at all

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for all; an error in one of them is an error in all."""
        error = self.trouble
        try:
            yield
        except Exception as own:
            error = error or own
        self._raise_any(error)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep an error until the processes meet again, so that none waits for this one in vain."""
        try:
            yield
        except Exception as error:
            self.trouble = self.trouble or error

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, or its error, in all of them."""
        return self.broadcast(Attempt.of(make) if self.first else None).result()

    def broadcast(self, attempt: Attempt[T] | None) -> Attempt[T]:
        """The attempt of the first process, in all of them; the others pass None."""
        content = b"" if attempt is None else portable.pack(attempt)
        size = torch.tensor([len(content)])
        self._call(dist.broadcast, size, 0)
        sent = _as_tensor(content, int(size))
        self._call(dist.broadcast, sent, 0)
        return attempt or portable.unpack(sent.numpy().tobytes())

    def agreed(self, stop: bool, interrupted: bool) -> tuple[bool, bool]:
        """Send these requests with the next features; return those that all have received."""
        self.wishes = STOP * stop | INTERRUPT * interrupted
        return bool(self.heard & STOP), bool(self.heard & INTERRUPT)

    def anyone(self, value: bool) -> bool:
        """Whether `value` is true in any process."""
        return any(self._all(value))

    def _raise_any(self, error: Exception | None) -> None:
        for rank, failed in enumerate(self._all(error)):
            if failed is not None:
                where = f"process {rank} of {self.size}: " if rank else ""
                raise error or type(failed)(f"{where}{failed}")

    # The work

    def features(self, run: Callable[[Tensor], Tensor], y_0: Tensor) -> Tensor:
        """`run` for all states (B, n), each process with its slice of them."""
        (B, n), error = y_0.shape, self.trouble
        sent = y_0.new_zeros(-(-B // self.size) * n + 1)  # slices of one size, and the flags
        slices = y_0.tensor_split(self.size)
        mine = slices[self.rank]
        try:
            if len(mine):
                sent[: mine.numel()] = run(mine).reshape(-1)
        except Exception as own:
            error = error or own
        sent[-1] = self.wishes | FAILED * (error is not None)
        rows = sent.new_empty(self.size, len(sent))
        self._call(dist.all_gather, list(rows), sent)
        self.heard = 0
        for word in rows[:, -1].tolist():
            self.heard |= int(word)
        if self.heard & FAILED:
            self._raise_any(error)
        found = [row[: own.numel()] for row, own in zip(rows, slices, strict=True)]
        return torch.cat(found).view(B, n)

    def gradients(
        self, run: Callable[[Tensor], None], g: Tensor, parameters: list[nn.Parameter]
    ) -> None:
        """Set the gradients of all samples: `run` sets those of a slice, which are summed."""
        mine, error = g.tensor_split(self.size)[self.rank], None
        try:
            if len(mine):
                run(mine)
        except Exception as own:
            error = own
        # One buffer: the gradients, which of them there are, and whether all went well.
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        words = [*(p.grad is not None for p in parameters), error is not None]
        flat = torch.cat([*(one.reshape(-1) for one in own), g.new_tensor(words)])
        self._call(dist.all_reduce, flat)
        *sums, words = flat.split([*(p.numel() for p in parameters), len(words)])
        *there, failed = words.tolist()
        if failed:
            self._raise_any(error)
        for p, total, known in zip(parameters, sums, there, strict=True):
            p.grad = total.view(p.shape).to(p.dtype) if known else None

    # Having the same weights and options

    def share(self, model: nn.Module) -> None:
        """Give every process the weights of the first."""
        for t in model.state_dict().values():
            whole = t.detach().contiguous()
            self._call(dist.broadcast, whole, 0)
            t.copy_(whole)

    def check_alike(self, make: Callable[[], dict[str, Any]]) -> None:
        """Refuse processes that were given different things, by name."""
        first, *others = self._all(make())
        for rank, theirs in enumerate(others, 1):
            for name, value in first.items():
                if theirs[name] != value:
                    raise TrainingError(
                        f"process {rank} has another {name} than process 0, {theirs[name]!r} "
                        f"instead of {value!r}; give all of them the same model, data and options."
                    )

    def check_weights(self, model: nn.Module, epoch: int) -> None:
        """Refuse to go on once the weights differ by a single bit."""
        first, *others = self._all(identity.digest(model.state_dict().values()))
        for rank, theirs in enumerate(others, 1):
            if theirs != first:
                raise TrainingError(
                    f"process {rank} has other weights than process 0 after epoch {epoch}; use "
                    "machines of one kind, and callbacks that do the same in every process."
                )

    def _all(self, value: T) -> list[T]:
        """The values of all processes."""
        content = portable.pack(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._call(dist.all_gather, sizes, torch.tensor([len(content)]))
        room = max(int(size) for size in sizes)
        told = [torch.empty(room, dtype=torch.uint8) for _ in range(self.size)]
        self._call(dist.all_gather, told, _as_tensor(content, room))
        read = zip(told, sizes, strict=True)
        return [portable.unpack(one[: int(size)].numpy().tobytes()) for one, size in read]

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> None:
        try:
            operation(*arguments)
        except RuntimeError as error:
            reason = str(error).rpartition("] ")[2].split(". ")[0][:99]
            raise ProcessLostError(
                f"another of the {self.size} processes has ended or does not answer ({reason}); "
                "what was saved is kept, start all of them again and resume."
            ) from error


Team = Alone | Ranks


def team(parallel: bool) -> Team:
    """Who shares a training: the processes of torch.distributed if asked, else this one alone."""
    if not flag("parallel", parallel):
        return Alone()
    if not (dist.is_available() and dist.is_initialized()):
        raise TrainingError(
            "parallel=True shares a training among the processes of torch.distributed, which is "
            "not initialised here; call torch.distributed.init_process_group first."
        )
    return Ranks()


def _as_tensor(content: bytes, room: int) -> Tensor:
    """Bytes, in a tensor with room for so many."""
    return torch.frombuffer(bytearray(content.ljust(room, b"\0")), dtype=torch.uint8)
