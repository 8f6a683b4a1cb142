"""Trainings by several processes, for tests: quick to start, with faults where wanted.

To import PyTorch takes longer than a whole tiny training. So one process, the stem, imports it and
warms up once, and forks a process for each part. That is safe because the stem has one thread and
no connections. What it forks runs any program, as Python itself would with the same arguments.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import save_file

from hdnn.distributed.graph.file import graph_of
from hdnn.distributed.messages.gloo import Gloo
from hdnn.distributed.training.run import Config, train
from hdnn.distributed.training.training import Training
from hdnn.training.processes.meeting import PrefixStore, TCPStore

LIMIT = 120.0  # seconds for what takes one or two on an idle machine
EPOCHS, BATCHES = 5, 4


class Fault(NamedTuple):
    """A signal that a process sends itself within a step, before a certain exchange of it."""

    signal: signal.Signals
    step: int
    exchange: int


class Ended(NamedTuple):
    """How a process ended; `code` is negative after a signal."""

    code: int
    output: str
    errors: str

    @property
    def sentence(self) -> str:
        """The one line of its errors, without the name of the program."""
        (line,) = self.errors.splitlines()
        assert line.startswith("hdnn: ")
        return line.removeprefix("hdnn: ")

    @property
    def epochs(self) -> list[int]:
        """Those that it told of while it trained."""
        lines = [line.split(maxsplit=1) for line in self.output.splitlines()]
        return [json.loads(news)["epoch"] for mark, news in lines if mark == "hdnn-progress"]

    @property
    def metrics(self) -> dict[str, Any]:
        """What the root says at the end."""
        return json.loads(self.output.splitlines()[-1])


# What is trained


@dataclass(frozen=True)
class Task:
    """A training with files for each node, and the model that one process comes to."""

    config: Config
    model: bytes


def ring(nodes: int) -> dict[str, Any]:
    return {"nodes": nodes, "R": [[i, (i + 1) % nodes] for i in range(nodes)]}


def make_task(home: Path, nodes: int, graph: dict[str, Any] | None = None, layers: int = 2) -> Task:
    """A task on a ring, or another graph; trained by this process alone, for comparison."""
    write_data(home / "data", nodes, 200)
    options = {"epochs": EPOCHS, "batch": 200 // BATCHES}
    config = Config(
        graph=graph or ring(nodes), data=str(home / "data"), layers=layers, options=options
    )
    train(config, graph_of(config.graph), folder=home / "alone")
    return Task(config, (home / "alone" / "model.safetensors").read_bytes())


def write_data(home: Path, nodes: int, samples: int) -> None:
    """A file for each node, and labels for the root."""
    x = torch.randn(samples, 2 * nodes, generator=torch.Generator().manual_seed(0))
    (home / "train").mkdir(parents=True)
    for i in range(nodes):
        own = x[:, [i, nodes + i]].contiguous()
        save_file({"x": own}, home / "train" / f"node-{i:05d}.safetensors")
    t = (x[:, 0] * x[:, nodes - 1] > 0).long()
    save_file({"t": t}, home / "train" / "labels.safetensors")
    (home / "classes.json").write_text("2")


# The processes that do it


class Process:
    """One process that the stem has forked."""

    def __init__(self, stem: Stem, pid: int, words: Path) -> None:
        self.stem, self.pid, self.words = stem, pid, words
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self.stem.ask({"poll": self.pid})
        return self.returncode

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, what: signal.Signals) -> None:
        """A signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, what)

    def stopped(self) -> bool:
        """Whether it was stopped by a signal."""
        assert self.poll() is None
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    def wait(self, limit: float = LIMIT) -> Ended:
        until(lambda: self.poll() is not None, limit)
        assert self.returncode is not None
        words = (Path(f"{self.words}.{end}").read_text(errors="replace") for end in STREAMS)
        return Ended(self.returncode, *words)


STREAMS = ("out", "err")
WORKER = ("-m", "hdnn.distributed.worker")


