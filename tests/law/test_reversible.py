"""Layers of any modules: gradients of undone states, determinants, the paper's networks."""

import copy

import pytest
import torch
from torch import nn

import hdnn
from hdnn import Coupling, GradientField, Leapfrog, Reversible, activations

D = 4


class Energy(nn.Module):
    """The sum of the integral of sigma over K x + b; its gradient is K^T sigma(K x + b)."""

    def __init__(self, K, b, activation="tanh"):
        super().__init__()
        self.K, self.b, self.sigma = (
            nn.Parameter(K.detach().clone()),
            nn.Parameter(b.detach().clone()),
            activation,
        )

    def forward(self, x):
        return activations.get(self.sigma).integral(x @ self.K.mT + self.b).sum(-1)


class Perceptron(nn.Module):
    """c sigma(K x + b)."""

    def __init__(self, K, b, c):
        super().__init__()
        self.K, self.b, self.c = K, b, c

    def forward(self, x):
        return self.c * torch.tanh(x @ self.K.mT + self.b)


def mixer(d=D, drop=0.0):
    return nn.Sequential(
        nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.GELU(), nn.Dropout(drop), nn.Linear(3 * d, d)
    )


BLOCKS = {
    "leapfrog": lambda: Leapfrog(mixer(drop=0.2)),
    "coupling": lambda: Coupling(mixer(drop=0.2), mixer()),
    "energies": lambda: Leapfrog(
        GradientField(Energy(torch.randn(7, D), torch.randn(7)), scale=-1.0), h=0.3
    ),
    "one half": lambda: Coupling(mixer()),
    "batch norm": lambda: Coupling(
        None,
        nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * D, 3 * D),
            nn.BatchNorm1d(3 * D),
            nn.Tanh(),
            nn.Unflatten(1, (3, D)),
        ),
    ),
}


def stack(name, N=5, **options):
    torch.manual_seed(1)
    return Reversible([BLOCKS[name]() for _ in range(N)], **options)


