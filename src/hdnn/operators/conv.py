"""K as a convolution: weights `(..., r, n/groups, k, k)` with k odd, zero padding, stride 1.

K maps images `(B, n, height, width)` to `(B, r, height, width)`, or with another `padding` than
`(k - 1) / 2` to larger or smaller ones. Its adjoint is the transposed convolution with the same
weights and padding, exactly, borders included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn.errors import OptionError, ShapeError, positive_int

__all__ = [
    "adjoint",
    "apply",
    "gradient",
    "norm",
]

Padding = int | tuple[int, int] | None  # pixels on each side; None keeps the size of an image


def apply(
    K: Tensor, y: Tensor, groups: int = 1, bias: Tensor | None = None, padding: Padding = None
) -> Tensor:
    """The convolution `K y + bias`.

    Args:
        K: weights `(r, n/groups, k, k)` with an odd k.
        y: images `(B, n, height, width)`.
        groups: into how many the channels fall that do not see each other.
        bias: `(r,)`, or None.
        padding: pixels of zeros on each side, one number or two; None keeps the size of an image.

    Returns:
        Images `(B, r, height, width)`.

    Raises:
        ShapeError: if the kernel has an even size.

    Examples:
        >>> import torch
        >>> from hdnn.operators import conv
        >>> conv.apply(torch.randn(6, 3, 3, 3), torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 6, 8, 8])
    """
    return F.conv2d(y, K, bias, padding=pixels(K, padding), groups=groups)


def adjoint(K: Tensor, z: Tensor, groups: int = 1, padding: Padding = None) -> Tensor:
    """The adjoint `K^T z`: the transposed convolution, borders included.

    Args:
        K: weights `(r, n/groups, k, k)` with an odd k.
        z: images `(B, r, height, width)`.
        groups: into how many the channels fall that do not see each other.
        padding: pixels of zeros on each side, one number or two; None keeps the size of an image.

    Returns:
        Images `(B, n, height, width)`.

    Raises:
        ShapeError: if the kernel has an even size.

    Examples:
        >>> import torch
        >>> from hdnn.operators import conv
        >>> K, y, z = torch.randn(6, 3, 3, 3), torch.randn(1, 3, 8, 8), torch.randn(1, 6, 8, 8)
        >>> left, right = (conv.apply(K, y) * z).sum(), (y * conv.adjoint(K, z)).sum()
        >>> torch.allclose(left, right, atol=1e-3)
        True
    """
    return F.conv_transpose2d(z, K, padding=pixels(K, padding), groups=groups)


def gradient(y: Tensor, z: Tensor, K: Tensor, groups: int = 1, padding: Padding = None) -> Tensor:
    """The gradient of `<K y, z>` by K, which is linear in y and in z.

    Args:
        y: images `(B, n, height, width)`.
        z: images `(B, r, height, width)`.
        K: weights `(r, n/groups, k, k)` with an odd k.
        groups: into how many the channels fall that do not see each other.
        padding: pixels of zeros on each side, one number or two; None keeps the size of an image.

    Returns:
        The gradient, of the shape of K.

    Raises:
        ShapeError: if the kernel has an even size.

    Examples:
        >>> import torch
        >>> from hdnn.operators import conv
        >>> K, y, z = torch.randn(6, 3, 3, 3), torch.randn(1, 3, 8, 8), torch.randn(1, 6, 8, 8)
        >>> found = conv.gradient(y, z, K)
        >>> torch.allclose((found * K).sum(), (conv.apply(K, y) * z).sum(), atol=1e-3)
        True
    """
    p, flags = list(pixels(K, padding)), [False, True, False]
    found = torch.ops.aten.convolution_backward(
        z, y, K, None, [1, 1], p, [1, 1], False, [0, 0], groups, flags
    )
    return found[1]


def pixels(K: Tensor, padding: Padding) -> tuple[int, int]:
    """The pixels added on each side: as given, or (k - 1) / 2."""
    height, width = K.shape[-2:]
    if height % 2 == 0 or width % 2 == 0:
        raise ShapeError(
            f"K has a kernel of {height} x {width}; only one of odd size has a middle."
        )
    if padding is None:
        return height // 2, width // 2
    return (padding, padding) if isinstance(padding, int) else padding


def norm(
    K: Tensor,
    size: int | tuple[int, int],
    groups: int = 1,
    *,
    padding: Padding = None,
    iterations: int = 1000,
    tol: float = 1e-7,
) -> Tensor:
    """The largest singular value of each K on images of that size, by power iteration.

    It is never above the true value but for rounding, and has the gradient of the singular value.

    Args:
        K: weights `(..., r, n/groups, k, k)` with an odd k.
        size: of the images: height and width, or one number for both.
        groups: into how many the channels fall that do not see each other.
        padding: pixels of zeros on each side, one number or two; None keeps the size of an image.
        iterations: the most steps that it takes.
        tol: it ends when a step changes the value by less than this, relatively.

    Returns:
        The norms, `(...)`.

    Raises:
        ShapeError: if K has too few axes or an even kernel, or size or iterations is below 1.
        OptionError: if the output channels do not split into the groups.

    Examples:
        >>> import torch
        >>> from hdnn.operators import conv
        >>> K = torch.zeros(1, 1, 3, 3)
        >>> K[..., 1, 1] = 2.0  # twice the image
        >>> conv.norm(K, size=8)
        tensor(2.)
    """
    height, width = (size, size) if isinstance(size, int) else size
    image = positive_int("size", height), positive_int("size", width)
    positive_int("iterations", iterations)
    if K.ndim < 4:
        raise ShapeError(f"K has shape {tuple(K.shape)}, but (..., r, n/groups, k, k) is needed.")
    if K.shape[-4] % groups:
        raise OptionError(f"{K.shape[-4]} output channels do not split into {groups} groups.")
    work = torch.promote_types(K.dtype, torch.float32)
    stack = K.to(work).reshape(-1, *K.shape[-4:])
    found = [_norm(one, image, groups, padding, iterations, tol) for one in stack]
    return torch.stack(found).reshape(K.shape[:-4]).to(K.dtype)


def _norm(
    K: Tensor, image: tuple[int, int], groups: int, padding: Padding, iterations: int, tol: float
) -> Tensor:
    n = K.shape[1] * groups
    generator = torch.Generator().manual_seed(0)  # the same number at every call
    y = torch.randn(1, n, *image, generator=generator, dtype=torch.float64).to(K)
    value = 0.0
    with torch.no_grad():
        for _ in range(iterations):
            y = y / torch.linalg.vector_norm(y)
            z = apply(K, y, groups, None, padding)
            before, value = value, torch.linalg.vector_norm(z).item()
            if value == 0 or abs(value - before) <= tol * value:
                break
            y = adjoint(K, z, groups, padding)
        y = y / torch.linalg.vector_norm(y)
    # Outside no_grad: with y fixed this has the gradient of the singular value.
    return torch.linalg.vector_norm(apply(K, y, groups, None, padding))
