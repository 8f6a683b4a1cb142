"""How `files` was made, by hdnn 0.1.0: `PYTHONPATH=src:tests python -m kept.write`.

It was run once, by the version whose files are to stay readable, and is not to be run again by a
later one: then the files would only show that a version can read what it wrote itself. For a new
kind of file, write that one alone.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

# Before torch is imported, as in the tests.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from safetensors.torch import save_file
from torch import Tensor

import hdnn
from hdnn.estimators import HDNNClassifier, HDNNRegressor
from kept import small
from kept.json_fields import images_for_mnist
from kept.small import FILES, PLACE, hdnn_command

expected_tensors: dict[str, Tensor] = {}
expected: dict[str, Any] = {"version": hdnn.__version__, "machine": small.machine()}


def write_networks() -> None:
    kinds = {
        "networks": small.networks(),
        "models": small.whole_models(),
        "image_models": small.image_models(),
    }
    for kind, found in kinds.items():
        Path(kind).mkdir()
        for name, model in found.items():
            hdnn.save(model, f"{kind}/{name}.safetensors")  # pyright: ignore
            remember(f"{kind}/{name}", model)
    Path("units").mkdir()
    for name, unit in small.units().items():
        save_file(unit.state_dict(), f"units/{name}.safetensors")
        remember(f"units/{name}", unit)


def remember(name: str, model: torch.nn.Module) -> None:
    """What a model computes; for loaded ones to compute the same."""
    x = small.inputs(model)
    expected_tensors[f"{name}: x"] = x
    for what, value in small.computed(model, x).items():
        expected_tensors[f"{name}: {what}"] = value


def write_estimators() -> None:
    Path("estimators").mkdir()
    x = (torch.randint(-8, 9, (40, 3), **small.drawn()) / 8).double().numpy()
    new = x[:6] + 0.125
    expected_tensors["estimators: new"] = torch.from_numpy(new)
    options: dict[str, Any] = {"layers": 2, "features": 6, "epochs": 2, "random_state": 0}
    classifier = HDNNClassifier(**options).fit(x, np.where(x[:, 0] > 0, "yes", "no"))
    regressor = HDNNRegressor(**options).fit(x, x[:, 0] - 2 * x[:, 2])
    for name, estimator in (("classifier", classifier), ("regressor", regressor)):
        Path(f"estimators/{name}.pickle").write_bytes(pickle.dumps(estimator, protocol=4))
        hdnn.save(estimator.model_, f"estimators/{name}.safetensors")
        expected[name] = {
            "predictions": estimator.predict(new).tolist(),
            "parameters": estimator.get_params(),
            "verdict": estimator.certificate_.verdict,
            "loss": estimator.history_.loss,
        }
    expected_tensors["classifier: probabilities"] = torch.tensor(classifier.predict_proba(new))
    for name, estimator in (("classifier", classifier), ("regressor", regressor)):
        scaled = torch.from_numpy(estimator.scaler_.transform(new))
        expected_tensors[f"{name}: scaled"] = scaled
        with torch.no_grad():
            expected_tensors[f"{name}: scores"] = estimator.model_(scaled)


def write_trainings() -> None:
    """Trainings in Python that are broken off in their second epoch, and what they come to."""
    for name in small.FITS:
        folder = Path(f"half/fit_{name}")
        with small.broken_off(2):
            try:
                small.run_fit(name, folder)
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("it was not broken off")
        shutil.copytree(folder, "resumed")
        model, history = small.run_fit(name, None)
        again, _ = small.run_fit(name, Path("resumed"), resume=True)
        keep_final(f"fit_{name}", model, again)
        expected[f"fit_{name}"] = {**asdict(history), "seconds": None}
        shutil.rmtree("resumed")
    for name in small.IMAGE_TRAININGS:
        folder = Path(f"half/images_{name}")
        small.image_training(name).run(folder=folder, until=0, progress=False)
        shutil.copytree(folder, "resumed")
        whole, again = small.image_training(name), small.image_training(name)
        whole.run(progress=False)
        again.run(folder="resumed", resume=True, progress=False)
        keep_final(f"images_{name}", whole.model, again.model)
        expected[f"images_{name}"] = {**asdict(whole.history), "seconds": None}
        shutil.rmtree("resumed")


def keep_final(name: str, model: torch.nn.Module, again: torch.nn.Module) -> None:
    resumed = again.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed[key]), f"{name} was not resumed to the same {key}"
        expected_tensors[f"{name}: final {key}"] = value.clone()


def write_runs() -> None:
    """Runs of the command line, complete in `done` and broken off in `half`."""
    # Of torch.randperm, until the second epoch begins; planar points are shuffled by it as well.
    calls = {"classes": 2, "values": 2, "levels": 5}  # there of the second level
    for name, flags in small.RUNS.items():
        assert hdnn_command(f"train {flags} --out done/{name}").code == 0
        more = "--save-every 3" if name == "graph" else ""  # of the 4 steps of an epoch
        with small.broken_off(calls.get(name, 3)):
            assert hdnn_command(f"train {flags} --out half/{name} {more}").code == 130
        assert not Path(f"half/{name}/metrics.json").exists()
        shutil.copytree(f"half/{name}", "resumed")
        assert hdnn_command("train --resume --out resumed").code == 0
        one, other = (Path(f"{place}/model.safetensors") for place in (f"done/{name}", "resumed"))
        assert one.read_bytes() == other.read_bytes(), f"{name} was not resumed to the same bits"
        shutil.rmtree("resumed")
    for name, flags in {
        "classes": "--data classes.csv --proba",
        "values": "--data values.csv",
        "planar": "--data points.csv --proba",
    }.items():
        predicted = hdnn_command(f"predict --run done/{name} {flags} --json").result
        certificate = hdnn_command(f"certify done/{name} --samples 20 --json").result
        kept = ("guarantee", "smallest_norm", "largest_norm", "holds", "verdict")
        expected[f"done/{name}"] = {
            "predict": flags,
            "predicted": predicted,
            "certificate": {key: certificate[key] for key in kept},
        }


def write_image_run() -> None:
    flags = "--data mnist --network h1 --layers 2 --epochs 2 --batch 20 --learning-rate 0.003"
    with images_for_mnist():
        assert hdnn_command(f"train {flags} --out done/images").code == 0


def remove_large() -> None:
    """What complete runs can do without, and the weights of the one on images."""
    Path("done/images/model.safetensors").unlink()
    for path in Path("done").rglob("checkpoint.safetensors"):
        path.unlink()
    shutil.rmtree("done/graph/nodes")


def write_graphs() -> None:
    assert hdnn_command("graph design graph.toml --keep both --out designed.toml").code == 0
    for name in ("graph", "designed"):
        expected[f"{name}.toml"] = hdnn_command(f"graph check {name}.toml --json").result
    expected["nodes"] = hdnn_command(f"train {small.NODES} --out from_nodes --json").result
    shutil.rmtree("from_nodes")


def write_data() -> None:
    rows = (torch.randint(-8, 9, (40, 3), **small.drawn()) / 8).tolist()
    kinds = [("low", "middle", "high")[int(a + b > -0.25) + int(a + b > 0.25)] for a, b, _ in rows]
    sizes = [f"{a - 2 * c:g}" for a, _, c in rows]
    for name, target, column in (("classes", "kind", kinds), ("values", "size", sizes)):
        lines = [f"{a:g},{b:g},{c:g},{t}" for (a, b, c), t in zip(rows, column, strict=True)]
        Path(f"{name}.csv").write_text("\n".join([f"a,b,c,{target}", *lines]) + "\n")
    Path("points.csv").write_text("x1,x2\n0,1\n1,0\n2.5,-0.25\n")
    Path("graph.toml").write_text(small.GRAPH)
    for part, count in (("train", 16), ("test", 8)):
        Path(f"nodes/{part}").mkdir(parents=True)
        x = torch.randint(-8, 9, (count, 4, 2), **small.drawn()) / 8
        for node in range(4):
            file = f"nodes/{part}/node-{node:05d}.safetensors"
            save_file({"x": x[:, node].contiguous()}, file)
        t = (x[:, 0, 0] + x[:, 2, 1] > 0).long()
        save_file({"t": t}, f"nodes/{part}/labels.safetensors")
    Path("nodes/classes.json").write_text("2\n")


def main() -> None:
    assert not FILES.exists(), f"{FILES} is there already; it is not to be written again"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, small.without_pictures():
        os.chdir(folder)
        write_data()
        write_networks()
        write_estimators()
        write_trainings()
        write_runs()
        write_image_run()
        write_graphs()
        remove_large()
        save_file(expected_tensors, "expected.safetensors")
        Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        for path in [*Path().rglob("*.toml"), *Path().rglob("*.json")]:
            path.write_text(path.read_text().replace(os.path.realpath(folder), PLACE))
        shutil.copytree(folder, FILES)


if __name__ == "__main__":
    main()
