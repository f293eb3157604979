"""Perplexity of a tensor-parallel language model, and how far its next-token distributions are from reference ones.

Logits stay split over the ranks by vocabulary, as the output layer makes them: each rank reduces its share to a few
numbers per token, and only these travel. What is kept of a reference are its last hidden states (the input of the
output layer), from which the same matrix product gives its logits again, bit for bit: 1.2 kB per token instead of 98.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

_CHUNK_TOKENS = {
    "cuda": 8192,
    "cpu": 512,
}  # of one product with the output layer; on CUDA three fp32 copies fit in 5 GB


@dataclass
class Scores:
    """Of one text: nll [windows] sums of negative log-likelihoods in nats; kl the mean of KL(reference || this) per
    token in nats; same_top the share of tokens whose most likely successor is the reference's. The last two are None
    for the reference itself."""

    tokens: int
    nll: list[float]
    kl: float | None
    same_top: float | None

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.nll) / self.tokens)


class Forwards:
    """Counts the forward passes of a model and the bytes of the tensors that they sum at each site."""

    def __init__(self, model: Any) -> None:
        self.site_bytes: list[int] = []
        self._element_bytes = model.config.hidden_size * model.dtype.itemsize
        self._handle = model.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs["inputs_embeds"][..., 0]
        self.site_bytes.append(tokens.numel() * self._element_bytes)

    def remove(self) -> None:
        self._handle.remove()


@torch.no_grad()
def hidden_states(model: Any, windows: Tensor, batch: int, step: Any) -> Tensor:
    """What the output layer reads, [tokens, hidden], of windows [n, length + 1]; `step()` after each batch."""
    found = []
    for part in windows[:, :-1].split(batch):
        found.append(model.model(input_ids=part.to(model.device), use_cache=False).last_hidden_state.flatten(0, 1))
        step()
    return torch.cat(found)


@torch.no_grad()
def score(model: Any, windows: Tensor, hidden: Tensor, reference: Tensor | None) -> Scores:
    """Of windows [n, length + 1] whose hidden states are given; called on all ranks alike."""
    weight, offset = output_weight(model)
    targets = windows[:, 1:].flatten().to(hidden.device) - offset
    chunk = _CHUNK_TOKENS[hidden.device.type]
    parts = []
    for start in range(0, len(targets), chunk):
        here = slice(start, start + chunk)
        parts.append(_reduce(hidden[here], None if reference is None else reference[here], weight, targets[here]))
    mine = torch.cat(parts, 1)
    mine[1] += offset
    if reference is not None:
        mine[5] += offset
    return _combine(_gather(mine), len(windows))


def output_weight(model: Any) -> tuple[Tensor, int]:
    """This rank's part of the output layer, [words, hidden], and the number of its first word.

    Raises ValueError where the layer is not split evenly by vocabulary.
    """
    weight = model.lm_head.weight
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    rank, size = dist.get_rank(), dist.get_world_size()
    if weight.shape[0] * size != model.config.vocab_size:
        raise ValueError(f"{model.config.vocab_size} words over {size} ranks, but rank {rank} has {weight.shape[0]}")
    return weight, rank * weight.shape[0]


def _gather(mine: Tensor) -> Tensor:
    """[ranks, ...] on the CPU, of a small float64 tensor of each rank; too small and of the wrong type to be
    quantized, and outside of every module."""
    mine = mine.cpu()
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return torch.stack(gathered)


def _reduce(hidden: Tensor, reference: Tensor | None, weight: Tensor, targets: Tensor) -> Tensor:
    """Per token, of this rank's words: largest logit, its word, sum of exponentials relative to it, the target's logit
    (0 if another rank has it); with a reference also its first three and sum(exp(reference - largest) * (reference -
    this)). float64 [4 or 8, tokens]."""
    logits = F.linear(hidden, weight).float()
    top, word = logits.max(-1)
    inside = (targets >= 0) & (targets < len(weight))
    target = logits.gather(1, targets.clamp(0, len(weight) - 1)[:, None])[:, 0] * inside
    found = [top, word, (logits - top[:, None]).exp().sum(-1), target]
    if reference is not None:
        expected = F.linear(reference, weight).float()
        top, word = expected.max(-1)
        weights = (expected - top[:, None]).exp()
        found += [top, word, weights.sum(-1), (weights * (expected - logits)).sum(-1)]
    return torch.stack([values.double() for values in found])


def _combine(parts: Tensor, windows: int) -> Scores:
    """From what `_reduce` found on every rank, [ranks, 4 or 8, tokens]."""
    log_sum, word, _ = _log_sum(parts[:, 0], parts[:, 1], parts[:, 2])
    nll = log_sum - parts[:, 3].sum(0)
    kl = same = None
    if parts.shape[1] > 4:
        expected_log_sum, expected_word, scale = _log_sum(parts[:, 4], parts[:, 5], parts[:, 6])
        # KL = sum p (l_ref - l) - log Z_ref + log Z, with p = exp(l_ref) / Z_ref
        moved = (parts[:, 7] * scale).sum(0) / (parts[:, 6] * scale).sum(0)
        kl = float((moved - expected_log_sum + log_sum).mean())
        same = float((word == expected_word).double().mean())
    return Scores(nll.numel(), nll.view(windows, -1).sum(1).tolist(), kl, same)


def _log_sum(top: Tensor, word: Tensor, exponentials: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log of the sum over all words, the most likely word, and what each rank's sums are to be multiplied with."""
    largest, owner = top.max(0)
    scale = (top - largest).exp()
    log_sum = largest + (exponentials * scale).sum(0).log()
    return log_sum, word.gather(0, owner[None])[0], scale


def fingerprint(tensor: Tensor) -> str:
    """Of the bytes of a tensor."""
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@torch.no_grad()
def continuations(model: Any, prompts: Tensor, new_tokens: int) -> Tensor:
    """Greedy tokens [n, new_tokens] after prompts [n, length], all prompts in one batch, on the CPU; an end-of-text
    token ends nothing. One pass reads the prompts, each further one a token."""
    weight, offset = output_weight(model)
    from transformers import DynamicCache

    named = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
    kept = {named: DynamicCache(config=model.config), "use_cache": True}
    tokens, made = prompts.to(model.device), []
    for _ in range(new_tokens):
        found = model.model(input_ids=tokens, **kept)
        top, word = F.linear(found.last_hidden_state[:, -1], weight).float().max(-1)
        tops, words = _gather(torch.stack([top.double(), word.double() + offset])).unbind(1)
        made.append(words.gather(0, tops.argmax(0)[None])[0].long())
        tokens = made[-1][:, None].to(model.device)
    return torch.stack(made, 1)


def agreement(tokens: Tensor, reference: Tensor) -> dict[str, float]:
    """Share of positions with identical tokens, and the mean number of tokens before the first that differs."""
    same = tokens == reference
    return {
        "same_tokens": float(same.double().mean()),
        "same_prefix": float(same.int().cumprod(1).sum(1).double().mean()),
    }
