"""Groups that span hosts: two hosts of two ranks each, real network namespaces with a virtual cable between them.

They exchange over the wire and give the bytes of one host; groups within a host share memory; a host that drops out is
an error in time on both sides; slow and late links change the time alone; hosts that disagree form no group.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import data
import pytest
import torch
import torch.distributed as dist
from hosts import INTERFACE, Hosts, NoHosts, address, join
from ranks import run_ranks
from reference_group import RefGroup
from test_allreduce import digest
from torch import Tensor

TIMEOUT = 5.0  # seconds, where a host drops out
PULL_AFTER = 0.4  # seconds, after which its cable is pulled where calls are under way
PORT = 29400
RANKS_PER_HOST = 2


@contextlib.contextmanager
def hosts_or_skip(delay: float = 0.0) -> Iterator[Hosts]:
    """Two hosts; a skip that says why where namespaces cannot be made. `ci/test --system` makes sure that they can."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(2, delay=delay))
        except NoHosts as error:
            pytest.skip(f"GROUPS OVER SEVERAL HOSTS ARE NOT TESTED: no network namespaces here: {error}")
        yield made


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip() as made:
        yield made


def start(rank: int, size: int, pids: list[int], timeout: float = 60, **options: Any) -> Any:
    """Move to this rank's host, meet the others over TCP, and make an echo group of all."""
    import echo_pg

    join(pids[rank * len(pids) // size])
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(address(0), PORT, size, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    chosen = echo_pg.Options(**({"policy": "all", "min_bytes": 0} | options))
    return dist.new_group(backend="echo", pg_options=chosen, timeout=limit)


def run_on(hosts: Hosts, function: Any, *arguments: Any, **keywords: Any) -> list[Any]:
    size = hosts.count * RANKS_PER_HOST
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE} | keywords.pop("env", {})
    return run_ranks(function, size, hosts.pids, *arguments, backend=None, env=environment, **keywords)


def inputs(size: int, site: int) -> list[Tensor]:
    return data.contributions("activations", size, 150_001, torch.bfloat16, site=site)


def run_mixed(rank: int, size: int, pids: list[int]) -> dict[str, Any]:
    """A group over both hosts, one of the ranks of each host, and one that pairs ranks of different hosts."""
    import echo_pg

    world = start(rank, size, pids)
    sets = {"world": list(range(size)), "host": [rank // 2 * 2, rank // 2 * 2 + 1], "pair": [rank % 2, rank % 2 + 2]}
    options = echo_pg.Options(policy="all", min_bytes=0)
    groups = {"world": world}
    for name, members in (("host", [[0, 1], [2, 3]]), ("pair", [[0, 2], [1, 3]])):
        made = [dist.new_group(ranks, backend="echo", pg_options=options) for ranks in members]
        groups[name] = made[[rank in ranks for ranks in members].index(True)]
    found: dict[str, Any] = {"hostname": os.uname().nodename}
    for name, group in groups.items():
        digests = []
        for site in range(3):
            tensor = inputs(size, site)[rank]
            dist.all_reduce(tensor, group=group)
            digests.append(digest(tensor))
        stats = echo_pg.stats(group)
        found[name] = (sets[name], digests, stats["fabric"], stats["fabric_reason"])
    return found


def test_groups_over_and_within_hosts_give_the_same_bytes(hosts: Hosts) -> None:
    for found in run_on(hosts, run_mixed):
        for name in ("world", "host", "pair"):
            members, digests, fabric, reason = found[name]
            assert fabric == ("peer" if name == "host" else "wire"), (name, fabric)
            assert ("share no memory (other host" in reason) == (name != "host"), reason
            reference = RefGroup(len(members))
            expected = [reference.all_reduce([inputs(4, site)[m] for m in members]).output for site in range(3)]
            assert digests == [digest(output) for output in expected], (name, members)


def run_options_that_differ(rank: int, size: int, pids: list[int]) -> str:
    try:
        start(rank, size, pids, bits=8 if rank >= RANKS_PER_HOST else 4)
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_hosts_with_different_options_form_no_group(hosts: Hosts) -> None:
    for text in run_on(hosts, run_options_that_differ):
        assert "bits is 4 on rank 0 and 8 on rank 2" in text, text


def run_drop(rank: int, size: int, pids: list[int]) -> tuple[str, float, str, bool]:
    """The second host's cable is pulled between two calls. The error of the next one, and whether the ranks of this
    rank's host can still make a group and use it."""
    import echo_pg

    group = start(rank, size, pids, timeout=TIMEOUT)
    pairs = [[0, 1], [2, 3]]
    options = echo_pg.Options(policy="all", min_bytes=0)
    local = [dist.new_group(ranks, backend="echo", pg_options=options) for ranks in pairs][rank // RANKS_PER_HOST]
    for each in (group, local):
        dist.all_reduce(inputs(size, 0)[rank], group=each)
    # No barrier: one's last messages may still be on the cable when another rank has left it.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"summed/{rank}", "")
    if rank == 2:
        store.wait([f"summed/{each}" for each in range(size)])
        os.system(f"ip link set {INTERFACE} down")
    tensor = inputs(size, 1)[rank]
    before = tensor.clone()
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(tensor, group=group)
    seconds = time.monotonic() - began
    harmless = bool(torch.equal(tensor, before) or tensor.isnan().all())
    with pytest.raises(dist.DistBackendError, match="does not resume"):
        dist.all_reduce(tensor, group=group)
    members = pairs[rank // RANKS_PER_HOST]
    reference = RefGroup(2)
    expected = [reference.all_reduce([inputs(size, site)[m] for m in members]).output for site in (0, 1)]
    again = inputs(size, 1)[rank]
    dist.all_reduce(again, group=local)
    assert digest(again) == digest(expected[1]), "the group within the host goes on"
    return str(caught.value), seconds, echo_pg.stats(local)["fabric"], harmless


def test_a_host_that_drops_out_is_an_error_on_both_sides_in_time(hosts: Hosts) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(hosts.configure, 0, f"link set {INTERFACE} up")
        stack.callback(hosts.configure, 1, f"link set {INTERFACE} up")
        results = run_on(hosts, run_drop, timeout=90)
    for rank, (text, seconds, fabric, harmless) in enumerate(results):
        assert f"rank {rank} of 4: quantized all_reduce number 1" in text, text
        assert harmless, "never a wrong number"
        assert seconds < TIMEOUT + 5, (rank, seconds)
        assert fabric == "peer"


def run_drop_during(
    rank: int, size: int, pids: list[int], repeats: int, folder: str
) -> tuple[str, float, bool, float, int]:
    """The second host's cable is pulled while calls are under way. A call's error, its seconds, whether its tensor is
    harmless, the seconds that ending the group takes, and how many calls came before it."""
    group = start(rank, size, pids, timeout=TIMEOUT)
    tensors = [inputs(size, site)[rank].repeat(repeats) for site in range(2)]
    dist.all_reduce(inputs(size, 0)[rank], group=group)  # connects the group
    meet(folder, "ready", rank, size)
    if rank == 2:
        threading.Timer(PULL_AFTER, os.system, [f"ip link set {INTERFACE} down"]).start()
    text, calls, seconds, harmless = "", 1, 0.0, True
    while not text and calls < 2000:
        tensor = tensors[calls % 2].clone()
        before = tensor.clone()
        began = time.monotonic()
        try:
            dist.all_reduce(tensor, group=group)
            calls += 1
        except dist.DistBackendError as error:
            text = str(error)
            harmless = bool(torch.equal(tensor, before) or tensor.isnan().all())
        seconds = time.monotonic() - began
    ending = time.monotonic()
    dist.destroy_process_group(group)
    ending = time.monotonic() - ending
    meet(folder, "told", rank, size)  # so that no error is about a process that has ended
    return text, seconds, harmless, ending, calls


def meet(folder: str, name: str, rank: int, size: int) -> None:
    """Through files, which no cable carries. Gives up after a minute, when the test has failed anyhow."""
    Path(folder, f"{name}.{rank}").touch()
    deadline = time.monotonic() + 60
    while not all(Path(folder, f"{name}.{each}").exists() for each in range(size)) and time.monotonic() < deadline:
        time.sleep(0.01)


# In one call of 77 MB per rank, which takes longer than until the cable is pulled, and somewhere in a series of small
# ones, as likely as not between the messages of one.
@pytest.mark.parametrize(("repeats", "megabits"), [(256, 200), (1, 0)])
def test_a_host_that_drops_out_during_calls_is_an_error_on_both_sides_in_time(
    hosts: Hosts, repeats: int, megabits: int, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        for host in range(hosts.count):
            stack.callback(hosts.configure, host, f"link set {INTERFACE} up")
            if megabits:
                stack.callback(hosts.configure, host, f"tc qdisc del dev {INTERFACE} root")
        if megabits:
            hosts.limit_rate(megabits)
        results = run_on(hosts, run_drop_during, repeats, str(tmp_path), timeout=90)
    for rank, (text, seconds, harmless, ending, calls) in enumerate(results):
        assert f"rank {rank} of 4: quantized all_reduce number {calls}" in text, text
        others = "23" if rank < RANKS_PER_HOST else "01"
        assert "waiting for" in text and re.search(rf"rank [{others}] reports nothing", text), text
        assert harmless, "never a wrong number"
        assert seconds < TIMEOUT + 5, (rank, seconds)
        assert ending < 5, f"ending the group took {ending:.1f} s"
        assert calls == 1 if megabits else calls > 1, calls


def run_late(rank: int, size: int, pids: list[int]) -> tuple[list[str], float]:
    group = start(rank, size, pids)
    digests = []
    seconds = []
    for site in range(4):
        tensor = inputs(size, site)[rank]
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor, group=group)
        seconds.append(time.monotonic() - began)
        digests.append(digest(tensor))
    return digests, min(seconds[1:])


def test_a_late_cable_changes_the_time_and_not_the_bytes() -> None:
    delay = 0.02
    with hosts_or_skip(delay) as late:
        outcomes = run_ranks(run_late, 2, late.pids, backend=None, env={"GLOO_SOCKET_IFNAME": INTERFACE})
    reference = RefGroup(2)
    expected = [digest(reference.all_reduce(inputs(2, site)).output) for site in range(4)]
    for digests, seconds in outcomes:
        assert digests == expected
        # The records, the codes and the sums' codes follow each other, each at least once across the cable.
        assert 3 * delay < seconds < 3 * delay + 2, seconds


def test_a_narrow_cable_changes_the_time_and_not_the_bytes(hosts: Hosts) -> None:
    """At 20 Mbit/s: no sooner than its bytes fit through, which tells that the limit holds; the codes of four ranks."""
    for host in range(hosts.count):
        hosts.configure(host, f"tc qdisc replace dev {INTERFACE} root tbf rate 20mbit burst 128kb latency 100ms")
    try:
        results = run_on(hosts, run_narrow)
    finally:
        for host in range(hosts.count):
            hosts.configure(host, f"tc qdisc del dev {INTERFACE} root")
    reference = RefGroup(4)
    expected = [reference.all_reduce([t.repeat(4) for t in inputs(4, site)]).output for site in range(2)]
    for digests, seconds, crossing_bytes in results:
        assert digests == [digest(output) for output in expected]
        assert seconds > (crossing_bytes - (128 << 10)) * 8 / 20e6, (seconds, crossing_bytes)


def run_narrow(rank: int, size: int, pids: list[int]) -> tuple[list[str], float, int]:
    """Digests, seconds of the second call, and how many bytes a host sends in it to the other one."""
    import echo_pg

    group = start(rank, size, pids)
    digests, seconds = [], 0.0
    for site in range(2):
        sent = echo_pg.stats(group)["wire_bytes"]
        tensor = inputs(size, site)[rank].repeat(4)
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor, group=group)
        seconds = time.monotonic() - began
        digests.append(digest(tensor))
    sent = echo_pg.stats(group)["wire_bytes"] - sent
    # In the all-to-all each of the two ranks of a host sends two thirds of its half to the other host. At least that.
    return digests, seconds, 2 * sent // 2 * 2 // 3
