"""Does the doctor find faults, and is it silent about healthy models?

    python benchmarks/doctor.py --out docs/results

Each tool examines 40 models with a planted fault, and 40 healthy models with random weights as in
practice, all at one seed. hdnn reports a fault if the diagnosis is not healthy, or if `diagnose`
refuses the model with a message. Anything that a tool reports about a healthy model is a false
alarm. The developers of hdnn chose the models; hdnn was not changed after models of libraries were
added.

The other tools need a loss (here the mean squared distance to random targets) and training steps
(here SGD at rate 0.01). torchdiag reports a fault if `summary`, `check_dead_neurons`, `verify_step`
or `check_gradients` prints an issue. torchmortem watches 20 steps, and reports a fault if it warns
about the flow of gradients, dead units, saturation or the loss. Its warnings about the sizes of
updates and weights, noise and ranks depend on the rate and are not counted. A tool that stops with
an error has reported nothing. torchinstruments is left out: it records statistics, with "no scores
or diagnoses".

The program needs timm, torch_geometric and transformers; it runs torchdiag and torchmortem if they
are installed.
"""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from importlib import metadata, util
from typing import Any

import torch
import torch.nn.functional as F
from report import command, head, on_one_line, table, text_of
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


def rows() -> Tensor:
    return torch.randn(64, WIDTH)


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


def conv(a: int, b: int) -> nn.Sequential:
    first = nn.Conv2d(a, b, 3, padding=1, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(b), nn.ReLU(inplace=True))


def classifier(*layers: nn.Module) -> nn.Sequential:
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(16, 5))


def residual(*layers: nn.Module) -> nn.Module:
    return Net(lambda m, x: x + m.f(x), f=nn.Sequential(*layers))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def recurrent(kind: Any) -> nn.Module:
    parts = {"embed": nn.Embedding(50, WIDTH), "head": lin(WIDTH, 5)}
    body = kind(WIDTH, WIDTH, 2, batch_first=True)
    return Net(
        lambda m, x: m.head(m.body(m.embed(x))[0][:, -1]), **parts, body=body
    )


def unet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        a = m.down(x)
        b = m.middle(F.max_pool2d(a, 2))
        return m.head(m.join(torch.cat([m.up(b), a], 1)))

    parts = {"down": conv(3, 8), "middle": conv(8, 16), "join": conv(16, 8)}
    up = nn.ConvTranspose2d(16, 8, 2, 2)
    return Net(run, **parts, up=up, head=nn.Conv2d(8, 2, 1))


def vision(name: str) -> tuple[nn.Module, Tensor]:
    import timm

    options = {"img_size": 64} if name.startswith("mixer") else {}
    model = timm.create_model(name, num_classes=5, **options)
    return model, torch.randn(8, 3, 64, 64)


