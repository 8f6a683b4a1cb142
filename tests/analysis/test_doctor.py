"""The doctor: every planted fault is named at its layer, healthy models get no alarm."""

from __future__ import annotations

import json
import math
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hdnn
from hdnn import diagnose
from hdnn.analysis import GradientDoctor, GradientWarning
from hdnn.errors import DataError, HDNNError, OptionError

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def mlp(
    depth: int = 8,
    width: int = 32,
    activation: Any = nn.ReLU,
    gain: float = 2.0,
) -> Any:
    """A perceptron, by default with He's weights."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=math.sqrt(gain / width))
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers, nn.Linear(width, 5))


class Block(nn.Module):
    """A block of a transformer, x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, width: int = 32, heads: int = 4, detached: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.detached = heads, detached
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def attention(self, x: Tensor) -> Tensor:
        B, T, n = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(B, T, 3, self.heads, n // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, T, n))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = x.detach() if self.detached else x
        return x + self.down(F.gelu(self.up(self.norm2(y))))


class Language(nn.Module):
    def __init__(
        self, blocks: list[nn.Module], width: int = 32, words: int = 50
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = (
            nn.LayerNorm(width),
            nn.Linear(width, words, bias=False),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ids(B: int = 2, T: int = 8, words: int = 50) -> Tensor:
    return torch.randint(
        0, words, (B, T), generator=torch.Generator().manual_seed(3)
    )


def images(B: int = 4, size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(
        B, channels, size, size, generator=torch.Generator().manual_seed(3)
    )


def rows(B: int = 8, width: int = 32) -> Tensor:
    return torch.randn(B, width, generator=torch.Generator().manual_seed(3))


# Planted faults: the model, its inputs, the kind and the layer


def small_layer() -> Any:
    model = mlp()
    model[6].weight.data.mul_(1e-6)
    return model


def dead_layer() -> Any:
    model = mlp()
    model[4].bias.data.fill_(-50.0)
    return model


def saturated_layer() -> Any:
    model = mlp(6, activation=nn.Sigmoid)
    model[4].weight.data.mul_(200.0)
    return model


def certain_attention() -> Any:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
            nn.init.normal_(self.q.weight, std=5.0)
            nn.init.normal_(self.k.weight, std=5.0)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)

    return Language([Block(), Attention(), Block()])


def gated() -> Any:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate = (
                nn.Linear(32, 32),
                nn.Parameter(torch.zeros(1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.gate * F.gelu(self.linear(x))

    return nn.Sequential(
        nn.Linear(32, 32), nn.GELU(), Gated(), nn.Linear(32, 5)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.rnn = nn.RNN(32, 32, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(32, 5)
        nn.init.orthogonal_(self.rnn.weight_hh_l0).data.abs_().mul_(2.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, -1])


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) * 0).abs().sqrt())


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


FAULTS: dict[str, tuple[Callable[[], Any], Callable[[], Tensor], str, str]] = {
    "all layers too small": (
        lambda: mlp(16, gain=0.05),
        rows,
        "vanishing",
        "0",
    ),
    "one layer too small": (small_layer, rows, "vanishing", "6"),
    "sigmoids": (
        lambda: mlp(16, activation=nn.Sigmoid, gain=1.0),
        rows,
        "vanishing",
        "",
    ),
    "a closed gate": (gated, rows, "vanishing", "2"),
    "a recurrence": (Recurrent, lambda: ids(2, 24), "exploding", "rnn"),
    "large layers": (
        lambda: mlp(12, 32, nn.Identity, 16.0),
        rows,
        "exploding",
        "",
    ),
    "dead units": (dead_layer, rows, "dead units", "5"),
    "a saturated sigmoid": (saturated_layer, rows, "saturated", "5"),
    "certain attention": (certain_attention, ids, "saturated", "blocks.1"),
    "a detached branch": (
        lambda: Language([Block(), Block(detached=True), Block()]),
        ids,
        "detached",
        "blocks.1",
    ),
    "a log": (
        lambda: nn.Sequential(nn.Linear(32, 8), Log(), nn.Linear(8, 2)),
        rows,
        "not finite",
        "1",
    ),
    "a root at zero": (Root, rows, "not finite", ""),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_at_its_layer(name, seed):
    torch.manual_seed(seed)
    make, x, kind, layer = FAULTS[name]
    diagnosis = diagnose(make(), x())
    fault = next((f for f in diagnosis.faults if f.kind == kind), None)
    assert fault is not None, str(diagnosis)
    assert any(
        name.startswith(layer) for name in (fault.layer, *fault.layers)
    ), fault
    assert not diagnosis.healthy
    assert f"{kind} at {fault.layer}" in diagnosis.summary


# Layers that get no gradient: issue 36


class Quantised(nn.Module):
    """A VQ autoencoder without a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
        )
        self.codes, self.decoder = nn.Embedding(16, 4), nn.Linear(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(self.encoder(x), self.codes.weight).argmin(-1)
        return self.decoder(self.codes(nearest))


class Chosen(nn.Module):
    """The largest of some scores chooses a row of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.embed, self.head = (
            nn.Linear(32, 6),
            nn.Embedding(6, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(self.score(x).argmax(-1)))


class Routed(nn.Module):
    """Each sample goes to one of three experts, by a hard one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(32, 3), nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(32, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = F.one_hot(self.router(x).argmax(-1), 3).to(x)
        out = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head((out * weights[:, None]).sum(-1))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [Quantised, Chosen, Routed])
def test_layers_that_a_choice_cuts_off_are_not_cleared(kind, seed):
    torch.manual_seed(seed)
    diagnosis = diagnose(kind(), torch.randn(8, 32))
    assert not diagnosis.healthy
    assert [f.kind for f in diagnosis.faults] == [
        "detached"
    ] or diagnosis.unknown


def test_a_layer_that_runs_for_nothing_is_not_known():
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.a(x)
            return self.b(x)

    diagnosis = diagnose(Beside(), rows(8, 8))
    assert not diagnosis.faults
    assert not diagnosis.healthy
    assert "whether a is trained" in diagnosis.unknown[0]
    assert "its weight, bias get no gradient" in diagnosis.unknown[0]
    assert "NOT EVERYTHING IS KNOWN" in str(diagnosis)


def test_of_an_energy_only_the_last_bias_is_not_trained():
    energy = nn.Sequential(nn.Linear(32, 8), nn.Softplus(), nn.Linear(8, 1))
    field = hdnn.GradientField(energy)
    diagnosis = diagnose(nn.Sequential(field, nn.Linear(32, 2)), rows())
    assert not diagnosis.faults
    (unknown,) = diagnosis.unknown
    assert "whether 0.energy.2 is trained: it runs, but its bias get" in unknown


class Branch(nn.Module):
    """A layer beside a skip connection, and something done to its result."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.head, self.change = (
            nn.Linear(32, 32),
            nn.Linear(32, 3),
            change,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.change(self.a(x)))


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, *grads):
        return torch.zeros_like(grads[0])


STEPS = {
    "round": torch.round,
    "sign": torch.sign,
    "a gate": lambda x: x * 0 + (x > 0),
    "a backward pass of zeros": Nothing.apply,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_gradient_of_zero_beside_a_skip_connection_is_a_fault(name):
    torch.manual_seed(0)
    diagnosis = diagnose(Branch(STEPS[name]), rows())
    faults = [(fault.kind, fault.layer) for fault in diagnosis.faults]
    assert faults == [("detached", "a")]


def test_hooks_of_parameters_count():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    assert diagnose(model, rows()).healthy
    for weight in model[0].parameters():
        weight.register_hook(lambda grad: 0 * grad)
    assert [f.layer for f in diagnose(model, rows()).faults] == ["0"]


def test_weights_that_are_read_without_their_module_are_not_cleared():
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.embed = nn.Linear(32, 3), nn.Embedding(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            far = torch.tensor([100.0, 0.0, 0.0])
            scores = F.linear(x, self.score.weight, self.score.bias + far)
            return self.embed(scores.argmax(-1))

    diagnosis = diagnose(Read(), rows())
    assert not diagnosis.healthy
    assert "whether score is trained" in diagnosis.unknown[0]


class Conditioned(nn.Module):
    """A block of a diffusion transformer, whose modulation starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.modulate, self.f = nn.Linear(32, 96), nn.Linear(32, 32)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulate(condition).chunk(3, -1)
        return self.head(x + gate * self.f(x * (1 + scale) + shift))


def test_first_values_of_zero_on_a_side_path_are_healthy():
    assert diagnose(Conditioned(), (rows(), rows())).healthy


def test_losses_among_the_outputs_count():
    class StraightThrough(Quantised):
        def forward(self, x: Tensor) -> Any:
            z = self.encoder(x)
            q = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
            loss = (q - z.detach()).square().mean()
            return self.decoder(z + (q - z).detach()), loss

    assert diagnose(StraightThrough(), rows()).healthy


class Spare(nn.Module):
    """Has a layer that it does not call; its weights are used in another way, or not at all."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.a, self.b, self.head = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 2),
        )
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.a.weight.data, self.a.bias) if self.used else x
        return self.head(torch.tanh(y) + self.b(x))


def test_a_layer_that_is_not_called_is_noted_and_weights_used_without_gradient_are_a_fault():
    diagnosis = diagnose(Spare(used=False), rows(8, 8))
    assert diagnosis.healthy
    assert [(f.kind, f.layer, f.fault) for f in diagnosis.findings] == [
        ("unused", "a", False)
    ]
    assert [f.kind for f in diagnose(Spare(used=True), rows(8, 8)).faults] == [
        "detached"
    ]


# Healthy models


def unet() -> nn.Module:
    def double(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
        )  # fmt: skip

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.middle = double(3, 8), double(8, 16)
            self.up, self.join = nn.ConvTranspose2d(16, 8, 2, 2), double(16, 8)
            self.head = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.down(x)
            b = self.middle(F.max_pool2d(a, 2))
            return self.head(self.join(torch.cat([self.up(b), a], 1)))

    return UNet()


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(50, 32),
            nn.LSTM(32, 32, 2, batch_first=True),
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


def zero_projections() -> nn.Module:
    model = Language([Block() for _ in range(4)])
    for block in model.blocks:
        nn.init.zeros_(block.out.weight)
        nn.init.zeros_(block.down.weight)
    return model


def dropout_and_norm() -> nn.Module:
    layers = [
        layer
        for _ in range(6)
        for layer in (
            nn.Linear(32, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
        )
    ]
    return nn.Sequential(*layers, nn.Linear(32, 3)).train()


def critic() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    layers = [
        p
        for _ in range(4)
        for p in (norm(nn.Linear(32, 32)), nn.LeakyReLU(0.2))
    ]
    return nn.Sequential(*layers, nn.Linear(32, 1)).train()


def reversible() -> nn.Module:
    blocks = [
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        for _ in range(24)
    ]
    return hdnn.Reversible([hdnn.Leapfrog(block) for block in blocks])


HEALTHY: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "transformer": (lambda: Language([Block() for _ in range(6)]), ids),
    "zero projections": (zero_projections, ids),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            3,
            enable_nested_tensor=False,
        ),
        lambda: torch.randn(2, 5, 32),
    ),
    "perceptron": (lambda: mlp(12, 64), lambda: rows(8, 64)),
    "relu6": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU6(), nn.Linear(32, 3)),
        lambda: 10 * rows(),
    ),
    "small inputs": (lambda: mlp(6), lambda: 1e-4 * rows()),
    "dropout": (dropout_and_norm, lambda: rows(16)),
    "spectral norm": (critic, rows),
    "u-net": (unet, images),
    "lstm": (Lstm, lambda: ids(4, 20)),
    "h2": (
        lambda: nn.Sequential(
            nn.Linear(32, 16), hdnn.H2(16, 64), nn.Linear(16, 3)
        ),
        rows,
    ),
    "reversible": (reversible, rows),
    "in half precision": (lambda: mlp(4).bfloat16(), lambda: rows().bfloat16()),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_gets_no_alarm(name, seed):
    torch.manual_seed(seed)
    make, x = HEALTHY[name]
    diagnosis = diagnose(make(), x())
    assert diagnosis.healthy, str(diagnosis)
    assert "gradients reach every layer" in diagnosis.summary


def test_a_frozen_backbone_is_healthy():
    model = mlp(6)
    model[:6].requires_grad_(False)
    assert diagnose(model, rows()).healthy


# How it looks


def everything(model: nn.Module) -> list[Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        {
            n: (t.detach().clone(), t.grad, t.requires_grad, t.dtype)
            for n, t in tensors.items()
        },
        [(m.training, getattr(m, "inplace", None)) for m in model.modules()],
        [
            (len(m._forward_hooks), len(m._forward_pre_hooks))
            for m in model.modules()
        ],
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002
    ]


def test_a_diagnosis_leaves_no_trace():
    model = dropout_and_norm()
    before = everything(model)
    diagnose(model, rows(16))
    after = everything(model)
    for name, (value, *rest) in before[0].items():
        assert torch.equal(value, after[0][name][0])
        assert rest == list(after[0][name][1:])
    assert before[1:] == after[1:]


def test_a_gain_is_the_size_of_a_gradient():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    for k, linear in enumerate(model):
        linear.weight.data = 2.0**k * nn.init.orthogonal_(linear.weight.data)
    gains = diagnose(model, rows(8, 64)).layers
    assert [layer.layer for layer in gains] == ["input", "0", "1"]
    assert [layer.gain for layer in gains] == pytest.approx(
        [2.0, 2.0, 1.0], rel=1e-4
    )


def test_a_loss_with_a_target_is_taken():
    labels = torch.randint(0, 5, (32,))
    diagnosis = diagnose(mlp(3), rows(32), loss=F.cross_entropy, target=labels)
    assert diagnosis.healthy
    assert diagnosis.samples == 8


def test_inputs_may_be_a_tuple_or_a_dict():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(
            self, x: Tensor, scale: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            y = torch.tanh(self.a(x))
            return self.b(y) * scale, {"hidden": y}

    for x in [
        (rows(3, 4), torch.ones(3, 1)),
        {"x": rows(3, 4), "scale": torch.ones(3, 1)},
    ]:
        assert diagnose(Two(), x).healthy


def test_a_model_that_gives_other_values_in_each_call_is_not_known():
    class Moving(nn.Module):
        noise = iter(range(1000))

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(
                torch.tanh(self.a(x * (2 + math.sin(next(self.noise)))))
            )

    diagnosis = diagnose(Moving(), rows(8, 8))
    assert not diagnosis.faults
    assert "different values in each call" in diagnosis.unknown[0]


@pytest.mark.parametrize(
    ("model", "x", "options", "words"),
    [
        (nn.ReLU(), rows(2, 4), {}, "has no parameters"),
        ("model", rows(2, 4), {}, "must be an nn.Module, but got str"),
        (
            mlp(2, 4),
            torch.tensor([[1.0, math.nan, 0.0, 0.0]]),
            {},
            "no NaN, but got NaN",
        ),
        (mlp(2, 4), rows(2, 5), {}, "does not run on x"),
        (mlp(2, 4), "words", {}, "x must be a tensor, a tuple"),
        (mlp(2, 4), rows(0, 4), {}, "at least one sample"),
        (mlp(2, 4), rows(2, 4), {"loss": lambda y: y}, "one number"),
        (mlp(2, 4), rows(2, 4), {"samples": 0}, "samples must be"),
    ],
)
def test_mistakes_get_one_sentence(model, x, options, words):
    with pytest.raises(HDNNError, match=re.escape(words)):
        diagnose(model, x, **options)


def test_a_model_that_cannot_be_differentiated_gets_one_sentence():
    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) > 0).long()

    with pytest.raises(DataError, match="cannot be differentiated"):
        diagnose(Labels(), rows(2, 4))


