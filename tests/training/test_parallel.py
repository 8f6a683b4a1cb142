"""Several processes train as one does: to the same weights, with one set of files and one voice."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

import hdnn
from graph_runs import Process, Stem
from hdnn.app import cli
from hdnn.errors import OptionError, TrainingError
from hdnn.training import fit
from hdnn.training.processes import torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs gloo",
)

LIMIT = 300  # seconds, on a very busy machine
QUICK = ["--data", "double_moons", "--layers", "4", "--batch", "450", "--dtype", "float64"]


class Processes:
    """Starts the processes of a group, as torchrun would."""

    def __init__(self, stem: Stem, folder: Path) -> None:
        self.stem, self.folder = stem, folder
        self.running: list[Process] = []

    def start(self, *commands: list[str], folder: Path | None = None) -> list[Process]:
        """One process for each command of Python, in a folder."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        group = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        group |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HDNN_TIMEOUT": "200"}
        started = [
            self.stem.fork(
                command,
                self.folder / f"{len(self.running) + rank}",
                environment=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                folder=None if folder is None else str(folder),
            )
            for rank, command in enumerate(commands)
        ]
        self.running += started
        return started


@pytest.fixture
def processes(stem, tmp_path_factory):
    processes = Processes(stem, tmp_path_factory.mktemp("words"))
    yield processes
    for process in processes.running:
        process.kill()
        process.wait()


def end(processes: list[Process]) -> tuple[list[int], list[str], list[str]]:
    """Exit code, output and errors of each."""
    codes, out, err = zip(*(process.wait(LIMIT) for process in processes), strict=True)
    return [*codes], [*out], [*err]


