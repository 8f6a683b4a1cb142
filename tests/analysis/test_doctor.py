"""The doctor names planted faults at their layer, passes healthy models, and leaves no trace."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import threading
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdnn
from analysis.faults import (
    FAULTS,
    HEALTHY,
    Case,
    Euler,
    Language,
    PreNorm,
    ids,
    images,
    mlp,
    rows,
)
from hdnn.analysis import Diagnosis, Finding, GradientDoctor, GradientWarning, diagnose
from hdnn.analysis.lanczos import bidiagonalise
from hdnn.errors import DataError, HDNNError, OptionError

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def named_at(finding: Finding, layer: str) -> bool:
    return finding.layer == layer or finding.layer.startswith((f"{layer}.", f"{layer} ("))


def looked_at(case: Case) -> Diagnosis:
    return diagnose(case.model, case.x, **case.options)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_at_its_layer(name):
    case = FAULTS[name]()
    found = looked_at(case)
    hits = [f for f in found.findings if f.kind in case.kinds and named_at(f, case.layer)]
    assert hits, str(found)
    assert case.note or (any(f.fault for f in hits) and not found.healthy)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_raises_no_alarm(name):
    found = looked_at(HEALTHY[name]())
    assert found.healthy, str(found)


@pytest.mark.parametrize("h", [1e-6, 1e-9, 1e-10, 1e-12, 1e-20])
@pytest.mark.parametrize("others", [1.0, None])
def test_a_step_is_small_also_where_rounding_takes_it_away(h, others):
    steps = [Euler(h if others is None or k == 2 else others) for k in range(5)]
    found = diagnose(nn.Sequential(*steps, nn.Linear(32, 2)), rows())
    assert [(f.kind, f.layer) for f in found.faults] == [("small step", "2" if others else "0")]


def test_a_branch_that_a_step_opens_or_that_is_switched_off_is_no_small_step():
    class Off(Euler):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0 * super().forward(x)

    blocks = [Euler(1.0) for _ in range(5)]
    nn.init.zeros_(blocks[1].linear.weight)
    nn.init.zeros_(blocks[1].linear.bias)
    for part in (Euler(1.0), Off(1.0)):
        found = diagnose(nn.Sequential(*blocks, part, nn.Linear(32, 2)), rows())
        assert not any(f.kind == "small step" for f in found.findings), str(found)


@pytest.mark.parametrize("count", [16, 24, 31])
@pytest.mark.parametrize("samples", [64, 256])
def test_half_of_the_units_and_more_are_not_dead_by_chance(count, samples):
    torch.manual_seed(0)
    model: Any = mlp(4)
    model[4].bias.data[:count] = -10
    found = diagnose(model, rows(samples), samples=samples)
    assert [(f.kind, f.layer) for f in found.faults] == [("dead units", "5")], str(found)


@pytest.mark.parametrize("depth", [1, 4, 16])
@pytest.mark.parametrize("samples", [1, 8, 256])
def test_units_of_a_fresh_network_are_off_by_chance(depth, samples):
    for seed in range(4):
        torch.manual_seed(seed)
        found = diagnose(mlp(depth, 48), rows(samples, 48), samples=256)
        assert not any(f.kind == "dead units" for f in found.findings), str(found)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("unit", [1e-5, 1e5, 1e7])
def test_the_units_of_the_input_are_no_fault(norm, unit):
    model = nn.Sequential(norm(8, eps=1e-20), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    found = diagnose(model, unit * rows(64, 8))
    assert found.healthy, str(found)


def test_singular_values_are_those_of_the_whole_matrices():
    model: Any = mlp(4, 6, activation=nn.Tanh).double().requires_grad_(False)
    x = rows(1, 6).double()
    found = diagnose(model, x, steps=6)
    last = len(model) - 2  # y_N enters the last linear layer
    for one in found.layers:
        if not math.isnan(one.largest):
            start = 0 if one.layer == "input" else int(one.layer) + 1
            body = model[start : last + 1]
            y = model[:start](x)[0]
            values = torch.linalg.svdvals(torch.func.jacrev(body)(y))
            assert one.largest == pytest.approx(float(values[0]), rel=1e-9)
            assert one.smallest == pytest.approx(float(values[-1]), rel=1e-6)


def test_lanczos_takes_tall_matrices():
    A = torch.randn(9, 5, dtype=torch.float64)
    low, high, k = bidiagonalise(lambda v: A @ v, lambda u: A.T @ u, 5, 8, A, rows=9)
    values = torch.linalg.svdvals(A)
    assert k == 5
    assert (low.value, high.value) == pytest.approx((float(values[-1]), float(values[0])))


class Uncopied(nn.Module):
    """Holds a lock, which cannot be copied, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.count, self.log = threading.Lock(), 0, []
        self.total, self.array = torch.zeros(3), np.zeros(2)
        self.nested = {"sizes": [1], "both": ([deque([1], maxlen=3)], torch.ones(2))}
        self.body = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.log.append(len(x))
        self.total.add_(1)
        self.array += 1
        self.nested["sizes"].append(len(x))  # pyright: ignore[reportAttributeAccessIssue]
        self.nested["both"][0][0].append(len(x))  # pyright: ignore
        self.nested["both"][1].mul_(2)  # pyright: ignore
        self.last = x.mean()
        return self.head(self.body(x))


