"""Models with one planted fault each, and healthy ones: what the doctor is tried on.

A `Case` says what must be found, and at which layer: a finding names it, or a part of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hdnn


@dataclass
class Case:
    model: nn.Module
    x: Any
    kinds: tuple[str, ...] = ()  # any of these is right
    layer: str = ""  # the finding is there, or inside of it
    note: bool = False  # it need not be called a fault
    options: dict[str, Any] = field(default_factory=dict)


def mlp(depth: int = 8, width: int = 32, activation: Any = nn.ReLU, gain: float = 2.0) -> nn.Module:
    """A perceptron, by default with He's weights."""
    parts: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=math.sqrt(gain / width))
        nn.init.zeros_(linear.bias)
        parts += [linear, activation()]
    return nn.Sequential(*parts, nn.Linear(width, 5))


class PreNorm(nn.Module):
    """A block of a transformer, x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        B, T, n = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, n // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, T, n))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A small language model of blocks."""

    def __init__(self, blocks: list[nn.Module], width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ids(B: int = 2, T: int = 8, words: int = 50) -> Tensor:
    return torch.randint(0, words, (B, T), generator=torch.Generator().manual_seed(3))


def images(B: int = 4, size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(B, channels, size, size, generator=torch.Generator().manual_seed(3))


def rows(B: int = 8, width: int = 32) -> Tensor:
    return torch.randn(B, width, generator=torch.Generator().manual_seed(3))


class Residual(nn.Module):
    """x + relu(bn(conv(x)))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ConvNet(nn.Module):
    """Residual blocks in two stages."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first = nn.Sequential(*(Residual(16) for _ in range(blocks)))
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.second = nn.Sequential(*(Residual(32) for _ in range(blocks)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.down(self.first(self.stem(x))))
        return self.head(x.mean((2, 3)))


def gpt2(layers: int = 4) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": layers, "n_head": 4, "n_embd": 32, "vocab_size": 50, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def bert(layers: int = 4) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 4, "hidden_size": 32}
    config = transformers.BertConfig(
        **sizes, intermediate_size=64, vocab_size=50, max_position_embeddings=16
    )
    return transformers.BertModel(config)


def t5(layers: int = 3) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        num_layers=layers, d_model=32, d_kv=8, num_heads=4, d_ff=64, vocab_size=50
    )
    return transformers.T5Model(config)


def named_ids(B: int = 2, T: int = 8) -> dict[str, Tensor]:
    return {"input_ids": ids(B, T), "attention_mask": torch.ones(B, T, dtype=torch.long)}


def vit() -> Any:
    timm = pytest.importorskip("timm", reason="timm needs torchvision")
    how = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **how)


def timm_model(name: str, **options: Any) -> Any:
    timm = pytest.importorskip("timm", reason="timm needs torchvision")
    return timm.create_model(name, pretrained=False, **options)


# Twelve faults


def vanishing_init() -> Case:
    return Case(mlp(16, gain=0.05), rows(), ("vanishing",), "0")


def vanishing_layer() -> Case:
    model = mlp(8)
    with torch.no_grad():
        model[6].weight.mul_(1e-6)  # pyright: ignore[reportIndexIssue]
    return Case(model, rows(), ("vanishing",), "6")


def missing_residual() -> Case:
    model = vit()
    block = model.blocks[2]

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        x = block.attn(block.norm1(x))
        return block.mlp(block.norm2(x))

    block.forward = forward
    return Case(model.eval(), images(2, 32), ("missing residual", "vanishing"), "blocks.2")


def dead_relu() -> Case:
    model = timm_model("resnet18", num_classes=10)
    with torch.no_grad():
        model.layer2[1].bn1.bias.fill_(-10.0)
    return Case(model.train(), images(4, 64), ("dead units",), "layer2.1")


def saturated_sigmoid() -> Case:
    model = mlp(6, activation=nn.Sigmoid)
    with torch.no_grad():
        model[4].weight.mul_(200.0)  # pyright: ignore[reportIndexIssue]
    return Case(model, rows(), ("saturated",), "5")


class DetachedBlock(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x.detach()))


def detached_branch() -> Case:
    model = Language([PreNorm(), PreNorm(), DetachedBlock(), PreNorm()])
    return Case(model, ids(), ("detached",), "blocks.2")


def exploding_recurrence() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.rnn = nn.RNN(32, 32, nonlinearity="relu", batch_first=True)
            self.head = nn.Linear(32, 5)
            weight: Any = self.rnn.weight_hh_l0
            nn.init.orthogonal_(weight).data.abs_().mul_(2.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(self.embed(x))[0][:, -1])

    return Case(Net(), ids(2, 24), ("exploding",), "rnn")


def zero_gate() -> Case:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate = nn.Linear(32, 32), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.gate * F.gelu(self.linear(x))

    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), Gated(), nn.Linear(32, 5))
    return Case(model, rows(), ("zero gate",), "2")


class PostNorm(PreNorm):
    """The sum is divided by its size, and the branches are large: little of x is left."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + 30 * self.attention(x))
        return self.norm2(x + 30 * self.mlp(x))


def wrong_norm() -> Case:
    model = Language([PreNorm(), PreNorm(), PreNorm(), PreNorm()])
    model.blocks[1].norm2 = nn.LayerNorm([1])  # over an axis of one entry: nothing is left

    def forward(x: Tensor) -> Tensor:
        block = model.blocks[1]
        x = x + block.attention(block.norm1(x))  # pyright: ignore[reportCallIssue]
        return block.norm2((x + block.mlp(x)).unsqueeze(-1)).squeeze(-1)  # pyright: ignore[reportCallIssue]

    model.blocks[1].forward = forward
    return Case(model, ids(), ("vanishing", "norm hides", "no gradient", "zero gate"), "blocks.1")


def frozen_layer() -> Case:
    model = bert()
    model.encoder.layer[2].requires_grad_(False)
    return Case(model, named_ids(), ("frozen",), "encoder.layer.2", note=True)


class NaiveSoftmax(nn.Module):
    """Attention by exp and sum, with logits that have grown."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        nn.init.normal_(self.q.weight, std=0.9)
        nn.init.normal_(self.k.weight, std=0.9)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.exp(self.q(x) @ self.k(x).mT / math.sqrt(32))
        return x + (weights / weights.sum(-1, keepdim=True)) @ self.v(x)


