"""The playground's files are those of hdnn, its data the planar sets; wrong input is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hdnn
from hdnn.networks import BY_NAME
from node import run_node

HERE = Path(__file__).parent
CORE = Path(hdnn.__file__).parent / "app" / "play" / "core" / "index.js"
NETWORKS = ("h2", "h1", "verlet", "ms1", "ms2", "ms3", "mlp")
X = [[0.3, -0.2], [1.0, 2.0], [-1.5, 0.25], [0.0, 0.0]]
FLAT = [number for point in X for number in point]


@pytest.fixture
def answers(tmp_path) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    def asked(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        file = tmp_path / "jobs.json"
        file.write_text(json.dumps(jobs), encoding="utf-8")
        return json.loads(run_node(HERE / "core_files.mjs", CORE, file))

    return asked


def model_of(name: str = "h2", *, features: int = 4, layers: int = 5, **given: Any) -> hdnn.Model:
    g = torch.Generator().manual_seed(layers)
    placement = given.pop("placement", "split")
    options: dict[str, Any] = {"dtype": given.pop("dtype", torch.float64), "generator": g}
    net = BY_NAME[name](features, layers, init="paper", **given, **options)
    head = hdnn.SigmoidHead(features, **options)
    return hdnn.Model(hdnn.Augment(2, features, placement), net, head)


# Files


def test_hdnn_loads_what_the_page_writes(answers, tmp_path):
    sizes = [(2, 1, "tanh", 2.4), (4, 7, "gelu", 7.0), (8, 64, "softplus", 3e-4)]
    jobs = [
        {"network": name, "features": n, "layers": N, "activation": activation, "T": T}
        for name in NETWORKS
        for n, N, activation, T in sizes
    ]
    for k, job in enumerate(jobs):
        job |= {"job": "write", "x": FLAT, "to": f"{tmp_path / str(k)}.safetensors"}
    for job, found in zip(jobs, answers(jobs), strict=True):
        model = hdnn.load(job["to"])
        assert isinstance(model, hdnn.Model)
        assert type(model.net) is type(model_of(job["network"]).net)
        assert (model.net.features, model.net.layers) == (job["features"], job["layers"])
        if job["network"] != "mlp":
            assert model.net.step == job["T"] / job["layers"]  # pyright: ignore
        expected = model.predict_proba(torch.tensor(X, dtype=torch.float64))[:, 1]
        assert np.allclose(found["value"], expected, rtol=0, atol=1e-12), job
        with safe_open(job["to"], framework="pt") as file:  # so that damage is noticed
            assert "sha256" in json.loads(file.metadata()["hdnn"])


def test_the_page_reads_what_hdnn_saves(answers, tmp_path):
    models = [model_of(name) for name in NETWORKS]
    models += [model_of(name, features=8, layers=20, activation="silu") for name in NETWORKS]
    models += [model_of(placement=place) for place in ("first", [2, 1])]
    models += [model_of(step=1.0), model_of(step=1e-5), model_of(T=3.3)]
    jobs = []
    for k, model in enumerate(models):
        hdnn.save(model, tmp_path / f"{k}.safetensors")
        jobs.append({"job": "read", "from": f"{tmp_path / str(k)}.safetensors", "x": FLAT})
    for model, found in zip(models, answers(jobs), strict=True):
        assert "error" not in found, found
        expected = model.predict_proba(torch.tensor(X, dtype=torch.float64))[:, 1]
        assert np.allclose(found["value"], expected, rtol=0, atol=1e-12), model.net


def test_the_page_reads_models_in_float32(answers, tmp_path):
    model = model_of(dtype=torch.float32)
    hdnn.save(model, tmp_path / "m.safetensors")
    job = {"job": "read", "from": f"{tmp_path / 'm.safetensors'}", "x": FLAT}
    (found,) = answers([job])
    expected = model.double().predict_proba(torch.tensor(X, dtype=torch.float64))[:, 1]
    assert np.allclose(found["value"], expected, rtol=0, atol=1e-12)


def edited(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A file with another header, and without a checksum."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    about = json.loads(header["__metadata__"]["hdnn"])
    about.pop("sha256", None)
    header["__metadata__"]["hdnn"] = about
    change(header)
    header["__metadata__"]["hdnn"] = json.dumps(header["__metadata__"]["hdnn"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def damaged_files(folder: Path) -> list[tuple[bytes, str]]:
    """Contents of files, and what the page must say of each."""

    def content(model: Any) -> bytes:
        hdnn.save(model, folder / "some.safetensors")
        return (folder / "some.safetensors").read_bytes()

    def about(header: dict[str, Any]) -> dict[str, Any]:
        return header["__metadata__"]["hdnn"]

    def net(header: dict[str, Any]) -> dict[str, Any]:
        return about(header)["parts"]["net"]

    good = content(model_of())
    flipped = bytearray(good)
    flipped[-3] ^= 4
    nan = model_of()
    with torch.no_grad():
        nan.net.K_p[0, 0, 0] = torch.nan  # pyright: ignore
    save_file({"a": torch.zeros(3)}, folder / "other.safetensors")
    other = (folder / "other.safetensors").read_bytes()
    wide, g = model_of(features=10), {"dtype": torch.float64}
    softmax = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 2, **g), hdnn.SoftmaxHead(4, 3, **g))
    three = hdnn.Model(hdnn.Augment(3, 4), hdnn.H2(4, 2, **g), hdnn.SigmoidHead(4, **g))
    X_own = model_of(X=torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    begins = {
        "no": "This is no safetensors file, or it is damaged.",
        "cut": "The file is truncated: a part of it is missing.",
        "other": "This safetensors file was not written by hdnn.",
        "sum": "The file is damaged: its contents do not have the checksum written with them.",
    }
    return [
        (b"", begins["no"]),
        (b"PK\x03\x04 this is a zip, not what is wanted", begins["no"]),
        (good[:5], begins["no"]),
        (good[:-8], begins["cut"]),
        (good[:300], begins["cut"]),
        (good + b"\0" * 8, begins["no"]),
        (bytes(flipped), begins["sum"]),
        (other, begins["other"]),
        (
            good[:8] + good[8:].replace(b'"net.K_p"', b'"net.K_\xff"', 1),
            begins["no"],
        ),
        (b"\0" * (9 * 2**20), "The file is too large: 9.0 MiB, and the page reads up to 8."),
        (
            content(wide),
            "The page takes networks of 2 to 8 features, but this one has 10.",
        ),
        (
            content(model_of("yoshida4")),
            "The page does not offer the network yoshida4; it has H2, H1, Verlet, MS1, MS2, MS3, "
            "MLP.",
        ),
        (
            content(model_of("implicit_h2")),
            "The page does not offer the network ImplicitH2; it has H2, H1, Verlet, MS1, MS2, MS3, "
            "MLP.",
        ),
        (content(nan), "The weight net.K_p holds NaN or infinite numbers."),
        (
            content(softmax),
            "The page draws models of two classes that end in a SigmoidHead, but this one ends in "
            "a SoftmaxHead.",
        ),
        (content(three), "The page draws models of 2 inputs, but this one has 3."),
        (content(X_own), "This network has an X or J of its own, which the page does not offer."),
        (
            content(model_of(tied=True)),
            "This network has tied layers, which the page does not offer.",
        ),
        (
            content(model_of(learn_step=True)),
            "This network has learned steps, which the page does not offer.",
        ),
        (
            content(model_of(step=[0.1, 0.2, 0.3, 0.4, 0.5])),
            "This network has a step of its own in each layer, which the page does not offer.",
        ),
        (
            content(model_of(activation="identity")),
            "The activation identity is not known; choose one of tanh, relu, sigmoid, softplus, "
            "gelu, silu, sin.",
        ),
        (
            content(hdnn.H2(4, 2, dtype=torch.float64)),
            "This file holds no model of two inputs, a network and an output layer.",
        ),
        (
            content(model_of(dtype=torch.bfloat16)),
            "The weights must be float64 or float32, but head.bias is BF16.",
        ),
        (
            edited(good, lambda h: about(h).update(format=2)),
            "This file was written by a newer hdnn than this page knows.",
        ),
        (edited(good, lambda h: about(h).update(format="1")), begins["other"]),
        (
            edited(good, lambda h: about(h).update(parts=3)),
            "This file holds no model of two inputs, a network and an output layer.",
        ),
        (
            edited(good, lambda h: net(h)["config"].update(layers=10**9)),
            "The page takes networks of 1 to 1024 layers, but this one has 1000000000.",
        ),
        (
            edited(good, lambda h: net(h)["config"].update(layers=6)),
            "The weight net.K_p has shape (5,2,2), but (6,2,2) is needed.",
        ),
        (
            edited(good, lambda h: net(h)["config"].update(step="long")),
            "The step h = T/N must be a positive number, but it is long.",
        ),
        (
            edited(good, lambda h: about(h)["parts"]["augment"]["config"].update(features=6)),
            "The parts of this model do not have the same number of features.",
        ),
        (
            edited(good, lambda h: about(h)["parts"]["augment"]["config"].update(placement=7)),
            "This model places its inputs in a way that the page does not know.",
        ),
        (edited(good, lambda h: h.update(a=h.pop("net.K_p"))), "a in this file is no weight "),
        (
            edited(good, lambda h: h["net.K_p"].update(data_offsets=[0, -8])),
            begins["no"],
        ),
        (edited(good, lambda h: h["net.K_p"].update(shape=[5, 2, 3])), begins["no"]),
        (edited(good, lambda h: h.update(a=7)), begins["no"]),
    ]


def test_files_that_the_page_cannot_take_are_refused_in_one_sentence(answers, tmp_path):
    jobs, expected = [], []
    for k, (content, sentence) in enumerate(damaged_files(tmp_path)):
        file = tmp_path / f"bad{k}"
        file.write_bytes(content)
        jobs.append({"job": "read", "from": f"{file}", "x": [0, 0]})
        expected.append(sentence)
    for found, sentence in zip(answers(jobs), expected, strict=True):
        assert found.get("kind") == "Error", (found, sentence)
        assert found["error"].startswith(sentence), sentence
        assert found["error"].count(". ") == 0
        assert found["error"].endswith(".")


def test_no_flipped_byte_of_a_file_passes_or_is_anything_but_a_sentence(answers, tmp_path):
    model = model_of(layers=2)
    hdnn.save(model, tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    jobs = []
    for k in range(0, len(content), 3):
        wrong = bytearray(content)
        wrong[k] ^= 1 << (k % 7)
        file = tmp_path / f"{k}.bad"
        file.write_bytes(wrong)
        jobs.append({"job": "read", "from": f"{file}", "x": [0.5, 0.25]})
    found = answers(jobs)
    expected = float(model.predict_proba(torch.tensor([[0.5, 0.25]]).double())[0, 1])
    for job, one in zip(jobs, found, strict=True):
        if "error" in one:
            assert one["kind"] == "Error", (job["from"], one)
        else:  # the header has spaces, and names of no consequence, that a checksum cannot see
            assert abs(one["value"][0] - expected) < 1e-12, job["from"]
    assert sum("error" in one for one in found) > 0.9 * len(found)


# Data


def described(x: Any, t: Any) -> np.ndarray:
    """Points with their classes, in an order of their own."""
    rows = np.column_stack([np.asarray(x, dtype=float).reshape(-1, 2), np.asarray(t, dtype=float)])
    return rows[np.lexsort(rows.round(9).T)]


@pytest.mark.parametrize("points", [8000, 1001])
def test_the_swiss_roll_is_that_of_hdnn_point_by_point(answers, points):
    (found,) = answers([{"job": "data", "name": "swiss_roll", "points": points, "options": {}}])
    data = hdnn.data.planar.swiss_roll(points, dtype=torch.float64)
    x, t = torch.cat([data.x_train, data.x_test]), torch.cat([data.t_train, data.t_test])
    assert np.allclose(described(**without(found)), described(x, t), atol=1e-12)
    assert found["value"]["domain"] == [*data.domain[0], *data.domain[1]]


def without(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found["value"][name] for name in ("x", "t")}


@pytest.mark.parametrize("name", ["double_moons", "double_circles"])
def test_the_other_sets_are_alike_in_distribution(answers, name):
    asked = [{"points": 8000, "options": {"seed": 1}}, {"points": 8000, "options": {"noise": 0}}]
    noisy, exact = answers([{"job": "data", "name": name, **job} for job in asked])
    data = getattr(hdnn.data.planar, name)(8000, dtype=torch.float64)
    x, t = torch.cat([data.x_train, data.x_test]), torch.cat([data.t_train, data.t_test])
    given, labels = np.array(noisy["value"]["x"]).reshape(-1, 2), np.array(noisy["value"]["t"])
    assert noisy["value"]["domain"] == [*data.domain[0], *data.domain[1]]
    edges = [np.linspace(*side, 13) for side in data.domain]
    for label in (0, 1):
        mine, theirs = given[labels == label], x[t == label].numpy()
        assert len(mine) == len(theirs) == 4000
        counts = [np.histogram2d(*some.T, bins=edges)[0] for some in (mine, theirs)]
        # In a box that holds k points on average, so many differ by chance.
        assert (np.abs(counts[0] - counts[1]) <= 6 * np.sqrt(counts[1] + 4)).all()
    noise = {"double_moons": 0.15, "double_circles": 0.3}[name]
    # The same seed shuffles alike, so that each point has its place without noise.
    (same,) = answers([{"job": "data", "name": name, "points": 8000, "options": {"seed": 0}}])
    moved = np.array(same["value"]["x"]) - np.array(exact["value"]["x"])
    assert 0.99 * noise < np.abs(moved).max() <= noise
    assert abs(moved.mean()) < 0.01
    assert same["value"]["t"] == exact["value"]["t"]


def test_a_data_set_is_shuffled_by_its_seed(answers):
    job = {"job": "data", "name": "swiss_roll", "points": 100}
    one, again, other = answers([{**job, "options": {"seed": seed}} for seed in (3, 3, 4)])
    assert one == again != other
    assert 30 < sum(one["value"]["t"][::2]) * 2 < 70
    small = answers([{**job, "points": p, "options": o} for p, o in [(7, {}), (9, {"noise": -1})]])
    assert small[0]["error"] == (
        "The number of points must be a whole number from 8 to 100000, not 7."
    )
    assert small[1]["error"] == "The noise must be a number that is not negative, but it is -1."


# Points of the user's own

GOOD = [
    ("1,2,a\n3,4,b\n", ["x", "y", "class"], ["a", "b"], [0, 1]),
    ("\ufeffu,v,kind\r\n1,2,b\r\n3,4,a\r\n\r\n", ["u", "v", "kind"], ["a", "b"], [1, 0]),
    ("x;y;class\n1;2;10\n3;4;9", ["x", "y", "class"], ["9", "10"], [1, 0]),
    ('"x"\t"y"\t"class"\n1e0\t 2.0\tno\n3.\t4\t"yes"', ["x", "y", "class"], ["no", "yes"], [0, 1]),
]


def test_csv_texts_of_all_kinds_are_read(answers):
    found = answers([{"job": "csv", "text": text} for text, *_ in GOOD])
    for one, (_, names, labels, t) in zip(found, GOOD, strict=True):
        assert one["value"]["x"] == [1, 2, 3, 4]
        assert (one["value"]["names"], one["value"]["labels"]) == (names, labels)
        assert one["value"]["t"] == t
        assert np.allclose(one["value"]["domain"], [0.8, 3.2, 1.8, 4.2])


BAD = [
    ("", "The file is empty; it needs rows of x, y and class."),
    ("1,2\n3,4", "Line 1 has 2 columns, but three are needed: x, y and class."),
    ("hello", "Line 1 has 1 column, but three are needed: x, y and class."),
    ("x,y,class\n1,2,a\n1,2,3,b", "Line 3 has 4 columns, but three are needed: x, y and class."),
    ("x,y,class\n1,NaN,a\n1,2,b", "In line 2, y must be a number, but it is NaN."),
    ("1,2,a\nInfinity,2,b", "In line 2, x must be a number, but it is Infinity."),
    ("1,2,a\n1e999,2,b", "In line 2, x must be a number, but it is 1e999."),
    ("1,2,a\n,2,b", "In line 2, x must be a number, but it is missing."),
    ("1,2,a\n1,2,", "In line 2 the class is missing."),
    ("1,2,a\n3,4,a", "All rows are of one class, a, but two are needed."),
    ("1,2,a\n3,4,b\n5,6,c", "There are 3 classes, but the page can tell two apart."),
    ("1,2,a\n" * 10_001, "The file has 10001 rows, but at most 10000 can be shown."),
    ("1,2,a\n" * 700_000, "The file is too long: at most 10000 rows can be shown."),
    ("x,y,class\n", "The file has no rows below its header; it needs x, y and class."),
]


def test_csv_texts_that_are_wrong_are_refused_in_one_sentence(answers):
    found = answers([{"job": "csv", "text": text} for text, _ in BAD])
    assert [one.get("error") for one in found] == [sentence for _, sentence in BAD]


def test_points_of_an_unusual_size_are_rescaled_and_others_are_not(answers):
    rng = np.random.default_rng(0)
    usual = rng.standard_normal((50, 2))
    large, small = 1e4 * usual + [3e5, 0], 1e-3 * usual
    flat = np.column_stack([1e3 * usual[:, 0], np.full(50, 7.0)])
    sets, domain = (usual, large, small, flat), [0.0, 1.0, 2.0, 3.0]
    jobs = [{"job": "rescale", "x": x.ravel().tolist(), "domain": domain} for x in sets]
    for x, found in zip(sets, answers(jobs), strict=True):
        value = found["value"]
        shift, scale = np.array(value["shift"]), np.array(value["scale"])
        assert np.allclose(np.reshape(value["x"], (-1, 2)) * scale + shift, x)
        assert np.allclose(np.reshape(value["domain"], (2, 2)).T * scale + shift, [[0, 2], [1, 3]])
        if x is usual:
            assert (value["shift"], value["scale"]) == ([0, 0], [1, 1])
        else:
            assert np.allclose(np.std(value["x"][::2]), 1)
