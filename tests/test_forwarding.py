"""What an echo group takes over from its inner backend: its errors, word for word, and the settings that programs give
to a group or change later."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_backend import echo_group

CPU = torch.device("cpu")
c10d = dist.distributed_c10d


def refused_calls(group: Any, size: int) -> dict[str, Callable[[], Any]]:
    """Calls that Gloo refuses on each rank alone, before it talks to others."""
    x, half = torch.ones(4), torch.ones(4, dtype=torch.bfloat16)
    backend = group._get_backend(CPU)
    return {
        "bits of floats": lambda: dist.all_reduce(x, dist.ReduceOp.BAND, group=group),
        "factor": lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0), group=group),
        "unequal shares": lambda: dist.all_to_all_single(x, torch.ones(5), group=group),
        "shape of a gathered list": lambda: dist.all_gather([torch.ones(3)] * size, x, group=group),
        "several dtypes": lambda: group.allreduce_coalesced([x, half]).wait(),
        "unknown root": lambda: group.broadcast(x, 99).wait(),
        "tensor from the backend": lambda: backend.allocate_tensor(4, dtype=torch.float32, device=CPU),
        "memory pool": lambda: backend.mem_allocator,
    }


def run_refused(rank: int, size: int) -> dict[str, tuple[str, str]]:
    groups = {"inner": dist.group.WORLD, "echo": echo_group(policy="all")}
    texts: dict[str, tuple[str, str]] = {}
    for name in refused_calls(groups["inner"], size):
        found = []
        for group in groups.values():
            try:
                refused_calls(group, size)[name]()
                found.append("no error")
            except Exception as error:
                found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        texts[name] = (found[0], found[1])
    return texts


def test_what_the_inner_backend_refuses_is_refused_in_its_words() -> None:
    for texts in run_ranks(run_refused, 2):
        for name, (inner, outer) in texts.items():
            assert inner != "no error", name
            assert inner == outer, name


def inner_timeout(group: Any) -> float:
    return group._get_backend(CPU)._inner("cpu").options._timeout.total_seconds()


def run_timeouts(rank: int, size: int) -> tuple[str, float, str]:
    import echo_pg

    group = dist.new_group(backend="echo", timeout=timedelta(seconds=17))
    assert inner_timeout(group) == 17 and inner_timeout(dist.group.WORLD) == 25
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c10d._set_pg_timeout(timedelta(seconds=1), group)
    assert inner_timeout(group) == 1 and inner_timeout(dist.group.WORLD) == 25
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))  # of NCCL groups, of which there are none
    own = dist.new_group(backend="echo", pg_options=echo_pg.Options(timeout=1), timeout=timedelta(seconds=20))
    assert inner_timeout(own) == 20, "echo's own limit is for echo's own exchange"

    barrier, waited, late = "", 0.0, ""
    if rank == 0:
        try:
            dist.monitored_barrier(own, timeout=timedelta(seconds=1))
        except RuntimeError as error:
            barrier = str(error)
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(4), group=group)
        except RuntimeError as error:
            waited, late = time.monotonic() - began, str(error)
    dist.barrier()
    return barrier, waited, late


def test_time_outs_reach_the_inner_backend() -> None:
    barrier, waited, late = run_ranks(run_timeouts, 2, backend="echo", group_timeout=25)[0]
    assert "Rank 1 failed to pass monitoredBarrier in 1000 ms" in barrier
    assert 0.9 < waited < 15 and "Timed out waiting 1000ms" in late


def run_monitored(rank: int, size: int) -> None:
    group = echo_group([0, 1])
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=5.0, wait_all_ranks=True)
    dist.monitored_barrier(group)
    with pytest.raises(TypeError, match="timeout argument"):
        dist.monitored_barrier(timeout="soon")


def test_monitored_barriers_pass() -> None:
    run_ranks(run_monitored, 3, backend="echo")


def run_late_message(rank: int, size: int) -> float:
    group = echo_group(policy="all", timeout=1.0)
    tensor = torch.zeros(3)
    if rank == 0:
        time.sleep(2.5)
        dist.send(tensor + 7, 1, group=group)
    else:
        dist.recv(tensor, 0, group=group)
    dist.barrier(group)
    return tensor.sum().item()


def test_a_limit_of_echo_is_none_of_messages() -> None:
    """They are Gloo's, and so is their limit, 30 s here."""
    assert run_ranks(run_late_message, 2) == [0.0, 21.0]


def run_reduce_scatter(rank: int, size: int) -> list[tuple[int, str]]:
    """Where echo's group and plain Gloo differ: elements of the result and the form of the call."""
    group, found = echo_group(policy="all"), []
    for elements in 1, 3, 70_001:
        generator = torch.Generator().manual_seed(100 * rank + elements)
        shares = torch.randn(size, elements, generator=generator)
        forms: dict[str, Callable[[torch.Tensor, Any], Any]] = {
            "tensor": lambda out, of, x=shares: dist.reduce_scatter_tensor(out, x.flatten(), group=of),
            "maximum": lambda out, of, x=shares: dist.reduce_scatter_tensor(
                out, x.flatten(), dist.ReduceOp.MAX, group=of
            ),
            "list": lambda out, of, x=shares: dist.reduce_scatter(out, list(x), group=of),
        }
        for name, call in forms.items():
            outcomes = [torch.zeros(elements), torch.zeros(elements)]
            for out, of in zip(outcomes, (group, dist.group.WORLD), strict=True):
                call(out, of)
            if not torch.equal(*outcomes) or not outcomes[0].any():
                found.append((elements, name))
    return found


def test_reduce_scatter_gives_the_bytes_of_gloo() -> None:
    """It is made of an all-reduce, whose order of additions shows from three ranks on."""
    assert run_ranks(run_reduce_scatter, 3) == [[], [], []]
