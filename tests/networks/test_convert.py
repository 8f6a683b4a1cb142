"""Residual models as leapfrog networks."""

import copy

import pytest
import torch
from torch import nn

import hdnn
from hdnn.errors import CheckpointError, OptionError, TrainingError
from hdnn.networks import LeapfrogStack

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


def stack_of(model):
    (stack,) = (one for one in model.modules() if isinstance(one, LeapfrogStack))
    return stack


@pytest.mark.parametrize("kind", MODELS)
def test_one_block_computes_what_it_did_before(kind):
    model = made(kind, 1).double().eval()
    torch.testing.assert_close(called(hdnn.to_reversible(model)), called(model))


@pytest.mark.parametrize("kind", MODELS)
def test_the_field_is_what_a_block_adds_to_its_input(kind):
    model = made(kind, 2).double().eval()
    stack, x = stack_of(hdnn.to_reversible(model)), torch.randn(2, TOKENS, 8, dtype=torch.float64)
    blocks = {"encoder": "layers", "vision": "blocks", "gpt2": "transformer.h"}[kind]
    for layer, block in zip(stack.net, model.get_submodule(blocks), strict=True):
        torch.testing.assert_close(layer.F(x), block(x) - x)


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
    assert "another function" in repr(new)
    assert stack_of(new).guarantee().holds
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
def test_a_model_is_converted_once_and_copied_with_its_shared_weights(kind):
    new = hdnn.to_reversible(made(kind)).eval()
    with pytest.raises(OptionError, match=f"this {type(new).__name__} is a leapfrog network alr"):
        hdnn.to_reversible(new)
    assert torch.equal(called(copy.deepcopy(new)), called(new))
    if kind == "gpt2":
        assert new.lm_head.weight is new.transformer.wte.weight
    with pytest.raises(CheckpointError, match=r"save their state_dict\(\)"):
        hdnn.save(new, "never-written.safetensors")


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


def test_an_encoder_inside_of_a_model_is_found():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.encoder = nn.Embedding(7, 8), encoder(batch_first=False)

        def forward(self, x):
            return self.encoder(self.embed(x)).mean(0)

    new = hdnn.to_reversible(Own(), backprop="reversible")
    new(torch.randint(0, 7, (TOKENS, 2))).sum().backward()
    assert new.embed.weight.grad is not None


def test_masks_and_positions_of_gpt2_do_what_they_did():
    new = hdnn.to_reversible(made("gpt2"), backprop="reversible").eval()
    words = torch.randint(1, 11, (2, TOKENS))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "position_ids": mask.cumsum(-1).sub(1).clamp(min=0)}
    padded = new(words, **options)
    torch.testing.assert_close(padded.logits[:1, 2:], new(words[:1, 2:]).logits)
    out = new(words, labels=words)
    out.loss.backward()
    assert out.loss.isfinite()
    assert new(words, inputs_embeds=None, token_type_ids=words).logits.shape == (2, TOKENS, 11)


def test_gpt2_generates_with_its_cache():
    new = hdnn.to_reversible(made("gpt2"), backprop="reversible").eval()
    words = torch.randint(1, 11, (2, 3))
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    how["attention_mask"] = torch.ones_like(words)
    found = [new.generate(words, use_cache=cached, **how) for cached in (True, False)]
    assert torch.equal(*found)
    with torch.no_grad():
        past = new(words, use_cache=True).past_key_values
    with pytest.raises(TrainingError, match="cache of keys and values"):
        new(words[:, -1:], past_key_values=past)


def test_gpt2_with_cross_attention_has_gradients_for_what_it_looks_at():
    model = made("gpt2", add_cross_attention=True).double().eval()
    found = []
    for backprop in ("stored", "reversible"):
        new = hdnn.to_reversible(model, backprop=backprop)
        seen = torch.ones(2, 3, 8, dtype=torch.float64).cumsum(1).requires_grad_()
        called(new, encoder_hidden_states=seen).square().sum().backward()
        found.append(seen.grad)
    torch.testing.assert_close(*found)


def test_masks_of_a_vision_transformer_do_what_they_did():
    new = hdnn.to_reversible(made("vision"), backprop="reversible").eval()
    mask = torch.ones(TOKENS, TOKENS).tril().bool()
    assert not torch.allclose(called(new), called(new, attn_mask=mask))
    assert called(new, attn_mask=mask).requires_grad


# Bad input


def test_models_that_cannot_be_converted_get_one_sentence():
    class Odd(nn.TransformerEncoderLayer):
        def forward(self, src, **options):
            return src

    odd = nn.TransformerEncoder(Odd(8, 2, norm_first=True), 2, enable_nested_tensor=False)
    for model, said in (
        (encoder(norm_first=False), "normalises after each sum .norm_first=False."),
        (odd, "of the class Odd, whose own forward is not known"),
        (nn.Linear(2, 2), "Linear has no stack of blocks that is known"),
        (encoder(0), "TransformerEncoder has no blocks"),
        ([1], "only an nn.Module can be converted, but got a list"),
    ):
        with pytest.raises(OptionError, match=said) as raised:
            hdnn.to_reversible(model)
        assert "\n" not in str(raised.value)


def test_vision_transformers_of_other_blocks_get_one_sentence():
    blocks = pytest.importorskip("timm.models.vision_transformer")
    for block in (blocks.ResPostBlock, blocks.ParallelThingsBlock):
        with pytest.raises(OptionError, match=f"of the class {block.__name__}, but only timm's"):
            hdnn.to_reversible(vision(block_fn=block, init_values=None))