def everything(model: nn.Module) -> list[Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        {n: t.detach().clone() for n, t in tensors.items()},
        {n: None if t.grad is None else t.grad.clone() for n, t in tensors.items()},
        [(n, t.requires_grad, t.dtype, t.data_ptr(), id(t)) for n, t in tensors.items()],
        [(n, m.training, getattr(m, "inplace", None)) for n, m in model.named_modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [copy.deepcopy(getattr(model, n, None)) for n in ("count", "log", "total", "nested")],
        [sorted(vars(model)), str(getattr(model, "array", None))],
        [torch.get_rng_state(), str(random.getstate()), str(np.random.get_state())],  # noqa: NPY002
    ]


def check_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            check_same(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, two in zip(a, b, strict=True):
            check_same(one, two)
    else:
        assert a == b


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["copied", "uncopied", "training", "frozen"])
def test_a_diagnosis_leaves_no_trace(kind, half):
    model: nn.Module = Uncopied() if kind == "uncopied" else mlp(3, 8)
    if kind == "training":
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    if kind == "frozen":
        model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    x = rows(6, 8)
    model(x).sum().backward()
    model, x = (model.bfloat16(), x.bfloat16()) if half else (model, x)
    before = everything(model)
    diagnose(model, x)
    check_same(before, everything(model))
    assert not x.requires_grad
    assert x.grad is None


def test_names_of_layers_can_be_given():
    model = Language([PreNorm() for _ in range(3)])
    found = diagnose(model, ids(), layers=["blocks.0", "blocks.2"])
    assert [one.layer for one in found.layers] == ["blocks.0", "blocks.2", "output"]


def test_a_loss_with_a_target_is_taken():
    labels = torch.randint(0, 5, (32,))
    found = diagnose(mlp(3), rows(32), loss=nn.functional.cross_entropy, target=labels)
    assert found.healthy
    assert found.samples == 8


def test_a_target_need_not_fit_the_first_axis_of_x():
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mean(0))

    x, labels = torch.randn(20, 12, 4), torch.randint(0, 3, (12,))  # of 20 times and 12 samples
    assert diagnose(Last(), x, loss=nn.functional.cross_entropy, target=labels).healthy


def test_inputs_may_be_a_tuple_or_a_dict():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            y = torch.tanh(self.a(x))
            return self.b(y) * scale, {"hidden": y}

    for x in [(rows(3, 4), torch.ones(3, 1)), {"x": rows(3, 4), "scale": torch.ones(3, 1)}]:
        assert diagnose(Two(), x).healthy


class Once(torch.autograd.Function):
    """A function that can be differentiated once only, as many hand-written ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore
        return grads[0] * ctx.saved_tensors[0].cos()


def test_what_cannot_be_computed_is_said_and_is_not_fine():
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(x)  # pyright: ignore[reportReturnType]

    found = diagnose(
        nn.Sequential(nn.Linear(4, 4), Sine(), nn.Linear(4, 4), nn.Linear(4, 2)), rows(3, 4)
    )
    assert not found.faults
    assert not found.healthy
    assert "singular values" in found.unknown[0]
    assert "NOT EVERYTHING COULD BE COMPUTED" in str(found)


class Beside(nn.Module):
    """Has a part `a` that it does not call: its weights are used in other ways, or not at all."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.b, self.head, self.used = nn.Linear(8, 8), nn.Linear(8, 2), used

    def forward(self, x: Tensor) -> Tensor:
        linear: Any = self.a[0]
        y = nn.functional.linear(x, linear.weight.data, linear.bias) if self.used else x
        return self.head(torch.tanh(y) + self.b(x))


def test_a_layer_that_is_not_called_is_noted():
    found = diagnose(Beside(used=False), rows(8, 8))
    assert found.healthy
    assert [(f.kind, f.layer) for f in found.notes] == [("unused", "a")]


