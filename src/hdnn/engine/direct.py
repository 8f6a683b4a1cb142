"""A network and its gradients without autograd, which costs more than running a small stack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdnn.engine import autograd, prepared


class DirectGradients:
    """y_N of a network that is one call of a stack; then the gradients of all its parameters.

    If kernels can take the parameters as stored, they are called directly. If weights are computed
    from parameters (a skew-symmetric K, blocks), autograd does just that part.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.known: dict[torch.Size, Any] = {}

    def usable(self, y: Tensor) -> bool:
        """Whether the network runs such states as one call of a stack."""
        return self._find(y) is not None

    def forward(self, y: Tensor) -> Tensor:
        call, tensors = self.known.get(y.shape) or self._find(y)
        y = y.contiguous()
        with torch.no_grad():
            y_N, kept = call.method.forward(y, tensors)
        self.last = (call, tensors, y, kept)
        return y_N

    def backward(self, g: Tensor) -> None:
        """Set the gradient of each parameter, given that of y_N."""
        call, tensors, y, kept = self.last
        with torch.no_grad():
            grads = autograd.gradients(call.method, y, kept, g, tensors)[1:]
        made, theirs = [], []
        for tensor, grad in zip(tensors, grads, strict=True):
            if tensor is None or not tensor.requires_grad:
                continue
            if tensor.is_leaf:
                tensor.grad = grad
            else:
                made.append(tensor)
                theirs.append(grad)
        if made:
            torch.autograd.backward(made, theirs)

    def _find(self, y: Tensor) -> Any:
        with torch.enable_grad(), prepared.recorded() as record:
            y_N = self.net(y)
        # A recorded call returns its input: if the network does too, it does nothing else.
        if len(record) != 1 or y_N is not y:
            return None
        call, tensors = record[0]
        leaves = [t for t in tensors if t is not None and t.is_leaf]
        shared = len({id(t) for t in leaves}) < len(leaves)
        if call.converting or shared or _hooked(self.net) or any(_hooked(t) for t in leaves):
            return None
        if all(t is None or t.is_leaf for t in tensors):
            self.known[y.shape] = call, tensors  # parameters are updated in place
        return call, tensors


def _hooked(one: Any) -> bool:
    """Whether a module or a parameter has hooks, which would not run here."""
    return any(getattr(one, name, None) for name in HOOKS)


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)