def state(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def gradients(net, y, **options):
    """y_N, and all gradients and statistics."""
    y = y.clone().requires_grad_()
    torch.manual_seed(3)
    out = net(y, **options)
    out.float().square().sum().backward()
    grads = [p.grad for p in net.parameters()]
    assert all(g is not None for g in grads)
    return [out.detach(), y.grad, *grads, *net.buffers()]


@pytest.mark.parametrize("backprop", ["checkpoint", "reversible"])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_on_the_grid_are_those_of_stored_states_to_the_last_bit(name, backprop):
    net, y = stack(name, state="fixed"), state(6, 3, 2 * D)
    other = copy.deepcopy(net)
    other.backprop = backprop
    with torch.autocast("cpu", torch.bfloat16):
        for one, two in zip(gradients(net, y), gradients(other, y), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_of_undone_states_are_those_of_stored_ones_within_rounding(name):
    net, y = stack(name).double(), state(6, 3, 2 * D).double()
    other = copy.deepcopy(net)
    other.backprop = "reversible"
    for one, two in zip(gradients(net, y), gradients(other, y), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BLOCKS)
def test_layers_can_be_undone_and_have_determinant_1(name):
    net, y = stack(name).double().eval(), state(2, 3, 2 * D).double()
    torch.testing.assert_close(net.inverse(net(y)), y)
    assert net.trajectory(y).shape == (6, *y.shape)
    torch.testing.assert_close(net.trajectory(y)[-1], net(y))
    J = torch.func.jacrev(lambda v: net(v.view_as(y)).flatten())(y.flatten())
    torch.testing.assert_close(
        torch.linalg.slogdet(J).logabsdet, torch.zeros((), dtype=torch.float64), atol=1e-9, rtol=0
    )
    assert torch.linalg.matrix_norm(J, 2) >= 1
    assert net.guarantee().holds
    assert ("symplectic" in net.guarantee().theorem) == (name == "energies")
    if name == "energies":  # J^T Omega J = Omega, in halves of all tokens
        parts = torch.arange(y.numel()).view_as(y).chunk(2, -1)
        order = torch.cat([part.flatten() for part in parts])
        J, m = J[order][:, order], y.numel() // 2
        omega = torch.zeros(2 * m, 2 * m, dtype=J.dtype)
        omega[:m, m:], omega[m:, :m] = -torch.eye(m), torch.eye(m)
        torch.testing.assert_close(J.mT @ omega @ J, omega)


@pytest.mark.parametrize("state", ["float", "fixed"])
def test_gradients_of_gradients_are_right(state):
    net = stack("leapfrog", 3, backprop="reversible", state=state).double().eval()
    y = torch.randn(1, 2, 2 * D, dtype=torch.float64, requires_grad=True)
    if state == "float":
        assert torch.autograd.gradcheck(net, y)
        assert torch.autograd.gradgradcheck(net, y)
    (g,) = torch.autograd.grad(net(y).square().sum(), y, create_graph=True)
    wanted = torch.autograd.grad(g.square().sum(), [y, *net.parameters()])
    net.backprop = "stored"
    (g,) = torch.autograd.grad(net(y).square().sum(), y, create_graph=True)
    for one, two in zip(
        wanted, torch.autograd.grad(g.square().sum(), [y, *net.parameters()]), strict=True
    ):
        torch.testing.assert_close(one, two)


# The paper's networks


def h2_blocks(net):
    w, h = net.weights(), net.steps()
    for j in range(net.layers):
        F = GradientField(Energy(w["K_q"][j], w["b_q"][j]), scale=-float(h[j]))
        yield Coupling(F, GradientField(Energy(w["K_p"][j], w["b_p"][j]), scale=float(h[j])))


def test_h2_is_a_stack_of_gradient_fields():
    net = hdnn.H2(6, 4, T=0.8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    blocks = Reversible(h2_blocks(net), backprop="reversible")
    y = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(blocks(y), net(y))
    wanted = torch.autograd.grad(net(y).sin().sum(), [y, *net.parameters()])
    found = torch.autograd.grad(blocks(y).sin().sum(), [y, *blocks.parameters()])
    torch.testing.assert_close(found[0], wanted[0])
    by_name = dict(zip([n for n, _ in net.named_parameters()], wanted[1:], strict=True))
    mine = dict(zip([n for n, _ in blocks.named_parameters()], found[1:], strict=True))
    for half, field in (("q", "F"), ("p", "G")):
        for what in ("K", "b"):
            for j in range(4):
                one = mine[f"blocks.{j}.{field}.energy.{what}"]
                torch.testing.assert_close(one, by_name[f"{what}_{half}"][j])
    assert "symplectic" in blocks.guarantee().theorem


def test_verlet_is_a_stack_of_gradient_fields():
    net = hdnn.HamiltonianNet(6, 3, "verlet", T=0.6, dtype=torch.float64)
    w, h, blocks = net.weights(), net.steps(), []
    for j in range(3):
        kick = GradientField(Energy(w["K_q"][j], w["b_q"][j]), scale=-float(h[j]) / 2)
        drift = GradientField(Energy(w["K_p"][j], w["b_p"][j]), scale=float(h[j]))
        blocks += [Coupling(kick, drift), Coupling(kick)]  # weights that two blocks share
    y = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    found = Reversible(blocks, backprop="reversible")(y)
    torch.testing.assert_close(found, net(y))
    (one,) = torch.autograd.grad(found.sin().sum(), blocks[0].F.energy.K)
    two = torch.autograd.grad(net(y).sin().sum(), net.K_q)[0][0]
    torch.testing.assert_close(one, two)


def test_ms1_is_a_stack_of_perceptrons():
    net = hdnn.MS1(6, 3, T=0.6, dtype=torch.float64)
    w, h, blocks = net.weights(), net.steps(), []
    for j in range(3):
        G = Perceptron(w["K_0"][j].mT, w["b_1"][j], -float(h[j]))
        blocks += [Coupling(None, G), Coupling(Perceptron(w["K_0"][j], w["b_2"][j], float(h[j])))]
    y = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    found = Reversible(blocks, backprop="reversible")(y)
    torch.testing.assert_close(found, net(y))
    one = torch.autograd.grad(found.sin().sum(), [y, *net.parameters()])
    for a, b in zip(
        one, torch.autograd.grad(net(y).sin().sum(), [y, *net.parameters()]), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_ms3_is_a_stack_of_gradient_fields():
    net = hdnn.MS3(6, 3, T=0.6, dtype=torch.float64)
    w, h, blocks = net.weights(), net.steps(), []
    for j in range(3):
        F = GradientField(Energy(w["K_1"][j], w["b_1"][j]), scale=float(h[j]))
        blocks.append(
            Coupling(F, GradientField(Energy(w["K_2"][j], w["b_2"][j]), scale=-float(h[j])))
        )
    y = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    found = Reversible(blocks, backprop="reversible")(y)
    torch.testing.assert_close(found, net(y))
    (one,) = torch.autograd.grad(found.sin().sum(), blocks[1].G.energy.K)
    torch.testing.assert_close(one, torch.autograd.grad(net(y).sin().sum(), net.K_2)[0][1])


class Convolved(nn.Module):
    """The sum over an image of the integral of sigma over K x + b, K a convolution."""

    def __init__(self, K, b, activation):
        super().__init__()
        self.K, self.b, self.sigma = nn.Parameter(K.detach().clone()), b.detach(), activation

    def forward(self, x):
        a = nn.functional.conv2d(x, self.K, self.b, padding=self.K.shape[-1] // 2)
        return activations.get(self.sigma).integral(a).sum((1, 2, 3))


def test_the_h2_unit_is_a_stack_of_gradient_fields():
    unit = hdnn.HamiltonianUnit(6, 3, network="h2", step=0.2).double()
    blocks = []
    for j in range(3):
        F, G = (
            GradientField(Convolved(K[j], b[j], unit.activation), scale=scale)
            for K, b, scale in ((unit.K_q, unit.b_q, -0.2), (unit.K_p, unit.b_p, 0.2))
        )
        blocks.append(Coupling(F, G, dim=1))
    y = torch.randn(2, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    stack = Reversible(blocks, backprop="reversible")
    torch.testing.assert_close(stack(y), unit(y))
    found = torch.autograd.grad(stack(y).sin().sum(), [y, blocks[2].F.energy.K])
    wanted = torch.autograd.grad(unit(y).sin().sum(), [y, unit.K_q])
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1][2])
    assert "symplectic" in stack.guarantee().theorem


# Residual models as leapfrog networks

TOKENS = 5


def encoder(depth=3, **options):
    how = {"norm_first": True, "batch_first": True, "dropout": 0.1, **options}
    layer = nn.TransformerEncoderLayer(8, 2, 16, **how)
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(8), enable_nested_tensor=False)


def vision(depth=3, **options):
    timm = pytest.importorskip("timm")
    how = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "num_heads": 2, "num_classes": 3}
    how |= {"init_values": 0.1, "drop_path_rate": 0.1, "proj_drop_rate": 0.1, "depth": depth}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **how | options)


def gpt2(depth=3, **options):
    transformers = pytest.importorskip("transformers")
    how = {"n_layer": depth, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    config = transformers.GPT2Config(**how, bos_token_id=0, eos_token_id=0, **options)
    return transformers.GPT2LMHeadModel(config)


def called(model, **options):
    """Its output for fixed inputs, as one tensor."""
    torch.manual_seed(5)
    kind = type(model).__name__
    dtype = next(model.parameters()).dtype
    if kind == "VisionTransformer":
        return model(torch.randn(2, 3, 8, 8, dtype=dtype), **options)
    if kind.startswith("GPT2"):
        return model(torch.randint(0, 11, (2, TOKENS)), **options).logits
    return model(torch.randn(2, TOKENS, 8, dtype=dtype), **options)


MODELS = {"encoder": encoder, "vision": vision, "gpt2": gpt2}


def made(kind, *args, **options):
    torch.manual_seed(0)
    model = MODELS[kind](*args, **options)
    for one in model.parameters():  # away from zeros and ones, where mistakes hide
        one.data += 0.1 * torch.randn_like(one)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_one_block_computes_what_it_did_before(kind):
    model = made(kind, 1).double().eval()
    torch.testing.assert_close(called(hdnn.to_reversible(model)), called(model))


@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_their_number_are_kept_and_the_given_model_too(kind):
    model = made(kind).eval()
    before, out = copy.deepcopy(model.state_dict()), called(model)
    new = hdnn.to_reversible(model, backprop="reversible")
    assert type(new) is type(model)
    count = [sum(p.numel() for p in one.parameters()) for one in (model, new)]
    assert count[0] == count[1]
    assert torch.equal(called(model), out)
    assert not torch.allclose(called(new), out)  # what is not kept, as the docstring says
    for one in new.parameters():
        one.data.zero_()
    new.load_state_dict(before)  # by the names of the given model
    torch.testing.assert_close(called(new), called(hdnn.to_reversible(model)))
    new.load_state_dict(new.state_dict())


@pytest.mark.parametrize("state", ["float", "fixed"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_undone_blocks_are_those_of_stored_ones(kind, state):
    model = made(kind).double().train()
    found = []
    for backprop in ("stored", "reversible", "checkpoint"):
        new = hdnn.to_reversible(model, backprop=backprop, state=state)
        called(new).square().sum().backward()
        found.append([p.grad for p in new.parameters()])
        assert all(g is not None for g in found[-1])
    for others in found[1:]:
        for one, two in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, two)
            assert state == "float" or torch.equal(one, two)


@pytest.mark.parametrize("kind", MODELS)
def test_converted_models_learn(kind):
    new = hdnn.to_reversible(made(kind), backprop="reversible", state="fixed").train()
    optimiser, losses = torch.optim.AdamW(new.parameters(), 1e-2), []
    for _ in range(10):
        loss = (called(new) - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kind", MODELS)
def test_converted_models_are_certified_at_what_reaches_the_stack(kind):
    new = hdnn.to_reversible(made(kind))
    torch.manual_seed(5)
    x = {
        "encoder": torch.randn(2, TOKENS, 8),
        "vision": torch.randn(2, 3, 8, 8),
        "gpt2": torch.randint(0, 11, (2, TOKENS)),
    }[kind]
    (found,) = hdnn.analysis.certify(new, x).parts.values()
    assert found.status == "holds"
    assert found.features == 2 * 8 * TOKENS  # p and q of all tokens of a sample


@pytest.mark.parametrize("backprop", ["stored", "reversible"])
def test_masks_of_an_encoder_do_what_they_did(backprop):
    new = hdnn.to_reversible(made("encoder"), backprop=backprop).eval()
    x = torch.randn(2, TOKENS, 8)
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    other = torch.cat([x[:, :3], torch.randn(2, 2, 8)], 1)
    for options in (
        {"mask": causal, "is_causal": True},
        {"mask": causal},
        {"src_key_padding_mask": torch.tensor([[False] * 3 + [True] * 2] * 2)},
    ):
        a, b = new(x, **options), new(other, **options)
        torch.testing.assert_close(a[:, :3], b[:, :3])
        assert not torch.allclose(new(x)[:, :3], new(other)[:, :3])
        with torch.no_grad():
            torch.testing.assert_close(new(x, **options), a)


def test_what_cannot_be_a_stack_or_be_converted_is_refused():
    for wrong in (
        lambda: Reversible([Coupling(None), nn.Linear(2, 2)]),
        lambda: Reversible([Coupling(nn.Linear(4, 5))])(torch.randn(2, 8)),
        lambda: Reversible([Coupling(nn.Linear(4, 4))])(torch.randn(2, 7)),
        lambda: hdnn.to_reversible(encoder(norm_first=False)),
        lambda: hdnn.to_reversible(nn.Linear(2, 2)),
        lambda: hdnn.to_reversible(hdnn.to_reversible(encoder())),
    ):
        with pytest.raises(hdnn.HDNNError):
            wrong()


def test_modules_that_are_not_deterministic_are_found_out():
    class Wild(nn.Module):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return x.sin() * self.calls

    for state in ("fixed", "float"):
        net = Reversible([Coupling(Wild(), Wild())], backprop="reversible", state=state)
        with pytest.raises(hdnn.HDNNError):
            net(torch.randn(3, 4, requires_grad=True)).sum().backward()


def test_hooks_and_arguments_of_the_modules_are_heard():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x, scale=None):
            return self.linear(x) if scale is None else scale * self.linear(x)

    torch.manual_seed(0)
    net = Reversible([Coupling(Scaled(), Scaled()) for _ in range(3)]).double()
    y = state(2, 2 * D).double()
    found = []
    for backprop in ("stored", "reversible", "checkpoint"):
        net.backprop = backprop
        scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        heard = []
        handle = net.blocks[1].F.register_full_backward_hook(lambda *_, h=heard: h.append(1))
        leaf = y.clone().requires_grad_()
        net(leaf, scale=scale).square().sum().backward()
        handle.remove()
        assert heard
        found.append((leaf.grad, scale.grad))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
