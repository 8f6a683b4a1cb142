"""The benchmark of graph transfer sets the task that it says, and its tutorial runs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="needs torch_geometric"
)


@pytest.fixture(scope="module")
def transfer():
    """The program as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("transfer")


def distances(edges: torch.Tensor, nodes: int) -> torch.Tensor:
    """Of all nodes from node 0."""
    found, reached = torch.full((nodes,), -1), torch.zeros(nodes, dtype=torch.bool)
    reached[0], hops = True, 0
    while (found < 0).any() and hops <= nodes:
        found[reached & (found < 0)] = hops
        reached[edges[1][reached[edges[0]]]] = True
        hops += 1
    return found


@pytest.mark.parametrize("hops", [3, 10, 50])
@pytest.mark.parametrize("kind", ["line", "ring", "crossed ring"])
def test_the_target_is_the_farthest_node_and_as_many_hops_away(transfer, kind, hops):
    edges, nodes, target = transfer.graph_of(kind, hops)
    far = distances(edges, nodes)
    assert far[target] == hops == far.max()
    assert (far == hops).sum() == 1
    assert nodes == (hops + 1 if kind == "line" else 2 * hops)


@pytest.mark.parametrize("kind", ["line", "ring", "crossed ring"])
def test_edges_go_both_ways_once_and_never_to_the_node_itself(transfer, kind):
    edges, nodes, target = transfer.graph_of(kind, 50)
    pairs = set(map(tuple, edges.T.tolist()))
    assert len(pairs) == edges.shape[1]
    assert pairs == {(j, i) for i, j in pairs}
    assert all(i != j for i, j in pairs)
    degree = torch.bincount(edges[0], minlength=nodes)
    ends, others = degree[[0, target]], degree.unique().tolist()
    assert others == {"line": [1, 2], "ring": [2], "crossed ring": [2, 3, 4]}[kind]
    assert (ends == degree.min()).all()


def test_source_and_target_swap_and_the_others_keep_what_they_have(transfer):
    generator = torch.Generator().manual_seed(0)
    x, wanted = (t.view(4, 20) for t in transfer.batch_of(20, 10, 4, generator))
    assert (x[:, 0] == 1).all()
    assert (x[:, 10] == 0).all()
    assert (wanted[:, 0] == 0).all()
    assert (wanted[:, 10] == 1).all()
    others = [i for i in range(20) if i not in (0, 10)]
    assert torch.equal(x[:, others], wanted[:, others])
    assert 0 <= x[:, others].min() < 0.1 < 0.4 < x[:, others].max() < 0.5


def test_a_carried_value_is_random_and_only_the_source_has_it(transfer):
    generator = torch.Generator().manual_seed(0)
    x, wanted = (t.view(50, 6) for t in transfer.batch_of(6, 3, 50, generator, carried=True))
    assert torch.equal(x[:, 0], wanted[:, 3])
    assert (x[:, 3] == 0).all()
    assert 0.5 <= x[:, 0].min() < 0.6 < 0.9 < x[:, 0].max() < 1


