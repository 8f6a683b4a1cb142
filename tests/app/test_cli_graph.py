"""The commands for graphs, from a file to a training by many processes, and their mistakes."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("typer")

import torch
from safetensors.torch import save_file

import hdnn
from graphs import RING, TWO_STEPS, patterns
from hdnn import sparsity
from hdnn.__main__ import main
from hdnn.app import graphs, progress, terminal
from hdnn.app.commands import train as train_command
from hdnn.app.configs.graph import ring_table
from hdnn.app.tasks import launched
from hdnn.base.graph_config import NETWORKS
from hdnn.data import planar
from hdnn.distributed import Config, GraphNetwork, Plan, read_graph, train, worker
from hdnn.distributed.graph import file as gf
from hdnn.distributed.graph.graph import from_edges
from hdnn.distributed.launch import Ended
from hdnn.distributed.messages.stored import LostError
from hdnn.distributed.network.network import SHEARS
from parts import run_parts
from said import files, sentence, started_alone, told, trained_elsewhere

QUICK = ["--epochs", "1", "--batch", "2000", "--layers", "2"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started_alone(monkeypatch)
    monkeypatch.setattr(launched, "cores", lambda: 64)
    write("ring8.toml", nodes=8, edges=TWO_STEPS, R=RING)
    write("tight.toml", nodes=8, edges=RING, R=RING)
    write("plain.toml", nodes=8, edges=RING)
    write("apart.toml", nodes=4, edges=[[0, 1], [2, 3]])


@pytest.fixture
def nobody_starts(monkeypatch):
    def start(*_, **__):
        raise AssertionError("processes were started")

    monkeypatch.setattr(launched, "launch", start)


def write(name, **table):
    Path(name).write_text(gf.to_toml(table))


def ring(nodes):
    return [[i, (i + 1) % nodes] for i in range(nodes)]


# check


def test_a_good_graph_is_described(capsys):
    assert main(["graph", "check", "ring8.toml"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "graph      8 nodes of (p, q), 1 each: 16 features",
        "links      S 16, R 8, T 0",
        "connected  yes: diameter 4, tree of depth 4 from node 0",
        "local      yes: T R^T R + R^T R T <= S",
        "weights    48 of 128 free in K_p and K_q of a layer",
        "messages   64 a layer and step, forward and as many backward, for h2",
        "           (h1 32, verlet 96, yoshida4 224; each node a process)",
    ]
    assert main(["graph", "check", "ring8.toml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["links"] == {"S": 16, "R": 8, "T": 0}
    assert (result["local"], result["connected"], result["fault"]) == (True, True, None)
    assert (result["diameter"], result["depth"], result["messages"]["h2"]) == (4, 4, 64)


def test_what_breaks_the_locality_condition_is_explained_before_the_sentence(capsys):
    assert main(["graph", "check", "tight.toml"]) == 2
    captured = capsys.readouterr()
    assert "locality condition" in sentence(captured.err)
    assert "no, 16 times" in captured.out
    assert "node 0 needs node 2 forward and backward: row 1 of R has 0 and 2" in captured.out
    assert ".. and 6 more" in captured.out
    assert main(["graph", "check", "tight.toml", "--json"]) == 2
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["fault"] in sentence(captured.err)
    assert (result["local"], result["breaches"]) == (False, 16)
    assert result["explanation"][0]["path"] == [0, 0, 1, 2]


def test_a_graph_in_two_pieces_is_no_graph_to_train_on(capsys):
    assert main(["graph", "check", "apart.toml"]) == 2
    captured = capsys.readouterr()
    assert "not connected" in sentence(captured.err)
    assert "connected  no" in captured.out
    assert "2 groups" in captured.out


def test_nodes_that_only_S_joins_are_told_of(capsys):
    write("few.toml", nodes=3, edges=[[0, 1], [1, 2]], R=[[0, 1]], sizes=[1, 2, 3])
    assert main(["graph", "check", "few.toml"]) == 0
    printed = capsys.readouterr().out
    assert "1 to 3 each: 12 features" in printed
    assert "join nodes in 2 groups" in printed
    assert "weights    36 of 72" in printed


def test_a_designed_R_and_missing_edges_are_told_of(capsys):
    assert main(["graph", "check", "plain.toml"]) == 0
    assert "R was designed" in capsys.readouterr().out
    write("free.toml", nodes=3, R=[[0, 1], [1, 2]])
    assert main(["graph", "check", "free.toml"]) == 0
    printed = capsys.readouterr().out
    assert "S none, R 2, T 0\n" in printed
    assert "no edges are given" in printed


@given(patterns())
def test_breaches_are_those_that_explain_finds(found):
    if found.S is None:
        assert graphs.check(found)["explanation"] == []
        return
    T, R, S = (gf.matrix_of(links) for links in (found.T, found.R, found.S))
    result, theirs = graphs.check(found), list(sparsity.explain(T, R, S))
    assert [breach["text"] for breach in result["explanation"]] == [*map(str, theirs)]
    assert (result["local"], result["breaches"]) == (not theirs, len(theirs))
    assert (result["fault"] is None) == (result["connected"] and not theirs)
    free = sparsity.free_weights(hdnn.Sparsity(R, T, sizes=found.sizes))
    assert result["free_weights"]["K"] + result["free_weights"]["X"] == free
    assert result["groups"] == len(sparsity.components(T, R))


def test_the_option_names_every_network_that_a_graph_can_have():
    assert ("h1", *SHEARS) == NETWORKS


@pytest.mark.parametrize("network", NETWORKS)
def test_messages_are_those_that_a_layer_sends(network):
    found = gf.patterns_of({"nodes": 6, "R": [[0, 1], [1, 2], [1, 5], [3, 4]], "T": ring(6)})
    plan = Plan.each(found.graph())

    def work(transport):
        net = GraphNetwork(plan, 2, transport, network=network)
        rows = torch.zeros(net.rows, 3)
        state, tape = net.forward(net.split(rows))
        forward = sum(transport.traffic.messages.values())
        net.backward(tape, state)
        return forward, sum(transport.traffic.messages.values()) - forward

    forward, backward = (sum(counts) for counts in zip(*run_parts(plan, work), strict=True))
    assert forward == backward == 2 * graphs.messages(found)[network]


def test_a_large_graph_is_looked_at_without_matrices(capsys):
    side = 120
    G = hdnn.distributed.Graph.grid(side, side)
    write("large.toml", nodes=side**2, R=gf.edges_of(G.used))
    assert main(["graph", "check", "large.toml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["depth"], result["diameter"]) == (2 * side - 2, None)


# design


@pytest.mark.parametrize("keep", ["R", "T", "both"])
def test_a_designed_graph_is_printed_as_a_file_and_is_local(keep, capsys):
    assert main(["graph", "design", "tight.toml", "--keep", keep]) == 0
    printed = capsys.readouterr().out
    assert "most free weights for the 8 edges of tight.toml" in printed
    Path("new.toml").write_text(printed)
    graph = read_graph("new.toml")
    assert from_edges(8, RING) == graph.S
    alone = hdnn.distributed.graph.graph.alone(8)
    assert (graph.R[0] == alone) == (keep == "T")
    assert keep != "R" or graph.T[0] == alone
    assert main(["graph", "design", "tight.toml", "--keep", keep, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["graph"] == gf.read_table("new.toml")
    assert (result["local"], result["groups"]) == (True, 1)


def test_a_design_goes_to_a_new_file(capsys):
    flags = ["graph", "design", "plain.toml", "--out", "new.toml"]
    assert main(flags) == 0
    assert capsys.readouterr().out.endswith("\nnew.toml\n")
    before = Path("new.toml").read_bytes()
    assert main(flags) == 2
    assert "exists already" in told(capsys)
    assert main([*flags, "--keep", "T", "--overwrite"]) == 0
    assert Path("new.toml").read_bytes() != before


def test_what_cannot_be_designed_is_told(capsys):
    write("free.toml", nodes=3, R=[[0, 1]])
    write("wide.toml", nodes=200, edges=ring(200))
    for flags, words in (
        (["free.toml"], "no edges to design"),
        (["wide.toml", "--keep", "both"], "up to 150 nodes"),
        (["plain.toml", "--keep", "S"], "keep 'S' is not known"),
        (["plain.toml", "--out", "no/such/file.toml"], "no folder"),
        (["plain.toml", "--out", "."], "is a folder"),
    ):
        assert main(["graph", "design", *flags]) == 2
        assert words in told(capsys)


# draw


def test_a_picture_is_written_once_and_is_always_the_same(capsys):
    pytest.importorskip("matplotlib")
    assert main(["graph", "draw", "ring8.toml"]) == 0
    assert capsys.readouterr().out == "ring8.png\n"
    first = Path("ring8.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert main(["graph", "draw", "ring8.toml"]) == 2
    assert "exists already" in told(capsys)
    assert main(["graph", "draw", "ring8.toml", "--overwrite"]) == 0
    assert Path("ring8.png").read_bytes() == first
    assert main(["graph", "draw", "tight.toml", "--out", "x.svg"]) == 0
    assert b"<svg" in Path("x.svg").read_bytes()
    capsys.readouterr()
    assert main(["graph", "draw", "ring8.toml", "--out", "x.jpg"]) == 2
    assert ".png, .svg, .pdf" in told(capsys)


def test_the_picture_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["graph", "draw", "ring8.toml"]) == 2
    assert "hdnn[plot]" in told(capsys)


def test_too_many_nodes_are_not_drawn(capsys):
    write("many.toml", nodes=1001, R=[])
    assert main(["graph", "draw", "many.toml"]) == 2
    assert "up to 1000 nodes" in told(capsys)


# train --graph


def test_a_training_alone_is_that_of_the_library(capsys):
    flags = ["train", "--graph", "ring8.toml", *QUICK]
    assert main([*flags, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    folder = Path("runs/ring8-swiss_roll-h2-2-0")
    assert result["run"] == str(folder)
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "log.jsonl",
        "metrics.json",
        "model.safetensors",
        "nodes",
    }
    config = Config(
        graph=gf.read_table("ring8.toml"), layers=2, options={"epochs": 1, "batch": 2000}
    )
    assert json.loads((folder / "config.json").read_text()) == json.loads(config.text())
    expected = train(config, read_graph("ring8.toml"))
    for name in ("loss", "train_accuracy", "test_accuracy"):
        assert result[name] == expected[name]
    model = hdnn.load(folder / "model.safetensors")
    assert isinstance(model, hdnn.Model)
    data = planar.swiss_roll(seed=0)
    right = (model.predict(data.x_test) == data.t_test).double().mean().item()
    assert right == pytest.approx(result["test_accuracy"], abs=1e-3)
    before = files(folder)
    assert main(flags) == 2
    assert "holds a run already" in told(capsys)
    assert main([*flags, "--resume"]) == 0  # complete: told again
    assert "test accuracy" in capsys.readouterr().out
    assert main(["train", "--resume", "--out", str(folder)]) == 0  # and found by its folder
    assert files(folder) == before


def test_a_training_on_a_graph_is_no_run_of_a_seed(capsys):
    folder = Path("all/seed-0")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(Config(graph=ring_table(4)).text())
    flags = ["--data", "swiss_roll", "--resume", "--seeds", "2", "--out", "all"]
    assert main(["train", *flags]) == 2
    assert "all/seed-0 holds a training on a graph" in told(capsys)


def test_a_run_on_a_table_is_not_resumed_on_a_graph(capsys):
    flags = ["--data", "swiss_roll", "--layers", "1", "--epochs", "1", "--out", "t"]
    assert main(["train", *flags]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "--graph", "ring8.toml", "--out", "t"]) == 2
    assert "t holds a run, but no training on a graph" in told(capsys)


def test_all_flags_arrive(capsys):
    flags = {
        "data": "double_moons",
        "network": "H1",
        "layers": 3,
        "step": 0.25,
        "activation": "relu",
        "init": "scaled",
        "seed": 5,
        "dtype": "float64",
    }
    options = {
        "epochs": 1,
        "batch": 4000,
        "learning_rate": 0.01,
        "schedule": "constant",
        "warmup": 0.1,
        "weight_decay": 0.5,
        "clip": 1.0,
        "solver": "joint",
        "ridge": 0.001,
        "smoothness": 0.0,
        "smoothing": "constant",
    }
    given = [(f"--{k.replace('_', '-')}", str(v)) for k, v in {**flags, **options}.items()]
    words = [word for pair in given for word in pair]
    assert main(["train", "--graph", "plain.toml", *words, "--out", "r", "--quiet"]) == 0
    config = json.loads(Path("r/config.json").read_text())
    assert {k: config[k] for k in flags} == {**flags, "network": "h1"}
    assert config["options"] == options
    assert len(config["graph"]["R"]) == 8  # what was designed is written down
    capsys.readouterr()
    assert main(["train", "--resume", "--out", "r", "--clip", "2"]) == 2
    assert "has clip = 1.0, not 2.0" in told(capsys)
    assert main(["train", "--resume", "--out", "r", "--graph", "ring8.toml"]) == 2
    assert "has another graph" in told(capsys)
    assert main(["train", "--resume", "--out", "r", *words]) == 0


def test_a_training_that_is_interrupted_goes_on_to_the_same_bytes(monkeypatch, capsys):
    flags = ["--graph", "plain.toml", "--epochs", "3", "--batch", "2000", "--layers", "2"]
    assert main(["train", *flags, "--out", "whole"]) == 0

    def stop(self, news):
        if news["epoch"] == 2:
            raise KeyboardInterrupt

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(progress.TrainingBar, "tell", stop)
        assert main(["train", *flags, "--out", "part", "--save-every", "1"]) == 130
    assert told(capsys) == "hdnn: interrupted; go on with: hdnn train --resume --out part\n"
    assert main(["train", "--resume", "--out", "part"]) == 0
    one, two = Path("whole/model.safetensors"), Path("part/model.safetensors")
    assert one.read_bytes() == two.read_bytes()


def test_a_lost_neighbour_is_no_bad_input(monkeypatch, capsys):
    def lost(*_, **__):
        raise LostError("the training stopped because node 3 is gone.")

    monkeypatch.setattr(worker, "work", lost)
    assert main(["train", "--graph", "ring8.toml", "--out", "r"]) == 1
    said = told(capsys)
    assert said.endswith("node 3 is gone; go on with: hdnn train --resume --out r\n")


def test_other_parts_than_the_root_are_silent(monkeypatch, capsys):
    monkeypatch.setattr(worker, "work", lambda *_, **__: {"parts": 2})
    assert main(["train", "--graph", "ring8.toml", "--out", "r"]) == 0
    assert capsys.readouterr() == ("", "")


def test_what_may_be_a_mistake_is_told(monkeypatch, capsys):
    monkeypatch.setattr(worker, "work", lambda *_, **__: {"parts": 2})
    write("T.toml", nodes=3, edges=ring(3), R=[], T=ring(3))
    write("few.toml", nodes=3, edges=ring(3), R=[[0, 1]])
    for file, words in (
        ("T.toml", ["T is not used", "R links no nodes"]),
        ("few.toml", ["2 groups of nodes never hear of each other"]),
    ):
        assert main(["train", "--graph", file, "--out", "r"]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("warning") == len(words)
        assert all(word in captured.err for word in words)


# launch


def ended(code=0, fault="", restarts=0, **metrics):
    """A launch that ends like this, and what it was called with."""
    calls = []
    result = {
        "data": "swiss_roll",
        "network": "h2",
        "layers": 4,
        "nodes": 8,
        "parts": 8,
        "epochs": 50,
        "seconds": 12.3,
        "train_accuracy": 0.99,
        "test_accuracy": 0.98,
        "messages": 12_000,
        "bytes": 3_000_000,
        "traffic": [[0, 1, 10, 999], [1, 0, 20, 2001], [1, 2, 5, 10]],
        **metrics,
    }

    def start(parts, command, **options):
        calls.append((parts, command, options))
        options["show"]({"epoch": 1, "loss": 0.5})
        calls.append(json.loads(Path(command[3]).read_text()))
        return Ended(code, f"{json.dumps(result)}\n", fault, restarts)

    return start, calls


def test_a_ring_is_started_and_its_traffic_summed_up(monkeypatch, capsys):
    start, calls = ended(restarts=1)
    monkeypatch.setattr(launched, "launch", start)
    flags = ["--nodes", "8", "--save-every", "7", "--timeout", "9", "--restarts", "2"]
    assert main(["launch", *flags, "--layers", "4", "--quiet"]) == 0
    (parts, command, options), config = calls
    assert (parts, options["timeout"], options["restarts"]) == (8, 9.0, 2)
    assert options["name"](3) == "node 3"
    folder = os.path.abspath("runs/ring8-swiss_roll-h2-4-0")
    assert command[1:3] == ["-m", "hdnn.distributed.worker"]
    assert command[4:] == ["--resume", "--out", folder, "--timeout", "9.0", "--save-every", "7"]
    assert config == json.loads(Config(graph=ring_table(8), layers=4).text())
    assert capsys.readouterr().out.splitlines() == [
        "network         h2 of 4 layers on swiss_roll",
        "graph           8 nodes in 8 processes on 64 cores",
        "trained         50 epochs in 12.3 s, restarts: 1",
        "train accuracy  99.00%",
        "test accuracy   98.00%",
        "messages        12,000, 3.0 MB in all",
        "run             runs/ring8-swiss_roll-h2-4-0",
        "",
        "between nodes  messages   bytes",
        "0 - 1                30  3.0 kB",
        "1 - 2                 5    10 B",
    ]
    assert not Path(folder).exists()  # nothing was written, so nothing is left
    assert main(["launch", "--nodes", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["restarts"] == 1


def test_the_traffic_of_many_pairs_is_shown_in_part(monkeypatch, capsys):
    traffic = [[i, (i + 1) % 30, i + 1, 1000 * i] for i in range(30)]
    start, _ = ended(traffic=traffic, parts=30, nodes=60)
    monkeypatch.setattr(launched, "launch", start)
    assert main(["launch", "--nodes", "30", "--out", "r"]) == 0
    printed = capsys.readouterr().out
    assert "between parts" in printed
    assert ["0", "-", "29", "30", "29.0", "kB"] in [line.split() for line in printed.splitlines()]
    assert "28 - 29" in printed
    assert "24 - 25" not in printed
    assert ".. 25 more" in printed
    assert printed.endswith("all of them: r/metrics.json\n")


@pytest.mark.parametrize(
    ("code", "fault", "expected", "said"),
    [
        (1, "node 3 is gone", 1, "the training stopped: node 3 is gone; go on with: hdnn launch"),
        (2, "node 2 says: x has a NaN.", 2, "hdnn: node 2 says: x has a NaN.\n"),
        (130, "", 130, "interrupted before anything was written"),
    ],
)
def test_a_fault_is_one_sentence(code, fault, expected, said, monkeypatch, capsys):
    start, _ = ended(code, fault)
    monkeypatch.setattr(launched, "launch", start)
    assert main(["launch", "--nodes", "4", "--out", "r"]) == expected
    assert said in told(capsys)


def test_a_launch_that_is_interrupted_says_how_to_go_on(monkeypatch, capsys):
    def interrupted(parts, command, **_):
        Path("a b/config.json").write_text(Path(command[3]).read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(launched, "launch", interrupted)
    assert main(["launch", "--nodes", "4", "--out", "a b"]) == 130
    assert told(capsys) == "hdnn: interrupted; go on with: hdnn launch --resume --out 'a b'\n"
    start, calls = ended()
    monkeypatch.setattr(launched, "launch", start)
    assert main(["launch", "--resume", "--out", "a b", "--parts", "2"]) == 0
    assert calls[0][0] == 2
    assert calls[1] == json.loads(Path("a b/config.json").read_text())


def test_a_folder_in_which_another_process_trains_is_left_to_it(monkeypatch, capsys):
    pytest.importorskip("fcntl")
    Path("r").mkdir()
    with trained_elsewhere("r"):
        assert main(["launch", "--nodes", "4", "--out", "r"]) == 2
    assert "another process is training in r" in told(capsys)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_signals_to_end_are_heard(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with launched._stopped_by_signals(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(train_command, "PATIENCE", 0.05)
    alarm = signal.getsignal(signal.SIGALRM)
    try:
        train_command._hear_before_the_end()
        signal.raise_signal(signal.SIGTERM)  # is not heard at once
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGALRM, alarm)


def test_the_bar_shows_epochs_and_restarts(monkeypatch, capsys):
    with progress.TrainingBar("name", True, 4) as bar:  # no terminal: only a restart is told
        bar.open("starting")
        bar.tell({"epoch": 1, "loss": 0.5})
        bar.tell({"restart": 1, "fault": "node 3 is gone"})
    assert capsys.readouterr().err == "hdnn: restart 1, because node 3 is gone\n"
    monkeypatch.setattr(terminal, "at_terminal", lambda: True)
    with progress.TrainingBar("name", True, 4) as bar:
        bar.tell({"epoch": 1, "loss": 0.5})
        assert bar.progress is None  # not before two seconds
        bar.due = 0.0
        bar.tell({"epoch": 2, "loss": 0.5, "accuracy": 0.75})
        (task,) = bar.progress.tasks
        assert task.completed == 2
        assert task.fields["values"] == "loss 0.5000, accuracy 75.0%, epoch 2/4"
        bar.tell({"restart": 1, "fault": "node 3 is gone"})
        assert task.fields["values"] == "restart 1, because node 3 is gone"
    with progress.TrainingBar("name", True, 4) as bar:
        bar.open("starting 8 processes")
        assert bar.progress is not None
    assert not progress.TrainingBar("name", False, 4).on


# Data of nodes


def node_files(folder, nodes=4, samples=12, sizes=1, classes=2):
    """A folder of data for the nodes of a graph."""
    generator = torch.Generator().manual_seed(0)
    home = Path(folder)
    for part in ("train", "test"):
        (home / part).mkdir(parents=True)
        t = torch.randint(classes, (samples,), generator=generator)
        save_file({"t": t}, home / part / "labels.safetensors")
        for node in range(nodes):
            x = torch.randn(samples, 2 * sizes, generator=generator) + t[:, None]
            save_file({"x": x}, home / part / f"node-{node:05d}.safetensors")
    (home / "classes.json").write_text(str(classes))
    return home


def test_nodes_have_data_of_their_own(capsys):
    node_files("d/my data", classes=3)
    write("g.toml", nodes=4, R=ring(4))
    assert main(["train", "--graph", "g.toml", "--data", "d/my data", *QUICK, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["run"] == "runs/g-my_data-h2-2-0"
    assert result["train_accuracy"] > 0.4
    assert Path(result["data"]).is_absolute()


@pytest.mark.usefixtures("nobody_starts")
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("classes.json", None, "cannot read"),
        ("classes.json", b"1", "number of classes"),
        ("classes.json", b"two", "cannot read"),
        ("classes.json", b"[2]", "number of classes"),
        ("train/labels.safetensors", None, "labels.safetensors"),
        ("train/labels.safetensors", {"t": torch.zeros(12)}, "whole numbers t"),
        ("train/labels.safetensors", {"x": torch.zeros(12)}, "whole numbers t"),
        ("test/labels.safetensors", {"t": torch.arange(12)}, "0 .. 1, but"),
        ("train/labels.safetensors", {"t": torch.tensor([0, 1])}, "shape (2, 2)"),
        ("train/node-00002.safetensors", None, "no such file"),
        ("train/node-00002.safetensors", b"", "no tensors with x"),
        ("test/node-00002.safetensors", {"y": torch.zeros(12, 2)}, "no tensors with x"),
        ("train/node-00002.safetensors", {"x": torch.zeros(12, 3)}, "of node 2, but has (12, 3)"),
    ],
)
def test_bad_data_are_found_before_anything_is_started(file, content, words, capsys):
    place = node_files("data") / file
    if content is None:
        place.unlink()
    elif isinstance(content, bytes):
        place.write_bytes(content)
    else:
        save_file(content, place)
    before = files()
    assert main(["launch", "--nodes", "4", "--data", "data"]) == 2
    assert words in told(capsys)
    assert main(["train", "--graph", "apart.toml", "--data", "data"]) == 2
    told(capsys)
    assert files() == before


# What goes wrong

BAD_FLAGS = [
    ["--layers", "0"],
    ["--layers", "1.5"],
    ["--layers", str(10**15)],
    ["--step", "0"],
    ["--step", "nan"],
    ["--network", "mlp"],
    ["--network", "ms1"],
    ["--network", ""],
    ["--activation", "tahn"],
    ["--init", "zeros"],
    ["--epochs", "0"],
    ["--epochs", "many"],
    ["--batch", "0"],
    ["--learning-rate", "0"],
    ["--learning-rate", "inf"],
    ["--schedule", "linear"],
    ["--warmup", "1"],
    ["--weight-decay", "-1"],
    ["--clip", "0"],
    ["--solver", "exact"],
    ["--solver", "auto"],
    ["--ridge", "0"],
    ["--smoothness", "nan"],
    ["--smoothing", "none"],
    ["--seed", "-1"],
    ["--seed", str(10**30)],
    ["--dtype", "float16"],
    ["--data", "swiss"],
    ["--data", ""],
    ["--data", "ring8.toml"],
    ["--out", "/dev/null"],
    ["--out", "taken"],
    ["--out", "x" * 300],
    ["--timeout", "0"],
    ["--timeout", "nan"],
    ["--timeout", "-1"],
    ["--save-every", "0"],
    ["--nonsense"],
]
LAUNCH = [
    [],
    ["--nodes", "0"],
    ["--nodes", "x"],
    ["--nodes", "33"],
    ["--nodes", "4", "--parts", "0"],
    ["--nodes", "4", "--parts", "5"],
    ["--nodes", "4", "--restarts", "-1"],
    ["--nodes", "4", "--graph", "ring8.toml"],
    ["--resume", "--out", "nowhere"],
    ["--resume", "--out", "damaged"],
    ["--resume"],
    ["--nodes", "4", "--features", "3"],
    ["--nodes", "4", "--optimizer", "sgd"],
    ["--nodes", str(10**12)],
]
TRAIN = [
    ["--graph", "ring8.toml", "--multilevel", "2"],
    ["--graph", "ring8.toml", "--T", "1"],
    ["--graph", "ring8.toml", "--seeds", "2"],
    ["--graph", "ring8.toml", "--target", "x"],
    ["--graph", "ring8.toml", "--config", "c.toml"],
    ["--graph", "ring8.toml", "--tensorboard"],
    ["--graph", "ring8.toml", "--device", "cpu"],
    ["--graph", "ring8.toml", "--optimizer", "adam"],
    ["--graph", "ring8.toml", "--patience", "3"],
    ["--graph", ""],
    ["--data", "swiss_roll", "--timeout", "5"],
    ["--data", "swiss_roll", "--save-every", "5"],
    ["--resume", "--out", "damaged"],
]


def bad_calls():
    for flags in BAD_FLAGS:
        yield ["launch", "--nodes", "4", *flags]
        yield ["train", "--graph", "ring8.toml", *flags]
    yield from (["launch", *flags] for flags in LAUNCH)
    yield from (["train", *flags] for flags in TRAIN)
    yield from (["graph", command] for command in ("check", "design", "draw", "chek"))
    yield ["graph"]
    yield ["graph", "check", "ring8.toml", "plain.toml"]
    yield ["graph", "check", "ring8.toml", "--nonsense"]


@pytest.mark.usefixtures("nobody_starts")
@pytest.mark.parametrize("arguments", [*bad_calls()], ids=lambda words: " ".join(words)[:60])
def test_bad_flags_are_one_sentence_and_start_nothing(arguments, capsys):
    for name, content in (("taken", "precious"), ("damaged", "{}")):
        Path(name).mkdir()
        Path(name, "config.json" if name == "damaged" else "notes").write_text(content)
    before = files()
    assert main(arguments) == 2
    told(capsys)
    assert files() == before


FILES = {
    "empty": b"",
    "binary": bytes(range(256)),
    "no toml": b"nodes: 8",
    "half": b"nodes = 8\nedges = [[0, 1], [1",
    "twice": b"nodes = 8\nnodes = 8\nR = []",
    "nodes only": b"nodes = 8",
    "no nodes": b"edges = [[0, 1]]",
    "a word": b"nodes = 'eight'\nR = []",
    "out of range": b"nodes = 3\nedges = [[0, 3]]",
    "negative": b"nodes = 3\nR = [[0, -1]]",
    "flat": b"nodes = 3\nedges = [0, 1, 2]",
    "nan": b"nodes = 2\nR = [[1, nan], [0, 1]]",
    "one way T": b"nodes = 3\nR = []\nT = [[1, 1, 0], [0, 1, 0], [0, 0, 1]]",
    "no diagonal": b"nodes = 3\nR = [[0, 1, 1], [1, 0, 1], [1, 1, 0]]",
    "huge": b"nodes = 100000000000000000000\nR = []",
    "huger": b"nodes = 0x" + b"f" * 5000 + b"\nR = []",
    "deep": b"nodes = 3\nR = " + b"[" * 5000,
    "sizes": b"nodes = 3\nR = []\nsizes = [1, 2]",
    "a date": b"nodes = 2020-01-01\nR = []",
    "a table": b"[nodes]\nR = []",
    "unknown": b"nodes = 3\nR = []\nweights = 3",
}


@pytest.mark.usefixtures("nobody_starts")
@pytest.mark.parametrize(
    "command",
    [["graph", "check"], ["graph", "draw"], ["train", "--graph"], ["launch", "--graph"]],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", [*FILES, "nothing", "a folder", "a name"])
def test_bad_files_are_one_sentence_and_exit_code_2(command, kind, capsys):
    file = Path("g.toml")
    if kind in FILES:
        file.write_bytes(FILES[kind])
    elif kind == "a folder":
        file.mkdir()
    elif kind == "a name":
        file = "a\0b.toml"
    before = files()
    assert main([*command, str(file)]) == 2
    told(capsys)
    assert files() == before


@pytest.mark.usefixtures("nobody_starts")
@pytest.mark.parametrize("file", ["tight.toml", "apart.toml"])
@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_graph_that_cannot_be_trained_on_is_refused(command, file, capsys):
    assert main([command, "--graph", file]) == 2
    told(capsys)


@given(st.binary(max_size=80) | st.text(alphabet="nodesedgRT=[]0123,.-\n ").map(str.encode))
def test_any_bytes_at_all_are_one_sentence_or_a_graph(content):
    with pytest.MonkeyPatch.context() as patch:
        Path("any.toml").write_bytes(content)
        said = []
        patch.setattr(terminal, "say", lambda message: said.append(str(message)))
        code = main(["graph", "check", "any.toml", "--json"])
        assert (code, len(said)) in ((0, 0), (2, 1))
        assert not any("mistake" in message for message in said)


@pytest.mark.parametrize("command", ["graph check", "graph design", "graph draw", "launch"])
def test_every_command_explains_itself_with_examples(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.partition("examples:")[2].count(f"hdnn {command}") >= 2


def test_help_names_the_defaults_of_the_library():
    """The numbers in the help of `launch` are those that are used."""
    import re
    from dataclasses import fields

    from hdnn.app.configs.flags import GraphTraining
    from hdnn.distributed.training import run
    from hdnn.distributed.training.training import DEFAULTS

    known = {**DEFAULTS, **run.OPTIONS, **Config(graph={}).__dict__}
    for option in (*fields(GraphTraining), *fields(Config)):
        found = re.search(r"default: ([\d.e-]+)", option.metadata.get("help", ""))
        if found:
            assert math.isclose(float(found[1]), known[option.name]), option.name


# Real processes


@pytest.mark.slow
def test_two_processes_come_to_what_one_does_and_say_nothing_else(capfd):
    write("g.toml", nodes=4, R=ring(4))
    flags = ["--graph", "g.toml", *QUICK]
    assert main(["train", *flags, "--out", "one", "--json"]) == 0
    one = json.loads(capfd.readouterr().out)
    assert main(["launch", *flags, "--parts", "2", "--out", "two", "--json"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    two = json.loads(captured.out)
    assert two["parts"] == 2
    assert two["messages"] == sum(count for _, _, count, _ in two["traffic"]) > 0
    assert [two[k] for k in ("loss", "test_accuracy")] == [
        one[k] for k in ("loss", "test_accuracy")
    ]
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()
    for node in range(4):
        (a,), (b,) = (Path(r, f"nodes/node-{node:05d}").iterdir() for r in ("one", "two"))
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.slow
def test_under_torchrun_one_process_speaks_for_all(stem, tmp_path):
    write("g.toml", nodes=4, R=ring(4))

    def started(*more):
        """Two processes with the environment that torchrun gives them."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = ["-m", "hdnn", "train", "--graph", "g.toml", *QUICK, *more]
        processes = [
            stem.fork(
                command,
                tmp_path / f"{more[-1]}-{rank}",
                environment=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                folder=os.getcwd(),
            )
            for rank in range(2)
        ]
        return [process.wait() for process in processes]

    done = started("--out", "r")
    assert [ended.code for ended in done] == [0, 0], done
    said = "".join(ended.output for ended in done)
    assert said.count("test accuracy") == 1
    assert "between parts" in said
    refused = started("--batch", "0")
    assert [ended.code for ended in refused] == [2, 2]
    assert "".join(ended.errors for ended in refused).count("hdnn: batch must be") == 1
