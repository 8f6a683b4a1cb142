"""H-DNNs on a graph: the same numbers as one block-sparse network, the same bits for any parts."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import distributed, sparsity
from hdnn.data import planar
from hdnn.distributed import DistributedError, Gloo, Graph, GraphNetwork, Plan, Training, of_dense
from hdnn.distributed.graph.graph import from_edges, links_of, transposed, union
from hdnn.distributed.graph.plan import Part, cut, partition
from hdnn.distributed.messages.replicas import Replicas
from hdnn.distributed.messages.tree import Spanning
from hdnn.errors import DataError, OptionError, ShapeError, SparsityError, TrainingError
from hdnn.experiments import table_distributed
from hdnn.sparsity import Sparsity
from hdnn.training import fit
from parts import in_threads, run_parts
from strategies import ACTIVATIONS, Random, randomise, seeds

F64 = torch.float64
RING = from_edges(8, [(i, (i + 1) % 8) for i in range(8)])
# The four nodes of the paper's example, which change their sparsities twice.
S_4 = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
R_4 = [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 1, 1]]
T_4 = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]]
Q_4 = [[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
I_4 = torch.eye(4).int().tolist()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_links(seed: int, M: int, density: float, *, symmetric: bool = False):
    """A connected pattern with a full diagonal."""
    draw = torch.rand(M, M, generator=torch.Generator().manual_seed(seed)) < density
    matrix = draw | torch.eye(M, dtype=torch.bool)
    for i in range(1, M):
        matrix[i, i - 1] = True
    return links_of("R", matrix | matrix.T if symmetric else matrix)


def matrix_of(links) -> torch.Tensor:
    found = torch.zeros(len(links), len(links), dtype=torch.bool)
    for i, row in enumerate(links):
        found[i, list(row)] = True
    return found


def owners(seed: int, M: int) -> list[int]:
    """Each node in some part, no part without a node."""
    generator = torch.Generator().manual_seed(seed)
    parts = int(torch.randint(1, M + 1, (), generator=generator))
    drawn = torch.randint(parts, (M,), generator=generator)
    drawn[torch.randperm(M, generator=generator)[:parts]] = torch.arange(parts)
    return drawn.tolist()


def blocks_at(matrix, links, sizes, halves=1):
    """A random matrix, zero where the pattern is."""
    grown = matrix_of(links).repeat_interleave(torch.tensor(sizes), 0)
    grown = grown.repeat_interleave(torch.tensor(sizes), 1)
    return matrix * grown.tile(halves, halves)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) <= 1e-12 * (1 + float(b.abs().max()))


def by_all(net: GraphNetwork, y: torch.Tensor, g: torch.Tensor):
    """y_N, the gradient of y_0 and those of all weights, from rows (n, batch)."""
    rows = net.positions(net.part.number)
    state, tape = net.forward(net.split(y[rows].contiguous()))
    back, gradients = net.backward(tape, net.split(g[rows].contiguous()))
    nodes = {i: {k: v.clone() for k, v in net.blocks(i, gradients).items()} for i in net.part.nodes}
    return rows, net.join(state), net.join(back), nodes


# One process is the block-sparse network


@settings(max_examples=25)
@given(
    seeds,
    st.sampled_from(["h2", "verlet", "yoshida4", "h1"]),
    st.integers(2, 5),
    st.sampled_from([(1,), (1, 2, 3), (8, 9)]),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.booleans(),
)
def test_values_and_gradients_are_those_of_the_masked_network(
    seed, kind, M, sizes, activation, between, each
):
    """Random graphs, sizes below and above those that are multiplied one by one, X or J or none."""
    normal, layers = Random(seed), 2
    sizes = [sizes[i % len(sizes)] for i in range(M)]
    R = [random_links(seed + j, M, 0.3) for j in range(layers if each else 1)]
    T = random_links(seed + 7, M, 0.2, symmetric=True) if between else None
    m = sum(sizes)
    like = {
        "sparsity": Sparsity(
            torch.stack([matrix_of(r) for r in R]) if each else matrix_of(R[0]),
            None if T is None else matrix_of(T),
            sizes=sizes,
        )
    }
    if between and kind == "h1":
        J = blocks_at(normal(2 * m, 2 * m), T, sizes, halves=2)
        like["J"] = (J - J.T) / m
    elif between:
        like["X"] = blocks_at(normal(m, m), T, sizes) / m
    integrator = {"h2": "semi_implicit_euler", "h1": "forward_euler"}.get(kind, kind)
    like |= {"activation": activation, "step": [0.3, 0.2], "dtype": F64}
    net = hdnn.HamiltonianNet(2 * m, layers, integrator, **like)
    randomise(net, normal, m**-0.5).requires_grad_(True)
    y, g = normal(3, 2 * m).requires_grad_(), normal(3, 2 * m)
    out = net(y)
    out.backward(g)
    here = of_dense(net)
    rows, y_N, back, nodes = by_all(here, y.detach().T, g.T)
    assert close(y_N, out.detach().T[rows])
    assert close(back, y.grad.T[rows])
    dense = {}
    for name in here.weights:
        if name.startswith("K"):
            dense[name] = hdnn.operators.block_sparse.dense(
                getattr(net, f"{name}_free").grad, getattr(net, f"_{name}_index"), net._shapes[name]
            )
        else:
            dense[name] = getattr(net, name).grad
    for node, found in nodes.items():
        own, columns = here._where(node)
        for name, gradient in found.items():
            expected = dense[name][:, own]
            expected = expected[:, :, columns] if name.startswith("K") else expected
            assert close(gradient, expected), (node, name)


def test_the_four_nodes_of_the_paper_change_their_sparsities_from_layer_to_layer():
    """H1 with R, T and J of its own in each layer; nodes 1 and 3 never talk to each other."""
    R, T = [I_4, R_4, Q_4], [S_4, I_4, T_4]
    sizes, normal = [2, 3, 2, 4], Random(1)
    n = sum(sizes)
    J = torch.stack([blocks_at(normal(n, n), links_of("T", t), sizes) for t in T])
    J = J - J.mT
    graph = Graph([links_of("R", r) for r in R], [links_of("T", t) for t in T], S_4, sizes)
    K = torch.stack([blocks_at(normal(n, n), links_of("R", r), sizes) for r in R])
    b, y, g = normal(3, n), normal(5, n), normal(5, n)
    weights = [t.requires_grad_() for t in (K, b, y)]
    out = hdnn.functional.h1(y, K, b, 0.4, J=J)
    out.backward(g)

    def work(transport):
        net = GraphNetwork(
            Plan.each(graph), 3, transport, network="h1", step=0.4, J=J, paired=False, dtype=F64
        )
        for node in net.part.nodes:
            rows, columns = net._where(node)
            own = net.blocks(node)
            own["K"].copy_(K.detach()[:, rows][:, :, columns])
            own["b"].copy_(b.detach()[:, rows])
        net._mask()
        return *by_all(net, y.detach().T, g.T), dict(transport.traffic.messages)

    for rows, y_N, back, nodes, sent in run_parts(Plan.each(graph), work):
        assert torch.allclose(y_N, out.detach().T[rows], rtol=1e-12, atol=1e-12)
        assert torch.allclose(back, y.grad.T[rows], rtol=1e-12, atol=1e-12)
        (node,) = nodes
        assert torch.allclose(nodes[node]["b"], b.grad[:, rows], rtol=1e-12, atol=1e-12)
        assert {1: 3, 3: 1}.get(node) not in sent
        assert set(sent) <= set(graph.used[node]) - {node}
    assert all(w.grad is not None for w in weights)


# Any parts are one process, bit for bit


@settings(max_examples=25)
@given(
    seeds,
    st.sampled_from(["h2", "verlet", "h1"]),
    st.integers(2, 9),
    st.sampled_from([(1,), (1, 2, 3), (8, 11)]),
    st.sampled_from([torch.float32, F64]),
    st.sampled_from([1, 7, 64]),
    st.sampled_from(ACTIVATIONS),
)
def test_any_parts_have_the_bits_of_one_process(seed, kind, M, sizes, dtype, batch, activation):
    graph = Graph(random_links(seed, M, 0.2), sizes=[sizes[i % len(sizes)] for i in range(M)])
    normal = Random(seed)
    n = 2 * sum(graph.sizes)
    y, g = (normal(n, batch).to(dtype) for _ in range(2))

    def work(plan):
        def part(transport):
            net = GraphNetwork(
                plan, 2, transport, network=kind, step=0.3, activation=activation, dtype=dtype
            )
            net.draw(seed, gain=2.0)
            return by_all(net, y, g)

        return part

    whole = Plan.whole(graph)
    ((rows, y_N, back, nodes),) = run_parts(whole, work(whole))
    first, second = torch.empty_like(y), torch.empty_like(y)
    first[rows], second[rows] = y_N, back
    plan = Plan(graph, owners(seed, M))
    for rows, y_N, back, some in run_parts(plan, work(plan)):
        assert torch.equal(first[rows], y_N)
        assert torch.equal(second[rows], back)
        for node, gradients in some.items():
            assert all(torch.equal(nodes[node][name], g) for name, g in gradients.items())


def test_a_layer_on_a_ring_of_eight_sends_64_messages_each_way():
    plan = Plan.each(Graph(RING))
    y = torch.zeros(16, 3)

    def work(transport):
        net = GraphNetwork(plan, 1, transport)
        state, tape = net.forward(net.split(y[net.positions(transport.part)]))
        forward = sum(transport.traffic.messages.values())
        net.backward(tape, state)
        return forward, sum(transport.traffic.messages.values()), set(transport.traffic.messages)

    found = run_parts(plan, work)
    assert sum(forward for forward, _, _ in found) == 64
    assert sum(both for _, both, _ in found) == 128
    for part, (_, _, peers) in enumerate(found):
        assert peers == {(part - 1) % 8, (part + 1) % 8}


# Training


def small_data(dtype, samples=300):
    data = planar.swiss_roll(seed=0, dtype=dtype)
    return data.x_train[:samples], data.t_train[:samples]


def train_parts(plan, dtype, options, layers=2):
    """The weights of each node, the root's progress, and the predictions."""
    x, t = small_data(dtype)

    def work(transport):
        model = table_distributed.network("masked", layers, 0).to(dtype)
        net = of_dense(model.net, plan.owner, transport)
        rows = net.positions(transport.part)
        own = model.embed(x).T[rows].contiguous()
        root = 0 in net.part.nodes
        training = Training(net, model.head, own, t if root else None, **options)
        progress = training.run()
        state, _ = net.forward(net.split(own), keep=False)
        weights = {i: {k: v.clone() for k, v in net.blocks(i).items()} for i in net.part.nodes}
        whole = training.assemble(table_distributed.network("masked", layers, 1).to(dtype).net)
        return weights, progress, training.head.predict(net.join(state)), whole, model.head

    return run_parts(plan, work)


