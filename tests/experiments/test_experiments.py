"""The paper's tables and figures: resumable jobs, pages, and small runs of each kind."""

from __future__ import annotations

import json

import pytest
import torch

from hdnn import experiments
from hdnn.data import ImageData
from hdnn.errors import DataError, OptionError
from hdnn.experiments import images, planar, runner


def square(job):
    return {"value": job["x"] ** 2}


def test_jobs_are_not_run_again(tmp_path):
    jobs = [{"x": x} for x in range(4)]
    calls = []

    def work(job):
        calls.append(job)
        return square(job)

    runner.run_jobs(jobs[:2], work, tmp_path)
    results = runner.run_jobs(jobs, work, tmp_path)
    assert len(calls) == 4
    assert [result["value"] for _, result in results] == [0, 1, 4, 9]


def test_a_line_that_was_cut_off_is_made_again_and_a_damaged_one_refused(
    tmp_path,
):
    jobs = [{"x": x} for x in range(3)]
    runner.run_jobs(jobs, square, tmp_path)
    path = tmp_path / "results.jsonl"
    text = path.read_text()
    path.write_text(text[:-8])
    assert runner.run_jobs(jobs, square, tmp_path)[2][1] == {"value": 4}
    assert path.read_text() == text
    path.write_text("nonsense\n" + text)
    with pytest.raises(DataError, match="line 1"):
        runner.run_jobs(jobs, square, tmp_path)


def test_jobs_run_in_several_processes(tmp_path):
    jobs = [{"x": x} for x in range(5)]
    results = runner.run_jobs(jobs, square, tmp_path, processes=2)
    assert [result["value"] for _, result in results] == [0, 1, 4, 9, 16]


def test_cells_are_counted_without_and_with_rounding():
    rows = [{"mean": 99.97, "paper": 100.0}, {"mean": 99.9, "paper": 99.9}]
    rows.append({"mean": 90.0, "paper": 91.0})
    text = runner.counted(rows)
    assert text == "1 of 3 means reach the paper's accuracy (2 within rounding)"


def test_the_tables_have_the_papers_cells():
    assert len(planar.places()) == 40
    assert len(planar.TABLE_II) * 4 == 24
    assert len(images.TABLE_III) == 9


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ("masked", 64),
        ("centralised", 144),
        ("masked, full K", 112),
        ("centralised, full K", 272),
    ],
)
def test_layers_on_the_ring_have_the_parameters_of_the_table(variant, count):
    model = planar.ring_network(variant, 2, 0)
    assert sum(p.numel() for p in model.net.parameters()) == 2 * count


def test_our_recipe_reaches_the_paper_in_a_cell():
    job = planar.job_one("H1", "double_moons", 2, seed=0)
    assert planar.measure(job)["accuracy"] >= 99.9


def small(monkeypatch):
    """Table I with one small cell."""
    monkeypatch.setattr(
        planar, "TABLE_I", {("double_moons", 1): (0.0, 0.0, 0.0, 0.0, 100.0)}
    )
    monkeypatch.setattr(planar, "EPOCHS", {"double_moons": 1})
    monkeypatch.setattr(
        planar,
        "MOVED",
        {"double_moons": {"copies": 1, "moved": 0.1, "starts": 1}},
    )


def test_table_one_is_written_as_json_and_as_a_page(
    tmp_path, monkeypatch, capsys
):
    small(monkeypatch)
    options = [
        "--out",
        str(tmp_path),
        "--runs",
        str(tmp_path / "runs"),
        "--seeds",
        "1",
    ]
    monkeypatch.setitem(planar.PAPER, "epochs", 1)
    assert experiments.main("table-planar", [*options, "--processes", "1"]) == 0
    result = json.loads((tmp_path / "table-planar.json").read_text())
    assert result["command"] == "hdnn reproduce table-planar --seeds 1"
    assert set(result["recipes"]) == {"paper", "ours"}
    assert len(result["recipes"]["ours"]) == 5
    for row in result["recipes"]["paper"]:
        assert row["T"] == 0.8  # as published, not searched
    page = (tmp_path / "table-planar.md").read_text()
    assert "0.8 for the double moons" in page
    assert "means reach the paper's accuracy" in page
    assert page in capsys.readouterr().out


def test_the_figure_of_gradients_shows_h2_above_one_and_the_mlp_below(
    tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        planar, "WATCHED", {"H2": ("H2", 8, {}), "MLP": ("MLP", 8, {})}
    )
    monkeypatch.setattr(planar, "SAMPLES", 20)
    options = ["--out", str(tmp_path), "--every", "400"]
    assert experiments.main("fig-gradients", options) == 0
    networks = json.loads((tmp_path / "fig-gradients.json").read_text())[
        "networks"
    ]
    assert networks["H2"]["smallest"] >= 1 - 1e-9
    assert networks["MLP"]["smallest"] < 0.1
    assert (tmp_path / "fig-gradients.png").exists()
    assert (
        (tmp_path / "fig-gradients-h2.csv").read_text().startswith("step,layer")
    )


def test_the_exploding_example_agrees_with_its_closed_forms(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    assert experiments.main("fig-exploding", ["--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "fig-exploding.json").read_text())
    for row in result["linear"]:
        assert row["period"] == pytest.approx(row["exact period"], rel=1e-9)
        assert row["slope"] == pytest.approx(row["exact slope"], rel=5e-3)
    assert (tmp_path / "fig-exploding.png").exists()


def tiny(channels, size, count=40):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(
        256, (count, channels, size, size), generator=generator
    ).byte()
    t = torch.arange(count) % 10
    classes = tuple(map(str, range(10)))
    statistics = ((0.5,) * channels, (0.3,) * channels)
    return ImageData(
        "tiny", pixels, t, pixels, t, classes, *statistics, remark="made up"
    )


def test_table_three_continues_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "load_mnist", lambda: tiny(1, 28, 200))
    monkeypatch.setattr(images, "TABLE_III", {("h1", 2): (99.0, 98.0)})
    options = [
        "--out",
        str(tmp_path),
        "--runs",
        str(tmp_path / "runs"),
        "--device",
        "cpu",
    ]
    options += ["--seeds", "1", "--recipes", "paper"]
    with pytest.raises(KeyboardInterrupt):
        experiments.main(
            "table-mnist", [*options, "--epochs", "1", "--minutes", "0"]
        )
    assert experiments.main("table-mnist", [*options, "--epochs", "1"]) == 0
    result = json.loads((tmp_path / "table-mnist.json").read_text())
    assert [row["network"] for row in result["rows"]] == [
        "h1",
        "h2",
        "h2",
        "h2",
        "h2",
    ]
    assert not list((tmp_path / "runs" / "unfinished").iterdir())


def test_unknown_experiments_are_refused():
    with pytest.raises(OptionError, match="table-planar"):
        experiments.main("table-plane", [])
