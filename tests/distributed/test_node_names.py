"""Nodes that have names: in files, in sentences, and in what is written."""

from __future__ import annotations

import pytest

from hdnn.distributed import Graph, Plan
from hdnn.distributed.graph import file as gf
from hdnn.distributed.graph.names import columns_of
from hdnn.distributed.training.run import name_of
from hdnn.errors import SparsityError

NAMES = ["pump", "valve", "tank"]
TABLE = {"names": NAMES, "edges": [["pump", "valve"], [1, "tank"], ["pump", "tank"]]}


def test_names_stand_for_numbers():
    found = gf.patterns_of({**TABLE, "R": [["pump", 1]], "sizes": 2})
    same = gf.patterns_of(
        {"nodes": 3, "edges": [[0, 1], [1, 2], [0, 2]], "R": [[0, 1]], "sizes": 2}
    )
    assert (found.R, found.T, found.S, found.sizes) == (same.R, same.T, same.S, same.sizes)
    assert found.names == tuple(NAMES)
    assert found.graph().digest() == same.graph().digest()


def test_a_table_with_names_is_written_and_read_again(tmp_path):
    table = {**TABLE, "R": [], "columns": {"flow": "pump", 'a "b"': 2, "ä.b": "valve"}}
    found = gf.patterns_of(table)
    path = tmp_path / "g.toml"
    path.write_text(gf.to_toml(gf.table_of(found)))
    again = gf.patterns_of(gf.read_table(path), str(path))
    assert again == found
    assert again.columns == {"flow": 0, 'a "b"': 2, "ä.b": 1}


def test_names_are_used_in_sentences_and_files():
    graph = gf.graph_of({**TABLE, "R": [["pump", "valve"]]})
    assert [graph.called(0), graph.key(1), graph.label(2)] == ["node pump", "valve", "tank"]
    plain = Graph.ring(3)
    assert [plain.called(0), plain.key(1), plain.label(2)] == ["node 0", "00001", "2"]
    assert name_of(Plan.each(graph))(2) == "node tank"
    assert name_of(Plan.whole(graph))(0) == "part 0 (nodes pump, valve, tank)"
    with pytest.raises(SparsityError, match="valve -> tank"):
        gf.graph_of({**TABLE, "edges": [["pump", "valve"]], "R": [["valve", "tank"]]})
    with pytest.raises(SparsityError, match="can be reached from node pump"):
        gf.graph_of({"names": NAMES, "R": []}).tree()
    with pytest.raises(SparsityError, match="there are 1 names, but the graph has 3 nodes"):
        Graph(plain.R[0], names=["one"])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"names": "pump"}, "must be a list of texts"),
        ({"names": ["a", 3]}, "has 3, but a name has"),
        ({"names": ["a", "3"]}, "is no number"),
        ({"names": ["a", "../b"]}, "a name has 1 to 64 letters"),
        ({"names": ["a", "b."]}, "a name has 1 to 64 letters"),
        ({"names": ["a", ""]}, "a name has 1 to 64 letters"),
        ({"names": ["a", "A"]}, "has 'a' and 'A'; give each node a name of its own"),
        ({"names": NAMES, "nodes": 4}, "names of the graph are 3, but there are 4 nodes"),
        ({**TABLE, "R": [["pump", "valv"]]}, "did you mean 'valve'?"),
        ({**TABLE, "R": [["pump", "x"]]}, "there are 'pump', 'valve', 'tank'."),
        ({**TABLE, "R": [["pump", "valve", "tank"]]}, "must be pairs of nodes"),
        ({**TABLE, "columns": 3}, "which node has which column"),
        ({**TABLE, "columns": {"a": "pmp"}}, "did you mean 'pump'?"),
        ({**TABLE, "columns": {"a": 3}}, "gives 'a' to 3, but nodes are numbers from 0 to 2"),
        ({**TABLE, "columns": {"a": True}}, "gives 'a' to True"),
        ({**TABLE, "columns": {"a": 1.5}}, "gives 'a' to 1.5"),
        ({**TABLE, "columns": {"pump": ["a"], "a": "tank"}}, "gives 'a' to two nodes"),
        ({**TABLE, "columns": {"pump": [1]}}, "must list names of columns for 'pump'"),
        ({**TABLE, "columns": {"nobody": ["a"]}}, "has 'nobody', but no node has that name"),
    ],
)
def test_a_wrong_name_is_told_in_one_sentence(table, words):
    with pytest.raises(SparsityError) as caught:
        gf.patterns_of({"edges": [[0, 1]], **table})
    assert words in str(caught.value)


def test_columns_are_given_by_column_or_by_node():
    table = {"columns": {"flow": "pump", "valve": ["opening", "age"], "2": ["level"], "w": 1}}
    found = {"flow": 0, "opening": 1, "age": 1, "level": 2, "w": 1}
    assert columns_of(table, NAMES, 3, "g") == found
    assert columns_of({"columns": {"1": ["a"], "b": 0, "c": "1"}}, (), 2, "g") == {
        "a": 1,
        "b": 0,
        "c": 1,
    }