OPTIONS = {**table_distributed.OPTIONS, "epochs": 2, "batch": 100}
CASES = [
    OPTIONS,
    {**OPTIONS, "solver": "joint"},
    {**OPTIONS, "solver": "adam", "clip": None, "weight_decay": 0.01, "schedule": "constant"},
]


@pytest.mark.parametrize("options", CASES, ids=lambda options: options["solver"])
def test_training_on_a_graph_is_training_of_the_masked_network(options):
    graph = Graph(RING)
    ((weights, progress, predicted, whole, head),) = train_parts(Plan.whole(graph), F64, options)
    x, t = small_data(F64)
    model = table_distributed.network("masked", 2, 0).double()
    history = fit(model, x, t, progress=False, **options)
    assert progress.loss == pytest.approx(history.loss, rel=1e-9)
    assert progress.accuracy == pytest.approx(history.accuracy)
    reference = of_dense(model.net)
    for node, blocks in weights.items():
        for name, block in blocks.items():
            assert torch.allclose(block, reference.blocks(node)[name], rtol=1e-9, atol=1e-10)
    assert torch.equal(predicted, model.predict(x))
    assert torch.allclose(whole(model.embed(x)), model.features(x), rtol=1e-9, atol=1e-9)
    assert torch.allclose(head.weight, model.head.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", CASES, ids=lambda options: options["solver"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_training_by_any_parts_has_the_bits_of_one_process(options, dtype):
    graph = Graph(RING)
    ((weights, progress, predicted, whole, _),) = train_parts(Plan.whole(graph), dtype, options)
    for owner in (range(8), [0, 1, 1, 0, 2, 2, 0, 1]):
        for some, steps, labels, gathered, _ in train_parts(Plan(graph, owner), dtype, options):
            for node, blocks in some.items():
                assert all(torch.equal(weights[node][name], b) for name, b in blocks.items())
            assert torch.equal(labels, predicted)
            if 0 in some:
                assert steps == progress
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(whole.parameters(), gathered.parameters(), strict=True)
                )


