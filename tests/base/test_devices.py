"""Devices that are not known, or not here, are refused in one sentence wherever one is given."""

from __future__ import annotations

import pytest
import torch
from hdnn.base.devices import as_device

import hdnn


def test_the_default_is_that_of_new_tensors():
    assert as_device(None) == torch.device("cpu")
    with torch.device("meta"):
        assert as_device(None) == torch.device("meta")


@pytest.mark.parametrize("device", ["x", 3.5, "cuda:99", object()])
def test_a_device_that_is_not_here_is_one_sentence(device, tmp_path):
    hdnn.save(hdnn.H2(features=2, layers=1), tmp_path / "net.safetensors")
    for use in (
        as_device,
        lambda d: hdnn.H2(features=2, layers=1, device=d),
        lambda d: hdnn.load(tmp_path / "net.safetensors", device=d),
        lambda d: hdnn.data.planar.swiss_roll(20, device=d),
    ):
        with pytest.raises(hdnn.errors.OptionError, match="is not known, or is not here"):
            use(device)
