"""The search for links: what it finds, what it keeps, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdnn import sparsity
from hdnn.errors import (
    CheckpointError,
    HDNNError,
    OptionError,
    ShapeError,
    SparsityError,
    TrainingError,
)
from strategies import seeds

Links = tuple[tuple[int, int], ...]


def pairs(agents: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(agents), 2))


class Additive:
    """A cost that each link lowers by its own worth, and how often it was asked for."""

    def __init__(self, agents: int, seed: int) -> None:
        drawn = torch.rand(len(pairs(agents)), generator=torch.Generator().manual_seed(seed))
        self.worth = dict(zip(pairs(agents), drawn.tolist(), strict=True))
        self.calls: list[Links] = []
        self.identity = f"{agents} {seed}"

    def __call__(self, links: Links) -> float:
        self.calls.append(links)
        return 10 - sum(self.worth[link] for link in links)

    def relaxed(self, candidates: Links) -> list[float]:
        return [self.worth[link] for link in candidates]


@settings(max_examples=25)
@given(seeds, st.integers(2, 7), st.data())
def test_exact_scores_find_the_best_graph_at_once(seed: int, agents: int, data: Any) -> None:
    cost = Additive(agents, seed)
    budget = data.draw(st.integers(0, len(cost.worth)))
    options = {"relaxed": cost.relaxed, "rounds": 3, "seed": seed}
    found = sparsity.choose_links(agents, cost, links=budget, **options)
    best = sorted(cost.worth, key=lambda link: -cost.worth[link])[:budget]
    assert found.links == tuple(sorted(best)) == found.history[0].links
    assert found.cost == cost(found.links)


@settings(max_examples=25)
@given(seeds, st.integers(2, 6), st.data())
def test_every_graph_has_its_links_and_none_is_tried_twice(
    seed: int, agents: int, data: Any
) -> None:
    cost = Additive(agents, seed)
    budget = data.draw(st.integers(0, len(cost.worth)))
    found = sparsity.choose_links(agents, cost, links=budget, rounds=8, seed=seed)
    assert len(set(cost.calls)) == len(cost.calls) == len(found.history)
    for trial in found.history:
        assert len(trial.links) == budget
        assert {*trial.links} <= {*pairs(agents)}
    assert found.cost == min(trial.cost for trial in found.history)
    S = found.S
    assert S.equal(S.mT)
    assert S.diagonal().all()
    assert int(S.triu(1).sum()) == budget


def test_changes_find_the_best_graph_without_scores() -> None:
    cost = Additive(5, 0)
    found = sparsity.choose_links(5, cost, links=3, rounds=100)
    best = min(itertools.combinations(pairs(5), 3), key=lambda links: cost(links))
    assert found.links == tuple(sorted(best))


@pytest.mark.parametrize("seed", range(5))
def test_scores_that_mislead_are_not_used_for_long(seed: int) -> None:
    cost = Additive(8, seed)

    def wrong(candidates: Links) -> list[float]:
        return [-cost.worth[link] for link in candidates]

    options: Any = {"links": 7, "rounds": 60, "seed": seed}
    misled = sparsity.choose_links(8, cost, relaxed=wrong, **options)
    without = sparsity.choose_links(8, cost, **options)
    worst, best = (
        10 - sum(sorted(cost.worth.values())[part]) for part in (slice(7), slice(-7, None))
    )
    assert misled.history[0].cost == pytest.approx(worst)
    assert misled.cost - best < 0.2 * (worst - best)
    assert misled.cost == pytest.approx(without.cost, abs=0.15 * (worst - best))


def test_scores_that_are_right_are_used_to_the_end() -> None:
    """A change by scores takes a good link more often than one without."""
    found = []
    for relaxed in (True, False):
        taken = []
        for seed in range(10):
            cost = Additive(8, seed)
            scores = cost.relaxed if relaxed else None
            options: Any = {"links": 7, "rounds": 20, "seed": seed}
            choice = sparsity.choose_links(8, cost, relaxed=scores, **options)
            taken += [cost.worth[link] for trial in choice.history[6:] for link in trial.links]
        found.append(sum(taken) / len(taken))
    assert found[0] > 1.1 * found[1]


def test_the_first_quarter_of_the_rounds_draws_graphs_at_random() -> None:
    cost = Additive(12, 0)
    found = sparsity.choose_links(12, cost, links=12, relaxed=cost.relaxed, rounds=20)
    first, *others = (set(trial.links) for trial in found.history)
    shared = [len(first & links) for links in others]
    assert max(shared[:5]) < 8 < min(shared[5:])


def test_a_price_buys_links_that_are_worth_it() -> None:
    cost = Additive(6, 1)
    found = sparsity.choose_links(6, cost, price=0.5, relaxed=cost.relaxed, rounds=200)
    assert found.links == tuple(link for link, worth in cost.worth.items() if worth > 0.5)
    assert found.total == pytest.approx(found.cost + 0.5 * len(found.links))
    assert "with 0.5 a link" in str(found)


def test_a_price_above_all_buys_nothing() -> None:
    found = sparsity.choose_links(4, Additive(4, 0), price=2.0, rounds=10)
    assert found.links == ()
    assert "nobody" in str(found)


def test_only_candidates_are_taken() -> None:
    some = [(3, 0), (1, 2), (0, 1), (1, 0)]
    cost = Additive(4, 0)
    found = sparsity.choose_links(4, cost, links=2, candidates=some, rounds=10)
    assert {link for trial in found.history for link in trial.links} <= {(0, 3), (1, 2), (0, 1)}
    assert len(found.history) == 3


def test_the_same_seed_gives_the_same_search() -> None:
    one, two, other = (
        sparsity.choose_links(6, Additive(6, 0), links=5, rounds=10, seed=seed).history
        for seed in (3, 3, 4)
    )
    assert one == two != other


def test_an_interrupted_search_goes_on_with_what_its_file_has(tmp_path: Path) -> None:
    def search(cost: Additive, file: Path | None) -> sparsity.LinkChoice:
        return sparsity.choose_links(6, cost, links=5, relaxed=cost.relaxed, rounds=12, file=file)

    class Interrupted(Additive):
        def __call__(self, links: Links) -> float:
            if len(self.calls) == 4:
                raise KeyboardInterrupt
            return super().__call__(links)

    file = tmp_path / "search.json"
    whole = search(Additive(6, 2), None)
    with pytest.raises(KeyboardInterrupt):
        search(Interrupted(6, 2), file)
    rest = Additive(6, 2)
    assert search(rest, file).history == whole.history
    assert len(rest.calls) == len(whole.history) - 4
    again = Additive(6, 2)
    assert search(again, file).links == whole.links
    assert not again.calls


def test_a_file_of_another_search_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    sparsity.choose_links(4, Additive(4, 0), links=2, file=file)
    with pytest.raises(CheckpointError, match="other identity"):
        sparsity.choose_links(4, Additive(4, 1), links=2, file=file)
    with pytest.raises(CheckpointError, match="other agents"):
        sparsity.choose_links(5, Additive(5, 0), links=2, file=file)
    file.write_text(json.dumps({"format": 1}))
    with pytest.raises(CheckpointError, match="no file of a search"):
        sparsity.choose_links(4, Additive(4, 0), links=2, file=file)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scores": [1.0, 2.0]}, "it has 2 scores for 6 candidates"),
        ({"scores": [float("nan")] * 6}, "a score must be a finite number, but is nan"),
        ({"scores": ["1"] * 6}, "a score must be a finite number"),
        ({"scores": 3}, "no file of a search"),
        ({"tried": [{"links": [[0, 1]], "cost": float("nan")}]}, "a cost must be a finite number"),
        ({"tried": [{"links": [[0, 1]], "cost": None}]}, "a cost must be a finite number"),
        ({"tried": [{"links": [[0, 9]], "cost": 1.0}]}, "a cost of other links"),
        ({"tried": [{"links": [[[0], 1]], "cost": 1.0}]}, "no file of a search"),
        ({"tried": [{"links": [[float("inf"), 1]], "cost": 1.0}]}, "no file of a search"),
    ],
)
def test_a_damaged_file_is_refused_and_stays(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file, cost = tmp_path / "search.json", Additive(4, 0)
    sparsity.choose_links(4, cost, links=2, relaxed=cost.relaxed, file=file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    before, again = file.read_bytes(), Additive(4, 0)
    with pytest.raises(CheckpointError, match=words):
        sparsity.choose_links(4, again, links=2, relaxed=again.relaxed, file=file)
    assert file.read_bytes() == before
    assert not again.calls


def tried_in(file: Path) -> set[Links]:
    found = json.loads(file.read_text())["tried"]
    return {tuple((i, k) for i, k in one["links"]) for one in found}


def test_searches_on_one_file_keep_the_trials_of_each_other(tmp_path: Path) -> None:
    file, inner = tmp_path / "search.json", Additive(5, 0)

    class Nested(Additive):
        def __call__(self, links: Links) -> float:
            if not self.calls:
                sparsity.choose_links(5, inner, links=2, rounds=5, seed=1, file=file)
            return super().__call__(links)

    outer = Nested(5, 0)
    found = sparsity.choose_links(5, outer, links=3, rounds=5, file=file)
    assert tried_in(file) == {*inner.calls, *outer.calls}
    assert {trial.links for trial in found.history} == {*outer.calls}


def test_searches_at_once_lose_nothing(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    file, costs = tmp_path / "search.json", [Additive(6, 0) for _ in range(4)]

    def search(k: int) -> None:
        sparsity.choose_links(6, costs[k], links=k + 1, rounds=9, file=file)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(search, range(4)))
    assert tried_in(file) == {links for cost in costs for links in cost.calls}
    assert [path.name for path in tmp_path.iterdir()] == ["search.json"]


@settings(max_examples=25)
@given(seeds, st.integers(2, 4), st.booleans(), st.data())
def test_a_search_of_many_rounds_tries_all_graphs(
    seed: int, agents: int, ranked: bool, data: Any
) -> None:
    cost = Additive(agents, seed)
    relaxed = cost.relaxed if ranked else None
    budget = data.draw(st.none() | st.integers(0, len(cost.worth)))
    limit: Any = {"price": 0.5} if budget is None else {"links": budget}
    found = sparsity.choose_links(agents, cost, **limit, relaxed=relaxed, rounds=99, seed=seed)
    most = 2 ** len(cost.worth) if budget is None else math.comb(len(cost.worth), budget)
    assert len(found.history) == most
    assert found.total == min(t.cost + found.price * len(t.links) for t in found.history)


def test_changes_grow_again_when_all_small_ones_are_known() -> None:
    hidden = ((0, 1), (2, 3))  # all others are alike, so that no change of one link is better

    def cost(links: Links) -> float:
        return 1.0 - (links == hidden)

    found = sparsity.choose_links(4, cost, links=2, rounds=14)
    assert (found.links, found.cost) == (hidden, 0.0)
    assert str(sparsity.choose_links(4, cost, links=1)).startswith("1 link of 4 agents")


def test_a_file_that_cannot_be_written_costs_no_training(tmp_path: Path) -> None:
    cost = Additive(4, 0)
    with pytest.raises(CheckpointError):
        sparsity.choose_links(4, cost, links=2, file=tmp_path / "missing" / "search.json")
    assert not cost.calls


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"agents": 1, "links": 0}, ShapeError, "agents must be a whole number >= 2"),
        ({"links": 7}, SparsityError, "6 candidates, but 7 links"),
        ({"links": -1}, ShapeError, "links must be a whole number"),
        ({}, OptionError, "but got neither"),
        ({"links": 1, "price": 1.0}, OptionError, "but got both"),
        ({"price": -1.0}, OptionError, "price must be finite and not negative"),
        ({"price": float("nan")}, OptionError, "price must be finite"),
        ({"links": 1, "candidates": [(0, 4)]}, SparsityError, r"one is \(0, 4\)"),
        ({"links": 1, "candidates": [(2, 2)]}, SparsityError, r"one is \(2, 2\)"),
        ({"links": 1, "candidates": [3]}, SparsityError, "one is 3"),
        ({"links": 1, "candidates": 3}, SparsityError, "must be pairs of agents, but got 3"),
        ({"links": 0, "candidates": []}, SparsityError, "no candidates"),
        ({"links": 1, "rounds": 1.5}, ShapeError, "rounds must be a whole number"),
        ({"links": 1, "seed": -1}, ShapeError, "seed must be a whole number"),
        ({"links": 1, "relaxed": 3}, OptionError, "relaxed must be a function"),
        ({"links": 1, "progress": "yes"}, OptionError, "progress must be True or False"),
    ],
)
def test_bad_input_is_refused_before_work_starts(
    given: dict[str, Any], kind: type[HDNNError], words: str
) -> None:
    cost = Additive(4, 0)
    with pytest.raises(kind, match=words):
        sparsity.choose_links(**{"agents": 4, "cost": cost, **given})
    assert not cost.calls


def test_a_cost_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(OptionError, match="cost must be a function"):
        sparsity.choose_links(4, 3.0, links=1)  # pyright: ignore


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), "1", None, torch.ones(2), np.ones(2), [1.0]]
)
def test_a_cost_that_is_not_finite_is_refused(bad: Any) -> None:
    with pytest.raises(TrainingError, match="cost of 1 link must be a finite number"):
        sparsity.choose_links(4, lambda _: bad, links=1)


def test_scores_must_be_finite_and_one_a_candidate() -> None:
    cost = Additive(4, 0)
    with pytest.raises(ShapeError, match="each of the 6 candidates, but returned 2"):
        sparsity.choose_links(4, cost, links=1, relaxed=lambda _: [1.0, 2.0])
    with pytest.raises(TrainingError, match="score of relaxed"):
        sparsity.choose_links(4, cost, links=1, relaxed=lambda links: [float("nan")] * len(links))
    assert not cost.calls


@pytest.mark.parametrize("bad", [5, None, torch.ones(6, 1), np.ones((6, 2)), torch.tensor(1.0)])
def test_scores_must_be_a_list(bad: Any) -> None:
    cost = Additive(4, 0)
    with pytest.raises(ShapeError, match="a score for each of the 6 candidates, but returned"):
        sparsity.choose_links(4, cost, links=1, relaxed=lambda _: bad)
    with pytest.raises(TrainingError, match="a score of relaxed must be a finite number"):
        sparsity.choose_links(4, cost, links=1, relaxed=lambda _: [np.ones(2)] * 6)  # pyright: ignore
    assert not cost.calls


def test_costs_may_be_tensors() -> None:
    found = sparsity.choose_links(3, lambda _: torch.tensor(2.0), links=1)  # pyright: ignore
    assert found.cost == 2.0


# Graphs to try first


@settings(max_examples=25)
@given(seeds, st.integers(3, 7), st.data())
def test_what_is_found_is_no_worse_than_the_graphs_to_try_first(seed: int, agents: int, data: Any):
    cost = Additive(agents, seed)
    budget = data.draw(st.integers(1, len(cost.worth)))
    source = torch.Generator().manual_seed(seed)
    graphs = [
        [pairs(agents)[e] for e in torch.randperm(len(cost.worth), generator=source)[:budget]]
        for _ in range(3)
    ]
    turned = [[(k, i) for i, k in graph] for graph in graphs]
    rounds = data.draw(st.integers(0, 6))
    found = sparsity.choose_links(agents, cost, links=budget, first=turned, rounds=rounds)
    assert {tuple(sorted(graph)) for graph in graphs} <= {*cost.calls}
    assert found.cost <= min(cost(tuple(graph)) for graph in graphs)
    assert len(found.history) <= 1 + max(rounds, 3)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, iter], ids=lambda k: k.__name__)
def test_graphs_and_candidates_may_be_given_as_lists_arrays_or_tensors(kind: Any) -> None:
    cost = Additive(4, 0)
    candidates = kind([[0, 1], [0, 2], [1, 3]])
    graph = kind([[1, 0], [3, 1]])
    found = sparsity.choose_links(4, cost, links=2, candidates=candidates, first=[graph], rounds=1)
    assert ((0, 1), (1, 3)) in cost.calls
    assert len(found.links) == 2


def test_at_a_price_graphs_to_try_first_have_any_size() -> None:
    cost = Additive(5, 0)
    best = [link for link, worth in cost.worth.items() if worth > 0.5]
    found = sparsity.choose_links(5, cost, price=0.5, first=[best, []], rounds=2)
    assert set(found.links) == set(best)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (3, "first must be graphs"),
        (np.array(3), "first must be graphs"),
        ([np.array(3)], "must be pairs of agents"),
        ([3], "must be pairs of agents"),
        ([[(0, 9), (1, 2)]], "0 .. 3"),
        ([[(0, 1)]], "a graph of 1 link, but 2 are to be chosen"),
        ([[(0, 1), (1, 0)]], "a graph of 1 link, but 2 are to be chosen"),
        ([[(0, 1), (2, 3)]], r"\(2, 3\), which is no candidate"),
    ],
)
def test_graphs_to_try_first_that_cannot_be_are_refused(first: Any, said: str) -> None:
    cost = Additive(4, 0)
    options = {"links": 2, "candidates": [(0, 1), (0, 2), (0, 3)]}
    with pytest.raises(SparsityError, match=said):
        sparsity.choose_links(4, cost, first=first, **options)
    assert not cost.calls