def test_training_over_gloo_has_the_bits_of_one_process():
    graph = Graph(RING)
    plan, options = Plan(graph, [0, 0, 1, 1, 1, 2, 2, 2]), {**OPTIONS, "solver": "joint"}
    ((weights, *_),) = train_parts(Plan.whole(graph), F64, options)
    x, t = small_data(F64)

    def work(part, store):
        transport = Gloo(part, 3, store, timeout=30)
        model = table_distributed.network("masked", 2, 0).to(F64)
        net = of_dense(model.net, plan.owner, transport)
        own = model.embed(x).T[net.positions(part)].contiguous()
        Training(net, model.head, own, t if part == 0 else None, **options).run()
        found = {i: {k: v.clone() for k, v in net.blocks(i).items()} for i in net.part.nodes}
        transport.close()
        return found

    for some in with_store(3, work):
        for node, blocks in some.items():
            assert all(torch.equal(weights[node][name], b) for name, b in blocks.items())


def with_store(count, work):
    """What `work(k, store)` returns in each thread k; they share a store."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    return in_threads(count, lambda k: work(k, store))


@pytest.mark.parametrize("solver", ["newton", "joint"])
def test_replicas_of_the_graph_train_as_one(solver):
    options = {**OPTIONS, "solver": solver}
    graph = Graph(RING)
    ((weights, progress, *_),) = train_parts(Plan.whole(graph), F64, options)
    x, t = small_data(F64)

    def work(k, store):
        replicas = Replicas(k, 2, store)
        model = table_distributed.network("masked", 2, 0).to(F64)
        net = of_dense(model.net)
        own = model.embed(x).T[net.positions(0)].contiguous()
        steps = Training(net, model.head, own, t, replicas=replicas, **options).run()
        return {i: {k: v.clone() for k, v in net.blocks(i).items()} for i in range(8)}, steps

    (first, steps), (second, _) = with_store(2, work)
    for node, name in itertools.product(range(8), ("K_p", "K_q", "b_p", "b_q")):
        assert torch.equal(first[node][name], second[node][name])
        assert torch.allclose(first[node][name], weights[node][name], rtol=1e-9, atol=1e-11)
    if solver == "newton":
        assert steps.loss == pytest.approx(progress.loss)


def test_replicas_need_a_sample_each():
    def work(k, store):
        return Replicas(k, 2, store).check(101, 100)

    with pytest.raises(DataError, match="1 samples cannot be shared out to 2 replicas"):
        with_store(2, work)


def test_a_training_that_leaves_the_numbers_says_so():
    model = table_distributed.network("masked", 2, 0)
    net = of_dense(model.net)
    net.weights["K_p"].fill_(float("inf"))
    x = model.embed(small_data(torch.float32)[0]).T.contiguous()[net.positions(0)]
    with pytest.raises(DistributedError, match="not finite in epoch 1"):
        Training(net, model.head, x, small_data(torch.float32)[1], epochs=1).run()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(3, 300)}, DataError, "the features of this part"),
        ({"x": torch.zeros(16, 300, dtype=F64)}, DataError, "float64"),
        ({"x": torch.full((16, 300), float("nan"))}, DataError, "NaN"),
        ({"t": None}, DataError, "300 labels"),
        ({"t": torch.full((300,), 2)}, DataError, "whole numbers in 0 .. 1"),
        ({"head": hdnn.SigmoidHead(4)}, DataError, "takes 4 features"),
        ({"speed": 3}, TrainingError, "no option speed"),
        ({"optimizer": "sgd"}, TrainingError, "adam"),
        ({"epochs": 0}, TrainingError, "epochs"),
    ],
)
def test_bad_input_is_one_sentence_before_any_step(change, error, message):
    model = table_distributed.network("masked", 2, 0)
    x, t = small_data(torch.float32)
    given = {"head": model.head, "x": model.embed(x).T.contiguous(), "t": t, **change}
    net = of_dense(model.net)
    with pytest.raises(error, match=message):
        Training(net, given.pop("head"), given.pop("x"), given.pop("t"), **given)


# Trees


@settings(max_examples=25)
@given(seeds, st.integers(1, 12))
def test_sums_minima_and_moves_along_the_tree(seed, M):
    graph = Graph(random_links(seed, M, 0.1))
    plan = Plan(graph, owners(seed, M))
    values = torch.randn(M, 3, generator=torch.Generator().manual_seed(seed))

    def work(plan):
        def part(transport):
            own = Part(plan, transport.part)
            tree = Spanning(own, transport)
            rows = [len(nodes) for nodes in plan.nodes_of]
            mine = values[list(own.nodes)]
            gathered = tree.gather(mine, rows)
            scattered = tree.scatter(gathered, rows, mine)
            order = [i for p in tree.order for i in Part(plan, p).nodes]
            return (
                tree.sum(mine),
                tree.minimum(transport.part + 5),
                gathered,
                order,
                (torch.equal(scattered, mine)),
            )

        return part

    whole = Plan.whole(graph)
    ((total, *_),) = run_parts(whole, work(whole))
    assert torch.allclose(total, values.sum(0), atol=1e-5)
    for number, (sum_, least, gathered, order, same) in enumerate(run_parts(plan, work(plan))):
        assert torch.equal(sum_, total)
        assert least == 5
        assert same
        if number == plan.owner[0]:
            assert torch.equal(gathered, values[order])


# Graphs


@settings(max_examples=25)
@given(seeds, st.integers(2, 6))
def test_the_dependency_of_lists_is_that_of_matrices(seed, M):
    R, T = random_links(seed, M, 0.3), random_links(seed + 1, M, 0.2, symmetric=True)
    needed = matrix_of(Graph(R, T).dependency())
    assert torch.equal(needed, sparsity.dependency(matrix_of(T), matrix_of(R)))


def test_rings_and_grids_are_what_they_say():
    assert Graph.ring(8).R == (RING,)
    grid = Graph.grid(2, 3)
    assert grid.used[0] == (0, 1, 3)
    assert grid.used[4] == (1, 3, 4, 5)
    assert repr(grid) == "Graph(6 nodes, 7 links in use)"
    assert Graph.ring(1).nodes == 1
    assert union(RING) == RING == transposed(RING)


def test_digests_tell_graphs_apart():
    assert Graph.ring(8).digest() == Graph(RING).digest()
    assert Graph.ring(8).digest() != Graph.ring(8, size=2).digest()
    graph = Graph.ring(4)
    assert Plan.whole(graph).digest() != Plan.each(graph).digest()


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (lambda: Graph([[1, 0], [1, 0]]), "does not link node 1 to itself"),
        (lambda: Graph([[1, 1], [1, 1]], [[1, 1], [0, 1]]), "T must be symmetric"),
        (lambda: Graph(RING, S=RING), "break the locality condition"),
        (lambda: Graph([[1, 1], [1, 1]], S=[[1, 1], [0, 1]]), "messages travel both ways"),
        (lambda: Graph(RING, sizes=[1, 2]), "2 sizes"),
        (lambda: Graph(RING, sizes=0), "whole number >= 1"),
        (lambda: Graph([RING, RING], [RING] * 3), "R is for 2 layers, but T is for 3"),
        (lambda: Graph(RING, [[1]]), "T is for 1 nodes, but the graph has 8"),
        (lambda: Graph(((0, 5), (1,))), "from 0 to 1"),
        (lambda: from_edges(3, [(0, 3)]), "a pair of nodes from 0 to 2"),
        (lambda: Plan.whole(Graph([[1, 0], [0, 1]])), "not connected"),
        (lambda: Plan(Graph(RING), [0] * 7), "7 nodes have an owner"),
        (lambda: Plan(Graph(RING), [0, 2] * 4), "must own a node"),
        (lambda: partition(Graph(RING), 9), "cannot be shared out to 9 parts"),
    ],
)
def test_graphs_that_do_not_fit_are_refused(graph, message):
    with pytest.raises((SparsityError, ShapeError), match=message):
        graph()


@pytest.mark.parametrize("method", ["auto", "bands"])
def test_parts_are_about_alike_and_all_used(method):
    graph = Graph.grid(10, 10)
    owner = partition(graph, 4, method)
    sizes = [owner.count(part) for part in range(4)]
    assert min(sizes) >= 20
    assert cut(graph, owner) < 60
    assert partition(graph, 100) == [*range(100)]
    assert set(partition(graph, 1)) == {0}


def test_networks_that_do_not_fit_a_graph_are_refused():
    plan = Plan.whole(Graph(RING))
    for message, error, make in [
        ("takes X, not J", OptionError, lambda: GraphNetwork(plan, 2, J=torch.zeros(16, 16))),
        ("pieces of y", OptionError, lambda: GraphNetwork(plan, 2, paired=False)),
        ("needed", ShapeError, lambda: GraphNetwork(plan, 2, X=torch.zeros(3, 3))),
        ("T does not", SparsityError, lambda: GraphNetwork(plan, 2, X=torch.ones(8, 8))),
        ("no graph", SparsityError, lambda: of_dense(hdnn.H2(16, 2))),
        (
            "couples all nodes",
            OptionError,
            lambda: of_dense(hdnn.ImplicitH2(16, 2, sparsity=matrix_of(RING))),
        ),
        (
            "cannot be shared out",
            OptionError,
            lambda: of_dense(hdnn.H2(16, 2, sparsity=matrix_of(RING), tied=True)),
        ),
        ("do not fit", ShapeError, lambda: GraphNetwork(plan, 2).load(hdnn.H2(16, 3))),
        ("R does not", SparsityError, lambda: GraphNetwork(plan, 2).load(hdnn.H2(16, 2))),
        ("for 2 layers", SparsityError, lambda: GraphNetwork(Plan.whole(Graph([RING, RING])), 3)),
        ("8 parts", SparsityError, lambda: GraphNetwork(Plan.each(Graph(RING)), 2)),
    ]:
        with pytest.raises(error, match=message):
            make()


def test_drawn_weights_have_the_size_of_a_dense_network_where_all_are_neighbours():
    everyone = Graph(from_edges(20, itertools.combinations(range(20), 2)))
    net = GraphNetwork(Plan.whole(everyone), 20)
    net.draw(0)
    assert float(net.weights["K_p"].std()) == pytest.approx(40**-0.5, rel=0.05)
    assert not net.weights["b_p"].any()
    net.draw(0, "paper")
    assert float(net.weights["b_p"].std()) == pytest.approx(1.0, rel=0.1)


def test_public_names_are_there():
    assert set(distributed.__all__) <= set(dir(distributed))
