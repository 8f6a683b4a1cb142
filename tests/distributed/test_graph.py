"""Graphs from Python and from files, their plans, and one process that owns all nodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import hdnn
from hdnn.distributed import (
    Graph,
    GraphNetwork,
    Messages,
    Plan,
    Settings,
    partition,
    train,
    write_nodes,
)
from hdnn.distributed.nodes import entry_points
from hdnn.distributed.plan import Halo
from hdnn.errors import (
    CheckpointError,
    ConvergenceError,
    DataError,
    OptionError,
)


@st.composite
def graphs(draw) -> Graph:
    """Connected graphs of up to eight nodes of different sizes."""
    nodes = draw(st.integers(1, 8))
    links = [[i, draw(st.integers(0, i - 1))] for i in range(1, nodes)]
    ends = st.integers(0, nodes - 1)
    links += draw(st.lists(st.lists(ends, min_size=2, max_size=2), max_size=8))
    sizes = draw(st.lists(st.integers(1, 3), min_size=nodes, max_size=nodes))
    return Graph(nodes, R=links, sizes=sizes)


# Files


PLANT = """
names = ["pump", "valve", "tank"]
R = [["pump", "valve"], [1, "tank"]]
sizes = [2, 1, 1]

[columns]
flow = "pump"
valve = ["opening", "age"]
"2" = ["level"]
"""


def test_a_file_gives_nodes_names_links_and_columns(tmp_path):
    path = tmp_path / "plant.toml"
    path.write_text(PLANT)
    graph = Graph.read(path)
    assert graph.R == [[0, 1], [0, 1, 2], [1, 2]]
    assert graph.columns == {"flow": 0, "opening": 1, "age": 1, "level": 2}
    assert (graph.label(2), graph.key(2), graph.features) == (
        "tank",
        "node-tank",
        8,
    )
    assert Graph.of(graph.table()).table() == graph.table()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = ", "cannot read the graph .*, a TOML file"),
        ("R = [[0, 1]]", "nodes must be a whole number"),
        (
            "nodes = 3\nlinks = []",
            "the key 'links' is not known; choose one of R, columns",
        ),
        ("nodes = 3", "R is missing"),
        ("nodes = 0\nR = []", "nodes must be a whole number"),
        ("nodes = 3\nR = 7", "R must be pairs of nodes, but is 7"),
        ("nodes = 3\nR = [[0]]", r"R must be pairs of nodes, but is \[\[0\]\]"),
        ("nodes = 3\nR = [[0, 3]]", "R has 3, but nodes are 0 to 2"),
        ("nodes = 3\nR = [[0, 1.5]]", "R has 1.5, but nodes are 0 to 2"),
        ("nodes = 3\nR = [[0, true]]", "R has True"),
        ('nodes = 3\nedges = [[0, "pump"]]', "edges has 'pump'"),
        ('names = ["a", "A"]\nR = []', "names has 'A', but .* once"),
        ('names = ["../x"]\nR = []', "but a name has 1 to 64 letters"),
        ('names = ["a"]\nnodes = 2\nR = []', "there are 1 names, but 2 nodes"),
        ("nodes = 2\nR = []\nsizes = [1]", "sizes must be 2 whole numbers"),
        ("nodes = 2\nR = []\nsizes = 0", "the size of a node"),
        (
            "nodes = 2\nR = []\n[columns]\nx = 0\n1 = ['x']",
            "assigns 'x' to two nodes",
        ),
        (
            "nodes = 3\nR = [[1, 0, 0], [0, 0, 0], [0, 0, 1]]",
            "its own neighbour",
        ),
        (
            "nodes = 3\nR = []\nT = [[0, 1]]",
            "the key 'T' is not known",
        ),
        ("nodes = 300_000\nR = []", "up to 200000 nodes"),
    ],
)
def test_mistakes_in_a_file_are_sentences(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises((DataError, OptionError), match=message):
        Graph.read(path)


def test_a_file_that_is_not_there_or_not_text_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match="cannot read the graph"):
        Graph.read(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="a TOML file"):
        Graph.read(tmp_path / "bytes.toml")


def test_rows_of_a_matrix_may_differ_from_its_columns():
    graph = Graph(3, R=[[1, 1, 0], [0, 1, 1], [0, 0, 1]])
    assert graph.R == [[0, 1], [1, 2], [2]]
    assert graph.used == [[0, 1], [0, 1, 2], [1, 2]]
    assert Graph.of(graph.table()).R == graph.R


@pytest.mark.parametrize(
    ("R", "expected"),
    [
        ([[1, 0], [0, 1]], [[0, 1], [0, 1]]),
        ([[0, 1], [1, 0]], [[0, 1], [0, 1]]),
        ([[1, 1], [0, 1]], [[0, 1], [1]]),
        (torch.eye(2), [[0], [1]]),
    ],
)
def test_links_of_two_nodes_are_not_taken_for_a_matrix(R, expected):
    graph = Graph(2, R=R)
    assert expected == graph.R
    assert expected == Graph.of(graph.table()).R


def test_without_r_it_is_designed_for_the_edges():
    graph = Graph(4, edges=[[0, 1], [1, 2], [2, 3], [3, 0]])
    graph.check()
    assert graph.breaches() == []


def test_a_graph_that_is_not_local_says_which_nodes_need_which():
    ring = [[i, (i + 1) % 5] for i in range(5)]
    graph = Graph(5, edges=ring, R=ring)
    assert len(graph.breaches()) == 10
    with pytest.raises(
        OptionError, match=r"nodes would need 0 -> 2, .* row 1 of R has 0 and 2"
    ):
        train(graph)


def test_a_graph_in_two_pieces_is_refused_unless_edges_join_them():
    with pytest.raises(OptionError, match="2 connected components"):
        Graph(4, R=[[0, 1], [2, 3]]).check()
    joined = Graph(4, R=[[0, 1], [2, 3]], edges=[[0, 1], [2, 3], [1, 2]])
    joined.check()
    assert Plan(joined, [0, 0, 1, 1], rank=1).peers == [0]


def test_a_hub_of_too_many_links_is_refused_before_it_takes_all_memory():
    star = [[0, k] for k in range(1, 10_000)]
    with pytest.raises(OptionError, match="give that row fewer links"):
        Graph(10_000, R=star, edges=star).check()


# Plans


@given(graphs(), st.integers(1, 8))
def test_all_processes_together_own_all_nodes_and_agree_on_messages(
    graph, parts
):
    parts = min(parts, graph.nodes)
    owner = partition(graph, parts)
    plans = [Plan(graph, owner, rank) for rank in range(parts)]
    assert sorted(node for plan in plans for node in plan.nodes) == list(
        range(graph.nodes)
    )
    assert [plan.rank for plan in plans if plan.is_root] == [owner[0]]
    halos = [Halo(plan) for plan in plans]
    for plan, halo in zip(plans, halos, strict=True):
        assert set(halo.send) | set(halo.receive) <= set(plan.peers)
        assert {*plan.children, plan.parent} - {None} <= set(plan.peers)
        for peer, (first, last) in halo.receive.items():
            assert len(halos[peer].send[plan.rank]) == last - first
    below = [child for plan in plans for child in plan.children]
    assert sorted([*below, owner[0]]) == list(range(parts))


def test_more_processes_than_nodes_are_refused():
    with pytest.raises(
        OptionError, match="2 nodes cannot be shared by 3 processes"
    ):
        partition(Graph.ring(2), 3)


@pytest.mark.parametrize(
    ("nodes", "links", "parts"),
    [(2, [], 2), (4, [[0, 1], [2, 3]], 2), (5, [[0, 1], [1, 2]], 3)],
)
def test_processes_that_no_links_join_are_refused(nodes, links, parts):
    graph = Graph(nodes, R=links)
    with pytest.raises(OptionError, match="connected components"):
        partition(graph, parts)
    owner = [node * parts // nodes for node in range(nodes)]
    for rank in range(parts):
        with pytest.raises(OptionError, match="cannot learn together"):
            Plan(graph, owner, rank)


@pytest.mark.parametrize(("owner", "rank"), [([0, 0, 2], 0), ([0, 0, 0], 1)])
def test_a_process_without_a_node_is_refused(owner, rank):
    with pytest.raises(OptionError, match="every process needs a node"):
        Plan(Graph.ring(3), owner, rank)


# One process


def alone(graph: Graph, **options) -> GraphNetwork:
    plan = Plan(graph, [0] * graph.nodes)
    return GraphNetwork(plan, Messages(plan), dtype=torch.float64, **options)


@settings(max_examples=25)
@given(
    graphs(),
    st.sampled_from(["h1", "h2", "verlet", "yoshida4"]),
    st.integers(0, 99),
)
def test_one_process_computes_what_the_sparse_network_does(
    graph, network, seed
):
    net = alone(graph, network=network, layers=2, activation="softplus")
    net.reset_parameters(seed)
    whole = net.gather()
    assert whole is not None
    y = torch.randn(3, graph.features, dtype=torch.float64)
    assert torch.allclose(
        net(y[:, net.positions]), whole(y)[:, net.positions], atol=1e-12
    )
    again = alone(graph, network=network, layers=2, activation="softplus")
    again.load(whole)
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_double_backward_passes_through_the_layers():
    net = alone(Graph.ring(3), layers=2)
    net.reset_parameters(0)
    y = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(net, (y,))


def test_the_gathered_model_predicts_what_was_measured():
    metrics = train(
        Graph.ring(4), "double_moons", layers=2, epochs=2, gather=True
    )
    data = hdnn.data.planar.double_moons()
    right = (
        (metrics["model"].predict(data.x_test) == data.t_test).double().mean()
    )
    assert metrics["test_accuracy"] == right
    assert metrics["test_accuracy"] > 0.85
    assert "model" not in train(Graph.ring(2), "double_moons", epochs=1)


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    class StopError(Exception):
        pass

    def stop(news):
        if news["epoch"] == 3:
            raise StopError

    options = {"layers": 2, "epochs": 4, "batch": 1000, "gather": True}
    with pytest.raises(StopError):
        train(
            Graph.ring(3),
            "double_moons",
            folder=tmp_path / "a",
            tell=stop,
            **options,
        )
    with pytest.raises(
        CheckpointError, match="holds a training run; resume it"
    ):
        train(Graph.ring(3), "double_moons", folder=tmp_path / "a", **options)
    other = {**options, "layers": 3}
    with pytest.raises(CheckpointError, match="different training run"):
        train(
            Graph.ring(3),
            "double_moons",
            folder=tmp_path / "a",
            resume=True,
            **other,
        )
    two = train(
        Graph.ring(3),
        "double_moons",
        folder=tmp_path / "a",
        resume=True,
        **options,
    )
    one = train(Graph.ring(3), "double_moons", **options)
    assert one["history"] == two["history"]
    first, second = (run["model"].state_dict() for run in (one, two))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_large_networks_train_the_output_layer_along():
    graph = Graph.ring(8)
    options = {
        "solver": "joint",
        "layers": 2,
        "epochs": 8,
        "clip": None,
        "ridge": 0.0,
    }
    metrics = train(graph, "double_moons", gather=True, **options)
    assert metrics["history"]["loss"][-1] < metrics["history"]["loss"][0]
    assert metrics["test_accuracy"] > 0.8
    data = hdnn.data.planar.double_moons()
    right = (
        (metrics["model"].predict(data.x_test) == data.t_test).double().mean()
    )
    assert metrics["test_accuracy"] == right


def test_a_training_that_diverges_says_so():
    with pytest.raises(ConvergenceError, match="not finite in epoch 1"):
        train(
            Graph.ring(2),
            "double_moons",
            activation="relu",
            gain=1e30,
            epochs=1,
        )


def test_unknown_options_are_refused():
    with pytest.raises(OptionError, match="network 'h3'"):
        train(Graph.ring(2), network="h3")
    assert Settings().network == "h2"


# Node files


def rows(graph: Graph, classes: int, tmp_path, **more):
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    t = (
        (x.sum(1) > 0).long()
        if classes == 2
        else (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    )
    t = x.sum(1) if classes == 0 else t
    places = [0, graph.sizes[0], graph.features - 1]
    for part in ("train", "test"):
        write_nodes(
            tmp_path, graph, x, t, places, classes=classes, part=part, **more
        )
    return x, t, places


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_each_node_reads_its_own_file_and_the_model_takes_rows_of_the_table(
    classes, tmp_path
):
    graph = Graph(
        names=["a", "b", "c"], R=[["a", "b"], ["b", "c"]], sizes=[1, 2, 1]
    )
    x, t, places = rows(graph, classes, tmp_path)
    metrics = train(
        graph, tmp_path, layers=2, epochs=5, placement=places, gather=True
    )
    predicted = metrics["model"].predict(x)
    if classes == 0:
        loss = float((predicted[:, 0] - t).square().mean())
        assert metrics["test_loss"] == pytest.approx(loss, rel=1e-4)
        assert metrics["test_loss"] < 0.1
    else:
        assert metrics["test_accuracy"] == float(
            (predicted == t).double().mean()
        )
        assert metrics["test_accuracy"] > 0.85
        common = t.mode().values
        share = float((t == common).double().mean())
        assert metrics["baseline_accuracy"] == share
        assert metrics["baseline"].startswith(f"always answering {common} ")
        assert metrics["never_predicted"] == []


def test_mistakes_in_node_files_are_sentences(tmp_path):
    graph = Graph.ring(3)
    rows(graph, 2, tmp_path)
    good = torch.zeros(300, 2)
    path = tmp_path / "train" / "node-00001.safetensors"

    def fails(message: str, **tensors):
        save_file(tensors, path)
        with pytest.raises(DataError, match=message):
            train(graph, tmp_path, epochs=1)

    fails(r"must hold x \(300, 2\)", x=torch.zeros(300, 3))
    fails(r"must hold x \(300, 2\)", y=good)
    fails("without gaps", x=good / 0)
    fails(r"must hold x \(300, 2\).* x has \(200, 2\)", x=good[:200])
    fails("differ in their id", x=good, id=torch.arange(300))
    path.write_bytes(b"no tensors")
    with pytest.raises(DataError, match="cannot read"):
        train(graph, tmp_path, epochs=1)
    save_file({"x": good}, path)
    save_file(
        {"t": torch.full((300,), 2)}, tmp_path / "train" / "labels.safetensors"
    )
    with pytest.raises(DataError, match=r"a label in 0 \.\. 1"):
        train(graph, tmp_path, epochs=1)


def test_points_enter_at_two_nodes_of_the_graph():
    assert entry_points(Graph.ring(8)) == [0, 12]
