"""Steps on few weights in compiled loops: calls of PyTorch cost more than the work.

The regulariser's gradient and Adam, as `hdnn.training.loop` defines them. Needs numba (extra
`fast`), which is imported at the first use.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.engine import jit

MOST = 200_000  # weights, up to which one thread is enough


def usable(parameters: list[Any]) -> bool:
    """Whether all weights are few, on the CPU, and numba is there."""
    return (
        all(p.device.type == "cpu" and p.is_contiguous() for p in parameters)
        and all(p.dtype in (torch.float32, torch.float64) for p in parameters)
        and sum(p.numel() for p in parameters) < MOST
        and jit.installed()
    )


def by_layer(tensor: Tensor) -> Any:
    """A stack of weights as (N, ...) numbers in the same memory."""
    return tensor.detach().numpy().reshape(tensor.shape[0], -1)


@cache
def kernels() -> tuple[Any, Any]:
    """Smoothness and Adam, compiled."""
    return jit.compiled(_smooth), jit.compiled(_adam)


def _smooth(p, g, scale):  # pragma: kernel
    """g += the gradient of scale/2 sum_j |p_{j+1} - p_j|^2 for layers j."""
    N, size = p.shape
    for j in range(N - 1):
        for i in range(size):
            jump = scale * (p[j + 1, i] - p[j, i])
            g[j + 1, i] += jump
            g[j, i] -= jump


def _adam(p, g, m, v, rate, decay, b1, b2, eps, k):  # pragma: kernel
    """Step k of Adam, counted from 1; returns |g|^2."""
    first, second = rate / (1 - b1**k), 1 / math.sqrt(1 - b2**k)
    square = 0.0  # summed in a loop of its own, so that the other one is one of vectors
    for i in range(p.size):
        square += g[i] * g[i]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        m[i] += (1 - b1) * (d - m[i])
        v[i] = b2 * v[i] + (1 - b2) * d * d
        p[i] -= first * m[i] / (math.sqrt(v[i]) * second + eps)
    return square


class CompiledAdam(torch.optim.Adam):
    """`torch.optim.Adam` for few weights: its steps, up to rounding, and its state."""

    views: list[Any] | None = None

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.views = None

    @staticmethod
    def norm(grads: list[Tensor]) -> float:
        """The Euclidean norm of all numbers."""
        flat = [grad.numpy().reshape(-1) for grad in grads]
        return math.sqrt(sum(float(np.dot(x, x)) for x in flat))

    def descend(self) -> float:
        """`step` without PyTorch's overhead; returns the norm of the gradient."""
        adam, square = kernels()[1], 0.0
        for group, entries in zip(self.param_groups, self._views(), strict=True):
            rate, decay, eps = float(group["lr"]), float(group["weight_decay"]), group["eps"]
            b1, b2 = group["betas"]
            for parameter, step, p, m, v in entries:
                g = parameter.grad
                if g is None:
                    continue
                step += 1
                flat = g.numpy().reshape(-1)
                square += adam(p, flat, m, v, rate, decay, b1, b2, eps, int(step[()]))
        return math.sqrt(square)

    def _views(self) -> list[Any]:
        """The memory of parameters and states."""
        if self.views is None:
            self.views = []
            for group in self.param_groups:
                entries = []
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["step"] = torch.zeros(())
                        state["exp_avg"] = torch.zeros_like(p)
                        state["exp_avg_sq"] = torch.zeros_like(p)
                    flat = [
                        t.detach().numpy().reshape(-1)
                        for t in (p, state["exp_avg"], state["exp_avg_sq"])
                    ]
                    entries.append((p, state["step"].numpy(), *flat))
                self.views.append(entries)
        return self.views
