"""A decoder model of transformers, split over ranks as Megatron-LM splits it: one all-reduce after attention and one
after the MLP in forward, and one of the gradient before each of them in backward.

transformers' own plan would sum the gradients of query, key and value (and of gate and up) one by one; here, as in the
paper's NeMo runs, they are added up on each rank first. The modules' code is untouched: hooks sum what goes in and out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
# Of these each rank has the gradient of its own heads alone.
_SUMMED = ("q_norm.weight", "k_norm.weight")

# Adds up a tensor over the ranks, in place; told whether in forward or in backward.
Add = Callable[[Tensor, str], None]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3. In Qwen3-0.6B the FFN is three times as wide as the model, all heads together twice."""

    layers: int
    width: int
    heads: int
    head_width: int
    kv_heads: int
    ffn: int
    vocabulary: int = 256

    def config(self, length: int, attention: str) -> Any:
        """For sequences of up to `length` tokens; attention is "eager" or "sdpa". Initial weights have a standard
        deviation of 0.02 at the paper's width of 1,024, more in a narrower model: what they multiply keeps its size."""
        from transformers import Qwen3Config

        settings: dict[str, Any] = {
            "vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "head_dim": self.head_width,
            "num_key_value_heads": self.kv_heads, "max_position_embeddings": length, "rms_norm_eps": 1e-6,
            "attention_dropout": 0.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True, "initializer_range": 0.02 * math.sqrt(1024 / self.width),
            "use_cache": False, "attn_implementation": attention, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        return Qwen3Config(**settings)


def qwen3(shape: Shape, length: int, seed: int, device: torch.device) -> nn.Module:
    """A whole bfloat16 Qwen3ForCausalLM in training mode, on the CPU, for use on `device`; its weights depend on `seed`
    alone."""
    from transformers import Qwen3ForCausalLM

    # On CPUs torch's fused attention is slow in bfloat16: the backward of 16 x 2 x 64 x 32 took 3.9 ms on an AMD EPYC
    # core, of 11 ms for the whole layer and both directions; with plain products the layer took 8.
    attention = "eager" if device.type == "cpu" else "sdpa"
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(shape.config(length, attention)).to(torch.bfloat16).train()


def split(model: Any, size: int, rank: int, add: Add) -> None:
    """Leave of a whole Llama or Qwen3 the part of one rank, and sum with `add`.

    Embedding and output layer stay whole on every rank, so that no sum but those of the layers is needed. Raises
    ValueError where heads do not go round.
    """
    if model.config.num_key_value_heads % size or model.config.num_attention_heads % size:
        raise ValueError(f"{model.config.num_key_value_heads} key/value heads cannot be dealt to {size} ranks")
    for layer in model.model.layers:
        for names, dim in ((COLUMNS, 0), (ROWS, 1)):
            for name in names:
                linear = layer.get_submodule(name)
                part = linear.weight.detach().chunk(size, dim)[rank]
                linear.weight = nn.Parameter(part.clone(memory_format=torch.contiguous_format))  # no view of the whole
        for block in (layer.self_attn, layer.mlp):
            block.register_forward_pre_hook(_copying(add), with_kwargs=True)
        for name in ROWS:
            layer.get_submodule(name).register_forward_hook(_summing(add))


def adding_over(group: Any) -> Add:
    return lambda x, direction: dist.all_reduce(x, group=group)


class _Copy(torch.autograd.Function):
    """The same on all ranks in forward; the sum of the ranks' gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Add) -> Tensor:
        ctx.add = add
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # In place: it is a sum over the projections that share the input, so in no other hands.
        gradient = gradients[0].contiguous()
        ctx.add(gradient, "backward")
        return gradient, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks in forward, in place: it is the fresh result of a product. Backward passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Add) -> Tensor:
        ctx.mark_dirty(x)
        add(x, "forward")
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _copying(add: Add) -> Any:
    """For a module that takes what all ranks hold alike as its first argument or as `hidden_states`."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_Copy.apply(args[0], add), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Copy.apply(kwargs["hidden_states"], add)}

    return hook


def _summing(add: Add) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:
        return _Sum.apply(result, add)

    return hook


def kinds(model: nn.Module) -> Iterator[str]:
    """How ranks hold each parameter: "split" (a part each), "summed" (alike, gradients to be added) or "alike"
    (gradients too)."""
    for name, _ in model.named_parameters():
        if name.removesuffix(".weight").endswith((*COLUMNS, *ROWS)):
            yield "split"
        else:
            yield "summed" if name.endswith(_SUMMED) else "alike"
