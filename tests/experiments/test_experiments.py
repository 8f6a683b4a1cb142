"""Experiments run, go on after an interruption, and say what they found."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hdnn.data import cifar10, planar
from hdnn.errors import ConvergenceError, DataError, OptionError
from hdnn.experiments import (
    cells,
    fig_cifar,
    fig_distributed,
    fig_exploding,
    fig_gradients,
    fig_planar,
    out,
    recipe_search,
    runner,
    table_cifar,
    table_distributed,
    table_mnist,
    table_planar,
)
from hdnn.training.images import recipes as image_recipes

RESULTS = Path(__file__).parents[2] / "docs" / "results"


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


def test_recorded_results_are_replaced_only_where_a_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table, figure = runner.arguments(None, "table-x"), runner.figure_arguments(None, "fig-x")
    assert table.parse_args([]).out == figure.parse_args([]).out == out.OUT
    out.OUT.mkdir(parents=True)
    (out.OUT / "table-x-160.json").write_text("")  # of another experiment
    (out.OUT / "fig-other.png").write_text("")
    assert table.parse_args([]).out == figure.parse_args([]).out == out.OUT
    for parser, name in ((table, "table-x.md"), (figure, "fig-x-moons.png")):
        (out.OUT / name).write_text("")
        with pytest.raises(OptionError, match=f"{name} is there already.*--out runs/reproduced"):
            parser.parse_args([])
        assert parser.parse_args(["--out", str(out.OUT)]).out == out.OUT
    Path("docs/results").mkdir(parents=True)
    Path("docs/results/table-y.md").write_text("recorded")
    made = runner.arguments(None, "table-y").run(
        ["--processes", "1"], lambda _: {}, lambda _: "page"
    )
    assert (made, Path("docs/results/table-y.md").read_text()) == (0, "recorded")
    assert (out.OUT / "table-y.md").read_text() == "page"
    assert "see hdnn report --results runs/reproduced" in capsys.readouterr().err


def test_the_command_passes_the_folder_on(monkeypatch):
    given = []
    monkeypatch.setattr(fig_planar, "main", lambda argv: given.append(argv) or 0)
    main = pytest.importorskip("hdnn.__main__").main
    pytest.importorskip("typer")
    assert main(["reproduce", "fig-planar", "--out", "here", "--", "--seed", "2"]) == 0
    assert main(["reproduce", "fig-planar"]) == 0
    assert given == [["--out", "here", "--seed", "2"], []]


@pytest.fixture
def short(monkeypatch):
    for recipe in (*table_planar.RECIPES.values(), table_distributed.OPTIONS):
        monkeypatch.setitem(recipe, "batch", 1000)
    for recipe in ("paper", "published"):
        monkeypatch.setitem(table_planar.RECIPES[recipe], "epochs", 1)
    distributed = table_distributed.MORE.values()
    for more in (*table_planar.MORE.values(), *distributed):
        for name, value in {"epochs": 1, "copies": 1, "starts": 2}.items():
            monkeypatch.setitem(more, name, value)


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


def test_99_95_is_below_100_and_within_rounding_of_it():
    assert not cells.reached(99.95, 100.0)
    assert cells.within_rounding(99.95, 100.0)
    assert not cells.within_rounding(99.9475, 100.0)
    assert cells.reached(sum([97.6] * 10) / 10, 97.6)  # whatever the last bit of the sum is
    for value in (97.55, 97.5975):  # only a printed 100 is rounded
        assert not cells.reached(value, 97.6)
        assert not cells.within_rounding(value, 97.6)
    pairs = [(99.95, 100.0), (100.0, 100.0), (97.6, 97.6), (97.5, 97.6)]
    text = cells.sentence([{"mean": mean, "paper": paper} for mean, paper in pairs])
    assert text.startswith("2 of 4 cells have their mean at or above the paper's figure; within")
    assert text.endswith("it is 3.")


def test_tables_count_what_is_there_unrounded():
    row = {"data": "double_moons", "layers": 1, "std": 0.0, "worst": 99.0, "best": 100.0, "T": 1.0}
    rows = [{**row, "mean": mean, "paper": 100.0, "failed": 0} for mean in (99.95, 100.0)]
    pages = [table_planar.markdown({"command": "", "seeds": 1, "recipes": {"ours": rows}})]
    row = {"data": "swiss_roll", "layers": 2, "variant": "masked"}
    pages += [
        table_distributed.markdown(
            {"command": "", "seeds": 1, "rows": [{**each, **row} for each in rows]}
        )
    ]
    for page in pages:
        assert "1 of 2 cells have their mean at or above the paper's figure" in page
        assert "within rounding, 99.95 being 100, it is 2." in page
        assert "**100.00 ± 0.00**" in page
        assert "**99.95" not in page


# Starts


class Points:
    """Two classes that any network tells apart."""

    x = torch.tensor([[-1.0, -1.0], [1.0, 1.0]]).repeat(20, 1)
    t = torch.tensor([0, 1]).repeat(20)


def starts_made(monkeypatch, losses, **more):
    """Which start is taken, and how many are made, where trainings come to these losses."""
    seen = []

    def fake_fit(model, x, t, *, seed, **_):
        seen.append((x, seed))
        if losses[model.start] is None:
            raise ConvergenceError("no solution.")

    def network_of(seed):
        start = (seed - 7) // 1_000_000
        return SimpleNamespace(start=start, loss=lambda *_: torch.tensor(losses[start]))

    monkeypatch.setattr(cells, "fit", fake_fit)
    like = {"moved": 0.1, "copies": 3, "starts": len(losses), **more}
    model, made = cells.best_start(network_of, Points.x, Points.t, 7, **like)
    return model.start, made, seen


def test_the_start_of_least_loss_is_taken_and_one_that_is_enough_is_the_last(monkeypatch):
    assert starts_made(monkeypatch, [0.3, 0.1, 0.2])[:2] == (1, 3)
    assert starts_made(monkeypatch, [0.3, cells.ENOUGH / 2, 0.0])[:2] == (1, 2)
    assert starts_made(monkeypatch, [None, 0.2, 0.3])[:2] == (1, 3)
    with pytest.raises(ConvergenceError, match="no solution"):
        starts_made(monkeypatch, [None, None])


def test_points_are_moved_by_no_more_than_is_said_and_alike_for_all_starts(monkeypatch):
    seen = starts_made(monkeypatch, [0.3, 0.1, 0.2])[2]
    assert len({seed for _, seed in seen}) == 3
    for x, _ in seen:
        torch.testing.assert_close(x, seen[0][0], rtol=0, atol=0)
        distance = (x - Points.x.repeat(3, 1)).abs()
        assert 0.09 < distance.max() <= 0.1 + 1e-6
    unmoved = starts_made(monkeypatch, [0.3], moved=0.0, copies=1)[2]
    assert torch.equal(unmoved[0][0], Points.x)


def test_our_recipe_never_looks_at_the_test_points(short, monkeypatch):
    job = table_planar.job_of("H1", "double_moons", 1, 0)
    data = planar.double_moons(seed=0)
    seen = []
    monkeypatch.setattr(cells, "fit", lambda model, x, t, **_: seen.append((x, t)))
    table_planar.trained(job, data.x_train, data.t_train)
    moved = job["more"]["moved"]
    for x, t in seen:
        assert (x - data.x_train).abs().max() <= moved + 1e-6
        assert torch.equal(t, data.t_train)
    assert len(seen) == 2


def test_the_search_has_seeds_of_its_own_and_takes_the_recipe_of_the_tables(
    short, tmp_path, monkeypatch, capsys
):
    cells = {
        "planar": [("H1", "double_moons", 1)],
        "distributed": [("masked", "swiss_roll", 2)],
        "general": [("masked, full K", "swiss_roll", 2)],
    }
    monkeypatch.setattr(recipe_search, "CELLS", cells)
    for table, tried in recipe_search.TRIED.items():
        (cell,) = cells[table]
        taken = recipe_search.job_of(table, cell, tried[recipe_search.TAKEN], 0)
        own = table_planar if table == "planar" else table_distributed
        starts = {"starts": 1} if table == "general" else {}
        assert taken["more"] == own.MORE[cell[1]] | starts
        few = {name: tried[name] for name in (list(tried)[-2], recipe_search.TAKEN)}
        monkeypatch.setitem(recipe_search.TRIED, table, few)
    assert min(recipe_search.FIRST.values()) >= 1012  # after all seeds of the tables
    options = ["--seeds", "1", "--processes", "1", "--out", str(tmp_path), "--json"]
    assert recipe_search.main([*options, "--runs", str(tmp_path / "runs")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [len(rows) for rows in result["tables"].values()] == [2, 2, 2]
    seeds = {
        json.loads(line)["job"]["seed"]
        for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()
    }
    assert seeds == set(recipe_search.FIRST.values())
    page = (tmp_path / "recipe-search.md").read_text()
    assert "`python -m hdnn.experiments.recipe_search --seeds 1`" in page
    assert "| masked, swiss roll, 2 [91.05] |" in page


# Recorded pages


def recorded_pages():
    """Each recorded result of an experiment, with the experiment."""
    others = (recipe_search, table_cifar, table_mnist)
    by_name = {experiment.NAME: experiment for experiment in (*EXPERIMENTS, *others)}
    for file in sorted(file for name in by_name for file in RESULTS.glob(f"{name}*.json")):
        name = file.stem.rstrip("0123456789").rstrip("-")
        yield pytest.param(file, by_name[name], id=file.stem)


@pytest.mark.parametrize(("file", "experiment"), [*recorded_pages()])
def test_a_recorded_page_is_what_its_result_makes(file, experiment):
    result = json.loads(file.read_text())
    page = experiment.markdown(result)
    assert file.with_suffix(".md").read_text() == page
    assert f"`{result['command']}`" in page


def test_the_recorded_tables_have_what_their_commands_ask_for(monkeypatch):
    asked = []
    monkeypatch.setattr(table_planar, "table", lambda recipe, _: asked.append(recipe) or [])
    monkeypatch.setattr(runner, "finish", lambda *_: None)
    recorded = json.loads((RESULTS / "table-planar.json").read_text())
    flags = shlex.split(recorded["command"].removeprefix("hdnn reproduce table-planar"))
    table_planar.main([flag for flag in flags if flag != "--"])
    assert asked == list(recorded["recipes"])
    for epochs in (40, 160):
        table = json.loads((RESULTS / f"table-cifar-{epochs}.json").read_text())
        networks = [row["network"] for row in table["rows"]]
        _, named, listed = table["command"].partition(" --networks ")
        assert networks == (listed.split() if named else table_cifar.networks_for(epochs))


def test_a_command_names_what_is_not_the_default():
    parser = runner.arguments("", "table-x")
    parser.add_argument("--recipes", nargs="+", default=["paper"])
    parser.add_argument("--mean", action="store_true")

    def command(*flags):
        return parser.command(parser.parse_args(flags), *shown)

    shown = ("seeds", "recipes", "mean")
    assert command() == command("--quiet") == "hdnn reproduce table-x"
    changed = ("--seeds", "3", "--recipes", "paper", "a b", "--mean")
    assert command(*changed) == "hdnn reproduce table-x -- " + shlex.join(changed)


def test_recipes_that_are_not_asked_for_come_from_the_recorded_table(tmp_path, monkeypatch, capsys):
    recorded = json.loads((RESULTS / "table-planar.json").read_text())
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(recorded))
    rows = [{**row, "mean": 0.0} for row in recorded["recipes"]["ours"]]
    monkeypatch.setattr(table_planar, "table", lambda *_: rows)
    options = ["--recipes", "ours", "--recorded", str(path), "--out", str(tmp_path), "--json"]
    assert table_planar.main(options) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipes"] == {**recorded["recipes"], "ours": rows}
    assert list(result["recipes"]) == list(table_planar.RECIPES)
    assert result["command"].endswith(" -- --recipes paper published ours")
    with pytest.raises(DataError, match="a table of 10 seeds, not 2"):
        table_planar.main([*options, "--seeds", "2"])


def test_table_distributed_has_the_parameters_that_it_says(short, tmp_path, monkeypatch, capsys):
    counts = {"masked": 64, "centralised": 144, "masked, full K": 112, "centralised, full K": 272}
    for variant, count in counts.items():
        net = table_distributed.network(variant, 3, 0).net
        assert sum(p.numel() for p in net.parameters()) == 3 * count
        assert f"{count} parameters" in table_distributed.VARIANTS[variant]
    monkeypatch.setattr(table_distributed, "PAPER", {("swiss_roll", 2): (91.05, 99.9)})
    options = ["--seeds", "1", "--processes", "1", "--out", str(tmp_path)]
    options += ["--runs", str(tmp_path / "runs")]
    assert table_distributed.main(options) == 0
    assert "| swiss roll, 2 |" in capsys.readouterr().out

    path = tmp_path / "table-distributed.json"  # variants that are not asked for come from it
    before = json.loads(path.read_text())
    options += ["--variants", "centralised", "--recorded", str(path), "--json"]
    assert table_distributed.main(options) == 0
    after = json.loads(capsys.readouterr().out)
    assert [row["variant"] for row in after["rows"]] == list(counts)
    assert {**after, "seconds": 0} == {**before, "seconds": 0}
    with pytest.raises(DataError, match="a table of 1 seeds, not 2"):
        table_distributed.main([*options, "--seeds", "2"])


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
    monkeypatch.setattr(fig_exploding, "T", 24.0)
    monkeypatch.setattr(fig_exploding, "GAMMAS", (0.5,))
    monkeypatch.setattr(fig_exploding, "LAYERS", 40)
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
    monkeypatch.setitem(table_planar.RECIPES["paper"], "batch", 1000)
    monkeypatch.setattr(fig_gradients, "SAMPLES", 10)
    monkeypatch.setattr(
        fig_gradients,
        "NETWORKS",
        {
            "H2, 4 layers": ("H2", 4, {}),
            "MLP, 3 layers": ("MLP", 3, {}),
            "MLP, 3 layers, joint": ("MLP", 3, fig_gradients.JOINT),
        },
    )
    monkeypatch.setattr(fig_gradients, "LAYERS", 2)
    flags = ["--out", str(tmp_path), "--every", "2", "--mean", "--json", "--seeds", "2"]
    assert fig_gradients.main(flags) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "hdnn reproduce fig-gradients -- --every 2 --mean --seeds 2"
    assert list(result["ways"]) == list(fig_gradients.MLP_TRAININGS)
    assert all(found["seeds"] == 2 for found in result["ways"].values())
    assert result["networks"]["H2, 4 layers"]["smallest"] >= 1
    assert result["networks"]["MLP, 3 layers"]["smallest"] < 1
    for file in ("fig-gradients.png", "fig-gradients-mean.png", "fig-gradients.md"):
        assert (tmp_path / file).stat().st_size > 300
    assert (tmp_path / "fig-gradients-mlp-3-joint.csv").exists()
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
