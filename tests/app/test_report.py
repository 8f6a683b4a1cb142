"""The report: one page that stands by itself, whatever is in the files of the runs."""

from __future__ import annotations

import base64
import json
import re
import shlex
from html.parser import HTMLParser

import numpy as np
import pytest

from hdnn.__main__ import main
from hdnn.analysis import evaluation
from hdnn.app import report, reproduced
from hdnn.app.configs.table import TableConfig
from hdnn.app.onpage.command import command
from hdnn.app.onpage.run import RunOnPage
from hdnn.app.onpage.values import interval, percent
from hdnn.app.runs import Run, write_json
from hdnn.errors import CheckpointError

NOT_CLOSED = ("meta", "img", "br")
EVIL = "<script>alert('x')</script>\"'&"
PNG = b"\x89PNG\r\n\x1a\n rest"


class Page(HTMLParser):
    """The elements of a page, if each is closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag not in NOT_CLOSED:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def certificate(**changes):
    layers = list(range(5))
    curve = {"layers": layers, "smallest": [1.2, 1.1, 1.05, 1.01, 1.0]}
    curve |= {"median": [3.0, 2.0, 2.0, 1.5, 1.0], "largest": [90.0, 40.0, 9.0, 2.0, 1.0]}
    made = {"samples": 7, "smallest_norm": 1.01, "largest_norm": 90.0, "guaranteed": True}
    made |= {"guarantee": "at any depth", "holds": True, "symplectic_defect": 3e-16}
    made |= {"symplectic": True, "bounds": [{"text": "a bound <= 7: holds"}], "by_layer": curve}
    made["ranges"] = [{"from": 0, "to": 3, "smallest": 1.01, "largest": 90.0}]
    return {**made, **changes}


@pytest.fixture
def make(tmp_path):
    def make(name, *, accuracy=0.9, log=True, metrics=None, **options):
        run = Run(tmp_path / "runs" / name)
        run.folder.mkdir(parents=True)
        config = TableConfig.of({"data": "swiss_roll", "layers": 4, **options})
        run.config_file.write_text(config.to_toml())
        if log:
            entries = [
                {"epoch": e, "loss": 1 / e, "accuracy": min(1.0, 0.5 + e / 20)}
                for e in range(1, 15)
            ]
            run.log_file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        whole = {"network": "H2(4 features)", "parameters": 53, "epochs": 14, "train_rows": 9}
        whole |= {"test_rows": 8, "train_accuracy": 0.99, "test_accuracy": accuracy}
        whole |= {"training_seconds": 1.5, "certificate": certificate()}
        write_json(run.metrics_file, whole if metrics is None else metrics)
        return run

    return make


def test_the_page_stands_by_itself(make, tmp_path):
    run = make("one")
    (run.folder / "decision_regions.png").write_bytes(PNG)
    text = report.page([run, make("two", seed=1, accuracy=0.8)])
    assert text.startswith("<!DOCTYPE html>")
    page = Page(text)
    outside = [link for link in page.links if not link.startswith(("#", "data:image/png;base64,"))]
    assert outside == []
    assert not re.search(r"https?:|url\(|@import", text)
    assert {"script", "link", "iframe"}.isdisjoint(tag for tag, _ in page.tags)
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} == set(page.ids)
    (image,) = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert base64.b64decode(image.partition(",")[2]) == PNG
    assert ("meta", {"charset": "utf-8"}) in page.tags
    names = [attrs.get("name") for tag, attrs in page.tags if tag == "meta"]
    assert "viewport" in names


def test_the_page_has_what_was_reproduced(make, tmp_path):
    pytest.importorskip("markdown_it")
    (tmp_path / "table-one.md").write_text("# A table\n\n| | x |\n| --- | --- |\n| row | 1 |\n")
    (tmp_path / "fig-one.png").write_bytes(PNG)
    page = Page(report.page([make("one")], tmp_path))
    text = "".join(page.text)
    assert "Reproduced from the paper" in text
    assert "A table" in text
    assert "fig one" in [attrs["alt"] for tag, attrs in page.tags if tag == "img"]
    assert "Reproduced" not in report.page([make("two")], tmp_path / "runs")


def test_the_page_tells_scores_spread_and_certificates(make):
    text = report.page([make("one"), make("two", seed=1, accuracy=0.8)])
    for words in ("90.00%", "80.00%", "85.00%", "7.07%", "Norm at least 1: holds", "1.01"):
        assert words in text
    assert "A bound &lt;= 7: holds." in text
    assert "Symplectic: yes, norm" in text
    assert "Over seeds" in text
    assert "Over seeds" not in report.page([make("three", seed=2)])
    assert "learning-rate = 0.05" in text


def test_a_broken_guarantee_and_none_at_all_are_told(make):
    broken = {"certificate": certificate(holds=False, smallest_norm=0.9)}
    assert "DOES NOT HOLD" in report.page([make("broken", metrics=broken)])
    none = certificate(holds=None, guaranteed=False, guarantee="it can vanish")
    assert "No guarantee: it can vanish." in report.page(
        [make("none", metrics={"certificate": none})]
    )


def test_everything_from_files_is_escaped(make, tmp_path):
    metrics = {"network": EVIL, "parameters": EVIL, "train_accuracy": EVIL, "epochs": [EVIL]}
    metrics["certificate"] = certificate(guarantee=EVIL, samples=EVIL, ranges=[{"from": EVIL}])
    run = make(EVIL.replace("/", "\\"), metrics=metrics)
    run.config_file.write_text(run.config_file.read_text() + f"# {EVIL}\n")
    damaged = make("damaged")
    damaged.config_file.write_text(f"[train]\n'{EVIL.replace(chr(39), '')}' = 3\n")
    text = report.page([run, damaged])
    page = Page(text)
    assert "<script" not in text
    assert {"script"}.isdisjoint(tag for tag, _ in page.tags)
    assert "alert" in "".join(page.text)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"certificate": 3},
        {"certificate": {"by_layer": {"layers": [0, "x"], "smallest": None}, "bounds": [1]}},
        {"certificate": {"by_layer": {"layers": [0, 1], "smallest": [None, None]}}},
        {"certificate": {"by_layer": {"layers": [0], "smallest": [1e308], "median": [1e-300]}}},
        {"certificate": {"ranges": [3, {}], "symplectic_defect": "no", "holds": "maybe"}},
        {"test_accuracy": 10**400, "train_accuracy": True, "epochs": None},
        {"train_r2": 0.5, "train_rmse": 3.0, "test_rmse": 4.0},
    ],
)
def test_odd_metrics_make_a_page_all_the_same(make, metrics):
    run = make("odd")
    run.metrics_file.write_text(json.dumps(metrics))
    page = Page(report.page([run]))
    assert str(run.folder) in page.text


@pytest.mark.parametrize("file", ["metrics.json", "config.toml", "log.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[3]", b'{"epoch": "x"}\n', b"{"])
def test_a_damaged_run_is_shown_as_far_as_it_can_be(make, file, content):
    run = make("run")
    (run.folder / file).write_bytes(content)
    page = Page(report.page([run, make("whole", seed=5)]))
    assert "whole" in "".join(page.text)
    if file == "config.toml" or (file == "metrics.json" and content != b'{"epoch": "x"}\n'):
        assert "damaged" in "".join(page.text)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.json", '{"pictures": 3}'),
        ("metrics.json", '{"epochs": {"a": 1}}'),
        ("metrics.json", '{"test_accuracy": Infinity}'),
        ("metrics.json", "[" * 10**5),
        ("metrics.json", '{"a": ' + "[" * 60 + "]" * 60 + "}"),
        ("log.jsonl", '{"epoch": "x"}\n'),
        ("log.jsonl", "[" * 10**5 + "\n"),
        ("config.toml", "[train]\ndata = 3\n"),
        ("config.toml", "[train]\ndrop = " + "[" * 10**5),
    ],
)
def test_one_broken_run_is_named_and_the_others_are_shown(make, file, content, tmp_path, capsys):
    broken, whole = make("broken"), make("whole", seed=5)
    (broken.folder / file).write_text(content)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("2 runs in")
    assert str(broken.folder / file) in said.err
    assert str(whole.folder) not in said.err
    text = "".join(Page(out.read_text()).text)
    assert f"damaged: {broken.folder / file}" in text or f"{broken.folder / file}" in text
    assert str(whole.folder) in text
    assert "90.00%" in text  # of the other


def test_what_is_whole_of_a_broken_run_is_shown(make):
    run = make("broken")
    run.log_file.unlink()
    run.log_file.mkdir()
    text = report.page([run])
    assert "90.00%" in text
    assert "damaged" in text
    assert "learning-rate = 0.05" in text


def test_a_run_without_an_end_says_so(make):
    run = make("run", log=False)
    run.metrics_file.unlink()
    assert "not complete" in report.page([run])


def test_runs_are_found_once_and_below(make, tmp_path):
    one, two = make("one"), make("group/two")
    found = report.find_runs([tmp_path / "runs", one.folder])
    assert [run.folder for run in found] == [two.folder, one.folder]
    with pytest.raises(CheckpointError, match="there is no folder"):
        report.find_runs([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is no run in"):
        report.find_runs([tmp_path / "empty"])


def test_a_picture_that_is_none_is_left_out(make, monkeypatch):
    run = make("run")
    picture = run.folder / "decision_regions.png"
    picture.write_bytes(b"<svg>")
    assert "<img" not in report.page([run])
    picture.write_bytes(PNG)
    monkeypatch.setattr(reproduced, "LARGEST", 3)
    assert "<img" not in report.page([run])


def test_runs_are_listed_without_what_all_their_names_begin_with(make, tmp_path):
    runs = [make("one"), make("group/two", seed=1)]
    assert report.short_names(runs) == ["one", "group/two"]
    assert report.short_names([*runs, Run("three")]) == [
        *(str(run.folder) for run in runs),
        "three",
    ]
    assert report.short_names([Run("here"), Run("there/too")]) == ["here", "there/too"]


def test_the_page_has_colours_for_the_dark():
    style = report.TEMPLATE.read_text().partition("<style>")[2].partition("</style>")[0]
    light, dark = style.split("prefers-color-scheme: dark", 1)
    names = set(re.findall(r"(--\w+):", light))
    assert names == set(re.findall(r"(--\w+):", dark))
    assert set(re.findall(r"var\((--\w+)\)", style)) <= names


# What the page says of predictions


def of_classes(rows=60, classes="abc"):
    random = np.random.default_rng(0)
    chances, true = random.dirichlet([1.0] * len(classes), rows), random.integers(0, 2, rows)
    return {"part": "test", **evaluation.of_classes(true, chances, classes, usual=1)}


def words_of(run):
    return " ".join("".join(Page(report.page([run])).text).split())


def test_the_score_comes_first_and_says_what_it_means(make):
    found = {"test_accuracy": 0.5, "test_rows": 60, "target": "kind", "inputs": 4}
    run = make("run", metrics={**found, "task": "classification", "evaluation": of_classes()})
    words = words_of(run)
    assert "50.00% of 60 test rows predicted right" in words
    assert "Always saying “b” would be right in" in words
    assert "Predicts “kind”, one of 3 classes (a, b, c), from 4 columns of swiss_roll." in words
    for name in ("precision", "recall", "F1", "Confusion matrix", "Calibration error (ECE)"):
        assert name in words


def test_a_confusion_matrix_has_a_frame_around_what_is_right(make):
    given = of_classes()
    page = Page(report.page([make("run", metrics={"evaluation": given})]))
    right = [attrs for tag, attrs in page.tags if tag == "td" and attrs.get("class") == "right"]
    assert len(right) == 3
    shown = RunOnPage(make("again", metrics={"evaluation": given})).predictions.confusion
    assert [[int(count) for count, _, _ in row] for _, row in shown.rows] == given["confusion"]
    assert shown.columns == ["a", "b", "c"]


def test_classes_with_long_names_are_numbered(make):
    names = [f"a rather long name of the class {k}" for k in "abc"]
    run = make("run", metrics={"evaluation": of_classes(classes=names)})
    shown = RunOnPage(run).predictions.confusion
    assert shown.columns == ["1", "2", "3"]
    assert shown.rows[1][0] == f"2 {names[1]}"
    assert "one of 3 classes (a rather long name of the class a," in words_of(run)


def test_many_classes_have_a_list_of_mistakes(make):
    names = [f"class {k}" for k in range(70)]
    words = words_of(make("run", metrics={"evaluation": of_classes(500, names)}))
    assert "Most frequent mistakes" in words
    assert "10 classes with fewer rows are left out" in words
    assert "Confusion matrix" not in words


def test_values_are_drawn_against_true_ones(make):
    true = np.linspace(0, 10, 500)
    given = {"part": "test", **evaluation.of_values(true, true + np.sin(9 * true))}
    found = {"test_r2": 0.9, "test_rmse": 0.7, "test_rows": 500, "task": "regression"}
    words = words_of(make("run", metrics={**found, "target": "size", "evaluation": given}))
    assert "R² 0.9 on 500 test rows (1 is perfect, 0 is no better than the mean)" in words
    assert "200 of 500 rows are shown" in words
    assert "Half of the errors lie between" in words
    assert "predicted size" in words


def test_runs_without_rows_to_test_with_say_so(make):
    given = {**of_classes(), "part": "train"}
    words = words_of(make("run", metrics={"train_accuracy": 0.75, "evaluation": given}))
    assert "75.00% of the rows trained on predicted right" in words
    assert "on 60 training rows" in words
    assert "95% interval)" not in words


@pytest.mark.parametrize(
    "given",
    [
        3,
        {},
        {"by_class": 3, "confusion": [[1]], "calibration": []},
        {"by_class": [{}, 3], "confusion": [["x", None]], "calibration": {"bins": [{}, 1]}},
        {"by_class": [{"class": EVIL}], "confusion": [[10**400]], "usual": {"class": EVIL}},
        {"calibration": {"error": 1, "bins": [{"confidence": 1, "accuracy": 7, "rows": 1}]}},
        {"points": [[1], [1, "x"], 3, [1, 1]], "residuals": {"edges": [0, 0], "counts": [3]}},
        {"points": [], "residuals": {"edges": [1], "counts": [1], "quantiles": 3}},
        {"accuracy": 2.0, "rows": 0, "classes": "many"},
    ],
)
def test_an_odd_evaluation_makes_a_page_all_the_same(make, given):
    text = report.page([make("odd", metrics={"evaluation": given})])
    Page(text)
    assert "<script" not in text


# What it says of training, gradients and the run itself


def test_held_out_rows_have_curves_and_a_best_epoch(make):
    run = make("run")
    entries = [
        {"epoch": e, "loss": 1 / e, "accuracy": 0.9, "validation_loss": 1 / e + (e > 5)}
        | {"validation_score": 0.5 + 0.01 * e}
        for e in range(1, 11)
    ]
    run.log_file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = RunOnPage(run)
    assert found.best_epoch == 5
    assert [line.name for line, _ in found.loss.lines] == ["loss", "loss on held-out rows"]
    assert len(found.wrong.lines) == 2
    assert found.loss.upright is not None
    assert "Dotted: the best epoch on held-out rows" in words_of(run)
    assert RunOnPage(make("without")).loss.upright is None


def test_the_certificate_is_a_sentence_and_theorems_are_behind_a_fold(make):
    text = report.page([make("run")])
    said = text.index("some direction of the gradient keeps at least its full size: the smallest")
    assert said < text.index("Norms from 1.01") < text.index("<details><summary>Theorem")
    assert text.index("<details><summary>Theorem") < text.index("A bound &lt;= 7: holds.")
    assert "cannot vanish" not in text


def test_a_linear_network_is_said_to_be_linear(make):
    certified = certificate(linear=True, idle=True, smallest_norm=1.0, largest_norm=1.0)
    words = words_of(make("run", metrics={"certificate": certified}))
    assert "The network is linear" in words
    assert "1 (linear)" in words


def test_a_norm_below_1_is_not_rounded_up_to_1(make):
    shrinking = certificate(holds=None, guaranteed=False, smallest_norm=0.99997)
    assert RunOnPage(make("run", metrics={"certificate": shrinking})).smallest == "0.9999"


def test_what_was_not_computed_is_never_said_to_hold(make):
    certified = certificate(holds=None, unknown="the norms, because a state is NaN")
    text = report.page([make("run", metrics={"certificate": certified})])
    assert "COULD NOT BE COMPUTED" in text
    assert "NOT KNOWN" in text
    assert "1: holds" not in text


def test_columns_are_the_options_that_differ(make):
    runs = [RunOnPage(make("one")), RunOnPage(make("two", seed=1, learning_rate=0.01))]
    shown = report.Overview(runs)
    assert shown.head[:4] == ["run", "test accuracy", "learning rate", "seed"]
    assert [rest[:2] for _, _, rest in shown.rows] == [["0.05", "0"], ["0.01", "1"]]
    assert ("layers", "4") in shown.common
    alone = report.Overview(runs[:1])
    assert alone.differing == []
    other = RunOnPage(make("three", data="double_moons", epochs=3))
    assert report.Overview([*runs, other]).differing == ["data", "learning_rate", "seed"]
    assert "epochs" not in dict(report.Overview([*runs, other]).common)


@pytest.mark.parametrize("network", ["h2", "mlp"])
def test_the_command_repeats_the_run(network, tmp_path):
    table = tmp_path / "a table.csv"
    table.write_text("x,y,kind\n" + "".join(f"{k},{k % 3},{'ab'[k % 2]}\n" for k in range(40)))
    flags = ["--data", str(table), "--target", "kind", "--epochs", "2", "--drop", "y", "--quiet"]
    out = tmp_path / "runs" / "made"
    flags += ["--network", network, "--layers", "2", "--features", "4"]
    assert main(["train", *flags, "--out", str(out)]) == 0
    run = Run(out)
    words = shlex.split(command(run, run.metrics()))
    assert words[:2] == ["hdnn", "train"]
    assert words[-2:] == ["--out", f"{out}-again"]
    assert "--learning-rate" not in words
    assert main([*words[1:], "--quiet"]) == 0
    assert Run(f"{out}-again").config() == run.config()
    again = Run(f"{out}-again").metrics()
    assert again["evaluation"] == run.metrics()["evaluation"]
    assert command(run, {"processes": 2}).startswith("torchrun --nproc-per-node 2 -m hdnn train ")


def test_small_numbers_are_not_rounded_to_all_or_nothing():
    assert percent(0.9999999) == "99.9%"
    assert percent(1) == "100.0%"
    assert percent(None) == "–"
    low, high = interval(1.0, 10)
    assert high == 1
    assert 0.6 < low < 0.8
