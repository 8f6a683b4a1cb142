"""Residual models as leapfrog networks: the same weights, gradients that do not vanish.

A pre-norm residual block computes `x + F(x)`. Its leapfrog layer is `p += h F(q)`, `q += h p` with
the same F, so it has the same weights. A stack of blocks becomes one module in the place of the
first block, and the model around it (embeddings, masks, head) stays as it is.
"""

from __future__ import annotations

import copy
import re
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hdnn.errors import OptionError, TrainingError
from hdnn.networks.blocks import Leapfrog, Reversible
from hdnn.networks.promise import Guarantee

Model = TypeVar("Model", bound=nn.Module)
KNOWN = (
    "nn.TransformerEncoder with norm_first=True, timm's vision transformers (vit_*), and GPT-2 of "
    "transformers"
)
NOT_KEPT = "another function than the residual stack: train it from scratch"


def to_reversible(
    model: Model, *, h: float = 1.0, backprop: str = "auto", state: str = "float"
) -> Model:
    """A copy of a pre-norm residual model whose blocks are layers of a leapfrog network.

    The blocks `x + F(x)` become `p += h F(q)`, `q += h p`, from p = 0 and q = x; what follows them
    gets the last q. F is the same, and so are all weights and their number, embeddings, head, masks
    and what else the model takes.

    What is not kept: the function (from the second block on, outputs differ from those of the given
    model, so pretrained weights are no more than a start), the names of the blocks' weights
    (`load_state_dict` takes the old names too), and single blocks in loops of your own: a list of
    blocks now has one element, the whole stack. Hooks on a block, but not on its parts, are no
    longer called, and so GPT-2 returns no hidden states of single blocks. Where nothing is stored,
    it keeps no cache of keys and values in training. `from_pretrained` knows the original alone:
    convert it again, then `load_state_dict`. Other parts of the model stay as they are.

    Args:
        model: one of `nn.TransformerEncoder` with norm_first=True, timm's vision transformers
            (`vit_*`) and GPT-2 of transformers, or a model with such a part. It is not changed.
        h: the step size. With 1, one block computes what it did before.
        backprop: as in `hdnn.Reversible`; "reversible" keeps memory flat at any depth.
        state: as in `hdnn.Reversible`; with "fixed" undoing is exact to the last bit.

    Returns:
        A model of the same class. The new stacks are `hdnn.networks.LeapfrogStack`s, whose
        `guarantee()` says what is promised.

    Raises:
        OptionError: if the model has no stack that can be converted, is converted already, or an
            option is not known.
        StepError: if h is not finite and > 0.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> model = hdnn.to_reversible(encoder, backprop="reversible")
        >>> model(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
        >>> model.layers[0].guarantee().holds
        True
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"only an nn.Module can be converted, but got a {type(model).__name__}.")
    model = copy.deepcopy(model)
    if any(isinstance(one, LeapfrogStack) for one in model.modules()):
        raise OptionError(f"this {type(model).__name__} is a leapfrog network already.")
    found = [(owner, *where) for owner in model.modules() if (where := _blocks_of(owner))]
    if not found:
        raise OptionError(
            f"{type(model).__name__} has no stack of blocks that is known: {KNOWN} can be "
            "converted; for other blocks x + F(x) make hdnn.Reversible of hdnn.Leapfrog(F)."
        )
    for owner, name, branches in found:
        blocks = getattr(owner, name)
        if not len(blocks):
            raise OptionError(f"{type(owner).__name__} has no blocks to convert.")
        layers = [Leapfrog(branches(block), h=h) for block in blocks]
        stack = LeapfrogStack(Reversible(layers, backprop=backprop, state=state))
        if isinstance(owner, nn.TransformerEncoder):
            owner.use_nested_tensor = False  # which only stacks of PyTorch's own layers can take
        container = nn.Sequential(stack) if isinstance(blocks, nn.Sequential) else None
        container = nn.ModuleList([stack]) if container is None else container
        container.register_load_state_dict_pre_hook(_old_names)
        container.train(blocks.training)
        setattr(owner, name, container)
    return model


class LeapfrogStack(nn.Module):
    """A stack of residual blocks as a leapfrog network, from `x = q_0` (and `p_0 = 0`) to `q_N`.

    It is what `hdnn.to_reversible` puts in the place of the blocks.

    Args:
        net: the layers, on states (p, q) that are twice as wide as x.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> blocks = hdnn.Reversible([hdnn.Leapfrog(torch.nn.Linear(8, 8)) for _ in range(3)])
        >>> stack = hdnn.networks.LeapfrogStack(blocks)
        >>> stack(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, net: Reversible) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """The last q.

        Args:
            x: the first q.
            *args: go to all blocks: masks, positions and the like.
            **options: go to all blocks.
        """
        if self.net.backprop in ("reversible", "checkpoint") and torch.is_grad_enabled():
            args, options = tuple(map(_no_cache, args)), _no_caches(options)
        y = self.net(torch.cat([torch.zeros_like(x), x], -1), *args, **options)
        return y.chunk(2, -1)[1]

    @property
    def self_attn(self) -> nn.Module:
        """That of the first block, which `nn.TransformerEncoder` looks at."""
        return self.net[0].F.block.self_attn  # pyright: ignore

    def guarantee(self) -> Guarantee:
        """Whether `norm(dy_N/dy_j) >= 1` is a theorem for the states y = (p, q), and why."""
        return self.net.guarantee()

    def extra_repr(self) -> str:
        return f"p += F(q), q += p: {NOT_KEPT}"


