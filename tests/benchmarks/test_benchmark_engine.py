"""The benchmark of the engine runs, and writes what programs can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_runs_and_writes_a_page(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--quick"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "engine-cpu.json").read_text())
    assert all(row["ratio"] > 1 for row in result["speed"])
    assert max(result["accuracy"].values()) < 1e-5
    assert "plain / hdnn" in (tmp_path / "engine-cpu.md").read_text()
