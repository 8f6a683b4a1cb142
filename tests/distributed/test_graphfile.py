"""Graphs in TOML files: what can be said, and every way to say it wrong."""

from __future__ import annotations

import math
import os
import pickle
import tomllib
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphs import RING, TWO_STEPS, patterns
from hdnn.distributed import Graph, read_graph
from hdnn.distributed.graph import file as gf
from hdnn.distributed.graph.graph import alone, from_edges
from hdnn.errors import HDNNError, SparsityError

EYE = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


# What can be said


def test_a_file_is_the_graph_that_it_describes(tmp_path):
    file = tmp_path / "ring8.toml"
    file.write_text(f"nodes = 8\nedges = {TWO_STEPS}\nR = {RING} # the paper's\nsizes = 2\n")
    graph = read_graph(file)
    assert (
        graph.digest() == Graph(from_edges(8, RING), S=from_edges(8, TWO_STEPS), sizes=2).digest()
    )
    file.write_text("\ufeffnodes = 3\r\nR = []\r\nsizes = [1, 2, 3]\r\n", encoding="utf-8")
    graph = read_graph(file)
    assert graph.digest() == Graph(alone(3), sizes=[1, 2, 3]).digest()


def test_a_pattern_is_a_list_of_links_or_a_matrix():
    links = {"nodes": 3, "R": [[0, 1]], "T": [[1, 2]]}
    matrices = {"nodes": 3, "R": [[1, 1, 0], [1, 1, 0], [0, 0, 1]]}
    matrices["T"] = [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert gf.patterns_of(links) == gf.patterns_of(matrices)
    one_way = gf.patterns_of({"nodes": 3, "R": [[1, 1, 0], [0, 1, 0], [0, 0, 1]]})
    assert one_way.R == ((0, 1), (1,), (2,))


def test_two_pairs_of_two_nodes_are_no_matrix_but_the_identity_is():
    def read(nodes, R):
        return gf.patterns_of({"nodes": nodes, "R": R}).R

    both = ((0, 1), (0, 1))
    assert read(2, [[0, 1], [1, 0]]) == both
    assert read(2, [[0, 1]]) == both
    assert read(2, [[1, 1], [1, 1]]) == both
    assert read(2, [[1, 0], [0, 1]]) == alone(2)
    assert read(1, [[1]]) == alone(1)


def test_a_link_named_twice_and_a_link_to_oneself_change_nothing():
    once = gf.patterns_of({"nodes": 3, "edges": [[0, 1], [1, 2]], "R": [[0, 1]]})
    twice = gf.patterns_of(
        {"nodes": 3, "edges": [[0, 1], [1, 0], [0, 1], [2, 2], [2, 1]], "R": [[1, 0], [0, 1]]}
    )
    assert once == twice


def test_without_R_the_one_with_most_weights_is_designed_and_joins_all_nodes():
    found = gf.patterns_of({"nodes": 5, "edges": [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [0, 2]]})
    graph = found.graph()  # which checks that it is local
    assert sum(map(len, found.R)) > 5
    assert max(graph.tree().depth) < 5
    assert all(depth >= 0 for depth in Graph(found.R).tree().depth)
    heavy = gf.patterns_of({"nodes": 3, "edges": [[0, 1], [1, 2]], "sizes": [9, 1, 1]})
    assert heavy.R[1] == (0, 1)  # and not 1, 2: node 0 has more to link


@given(patterns())
def test_what_is_written_is_read_back(found):
    table = gf.table_of(found)
    text = gf.to_toml(table)
    assert tomllib.loads(text) == table
    assert gf.patterns_of(tomllib.loads(text)) == found
    assert max(map(len, text.splitlines())) <= 200


def test_long_lists_are_broken_into_lines():
    table = gf.table_of(gf.patterns_of({"nodes": 40, "R": [[i, i + 1] for i in range(39)]}))
    text = gf.to_toml(table)
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 10
    assert tomllib.loads(text) == table


# What goes wrong

WRONG = [
    ({}, "how many nodes"),
    ({"nodes": 0, "R": []}, "from 1 to"),
    ({"nodes": -1, "R": []}, "but is -1"),
    ({"nodes": 2.0, "R": []}, "but is 2.0"),
    ({"nodes": True, "R": []}, "but is True"),
    ({"nodes": "8", "R": []}, "but is '8'"),
    ({"nodes": [8], "R": []}, "but is [8]"),
    ({"nodes": 10**12, "R": []}, "from 1 to 1000000"),
    ({"nodes": 16**5000, "R": []}, "a huge number"),
    ({"nodes": 3}, "neither edges nor R"),
    ({"nodes": 3, "T": []}, "neither edges nor R"),
    ({"nodes": 3, "edges": [], "T": []}, "a T but no R"),
    ({"nodes": 3, "edges": [], "S": []}, "'S'"),
    ({"nodes": 3, "Nodes": 3, "R": []}, "'Nodes'"),
    ({"nodes": 3, "edges": 1}, "but is 1"),
    ({"nodes": 3, "edges": "ring"}, "but is 'ring'"),
    ({"nodes": 3, "edges": {"0": 1}}, "pairs of nodes"),
    ({"nodes": 3, "edges": [0, 1]}, "but has 0"),
    ({"nodes": 3, "edges": ["01"]}, "but has '01'"),
    ({"nodes": 3, "edges": [[0]]}, "but has [0]"),
    ({"nodes": 3, "edges": [[0, 1, 2]]}, "but has [0, 1, 2]"),
    ({"nodes": 3, "edges": [[]]}, "but has []"),
    ({"nodes": 3, "edges": [[0, 3]]}, "from 0 to 2, but has [0, 3]"),
    ({"nodes": 3, "edges": [[0, -1]]}, "but has [0, -1]"),
    ({"nodes": 3, "edges": [[0, 1.0]]}, "but has [0, 1.0]"),
    ({"nodes": 3, "edges": [[0, True]]}, "but has [0, True]"),
    ({"nodes": 3, "edges": [[0, "1"]]}, "but has [0, '1']"),
    ({"nodes": 3, "edges": [[0, math.nan]]}, "but has [0, nan]"),
    ({"nodes": 3, "edges": [[0, 10**30]]}, "pairs of nodes from 0 to 2"),
    ({"nodes": 3, "edges": [[0, 16**5000]]}, "a huge number"),
    ({"nodes": 3, "edges": EYE}, "but has [1, 0, 0]"),
    ({"nodes": 3, "R": [[1, 0, 0], [0, 1, 0]]}, "3 rows of 3 zeros and ones"),
    ({"nodes": 3, "R": [[1, 0, 0], [0, 1, 0], [0, 0, 2]]}, "row 2 has 2"),
    ({"nodes": 3, "R": [[1, 0, 0], [0, 1, 0], [0, 0, -1]]}, "row 2 has -1"),
    ({"nodes": 3, "R": [[1, 0, 0], [0, 1, math.nan], [0, 0, 1]]}, "row 1 has nan"),
    ({"nodes": 3, "R": [[1, 0, 0], [0, 1, math.inf], [0, 0, 1]]}, "row 1 has inf"),
    ({"nodes": 3, "R": [[1, 0, 0], [0, 1, "0"], [0, 0, 1]]}, "row 1 has '0'"),
    ({"nodes": 3, "R": [[1, 0, 0], [0, 1, []], [0, 0, 1]]}, "row 1 has []"),
    ({"nodes": 3, "R": [[0, 1, 1], [1, 0, 1], [1, 1, 0]]}, "its own neighbour"),
    ({"nodes": 3, "R": [], "T": [[1, 1, 0], [0, 1, 0], [0, 0, 1]]}, "T must be symmetric"),
    ({"nodes": 3, "R": [], "T": 7}, "T of the graph must be pairs"),
    ({"nodes": 3, "R": [], "sizes": 0}, "there is 0"),
    ({"nodes": 3, "R": [], "sizes": 1.5}, "there is 1.5"),
    ({"nodes": 3, "R": [], "sizes": True}, "there is True"),
    ({"nodes": 3, "R": [], "sizes": [1, 2]}, "are 2, but there are 3 nodes"),
    ({"nodes": 3, "R": [], "sizes": [1, 2, "3"]}, "there is '3'"),
    ({"nodes": 3, "R": [], "sizes": [1, 2, -3]}, "there is -3"),
    ({"nodes": 3, "R": [], "sizes": {}}, "there is {}"),
    ({"nodes": 3, "R": [], "sizes": 10**18}, "from 1 to 1000000000"),
    ({"nodes": 3, "edges": [[0, 1]], "R": [[0, 1], [1, 2]]}, "locality condition"),
    ({"nodes": 2000, "edges": []}, "give R"),
]


@pytest.mark.parametrize(("table", "words"), WRONG)
def test_a_wrong_table_is_told_in_one_short_sentence(table, words):
    with pytest.raises(SparsityError) as caught:
        gf.graph_of(table)
    said = str(caught.value)
    assert words in said
    assert "\n" not in said
    assert len(said) < 300


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([10**30, 2**63, 1e400, "", "R", "0"])
    | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)