def test_graphs_of_a_batch_have_no_edges_between_them(transfer):
    edges, nodes, _ = transfer.graph_of("ring", 5)
    both = transfer.union(edges, nodes, 3)
    assert both.shape == (2, 3 * edges.shape[1])
    assert torch.equal(both[0] // nodes, both[1] // nodes)
    assert int(both.max()) == 3 * nodes - 1


@pytest.mark.parametrize("kind", ["line", "ring", "crossed ring"])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_waves_arrive_at_the_target_in_the_last_layer(transfer, kind, aggr):
    edges, nodes, target = transfer.graph_of(kind, 12)
    setting = {"kind": "wave", "conv": aggr}
    net = transfer.network("hdnn", kind, setting, 8, 12)
    q = torch.zeros(nodes, 4)
    q[0] = 1e-3
    states = net.layers.trajectory(torch.cat([torch.zeros_like(q), q], -1), edges)
    at_target = states[:, target, 4:]
    assert (at_target[:12] == 0).all()  # no layer is faster than one hop
    least = 0.8e-3 if aggr == "mean" or kind == "ring" else 0.2e-3
    assert (at_target[12, 2:] > least).all()
    assert (states[:, 1:, 4:6] == 0).all()  # the other features stay where they are
    assert states[6:, 0, 4:6].abs().amax(0).min() > 0.9e-3


def test_swan_is_antisymmetric_in_space_and_in_weights(transfer):
    models = importlib.import_module("transfer_models")
    edges, nodes, _ = transfer.graph_of("line", 5)
    swan = models.SWAN(4, 0.1, 1.0, False, gamma=0.0)
    x = torch.randn(nodes, 4, requires_grad=True)
    # At 0 the slope of tanh is 1: the Jacobian of the field is the matrix itself.
    jacobian = torch.autograd.functional.jacobian(
        lambda x: (swan(x, edges) - x) / 0.1, torch.zeros_like(x)
    ).reshape(nodes * 4, nodes * 4)
    torch.testing.assert_close(jacobian, -jacobian.T, rtol=1e-5, atol=1e-5)


def test_all_settings_train_and_can_be_told_from_the_others(transfer):
    sizes = transfer.SIZES["quick"]
    for model, settings in transfer.SETTINGS.items():
        assert len({json.dumps(setting) for setting in settings}) == len(settings)
        for setting in settings:
            row = transfer.trained(
                model, "crossed ring", setting, 0, 1, sizes, hops=3, count=2, part="search"
            )
            assert 0 < row["mse"] < 100


def test_undone_layers_keep_no_more_when_there_are_more(transfer):
    sizes = transfer.SIZES["quick"] | {"d": 16, "deep": 20, "batch": 4}

    def kept(depth: int, how: str) -> float:
        return transfer.saved(transfer.deep_network(depth, sizes, backprop=how), sizes)

    assert kept(40, "reversible") == kept(4, "reversible")
    assert kept(40, "stored") > 5 * kept(4, "stored")


def test_a_quick_run_writes_what_it_found_and_goes_on_where_it_was(
    transfer, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["transfer.py", "--quick", "--out", str(tmp_path)])

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "deep", broken)
        with pytest.raises(KeyboardInterrupt):
            transfer.main()
    rows = (tmp_path / "transfer-quick.jsonl").read_text().splitlines()
    monkeypatch.setattr(transfer, "PEAK", "print(1.5)")  # its own test is below
    capsys.readouterr()
    assert transfer.main() == 0
    printed = capsys.readouterr().out
    assert not printed.startswith("line, none, 0")  # nothing was trained again
    result = json.loads((tmp_path / "transfer-cpu.json").read_text())
    page = (tmp_path / "transfer-cpu.md").read_text()
    assert page in printed
    assert len(rows) == len(result["tried"]) + len(result["rows"]) + len(result["carried"])
    assert {row["seed"] for row in result["tried"]} == {0}
    assert {row["seed"] for row in result["rows"]} == {1, 2}
    assert {row["graph"] for row in result["rows"]} == {"line", "ring", "crossed ring"}
    assert all(row["peak_MiB"] == 1.5 for row in result["deep"]["memory"])
    assert result["deep"]["reversed_off"] < 1e-4
    for part in page.split("\n\n"):
        table = [line for line in part.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in table}) <= 1
    assert (tmp_path / "transfer-cpu.png").exists()
    assert not (tmp_path / "transfer-quick.jsonl").exists()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_of_a_step_is_measured_in_a_process_of_its_own(transfer):
    sizes = transfer.SIZES["quick"] | {"d": 64, "deep": 500, "batch": 8}
    found = transfer.peak(20, "stored", sizes, True)
    assert found is not None
    assert 10 < found < 1000


TUTORIAL = (ROOT / "docs" / "tutorial-graph.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_of_the_tutorial_run(example, capsys):
    names: dict[str, object] = {}
    exec(compile(example, "tutorial-graph.md", "exec"), names)
    printed = capsys.readouterr()
    (promise,) = re.findall(r"print\(.*\)  # (True|1\.0)", example)
    assert printed.out.startswith(promise) or float(printed.out) == pytest.approx(1, abs=1e-3)
    assert printed.err == ""


def test_the_tutorial_has_examples():
    assert len(EXAMPLES) == 2