def test_weights_that_are_used_without_a_call_and_a_gradient_are_named():
    found = diagnose(Beside(used=True), rows(8, 8))
    assert [(f.kind, f.layer) for f in found.findings] == [("detached", "a.0")]


class Moving(nn.Module):
    """Another input for the same x in each call: by a counter that can be put back, or not."""

    def __init__(self, noise: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.noise, self.count = nn.Linear(8, 8), nn.Linear(8, 2), noise, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        draw = self.noise.standard_normal() if self.noise is not None else self.count
        return self.b(torch.tanh(self.a(x * (2 + math.sin(draw)))))


def test_a_model_that_counts_its_calls_is_put_back_before_each():
    model = Moving()
    found = diagnose(model, rows(8, 8))
    assert found.healthy, str(found)
    assert model.count == 0


def test_a_model_that_gives_other_values_in_each_call_is_not_known():
    class Source:
        def standard_normal(self) -> float:
            return float.fromhex(os.urandom(6).hex())

    found = diagnose(Moving(Source()), rows(8, 8))
    assert not found.faults, str(found)
    assert "other values in each call" in found.unknown[0]


def test_an_inner_state_that_is_left_out_of_the_gradient_is_no_fault():
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
            return self.head(torch.tanh(3 * (y - 2 * self.mean)))

    found = diagnose(Average(), rows(8, 8))
    assert not found.faults, str(found)
    assert "the model changes in each call" in found.unknown[0]


def test_where_values_explode_differences_say_nothing():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.RNN(32, 32, batch_first=True), nn.Linear(32, 2)
            weight = torch.randn(32, 32)
            weight *= 6 / torch.linalg.eigvals(weight).abs().max()
            values: Any = self.rnn
            values.weight_hh_l0.data = weight
            values.weight_ih_l0.data *= 0.01
            values.bias_ih_l0.data.zero_()
            values.bias_hh_l0.data.zero_()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    torch.manual_seed(0)
    found = diagnose(Net(), 0.01 * torch.randn(8, 60, 32))
    assert [f.kind for f in found.faults] == ["exploding"], str(found)


def test_a_model_is_diagnosed_in_inference_mode_too():
    with torch.inference_mode():
        model, x = mlp(3, 8), rows(6, 8)
        assert diagnose(model, x).healthy
        assert torch.is_inference_mode_enabled()
    assert diagnose(mlp(3, 8), x).healthy


@pytest.mark.parametrize(
    ("model", "x", "options", "words"),
    [
        (nn.ReLU(), rows(2, 4), {}, "has no parameters"),
        ("model", rows(2, 4), {}, "takes an nn.Module, but got str"),
        (mlp(2, 4), torch.tensor([[1.0, math.nan, 0.0, 0.0]]), {}, "x has NaN"),
        (mlp(2, 4), rows(2, 4).to("meta"), {}, "x is on meta, but the model is on cpu"),
        (mlp(2, 4), rows(2, 5), {}, "cannot be run on x and differentiated"),
        (mlp(2, 4), "words", {}, "x must be a tensor, a tuple"),
        (mlp(2, 4), rows(0, 4), {}, "x is empty"),
        (mlp(2, 4), rows(2, 4), {"layers": ["O"]}, "no module 'O'"),
        (Language([PreNorm()]), ids(), {"layers": ["block.0"]}, "Did you mean 'blocks.0'"),
        (Language([PreNorm()]), ids(), {"layers": ["blocks"]}, "is not called"),
        (mlp(2, 4), rows(2, 4), {"layers": "0"}, "layers is a list of names"),
        (mlp(2, 4), rows(2, 4), {"target": 1}, "needs a loss"),
        (mlp(2, 4), rows(2, 4), {"loss": lambda y: y}, "one number"),
        (mlp(2, 4), rows(2, 4), {"steps": 0}, "steps must be"),
        (mlp(2, 4), rows(2, 4).to_sparse(), {}, "give x.to_dense()"),
        (mlp(2, 4), rows(2, 4), {"layers": 3}, "layers is a list of names of modules, but got 3"),
        (mlp(2, 4), rows(2, 4), {"layers": []}, "layers is empty"),
        (mlp(2, 4), rows(2, 4), {"optimizer": 3}, "optimizer must be one of torch.optim"),
        (mlp(2, 4), rows(2, 4), {"loss": 3}, "loss is a function of the output"),
        (mlp(2, 4), rows(2, 4), {"loss": lambda y: y.no}, "loss raised AttributeError"),
    ],
)
def test_mistakes_get_one_sentence(model, x, options, words):
    with pytest.raises(HDNNError, match=re.escape(words)):
        diagnose(model, x, **options)


def test_a_model_that_cannot_be_differentiated_gets_one_sentence():
    class Signs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) > 0).long()

    with pytest.raises(DataError, match="cannot be differentiated"):
        diagnose(Signs(), rows(2, 4))


