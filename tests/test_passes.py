"""Passes told apart by module calls, autograd and by hand, and what policy auto makes of them; lanes, early sites, the
state pool, diagnostics."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from regions import Reduce
from test_backend import contribution, echo_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return Reduce.apply(self.linear(x), self.group)


class Model(nn.Module):
    def __init__(self, group: Any, layers: int, checkpointed: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(group) for _ in range(layers))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed == "pairs":
            # The forward, not the call: both layers are outermost when they are run again.
            for pair in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = checkpoint(nn.Sequential(*pair).forward, x, use_reentrant=True)
            return x
        for layer in self.layers:
            reentrant = self.checkpointed == "reentrant"
            x = checkpoint(layer, x, use_reentrant=reentrant) if self.checkpointed else layer(x)
        return x


def sample() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 16).bfloat16().requires_grad_()


def run_training(rank: int, size: int, checkpointed: str, **changes: Any) -> dict[str, Any]:
    import echo_pg

    group = echo_group(policy="auto", **changes)
    model = Model(group, 4, checkpointed)
    for _ in range(3):
        model(sample()).float().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)  # outside of modules and autograd: a gradient over replicas
    return echo_pg.stats(group)


@pytest.mark.parametrize("checkpointed", ["", "reentrant", "non-reentrant", "pairs"])
def test_forward_backward_and_recompute(checkpointed: str) -> None:
    stats = run_ranks(run_training, 2, checkpointed)[0]
    assert stats["forwarded"] == {"outside a module and autograd": {"calls": 12, "bytes": 12 * 16 * 16 * 2}}
    # What is checkpointed on its own is run again as a pass of its own: a layer, of one site, or a pair. A
    # non-reentrant checkpoint stops once the tensors that backward needs are there: before the sum, which nothing
    # saves.
    recomputed, sites = {"": (0, 0), "reentrant": (12, 1), "non-reentrant": (0, 0), "pairs": (6, 2)}[checkpointed]
    assert stats["passes"] == {"forward": 3, "backward": 3, "recompute": recomputed}
    assert stats["sites"] == {"forward": 4, "backward": 4, "recompute": sites}


def run_recompute(rank: int, size: int) -> list[Any]:
    found: list[Any] = []
    for way in "feedback", "plain", "exact":
        stats = run_training(rank, size, "reentrant", recompute=way)
        found.append((stats["calls_quantized"], stats["forwarded"].get("recomputed forward", {}).get("calls", 0)))
        found.append(stats["state_bytes"])
    return found


def test_what_recompute_says() -> None:
    feedback, three, plain, two, exact, none = run_ranks(run_recompute, 2)[0]
    assert feedback == plain == (36, 0) and exact == (24, 12)
    assert three == two * 3 / 2 and none == two, "a state per direction, and none for what is plain or exact"


def run_roles(rank: int, size: int) -> dict[str, int]:
    """Which calls policy auto quantizes, by where they come from."""
    import echo_pg

    group = echo_group(policy="auto")
    outcomes = {}

    def counted(name: str, call: Any) -> None:
        before = echo_pg.stats(group)["calls_quantized"]
        call()
        outcomes[name] = echo_pg.stats(group)["calls_quantized"] - before

    def reduce(*_: Any) -> None:
        dist.all_reduce(torch.ones(4, 16, dtype=torch.bfloat16), group=group)

    class Plain(nn.Module):
        def __init__(self, child: nn.Module | None = None) -> None:
            super().__init__()
            self.child = child

        def forward(self, x: Any) -> Any:
            if self.child is not None:
                self.child(x)
            else:
                reduce()
            return x

    tokens = torch.zeros(2, 2, dtype=torch.int64)
    embedding = nn.Embedding(4, 4)
    embedding.register_forward_hook(reduce)  # where parallelize_module sums
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(reduce)
    lm_head = nn.Linear(2, 2)
    lm_head.register_forward_hook(reduce)

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Plain(linear)
            self.lm_head = lm_head

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(x)

    class OptimizedModule(Plain):  # named as torch.compile's wrapper is
        pass

    class HidesEmbedding(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = embedding  # not called, but it could be, unseen

    leaf = torch.ones(4, 16, dtype=torch.bfloat16, requires_grad=True)
    counted("outside", reduce)
    counted("module", lambda: Plain()(0))
    counted("embedding", lambda: Plain(embedding)(tokens))
    counted("linear", lambda: Plain(linear)(torch.ones(2, 2)))
    counted("output layer", lambda: LanguageModel()(torch.ones(2, 2)))
    handle = leaf.register_post_accumulate_grad_hook(reduce)
    counted("compiled", lambda: OptimizedModule(Plain())(0))
    counted("compiled with an embedding", lambda: OptimizedModule(HidesEmbedding())(0))
    counted("parameter gradient", lambda: (leaf * 2).sum().backward())
    handle.remove()
    inner = leaf * 2
    inner.register_hook(reduce)
    counted("gradient of a value", lambda: inner.sum().backward())
    with echo_pg.exact():
        counted("exact", lambda: Plain()(0))
    return outcomes


def test_roles_under_policy_auto() -> None:
    assert run_ranks(run_roles, 2)[0] == {
        "outside": 0, "module": 1, "embedding": 0, "linear": 1, "output layer": 0, "compiled": 1,
        "compiled with an embedding": 0,
        "parameter gradient": 0, "gradient of a value": 1, "exact": 0,
    }  # fmt: skip


def run_by_hand(rank: int, size: int) -> list[dict[str, int]]:
    import echo_pg

    group, other = echo_group(policy="all"), echo_group(policy="all")
    seen = []

    def reduce(count: int, where: Any = group) -> None:
        for _ in range(count):
            dist.all_reduce(contribution(rank), group=where)

    reduce(2)
    echo_pg.new_pass("backward", group)
    reduce(3)
    echo_pg.new_pass("forward")
    reduce(1)
    echo_pg.all_reduce(contribution(rank), group, direction="backward")
    if rank == 0:
        nn.Identity()(0)  # a module call without a call of the group starts nothing
    reduce(1)
    reduce(1, other)
    for where in group, other:
        seen += [echo_pg.stats(where)["passes"], echo_pg.stats(where)["sites"], echo_pg.stats(where)["sites_last"]]
    return seen


def test_passes_by_hand() -> None:
    assert run_ranks(run_by_hand, 2)[0] == [
        {"forward": 2, "backward": 1, "recompute": 0},
        {"forward": 2, "backward": 4, "recompute": 0},
        {"forward": 2, "backward": 0, "recompute": 0},
        {"forward": 1, "backward": 0, "recompute": 0},
        {"forward": 1, "backward": 0, "recompute": 0},
        {"forward": 0, "backward": 0, "recompute": 0},
    ]


def run_lanes(rank: int, size: int) -> list[int]:
    import echo_pg

    group = echo_group(policy="all", diagnostics=True)

    def start() -> Any:
        return dist.all_reduce(contribution(rank), group=group, async_op=True)

    first, second = start(), start()
    first.wait()
    third = start()  # takes the lane that waiting for the first has freed
    second.wait()
    third.wait()
    start()  # dropped without waiting: its lane is free at once
    start().wait()
    dist.all_reduce(contribution(rank), group=group)
    return [site["lane"] for site in echo_pg.stats(group)["diagnostics"]["forward"]]


def test_lanes() -> None:
    for lanes in run_ranks(run_lanes, 2):
        assert lanes == [0, 1, 0, 0, 0, 0]


def run_diagnostics(rank: int, size: int) -> list[dict[str, Any]]:
    import echo_pg

    group = echo_group(policy="all", diagnostics=True, rotation="hadamard")
    echo_pg.new_pass("forward", group)
    for site in range(3):
        tensor = contribution(rank, seed=site)
        dist.all_reduce(tensor, group=group)
        exact = sum(contribution(r, seed=site).double() for r in range(size))
        measured = echo_pg.stats(group)["diagnostics"]["forward"][-1]
        rho = tensor.double() - exact
        assert abs(measured["rho_l2"] - float(rho.norm())) < 1e-9 and measured["rho_max"] == float(rho.abs().max())
    return echo_pg.stats(group)["diagnostics"]["forward"]


def test_diagnostics() -> None:
    sites = run_ranks(run_diagnostics, 3)[0]
    assert [site["site"] for site in sites] == [0, 1, 2]
    assert sites[0]["delta_l2"] == sites[0]["rho_l2"] == sites[0]["partial_l2"]
    assert sites[2]["delta_l2"] != sites[2]["rho_l2"], "later sites carry corrections"
    assert sites[2]["partial_l2"] < sum(site["rho_l2"] for site in sites) * 0.7, "feedback makes errors cancel"


def wire_bytes_of_a_pass(group: Any, model: nn.Module, grad: bool) -> int:
    import echo_pg

    before = echo_pg.stats(group)["wire_bytes"]
    with torch.set_grad_enabled(grad):
        model(sample())
    return echo_pg.stats(group)["wire_bytes"] - before


def run_early(rank: int, size: int) -> list[int]:
    sites, found = 4, []
    for early in (0, 1, 0.5, 0.1):
        group = echo_group(policy="auto", early_sites=early)
        model = Model(group, sites)
        found += [wire_bytes_of_a_pass(group, model, grad) for grad in (False, False, False, True)]
    return found


def test_early_sites() -> None:
    found = run_ranks(run_early, 2)[0]
    narrow = found[0]
    step = 2 * 128 * 4 // 8  # what a site costs more in 8 bits: a group of 128, sent once and gathered once
    extra = [(value - narrow) // step for value in found]
    assert extra[:4] == [0, 0, 0, 0]
    assert extra[4:8] == [1, 1, 1, 0], "a count; with gradients no site is early"
    assert extra[8:12] == [4, 2, 2, 0], "a fraction: all sites until the length of a pass is known"
    assert extra[12:16] == [4, 0, 0, 0], "a tenth of four sites is none"


def run_shapes(rank: int, size: int) -> tuple[list[int], list[int]]:
    """State bytes over passes of changing shapes, and over one pass that never ends."""
    import echo_pg

    passes = echo_group(policy="all")
    sizes = torch.randint(1, 5000, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    by_pass = []
    for numel in sizes:
        echo_pg.new_pass("forward", passes)
        for _ in range(2):
            dist.all_reduce(torch.ones(numel, dtype=torch.bfloat16), group=passes)
        by_pass.append(echo_pg.stats(passes)["state_bytes"])
    endless = echo_group(policy="all")
    by_call = []
    for numel in sizes[:300]:
        dist.all_reduce(torch.ones(numel, dtype=torch.bfloat16), group=endless)
        by_call.append(echo_pg.stats(endless)["state_bytes"])
    return by_pass, by_call


def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    by_pass, by_call = run_ranks(run_shapes, 2, timeout=120)[0]
    largest = 2 * (5000 + 2 * 40 + 32) + 256  # two averages: codes and a scale per group, padded
    assert max(by_pass) <= largest
    assert by_pass == sorted(by_pass), "storage only grows, to what the largest pass needs"
    assert max(by_call) <= 2 * 64 * largest


def run_logged(rank: int, size: int) -> list[str]:
    """What a group that never quantizes says in six passes, and one that does."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("echo_pg").addHandler(Keep())
    leaf = torch.ones(4, 16, dtype=torch.bfloat16, requires_grad=True)
    idle, busy = echo_group(policy="auto"), echo_group(policy="all")
    leaf.register_post_accumulate_grad_hook(lambda leaf: dist.all_reduce(leaf.grad, group=idle))
    for _ in range(6):
        (leaf * 2).sum().backward()
    for _ in range(2):
        dist.all_reduce(contribution(rank), group=busy)
    for group in idle, busy:
        dist.destroy_process_group(group)
    return lines


def test_what_groups_say() -> None:
    first, second = run_ranks(run_logged, 2, env={"ECHO_LOG": "info"})
    assert second == [], "rank 0 speaks for the group"
    assert len(first) == 4, first
    assert first[0].startswith("WARNING") and "parameter gradient" in first[0]
    assert first[1].startswith("INFO") and "4 bits" in first[1] and "fabric" in first[1]
    assert "parameter gradient" in first[2] and "2 calls" in first[3]
