"""What happens when ranks fail, differ or stay away: a clear error on every rank within the time-out, at every later
call too, and a new group that works."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from test_backend import contribution, echo_group, is_close

TIMEOUT = 4.0  # seconds, of the groups under test

both_fabrics = pytest.mark.parametrize("fabric", ["wire", "peer"])


def failing_group(**options: Any) -> Any:
    import echo_pg

    settings: dict[str, Any] = {"min_bytes": 0, "policy": "all"} | options
    return dist.new_group(backend="echo", timeout=timedelta(seconds=TIMEOUT), pg_options=echo_pg.Options(**settings))


def error_of(call: Any) -> tuple[str, float]:
    """The text of the DistBackendError that a call must raise, and how long it took."""
    start = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the call succeeded")


def check_that_it_stays_faulted(group: Any, first: str) -> None:
    import echo_pg

    for call in (
        lambda: dist.all_reduce(contribution(0), group=group),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), group=group),
        lambda: dist.barrier(group=group),
    ):
        text, seconds = error_of(call)
        assert "does not resume" in text and seconds < 1, text
        assert first.split("failed")[0].strip() in text, "the first failure must be named"
    assert echo_pg.stats(group)["fault"]
    dist.destroy_process_group(group)


def check_that_a_new_group_works(rank: int, size: int) -> None:
    group = failing_group()
    tensor = contribution(rank)
    dist.all_reduce(tensor, group=group)
    assert is_close(tensor, size)


def run_mismatch(rank: int, size: int, what: str, fabric: str) -> str:
    group = failing_group(fabric=fabric)
    dist.all_reduce(contribution(rank), group=group)
    tensor = contribution(rank)
    if rank == 1:
        tensor = tensor[:2000] if what == "numel" else tensor.half()
    before = tensor.clone()
    text, seconds = error_of(lambda: dist.all_reduce(tensor, group=group))
    unchanged = torch.equal(tensor, before)
    assert unchanged or (fabric == "peer" and tensor.isnan().all()), "never a wrong number"
    assert seconds < TIMEOUT
    check_that_it_stays_faulted(group, text)
    check_that_a_new_group_works(rank, size)
    return text


@pytest.mark.parametrize(("what", "named"), [("numel", ["2000", "3000"]), ("dtype", ["float16", "bfloat16"])])
@both_fabrics
def test_ranks_that_disagree(what: str, named: list[str], fabric: str) -> None:
    for rank, text in enumerate(run_ranks(run_mismatch, 3, what, fabric)):
        assert f"rank {rank} of 3" in text and "all_reduce number 1" in text, text
        if fabric == "wire":
            assert "disagree" in text and all(name in text for name in named), text
        else:
            assert "another call" in text, text


def run_passes_that_differ(rank: int, size: int, fabric: str) -> str:
    import echo_pg

    group = failing_group(fabric=fabric)
    dist.all_reduce(contribution(rank), group=group)
    if rank == 0:
        echo_pg.new_pass("forward", group)
    return error_of(lambda: dist.all_reduce(contribution(rank), group=group))[0]


@both_fabrics
def test_a_pass_that_only_some_ranks_start(fabric: str) -> None:
    for text in run_ranks(run_passes_that_differ, 2, fabric):
        assert ("first site" if fabric == "wire" else "another call") in text, text


def run_absent(rank: int, size: int, first_call: bool, fabric: str) -> tuple[str, float]:
    """Rank 1 never comes to the call; the others wait for it for the time-out."""
    group = failing_group(fabric=fabric)
    if not first_call:
        dist.all_reduce(contribution(rank), group=group)
    if rank == 1:
        time.sleep(2.5 * TIMEOUT)
        return "", 0.0
    outcome = error_of(lambda: dist.all_reduce(contribution(rank), group=group))
    check_that_it_stays_faulted(group, outcome[0])
    return outcome


@pytest.mark.parametrize("first_call", [True, False])
@both_fabrics
def test_a_rank_that_never_comes(first_call: bool, fabric: str) -> None:
    results = run_ranks(run_absent, 3, first_call, fabric, timeout=60)
    for text, seconds in (results[0], results[2]):
        assert "all_reduce number" in text, text
        assert seconds < 2 * TIMEOUT, f"{seconds} s: {text}"


def run_killed(rank: int, size: int, fabric: str) -> tuple[str, float]:
    group = failing_group(fabric=fabric)
    dist.all_reduce(contribution(rank), group=group)
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = error_of(lambda: dist.all_reduce(contribution(rank), group=group))
    check_that_it_stays_faulted(group, text)
    return text, seconds


@both_fabrics
def test_a_rank_that_is_killed(fabric: str) -> None:
    results = run_ranks(run_killed, 3, fabric, check=False)
    assert isinstance(results[1], RankError) and "-9" in str(results[1])
    for text, seconds in (results[0], results[2]):
        assert "exchange" in text and seconds < TIMEOUT, (text, seconds)


def stop_for(seconds: float) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def run_stopped(rank: int, size: int) -> tuple[str, float]:
    """Rank 1 lives but does not move, until long after the others have given up."""
    group = failing_group(fabric="peer")
    dist.all_reduce(contribution(rank), group=group)
    if rank == 1:
        stop_for(TIMEOUT + 2)
    outcome = error_of(lambda: dist.all_reduce(contribution(rank), group=group))
    check_that_it_stays_faulted(group, outcome[0])
    return outcome


def test_a_rank_that_is_stopped() -> None:
    results = run_ranks(run_stopped, 3)
    for rank in (0, 2):
        text, seconds = results[rank]
        assert f"rank 1 did not come within {TIMEOUT * 1000:.0f} ms" in text, text
        assert TIMEOUT <= seconds < TIMEOUT + 5, (text, seconds)
    assert "rank 1 did not come within" in results[1][0], results[1]


def run_local_failure(rank: int, size: int, fabric: str) -> tuple[str, float]:
    """Rank 0 cannot have its state; the others must notice before the time-out."""
    group = failing_group(fabric=fabric)
    dist.all_reduce(contribution(rank), group=group)
    # With a state of 128 MiB: what malloc has set aside for the allocations of threads is 64 MiB at a time.
    tensor = torch.zeros(1 << 26, dtype=torch.bfloat16)
    if rank == 0:
        import resource

        limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + (1 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    return error_of(lambda: dist.all_reduce(tensor, group=group))


@both_fabrics
def test_memory_that_only_one_rank_lacks(fabric: str) -> None:
    results = run_ranks(run_local_failure, 2, fabric)
    assert "int8" in results[0][0] and "bytes" in results[0][0], results[0]
    assert results[1][1] < TIMEOUT, results[1]


def run_half_quantized(rank: int, size: int, fabric: str, diagnostics: bool) -> tuple[str, float]:
    """Rank 0 quantizes a call that rank 1 forwards."""
    import echo_pg

    group = failing_group(fabric=fabric, diagnostics=diagnostics)
    dist.all_reduce(contribution(rank), group=group)
    start = time.monotonic()
    try:
        if rank == 0:
            dist.all_reduce(contribution(rank), group=group)
        else:
            with echo_pg.exact():
                dist.all_reduce(contribution(rank), group=group)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the call succeeded")


@pytest.mark.parametrize("diagnostics", [False, True])
@both_fabrics
def test_a_call_that_only_some_ranks_quantize(fabric: str, diagnostics: bool) -> None:
    """Both decisions are named: at the time-out, or at once where plans are compared."""
    for rank, (text, seconds) in enumerate(run_ranks(run_half_quantized, 2, fabric, diagnostics)):
        assert f"rank {rank} of 2" in text and f"rank {1 - rank}" in text, text
        if diagnostics:
            assert "a quantized all_reduce of [3000] bfloat16" in text, text
            assert "an exact all_reduce of [3000] bfloat16 (exact())" in text and seconds < 1, (text, seconds)
        else:
            assert "quantized all_reduce number 1" in text and "exact all_reduce number 0" in text, text
            assert TIMEOUT <= seconds < TIMEOUT + 5, (text, seconds)


def run_forwarded(rank: int, size: int) -> tuple[str, float]:
    """Rank 1 is killed where the others wait for it in a call that is not quantized."""
    import echo_pg

    group = failing_group()
    with echo_pg.exact():
        dist.all_reduce(contribution(rank), group=group)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return error_of(lambda: dist.all_reduce(contribution(rank), group=group))


def test_a_killed_rank_is_named_by_forwarded_calls() -> None:
    results = run_ranks(run_forwarded, 3, check=False)
    for rank in (0, 2):
        text, seconds = results[rank]
        assert f"rank {rank} of 3: exact all_reduce number 1 (3000 elements, bfloat16; exact())" in text, text
        assert "the process of rank 1 has exited" in text and seconds < 5, (text, seconds)


def run_death_while_connecting(rank: int, size: int, step: str) -> tuple[str, float]:
    """Rank 1 agrees to the new group, and ends before it connects, or before it knows that the others have."""
    from echo_pg import inner_backends

    if rank == 1:
        setattr(inner_backends, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    try:
        failing_group(timeout=60)
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the group was created")


@pytest.mark.parametrize("step", ["make_gloo", "_meet"])
def test_a_rank_that_ends_while_groups_connect(step: str) -> None:
    results = run_ranks(run_death_while_connecting, 4, step, check=False)
    for rank in (0, 2, 3):
        text, seconds = results[rank]
        assert f"rank {rank} of 4" in text and "cannot be created" in text and seconds < 5, (text, seconds)
        assert "the process of rank 1 has exited" in text, text


def run_leaving_at_once(rank: int, size: int) -> float:
    """Rank 0 is slow to see that it is connected; the others end their processes as soon as they have the group.
    Returns when rank 0 was connected, and when the others had the group."""
    gloo_class, connected = dist.ProcessGroupGloo, []

    def slow(*arguments: Any, **keywords: Any) -> Any:
        gloo = gloo_class(*arguments, **keywords)
        time.sleep(1)
        connected.append(time.monotonic())
        return gloo

    if rank == 0:
        dist.ProcessGroupGloo = slow
    failing_group()
    return connected[0] if rank == 0 else time.monotonic()


def test_ranks_have_a_group_when_all_are_connected() -> None:
    first, *others = run_ranks(run_leaving_at_once, 3)
    assert min(others) > first


def run_stop_while_connecting(rank: int, size: int, first_call: bool) -> tuple[str, float]:
    """Rank 1 stops when Gloo is about to connect the new group, or its exchange in the first call. Whether Gloo then
    waits for it five times its time-out depends on its ports; here it does."""
    from echo_pg import inner_backends

    group = failing_group(fabric="wire") if first_call else None

    def stop_and_give_up(*_: Any) -> None:
        stop_for(TIMEOUT + 5)
        raise dist.DistBackendError("too late")

    if rank == 1:
        inner_backends.make_gloo = stop_and_give_up  # type: ignore[assignment]
    else:
        dist.ProcessGroupGloo = lambda *_, timeout: time.sleep(5 * timeout.total_seconds())
    return error_of(lambda: dist.all_reduce(contribution(rank), group=group) if first_call else failing_group())


@pytest.mark.parametrize("first_call", [False, True])
def test_a_rank_that_stops_while_groups_connect(first_call: bool) -> None:
    results = run_ranks(run_stop_while_connecting, 3, first_call)
    for rank in (0, 2):
        text, seconds = results[rank]
        assert f"rank {rank} of 3" in text and "cannot be created" in text, text
        assert f"timed out after {TIMEOUT:g} s" in text and "rank 1 reports nothing" in text, text
        assert TIMEOUT <= seconds < TIMEOUT + 5, (text, seconds)


def run_failure_in_the_vote(rank: int, size: int, step: str) -> tuple[str, float]:
    from echo_pg import build

    group = failing_group(fabric="peer", timeout=60)
    if rank == 1:
        build.extension().testing.fail_at(group._get_backend(torch.device("cpu")), step, action="throw")
    return error_of(lambda: dist.all_reduce(contribution(rank), group=group))


@pytest.mark.parametrize("step", ["created", "mapped"])
def test_a_failure_in_the_vote_reaches_all(step: str) -> None:
    for text, seconds in run_ranks(run_failure_in_the_vote, 3, step):
        assert "rank 1" in text and "an exception that a test asked for" in text and seconds < 5, (text, seconds)


def run_wait_limit(rank: int, size: int, fabric: str) -> None:
    """wait() may be given less than the group's time-out; the call goes on."""
    group = failing_group(fabric=fabric)
    dist.all_reduce(contribution(rank), group=group)
    if rank == 1:
        time.sleep(1.5)
    work = dist.all_reduce(contribution(rank), group=group, async_op=True)
    if rank == 0:
        text, seconds = error_of(lambda: work.wait(timedelta(seconds=0.3)))
        assert "it goes on" in text and seconds < 1, (text, seconds)
    work.wait()
    assert is_close(work.result()[0], size)