class Stem:
    """The process that forks others, for as long as a `with` lasts; they do not outlive it."""

    def __enter__(self) -> Stem:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its input is its end

    def ask(self, question: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    def fork(self, argv: Sequence[str], words: Path, **more: Any) -> Process:
        """Run `python argv`, `-c` or `-m`; what it says goes to files. `more` is for `_become`."""
        pid = self.ask({"argv": list(argv), "words": str(words), **more})
        return Process(self, pid, words)


class Group:
    """The processes of one training, with a store of their own, for as long as a `with` lasts."""

    def __init__(self, stem: Stem, config: Config, parts: int, timeout: float = LIMIT) -> None:
        self.stem, self.config, self.parts, self.timeout = stem, config, parts, timeout
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[Process] = []
        self._home = tempfile.TemporaryDirectory()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.send(signal.SIGKILL)
            process.wait()
        self._home.cleanup()

    def start(
        self,
        part: int,
        *options: str,
        fault: Fault | None = None,
        version: str | None = None,
        replicas: int = 1,
        **changes: Any,
    ) -> Process:
        """Start one part; `changes` are those of its config."""
        words = Path(self._home.name, f"{len(self.processes)}")
        config = words.with_suffix(".json")
        config.write_text(replace(self.config, **changes).text())
        environment = {"HDNN_STORE": f"127.0.0.1:{self.store.port}"}
        environment |= {"HDNN_PARTS": str(self.parts), "HDNN_PART": str(part)}
        environment |= {"HDNN_REPLICAS": str(replicas)}
        process = self.stem.fork(
            [*WORKER, str(config), "--timeout", str(self.timeout), *options],
            words,
            environment=environment,
            version=version,
            fault=fault,
        )
        self.processes.append(process)
        return process

    def start_all(self, *options: str, odd: int = -1, **how: Any) -> Group:
        """Start all parts; one of them may be odd, and only that is started like this."""
        for part in range(self.parts):
            self.start(part, *options, **(how if part == odd else {}))
        return self

    def waiting(self) -> int:
        """How many parts are waiting for the others."""
        return PrefixStore("hdnn-0/graph-0", self.store).add("here", 0)

    def end(self) -> list[Ended]:
        return [process.wait() for process in self.processes]


def until(holds: Callable[[], bool], limit: float = LIMIT) -> None:
    """Look until something holds."""
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit:g} s"
        time.sleep(0.01)


# Inside the stem


def serve() -> NoReturn:
    """Fork and poll as asked, until the input ends."""
    import hdnn.app.cli  # noqa: F401

    # PyTorch's compiler, which its optimizers import at first use.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    # What an output layer needs at first use: numba takes longer than some time-outs.
    options = {"epochs": 1, "batch": 4000}
    config = Config(graph=ring(4), data="double_circles", layers=1, options=options)
    train(config, graph_of(config.graph))
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    running: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                _become(**question)
                code = _run(*question["argv"])
                if question["argv"][1] == WORKER[1]:
                    _leave(code)
                sys.exit(code)  # in full: connections that are lost may abort it
            running.add(answer)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    _leave(0)


def _become(
    argv: list[str],
    words: str,
    environment: dict[str, str | None] | None = None,
    version: str | None = None,
    fault: list[int] | None = None,
    folder: str | None = None,
    namespace: str | None = None,
) -> None:
    """Take on the streams, the place, the environment and the faults of a new process."""
    for number, path in enumerate((os.devnull, *(f"{words}.{end}" for end in STREAMS))):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    for name, value in (environment or {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if folder is not None:
        os.chdir(folder)
    if namespace is not None:  # of the network, as `ip netns` knows it
        with open(f"/run/netns/{namespace}") as opened:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(opened.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    if version is not None:
        from hdnn.distributed.messages import handshake

        handshake.__version__ = version
    if fault is not None:
        _arm(*fault)


def _run(how: str, program: str, *arguments: str) -> int:
    """Run a program as `python -c` or `python -m` would; its exit code."""
    sys.argv = [how, *arguments]
    try:
        if how == "-m":
            sys.modules.pop(program, None)  # as if nobody had asked for it
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """Exit as Python does, but for clearing the memory, which takes longer than all the rest."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _arm(number: int, step: int, exchange: int) -> None:
    """Make this process send itself a signal within a step."""
    before, start, left = Training._step, Gloo.start, []

    def counted(self: Training, minibatch: Any) -> None:
        left[:] = [exchange] if self.step == step else []
        before(self, minibatch)

    def faulty(self: Gloo, out: Any, into: Any) -> Any:
        if left:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)
        return start(self, out, into)

    Training._step, Gloo.start = counted, faulty


def work() -> int:
    """A worker that the launcher starts, with a fault in one part of the first start."""
    from hdnn.distributed import worker

    part, fault = json.loads(sys.argv[1])
    if os.environ["HDNN_RESTART"] == "0" and os.environ["HDNN_PART"] == str(part):
        _arm(*fault)
    return worker.main(sys.argv[2:])


if __name__ == "__main__":
    if not sys.argv[1:]:
        serve()
    sys.exit(work())
