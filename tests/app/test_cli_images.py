"""The commands on images: runs as good as those on tables, and every way to get them wrong."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")

import torch

import hdnn
from hdnn import models, serialization
from hdnn.__main__ import main
from hdnn.analysis import image_certificate
from hdnn.analysis.image_certificate import certify_images
from hdnn.app import progress, terminal
from hdnn.app.commands import train
from hdnn.app.configs.images import ImageConfig
from hdnn.app.configs.kinds import config_of, read_config
from hdnn.app.runs import Run
from hdnn.app.tasks import images as image_task
from hdnn.app.tasks import task
from hdnn.base import tensorfile
from hdnn.data import cifar10, mnist
from hdnn.data.images import ImageData
from hdnn.errors import CheckpointError, HDNNError, OptionError
from hdnn.training.images import ImageTraining
from hdnn.training.images import recipes as image_recipes
from said import files, scalars, told, trained_elsewhere

LOADERS = mnist.load, cifar10.load
REAL = Path(os.environ.get("HDNN_DATA") or "data").absolute()
MNIST = ["train", "--data", "mnist", "--layers", "2", "--epochs", "2", "--batch", "20"]
CIFAR = ["train", "--data", "cifar10", "--epochs", "1", "--batch", "10"]


def halves(name: str, channels: int, size: int, count: int = 60) -> ImageData:
    """Two classes of ten: bright above, or bright below."""
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(count) % 2
    x = torch.randint(0, 100, (count, channels, size, size), generator=generator)
    for i, label in enumerate(t.tolist()):
        x[i, :, label * size // 2 : (label + 1) * size // 2] += 100
    x, k = x.to(torch.uint8), count // 3
    parts = (x[k:], t[k:], x[:k], t[:k])
    return ImageData(name, *parts, cifar10.CLASSES, (0.4,) * channels, (0.2,) * channels)


def make_small(patch):
    """Sets and units that train in no time."""
    patch.setattr(mnist, "load", lambda: halves("MNIST", 1, 28))
    patch.setattr(cifar10, "load", lambda **_: halves("CIFAR-10", 3, 32, 30))
    for name in ("h1", "h2"):
        like = image_recipes.CIFAR_NETWORKS[name]
        star = {**like["star"], "channels": [4, 4, 6]}
        patch.setitem(image_recipes.CIFAR_NETWORKS, name, {**like, "star": star})


@pytest.fixture(autouse=True)
def small_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run on each set."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "matplotlib", None)
        make_small(patch)
        assert main([*MNIST, "--network", "h1", "--learning-rate", "0.003", "--out", "mnist"]) == 0
        assert main([*CIFAR, "--layers", "1", "--out", "cifar10"]) == 0
    return folder


def stop_in_epoch(monkeypatch, number):
    """Ctrl-C in the middle of an epoch."""
    steps = ImageTraining.steps

    def stopped(self):
        for k in steps(self):
            if self.epoch == number:
                raise KeyboardInterrupt
            yield k

    monkeypatch.setattr(ImageTraining, "steps", stopped)


# What works


def test_a_run_on_images_has_everything_in_its_folder(capsys):
    pytest.importorskip("matplotlib")
    assert main([*MNIST, "--network", "H1", "--learning-rate", "0.003", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result, folder = json.loads(captured.out), Path("runs/mnist-h1-2-0")
    assert {p.name for p in folder.iterdir()} == {
        "config.toml",
        "log.jsonl",
        "checkpoint.safetensors",
        "model.safetensors",
        "metrics.json",
        "training.png",
        "bsm_norms.png",
    }
    assert json.loads((folder / "metrics.json").read_text()) == result
    (certified,) = result["certificates"]
    assert certified["holds"]
    assert certified["dtype"] == "float32"
    assert certified["points"] == "pixels of test images of MNIST"
    assert (result["train_images"], result["test_images"], result["epochs"]) == (40, 20, 2)
    assert [entry["epoch"] for entry in Run(folder).log()] == [1, 2]
    model, data = hdnn.load(folder / "model.safetensors"), mnist.load()
    x = data.normalised(data.images_test)
    assert (model(x).argmax(1) == data.t_test).double().mean().item() == result["test_accuracy"]


def test_an_interrupted_run_is_one_curve_in_tensorboard(monkeypatch, capsys):
    pytest.importorskip("tensorboard")
    flags = [*MNIST, "--epochs", "4", "--out", "r", "--tensorboard"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        assert main(flags) == 2
        assert "pip install 'hdnn[tensorboard]'" in told(capsys)
        assert files() == {}
    with monkeypatch.context() as patch:
        stop_in_epoch(patch, 2)
        assert main(flags) == 130
    assert main(["train", "--resume", "--out", "r", "--tensorboard"]) == 0
    found, entries = scalars("r/tensorboard"), Run(Path("r")).log()
    assert set(found) == {"loss", "accuracy", "test_accuracy"}
    for name, values in found.items():
        assert values == [(k, pytest.approx(e[name])) for k, e in enumerate(entries, 1)]
    assert len(entries) == 4


def test_what_is_printed_says_how_it_went_and_what_is_guaranteed(trained, capsys):
    texts = {}
    for name in ("mnist", "cifar10"):
        assert main(["train", "--resume", "--out", str(trained / name)]) == 0
        texts[name] = capsys.readouterr().out
    for words in ("parameters", "s an epoch", "train accuracy", "test accuracy", ">= 1: holds"):
        assert words in texts["mnist"]
    assert "MNIST: 40 images, tested on 20" in texts["mnist"]
    assert texts["cifar10"].count(">= 1: holds") == 3
    assert "; for each unit, not for what lies between them" in texts["cifar10"]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*MNIST, "--network", "ms2", "--T", "1"], "h = 0.5"),
        ([*MNIST, "--network", "ms3", "--warmup", "0.2", "--clip", "1"], "holds"),
        ([*MNIST[:3], "--layers", "0", "--epochs", "1", "--batch", "40"], "no Hamiltonian layers"),
        ([*CIFAR, "--network", "h1", "--layers", "1"], "promises nothing for gelu"),
        ([*CIFAR, "--network", "resnet56"], "this ResNet has no Hamiltonian layers"),
    ],
)
def test_every_network_trains_and_says_what_it_promises(flags, words, capsys):
    assert main([*flags, "--learning-rate", "0.001", "--out", "r"]) == 0
    printed = capsys.readouterr().out
    assert words in printed
    assert "pip install 'hdnn[plot]'" in printed
    assert main(["certify", "r"]) == 0
    capsys.readouterr()


@pytest.mark.usefixtures("no_pictures")
def test_several_seeds_give_mean_and_spread(capsys):
    assert main([*MNIST, "--seeds", "2", "--seed", "3", "--out", "all"]) == 0
    printed = capsys.readouterr().out
    assert "seed 4" in printed
    assert "test accuracy   mean" in printed
    assert {p.name for p in Path("all").iterdir()} == {"seed-3", "seed-4"}


@pytest.mark.usefixtures("no_pictures")
def test_digits_are_learned(monkeypatch, capsys):
    """The small digits of scikit-learn, three times as large."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.from_numpy(digits.images * 255 / 16).to(torch.uint8)[:, None]
    x = torch.nn.functional.pad(x.repeat_interleave(3, 2).repeat_interleave(3, 3), (2, 2, 2, 2))
    t = torch.from_numpy(digits.target).long()
    parts = (x[:1200], t[:1200], x[1200:], t[1200:])
    set_ = ImageData("digits", *parts, tuple("0123456789"), mnist.MEAN, mnist.STD)
    monkeypatch.setattr(mnist, "load", lambda: set_)
    flags = ["--data", "mnist", "--network", "h2", "--layers", "2", "--epochs", "3", "--json"]
    flags += ["--learning-rate", "0.01", "--batch", "40"]
    assert main(["train", *flags, "--images", "600"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["train_images"], result["test_images"]) == (600, 597)
    assert result["test_accuracy"] > 0.8
    assert result["certificates"][0]["holds"]


@pytest.mark.skipif(
    not any(REAL.glob("mnist/train-images-idx3-ubyte*")), reason="needs MNIST under HDNN_DATA"
)
@pytest.mark.usefixtures("no_pictures")
def test_the_real_mnist_is_trained_on_and_predicted(monkeypatch, capsys):
    monkeypatch.setattr(mnist, "load", LOADERS[0])
    monkeypatch.setenv("HDNN_DATA", str(REAL))
    flags = ["--data", "mnist", "--layers", "2", "--epochs", "1", "--images", "400"]
    assert main(["train", *flags, "--learning-rate", "0.01", "--out", "r", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["set"], result["train_images"], result["test_images"]) == ("MNIST", 400, 400)
    assert main(["predict", "--run", "r", "--data", "mnist", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["rows"] == 10000
    assert abs(predicted["accuracy"] - result["test_accuracy"]) < 0.1


# Configs, interruptions and going on


@pytest.mark.parametrize("data", ["mnist", "cifar10"])
@pytest.mark.parametrize("options", [{}, {"layers": 3, "T": 1.5, "clip": 2.0}, {"images": 70}])
def test_a_config_is_read_back_from_its_own_file(data, options, tmp_path):
    made = config_of({"data": data, "network": "h1", "learning_rate": 0.1, **options})
    assert isinstance(made, ImageConfig)
    (tmp_path / "config.toml").write_text(made.to_toml())
    assert config_of(read_config(tmp_path / "config.toml")) == made
    assert made.recipe().learning_rate == 0.1
    assert made.recipe().batch <= (made.images or 1000)


def test_few_images_are_trained_on_in_smaller_minibatches():
    whole, few = (ImageConfig.of({"data": "cifar10", "images": k}) for k in (None, 500))
    assert (whole.batch, few.batch) == (250, 25)
    assert few.learning_rate == pytest.approx(whole.learning_rate / 10)
    given = ImageConfig.of({"data": "cifar10", "images": 500, "batch": 100})
    assert given.learning_rate == whole.learning_rate
    assert ImageConfig.of({"data": "mnist", "images": 5}).batch == 5


def test_a_warm_up_replaces_the_course_of_the_rate():
    plain, warm = (ImageConfig.of({"data": "mnist", **w}).recipe() for w in ({}, {"warmup": 0.5}))
    assert warm.factor(0, 10) < plain.factor(0, 10)
    assert warm.decay is None
    assert warm.rates == ()


@pytest.mark.usefixtures("no_pictures")
def test_a_config_file_equals_the_flags(trained, capsys):
    saved = trained / "mnist" / "config.toml"
    assert main(["train", "--config", str(saved), "--out", "again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 2
    for name in ("config.toml", "model.safetensors"):
        assert Path("again", name).read_bytes() == (trained / "mnist" / name).read_bytes()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("epoch", "flags"),
    [
        *((k, [*MNIST[:-4], "--batch", "20"]) for k in range(3)),
        (1, [*CIFAR[:3], "--network", "h1", "--layers", "1", "--batch", "10"]),
    ],
)
def test_a_run_that_was_interrupted_goes_on_to_the_same_bytes(epoch, flags, monkeypatch, capsys):
    flags = [*flags, "--epochs", "3", "--learning-rate", "0.001"]
    assert main([*flags, "--out", "whole", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    with monkeypatch.context() as patch:
        stop_in_epoch(patch, epoch)
        assert main([*flags, "--out", "part"]) == 130
    assert told(capsys) == "hdnn: interrupted; go on with: hdnn train --resume --out part\n"
    assert not Path("part/metrics.json").exists()
    if epoch:  # as if it had ended between the checkpoint and the log
        Path("part/log.jsonl").write_text("")
    assert main(["train", "--resume", "--out", "part", "--json"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert part["test_accuracy"] == whole["test_accuracy"]
    for name in ("model.safetensors", "log.jsonl", "config.toml"):
        assert Path("part", name).read_bytes() == Path("whole", name).read_bytes()


def test_an_interruption_before_the_start_says_so(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(mnist, "load", interrupted)
    assert main(MNIST) == 130
    assert "before anything was written" in told(capsys)
    assert files() == {}


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_gets_no_better_ends_before_its_epochs_are_over(capsys):
    flags = [*MNIST[:-4], "--epochs", "50", "--batch", "20", "--learning-rate", "0.3"]
    assert main([*flags, "--patience", "1", "--out", "r", "--json"]) == 0
    loss = [entry["loss"] for entry in Run("r").log()]
    assert json.loads(capsys.readouterr().out)["epochs"] == len(loss) < 50
    assert loss[-1] >= loss[-2]
    assert main(["train", "--resume", "--out", "r", "--patience", "2"]) == 2
    assert "has patience = 1, not 2" in told(capsys)


def test_a_run_goes_on_with_the_options_that_it_had_only(trained, capsys):
    before = files(trained)
    for flags, words in (
        (["--layers", "3"], "has layers = 2, not 3"),
        (["--data", "cifar10"], "has data = 'mnist', not 'cifar10'"),
        (["--ridge", "1"], "no option ridge"),
        (["--images", "100"], "has images = None, not 100"),
    ):
        assert main(["train", "--resume", "--out", str(trained / "mnist"), *flags]) == 2
        assert words in told(capsys)
    assert main([*MNIST, "--out", str(trained / "mnist")]) == 2
    assert "holds a run already" in told(capsys)
    assert files(trained) == before


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("call", [*range(1, 14, 2), 16])
def test_a_full_disk_is_told_and_loses_nothing(call, monkeypatch, capsys):
    flush, count = os.fsync, iter(range(1, 1000))

    def full(descriptor):
        if next(count) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code = main([*MNIST, "--out", "r"])
    if code == 0:
        assert next(count) - 1 <= call  # full at the most for the last flush, of the folder
        return
    assert "No space left" in told(capsys)
    assert not list(Path().rglob("*.tmp"))
    assert not Path("r/metrics.json").exists()
    assert main([*MNIST, "--out", "r", "--resume"]) == 0
    assert Path("r/metrics.json").exists()


def test_a_folder_in_which_another_process_trains_is_left_to_it(capsys):
    pytest.importorskip("fcntl")
    Path("r").mkdir()
    with trained_elsewhere("r"):
        assert main([*MNIST, "--out", "r"]) == 2
    assert "another process is training in r" in told(capsys)
    assert files("r") == {}


def test_progress_is_told_step_by_step(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config = Run(trained / "mnist").config()
    assert isinstance(config, ImageConfig)
    seen = []
    bar = progress.TrainingBar("r", False)
    bar.on, bar.show = True, lambda *told: seen.append(told)
    task.train(image_task.ImageTask(config), Run(tmp_path / "r"), bar=bar)
    assert [step for step, *_ in seen] == [1, 2, 2, 3, 4, 4, 1]
    assert all(steps == 4 for _, steps, _ in seen[:-1])
    assert seen[0][2].startswith("loss ")
    assert seen[0][2].endswith("%, epoch 1/2")
    assert ", test " in seen[2][2]
    monkeypatch.setattr(terminal, "at_terminal", lambda: True)
    with progress.TrainingBar("name", True) as bar:
        bar.due = 0.0
        bar.show(1, 4, "epoch 1/2")
        bar.show(1, 1, "measuring")
        assert bar.progress is not None
        assert bar.progress.tasks[0].total == 1


def test_fewer_images_keep_the_share_of_each_class():
    data = halves("MNIST", 1, 28)
    few = image_task.fewer(data, 10, seed=1)
    assert few.t_train.bincount().tolist() == [5, 5]
    assert few.t_test.bincount().tolist() == [5, 5]
    some = image_task.fewer(data, 30, seed=1)
    assert (len(some.t_train), len(some.t_test)) == (30, 20)
    assert image_task.fewer(data, None, seed=1) is data


# Predicting, certifying, reporting


def test_predictions_are_those_of_the_test_images(trained, capsys):
    run, right = str(trained / "mnist"), Run(trained / "mnist").metrics()["test_accuracy"]
    assert main(["predict", "--run", run, "--data", "mnist", "--proba"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("class,p(airplane),p(automobile)")
    assert len(lines) == 21
    assert main(["predict", "--run", run, "--data", "mnist", "--out", "a.csv"]) == 0
    assert f"20 predictions of class in a.csv (accuracy {right:.2%})" in capsys.readouterr().out
    assert main(["predict", "--run", run, "--data", "mnist", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"] == right
    assert [lines[0], *result["predictions"]] == [lines[0], *(x.split(",")[0] for x in lines[1:])]
    for data, words in (("new.csv", "the run is of images"), ("cifar10", "have 3 channels")):
        assert main(["predict", "--run", run, "--data", data]) == 2
        assert words in told(capsys)


def test_runs_and_saved_models_are_certified(trained, capsys):
    run = str(trained / "mnist")
    assert main(["certify", run, "--samples", "50"]) == 0
    printed = capsys.readouterr().out
    assert "50 pixels of test images of MNIST; weights float32" in printed
    assert "and it holds" in printed
    assert main(["certify", str(trained / "cifar10" / "model.safetensors"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [part["holds"] for part in result["certificates"]] == [True] * 3
    assert "random images" in result["certificates"][0]["points"]
    assert main(["certify", run, "--data", "cifar10"]) == 2
    assert "have 3 channels, but the network takes 1" in told(capsys)
    assert main(["certify", run, "--data", "swiss_roll"]) == 2
    told(capsys)


def test_a_broken_guarantee_is_exit_code_1(trained, monkeypatch, capsys):
    true = image_certificate.unit_extremes

    def vanishing(*args, **options):
        found = true(*args, **options)
        return found._replace(largest=1e-9 * found.largest)

    monkeypatch.setattr(image_certificate, "unit_extremes", vanishing)
    assert main(["certify", str(trained / "cifar10"), "--samples", "1"]) == 1
    assert "BROKEN: norm(dy_N/dy_j) >= 1" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["config.toml", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64, b"[train]\nx = 1\n"])
def test_damaged_runs_are_one_sentence(file, content, trained, capsys):
    Path("r").mkdir()
    for name, whole in files(trained / "mnist").items():
        Path("r", Path(name).name).write_bytes(whole)
    Path("r", file).unlink()
    if content is not None:
        Path("r", file).write_bytes(content)
    assert main(["certify", "r"]) == 2
    told(capsys)


def test_the_report_shows_runs_on_images(trained, capsys):
    assert main(["report", str(trained), "--out", "r.html"]) == 0
    assert capsys.readouterr().out == "2 runs in r.html\n"
    page = Path("r.html").read_text()
    assert "40 training images, 20 test images" in page
    assert page.count("Norm at least 1: holds") == 4
    assert "the same on test images" in page


def test_info_says_where_the_sets_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HDNN_DATA", str(tmp_path / "nowhere"))
    assert main(["info", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    for name in ("mnist", "cifar10"):
        assert f"python -m hdnn.data.download {name} --to {tmp_path}" in data[name]
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / cifar10.ARCHIVE).touch()
    monkeypatch.setenv("HDNN_DATA", str(tmp_path))
    assert image_task.where("cifar10") == f"ready ({tmp_path / 'cifar10' / cifar10.ARCHIVE})"


# What goes wrong


BAD = {
    "mnist": [
        ["--network", "resnet56"],
        ["--network", "implicit_h2"],
        ["--layers", "-1"],
        ["--layers", "0", "--step", "0.1"],
        ["--layers", "0", "--smoothness", "1"],
        ["--layers", str(10**15)],
        ["--seed", str(2**40)],
    ],
    "cifar10": [
        ["--network", "ms1"],
        ["--layers", "0"],
        ["--network", "resnet56", "--layers", "3"],
        ["--network", "alexnet", "--activation", "relu"],
        ["--network", "resnet56", "--T", "1"],
        ["--network", "resnet56", "--smoothness", "0.1"],
    ],
}
FOR_BOTH = [
    ["--target", "x"],
    ["--drop", "x"],
    ["--task", "classification"],
    ["--test-fraction", "0.2"],
    ["--features", "8"],
    ["--multilevel", "2"],
    ["--solver", "newton"],
    ["--ridge", "1"],
    ["--schedule", "cosine"],
    ["--smoothing", "cosine"],
    ["--dtype", "float64"],
    ["--graph", "ring.toml"],
    ["--T", "1", "--step", "0.1"],
    ["--T", "nan"],
    ["--step", "0"],
    ["--activation", "tahn"],
    ["--init", "zeros"],
    ["--images", "0"],
    ["--images", "10", "--batch", "20"],
    ["--images", "many"],
    ["--epochs", "0"],
    ["--patience", "0"],
    ["--batch", "0"],
    ["--batch", "50000"],
    ["--optimizer", "lbfgs"],
    ["--learning-rate", "0"],
    ["--learning-rate", "nan"],
    ["--weight-decay", "-1"],
    ["--clip", "0"],
    ["--smoothness", "-1"],
    ["--warmup", "1"],
    ["--seed", "-1"],
    ["--seeds", "0"],
    ["--device", "tpu"],
    ["--device", "cuda:99"],
    ["--out", "/dev/null"],
]


def bad_flags():
    for data, own in BAD.items():
        for flags in (*FOR_BOTH, *own):
            yield ["--data", data, *flags]


@pytest.mark.parametrize("flags", [*bad_flags()], ids=" ".join)
def test_bad_flags_are_one_sentence_and_exit_code_2(flags, capsys):
    assert main(["train", *flags]) == 2
    told(capsys)
    assert files() == {}


def test_options_of_images_are_for_images(capsys):
    for flags in (["--data", "swiss_roll"], ["--graph", "ring.toml", "--data", "swiss_roll"]):
        assert main(["train", *flags, "--images", "100"]) == 2
        assert "images" in told(capsys)
    assert main(["train", "--data", "mnits"]) == 2
    assert "Did you mean 'mnist'?" in told(capsys)


def test_a_set_that_is_missing_is_one_sentence(tmp_path, monkeypatch, capsys):
    for module, load in zip((mnist, cifar10), LOADERS, strict=True):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setenv("HDNN_DATA", str(tmp_path / "nowhere"))
    for name, file in (("mnist", mnist.FILES[0].name), ("cifar10", cifar10.ARCHIVE)):
        assert main(["train", "--data", name]) == 2
        said = told(capsys)
        assert file in said
        assert f"python -m hdnn.data.download {name} --to {tmp_path / 'nowhere'}" in said
    assert files() == {}


def test_one_process_trains_on_images(monkeypatch):
    train._asked({"data": "mnist"})
    monkeypatch.setattr(train.launched, "several", lambda: True)
    with pytest.raises(OptionError, match="without torchrun"):
        train._asked({"data": "mnist"})
    train._asked({"data": "swiss_roll"})


def test_a_run_and_a_config_that_do_not_fit_are_refused(trained, capsys):
    Path("r").mkdir()
    assert main(["train", "--data", "swiss_roll", "--layers", "1", "--epochs", "1"]) == 0
    for name, whole in files("runs/swiss_roll-h2-1-0").items():
        Path("r", Path(name).name).write_bytes(whole)
    Path("r/config.toml").write_bytes((trained / "mnist" / "config.toml").read_bytes())
    capsys.readouterr()
    assert main(["certify", "r"]) == 2
    assert "do not fit together" in told(capsys)


# Files of models


@pytest.mark.parametrize(
    "model",
    [
        lambda: models.mnist_net("h2", 2, step=0.3, channels=4, size=8, activation="relu"),
        lambda: models.mnist_net(None, 0, classes=3),
        lambda: models.mnist_conv("h1", 2, channels=(4, 6), norm="after"),
        lambda: models.hdnn_star("h2", 1, (4, 6), size=8, pool="mean", padding="halves"),
        lambda: models.hdnn_star("h1", 2, (4, 6), size=8, drop=0.3),
        lambda: models.hdnn_star("h2", (3, 1), (4, 6), size=8, drop=0.3),
        lambda: models.resnet56(3, depth=8, drop=0.2),
    ],
)
def test_a_saved_model_is_the_same_model(model):
    made = model().eval()
    hdnn.save(made, "m.safetensors")
    again = hdnn.load("m.safetensors")
    assert type(again) is type(made)
    assert sorted(repr(again).splitlines()) == sorted(repr(made).splitlines())
    state = made.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in again.state_dict().items())
    size = getattr(made, "size", 16)
    x = torch.randn(2, made.stem.in_channels, size, size)
    assert torch.equal(again.eval()(x), made(x))
    hdnn.save(again, "again.safetensors")
    assert Path("again.safetensors").read_bytes() == Path("m.safetensors").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 9},
        {"depth": 6 * 10**9 + 2},
        {"depth": "8"},
        {"classes": 4},
        {"classes": 0},
        {"kind": "AlexNet"},
        {"kind": "HDNNStar"},
        {"wrong": 1},
    ],
)
def test_a_model_file_that_was_edited_is_one_sentence(change):
    made = models.resnet56(3, depth=8)
    found = serialization.describe(made)
    options = {k: v for k, v in change.items() if k != "kind"}
    about = {"format": 1, "kind": change.get("kind", found["kind"])}
    about["config"] = {**found["config"], **options}
    content = tensorfile.packed(made.state_dict(), "hdnn", about)  # also with its checksum
    Path("m.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        hdnn.load("m.safetensors")


def test_alexnet_and_other_classes_are_described_or_refused():
    class Other(models.ImageModel):
        pass

    with torch.device("meta"):
        alexnet = models.alexnet(7, resize=False, dropout=0.25, device="meta")
    assert alexnet.config() == {"resize": False, "dropout": 0.25, "classes": 7}
    with pytest.raises(CheckpointError, match="Other is not a class of hdnn"):
        hdnn.save(Other(), "m.safetensors")


# Certificates


def test_norms_of_a_unit_are_those_of_its_matrix():
    for network, norm in (("h1", "none"), ("h2", "inside"), ("h2", "after")):
        options = {"step": 0.3, "activation": "tanh", "norm": norm, "dtype": torch.float64}
        model = models.hdnn_star(network, 3, (4,), size=4, **options).eval()
        x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
        (part,) = certify_images(model, x).parts
        unit, y = model.stages[0], model.stem(x)
        assert isinstance(unit, hdnn.HamiltonianUnit)

        def plain(y, unit=unit):
            return unit.trajectory(y)[-1]

        Phi = [torch.autograd.functional.jacobian(plain, one).reshape(64, 64) for one in y.split(1)]
        exact = [torch.linalg.matrix_norm(matrix, 2) for matrix in Phi]  # pyright: ignore
        seen = part.by_layer
        assert seen["layers"] == [0, 1, 2, 3]
        assert seen["largest"][-1] == 1
        assert 0.9 * max(exact) <= seen["largest"][0] <= max(exact) * (1 + 1e-9)
        assert part.holds
        assert part.guaranteed


def test_a_deep_unit_is_looked_at_in_a_few_layers():
    model = models.hdnn_star("h2", 40, (4,), size=4, step=0.1)
    (part,) = certify_images(model, samples=1).parts
    assert len(part.ranges) == image_certificate.LAYERS
    assert part.by_layer["layers"][0] == 0
    assert part.by_layer["layers"][-2:] == [39, 40]
    with pytest.raises(HDNNError, match="samples"):
        certify_images(model, samples=0)


def test_certificates_are_drawn_side_by_side():
    pytest.importorskip("matplotlib")
    from hdnn import plotting

    model = models.hdnn_star("h2", 2, (4, 6), size=8, step=0.1)
    parts = certify_images(model).parts
    ax = plotting.certificates_norms(parts)
    assert [a.get_title() for a in ax.figure.axes] == ["Unit 1: 3 images", "Unit 2: 3 images"]
    broken = replace(parts[0], holds=False, smallest_norm=0.5)
    ax = plotting.certificates_norms([broken])
    assert "does not hold" in ax.get_title()
