"""Where tensors are to be."""

from __future__ import annotations

import torch

from hdnn.errors import OptionError, quoted


def as_device(device: object) -> torch.device:
    """The device, if tensors can be made there; of None, that of new tensors.

    get_default_device() of PyTorch 2.6 overlooks `with torch.device(..)`, a new tensor does not.
    """
    try:
        return torch.empty(0, device=device).device  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (RuntimeError, TypeError, AssertionError) as error:
        raise OptionError(
            f'device {quoted(device)} is not known, or is not here; try "cpu" or "cuda".'
        ) from error
