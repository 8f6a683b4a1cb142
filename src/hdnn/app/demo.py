"""`hdnn demo`: a 64-layer H2 learns the Swiss roll, and its gradients are measured.

The options are those of `hdnn train` for points of the plane: the paper's 50 epochs of minibatches
of 125, and its initial weights. Over the seeds 0 .. 13 this gave a test accuracy of 100% eleven
times, and 99.6% at the least.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hdnn import io
from hdnn.app.config import TableConfig
from hdnn.app.scores import score_lines
from hdnn.app.train import PlaneJob, draw
from hdnn.errors import CheckpointError


def run(
    *,
    layers: int = 64,
    epochs: int | None = None,
    seed: int = 0,
    out: str = "runs/demo",
) -> dict[str, Any]:
    """Train, certify, draw and save; the results as JSON can hold them."""
    start = time.perf_counter()
    options = {
        "data": "swiss_roll",
        "layers": layers,
        "epochs": epochs,
        "seed": seed,
    }
    job = PlaneJob(
        TableConfig.build({k: v for k, v in options.items() if v is not None})
    )
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}."
        ) from error
    job.fit(None, True)
    certificate = job.certify()
    file = folder / "model.safetensors"
    io.save(job.model, file, note=job.note())
    return {
        "data": "swiss_roll",
        "network": repr(job.model.net),
        "layers": layers,
        "epochs": len(job.history.loss),
        "seed": seed,
        **job.metrics(),
        "smallest_bsm_norm": certificate.smallest_norm,
        "largest_bsm_norm": certificate.largest_norm,
        "symplectic_defect": certificate.symplectic_defect,
        "samples": certificate.samples,
        "holds": certificate.holds,
        "summary": certificate.summary,
        "training_seconds": round(job.history.seconds, 2),
        "model": str(file),
        "pictures": draw(lambda: job.pictures(certificate), folder),
        "seconds": round(time.perf_counter() - start, 2),
    }


def text(result: dict[str, Any]) -> str:
    """The results as lines for people."""
    folder = Path(result["model"]).parent
    lines = [
        f"{'network':<16} {result['network']} on the Swiss roll",
        f"{'trained':<16} {result['epochs']} epochs in {result['training_seconds']:.1f} s",
        *score_lines(result, "test_"),
        f"{'gradients':<16} {result['summary']}",
        f"{'smallest norm':<16} {result['smallest_bsm_norm']:.6f}, over {result['samples']} test "
        f"points and all layers, in float64",
        f"{'largest norm':<16} {result['largest_bsm_norm']:.4g}",
        f"{'symplectic':<16} up to {result['symplectic_defect']:.1e}, relative",
        f"{'model':<16} {result['model']}",
    ]
    lines += [f"{'picture':<16} {folder / name}" for name in result["pictures"]]
    return "\n".join(lines)
