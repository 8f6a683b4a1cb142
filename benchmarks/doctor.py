"""Does the doctor find faults, and is it silent about healthy models?

    python benchmarks/doctor.py --out docs/results

40 models with a planted fault, and 40 healthy ones with random weights as a practitioner builds
them, each at one seed. A fault counts as found if the diagnosis is not healthy, or if `diagnose`
refuses the model in a sentence. Any fault or unknown of a healthy model is a false alarm. Needs
torch_geometric.
"""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from report import command, head, table, text_of
from torch import Tensor, nn

import hdnn
from hdnn.errors import HDNNError

SIZES = {"full": {"seed": 0}, "quick": {"seed": 0}}
WIDTH = 32


class Net(nn.Module):
    """Named modules and a function of them and the inputs: a model in one line."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def rows(n: int = 16, width: int = WIDTH) -> Tensor:
    return torch.randn(n, width)


def tokens() -> Tensor:
    return torch.randn(8, 12, WIDTH)


def usual_inputs(model: nn.Module) -> Tensor:
    """Images, tokens or rows, by the first weight of the model."""
    shape = next(model.parameters()).shape
    if len(shape) == 4:
        return torch.randn(8, 3, 16, 16)
    return torch.randint(0, 50, (8, 12)) if shape[0] == 50 else rows()


def lin(a: int = WIDTH, b: int = WIDTH) -> nn.Module:
    return nn.Linear(a, b)


def mlp(
    depth: int = 8, sigma: Any = nn.ReLU, gain: float = 2.0, out: int = 3
) -> Any:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [lin(), sigma()]
        nn.init.normal_(layers[-2].weight, std=(gain / WIDTH) ** 0.5)  # pyright: ignore
    return nn.Sequential(*layers, lin(WIDTH, out))


def conv(a: int, b: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, 3, stride, 1, groups=groups, bias=False),
        nn.BatchNorm2d(b),
        nn.ReLU(inplace=True),
    )


def classifier(*layers: nn.Module, width: int = 16) -> nn.Sequential:
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(width, 5))


def residual(*layers: nn.Module) -> nn.Module:
    return Net(lambda m, x: x + m.f(x), f=nn.Sequential(*layers))


def dense(a: int, b: int) -> nn.Module:
    return Net(lambda m, x: torch.cat([x, m.f(x)], 1), f=conv(a, b))


def encoder(depth: int = 3, **options: Any) -> nn.Module:
    options["batch_first"] = True
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, **options)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def language(body: nn.Module, causal: bool = False, tied: bool = False) -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.embed(x) + m.place(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return m.head(m.body(y, mask) if causal else m.body(y))

    parts = {"embed": nn.Embedding(50, WIDTH), "place": nn.Embedding(12, WIDTH)}
    net: Any = Net(run, **parts, body=body, head=lin(WIDTH, 50))
    if tied:
        net.head.weight = net.embed.weight
        nn.init.normal_(net.embed.weight, std=0.02)
    return net


def recurrent(kind: Any) -> nn.Module:
    body = kind(WIDTH, WIDTH, 2, batch_first=True)
    parts = {
        "embed": nn.Embedding(50, WIDTH),
        "body": body,
        "head": lin(WIDTH, 5),
    }
    return Net(lambda m, x: m.head(m.body(m.embed(x))[0][:, -1]), **parts)


def unet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        a = m.down(x)
        b = m.middle(F.max_pool2d(a, 2))
        return m.head(m.join(torch.cat([m.up(b), a], 1)))

    parts = {"down": conv(3, 8), "middle": conv(8, 16), "join": conv(16, 8)}
    up = nn.ConvTranspose2d(16, 8, 2, 2)
    return Net(run, **parts, up=up, head=nn.Conv2d(8, 2, 1))


def mixer() -> nn.Module:
    def block() -> nn.Module:
        return Net(
            lambda m, x: m.b(m.a(x.mT).mT),
            a=residual(nn.LayerNorm(12), lin(12, 24), nn.GELU(), lin(24, 12)),
            b=residual(nn.LayerNorm(WIDTH), lin(), nn.GELU(), lin()),
        )

    return nn.Sequential(block(), block(), lin(WIDTH, 4))


def flow() -> nn.Module:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(len(x))
        for f in m.children():
            a, b = x.chunk(2, -1)
            s, t = f(a).chunk(2, -1)
            total = total + s.tanh().sum(-1)
            x = torch.cat([b * s.tanh().exp() + t, a], -1)
        return x, total

    layers = [nn.Sequential(lin(16), nn.ReLU(), lin()) for _ in range(4)]
    return Net(run, **{f"f{k}": layer for k, layer in enumerate(layers)})


def experts(hard: bool) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        weights = m.router(x).softmax(-1)
        if hard:
            weights = F.one_hot(weights.argmax(-1), 3).to(x)
        out = torch.stack([e(x) for e in m.experts], -1)
        return m.head((out * weights[:, None]).sum(-1))

    parts = nn.ModuleList(lin() for _ in range(3))
    return Net(run, router=lin(WIDTH, 3), experts=parts, head=lin(WIDTH, 2))


def quantised(straight: bool) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        z = m.encoder(x)
        q = m.codes(torch.cdist(z, m.codes.weight).argmin(-1))
        z = z + (q - z).detach() + (q - q.detach()) if straight else q
        return m.decoder(z)

    encoder = nn.Sequential(lin(), nn.ReLU(), lin(WIDTH, 4))
    return Net(run, encoder=encoder, codes=nn.Embedding(16, 4), decoder=lin(4))


def graph(kind: str) -> tuple[nn.Module, Any]:
    import torch_geometric.nn as pyg

    layer = getattr(pyg, kind)
    parts = {"a": layer(WIDTH, WIDTH), "b": layer(WIDTH, WIDTH)}
    if kind == "GINConv":
        parts = {"a": layer(mlp(1, out=WIDTH)), "b": layer(mlp(1, out=WIDTH))}

    def run(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        return m.head(m.b(m.a(x, edges).relu(), edges).relu())

    edges = torch.randint(0, 20, (2, 80))
    return Net(run, **parts, head=lin(WIDTH, 4)), (rows(20), edges)


def changed(model: nn.Module, name: str, change: Callable[..., Any]) -> Any:
    """The model with some of its weights changed."""
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.startswith(name):
                change(weight)
    return model


def trained(model: nn.Module, rate: float, steps: int = 20) -> nn.Module:
    """The model after some steps of SGD at this rate."""
    sgd = torch.optim.SGD(model.parameters(), rate)
    x = rows()
    for _ in range(steps):
        sgd.zero_grad()
        (model(x) - 1).square().mean().backward()
        sgd.step()
    return model


def between(function: Callable[[Tensor], Tensor], sigma: Any = nn.ReLU) -> Any:
    """A perceptron with a function between two of its layers."""
    first = mlp(2, sigma, out=WIDTH)
    return Net(lambda m, x: m.b(function(m.a(x))), a=first, b=mlp(2))


# Each entry makes a model, and its inputs if they are not `usual_inputs`.
Maker = Callable[[], Any]

# fmt: off
FAULTS: dict[str, Maker] = {
    "small weights": lambda: mlp(12, gain=0.02),
    "small tanh": lambda: mlp(12, nn.Tanh, 0.05),
    "sigmoids": lambda: mlp(16, nn.Sigmoid),
    "deep sigmoids": lambda: mlp(40, nn.Sigmoid),
    "one tiny layer": lambda: changed(mlp(), "6.weight", lambda w: w.mul_(1e-6)),
    "zero weights": lambda: changed(mlp(), "4.", nn.init.zeros_),
    "scaled branch": lambda: between(lambda x: 1e-7 * x),
    "tiny convolutions": lambda: (classifier(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(12))), 1e-3 * torch.randn(8, 16, 16, 16)),
    "large weights": lambda: mlp(12, gain=50.0),
    "large linear": lambda: mlp(12, nn.Identity, 16.0),
    "weights of size 1": lambda: mlp(8, gain=float(WIDTH)),
    "one huge layer": lambda: changed(mlp(), "6.weight", lambda w: w.mul_(1e5)),
    "residual without norm": lambda: nn.Sequential(*(residual(mlp(1, gain=60.0, out=32)) for _ in range(8))),
    "dead bias": lambda: changed(mlp(), "6.bias", lambda b: b.fill_(-50.0)),
    "dead everywhere": lambda: (changed(mlp(), "", lambda w: w.copy_(-w.abs())), rows().abs()),
    "dead convolution": lambda: classifier(changed(conv(3, 16), "1.bias", lambda b: b.fill_(-20.0)), conv(16, 16)),
    "dead GELU": lambda: changed(mlp(8, nn.GELU), "2.bias", lambda b: b.fill_(-40.0)),
    "dead ReLU6": lambda: changed(mlp(8, nn.ReLU6), "2.bias", lambda b: b.fill_(30.0)),
    "saturated sigmoid": lambda: changed(mlp(4, nn.Sigmoid), "2.bias", lambda b: b.fill_(30.0)),
    "saturated tanh": lambda: mlp(3, nn.Tanh, 1e4),
    "unscaled inputs": lambda: (mlp(3, nn.Tanh), 1e3 * rows()),
    "certain attention": lambda: changed(language(encoder()), "body.layers.1.self_attn.in", lambda w: w.mul_(100.0)),
    "detach": lambda: between(Tensor.detach),
    "no_grad": lambda: between(torch.no_grad()(torch.relu)),
    "data": lambda: between(lambda x: x.data.relu()),
    "numpy": lambda: between(lambda x: torch.from_numpy(x.detach().numpy().clip(0))),
    "rounding": lambda: between(torch.round),
    "sign": lambda: between(torch.sign),
    "threshold": lambda: between(lambda x: (x > 0).float()),
    "new tensor": lambda: between(lambda x: torch.tensor(x.tolist())),
    "argmax into an embedding": lambda: Net(lambda m, x: m.head(m.embed(m.score(x).argmax(-1))), score=lin(), embed=nn.Embedding(WIDTH, 4), head=lin(4)),
    "no straight-through": lambda: quantised(False),
    "hard router": lambda: experts(True),
    "detached branch": lambda: Net(lambda m, x: m.c(m.a(x) + m.b(x).detach()), a=mlp(2, out=WIDTH), b=mlp(2, out=WIDTH), c=lin()),
    "runs for nothing": lambda: Net(lambda m, x: (m.a(x), m.b(x))[1], a=lin(), b=lin()),
    "all frozen by mistake": lambda: mlp().requires_grad_(False),
    "log of negatives": lambda: between(torch.log),
    "root at zero": lambda: between(lambda x: x + (x - x).sqrt()),
    "division by zero": lambda: between(lambda x: x / (x - x)),
    "huge learning rate": lambda: trained(mlp(4), 10.0),
}


HEALTHY: dict[str, Maker] = {
    "MLP, ReLU": lambda: mlp(),
    "MLP, GELU": lambda: mlp(6, nn.GELU),
    "MLP, tanh": lambda: mlp(8, nn.Tanh, 1.0),
    "MLP, default initialisation": lambda: nn.Sequential(lin(), nn.ReLU(), lin(), nn.ReLU(), lin()),
    "MLP, trained": lambda: trained(mlp(4), 1e-3, 100),
    "batch norm and dropout": lambda: nn.Sequential(*[nn.Sequential(lin(), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3)) for _ in range(6)], lin()),
    "layer norm": lambda: nn.Sequential(*[nn.Sequential(lin(), nn.LayerNorm(WIDTH), nn.SiLU()) for _ in range(6)], lin()),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(lin()), nn.ReLU(), lin()),
    "critic, spectral norm": lambda: nn.Sequential(*[nn.Sequential(nn.utils.parametrizations.spectral_norm(lin()), nn.LeakyReLU(0.2)) for _ in range(4)], lin(WIDTH, 1)),
    "generator": lambda: nn.Sequential(
        lin(WIDTH, 16 * 16), nn.Unflatten(1, (16, 4, 4)),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
    ),
    "discriminator": lambda: classifier(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.2)),
    "VGG": lambda: classifier(conv(3, 8), conv(8, 8), nn.MaxPool2d(2), conv(8, 16), conv(16, 16)),
    "ResNet": lambda: classifier(conv(3, 16), *[residual(conv(16, 16), conv(16, 16)) for _ in range(6)]),
    "pre-activation ResNet": lambda: classifier(
        nn.Conv2d(3, 16, 3, padding=1),
        *[residual(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)) for _ in range(6)],
    ),
    "DenseNet": lambda: classifier(conv(3, 8), dense(8, 8), dense(16, 8), dense(24, 8), width=32),
    "depthwise, ReLU6": lambda: classifier(conv(3, 16), *[nn.Sequential(conv(16, 16, groups=16), nn.Conv2d(16, 16, 1), nn.ReLU6()) for _ in range(3)]),
    "ConvNeXt": lambda: classifier(
        nn.Conv2d(3, 16, 2, 2),
        *[residual(nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.GroupNorm(1, 16), nn.Conv2d(16, 64, 1), nn.GELU(), nn.Conv2d(64, 16, 1)) for _ in range(3)],
    ),
    "squeeze and excite": lambda: classifier(
        conv(3, 16),
        Net(lambda m, x: x * m.f(x.mean((2, 3)))[..., None, None], f=nn.Sequential(lin(16, 4), nn.ReLU(), lin(4, 16), nn.Sigmoid())),
    ),
    "U-Net": lambda: unet(),
    "convolutions in one dimension": lambda: (
        nn.Sequential(nn.Conv1d(3, 16, 5), nn.ReLU(), nn.Conv1d(16, 16, 5), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)),
        torch.randn(8, 3, 32),
    ),
    "HamiltonianUnit": lambda: classifier(nn.Conv2d(3, 16, 1), hdnn.HamiltonianUnit(16, 4)),
    "H2": lambda: nn.Sequential(lin(), hdnn.H2(WIDTH, 64), lin()),
    "encoder, post-norm": lambda: (encoder(), tokens()),
    "encoder, pre-norm": lambda: (encoder(6, norm_first=True), tokens()),
    "BERT": lambda: language(encoder(activation="gelu")),
    "GPT": lambda: language(encoder(norm_first=True), causal=True),
    "GPT, tied embeddings": lambda: language(encoder(norm_first=True), True, True),
    "ViT": lambda: Net(
        lambda m, x: m.head(m.body(m.patch(x).flatten(2).mT).mean(1)),
        patch=nn.Conv2d(3, WIDTH, 4, 4), body=encoder(norm_first=True), head=lin(WIDTH, 5),
    ),
    "MLP-mixer": lambda: (mixer(), tokens()),
    "RNN": lambda: recurrent(nn.RNN),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "autoencoder": lambda: nn.Sequential(lin(), nn.ReLU(), lin(WIDTH, 4), lin(4), nn.ReLU(), lin()),
    "normalising flow": lambda: flow(),
    "mixture of experts": lambda: experts(False),
    "several heads": lambda: Net(lambda m, x: {"a": m.a(m.body(x)), "b": m.b(m.body(x))}, body=mlp(3, out=WIDTH), a=lin(), b=lin(WIDTH, 1)),
    "siamese": lambda: (Net(lambda m, a, b: m.f(a) - m.f(b), f=mlp(3)), (rows(), rows())),
    "GCN": lambda: graph("GCNConv"),
    "GAT": lambda: graph("GATConv"),
    "GIN": lambda: graph("GINConv"),
}
# fmt: on


def examined(make: Maker, seed: int) -> list[str]:
    """The kinds of faults that a diagnosis names; none if the model is healthy."""
    torch.manual_seed(seed)
    made = make()
    model, x = made if isinstance(made, tuple) else (made, usual_inputs(made))
    try:
        diagnosis = hdnn.diagnose(model, x)
    except HDNNError:
        return ["refused"]
    kinds = [fault.kind for fault in diagnosis.faults]
    return kinds + ["unknown"] * bool(diagnosis.unknown)


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    seed = sizes["seed"]
    faults = {name: examined(make, seed) for name, make in FAULTS.items()}
    healthy = {name: examined(make, seed) for name, make in HEALTHY.items()}
    missed = [name for name, kinds in faults.items() if not kinds]
    alarms = [name for name, kinds in healthy.items() if kinds]
    ok = len(missed) <= 0.05 * len(faults) and not alarms
    result = {"faults": faults, "healthy": healthy, "missed": missed}
    return {**result, "alarms": alarms, "ok": ok}


def found(result: dict[str, Any]) -> str:
    count = len(result["faults"])
    return (
        f"{count - len(result['missed'])} of {count} faults found, {len(result['alarms'])} false "
        f"alarms in {len(result['healthy'])} healthy models"
    )


def page(result: dict[str, Any]) -> str:
    missed = ", ".join(result["missed"]) or "none"
    alarms = ", ".join(result["alarms"]) or "none"
    lines = head("The doctor: faults found and false alarms", result)
    lines += [
        "",
        f"{found(result)} (targets: 95% and 0). Weights are random, one seed each.",
        "",
        f"Missed: {missed}. False alarms: {alarms}.",
    ]
    rows = [
        [name, ", ".join(kinds) or "missed"]
        for name, kinds in result["faults"].items()
    ]
    lines += table("planted fault | what the doctor says", rows)
    lines += ["", f"Healthy models: {'; '.join(result['healthy'])}."]
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command(
            "doctor", __doc__, SIZES, run, page, devices=("cpu",), found=found
        )
    )
