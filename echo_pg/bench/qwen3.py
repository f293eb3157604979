"""transformers' Qwen3 with random weights, split over the ranks of a group as Megatron-LM splits it: one all-reduce
after attention and one after the MLP in forward, and one of the gradient before each of them in backward.

transformers' own plan would sum the gradients of query, key and value (and of gate and up) one by one; here, as in the
paper's NeMo runs, they are added up on each rank first. The modules' code is untouched: hooks sum what goes in and out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
# Of these each rank has the gradient of its own heads alone.
_SUMMED = ("q_norm.weight", "k_norm.weight")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. FFN three times the width and heads that are together twice as wide: as in Qwen3-0.6B."""

    layers: int
    width: int
    heads: int
    head_width: int
    kv_heads: int
    ffn: int
    vocabulary: int = 256

    def config(self, length: int) -> Any:
        """Initial weights are 0.02 wide at the paper's width of 1,024 and scaled so that products stay as large."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.ffn,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_width, max_position_embeddings=length, rms_norm_eps=1e-6, attention_dropout=0.0,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True,
            initializer_range=0.02 * math.sqrt(1024 / self.width), use_cache=False, attn_implementation="eager",
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip

    def as_record(self) -> dict[str, int]:
        return asdict(self)


def make(shape: Shape, length: int, seed: int, device: torch.device, group: Any, size: int, rank: int) -> nn.Module:
    """Rank `rank`'s part of a bfloat16 Qwen3ForCausalLM whose weights depend on `seed` alone, in training mode.

    Embedding and output layer (tied, 256 bytes) are on every rank; so no sum but those of the layers is needed.
    """
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(shape.config(length)).to(torch.bfloat16).train()
    for layer in model.model.layers:
        for names, dim in ((_COLUMNS, 0), (_ROWS, 1)):
            for name in names:
                linear = layer.get_submodule(name)
                linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim)[rank].contiguous())
        for block in (layer.self_attn, layer.mlp):
            block.register_forward_pre_hook(_copying(group), with_kwargs=True)
        for name in _ROWS:
            layer.get_submodule(name).register_forward_hook(_summing(group))
    return model.to(device)


class _Copy(torch.autograd.Function):
    """The same on all ranks in forward; the sum of the ranks' gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # A sum over the projections that share the input, so in no other hands.
        (gradient,) = gradients
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks in forward, in place: it is the fresh result of a product. Backward passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _copying(group: Any) -> Any:
    """Of a module that takes what all ranks hold alike, as its first argument or as `hidden_states`."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_Copy.apply(args[0], group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Copy.apply(kwargs["hidden_states"], group)}

    return hook


def _summing(group: Any) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:
        return _Sum.apply(result, group)

    return hook


def split_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """Each parameter, and how ranks hold it: "split" (a part each), "summed" (alike, gradients to be added) or "alike"
    (gradients too)."""
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if module.endswith((*_COLUMNS, *_ROWS)):
            yield parameter, "split"
        else:
            yield parameter, "summed" if name.endswith(_SUMMED) else "alike"
