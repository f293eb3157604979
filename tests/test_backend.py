"""ProcessGroupEcho as torch.distributed sees it: works and futures, several groups, forwarded calls, wrappers, DDP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

BACKEND = Path(__file__).parent.parent / "backend" / "pg" / "process_group_echo.hpp"

# Virtual functions of Backend.hpp that are right as they are: what echo does not support, what the base class hands to
# another name or keeps itself, and clone(), which is of Options.
NOT_OVERRIDDEN = {
    "gather_into_tensor", "supportsReconfigure", "get_reconfigure_handle", "reconfigure",
    "supportsWindow", "new_window", "getBoundDeviceId", "setBoundDeviceId", "clone",
}  # fmt: skip


def echo_group(ranks: list[int] | None = None, **options: Any) -> Any:
    import echo_pg

    return dist.new_group(ranks, backend="echo", pg_options=echo_pg.Options(**({"min_bytes": 0} | options)))


def contribution(rank: int, numel: int = 3000, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).bfloat16()


def exact_sum(size: int, numel: int = 3000, seed: int = 0) -> Tensor:
    return torch.stack([contribution(rank, numel, seed).float() for rank in range(size)]).sum(0)


def is_close(result: Tensor, size: int, seed: int = 0) -> bool:
    """Whether a 4-bit result can be of these contributions: a step is 1/15 of a range of about 7 per quantization."""
    return bool((result.float() - exact_sum(size, result.numel(), seed)).abs().max() < 0.5 * (size + 1))


def test_every_virtual_of_the_installed_backend_is_known() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/Backend.hpp"
    virtuals = set(re.findall(r"virtual\s[^;{(]*?(\w+)\s*\(", header.read_text()))
    assert len(virtuals) > 40, "the pattern does not fit this torch's header any more"
    source = re.sub(r"^\s*(#|//).*$", "", BACKEND.read_text(), flags=re.MULTILINE)
    overridden = set(re.findall(r"(\w+)\([^;{]*?\)\s*(?:const\s*)?override", source))
    assert virtuals - overridden - NOT_OVERRIDDEN == set()


# ---- works ----------------------------------------------------------------------------------------------------------


def run_works(rank: int, size: int) -> None:
    group = echo_group(policy="all")
    waited = contribution(rank)
    assert dist.all_reduce(waited, group=group) is None
    assert is_close(waited, size)

    tensor = contribution(rank)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success()
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    assert work.get_future().done() and work.get_future().value()[0].data_ptr() == tensor.data_ptr()

    work = dist.all_reduce(contribution(rank), group=group, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert is_close(doubled.wait() / 2, size)

    works = [dist.all_reduce(contribution(rank, seed=i), group=group, async_op=True) for i in range(5)]
    results = [work.result() for work in reversed(works) if work.wait()]
    assert all(is_close(result[0], size, seed) for seed, result in zip(reversed(range(5)), results, strict=True))


def run_callback_that_reduces(rank: int, size: int) -> None:
    """A callback may start a call of the group whose call it follows, and wait for it."""
    group = echo_group(policy="all")

    def again(future: Any) -> Tensor:
        second = dist.all_reduce(contribution(rank, seed=1), group=group, async_op=True)
        second.wait()
        return second.result()[0]

    first = dist.all_reduce(contribution(rank), group=group, async_op=True).get_future().then(again)
    assert is_close(first.wait(), size, seed=1)


def run_autograd_and_inference(rank: int, size: int) -> None:
    group = echo_group(policy="all")
    with torch.inference_mode():
        tensor = contribution(rank).view(30, 100).t()  # not contiguous: the result is copied back into it
        dist.all_reduce(tensor, group=group)
    assert is_close(tensor.t().reshape(-1), size)
    leaf = contribution(rank).requires_grad_()
    work = dist.all_reduce(leaf, group=group, async_op=True)
    work.wait()
    assert leaf.requires_grad and leaf.grad_fn is None and is_close(leaf.detach(), size)


def run_profiled(rank: int, size: int) -> None:
    group = echo_group(policy="all")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(contribution(rank), group=group)
    assert "echo::all_reduce" in {event.name for event in profile.events()}


@pytest.mark.parametrize("function", [run_works, run_callback_that_reduces, run_autograd_and_inference, run_profiled])
def test_works(function: Any) -> None:
    run_ranks(function, 3)


# ---- groups ---------------------------------------------------------------------------------------------------------


def run_groups(rank: int, size: int) -> None:
    import echo_pg

    whole = echo_group(policy="all")
    eight_bits = echo_group(policy="all", bits=8, feedback=False)
    some = echo_group([0, 2], policy="all")
    for seed in range(3):
        works = []
        for group in (whole, eight_bits):
            works.append(dist.all_reduce(contribution(rank, seed=seed), group=group, async_op=True))
        if rank != 1:
            tensor = contribution(rank // 2, seed=seed)
            dist.all_reduce(tensor, group=some)
            assert is_close(tensor, 2, seed)
        results = [work.result()[0] for work in works if work.wait()]
        errors = [float((result.float() - exact_sum(size, seed=seed)).norm()) for result in results]
        assert 0 < errors[1] < errors[0] / 8, "8 bits have 17 times the steps of 4 bits"
    assert echo_pg.stats(whole)["calls_quantized"] == 3
    assert echo_pg.stats()["calls_quantized"] == (6 if rank == 1 else 9)
    if rank != 1:
        dist.destroy_process_group(some)
    dist.all_reduce(contribution(rank), group=whole)


def run_again(rank: int, size: int, folder: str) -> None:
    for attempt in range(3):
        store = dist.FileStore(f"{folder}/store{attempt}", size)
        import echo_pg

        options = echo_pg.Options(policy="all", min_bytes=0)
        dist.init_process_group("echo", store=store, rank=rank, world_size=size, pg_options=options)
        tensor = contribution(rank, seed=attempt)
        dist.all_reduce(tensor)
        assert is_close(tensor, size, attempt)
        dist.destroy_process_group()


def test_several_groups_and_subgroups() -> None:
    run_ranks(run_groups, 3)


def test_destroy_and_init_again(tmp_path: Path) -> None:
    run_ranks(run_again, 2, str(tmp_path), backend=None)


# ---- forwarded calls ------------------------------------------------------------------------------------------------


def run_exact(rank: int, size: int) -> dict[str, Any]:
    """Calls that must give bit for bit what Gloo gives, and the reasons that are counted for them."""
    import echo_pg

    group = echo_group(policy="all")
    alone = [echo_group([r], policy="all") for r in range(size)][rank]
    calls: list[tuple[Tensor, Any]] = [
        (torch.arange(10) * (rank + 1), dist.ReduceOp.SUM),
        (contribution(rank), dist.ReduceOp.MAX),
        (contribution(rank), dist.ReduceOp.PRODUCT),
        (contribution(rank).double(), dist.ReduceOp.SUM),
        (contribution(rank).float(), dist.ReduceOp.SUM),
        (torch.empty(0, dtype=torch.bfloat16), dist.ReduceOp.SUM),
        (torch.eye(4).to_sparse() * rank, dist.ReduceOp.SUM),
        (torch.complex(contribution(rank).float(), contribution(rank).float()), dist.ReduceOp.SUM),
    ]
    for tensor, op in calls:
        inner, outer = tensor.clone(), tensor.clone()
        dist.all_reduce(inner, op)
        dist.all_reduce(outer, op, group=group)
        assert torch.equal(inner.to_dense(), outer.to_dense()), (tensor.dtype, op)
    with echo_pg.exact():
        inner, outer = contribution(rank), contribution(rank)
        dist.all_reduce(inner)
        dist.all_reduce(outer, group=group)
        assert torch.equal(inner, outer)
    lonely = contribution(rank)
    dist.all_reduce(lonely, group=alone)
    assert torch.equal(lonely, contribution(rank)) and "group of one rank" in echo_pg.stats(alone)["forwarded"]
    return echo_pg.stats(group)


def test_calls_that_stay_exact() -> None:
    stats = run_ranks(run_exact, 2)[0]
    assert stats["calls_quantized"] == 0 and stats["calls_forwarded"] == 9
    assert {reason: count["calls"] for reason, count in stats["forwarded"].items()} == {
        "dtype int64 not listed": 1, "not a SUM": 2, "dtype float64 not listed": 1, "empty tensor": 1,
        "sparse tensor": 1, "exact()": 1, "dtype float32 not listed": 2,  # torch passes complex tensors on as real ones
    }  # fmt: skip


def run_collectives(rank: int, size: int) -> None:
    """Every other collective, once."""
    import echo_pg

    group = echo_group(policy="all")
    x = torch.full((4,), float(rank))
    dist.broadcast(x, 1, group=group)
    assert x.tolist() == [1.0] * 4
    x = torch.full((4,), float(rank))
    dist.reduce(x, 0, group=group)
    assert rank != 0 or x.tolist() == [3.0] * 4
    outputs = [torch.empty(2) for _ in range(size)]
    dist.all_gather(outputs, torch.full((2,), float(rank)), group=group)
    assert [int(o[0]) for o in outputs] == [0, 1, 2]
    flat = torch.empty(2 * size)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)), group=group)
    assert flat.tolist() == [0, 0, 1, 1, 2, 2]
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((1,), float(rank)), gathered, 0, group=group)
    part = torch.empty(1)
    dist.scatter(part, [torch.full((1,), float(r)) for r in range(size)] if rank == 0 else None, 0, group=group)
    assert part.item() == rank
    dist.reduce_scatter_tensor(part, torch.arange(size).float(), group=group)
    assert part.item() == rank * size
    dist.reduce_scatter(part, list(torch.arange(size).float().view(size, 1)), group=group)
    assert part.item() == rank * size
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.full((size,), float(rank)), group=group)
    assert exchanged.tolist() == [0, 1, 2]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects[2] == {"rank": 2}
    assert echo_pg.stats(group)["other_calls"] >= 10 and echo_pg.stats(group)["calls_forwarded"] == 0


def run_point_to_point_and_brackets(rank: int, size: int) -> None:
    group = echo_group(policy="all")
    right, left = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, torch.full((1,), float(rank)), right, group),
        dist.P2POp(dist.irecv, received, left, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received.item() == left

    backend = group._get_backend(torch.device("cpu"))
    tensor, reference = contribution(rank), contribution(rank)
    dist.all_reduce(reference)
    backend._start_coalescing()
    dist.all_reduce(tensor, group=group, async_op=True)
    backend._end_coalescing().wait()
    assert torch.equal(tensor, reference), "inside a bracket calls stay exact"
    backend._start_coalescing()
    backend._end_coalescing().wait()

    coalesced = {}
    for name, where in ("gloo", dist.group.WORLD), ("echo", group):
        coalesced[name] = torch.stack([contribution(rank, seed=i) for i in range(2)])
        with dist._coalescing_manager(group=where):
            for tensor in coalesced[name]:
                dist.all_reduce(tensor, group=where)
    assert torch.equal(coalesced["gloo"], coalesced["echo"])
    dist.barrier(group=group)
    group.monitored_barrier()


@pytest.mark.parametrize("function", [run_collectives, run_point_to_point_and_brackets])
def test_other_operations(function: Any) -> None:
    run_ranks(function, 3)


# ---- properties, wrappers, training ---------------------------------------------------------------------------------


def run_properties(rank: int, size: int) -> None:
    import echo_pg

    group = echo_group(policy="all")
    backend = group._get_backend(torch.device("cpu"))
    assert type(backend) is echo_pg._C.ProcessGroupEcho and backend.name() == "echo"
    assert (backend.rank(), backend.size()) == (rank, size) and backend.supports_splitting
    with pytest.raises(ValueError, match="no backend for cuda"):
        backend._inner("cuda")
    base = contribution(rank)
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(base[:10].expand(3, 10), group=group)
    with pytest.raises(ValueError, match="float64"):
        echo_pg.all_reduce(base.double(), group)
    with pytest.raises(ValueError, match="meta: device type not supported"):
        echo_pg.all_reduce(base.to("meta"), group)
    dist.all_reduce(base, group=group)
    assert is_close(base, size), "a refused call leaves the group as it was"


def run_debug(rank: int, size: int) -> None:
    import echo_pg

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = echo_group(policy="all")
    tensor = contribution(rank)
    dist.all_reduce(tensor, group=group)
    assert is_close(tensor, size) and echo_pg.stats(group)["calls_quantized"] == 1
    dist.all_reduce(torch.ones(3), group=group)


def run_functional(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = echo_group(policy="all")
    tensor = contribution(rank)
    result = functional.all_reduce(tensor, "sum", group)
    assert is_close(result, size) and torch.equal(tensor, contribution(rank))
    assert functional.all_gather_tensor(tensor, 0, group).numel() == size * tensor.numel()
    assert functional.reduce_scatter_tensor(torch.ones(size), "sum", 0, group).item() == size


def gradients(rank: int, group: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(40, 30, dtype=torch.bfloat16), process_group=group)
    for seed in range(2):
        model.zero_grad()
        model(contribution(rank, 40, seed)).float().square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def run_ddp(rank: int, size: int) -> None:
    import echo_pg

    expected = gradients(rank, dist.group.WORLD)
    group = echo_group(policy="auto")
    for mine, reference in zip(gradients(rank, group), expected, strict=True):
        assert torch.equal(mine, reference)
    assert set(echo_pg.stats(group)["forwarded"]) == {"one-dimensional"}
    quantized = gradients(rank, echo_group(policy="all"))
    assert not torch.equal(quantized[0], expected[0]) and torch.allclose(quantized[0], expected[0], atol=1.0)


@pytest.mark.parametrize("function", [run_properties, run_debug, run_functional, run_ddp])
def test_as_torch_uses_it(function: Any) -> None:
    run_ranks(function, 2)
