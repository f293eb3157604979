"""Whole models of transformers with random weights, split over ranks, whose sums can be exchanged between two calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .. import report
from . import split, transformer
from .cases import Row
from .train_rank import ADAM, CLIP

NOTHING = Row("no-op", "the call left out", kind="nothing")
AGAIN = Row("again", "the exact backend once more: what differs by chance", kind="inner")


def part_of(baseline: Row, share: float) -> Row:
    """What stands for an all-reduce that is 1 / share times faster: wrong sums, the right time."""
    return Row(f"{baseline.name} x {share:g}", f"{baseline.label}, {100 * share:g} % of each tensor", kind="part")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; kind: "Llama" or "Qwen3"."""

    kind: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocabulary: int
    theta: float = 10_000.0

    def config(self, length: int) -> Any:
        import transformers

        settings: dict[str, Any] = {
            "vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "head_dim": self.head_width,
            "num_key_value_heads": self.kv_heads, "max_position_embeddings": length, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta}, "bos_token_id": None,
            "eos_token_id": None,
        }  # fmt: skip
        return getattr(transformers, f"{self.kind}Config")(**settings)


class Sums:
    """What adds up a tensor over the ranks, told by the variant at work; group None: nobody, the call is left out.
    share: of each tensor that is summed up. Where there is a clock (of measure) it times each of them, as its row 0."""

    def __init__(self) -> None:
        self.group: Any = None
        self.share = 1.0
        self.clock: Any = None

    def __call__(self, x: Tensor, _direction: str) -> None:
        if self.group is None:
            return
        if self.clock is not None:
            self.clock.start(0)
        dist.all_reduce(x if self.share == 1 else x.view(-1)[: int(self.share * x.numel())], group=self.group)
        if self.clock is not None:
            self.clock.stop()


@dataclass
class Variant:
    """A row at work in the model: `group` sums, None for nobody. chosen: its options. device_type: of what it sums.
    share: of each tensor that it sums."""

    row: Row
    group: Any
    chosen: Any = None
    device_type: str = "cpu"
    share: float = 1.0

    def quantized(self) -> int:
        """Calls so far."""
        return int(report.stats(self.group)["calls_quantized"]) if self.chosen is not None else 0

    def quantizes(self, sum_bytes: int, recorded: bool = False) -> bool:
        """Whether sums of that size are to be quantized in the model; over the wire recorded ones are not."""
        if self.chosen is None or sum_bytes < self.chosen.min_bytes_on(self.device_type):
            return False
        return not recorded or report.stats(self.group)["fabric"] == "peer"

    def check(self, call: Callable[[], Any], expected: Callable[[], int]) -> Any:
        """Calls once. Raises RuntimeError unless that quantized as many sums as is expected after it: else the row
        means nothing."""
        before = self.quantized()
        made = call()
        if (counted := self.quantized() - before) != expected():
            raise RuntimeError(f"{self.row.name}: {counted} sums were quantized, {expected()} are to be")
        return made


def make(shape: Shape, length: int, size: int, rank: int, device: torch.device, sums: Sums) -> Any:
    """One rank's part of a bfloat16 model for causal language modelling; the whole one is on the device for a moment.

    Embedding and output layer are whole on every rank, as split.split leaves them.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(length), dtype=torch.bfloat16, attn_implementation="sdpa")
    split.split(model, size, rank, sums)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model.to(device)


@torch.no_grad()
def first_tokens(model: Any, prompts: Tensor) -> Tensor:
    """The token after each prompt [batch, length], on the host; the key/value cache for the next ones is made too."""
    logits = model(input_ids=prompts, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1).cpu()


class Decoding:
    """The step that writes one token per sequence, over a full cache: the last of `cached` places."""

    def __init__(self, model: Any, batch: int, cached: int, device: torch.device) -> None:
        from transformers import StaticCache

        class FullCache(StaticCache):
            """Without empty places: the one query sees all of it and needs no mask, so that attention can be fused."""

            @property
            def is_compileable(self) -> bool:
                return False

        self.model, self.cached = model, cached
        self.cache = FullCache(config=model.config, max_cache_len=cached)
        self.token = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.position = torch.full((1, 1), cached - 1, device=device)
        # transformers renamed it in 5.2x.
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    @torch.no_grad()
    def step(self) -> Tensor:
        given: dict[str, Any] = {self.cache_name: self.cache}
        made = self.model(input_ids=self.token, position_ids=self.position, use_cache=True, logits_to_keep=1, **given)
        return made.logits[:, -1].argmax(-1)

    def rewind(self) -> None:
        """Each step fills the last place. A layer makes its buffers in the first step, and counts from 0 until then."""
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if layer.is_initialized:
                layer.cumulative_length.fill_(self.cached - 1)

    def record(self) -> Callable[[], None]:
        """The step as a CUDA graph, after two in eager mode; returns what replays it. Sums go where they go now."""
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
                self.rewind()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events meanwhile, in a thread of its own.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step()
        torch.cuda.synchronize()
        return graph.replay


class Training:
    """Steps at a learning rate of 0: all the work, and weights that stay the same for all variants.

    bfloat16 weights and gradients, fp32 masters and moments, gradients clipped by the norm of all. `exact` is the group
    for what is no sum of activations.
    """

    def __init__(self, model: Any, exact: Any) -> None:
        self.model, self.exact = model, exact
        self.kinds = list(split.kinds(model))
        self.optimizer = transformer.MasterAdamW(model, 0.0, **ADAM, fused=True)

    def step(self, tokens: Tensor, targets: Tensor, joined: bool = True) -> float:
        """The loss, once all is done. Unless `joined`, this rank's own part: nothing waits for another rank."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        del logits
        loss.backward()
        gradients = self.optimizer.take_gradients()
        self._clip(gradients, joined)
        self.optimizer.update()
        self.optimizer.inner.zero_grad()
        return loss.item()

    def forget(self) -> None:
        """What a step that ran out of memory left behind, half-made moments included."""
        self.model.zero_grad()
        self.optimizer.inner.zero_grad()
        self.optimizer.inner.state.clear()

    def _clip(self, gradients: list[Tensor], joined: bool) -> None:
        """One exact sum: of the squares, and of those gradients of which each rank has its own heads' part."""
        by_kind: dict[str, list[Tensor]] = {"split": [], "summed": [], "alike": []}
        for gradient, kind in zip(gradients, self.kinds, strict=True):
            by_kind[kind].append(gradient)
        squares = torch.stack(torch._foreach_norm(by_kind["split"])).square().sum()
        flat = torch.cat([squares[None], *(gradient.flatten() for gradient in by_kind["summed"])])
        if joined:
            dist.all_reduce(flat, group=self.exact)
        alike = torch.stack(torch._foreach_norm(by_kind["alike"])).square().sum()
        norm = (flat[0] + flat[1:].square().sum() + alike).sqrt()
        if by_kind["summed"]:
            parts = flat[1:].split([gradient.numel() for gradient in by_kind["summed"]])
            shaped = [part.view_as(gradient) for part, gradient in zip(parts, by_kind["summed"], strict=True)]
            torch._foreach_copy_(by_kind["summed"], shaped)
        torch._foreach_mul_(gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0))
