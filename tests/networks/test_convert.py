"""Models of other libraries as leapfrog networks; the rest is in tests/law/test_reversible.py."""

import pytest
import torch
from tests.law.test_reversible import TOKENS, called, encoder, made, vision
from torch import nn

import hdnn
from hdnn.errors import OptionError


def test_an_encoder_inside_of_a_model_is_converted():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.encoder = (
                nn.Embedding(7, 8),
                encoder(batch_first=False),
            )

        def forward(self, x):
            return self.encoder(self.embed(x)).mean(0)

    new = hdnn.to_reversible(Own(), backprop="reversible")
    new(torch.randint(0, 7, (TOKENS, 2))).sum().backward()
    assert new.embed.weight.grad is not None
    with pytest.raises(OptionError, match="already a leapfrog network"):
        hdnn.to_reversible(new)


def test_masks_and_positions_of_gpt2_do_what_they_did():
    new = hdnn.to_reversible(made("gpt2"), backprop="reversible").eval()
    words = torch.randint(1, 11, (2, TOKENS))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {
        "attention_mask": mask,
        "position_ids": mask.cumsum(-1).sub(1).clamp(min=0),
    }
    padded = new(words, **options)
    torch.testing.assert_close(padded.logits[:1, 2:], new(words[:1, 2:]).logits)
    out = new(words, labels=words)
    out.loss.backward()
    assert out.loss.isfinite()


def test_gpt2_generates_with_its_cache():
    new = hdnn.to_reversible(made("gpt2"), backprop="reversible").eval()
    words = torch.randint(1, 11, (2, 3))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(words)
    texts = [
        new.generate(words, use_cache=cached, **options)
        for cached in (True, False)
    ]
    assert torch.equal(*texts)
    with torch.no_grad():
        past = new(words, use_cache=True).past_key_values
    with pytest.raises(OptionError, match="cache of keys and values"):
        new(words[:, -1:], past_key_values=past)


def test_gpt2_with_cross_attention_has_gradients_for_what_it_looks_at():
    model = made("gpt2", add_cross_attention=True).double().eval()
    gradients = []
    for backprop in ("stored", "reversible"):
        new = hdnn.to_reversible(model, backprop=backprop)
        seen = (
            torch.ones(2, 3, 8, dtype=torch.float64).cumsum(1).requires_grad_()
        )
        called(new, encoder_hidden_states=seen).square().sum().backward()
        gradients.append(seen.grad)
    torch.testing.assert_close(*gradients)


def test_models_that_cannot_be_converted_get_one_sentence():
    class Odd(nn.TransformerEncoderLayer):
        def forward(self, src, **options):
            return src

    odd = nn.TransformerEncoder(
        Odd(8, 2, norm_first=True), 2, enable_nested_tensor=False
    )
    for model, text in (
        (
            encoder(norm_first=False),
            "normalise after each sum .norm_first=False.",
        ),
        (odd, "Odd has a forward of its own"),
        (nn.Linear(2, 2), "Linear has no stack of blocks that hdnn knows"),
        (encoder(0), "there are none"),
    ):
        with pytest.raises(OptionError, match=text) as raised:
            hdnn.to_reversible(model)
        assert "\n" not in str(raised.value)


def test_vision_transformers_of_other_blocks_get_one_sentence():
    blocks = pytest.importorskip("timm.models.vision_transformer")
    for block in (blocks.ResPostBlock, blocks.ParallelThingsBlock):
        with pytest.raises(
            OptionError, match=f"{block.__name__} is not timm's Block"
        ):
            hdnn.to_reversible(vision(block_fn=block, init_values=None))
