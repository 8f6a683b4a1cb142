"""Certificates of the Hamiltonian parts of any module."""

from __future__ import annotations

import json
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import hdnn
from hdnn import analysis
from hdnn.analysis import PartCertificates, certify
from hdnn.errors import DataError, OptionError


class Encoder(nn.Module):
    """A user's module: two inputs, parts in a list and in a dict, one of them never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.stacks = nn.ModuleList([hdnn.H2(4, 5), hdnn.MLP(4, 3)])
        self.model = hdnn.Model(hdnn.Augment(4, 6), hdnn.MS1(6, 2), hdnn.LinearHead(6, 4))
        self.spare = nn.ModuleDict({"one": hdnn.H1(4, 2)})
        self.dropout = nn.Dropout(0.9)

    def forward(self, x, *, scale):
        y = self.dropout(self.inner(x)) * scale
        for _ in range(2):  # the same parts twice
            for stack in self.stacks:
                y = stack(y=y) if isinstance(stack, hdnn.H2) else stack(y)
        return self.model(y)


def test_parts_are_found_by_name_and_certified_where_the_module_runs_them():
    module = Encoder().train()
    x = torch.randn(7, 2, 3)
    found = certify(module, {"x": x, "scale": 2.0})
    assert isinstance(found, PartCertificates)
    assert [*found.parts] == ["stacks.0", "stacks.1", "model.net"]
    assert found["stacks.0"].status == found["model.net"].status == "holds"
    assert found["stacks.1"].status == "not guaranteed"
    assert found["stacks.0"].samples == 28  # two calls
    assert found.missing == {"spare.one": "the module did not call it for these inputs"}
    assert found.others == ("Linear", "Augment", "LinearHead", "Dropout")
    assert module.training
    assert module.dropout.training
    states = []
    hook = module.stacks[0].register_forward_pre_hook(
        lambda _, args, named: states.append(named["y"]), with_kwargs=True
    )
    module.eval()(x, scale=2.0)
    hook.remove()
    alone = certify(module.stacks[0], torch.cat(states).detach())
    assert alone.smallest_norm == pytest.approx(found["stacks.0"].smallest_norm, rel=1e-9)


def test_nothing_is_claimed_of_the_module_as_a_whole():
    module = nn.Sequential(nn.Linear(3, 4), hdnn.H2(4, 5), nn.Linear(4, 2), nn.Linear(2, 4))
    found = certify(module, torch.randn(9, 3))
    start = found.summary.splitlines()[0]
    assert start == (
        "The guarantee holds in 1 of 1 Hamiltonian part of this Sequential. Of the module as a "
        "whole nothing is said: Linear x 3 may shrink gradients."
    )
    assert str(found).startswith(start)
    told = json.loads(found.to_json())
    assert told["not_covered"] == ["Linear x 3"]
    assert told["certificates"]["1"]["status"] == "holds"
    assert not hasattr(found, "guaranteed")
    assert not hasattr(found, "holds")
    assert (found.broken, found.unknown) == ((), "")


def test_a_part_that_does_nothing_is_said_to_be_linear():
    module = nn.Sequential(hdnn.H2(4, 3), nn.Linear(4, 4), hdnn.H2(4, 3))
    with torch.no_grad():
        module[2].K_p.zero_()
        module[2].K_q.zero_()
    _, first, second = certify(module, torch.randn(20, 4)).summary.splitlines()
    assert "linear" not in first
    assert "it holds. The network is linear" in second


def test_without_inputs_networks_are_certified_at_random_states_and_units_are_not():
    module = nn.Sequential(hdnn.H2(4, 3), hdnn.HamiltonianUnit(4, 3))
    found = certify(module)
    assert found["0"].points == "random states, because no inputs were given"
    assert "1: NOT CERTIFIED, because a unit is certified at images: give inputs" in found.summary
    assert "give inputs of the module" in found.unknown
    with pytest.raises(OptionError, match="no certificate of a part '1': a unit is certified"):
        found["1"]
    with pytest.raises(OptionError, match="part 'x': there are 0"):
        found["x"]


def test_units_are_certified_at_the_images_that_they_get():
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
    unit = hdnn.HamiltonianUnit(4, 4, network="h2", norm="inside", step=0.2)
    module = nn.Sequential(stem, unit, nn.Flatten(), nn.Linear(64, 3))
    before = {name: t.clone() for name, t in module.state_dict().items()}
    found = certify(module, torch.randn(5, 1, 4, 4), samples=2)
    assert found["1"].status == "holds"
    assert found["1"].samples == 2
    assert "in evaluation" in found["1"].guarantee
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert [*certify(unit, torch.randn(2, 4, 4, 4)).parts] == ["HamiltonianUnit"]


def test_image_classifiers_are_certified_at_random_images_by_default():
    found = certify(hdnn.models.hdnn_star("h2", 2, (4, 6), size=8))
    assert [one.status for one in found.parts.values()] == ["holds", "holds"]
    assert "random images" in found["stages.0"].points


def test_a_module_that_is_compiled_or_cannot_be_copied_is_certified_too():
    class Stuck(nn.Sequential):
        def __deepcopy__(self, memo):
            raise RuntimeError("no")

    module = Stuck(hdnn.H2(4, 3), nn.ReLU())
    assert certify(module, torch.randn(3, 4))["0"].status == "holds"
    assert not module[0]._forward_pre_hooks
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), hdnn.H2(4, 3)), backend="eager")
    found = certify(compiled, torch.randn(3, 4))
    assert [one.status for one in found.parts.values()] == ["holds"]


def test_broken_weights_and_states_are_said_by_name():
    module = nn.Sequential(hdnn.H2(4, 3), hdnn.H2(4, 3))
    with torch.no_grad():
        module[0].K_p.fill_(torch.inf)
    found = certify(module, torch.randn(3, 4))
    assert found.missing == {
        "0": "the weight K_p is not finite: there is nothing to certify",
        "1": "the states that it is given are not finite",
    }
    assert found.summary.startswith("The guarantee holds in 0 of 2")
    assert found.parts == {}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            (nn.Linear(2, 2),),
            OptionError,
            "this Linear holds no network, no unit and no block of hdnn",
        ),
        (("H2",), OptionError, "but got str"),
        ((nn.Sequential(hdnn.H2(4, 2)), (1, 2)), DataError, "does not run on y .*tuple"),
        ((nn.Sequential(hdnn.H2(4, 2)), torch.ones(3, 5)), hdnn.HDNNError, r"\(\*batch, 4\)"),
    ],
)
def test_mistakes_are_one_sentence(given, error, words):
    with pytest.raises(error, match=words):
        certify(*given)


def test_a_network_itself_has_one_certificate_as_before():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(certify(hdnn.H2(4, 3)), analysis.Certificate)


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_a_network_or_model_in_a_wrapper_is_certified_as_it_is(wrap):
    net = hdnn.H2(4, 3, dtype=torch.float64)
    model = hdnn.Model(None, net, hdnn.SoftmaxHead(4, 2, dtype=torch.float64))
    for one in (net, model):
        assert analysis.certify(wrap(one)) == analysis.certify(one)
        assert analysis.certify(nn.DataParallel(wrap(one))) == analysis.certify(one)


def test_compiled_parts_have_the_names_that_they_have_in_the_module():
    inner = torch.compile(hdnn.H2(4, 3), backend="eager")
    assert [*analysis.certify(nn.Sequential(nn.Linear(4, 4), inner)).parts] == ["1"]