def test_a_diagnosis_is_text_json_and_a_picture():
    diagnosis = diagnose(small_layer(), rows())
    told = json.loads(diagnosis.to_json())
    assert told["healthy"] is False
    assert told["findings"][0]["kind"] == "vanishing"
    assert "FAULT: The gradient vanishes: 6 passes on" in str(diagnosis)
    pytest.importorskip("matplotlib")
    assert diagnosis.plot().get_yscale() == "log"


# Through a training


def trained(
    model: nn.Module, x: Any, steps: int, **options: Any
) -> GradientDoctor:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with GradientDoctor(model, optimizer=optimizer, **options) as doctor:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    return doctor


def test_a_doctor_looks_every_so_often_and_changes_no_training():
    states = []
    for every in (2, 100):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
        )
        doctor = trained(
            net, rows(6, 8), 7, every=every, share=0.9 if every == 2 else 0.0
        )
        states.append(net.state_dict())
        assert [look.step for look in doctor.looks] == (
            [1, 3, 5, 7] if every == 2 else [1]
        )
        assert doctor.looks[0].gradient["0.weight"] > 0
        assert not any(
            m._forward_hooks or m._forward_pre_hooks for m in net.modules()
        )
    assert all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def test_a_doctor_examines_on_request_and_warns_once():
    doctor = trained(mlp(3, 8), rows(6, 8), 3, share=0.0)
    assert not doctor.diagnoses
    assert "NOT EXAMINED" in str(doctor)
    assert doctor.examine().healthy
    assert not doctor.findings
    doctor = trained(dead_layer(), rows(), 2, share=0.0)
    with warnings.catch_warnings(record=True, action="always") as caught:
        doctor.examine()
        doctor.examine()
    assert len(caught) == len(doctor.findings)
    assert "dead units" in [f.kind for f in doctor.findings]


def test_a_doctor_warns_of_gradients_that_are_not_finite():
    x = rows(6, 8)
    x[0, 0] = math.inf
    with pytest.warns(GradientWarning, match="is not finite"):
        doctor = trained(mlp(3, 8), x, 1, share=0.0)
    assert doctor.findings[0].kind == "not finite"


def test_a_doctor_needs_a_module_and_inputs():
    with pytest.raises(OptionError, match="the model must be"):
        GradientDoctor("model")
    with pytest.raises(OptionError, match="seen no inputs yet"):
        GradientDoctor(mlp(2, 4)).examine()


@pytest.mark.filterwarnings("ignore::hdnn.analysis.GradientWarning")
def test_the_examples_of_the_page_run(capsys):
    for example in re.findall(
        r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL
    ):
        exec(compile(example, "doctor.md", "exec"), {})
    assert "vanishing" in capsys.readouterr().out