def nan_prone_softmax() -> Case:
    model = Language([PreNorm(), NaiveSoftmax(), PreNorm()])
    return Case(model, ids(), ("nan risk", "not finite"), "blocks.1")


def bf16_underflow() -> Case:
    model = gpt2()
    with torch.no_grad():
        for name in ("attn", "mlp"):
            getattr(model.transformer.h[1], name).c_proj.weight.mul_(1e-4)
    return Case(model.bfloat16().eval(), ids(), ("underflow",), "transformer.h.1")


class Euler(nn.Module):
    """x + h tanh(linear(x))."""

    def __init__(self, h: float) -> None:
        super().__init__()
        self.linear, self.h = nn.Linear(32, 32), h

    def forward(self, x: Tensor) -> Tensor:
        return x + self.h * torch.tanh(self.linear(x))


def small_step() -> Case:
    model = nn.Sequential(nn.Linear(32, 32), *(Euler(1e-6) for _ in range(6)), nn.Linear(32, 5))
    return Case(model, rows(), ("small step",), "1")


FAULTS: dict[str, Callable[[], Case]] = {
    one.__name__: one
    for one in (
        vanishing_init,
        vanishing_layer,
        missing_residual,
        dead_relu,
        saturated_sigmoid,
        detached_branch,
        exploding_recurrence,
        zero_gate,
        wrong_norm,
        frozen_layer,
        nan_prone_softmax,
        bf16_underflow,
        small_step,
    )
}


# Healthy ones


def healthy_prenorm() -> Case:
    return Case(Language([PreNorm() for _ in range(6)]), ids())


def healthy_resnet() -> Case:
    return Case(timm_model("resnet18", num_classes=10).train(), images(4, 64))


def healthy_gpt2() -> Case:
    return Case(gpt2().train(), ids())


def healthy_bert() -> Case:
    return Case(bert().train(), named_ids())


def healthy_t5() -> Case:
    return Case(t5(), {**named_ids(), "decoder_input_ids": ids(2, 5)})


def healthy_vit() -> Case:
    return Case(vit(), images(2, 32))


def healthy_mlp() -> Case:
    return Case(mlp(12, 64), rows(8, 64))


def healthy_lstm() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(50, 32), nn.LSTM(32, 32, 2, batch_first=True)
            self.head = nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(x))[0][:, -1])

    return Case(Net(), ids(4, 20))


def healthy_unet() -> Case:
    def double(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
        )  # fmt: skip

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2, self.middle = double(3, 8), double(8, 16), double(16, 32)
            self.up2, self.join2 = nn.ConvTranspose2d(32, 16, 2, 2), double(32, 16)
            self.up1, self.join1 = nn.ConvTranspose2d(16, 8, 2, 2), double(16, 8)
            self.head = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            c = self.middle(F.max_pool2d(b, 2))
            b = self.join2(torch.cat([self.up2(c), b], 1))
            return self.head(self.join1(torch.cat([self.up1(b), a], 1)))

    return Case(UNet(), images())


def healthy_mobilenet() -> Case:
    return Case(timm_model("mobilenetv3_small_050", num_classes=10).train(), images(4, 64))


def healthy_dropout_and_batchnorm() -> Case:
    parts: list[nn.Module] = []
    for _ in range(6):
        parts += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.3)]
    return Case(nn.Sequential(*parts, nn.Linear(32, 3)).train(), rows(16))


def healthy_frozen_backbone() -> Case:
    model = gpt2()
    model.transformer.requires_grad_(False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return Case(model, ids())


def healthy_h2() -> Case:
    return Case(nn.Sequential(nn.Linear(10, 16), hdnn.H2(16, 64), nn.Linear(16, 3)), rows(8, 10))


def healthy_reversible() -> Case:
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(24)]
    return Case(hdnn.Reversible([hdnn.Leapfrog(block) for block in blocks]), rows())


def healthy_zero_projection() -> Case:
    model = Language([PreNorm() for _ in range(4)])
    for block in model.blocks:
        for name in ("out", "down"):
            nn.init.zeros_(getattr(block, name).weight)
            nn.init.zeros_(getattr(block, name).bias)
    return Case(model, ids())


def critic(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    parts = [p for _ in range(4) for p in (norm(nn.Linear(32, 32)), nn.LeakyReLU(0.2))]
    return nn.Sequential(*parts, nn.BatchNorm1d(32), nn.Linear(32, 1)).train()


def healthy_spectral_norm() -> Case:
    return Case(critic(nn.utils.parametrizations.spectral_norm), rows())


def healthy_spectral_norm_by_hooks() -> Case:
    return Case(critic(nn.utils.spectral_norm), rows())


def healthy_random_depth() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Euler(1.0) for _ in range(6))
            self.head = nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if random.random() < 0.5 else x
            return self.head(x)

    return Case(Net(), rows())


HEALTHY: dict[str, Callable[[], Case]] = {
    name.removeprefix("healthy_"): one
    for name, one in [*globals().items()]
    if name.startswith("healthy_")
}