def transformer(name: str) -> tuple[nn.Module, Any]:
    import transformers

    kind: Any = getattr(transformers, name)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "vocab_size": 50}
    sizes |= {"num_hidden_layers": 3, "image_size": 16, "patch_size": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = kind(kind.config_class(**sizes, bos_token_id=1, eos_token_id=1))
    if name.startswith("ViT"):
        return model, torch.randn(8, 3, 16, 16)
    words = torch.randint(0, 50, (8, 12))
    encoded = (words, torch.ones_like(words), words)
    return model, encoded if name.startswith("T5") else words


def graph(name: str) -> tuple[nn.Module, Any]:
    import torch_geometric.nn

    model = getattr(torch_geometric.nn, name)(WIDTH, WIDTH, 3, 4)
    return model, (rows(), torch.randint(0, 64, (2, 256)))


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
Inputs = tuple[Any, ...]

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
    "certain attention": lambda: (changed(encoder(), "layers.1.self_attn.in", lambda w: w.mul_(100.0)), torch.randn(8, 12, WIDTH)),
    "detach": lambda: between(Tensor.detach),
    "no_grad": lambda: between(torch.no_grad()(torch.relu)),
    "data": lambda: between(lambda x: x.data.relu()),
    "numpy": lambda: between(lambda x: torch.from_numpy(x.detach().numpy().clip(0))),
    "rounding": lambda: between(torch.round),
    "sign": lambda: between(torch.sign),
    "threshold": lambda: between(lambda x: (x > 0).float()),
    "new tensor": lambda: between(lambda x: torch.tensor(x.tolist())),
    "argmax into an embedding": lambda: Net(lambda m, x: m.head(m.embed(m.score(x).argmax(-1))), score=lin(), embed=nn.Embedding(WIDTH, 4), head=lin(4)),
    "no straight-through": lambda: Net(lambda m, x: m.decoder(m.codes(torch.cdist(m.encoder(x), m.codes.weight).argmin(-1))), encoder=mlp(1, out=4), codes=nn.Embedding(16, 4), decoder=lin(4)),
    "hard router": lambda: Net(lambda m, x: m.head((F.one_hot(m.router(x).argmax(-1), 2)[:, None] * torch.stack([m.a(x), m.b(x)], -1)).sum(-1)), router=lin(WIDTH, 2), a=lin(), b=lin(), head=lin(WIDTH, 2)),
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
    "discriminator": lambda: classifier(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.2)),
    "VGG": lambda: classifier(conv(3, 8), conv(8, 8), nn.MaxPool2d(2), conv(8, 16), conv(16, 16)),
    "U-Net": lambda: unet(),
    "HamiltonianUnit": lambda: classifier(nn.Conv2d(3, 16, 1), hdnn.HamiltonianUnit(16, 4)),
    "H2": lambda: nn.Sequential(lin(), hdnn.H2(WIDTH, 64), lin()),
    "encoder, post-norm": lambda: (encoder(), torch.randn(8, 12, WIDTH)),
    "RNN": lambda: recurrent(nn.RNN),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "autoencoder": lambda: nn.Sequential(lin(), nn.ReLU(), lin(WIDTH, 4), lin(4), nn.ReLU(), lin()),
    "several heads": lambda: Net(lambda m, x: {"a": m.a(m.body(x)), "b": m.b(m.body(x))}, body=mlp(3, out=WIDTH), a=lin(), b=lin(WIDTH, 1)),
    "siamese": lambda: (Net(lambda m, a, b: m.f(a) - m.f(b), f=mlp(3)), (rows(), rows())),
}
VISION = "resnet18 resnetv2_50 densenet121 regnetx_002 mobilenetv3_small_050 efficientnet_b0 convnext_atto mixer_s32_224"
LANGUAGE = "BertForMaskedLM GPT2LMHeadModel LlamaForCausalLM MixtralForCausalLM MambaForCausalLM T5ForConditionalGeneration ViTForImageClassification"
HEALTHY |= {f"timm {name}": partial(vision, name) for name in VISION.split()}
HEALTHY |= {f"transformers {name}": partial(transformer, name) for name in LANGUAGE.split()}
HEALTHY |= {f"PyG {name}": partial(graph, name) for name in ("GCN", "GAT", "GIN", "GraphSAGE")}
# fmt: on


def hdnn_reports(model: nn.Module, x: Inputs) -> list[str]:
    try:
        diagnosis = hdnn.diagnose(model, x)
    except HDNNError:
        return ["refused"]
    kinds = [fault.kind for fault in diagnosis.faults]
    return kinds + ["unknown"] * bool(diagnosis.unknown)


class Task:
    """A model as a function of one tensor to one vector, with random targets and SGD."""

    def __init__(self, model: nn.Module, x: Inputs) -> None:
        def run(m: Any, _: Tensor) -> Tensor:
            y = m.model(*x)
            if isinstance(y, dict):
                y = tuple(y.values())
            y = y if isinstance(y, tuple) else (y,)
            return torch.cat([v.flatten() for v in y if torch.is_tensor(v)])

        self.model = Net(run, model=model)
        self.x = torch.zeros(1)
        with torch.no_grad():
            self.target = torch.randn_like(self.model(self.x))
        self.sgd = torch.optim.SGD(model.parameters(), 0.01)