def difference(a: Path, b: Path) -> float:
    pairs = zip(hdnn.load(a).parameters(), hdnn.load(b).parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


# Training in a group that the program has made

GROUP = """
import json, os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
import hdnn
from hdnn.data import planar
from hdnn.training import fit
from hdnn.training.identity import digest

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data = planar.double_moons(160, seed=1, dtype=torch.float64)
x, t = data.x_train, data.t_train
report = {}

def model_of(net="H2", n=4, head="sigmoid", layers=5, seed=0, **options):
    like = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    heads = {
        "sigmoid": lambda: hdnn.SigmoidHead(n, **like),
        "softmax": lambda: hdnn.SoftmaxHead(n, 3, **like),
        "regression": lambda: hdnn.RegressionHead(n, 2, **like),
    }
    net = getattr(hdnn, net)(n, layers, **like, **options)
    return hdnn.Model(hdnn.Augment(2, n), net, heads[head]())

def quick(model, x=x, t=t, **options):
    return fit(model, x, t, **{"epochs": 2, "batch": 30, "progress": False, **options})

def same(model):
    told = [None] * size
    dist.all_gather_object(told, digest(model.parameters()))
    return len(set(told)) == 1

def failure(**options):
    # What a training that fails says here.
    try:
        quick(model_of(), parallel=True, **options)
        return None
    except (hdnn.HDNNError, OSError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
"""

AS_ONE = """
reference, reversible = {"engine": "reference"}, {"backprop": "reversible"}
few = {"x": x[:7], "t": t[:7], "batch": 5}  # slices of 2, 2 and 1, then of 1, 1 and 0 samples
weight = torch.rand(len(x), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
weight[weight < 0.3] = 0
for name, (options, how) in {
    "newton": ({}, {}),
    "adam, sgd": ({}, {"solver": "adam", "optimizer": "sgd", "learning_rate": 0.1}),
    "joint": ({}, {"solver": "joint", "weight_decay": 0.1}),
    "reference": (reference, {"clip": 1e-2, "smoothing": "cosine"}),
    "reversible": (reversible, {"weight": weight}),
    "checkpoint": ({"backprop": "checkpoint"} | reference, {"batch": 31, "smoothness": 0.1}),
    "few": ({}, few),
    "few, reversible": (reversible | reference, few | {"solver": "joint"}),
    "one by one": ({}, {"x": x[:3], "t": t[:3], "batch": 1}),
    "large head": ({"head": "softmax", "n": 16}, {}),
    "values": ({"head": "regression"}, {"t": torch.stack([x[:, 0] * x[:, 1], x[:, 0]], 1)}),
    "H1": ({"net": "H1"}, {}),
    "implicit": ({"net": "ImplicitH2"}, {}),
    "MLP": ({"net": "MLP"}, {"solver": "adam"}),
    "held out": (
        {},
        {
            **{"validation": (data.x_test, data.t_test), "patience": 1},
            **{"epochs": 9, "learning_rate": 0.5},
        },
    ),
}.items():
    shared = model_of(seed=rank, **options)  # the first one's weights count
    history = quick(shared, parallel=True, **how)
    report[name] = {"same": same(shared)}
    if rank == 0:
        alone = model_of(**options)
        before = torch.cat([p.detach().flatten() for p in alone.net.parameters()])
        expected = quick(alone, **how)  # while the others go on: nobody is waited for
        pairs = list(zip(shared.parameters(), alone.parameters(), strict=True))
        after = torch.cat([p.detach().flatten() for p in alone.net.parameters()])
        report[name] |= {
            "difference": max((p - q).abs().max().item() for p, q in pairs),
            "loss": abs(history.loss[-1] - expected.loss[-1]),
            "held out": [len(h.validation_loss) for h in (history, expected)],
            "gradient": abs(history.gradient[-1] - expected.gradient[-1]),
            "moved": (after - before).abs().max().item(),
        }

# PyTorch's own data parallelism, around a network without stored states
plain = model_of(**reference).net
net = torch.nn.parallel.DistributedDataParallel(model_of(engine="auto", **reversible).net)
y = torch.randn(2 * size, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
for _ in range(2):  # the order of its buckets is another one after the first step
    net.zero_grad()
    net(y.chunk(size)[rank]).square().mean().backward()
plain(y).square().mean().backward()
pairs = zip(net.parameters(), plain.parameters(), strict=True)
report["DDP"] = {"difference": max((p.grad - q.grad).abs().max().item() for p, q in pairs)}
del net, pairs  # they hold the group
"""

END = """
print(json.dumps(report), flush=True)
dist.barrier()
dist.destroy_process_group()
threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
if any("gloo" in name for name in threads):
    print("the group lives on in", threads, file=sys.stderr)
"""


def reports(processes: Processes, code: str, size: int, *arguments: str) -> list[dict]:
    """What a program in several processes reports, in each of them."""
    codes, out, err = end(processes.start(*[["-c", GROUP + code + END, *arguments]] * size))
    assert codes == [0] * size, err
    assert err == [""] * size
    return [json.loads(text) for text in out]


def test_three_processes_train_as_one_and_stay_alike_to_the_bit(processes):
    first, *others = reports(processes, AS_ONE, 3)
    assert first.pop("DDP")["difference"] < 1e-12
    shared, alone = first["held out"]["held out"]
    assert 1 < shared == alone < 9
    for name, found in first.items():
        assert found["moved"] > 1e-3, name
        assert found["difference"] < 1e-9, name
        assert found["loss"] < 1e-9, name
        assert found["gradient"] < 1e-9, name
        assert all(report[name]["same"] for report in (first, *others)), name


TROUBLE = """
folder, mine = sys.argv[1], rank == 1
writing = {"folder": folder} if rank == 0 else {}

def on_second(action):
    return lambda moment: action(moment) if mine and moment.step == 2 else None

def full(moment):
    raise OSError("no room")

def drift(moment):
    with torch.no_grad():
        moment.model.head.weight[0, 0] += 1e-16
        moment.model.net.K_p[0] += 1e-14

def press(moment):
    os.kill(os.getpid(), signal.SIGINT)

bad = x.clone()
bad[3] = torch.nan
report["flag"] = failure(epochs=0 if mine else 2)
report["options"] = failure(batch=31 if mine else 30)
report["data"] = failure(x=x + 1 if mine else x)
report["nan"] = failure(x=bad if mine else x)
report["folder"] = failure(folder="/dev/null/run" if rank == 0 else folder)
report["callback"] = failure(callbacks=[on_second(full)])
report["drift"] = failure(callbacks=[on_second(drift)])

# An error in the hidden layers of one process alone, forwards and backwards
calls = []
def fail(*_):
    calls.append(1)
    if len(calls) == 3:
        raise hdnn.errors.ConvergenceError("no solution.")
for way in ("forwards", "backwards"):
    model = model_of("ImplicitH2")
    calls.clear()
    if mine and way == "forwards":
        model.net.register_forward_pre_hook(fail)
    elif mine:
        next(model.net.parameters()).register_hook(fail)
    try:
        quick(model, parallel=True)
    except hdnn.HDNNError as error:
        report[way] = str(error)

# The others learn from the first one's file where it was interrupted
report["interrupted"] = failure(callbacks=[on_second(press)], **writing)
whole, again = model_of(), model_of(seed=rank)
quick(whole, parallel=True)
quick(again, parallel=True, folder=folder if rank == 0 else "/dev/null/run", resume=True)
pairs = zip(whole.parameters(), again.parameters(), strict=True)
report["resumed"] = same(again) and all(torch.equal(p, q) for p, q in pairs)

steps = []
watch, ends = lambda moment: steps.append(moment.step), on_second(lambda moment: True)
quick(model_of(), parallel=True, callbacks=[watch, ends])
report["ended"] = steps
"""


def test_what_one_process_meets_is_told_in_all_of_them(processes, tmp_path):
    first, second = reports(processes, TROUBLE, 2, str(tmp_path / "run"))
    assert "epochs must be a whole number >= 1, but got 0" in first["flag"]
    assert "process 1 of 2: epochs" in first["flag"]
    assert "process 1 has another batch than process 0, 31 instead of 30" in first["options"]
    assert "process 1 has another data" in first["data"]
    assert first["nan"].startswith("DataError: process 1 of 2: x has NaN")
    assert second["nan"].startswith("DataError: x has NaN")
    assert first["folder"] == second["folder"]
    assert "cannot make the folder /dev/null/run" in second["folder"]
    assert first["callback"] == "TrainingError: process 1 of 2: OSError: no room"
    assert "process 1 has other weights than process 0 after epoch 1" in first["drift"]
    for way in ("forwards", "backwards"):
        assert first[way] == "process 1 of 2: no solution."
        assert second[way] == "no solution."
    for report in (first, second):
        assert report["interrupted"] == "KeyboardInterrupt: "
        assert report["resumed"]
        assert report["ended"] == [1, 2]


def test_parallel_needs_a_group_and_is_off_without_it():
    model = hdnn.Model(None, hdnn.H2(2, 2), hdnn.SigmoidHead(2))
    x, t = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(TrainingError, match="init_process_group"):
        fit(model, x, t, parallel=True)
    with pytest.raises(OptionError, match="parallel must be True or False"):
        fit(model, x, t, parallel="auto")  # pyright: ignore[reportArgumentType]


# The command line, started by torchrun


def test_torchrun_trains_as_one_process_with_one_set_of_files(stem, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [*QUICK, "--multilevel", "2", "--patience", "9", "--epochs", "2"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "hdnn", "train", *options, "--json", "--tensorboard", "--out", "two"]
    words = tmp_path / "words"
    result = stem.fork([*torchrun, *command], words, folder=str(tmp_path)).wait(LIMIT)
    assert result.code == 0, result.errors
    assert result.errors == ""
    shown = json.loads(result.output)  # said once
    assert cli.main(["train", *options, "--json", "--tensorboard", "--out", "one"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert shown["processes"] == 2
    assert shown["test_accuracy"] == expected["test_accuracy"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert difference(one / "model.safetensors", two / "model.safetensors") < 1e-9
    assert (one / "config.toml").read_text() == (two / "config.toml").read_text()
    files = [
        sorted(str(file.relative_to(run)) for file in run.rglob("*") if "events" not in file.name)
        for run in (one, two)
    ]
    assert files[0] == files[1]
    assert len(list(two.rglob("events*"))) == 1


def test_a_mistake_is_one_sentence_of_the_first_process(processes, tmp_path):
    (tmp_path / "rows.csv").write_text("a,b,c\n1,2,x\n3,4,y\n")
    command = ["-m", "hdnn", "train", "--data", "rows.csv", "--target", "d"]
    codes, out, err = end(processes.start(command, command, folder=tmp_path))
    assert codes == [2, 2]
    assert out == ["", ""]
    assert err == ["hdnn: rows.csv has no column 'd'; it has 'a', 'b', 'c'.\n", ""]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.csv"]


def test_a_mistake_of_another_process_alone_is_told_by_the_first(processes, tmp_path):
    right = ["-m", "hdnn", "train", *QUICK]
    wrong = [*right, "--epochs", "many"]
    codes, _, err = end(processes.start(right, wrong, folder=tmp_path))
    assert codes == [2, 2]
    assert err[0].startswith("hdnn: process 1 of 2: Invalid value for '--epochs'")
    assert err[1] == ""
    assert not [*tmp_path.iterdir()]


def wait_for_epochs(run: Path, count: int, process: Process) -> None:
    log, limit = run / "log.jsonl", time.monotonic() + LIMIT
    while not log.exists() or len(log.read_bytes().splitlines()) < count:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_signal_to_one_process_ends_all_and_the_run_goes_on_after_it(processes, tmp_path):
    command = ["-m", "hdnn", "train", *QUICK, "--epochs", "3000", "--out", "run", "--resume"]
    pair = processes.start(command, command, folder=tmp_path)
    wait_for_epochs(tmp_path / "run", 2, pair[0])
    pair[1].send(signal.SIGTERM)
    codes, _, err = end(pair)
    assert codes == [130, 130]
    assert err == ["hdnn: interrupted; go on with: hdnn train --resume --out run\n", ""]

    done = len((tmp_path / "run" / "log.jsonl").read_bytes().splitlines())
    pair = processes.start(command, command, folder=tmp_path)
    wait_for_epochs(tmp_path / "run", done + 2, pair[0])
    pair[1].kill()
    codes, _, err = end(pair)
    assert codes == [2, -signal.SIGKILL]
    assert err[0].startswith("hdnn: another of the 2 processes has ended or does not answer (")
    assert err[0].count("\n") == 1


# What can be known without starting any


@pytest.mark.parametrize("given", ["0", "-1", "nan", "soon"])
def test_a_wrong_timeout_is_refused(given, monkeypatch):
    monkeypatch.setenv("HDNN_TIMEOUT", given)
    with pytest.raises(OptionError, match="HDNN_TIMEOUT must be a number of seconds > 0"):
        torchrun.timeout()


def test_one_process_is_no_group(monkeypatch):
    for rank, size in (("", ""), ("0", "1"), ("0", ""), ("x", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        assert not torchrun.several()
        assert torchrun.is_first()
        with torchrun.joined() as processes:
            assert processes.first(lambda: 3) == 3


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    process = object.__new__(torchrun.SeveralProcesses)
    process.rank, process.size = 3, 4
    assert process._device("cpu") == "cpu"
    assert process._device("cuda") == "cuda:1"
    assert chosen == [1]
    with pytest.raises(OptionError, match="cuda:0 is one GPU, but there are 4 processes"):
        process._device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(OptionError, match="--nproc-per-node 2"):
        process._device("cuda")