class Branches(nn.Module):
    """What a residual block adds to its input: block(q) - q, without a difference."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block: Any = block


class EncoderBranches(Branches):
    """Of `nn.TransformerEncoderLayer`."""

    def forward(
        self,
        q: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        block = self.block
        a = block._sa_block(block.norm1(q), src_mask, src_key_padding_mask, is_causal=is_causal)
        return a + block._ff_block(block.norm2(q + a))


class VisionBranches(Branches):
    """Of `timm.models.vision_transformer.Block`."""

    def forward(self, q: Tensor, **options: Any) -> Tensor:
        block = self.block
        a = block.drop_path1(block.ls1(block.attn(block.norm1(q), **options)))
        return a + block.drop_path2(block.ls2(block.mlp(block.norm2(q + a))))


class GPT2Branches(Branches):
    """Of `transformers.models.gpt2.modeling_gpt2.GPT2Block`."""

    def forward(
        self,
        q: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        block, both = self.block, {"past_key_values": past_key_values}
        both |= {"attention_mask": attention_mask}
        a = block.attn(block.ln_1(q), **both, **options)[0]
        if encoder_hidden_states is not None:
            a = (
                a
                + block.crossattention(
                    block.ln_cross_attn(q + a),
                    **both,
                    encoder_hidden_states=encoder_hidden_states,
                    encoder_attention_mask=encoder_attention_mask,
                )[0]
            )
        return a + block.mlp(block.ln_2(q + a))


def _blocks_of(owner: nn.Module) -> tuple[str, type[Branches]] | None:
    """Under which name a module holds a stack of residual blocks, and what they add."""
    line = {f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in type(owner).__mro__}
    if isinstance(owner, nn.TransformerEncoder):
        for layer in owner.layers:
            _check_class(owner, layer, nn.TransformerEncoderLayer.forward)
            if not layer.norm_first:
                raise OptionError(
                    "this nn.TransformerEncoder normalises after each sum (norm_first=False), so "
                    "its layers are not x + F(x) and have no leapfrog form; make it with "
                    "norm_first=True."
                )
        return "layers", EncoderBranches
    if "timm.VisionTransformer" in line:
        for block in owner.blocks:  # pyright: ignore
            if type(block).__name__ != "Block" or not hasattr(block, "ls1"):
                raise OptionError(
                    f"the blocks of this {type(owner).__name__} are of the class "
                    f"{type(block).__name__}, but only timm's Block, x + attn(norm(x)), then "
                    "x + mlp(norm(x)), can be converted."
                )
        return "blocks", VisionBranches
    if "transformers.GPT2Model" in line:
        for block in owner.h:  # pyright: ignore
            if "uple" in str(block.forward.__annotations__.get("return")):
                raise OptionError(
                    "the blocks of this GPT2Model are those of an older transformers, which return "
                    "tuples; take transformers 5 or newer."
                )
        return "h", GPT2Branches
    return None


def _check_class(owner: nn.Module, layer: Any, forward: Any) -> None:
    if getattr(type(layer), "forward", None) is not forward:
        raise OptionError(
            f"the layers of this {type(owner).__name__} are of the class {type(layer).__name__}, "
            "whose own forward is not known; make hdnn.Reversible of hdnn.Leapfrog(F), where F is "
            "what a layer adds to its input."
        )


def _no_cache(given: Any) -> Any:
    """None for a cache of keys and values: blocks that run twice would fill it twice."""
    if not hasattr(given, "get_seq_length"):
        return given
    if given.get_seq_length():
        raise TrainingError(
            'gradients through a cache of keys and values need backprop="stored", because other '
            "ways run the blocks twice; call the model under torch.no_grad(), or without "
            "past_key_values."
        )
    return None


def _no_caches(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _no_cache(value) for name, value in options.items()}


def _old_names(blocks: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a list of blocks take the weights of the model that was converted."""
    for name in list(state):
        found = re.fullmatch(re.escape(prefix) + r"(\d+)\.(?!net\.)(.*)", name)
        if found:
            state[f"{prefix}0.net.blocks.{found[1]}.F.block.{found[2]}"] = state.pop(name)
