"""What is no network, no matrix or no name is refused by an error that says what to give."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import Tensor, nn

import hdnn
from hdnn import analysis
from hdnn.errors import OptionError, ShapeError, StepError

MODEL = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 3), hdnn.SigmoidHead(4))
Y = torch.ones(5, 4)


@pytest.mark.parametrize(
    "function",
    [
        analysis.guarantee,
        analysis.bsm_bound_paper,
        analysis.bsm_bound_continuous,
        analysis.bsm_bound_forward_euler,
        analysis.gradient_bounds,
    ],
)
def test_a_model_is_told_to_give_its_net(function):
    with pytest.raises(OptionError, match=r"Model.* its net"):
        function(MODEL)


@pytest.mark.parametrize("function", [analysis.energy_along, analysis.reconstruction_error])
def test_a_model_with_states_is_told_to_give_its_net(function):
    with pytest.raises(OptionError, match=r"Model.* its net"):
        function(MODEL, Y)


@pytest.mark.parametrize("function", [analysis.norms, analysis.singular_values])
def test_a_vector_is_no_matrix(function):
    with pytest.raises(ShapeError, match=r"\(\.\.\., n, n\), but got \(4,\)"):
        function(Y[0])


def test_a_monitor_names_what_it_records():
    monitor = analysis.GradientMonitor(MODEL.net, Y)
    monitor.look()
    with pytest.raises(OptionError, match="smallest"):
        monitor.table("smalest")


def test_times_may_be_rounded_as_their_dtype_does():
    ode = analysis.ContinuousNetwork(MODEL.net)
    last = torch.tensor([ode.T])
    assert last.dtype == torch.float32
    assert float(last) > ode.T
    torch.testing.assert_close(ode.trajectory(Y[0], last)[0], ode.flow(Y[0]))
    with pytest.raises(StepError):
        ode.trajectory(Y[0], last.double())


class Named(nn.Module):
    """Takes its inputs by name, or as one mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, given: UserDict[str, Tensor] | None = None, **named: Tensor) -> Tensor:
        assert given is None or isinstance(given, UserDict)
        return self.linear((named if given is None else given)["y"])


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_doctor_takes_mappings_that_are_no_dicts(wrapped):
    given = UserDict(y=torch.randn(20, 4))
    found = analysis.diagnose(Named(), (given,) if wrapped else given)
    assert found.healthy
    assert found.samples == 8
    assert len(given["y"]) == 20
