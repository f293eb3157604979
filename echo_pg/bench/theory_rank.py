"""What each rank of `bench theory` does: passes of real all-reduces whose errors echo itself measures (diagnostics)."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import options, report
from . import results, split
from .progress import Bar

_TIMEOUT = timedelta(minutes=5)
_DIGITS = 6  # significant ones of the norms that are kept
_DRIFT = 0.3  # what is new in each contribution of the sequence "drift", of its standard deviation


def run_rank(rank: int, size: int, store_path: str, plan: dict[str, Any], path: str) -> None:
    """All passes of the plan; rank 0 appends a record after each."""
    torch.set_num_threads(max(1, len(results.usable_cores()) // size))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size, timeout=_TIMEOUT
    )
    common = results.circumstances("cpu", torch.get_num_threads()) | {"bench": "theory"}
    real = RealModel(plan, rank, size) if any(run["part"] in ("forward", "backward") for run in plan["runs"]) else None
    bar = Bar("theory", len(plan["runs"]), enabled=rank == 0)
    for run in plan["runs"]:
        given = options.Options(**run["given"])
        group = dist.new_group(backend="echo", group_desc="tp", pg_options=given, timeout=_TIMEOUT)
        if real is None or run["part"] not in ("forward", "backward"):
            measured = synthetic(group, rank, run)
        else:
            measured = real.forward(group) if run["part"] == "forward" else real.backward(group)
        dist.destroy_process_group(group)
        if rank == 0:
            now = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
            described = {name: value for name, value in run.items() if name != "given"}
            results.append(Path(path), [common | now | described | measured])
        bar.step(f"{run['part']} {run['row']}")
    bar.done()
    dist.destroy_process_group()


def contributions(part: str, rank: int, numel: int, seed: int, sites: int) -> list[Tensor]:
    """One rank's part of each site, bfloat16 [numel / 128, 128] or [1, numel]: normal, with columns of very different
    size, as activations have them.

    "fresh": each independent of the others; "drift": each much like the one before; "same": all alike.
    """
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shape = (numel // 128, 128) if numel % 128 == 0 else (1, numel)
    columns = torch.randn(shape[1], generator=torch.Generator().manual_seed(seed)).exp()
    x = torch.randn(shape, generator=generator)
    made = []
    for _ in range(sites):
        made.append((x * columns).to(torch.bfloat16))
        if part != "same":
            new = torch.randn(shape, generator=generator)
            x = new if part == "fresh" else (1 - _DRIFT**2) ** 0.5 * x + _DRIFT * new
    return made


def synthetic(group: Any, rank: int, run: dict[str, Any]) -> dict[str, Any]:
    """One pass over a synthetic sequence."""
    report.new_pass("forward", group)
    for x in contributions(run["part"], rank, run["numel"], run["seed"], run["sites"]):
        report.all_reduce(x, group)
    return norms(group, "forward")


def norms(group: Any, direction: str) -> dict[str, Any]:
    """Per site of the last pass the 2-norm and the largest magnitude of delta (what the site lost) and of the partial
    sum (what all sites so far delivered beyond the exact sums of the contributions)."""
    sites = report.stats(group)["diagnostics"][direction]
    kept = {}
    for name in ("delta_l2", "delta_max", "partial_l2", "partial_max"):
        kept[name] = [_short(site[name]) for site in sites]
    return {"sites_measured": len(sites), **kept}


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


class RealModel:
    """A language model split over the ranks, and what it does on a text with exact sums."""

    def __init__(self, plan: dict[str, Any], rank: int, size: int) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.bfloat16, attn_implementation="eager")
        self.model = model.eval()
        self.tokens = _tokens(plan)
        self.group: Any = dist.group.WORLD
        self.errors: list[Tensor] | None = None  # of backward sums, where they are kept
        split.split(self.model, size, rank, self._add)
        # In the order of the forward sites: what comes in front of attention and MLP of each layer.
        layers = self.model.model.layers
        self.norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self.hidden: list[Tensor] = []
        for norm in (*self.norms, self.model.model.norm):
            norm.register_forward_pre_hook(self._keep)
        self._look(grad=True)
        self.exact_hidden = self.hidden
        self.exact_gradients = self._gradients()

    def _keep(self, _: Any, args: tuple[Tensor, ...]) -> None:
        self.hidden.append(args[0])

    def _add(self, x: Tensor, direction: str) -> None:
        if self.errors is None or direction != "backward":
            dist.all_reduce(x, group=self.group)
            return
        exact = x.double()
        dist.all_reduce(x, group=self.group)
        dist.all_reduce(exact)
        self.errors.append(x.double() - exact)

    def _look(self, grad: bool, exact_forward: bool = False) -> None:
        """Read the text; keeps the hidden states in front of each norm, with their gradients if `grad`."""
        self.hidden = []
        with torch.set_grad_enabled(grad), report.exact() if exact_forward else contextlib.nullcontext():
            logits = self.model(input_ids=self.tokens[:, :-1], use_cache=False).logits
        if grad:
            for hidden in self.hidden:
                hidden.retain_grad()
            targets = self.tokens[:, 1:].flatten()
            torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets).backward()
            self.model.zero_grad(set_to_none=True)

    def _gradients(self) -> list[Tensor]:
        found = []
        for hidden in self.hidden:
            assert hidden.grad is not None
            found.append(hidden.grad.double())
        return found

    def forward(self, group: Any) -> dict[str, Any]:
        """Theorem 1 on the forward pass. For theorem 2, after 0 to N sites: the energy of the hidden state's deviation
        over the energy of the hidden state, of all tokens together and the mean over tokens; sigma2, the mean square of
        the hidden state."""
        self.group, self.errors = group, None
        self._look(grad=False)
        return norms(group, "forward") | self._energy(self.hidden, self.exact_hidden) | self._sizes()

    def backward(self, group: Any) -> dict[str, Any]:
        """Theorem 1 on the backward pass after an exact forward pass. For proposition 3: stream_l2, the norms of the
        partial sums of the same errors as they reach the gradient of the hidden state; gamma, the largest weight of a
        norm; and the energy of that gradient's deviation."""
        self.group, self.errors = group, []
        self._look(grad=True, exact_forward=True)
        states = [hidden.detach().double() for hidden in self.exact_hidden[:-1]]
        total = torch.zeros_like(states[0])
        stream = []
        for error, norm, state in zip(self.errors, reversed(self.norms), reversed(states), strict=True):
            total = total + through_norm(error, norm, state)
            stream.append(_short(float(total.norm())))
        gamma = max(float(norm.weight.detach().abs().max()) for norm in self.norms)
        # The last hidden state's gradient has met no sum yet: in the order of the pass it comes first.
        energy = self._energy(self._gradients()[::-1], self.exact_gradients[::-1])
        return norms(group, "backward") | energy | self._sizes() | {"stream_l2": stream, "gamma": gamma}

    def _energy(self, found: list[Tensor], exact: list[Tensor]) -> dict[str, list[float]]:
        together, per_token = [], []
        for mine, right in zip(found, exact, strict=True):
            off = (mine.detach().double() - right.detach().double()).square().sum(-1)
            whole = right.detach().double().square().sum(-1)
            together.append(_short(float(off.sum() / whole.sum())))
            per_token.append(_short(float((off / whole).mean())))
        return {"energy": together, "energy_per_token": per_token}

    def _sizes(self) -> dict[str, Any]:
        sigma2 = [_short(float(hidden.detach().double().square().mean())) for hidden in self.exact_hidden]
        return {"elements": self.exact_hidden[0].numel(), "sigma2": sigma2}


def through_norm(gradient: Tensor, norm: Any, x: Tensor) -> Tensor:
    """What a gradient of an RMSNorm's output [..., d] is at its input x; all of it in double."""
    scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    weighted, direction = norm.weight.detach().double() * gradient, x * scale
    return scale * (weighted - direction * (direction * weighted).mean(-1, keepdim=True))


def _tokens(plan: dict[str, Any]) -> Tensor:
    """[1, tokens + 1]: the text from its start. Raises ValueError where it is shorter."""
    from transformers import AutoTokenizer

    from .train_rank import load_text

    head = bytes(load_text(plan["text"], "prose-tune.txt")[: 16 * (plan["tokens"] + 1)].tolist())
    ids = AutoTokenizer.from_pretrained(plan["model"])(head.decode(errors="ignore"))["input_ids"]
    if len(ids) <= plan["tokens"]:
        raise ValueError(f"the text has {len(ids)} tokens, {plan['tokens'] + 1} are needed")
    return torch.tensor(ids[: plan["tokens"] + 1])[None]
