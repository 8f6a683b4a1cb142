"""Names of runs, runs that earlier versions named otherwise, and runs that are to be replaced."""

from __future__ import annotations

import io
import json
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("typer")

from hdnn.__main__ import main
from hdnn.app import replaced
from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import Run
from hdnn.errors import CheckpointError
from hdnn.training.checkpoint import locked
from kept.small import without_pictures
from said import files, started_alone, told

TABLE = ["--data", "t.csv", "--target", "kind", "--layers", "2", "--features", "4"]
QUICK = ["--epochs", "1", "--quiet"]
GRAPH = ["--graph", "g.toml", "--layers", "2", "--batch", "2000"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started_alone(monkeypatch)
    rows = [f"{k % 7},{k % 5},{k % 2},{k % 3}" for k in range(40)]
    Path("t.csv").write_text("\n".join(["a,b,kind,other", *rows]) + "\n")
    Path("g.toml").write_text("nodes = 3\nR = [[0, 1], [1, 2]]\n")
    with without_pictures():
        yield


def train(*flags):
    with redirect_stdout(io.StringIO()):
        return main(["train", *flags, *QUICK])


def names():
    return {path.name for path in Path("runs").iterdir()}


def as_before(old="runs/t-h2-2-0", new="runs/t-kind-h2-2-0"):
    """A run as an earlier version named it."""
    assert train(*TABLE) == 0
    Path(new).rename(old)
    return Path(old)


def test_the_name_of_a_run_has_the_target():
    assert train(*TABLE) == 0
    assert train(*(word.replace("kind", "other") for word in TABLE)) == 0
    assert names() == {"t-kind-h2-2-0", "t-other-h2-2-0"}
    for target, name in (
        ("Price (USD)", "t-Price_USD-h2-4-0"),
        ("v1.5", "t-v1.5-h2-4-0"),
        ("größe", "t-größe-h2-4-0"),
        ("目标", "t-目标-h2-4-0"),
        ("x" * 200, f"t-{'x' * 64}-h2-4-0"),
    ):
        assert TableConfig.of({"data": "t.csv", "target": target}).run_name() == name
    assert TableConfig.of({"data": "swiss_roll"}).run_name() == "swiss_roll-h2-64-0"


def test_a_run_under_its_old_name_is_gone_on_with_and_not_made_twice(capsys):
    old = as_before()
    (old / "metrics.json").unlink()
    assert main(["train", *TABLE, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == str(old)
    assert names() == {old.name}
    assert train(*TABLE) == 2
    assert f"{old} holds a run already" in told(capsys)
    assert train(*TABLE, "--resume", "--clip", "9") == 2
    assert f"the run in {old} has clip = None, not 9.0" in told(capsys)


def test_an_old_run_of_another_target_or_file_or_a_damaged_one_is_left_alone():
    old = as_before()
    before = files(old)
    assert train(*(word.replace("kind", "other") for word in TABLE), "--resume") == 0
    assert names() == {old.name, "t-other-h2-2-0"}
    Path("sub").mkdir()
    Path("sub/t.csv").write_bytes(Path("t.csv").read_bytes())
    assert train(*(word.replace("t.csv", "sub/t.csv") for word in TABLE), "--resume") == 0
    assert names() == {old.name, "t-other-h2-2-0", "t-kind-h2-2-0"}
    assert files(old) == before
    (old / "config.toml").write_text("nonsense")
    assert train(*TABLE, "--overwrite") == 0
    assert (old / "config.toml").read_text() == "nonsense"


# --overwrite


def test_a_run_is_replaced_whole(capsys):
    assert train(*TABLE, "--out", "r", "--tensorboard") == 0
    Path("r/level-0").mkdir()
    Path("r/level-0/log.jsonl").write_text("")
    Path("r/.model.safetensors.0123456789abcdef0123456789abcdef.tmp").write_text("left by a kill")
    assert train(*TABLE, "--out", "r") == 2
    assert "by --resume, replace it by --overwrite, or name another" in told(capsys)
    assert train(*TABLE, "--out", "r", "--epochs", "2", "--overwrite") == 0
    assert len(Run("r").log()) == 1  # the last one of --epochs counts
    assert not Path("r/level-0").exists()
    assert not Path("r/tensorboard").exists()
    assert train("--data", "swiss_roll", "--layers", "2", "--out", "r", "--overwrite") == 0
    assert Run("r").config().data == "swiss_roll"
    assert train(*GRAPH, "--out", "r", "--overwrite") == 0
    assert Run("r").kind == "graph"
    assert {path.name for path in Path("r").iterdir()} == {
        *("config.json", "log.jsonl", "metrics.json", "model.safetensors", "nodes")
    }
    assert train(*GRAPH, "--layers", "1", "--out", "r", "--overwrite") == 0
    assert train(*TABLE, "--out", "r", "--overwrite") == 0
    assert Run("r").kind == "table"
    assert not Path("r/nodes").exists()
    assert not Path("r/config.json").exists()


def test_overwrite_also_starts_where_there_is_nothing(capsys):
    assert train(*TABLE, "--overwrite") == 0
    assert train(*GRAPH, "--overwrite") == 0
    assert names() == {"t-kind-h2-2-0", "g-swiss_roll-h2-2-0"}


@pytest.mark.parametrize("place", ["mine.txt", "nodes/mine.txt", "picture.png", "sub/"])
def test_nothing_is_removed_beside_a_file_that_is_not_of_a_run(place, capsys):
    assert train(*TABLE, "--out", "r") == 0
    path = Path("r", place)
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if place.endswith("/") else path.write_text("mine")
    before = files(Path("r"))
    for command in (["train", *TABLE], ["train", *GRAPH], ["launch", *GRAPH]):
        assert main([*command, "--out", "r", "--overwrite"]) == 2
        assert "r holds " in (said := told(capsys))
        assert "which is not of a run" in said
        assert files(Path("r")) == before


def test_a_link_is_not_followed(tmp_path, capsys):
    assert train(*TABLE, "--out", "r") == 0
    Path("elsewhere").mkdir()
    Path("elsewhere/step-0000000001.safetensors").write_text("mine")
    Path("r/nodes").symlink_to(tmp_path / "elsewhere")
    assert train(*TABLE, "--out", "r", "--overwrite") == 2
    assert "r holds nodes" in told(capsys)
    assert Path("elsewhere/step-0000000001.safetensors").exists()


def test_what_other_programs_call_a_config_is_no_run(capsys):
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"model_type": "bert"}')
    Path("bert/model.safetensors").write_text("much work")
    for command in (["train", *TABLE], ["train", *GRAPH], ["launch", *GRAPH]):
        assert main([*command, "--out", "bert", "--overwrite"]) == 2
        assert "replaces runs only" in told(capsys)
    assert Path("bert/model.safetensors").read_text() == "much work"


def test_a_training_that_goes_on_is_not_replaced(capsys, monkeypatch):
    assert train(*TABLE, "--out", "r") == 0
    before = files(Path("r"))

    def busy(folder):
        raise CheckpointError(f"another process is training in {folder}.")

    monkeypatch.setattr(replaced, "locked", busy)
    assert train(*TABLE, "--out", "r", "--overwrite") == 2
    assert "another process is training in r" in told(capsys)
    assert files(Path("r")) == before


def test_a_training_on_a_graph_keeps_others_out(capsys):
    assert train(*GRAPH, "--out", "r") == 0
    Path("r/metrics.json").unlink()
    with locked(Path("r")):
        codes = []
        flags = (*GRAPH, "--out", "r", "--resume")
        other = threading.Thread(target=lambda: codes.append(train(*flags)))
        other.start()
        other.join()
    assert codes == [2]
    assert "another process is training in r" in told(capsys)


def test_bad_input_is_found_before_anything_is_removed(capsys):
    assert train(*TABLE, "--out", "r") == 0
    before = files(Path("r"))
    for flags in (
        [*TABLE, "--network", "h9"],
        ["--data", "none.csv", "--target", "kind"],
        ["--data", "t.csv", "--target", "none"],
        [*TABLE, "--resume"],
        [*GRAPH, "--data", "nowhere"],
        [*GRAPH, "--resume"],
    ):
        assert main(["train", *flags, "--out", "r", "--overwrite"]) == 2
        told(capsys)
        assert files(Path("r")) == before


def test_runs_of_seeds_are_replaced_together_or_not_at_all(capsys):
    flags = [*TABLE, "--seeds", "2", "--out", "all"]
    assert train(*flags) == 0
    Path("all/seed-1/mine.txt").write_text("mine")
    before = files(Path("all"))
    assert train(*flags, "--overwrite") == 2
    assert "all/seed-1 holds mine.txt" in told(capsys)
    assert files(Path("all")) == before
    Path("all/seed-1/mine.txt").unlink()
    assert train(*flags, "--overwrite") == 0
    assert train(*TABLE, "--out", "all", "--overwrite") == 2
    assert "all is not empty" in told(capsys)


def test_seeds_of_an_earlier_and_larger_training_go_when_it_is_replaced(capsys):
    flags = [*TABLE, "--out", "all"]
    assert train(*flags, "--seeds", "4") == 0
    Path("all/notes").mkdir()
    Path("all/seed-3/mine.txt").write_text("mine")
    before = files(Path("all"))
    assert train(*flags, "--seeds", "2", "--overwrite") == 2
    assert "all/seed-3 holds mine.txt" in told(capsys)
    assert train(*flags, "--seeds", "2", "--overwrite", "--target", "none") == 2
    assert files(Path("all")) == before
    Path("all/seed-3/mine.txt").unlink()
    assert train(*flags, "--seeds", "2", "--seed", "1", "--overwrite") == 0
    assert {path.name for path in Path("all").iterdir()} == {"notes", "seed-1", "seed-2"}


def test_a_run_is_not_mixed_with_those_of_seeds(capsys):
    assert train(*TABLE, "--out", "r") == 0
    before = files(Path("r"))
    for flag in ([], ["--overwrite"]):
        assert train(*TABLE, "--out", "r", "--seeds", "2", *flag) == 2
        assert "r holds a single run" in told(capsys)
    assert files(Path("r")) == before


def test_the_target_cannot_be_dropped_but_a_run_that_did_so_goes_on(capsys):
    assert train(*TABLE, "--drop", "kind") == 2
    assert "--drop kind would leave out the target" in told(capsys)
    assert train(*TABLE) == 0
    run = Path("runs/t-kind-h2-2-0")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("[train]", '[train]\ndrop = ["kind"]'))
    (run / "metrics.json").unlink()
    assert train("--resume", "--out", str(run)) == 0
