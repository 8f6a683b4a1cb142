"""Experiments run, go on after an interruption, and say what they found."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hdnn import image_recipes
from hdnn.data import cifar10
from hdnn.errors import DataError, OptionError
from hdnn.experiments import (
    fig_cifar,
    fig_distributed,
    fig_exploding,
    fig_gradients,
    fig_planar,
    runner,
    table_cifar,
    table_distributed,
    table_planar,
)

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def double(job):
    if job.get("fails"):
        raise KeyboardInterrupt
    return {"twice": 2 * job["x"], "runs": 1}


def test_results_come_in_the_order_of_the_jobs_and_are_kept(tmp_path):
    path = tmp_path / "runs" / "results.jsonl"
    jobs = [{"x": x} for x in range(5)]
    assert [r["twice"] for r in runner.run_all(jobs, double, path)] == [0, 2, 4, 6, 8]

    def never(job):
        raise AssertionError(job)

    assert [r["twice"] for r in runner.run_all(jobs[::-1], never, path)] == [8, 6, 4, 2, 0]
    both = runner.run_all([*jobs, {"x": 9}, {"x": 10}], double, path, processes=2)
    assert [r["twice"] for r in both][-2:] == [18, 20]


def test_what_was_done_before_an_interruption_is_not_done_again(tmp_path):
    path = tmp_path / "results.jsonl"
    jobs = [{"x": 1}, {"x": 2}, {"x": 3, "fails": True}]
    with pytest.raises(KeyboardInterrupt):
        runner.run_all(jobs, double, path)
    path.write_text(path.read_text() + '{"job": {"x"')  # killed while it wrote
    assert len(runner._read(path)) == 2
    assert len(path.read_text().splitlines()) == 2
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(DataError, match="line 1"):
        runner.run_all(jobs, double, path)


def test_a_summary_has_mean_spread_best_and_worst():
    assert runner.summary([1.0, 2.0, 3.0]) == {
        "mean": 2.0,
        "std": 1.0,
        "best": 3.0,
        "worst": 1.0,
        "seeds": 3,
    }
    assert runner.summary([5.0])["std"] == 0.0


def test_mistakes_are_one_sentence_and_exit_code_2(capsys):
    def fails(argv):
        raise DataError("no such thing.")

    assert runner.guarded(fails) == 2
    assert capsys.readouterr().err == "no such thing.\n"

    def full(argv):
        raise OSError(28, "No space left on device", "result.json")

    assert runner.guarded(full) == 2
    assert "No space left" in capsys.readouterr().err

    def stopped(argv):
        raise KeyboardInterrupt

    assert runner.guarded(stopped) == 130


EXPERIMENTS = [
    fig_cifar,
    fig_distributed,
    fig_exploding,
    fig_gradients,
    fig_planar,
    table_distributed,
    table_planar,
]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("flags", [["--nonsense"], ["stray"], ["--seed", "x"], ["--out"]])
def test_flags_that_are_not_known_are_one_sentence_and_exit_code_2(experiment, flags, capsys):
    assert runner.guarded(experiment.main, flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith(f"; see hdnn reproduce {experiment.NAME} -- --help.\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seeds", "0"], "argument --seeds: must be a whole number >= 1, but got '0'"),
        (["--processes", "two"], "argument --processes: must be a whole number >= 1"),
        (["--recipes", "mine"], "invalid choice: 'mine'"),
    ],
)
def test_a_mistake_in_a_flag_names_the_flag(flags, message):
    with pytest.raises(OptionError, match=message):
        table_planar.main(flags)


def test_a_mistake_is_one_sentence_on_the_command_line_too():
    module = [sys.executable, "-m", "hdnn.experiments.fig_planar", "--nonsense"]
    done = subprocess.run(module, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("unrecognized arguments: --nonsense; see")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def short(monkeypatch):
    for recipe in (*table_planar.RECIPES.values(), table_distributed.OPTIONS):
        monkeypatch.setitem(recipe, "epochs", 1)
        monkeypatch.setitem(recipe, "batch", 1000)


def test_table_planar_fills_all_cells(short, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        table_planar, "PAPER", {("double_moons", 1): (92.5, 91.3, 97.6, 100.0, 94.4)}
    )
    monkeypatch.setattr(table_planar, "T_TRIED", (0.8, 1.2))
    monkeypatch.setattr(table_planar, "ROUNDS", ((2, [1000]), (1, [1001])))
    options = ["--seeds", "2", "--processes", "1", "--out", str(tmp_path), "--json"]
    assert table_planar.main([*options, "--runs", str(tmp_path / "runs")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["recipes"]) == {"paper", "ours"}
    for rows in result["recipes"].values():
        assert [row["network"] for row in rows] == list(table_planar.NETWORKS)
        assert all(row["seeds"] == 2 and 0 < row["mean"] <= 100 for row in rows)
    assert json.loads((tmp_path / "table-planar.json").read_text()) == result
    assert "double moons, 1" in (tmp_path / "table-planar.md").read_text()


def test_a_printed_100_is_reached_by_what_rounds_to_it():
    assert table_planar.reached(99.95, 100.0)
    assert not table_planar.reached(99.9, 100.0)
    assert table_planar.reached(97.6, 97.6)


def test_table_distributed_has_the_parameters_that_it_says(short, tmp_path, monkeypatch, capsys):
    counts = {"masked": 64, "centralised": 144, "masked, full K": 112, "centralised, full K": 272}
    for variant, count in counts.items():
        net = table_distributed.network(variant, 3, 0).net
        assert sum(p.numel() for p in net.parameters()) == 3 * count
        assert f"{count} parameters" in table_distributed.VARIANTS[variant]
    monkeypatch.setattr(table_distributed, "PAPER", {("swiss_roll", 2): (91.05, 99.9)})
    options = ["--seeds", "1", "--processes", "1", "--out", str(tmp_path)]
    assert table_distributed.main([*options, "--runs", str(tmp_path / "runs")]) == 0
    assert "| swiss roll, 2 |" in capsys.readouterr().out


def test_figures_are_drawn(short, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(fig_planar, "FIGURES", {"double_moons": 2})
    assert fig_planar.main(["--out", str(tmp_path)]) == 0
    assert fig_distributed.main(["--out", str(tmp_path), "--seed", "1"]) == 0
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {
        "fig-planar-double_moons.png",
        "fig-distributed-swiss_roll.png",
        "fig-distributed-double_circles.png",
    }
    assert "% of the test points" in capsys.readouterr().out


def test_exploding_gradients_are_measured_beside_their_closed_forms(tmp_path, monkeypatch, capsys):
    for name in ("matplotlib", "scipy"):
        pytest.importorskip(name)
    monkeypatch.setattr(fig_exploding, "T", 30.0)
    monkeypatch.setattr(fig_exploding, "GAMMAS", (0.5,))
    assert fig_exploding.main(["--out", str(tmp_path), "--seed", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["seed"] == 3
    assert [row["eps"] for row in result["linear"]] == [1.0, 1.0, 1.0, 0.1]
    assert all(row["period"]["relative difference"] < 1e-10 for row in result["linear"])
    assert result["linear"][0]["slope per eps t"]["measured"] == pytest.approx(0.328, abs=0.01)
    steep = result["exponential"][-1]
    assert steep["rate"] == pytest.approx(steep["closed form"], rel=1e-9)
    assert json.loads((tmp_path / "fig-exploding.json").read_text()) == result
    assert "| (1, 0) | 1 |" in (tmp_path / "fig-exploding.md").read_text()
    picture = (tmp_path / "fig-exploding.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000


@pytest.mark.parametrize("module", ["scipy", "matplotlib.figure"])
def test_exploding_gradients_need_scipy_and_matplotlib(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert runner.guarded(fig_exploding.main, ["--out", str(tmp_path)]) == 2
    assert "pip install 'hdnn[" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_fig_gradients_watches_all_networks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fig_gradients, "EPOCHS", 1)
    monkeypatch.setattr(fig_gradients, "SAMPLES", 10)
    monkeypatch.setattr(
        fig_gradients, "NETWORKS", {"H2, 4 layers": ("H2", 4), "MLP, 3 layers": ("MLP", 3)}
    )
    assert fig_gradients.main(["--out", str(tmp_path), "--every", "16", "--mean", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["networks"]["H2, 4 layers"]["smallest"] >= 1
    assert result["networks"]["MLP, 3 layers"]["smallest"] < 1
    for file in ("fig-gradients.png", "fig-gradients-mean.png", "fig-gradients.md"):
        assert (tmp_path / file).stat().st_size > 300
    rows = (tmp_path / "fig-gradients-h2-4.csv").read_text().splitlines()
    assert rows[0].startswith("step,layer,smallest")
    assert len(rows) == 1 + 2 * 5


# Table IV
DROP = ["--networks", "resnet56_drop"]


def cifar_row(network, mean):
    like = {"parameters": 10, "epochs": 160, "paper": None, "drop": 0.0}
    return {**like, "network": network, "test": runner.summary([mean - 0.1, mean + 0.1])}


@pytest.mark.parametrize(("dropped", "lead"), [(90.6, "+0.40"), (89.6, "+0.90")])
def test_the_lead_is_over_the_better_of_the_two_resnets(dropped, lead):
    about = {"data": "X", "command": "", "device": "", "remark": "", "on": "", "picture": None}
    rows = [cifar_row("resnet56", 90.1), cifar_row("resnet56_drop", dropped), cifar_row("h1", 91.0)]
    page = table_cifar.markdown({**about, "rows": rows})
    assert "| above the better ResNet-56 |" in page
    assert f"(90.90 to 91.10) | {lead} |" in page
    best = max(dropped, 90.1)
    name = "ResNet-56 with a drop" if best == dropped else "ResNet-56"
    assert f"The better of the two ResNet-56: {name}, {best:.2f}%." in page
    alone = table_cifar.markdown({**about, "rows": rows[1:]})
    assert "| above ResNet-56 |" in alone
    assert "The better of" not in alone


def test_resnet56_leaves_out_as_much_as_the_others_do_in_long_trainings():
    long = image_recipes.LONG
    assert "resnet56_drop" in table_cifar.networks_for(long)
    assert "resnet56_drop" not in table_cifar.networks_for(long - 1)
    jobs = table_cifar.jobs_for(["resnet56", "resnet56_drop", "h1"], 3, 160, validate=False)
    first = {job["network"]: job for job in jobs if job["seed"] == 0}
    assert len(jobs) == 9
    assert first["resnet56"]["recipe"] == first["resnet56_drop"]["recipe"]
    resnet, h1 = (table_cifar.network(first[name]) for name in ("resnet56_drop", "h1"))
    assert resnet.drop == pytest.approx(h1.stages[-1].drop[-1]) == image_recipes.DROP
    assert {image_recipes.drop(name, 160) for name in ("resnet56_drop", "h1", "h2")} == {0.3}
    assert image_recipes.drop("resnet56", 160) == image_recipes.drop("h1", 40) == 0


@pytest.fixture
def recorded(tmp_path):
    """Table IV as it was before ResNet-56 had a drop."""
    table = json.loads((RESULTS / "table-cifar-160.json").read_text())
    table["rows"] = [row for row in table["rows"] if row["network"] != "resnet56_drop"]
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(table))
    return path


def test_rows_of_a_recorded_cifar_table_are_not_trained_again(recorded, tmp_path, monkeypatch):
    before = json.loads(recorded.read_text())
    one = {"parameters": 7, "train": 99.0, "epoch_seconds": 1.0, "curve": [90.0] * 160}

    def trained(jobs, *_, **__):
        assert [(job["network"], job["seed"]) for job in jobs] == [
            ("resnet56_drop", seed) for seed in range(3)
        ]
        return [(job, {**one, "test": 90.0 + job["seed"], "device": "a GPU"}) for job in jobs]

    data = SimpleNamespace(name=before["data"], remark=before["remark"], to=lambda _: data)
    monkeypatch.setattr(cifar10, "load", lambda **_: data)
    monkeypatch.setattr(runner, "run_images", trained)
    options = ["--epochs", "160", "--out", str(tmp_path), "--quiet"]
    assert table_cifar.main([*options, *DROP, "--recorded", str(recorded)]) == 0
    made = tmp_path / "table-cifar-160.json"
    result, page = json.loads(made.read_text()), made.with_suffix(".md").read_text()
    (new,) = [row for row in result["rows"] if row not in before["rows"]]
    assert [row for row in result["rows"] if row != new] == before["rows"]
    assert (new["network"], new["drop"], new["test"]["mean"]) == ("resnet56_drop", 0.3, 91.0)
    assert result["device"] == f"{before['device']}, a GPU"
    names = " ".join(row["network"] for row in result["rows"])
    assert f"-- --epochs 160 --seeds 3 --finished --networks {names}`" in page

    monkeypatch.setattr(cifar10, "load", None)  # a complete table needs no images
    again = ["--epochs", "160", "--out", str(tmp_path / "again"), "--quiet", *DROP]
    assert table_cifar.main([*again, "--recorded", str(made)]) == 0
    for file in (made, made.with_suffix(".md")):
        assert (tmp_path / "again" / file.name).read_text() == file.read_text()


def test_a_recorded_table_of_other_trainings_is_refused(recorded, tmp_path, monkeypatch, capsys):
    def told(*flags):
        every = ["--out", str(tmp_path / "out"), *DROP, "--recorded", *flags]
        assert runner.guarded(table_cifar.main, every) == 2
        return capsys.readouterr().err

    assert "a table of other trainings; give one of 40 epochs" in told(str(recorded))
    long = (str(recorded), "--epochs", "160")
    assert "other trainings" in told(*long, "--validate")
    assert "cannot read" in told(str(tmp_path / "nothing.json"))
    for text in ("{", "[]", '{"rows": []}', '{"rows": 3}', '"rows"'):
        (tmp_path / "wrong.json").write_text(text)
        assert "is no table of `hdnn reproduce table-cifar`" in told(str(tmp_path / "wrong.json"))
    others = SimpleNamespace(name="CIFAR-10", remark="", to=lambda _: others)
    monkeypatch.setattr(cifar10, "load", lambda **_: others)
    assert "is a table of CIFAR-10 (JPEG q75), but the images here are CIFAR-10;" in told(*long)
    assert not (tmp_path / "out").exists()