def test_weights_that_are_not_finite_are_named():
    model = mlp(2, 4)
    with torch.no_grad():
        model[2].weight[0, 0] = math.inf  # pyright: ignore[reportIndexIssue]
    with pytest.raises(DataError, match=r"2\.weight is not finite"):
        diagnose(model, rows(2, 4))


def test_a_diagnosis_is_text_json_and_a_picture():
    case = FAULTS["vanishing_layer"]()
    found = looked_at(case)
    told = json.loads(found.to_json())
    assert told["healthy"] is False
    assert told["findings"][0]["kind"] == "vanishing"
    assert "The gradient vanishes: 6 lets through" in str(found)
    assert found.plot().get_yscale() == "log"


def test_diagnose_is_at_the_top_level_and_comes_late():
    assert hdnn.diagnose is diagnose
    assert "diagnose" in dir(hdnn)


def trained(
    model: nn.Module, x: Any, steps: int, rate: float = 1e-3, **options: Any
) -> GradientDoctor:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    with GradientDoctor(model, optimizer=optimizer, **options) as doctor:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    return doctor


def test_a_doctor_looks_every_so_often_and_changes_no_training():
    nets = []
    for every in (2, 100):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        doctor = trained(net, rows(6, 8), 7, every=every, share=0.9 if every == 2 else 0.0)
        nets.append(net.state_dict())
        assert [one.step for one in doctor.looks] == ([1, 3, 5, 7] if every == 2 else [1])
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    check_same(*map(dict, nets))


def test_a_doctor_examines_on_request():
    doctor = trained(mlp(3, 8), rows(6, 8), 3, share=0.0)
    assert not doctor.healthy
    assert "NOT EXAMINED" in str(doctor)
    assert doctor.examine().healthy
    assert doctor.healthy
    assert "1 examinations in 3 steps" in str(doctor)


def test_a_doctor_says_that_steps_are_too_small():
    with pytest.warns(GradientWarning, match="Steps are too small"):
        doctor = trained(mlp(3, 8), rows(6, 8), 7, rate=1e-12, every=2, share=0.0)
    assert [f.kind for f in doctor.findings] == ["small step"]


def test_a_doctor_warns_once_of_a_fault_that_comes_up():
    model = mlp(4, 32)
    with torch.no_grad():
        model[2].bias.fill_(-50.0)  # pyright: ignore[reportIndexIssue]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        doctor = trained(model, rows(8), 6, every=1, share=0.0)
        doctor.examine()
        doctor.examine()
    assert ("dead units", "3") in [(f.kind, f.layer) for f in doctor.findings]
    assert len(told) == len(doctor.findings)


def test_a_doctor_names_the_module_that_is_not_finite():
    model, x = mlp(3, 8), rows(6, 8)
    x[0, 0] = math.inf
    with pytest.warns(GradientWarning, match="is not finite"):
        doctor = trained(model, x, 1, share=0.0)
    assert doctor.findings[0].kind == "not finite"


def test_a_doctor_needs_a_module_and_inputs():
    with pytest.raises(OptionError, match="a doctor watches"):
        GradientDoctor("model")  # pyright: ignore[reportArgumentType]
    for option, words in {
        "optimizer": "torch.optim",
        "layers": "a list",
        "loss": "loss is",
    }.items():
        with pytest.raises(OptionError, match=words):
            GradientDoctor(mlp(2, 4), **{option: 3})  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="seen no inputs yet"):
        GradientDoctor(mlp(2, 4)).examine()


def test_a_doctor_counts_steps_by_hand():
    model = mlp(2, 4)
    with GradientDoctor(model, every=1, share=0.0) as doctor:
        model(rows(2, 4)).sum().backward()
        doctor.step()
    assert len(doctor.looks) == 1
    assert doctor.looks[0].gradient["0"] > 0


def test_the_example_of_the_page_runs(capsys):
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradientWarning)
            exec(compile(example, "doctor.md", "exec"), {})
    assert "vanishing" in capsys.readouterr().out


def test_images_in_training_mode_keep_their_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    before = model[1].running_mean.clone()  # pyright: ignore[reportCallIssue]
    diagnose(model, images(2, 6))
    assert torch.equal(model[1].running_mean, before)  # pyright: ignore[reportArgumentType]
