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

from hdnn.errors import OptionError
from hdnn.networks.blocks import Leapfrog, Reversible
from hdnn.networks.network import Guarantee

Model = TypeVar("Model", bound=nn.Module)
KNOWN = (
    "nn.TransformerEncoder with norm_first=True, timm's vision transformers (vit_*), and GPT-2 of "
    "transformers"
)


def to_reversible(
    model: Model,
    *,
    h: float = 1.0,
    backprop: str = "auto",
    state: str = "float",
) -> Model:
    """A copy of a pre-norm residual model whose blocks are layers of a leapfrog network.

    The blocks `x + F(x)` become `p += h F(q)`, `q += h p`, from p = 0 and q = x; the modules after
    the blocks get the last q. F, all weights, embeddings, head and masks stay the same.

    The copy computes a different function: from the second block on, its outputs differ from the
    original's, so pretrained weights are only a start. The blocks' weights have new names
    (`load_state_dict` takes the old names too), and a list of blocks has one element, the stack.
    Hooks on a block are no longer called, only those on its submodules, so GPT-2 returns no hidden
    states of single blocks. Unless states are stored, training keeps no cache of keys and values.
    `from_pretrained` only knows the original model: convert that model again, then call
    `load_state_dict`.

    Args:
        model: one of `nn.TransformerEncoder` with norm_first=True, timm's vision transformers
            (`vit_*`) and GPT-2 of transformers, or a model that contains one. It is not changed.
        h: the step size. With 1, a single block computes the same as before.
        backprop: as in `hdnn.Reversible`; "reversible" keeps memory flat at any depth.
        state: as in `hdnn.Reversible`; with "fixed" undoing is exact to the last bit.

    Returns:
        A model of the same class. The new stacks are `hdnn.networks.LeapfrogStack`s, whose
        `guarantee()` says what is promised.

    Raises:
        OptionError: if the model has no stack that can be converted, or has already been converted.

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
    model = copy.deepcopy(model)
    modules = list(model.modules())
    if any(isinstance(module, LeapfrogStack) for module in modules):
        raise OptionError(
            f"this {type(model).__name__} is already a leapfrog network."
        )
    stacks = [
        (owner, *stack) for owner in modules if (stack := _blocks_of(owner))
    ]
    if not stacks:
        raise OptionError(
            f"{type(model).__name__} has no stack of blocks that hdnn knows: {KNOWN} can be "
            "converted; for other blocks x + F(x) build hdnn.Reversible from hdnn.Leapfrog(F)."
        )
    for owner, name, branches in stacks:
        blocks = getattr(owner, name)
        layers = [Leapfrog(branches(block), h=h) for block in blocks]
        stack = LeapfrogStack(
            Reversible(layers, backprop=backprop, state=state)
        )
        if isinstance(owner, nn.TransformerEncoder):
            owner.use_nested_tensor = (
                False  # which only stacks of PyTorch's own layers can take
            )
        container = nn.ModuleList([stack])
        if isinstance(blocks, nn.Sequential):
            container = nn.Sequential(stack)
        container.register_load_state_dict_pre_hook(_rename)
        container.train(blocks.training)
        setattr(owner, name, container)
    return model


class LeapfrogStack(nn.Module):
    """A stack of residual blocks as a leapfrog network, from `x = q_0` (and `p_0 = 0`) to `q_N`.

    `hdnn.to_reversible` puts it in the place of the blocks.

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
            *args: passed to all blocks: masks, positions and the like.
            **options: passed to all blocks.
        """
        if (
            self.net.backprop in ("reversible", "checkpoint")
            and torch.is_grad_enabled()
        ):
            args = tuple(map(_without_cache, args))
            options = {
                name: _without_cache(value) for name, value in options.items()
            }
        y = self.net(torch.cat([torch.zeros_like(x), x], -1), *args, **options)
        return y.chunk(2, -1)[1]

    @property
    def self_attn(self) -> nn.Module:
        """The attention of the first block, which `nn.TransformerEncoder` reads."""
        return self.net[0].F.block.self_attn  # pyright: ignore

    def guarantee(self) -> Guarantee:
        """The theorem that `norm(dy_N/dy_j) >= 1` for states y = (p, q), or why there is none."""
        return self.net.guarantee()

    def extra_repr(self) -> str:
        return "p += F(q), q += p: not the function of the residual stack, so train it from scratch"


class Branches(nn.Module):
    """The sum that a residual block adds to its input: block(q) - q, without a difference."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block: Any = block