def torchdiag_reports(model: nn.Module, x: Inputs) -> list[str]:
    import torchdiag as tool  # pyright: ignore

    task = Task(model, x)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        tool.summary(task.model)
        tool.check_dead_neurons(task.model, task.x)
        batch = (task.x, task.target)
        tool.verify_step(task.model, task.sgd, F.mse_loss, *batch)
        tool.check_gradients(task.model)
    issues = text.getvalue().count("\u2022")
    return [f"issues: {issues}"] * bool(issues)


def torchmortem_reports(model: nn.Module, x: Inputs) -> list[str]:
    import torchmortem as tool  # pyright: ignore

    task = Task(model, x)
    with tool.Autopsy(task.model, optimizer=task.sgd) as autopsy:
        for _ in range(20):
            task.sgd.zero_grad()
            loss = F.mse_loss(task.model(task.x), task.target)
            loss.backward()
            task.sgd.step()
            autopsy.step(loss=loss.item())
    findings: list[Any] = autopsy.get_report().findings  # pyright: ignore
    kinds = ("gradient_flow", "dead_units", "saturation", "loss_dynamics")
    severe = {f.category for f in findings if f.severity.name != "INFO"}
    return [kind for kind in kinds if kind in severe]


TOOLS: dict[str, Any] = {"hdnn": hdnn_reports}
TOOLS |= {"torchmortem": torchmortem_reports, "torchdiag": torchdiag_reports}


def examined(tool: str, seed: int) -> dict[str, Any]:
    """The reports of a tool on all models; empty if it is silent or stops with an error."""
    reports: dict[str, list[str]] = {}
    errors: dict[str, str] = {}
    for name, make in (FAULTS | HEALTHY).items():
        torch.manual_seed(seed)
        made = make()
        model, x = made if type(made) is tuple else (made, usual_inputs(made))
        try:
            reports[name] = TOOLS[tool](model, x if type(x) is tuple else (x,))
        except Exception as error:
            reports[name] = []
            errors[name] = str(error)
    missed = [name for name in FAULTS if not reports[name]]
    alarms = [name for name in HEALTHY if reports[name]]
    result = {"missed": missed, "alarms": alarms, "errors": errors}
    return {**result, "reports": reports}


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    installed = [tool for tool in TOOLS if util.find_spec(tool)]
    tools = {tool: examined(tool, sizes["seed"]) for tool in installed}
    names = ["timm", "torch_geometric", "transformers", *installed[1:]]
    packages = {name: metadata.version(name) for name in names}
    ours = tools["hdnn"]
    ok = len(ours["missed"]) <= 2 and not ours["alarms"] and not ours["errors"]
    return {"tools": tools, "packages": packages, "ok": ok}


def found(result: dict[str, Any]) -> str:
    parts = []
    for tool, of in result["tools"].items():
        hits = 40 - len(of["missed"])
        alarms = len(of["alarms"])
        finds = f" finds {hits} with {alarms} false alarms"
        parts += [tool + (f" {hits} with {alarms}" if parts else finds)]
    return f"of 40 planted faults and 40 healthy models: {', '.join(parts)}"


def page(result: dict[str, Any]) -> str:
    lines = head("The doctor: faults found and false alarms", result)
    lines[-1] += f"; with {on_one_line(result['packages'])}"
    lines += ["", f"{found(result)} (target of hdnn: 38 with 0).".capitalize()]
    lines += ["", (__doc__ or "").partition("results\n\n")[2].strip()]
    tools = result["tools"].values()

    def report(tool: dict[str, Any], name: str) -> str:
        words = "error" if name in tool["errors"] else "nothing"
        return ", ".join(tool["reports"][name]) or words

    for title, makers in ("planted fault", FAULTS), ("healthy model", HEALTHY):
        cells = [[name, *(report(t, name) for t in tools)] for name in makers]
        lines += table(" | ".join([title, *result["tools"]]), cells)
    return text_of(lines)


if __name__ == "__main__":
    status = command("doctor", __doc__, SIZES, run, page, ("cpu",), found)
    raise SystemExit(status)