ROWS = st.lists(st.lists(st.integers(-1, 4), min_size=1, max_size=4), max_size=4)


@settings(max_examples=150)
@given(
    st.fixed_dictionaries(
        {"nodes": st.integers(0, 4) | VALUES},
        optional=dict.fromkeys(("edges", "R", "T", "sizes", "other"), ROWS | VALUES),
    )
)
def test_any_table_is_a_graph_or_an_error_of_its_own(table):
    try:
        nodes = gf.graph_of(table).nodes
    except HDNNError:
        return
    assert nodes == table["nodes"]


@settings(max_examples=80)
@example(b"")
@example(b"\x00")
@example(b"\xff\xfe")
@example(b"nodes = " + b"9" * 5000)
@example(b"nodes = 0x" + b"f" * 5000)
@example(b"nodes = 2\nR = " + b"[" * 3000)
@example(b"nodes = 2\nR = [[0, nan]]")
@example(b"nodes = 1979-05-27\nR = []")
@given(st.binary(max_size=100) | st.text(alphabet="nodesRT=[]0123,.-\n ").map(str.encode))
def test_any_bytes_are_a_graph_or_an_error_of_its_own(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    said = ""
    try:
        read_graph(file)
    except HDNNError as error:
        said = str(error)
    assert len(said) < 300


def test_what_cannot_be_read_is_told(tmp_path, monkeypatch):
    for place, words in (
        (tmp_path / "nothing.toml", "No such file"),
        (tmp_path, "Is a directory"),
        ("a\0b", "null"),
        ("x" * 300, "too long"),
    ):
        with pytest.raises(SparsityError, match=words):
            read_graph(place)
    with pytest.raises(HDNNError, match="a path must be"):
        read_graph(7)  # type: ignore[arg-type]
    file = tmp_path / "large.toml"
    file.write_bytes(b"#" * 100)
    monkeypatch.setattr(gf, "LARGEST_FILE", 99)
    with pytest.raises(SparsityError, match="too large"):
        read_graph(file)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no /dev/zero")
def test_a_file_without_an_end_is_too_large(monkeypatch):
    monkeypatch.setattr(gf, "LARGEST_FILE", 2**16)
    with pytest.raises(SparsityError, match="too large"):
        read_graph(Path("/dev/zero"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_into_which_nobody_writes_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SparsityError, match="does not say how many nodes"):
        read_graph(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = 1000000000\nR = []", "from 1 to 1000000, but is 1000000000"),
        ("nodes = -3\nR = []", "but is -3"),
        ("nodes = nan\nR = []", "but is nan"),
        ("nodes = inf\nR = []", "but is inf"),
        ("nodes = true\nR = []", "but is True"),
        ("nodes = 3\nsizes = 10000000000\nR = []", "but there is 10000000000"),
        (f"nodes = 3\nR = [[0, {10**30}]]", "pairs of nodes from 0 to 2"),
        ("nodes = 3\nR = [[0, 1.5]]", "pairs of nodes from 0 to 2"),
        ("nodes = 3\nR = [[0, true]]", "pairs of nodes from 0 to 2"),
        ("nodes = 3\nR = [[[0, 1]]]", "pairs of nodes from 0 to 2"),
        ("nodes = 3\nR = [[0, 1], 2]", "but has 2"),
        ('nodes = 3\nR = "all"', "but is 'all'"),
        ("nodes = 3\nR = " + "[" * 10**5 + "]" * 10**5, "no valid TOML"),
        ("nodes = 3\nR = [[0, " + "9" * 10**5 + "]]", "no valid TOML"),
        ("nodes = 3\nR = []\n" + "x" * 10**5 + " = 1", "but only nodes, edges, R, T, sizes"),
        ('nodes = 3\nR = "' + "x" * 10**5 + '"', "but is 'xxx"),
        ("nodes = 3\nnodes = 4\nR = []", "no valid TOML"),
    ],
    ids=map(str, range(17)),
)
def test_hostile_files_are_refused_at_once_in_one_sentence(tmp_path, text, words):
    file = tmp_path / "hostile.toml"
    file.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(SparsityError, match=words) as error:
            read_graph(file)
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


def test_links_that_are_named_twice_and_links_to_oneself_change_nothing(tmp_path):
    file = tmp_path / "twice.toml"
    file.write_text("nodes = 3\nR = [[0, 1], [1, 0], [0, 1], [2, 2]]\nedges = [[0, 1], [1, 2]]")
    assert gf.read_table(file)["R"] == [[0, 1], [1, 0], [0, 1], [2, 2]]
    assert gf.patterns_of(gf.read_table(file)).R == ((0, 1), (0, 1), (2,))


PIECES = (
    "nodes",
    "R",
    "=",
    " ",
    "\n",
    "\t",
    "\r\n",
    "[",
    "]",
    ",",
    "-",
    "0",
    "1",
    "12",
    "# a, [\n",
)


@settings(max_examples=120)
@example("nodes = 8 # eight\nR = [ # links\n  [0, 1], [1,2],\n]\n")
@example("nodes = 08")
@example("nodes = 8 R = []")
@example("R = [,]")
@example("R = [[1,],]")
@example("R = []\nR = []")
@example("nodes = 8\r\nR = []\r\n")
@example("nodes = 8\rR = []")
@example("nodes = 8 # \x00\nR = []")
@example("nodes = \u0663\nR = [\u00a01]")
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_the_quick_way_to_read_finds_what_tomllib_finds(text):
    try:
        expected = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        expected = None
    assert gf._plain(text) in (None, expected)


def test_the_quick_way_is_taken_for_lists_of_links():
    text = gf.to_toml({"nodes": 40, "R": [[i, i + 1] for i in range(39)], "sizes": 2})
    assert gf._plain(f"# a path\n{text}") == tomllib.loads(text)


def test_a_large_file_of_anything_else_is_refused_before_it_is_read(tmp_path, monkeypatch):
    file = tmp_path / "other.toml"
    file.write_text("nodes = 2\nR = [[0, 1.0]]\n")
    monkeypatch.setattr(gf, "LARGEST_TEXT", 20)
    with pytest.raises(SparsityError, match="too large for a graph that says more than"):
        read_graph(file)
    file.write_text("nodes = 2\nR = [[0, 1]]\n")
    assert read_graph(file).nodes == 2


def test_a_graph_pickled_when_its_module_had_another_place_is_read_back(tmp_path):
    file = tmp_path / "path.toml"
    file.write_text("nodes = 3\nedges = [[0, 1], [1, 2]]\n")
    graph = read_graph(file)
    here = b"hdnn.distributed.graph.graph\nGraph"
    pickled = pickle.dumps(graph, protocol=0)
    assert here in pickled
    before = pickle.loads(pickled.replace(here, b"hdnn.distributed.graph\nGraph"))
    assert (type(before), before.R, before.S) == (Graph, graph.R, graph.S)