class EncoderBranches(Branches):
    """The sum of `nn.TransformerEncoderLayer`."""

    def forward(
        self,
        q: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        block = self.block
        a = block._sa_block(
            block.norm1(q), src_mask, src_key_padding_mask, is_causal=is_causal
        )
        return a + block._ff_block(block.norm2(q + a))


class VisionBranches(Branches):
    """The sum of `timm.models.vision_transformer.Block`."""

    def forward(self, q: Tensor, **options: Any) -> Tensor:
        block = self.block
        a = block.drop_path1(block.ls1(block.attn(block.norm1(q), **options)))
        return a + block.drop_path2(block.ls2(block.mlp(block.norm2(q + a))))


class GPT2Branches(Branches):
    """The sum of `transformers.models.gpt2.modeling_gpt2.GPT2Block`."""

    def forward(
        self,
        q: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        block = self.block
        masks = {
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
        }
        a = block.attn(block.ln_1(q), **masks, **options)[0]
        if encoder_hidden_states is not None:
            masks["encoder_hidden_states"] = encoder_hidden_states
            masks["encoder_attention_mask"] = encoder_attention_mask
            a = a + block.crossattention(block.ln_cross_attn(q + a), **masks)[0]
        return a + block.mlp(block.ln_2(q + a))


def _encoder_layer_reason(layer: Any) -> str | None:
    if (
        getattr(type(layer), "forward", None)
        is not nn.TransformerEncoderLayer.forward
    ):
        return f"{type(layer).__name__} has a forward of its own"
    if not layer.norm_first:
        return "they normalise after each sum (norm_first=False), so they are not x + F(x)"
    return None


def _vision_block_reason(block: Any) -> str | None:
    if type(block).__name__ != "Block" or not hasattr(block, "ls1"):
        return f"{type(block).__name__} is not timm's Block, x + attn(norm(x)), x + mlp(norm(x))"
    return None


def _gpt2_block_reason(block: Any) -> str | None:
    if "uple" in str(block.forward.__annotations__.get("return")):
        return "this transformers release returns tuples from them; install transformers 5 or newer"
    return None


# For each class: the attribute with its residual blocks, their sums, and why one cannot be
# converted.
STACKS: dict[str, tuple[str, type[Branches], Any]] = {
    "torch.TransformerEncoder": (
        "layers",
        EncoderBranches,
        _encoder_layer_reason,
    ),
    "timm.VisionTransformer": ("blocks", VisionBranches, _vision_block_reason),
    "transformers.GPT2Model": ("h", GPT2Branches, _gpt2_block_reason),
}


def _blocks_of(owner: nn.Module) -> tuple[str, type[Branches]] | None:
    """The attribute under which a module holds residual blocks, and the sums of such blocks."""
    for cls in type(owner).__mro__:
        package = cls.__module__.split(".")[0]
        stack = STACKS.get(f"{package}.{cls.__name__}")
        if stack is None:
            continue
        name, branches, reason = stack
        blocks = getattr(owner, name)
        reasons = [reason(block) for block in blocks] or ["there are none"]
        for text in filter(None, reasons):
            raise OptionError(
                f"the blocks of this {type(owner).__name__} cannot be converted: {text}. Build "
                "hdnn.Reversible from hdnn.Leapfrog(F), where F is what a block adds to its input."
            )
        return name, branches
    return None


def _without_cache(argument: Any) -> Any:
    """None for a cache of keys and values: blocks that run twice would fill it twice."""
    if not hasattr(argument, "get_seq_length"):
        return argument
    if argument.get_seq_length():
        raise OptionError(
            'gradients through a cache of keys and values need backprop="stored", because other '
            "modes run the blocks twice; call the model under torch.no_grad(), or without "
            "past_key_values."
        )
    return None


def _rename(
    blocks: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let a list of blocks load the weights of the original model."""
    for name in list(state):
        match = re.fullmatch(re.escape(prefix) + r"(\d+)\.(?!net\.)(.*)", name)
        if match:
            state[f"{prefix}0.net.blocks.{match[1]}.F.block.{match[2]}"] = (
                state.pop(name)
            )