@both_fabrics
def test_a_wait_with_its_own_limit(fabric: str) -> None:
    run_ranks(run_wait_limit, 2, fabric)


def run_abort(rank: int, size: int, fabric: str) -> None:
    group = failing_group(fabric=fabric)
    dist.all_reduce(contribution(rank), group=group)
    if rank == 0:
        work = dist.all_reduce(contribution(rank), group=group, async_op=True)
        behind = dist.all_reduce(contribution(rank), group=group, async_op=True)
        start = time.monotonic()
        group._get_backend(torch.device("cpu")).abort()
        assert time.monotonic() - start < TIMEOUT / 2, "abort() must not wait for peers"
        assert "aborted" in error_of(behind.wait)[0]
        error_of(work.wait)
        error_of(lambda: dist.all_reduce(contribution(rank), group=group))
    else:
        time.sleep(1)


@both_fabrics
def test_abort_does_not_wait(fabric: str) -> None:
    run_ranks(run_abort, 2, fabric)


def run_leave_open(rank: int, size: int, fabric: str) -> None:
    """The process ends with a call under way and the group not destroyed; it must end all the same."""
    group = echo_group(policy="all", fabric=fabric)
    dist.all_reduce(contribution(rank), group=group)
    if rank == 0:
        run_leave_open.kept = dist.all_reduce(contribution(rank), group=group, async_op=True)  # type: ignore[attr-defined]


@both_fabrics
def test_ending_with_a_call_under_way(fabric: str) -> None:
    start = time.monotonic()
    run_ranks(run_leave_open, 2, fabric, timeout=40)
    assert time.monotonic() - start < 30
