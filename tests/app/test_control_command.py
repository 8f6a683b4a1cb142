"""`hdnn control`: from a training to an animation and a report, and every way to get it wrong."""

from __future__ import annotations

import csv
import html.parser
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("numba")


from hdnn import control
from hdnn.__main__ import main
from hdnn.app.agents import measured, problems, training
from hdnn.app.agents.runs import ControlRun
from hdnn.app.agents.scene import scene
from hdnn.app.configs.control import ControlConfig
from hdnn.app.progress import TrainingBar
from hdnn.control import LoopTraining, costs, load_problem
from hdnn.distributed import DistributedError
from hdnn.errors import CheckpointError, OptionError
from said import files, told

QUICK = ["--steps", "10", "--iterations", "4", "--batch", "2", "--runs", "3"]
SVG = "{http://www.w3.org/2000/svg}"


def hdnn(*words: str) -> int:
    return main(["control", *words])


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a complete run on a ring, made once."""
    folder = tmp_path_factory.mktemp("made") / "ring"
    assert hdnn("train", *QUICK, "--out", str(folder), "--quiet") == 0
    return folder


@pytest.fixture
def ring(made, tmp_path):
    """A copy of that folder, named ring."""
    return shutil.copytree(made, tmp_path / "ring")


# What works


def test_alone_it_explains_itself_with_examples(capsys):
    assert main(["control"]) == 0
    text = capsys.readouterr().out
    assert text.partition("examples:")[2].count("hdnn control") >= 4
    for command in ("train", "simulate", "animate", "report"):
        assert hdnn(command, "--help") == 0
        assert f"hdnn control {command}" in capsys.readouterr().out.partition("examples:")[2]


@pytest.mark.usefixtures("no_pictures")
def test_a_training_prints_and_keeps_what_was_found(capsys):
    assert hdnn("train", *QUICK, "--out", "run", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(Path("run/metrics.json").read_text())
    assert (result["agents"], result["links"], result["iterations"]) == (12, 12, 4)
    assert result["after"]["runs"] == 3
    assert 0 <= result["after"]["without_collision"] <= 1
    assert result["certificate"]["holds"]
    assert "hdnn[plot]" in result["no_pictures_because"]
    assert Path("run/report.html").is_file()
    log = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert [entry["iteration"] for entry in log] == [1, 2, 3, 4]
    assert [*Path("run").rglob("*.pt"), *Path("run").rglob("*.pkl")] == []


def test_weights_are_kept_before_during_and_after(made):
    problem = control.crossing("ring", steps=10)
    before = load_problem(made / "before").loop.controller
    assert torch.equal(before.K, problem.loop.controller.K)
    whole = LoopTraining(problem, iterations=4, batch=2)
    for done in (1, 2, 3, 4):
        whole.run(until=done)
        folder = made if done == 4 else made / f"during-{done}"
        assert torch.equal(load_problem(folder).loop.controller.K, whole.loop.controller.K)
    assert training.kept_after(300) == [30, 75, 150, 225]
    assert training.kept_after(1) == []


def test_people_read_what_was_found_and_where_it_is(ring, capsys):
    assert hdnn("train", "--resume", "--out", "ring") == 0
    text = capsys.readouterr().out
    for words in ("12 agents, 12 links", "4 iterations", "fresh runs", "energy balance", "report"):
        assert words in text


def test_options_reach_the_problem_and_its_cost():
    Path("links.json").write_text("[[0, 1], [1, 2], [2, 0]]")
    weights = ["--state", "2", "--barrier", "0", "--end", "3", "--distance", "0.9"]
    flags = ["--links", "links.json", "--compare", "linked", "--radius", "0.1", "--seed", "4"]
    assert hdnn("train", *QUICK, *weights, *flags, "--out", "run", "--quiet") == 0
    problem = load_problem("run")
    assert {*problem.loop.controller.links} == {(0, 1), (1, 2), (0, 2)} == {*problem.cost.pairs}
    cost = problem.cost
    assert (cost.state, cost.barrier, cost.end, cost.distance) == (2, 0, 3, 0.9)
    assert problem.radius == 0.1
    same = control.crossing([(0, 1), (1, 2), (0, 2)], 4, steps=10).loop.controller
    assert torch.equal(load_problem("run/before").loop.controller.K, same.K)


@pytest.mark.parametrize(("links", "count"), [("ring", 12), ("none", 0), ("nearest", 14)])
def test_links_have_names(links, count):
    problem = problems.build(ControlConfig.of({"links": links, "steps": 2}))
    assert len(problem.loop.controller.links) == count


def test_a_crowd_is_trained_by_processes_to_the_bits_of_one(monkeypatch, capsys):
    whole = training.train_on_processes

    def interrupted(problem: control.LoopProblem, ranks: int, **options: Any) -> None:
        def stop(started: list[subprocess.Popen[str]]) -> None:
            started[1].send_signal(signal.SIGKILL)

        with pytest.raises(DistributedError, match="was killed by signal 9; go on with it by"):
            whole(problem, ranks, **options, started=stop)
        raise KeyboardInterrupt

    crowd = ["--problem", "crowd", "--agents", "4", *QUICK, "--iterations", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(training, "train_on_processes", interrupted)
        assert hdnn("train", *crowd, "--processes", "2", "--out", "two") == 130
    assert "interrupted; go on with: hdnn control train --resume --out two" in told(capsys)
    Path("two/problem.safetensors").unlink()
    assert hdnn("simulate", "two") == 2
    assert "is not complete; go on with it by hdnn control train --resume" in told(capsys)
    assert hdnn("train", "--resume", "--out", "two", "--runs", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["processes"] == 2
    problem = control.crowd(4, steps=10)
    control.train_on_processes(problem, 1, iterations=4, batch=2, rate=0.05)
    assert torch.equal(load_problem("two").loop.controller.K, problem.loop.controller.K)
    assert len(Path("two/log.jsonl").read_text().splitlines()) == 4
    assert [stage.name for stage in ControlRun(Path("two")).during()] == [
        *("after 1 iteration", "after 2 iterations", "after 3 iterations")
    ]
    assert hdnn("report", "two") == 0
    assert "by 2 processes" in Path("two/report.html").read_text()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--links", "none", "--compare", "linked"], "12 agents, 0 links"),
        (["--problem", "crowd", "--agents", "1", "--iterations", "1"], "1 agent, 0 links"),
    ],
)
def test_agents_that_are_not_compared_are_trained_at_a_terminal(
    options, words, monkeypatch, capsys
):
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(TrainingBar, "on", always, raising=False)
    monkeypatch.setattr(TrainingBar, "show", lambda _, done, all_, text: told.append(text))
    told = []
    seed = ["--seed", str(2**63 - 1)]  # the largest one is as good as any
    assert hdnn("train", *QUICK, *options, *seed, "--out", "run") == 0
    text = capsys.readouterr().out
    assert words in text
    assert "inf" not in text
    assert told
    assert "nearest" not in told[0]
    assert hdnn("report", "run") == 0
    about = "1 agent with a controller;" if "1 agent," in words else "which hear nobody else;"
    assert about in Path("run/report.html").read_text()
    assert hdnn("simulate", "run", "--runs", "1", "--horizons", "1") == 0
    assert "of 1 fresh run" in capsys.readouterr().out


# Interruptions


def test_an_interrupted_training_goes_on_to_the_same_bits(made, monkeypatch, capsys):
    iterate, seen = LoopTraining._iterate, []

    def interrupted(self):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(1)
        iterate(self)

    with monkeypatch.context() as patch:
        patch.setattr(LoopTraining, "_iterate", interrupted)
        assert hdnn("train", *QUICK, "--out", "run") == 130
    assert told(capsys) == (
        "hdnn: interrupted; go on with: hdnn control train --resume --out run\n"
    )
    assert not ControlRun(Path("run")).complete
    before = files("run")
    assert hdnn("train", "--resume", "--out", "run", "--runs", str(10**12)) == 2
    assert "take fewer runs" in told(capsys)
    assert files("run") == before
    assert hdnn("train", "--resume", "--out", "run", "--runs", "3", "--quiet") == 0
    ours, theirs = (load_problem(folder).loop.controller.K for folder in ("run", made))
    assert torch.equal(ours, theirs)
    for done in (1, 2, 3):
        kept = (load_problem(f / f"during-{done}").loop.controller.K for f in (Path("run"), made))
        assert torch.equal(*kept)


def test_a_run_is_resumed_with_its_own_options_only(ring, capsys):
    capsys.readouterr()
    assert hdnn("train", "--resume", "--out", "ring", "--iterations", "4", "--links", "ring") == 0
    capsys.readouterr()
    before = files("ring")
    assert hdnn("train", "--resume", "--out", "ring", "--iterations", "5") == 2
    assert "has iterations = 4, not 5" in told(capsys)
    assert hdnn("train", *QUICK, "--out", "ring") == 2
    assert "holds a run already" in told(capsys)
    assert hdnn("train", "--resume", "--out", "ring", "--runs", "5") == 2
    assert "is complete, with 3 fresh starts; try others by hdnn control simulate" in told(capsys)
    assert files("ring") == before


@pytest.mark.parametrize("edit", [{"iterations": 600}, {"seed": 1}, {"batch": 3}, {"steps": 20}])
def test_a_training_does_not_go_on_with_options_that_were_edited(edit, ring, capsys):
    (ring / "metrics.json").unlink()
    config = json.loads((ring / "control.json").read_text())
    (ring / "control.json").write_text(json.dumps(config | edit))
    before = files("ring")
    assert hdnn("train", "--resume", "--out", "ring", "--runs", "3") == 2
    ((name, new),) = edit.items()
    was = f"says {name} = {new}, but the training was begun with {config[name]}"
    assert was in told(capsys)
    assert files("ring") == before


# A problem of one's own


@pytest.mark.usefixtures("no_pictures")
def test_a_problem_of_ones_own_is_trained_by_its_folder(capsys):
    z = torch.tensor([[-1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    plant = control.robots(-z[:, :2])
    loop = control.ClosedLoop(plant, control.Controller(2, 10, links=[(0, 1)]), 0.2)
    mine = control.LoopProblem(loop, z, cost=control.Cost(barrier=7.0), radius=0.25)
    mine.save("my robots ü")
    options = ["--iterations", "2", "--batch", "2", "--seed", "3"]
    assert hdnn("train", "--problem", "my robots ü", *options, "--runs", "2") == 0
    said = capsys.readouterr().out
    assert "my robots ü: 2 agents, 1 link" in said
    assert "hdnn control animate 'runs/my robots ü-3'" in said
    LoopTraining(mine, iterations=2, batch=2, seed=3).run(progress=False)
    run = ControlRun(Path("runs/my robots ü-3"))
    assert torch.equal(run.problem().loop.controller.K, mine.loop.controller.K)
    page = run.report_file.read_text()
    assert "My robots ü: agents under control" in page
    for name, value in (("steps", 10), ("horizon", 2), ("barrier", 7), ("radius", 0.25)):
        assert re.search(rf">{name}</th>\s*<td[^>]*>{value}<", page), name
    for command in ("simulate", "animate", "report"):
        assert hdnn(command, str(run.folder)) == 0
    capsys.readouterr()
    shutil.rmtree("my robots ü")  # a run needs it no more
    assert hdnn("train", "--resume", "--problem", "my robots ü/", "--out", str(run.folder)) == 0
    capsys.readouterr()
    assert hdnn("train", "--resume", "--problem", "crowd", "--out", str(run.folder)) == 2
    assert "not 'crowd'" in told(capsys)


@pytest.mark.usefixtures("no_pictures")
def test_agents_that_neither_move_in_the_plane_nor_collide_are_not_drawn(capsys):
    plant = control.oscillators([(0, 1), (1, 2)])
    loop = control.ClosedLoop(plant, control.Controller(3, 5, inputs=plant.inputs))
    cost = control.Cost(barrier=0.0, dimensions=1)
    z = torch.ones(3, plant.states)
    control.LoopProblem(loop, z, cost=cost, collision=0.0).save("chain")
    options = ["--iterations", "2", "--batch", "2", "--runs", "2", "--processes", "2"]
    assert hdnn("train", "--problem", "chain", *options, "--out", "run") == 0
    said = capsys.readouterr().out
    assert "chain: 3 agents" in said
    assert "collision" not in said
    assert hdnn("simulate", "run", "--runs", "2") == 0
    assert "3; they cannot collide" in capsys.readouterr().out
    assert hdnn("animate", "run") == 2
    assert "those of run have positions of 1 coordinate." in told(capsys)
    assert hdnn("report", "run") == 0
    page = Path("run/report.html").read_text()
    assert "collision</td>" not in page.split("All options")[0]
    assert "<h2>Paths</h2>" not in page


def test_what_processes_cannot_train_is_refused_before_there_is_a_folder(capsys):
    swung = control.pendulums([(0, 1)])
    controller = control.Controller(2, 5, links=[(0, 1)], inputs=swung.inputs)
    cost = control.Cost(barrier=0.0, dimensions=1)
    loop = control.ClosedLoop(swung, controller)
    z = torch.ones(2, swung.states)
    control.LoopProblem(loop, z, cost=cost, collision=0.0).save("swung")
    options = ["--iterations", "2", "--batch", "2", "--runs", "2", "--processes", "2"]
    assert hdnn("train", "--problem", "swung", *options, "--out", "run") == 2
    assert "processes train closed loops by kernels" in told(capsys)
    assert not Path("run").exists()


def test_what_a_folder_says_is_not_said_again(capsys):
    control.crossing("ring", steps=5).save("mine")
    for name in ("steps", "agents", "radius", "barrier", "links", "compare"):
        assert hdnn("train", "--problem", "mine", f"--{name}", "3") == 2
        assert f"mine has its own {name}; leave --{name} out." in told(capsys)
    for name, usual in (("steps", 100), ("horizon", 5), ("radius", 0.5), ("collision", 0.5)):
        assert hdnn("train", "--problem", "mine", f"--{name}", str(usual)) == 2
        assert f"mine has its own {name}; leave --{name} out." in told(capsys)
    assert hdnn("train", "--problem", "crosing") == 2
    assert "Did you mean 'crossing'? Or name the folder of a problem" in told(capsys)
    assert hdnn("train", "--problem", "./nowhere") == 2
    assert "nowhere holds no problem: there is no problem.safetensors" in told(capsys)
    Path("mine/problem.safetensors").write_bytes(b"x" * 100)
    assert hdnn("train", "--problem", "mine") == 2
    assert "mine/problem.safetensors" in told(capsys)
    assert not Path("runs").exists()


# Simulations


def test_a_simulation_counts_collisions_and_costs_as_the_library_does(ring, capsys):
    assert hdnn("simulate", "ring", "--runs", "5", "--horizons", "2", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    problem = load_problem("ring")
    with torch.no_grad():
        trajectory = problem.loop(measured.fresh(problem, 5), 2)
        cost = problem.cost(problem.loop, trajectory[:11])
    free = ~costs.collisions(trajectory[:11], problem.collision)
    assert result["without_collision"] == pytest.approx(float(free.double().mean()))
    assert result["cost"] == pytest.approx(float(cost), rel=1e-12)
    nearest = float(costs.between(trajectory, 2, None).amin()) ** 0.5
    assert result["nearest"] == pytest.approx(nearest, rel=1e-12)
    assert result["energy"]["holds"]
    assert result["energy"]["violation"] < 1e-12


def test_a_simulation_in_pieces_is_the_same(ring, monkeypatch):
    problem = load_problem("ring")
    whole = measured.measure(problem, 5, 2)
    monkeypatch.setattr(measured, "AT_ONCE", 1)
    pieces = measured.measure(problem, 5, 2)
    for name in ("cost", "nearest", "growth", "without_collision"):
        assert pieces[name] == pytest.approx(whole[name], rel=1e-12)


def test_states_are_written_as_csv_and_json(ring, capsys):
    flags = ["--runs", "2", "--horizons", "1", "--seed", "3"]
    assert hdnn("simulate", "ring", *flags, "--out", "states.csv") == 0
    assert "states.csv" in capsys.readouterr().out
    assert hdnn("simulate", "ring", *flags, "--out", "states.json", "--json") == 0
    problem = load_problem("ring")
    with torch.no_grad():
        states = problem.loop(measured.fresh(problem, 2, 3))[..., :4].transpose(0, 1).numpy()
    found = json.loads(Path("states.json").read_text())
    assert np.array_equal(found["states"], states)
    with open("states.csv") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 2 * 11 * 12
    last = rows[-1]
    assert (last["run"], last["step"], last["time"], last["agent"]) == ("1", "10", "5", "11")
    assert [float(last[name]) for name in found["names"]] == pytest.approx(
        states[-1, -1, -1], rel=1e-8
    )


def test_starts_of_simulations_are_not_those_of_the_training(ring):
    problem = load_problem("ring")
    ours = measured.fresh(problem, 16)
    trained = [problem.starts(16, draw=k) for k in range(4)]
    assert not any(torch.isclose(ours[:, 0, :2], each[:, 0, :2]).all(-1).any() for each in trained)


def test_no_training_of_any_seed_takes_the_starts_of_a_simulation(ring):
    problem = load_problem("ring")
    for seed in (0, 10**6):
        ours = measured.fresh(problem, 4, seed, "square")
        for trained in (0, 10**6, 2 * 10**6):
            assert not torch.isclose(ours, problem.starts(4, seed=trained)).all(-1).any()


# Animations


def test_an_svg_plays_by_itself_and_needs_no_script(ring, capsys):
    assert hdnn("animate", "ring", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    titles = [panel["title"] for panel in result["panels"]]
    assert titles == ["Before training", "After 1 iteration", "After training"]
    text = Path("agents.svg").read_text()
    root = ElementTree.fromstring(text)
    assert "script" not in text
    assert "href" not in text
    moving = [g for g in root.iter(f"{SVG}g") if g.get("class") == "moving"]
    assert len(moving) == 3
    for group in moving:
        moves = [*group.iter(f"{SVG}animateTransform")]
        assert len(moves) == 12
        values = [each.get("values").split(";") for each in moves]
        assert len({len(each) for each in values}) == 1
        assert all(each.get("repeatCount") == "indefinite" for each in moves)
    assert "prefers-reduced-motion" in text
    assert len([g for g in root.iter(f"{SVG}g") if g.get("class") == "still"]) == 3


def test_discs_are_as_wide_as_a_collision_and_lie_where_agents_are(ring):
    shown = scene(ControlRun(ring).stages("after"))
    problem = load_problem(ring)
    with torch.no_grad():
        path = problem.loop(problem.start())[..., :2]
    (panel,) = shown.panels
    scale = 2 * shown.radius / problem.collision
    between = (panel.places[-1, 0] - panel.places[-1, 1]).norm()
    assert float(between) == pytest.approx(float((path[-1, 0] - path[-1, 1]).norm()) * scale)
    assert panel.collides == bool(costs.collisions(path[:, None], problem.collision))
    assert panel.shares[0].eq(0).all()
    assert torch.allclose(panel.shares[-1], torch.ones(12, dtype=torch.float64))


@pytest.mark.parametrize(
    ("when", "panels"), [("before", 1), ("during", 3), ("after", 1), ("all", 3)]
)
def test_weights_of_any_time_are_shown(ring, when, panels, capsys):
    assert hdnn("animate", "ring", "--when", when, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["panels"]) == panels


def test_what_is_said_below_a_picture_fits_into_it(made):
    """Lines of 12 px: a letter is about 6 px wide."""
    run = ControlRun(made)
    for stages in (run.stages("after"), run.stages("before"), run.stages("all")):
        shown = scene(stages)
        assert all(6.2 * len(note) <= shown.size[0] for note in shown.notes)
        assert " ".join(shown.notes).count(".") == 2


def test_a_gif_has_a_frame_a_moment(ring, capsys):
    image = pytest.importorskip("PIL.Image")
    flags = ["--when", "after", "--start", "2", "--horizons", "2", "--seconds", "1"]
    assert hdnn("animate", "ring", *flags, "--out", "agents.gif") == 0
    assert "agents.gif" in capsys.readouterr().out
    with image.open("agents.gif") as picture:
        assert picture.n_frames == 21
        assert picture.info["loop"] == 0
        first = np.asarray(picture.convert("RGB"))
        picture.seek(10)
        assert (np.asarray(picture.convert("RGB")) != first).any()


def test_a_gif_without_pillow_says_what_to_install(ring, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert hdnn("animate", "ring", "--out", "agents.gif") == 2
    assert "hdnn[images]" in told(capsys)
    assert not Path("agents.gif").exists()


# Reports


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_a_report_says_what_was_trained_and_how_to_do_it_again(ring, capsys):
    assert hdnn("report", "ring", "--out", "page.html") == 0
    assert capsys.readouterr().out == "page.html\n"
    page = Page(Path("page.html").read_text())
    text = " ".join(" ".join(page.text).split())
    for words in (
        "12 agents with a controller each, which talk along 12 links",
        "Trained for 4 iterations",
        "of 3 runs from fresh random starts without a collision",
        "The energy balance of every step holds",
        "Before training",
        "After training",
        "hdnn control train --problem crossing --steps 10 --iterations 4 --batch 2",
    ):
        assert words in text
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "img")]
    assert not re.findall(r'(?:src|href)="(?!#)', Path("page.html").read_text())


def test_the_report_of_a_training_is_that_of_the_command(ring):
    assert hdnn("report", "ring", "--out", "page.html") == 0
    written = (ring / "report.html").read_text()
    for words in ("After training", "after training"):
        assert Path("page.html").read_text().count(words) == written.count(words) > 0
    assert "As it is now" not in written


def test_a_training_of_python_can_be_simulated_drawn_and_reported(capsys):
    z = torch.tensor([[-1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    loop = control.ClosedLoop(control.robots(-z[:, :2]), control.Controller(2, steps=5))
    problem = control.LoopProblem(loop, z, cost=control.Cost(barrier=10.0), radius=0.1)
    control.LoopTraining(problem, iterations=2, batch=2, folder="own").run(progress=False)
    assert hdnn("simulate", "own", "--runs", "2") == 0
    assert hdnn("animate", "own") == 0
    assert "As it is now" in Path("agents.svg").read_text()
    assert hdnn("report", "own") == 0
    assert "not complete" in Path("own/report.html").read_text()
    capsys.readouterr()
    assert hdnn("animate", "own", "--when", "before", "--out", "b.svg") == 2
    assert "has no weights from before its training" in told(capsys)
    assert hdnn("animate", "own", "--when", "during", "--out", "b.svg") == 2
    assert "has no weights that were kept during its training" in told(capsys)


# Mistakes

WRONG = {
    "train --problem crosing": "Did you mean 'crossing'?",
    "train --links rings": "choose nearest, none, ring or a FILE.json",
    "train --links missing.json": "cannot read missing.json",
    "train --links bad.json": "has no links",
    "train --links far.json": "links must be pairs of two of the agents 0 .. 11",
    "train --agents 5": "a crossing has 12 agents, not 5",
    "train --problem crowd --links ring": "leave --links and --compare out",
    "train --problem crowd --agents 6000": "up to 5000 agents",
    "train --problem crowd --agents 0": "agents must be a whole number >= 1",
    "train --steps 1000000000": "take fewer steps",
    "train --steps 0": "steps must be a whole number >= 1",
    "train --iterations 0": "iterations must be a whole number >= 1",
    "train --batch 0": "batch must be a whole number >= 1",
    "train --rate 0": "rate must be finite and > 0",
    "train --seed -1": "seed must be a whole number >= 0",
    "train --runs 0": "runs must be a whole number >= 1",
    "train --radius -1": "radius must be finite and not negative",
    "train --barrier -1": "the weight barrier must be finite and not negative",
    "train --discount 2": "discount must be above 0 and at most 1",
    "train --compare some": "choose one of all, linked",
    "train --collision 3": "agents 0 and 1 start in a collision",
    "train --processes 0": "processes must be a whole number >= 1",
    "train --processes 2": "give --compare linked",
    "train --compare linked --processes 13": "cannot be shared out to 13 ranks",
    "train --links none --compare linked --processes 2": "no links lead from agent 0 to agent 1",
    "train --resume --out missing": "holds no run to resume",
    "train --steps two": "see hdnn control train --help",
    "train --out full": "is not empty",
    "train --out full/file": "is a file",
    "simulate": "Missing argument",
    "simulate missing": "there is no folder missing",
    "simulate full": "is not the folder of a run",
    "simulate ring --runs 0": "runs must be a whole number >= 1",
    "simulate ring --horizons 0": "horizons must be a whole number >= 1",
    "simulate ring --shape ball": "choose one of disc, square",
    "train --runs 1000000000000": "1,000,000,000,000 runs over 10 horizons need about",
    "train --seed 9223372036854775808": "seed must be a whole number <= 9223372036854775807",
    "simulate ring --seed -1": "seed must be a whole number >= 0",
    "simulate ring --runs 1000000000000": "take fewer runs or horizons",
    "simulate ring --runs 1 --horizons 1000000000": "1 run over 1,000,000,000 horizons need",
    "simulate ring --out states.npz": "must end with one of .csv, .json",
    "simulate ring --out ring/control.json": "exists already",
    "simulate ring --horizons 100000 --out s.csv": "too many for one file",
    "animate missing": "there is no folder missing",
    "animate ring --when later": "choose one of after, all, before, during",
    "animate ring --out agents.mp4": "must end with one of .svg, .gif",
    "animate ring --seconds 0": "seconds must be finite and > 0",
    "animate ring --seconds 1e300": "seconds must be from 0.1 to 600, but got 1e+300",
    "animate ring --start 1000000000000": "take fewer random starts or horizons",
    "animate ring --seed -1": "seed must be a whole number >= 0",
    "train --horizon 1e9": "steps are at most 10; give more --steps or a shorter --horizon",
    "train --horizon 1e308": "steps are at most 10",
    "train --rate 1e9": "rate must be at most 10",
    "train --distance 1e308": "distance must be at most 1e+30",
    "animate ring --seed -1 --start 1": "seed must be a whole number >= 0",
    "animate ring --start -1": "start must be a whole number >= 0",
    "report missing": "there is no folder missing",
    "report full": "is not the folder of a run",
    "repot ring": "Did you mean 'report'?",
}


@pytest.mark.parametrize("words", WRONG)
def test_mistakes_are_one_sentence_before_any_work(words, ring, capsys):
    Path("bad.json").write_text('{"edges": 1}')
    Path("far.json").write_text("[[0, 12]]")
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    before = files()
    assert hdnn(*words.split()) == 2
    assert WRONG[words] in told(capsys)
    assert files() == before
    assert not Path("runs").exists()


DAMAGED = {
    "problem.safetensors": ("simulate", "animate", "report"),
    "before/problem.safetensors": ("animate", "report"),
    "control.json": ("report",),
    "metrics.json": ("report",),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_in_one_sentence(name, ring, capsys):
    for content in (b"", b"{}", b"[1, 2]", b"\x80nothing"):
        (ring / name).write_bytes(content)
        for command in DAMAGED[name]:
            kind = {"animate": "svg", "report": "html"}.get(command)
            out = ["--out", f"out.{kind}"] if kind else []
            assert hdnn(command, "ring", *out) == 2
            assert Path(name).name in told(capsys)


@pytest.mark.parametrize(
    "options",
    ['{"kind": "table"}', '{"kind": "control", "steps": "ten"}', '{"kind": "control", "x": 1}'],
)
def test_edited_options_are_refused(options, ring):
    (ring / "control.json").write_text(options)
    with pytest.raises(CheckpointError, match=r"control\.json is damaged or was edited"):
        ControlRun(ring).config()


def test_agents_in_space_are_not_drawn(capsys):
    z = torch.zeros(2, 6)
    z[1, 0] = 3
    loop = control.ClosedLoop(control.robots(z[:, :3]), control.Controller(2, steps=3, inputs=3))
    problem = control.LoopProblem(loop, z, cost=control.Cost(dimensions=3), radius=0.1)
    problem.save("space")
    assert hdnn("animate", "space") == 2
    assert "have positions of 3 coordinates" in told(capsys)
    assert hdnn("simulate", "space", "--runs", "2", "--out", "s.csv") == 0
    assert Path("s.csv").read_text().startswith("run,step,time,agent,z0,z1")
    assert hdnn("report", "space") == 0


def test_a_config_knows_the_options_that_a_problem_has():
    filled = ControlConfig.of({"problem": "crowd"}).filled()
    assert (filled["agents"], filled["links"], filled["compare"]) == (100, "nearest", "nearby")
    assert ControlConfig.of({"problem": "crowd"}).rate == 0.05
    assert ControlConfig.of({"problem": "crowd", "rate": 0.1}).rate == 0.1
    assert ControlConfig.of({}).rate == 0.1
    assert ControlConfig.of({}).run_name() == "crossing-ring-12-0"
    with pytest.raises(OptionError):
        ControlConfig.of({"problem": "crowd", "compare": "all"})
