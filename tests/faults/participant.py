"""One rank's part in an injection: groups, calls, the fault if it is the victim, and afterwards a group that works."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from held import held
from injections import CALLS, DEVICE_STEPS, HOLD, LONG_TIMEOUT, PATIENCE, STEPS, TIMED_CALLS, Injection

# In an error of which Gloo knows nothing.
GLOO_WAITS_ON = re.compile(r"(waiting for the [^:;]*|failed): the process of rank \d+ has exited")


@dataclass
class Outcome:
    """What one rank saw: its first error, after how many right results and seconds, and what went wrong in the test's
    eyes."""

    pid: int
    text: str = ""
    seconds: float = 0.0
    right: int = 0
    problems: list[str] = field(default_factory=list)
    diary: Path = Path()

    def begin(self, doing: str) -> None:
        """Written down before it is done, for a rank that never gets to return this."""
        self.diary.write_text(json.dumps({"doing": doing, "since": time.monotonic()}))


def diary_of(folder: str, rank: int) -> Path:
    return Path(folder, f"diary.{rank}")


def contribution(rank: int, numel: int, call: int, it: Injection) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(numel, generator=generator).to(getattr(torch, it.dtype)).to(it.device)


def echo_group(it: Injection, fabric: str, timeout: float, ranks: list[int] | None = None, bits: int = 0) -> Any:
    import echo_pg

    options = echo_pg.Options(
        policy="all", min_bytes=0, fabric=fabric, group_size=1024, bits=bits or it.bits, workspace_bytes=4 << 20,
        timeout=timeout, residual=it.residual, diagnostics=it.diagnostics, allow_shared_gpu=it.device == "cuda",
    )  # fmt: skip
    return dist.new_group(
        ranks,
        backend="echo",
        pg_options=options,
        timeout=timedelta(seconds=timeout),
        use_local_synchronization=ranks is not None,
    )


def call_numel(it: Injection, call: int) -> int:
    if it.is_updated_later:
        return it.numel
    return it.numel - 1024 * call  # no two calls alike, so that a rank in another one shows


def all_reduce(tensor: torch.Tensor, group: Any, exact: bool) -> None:
    import echo_pg

    with echo_pg.exact() if exact else contextlib.nullcontext():
        dist.all_reduce(tensor, group=group)
    if tensor.is_cuda:
        torch.cuda.synchronize()


def expected_results(rank: int, it: Injection) -> tuple[list[torch.Tensor], Any]:
    """Right to the bit: from the other fabric on CPU, which computes the same, or, forwarded, from Gloo. And the group
    that computed them: a victim that is struck while it makes another one is known from it."""
    group = None if it.forwarded else echo_group(it, "wire" if it.fabric == "peer" else "peer", LONG_TIMEOUT)
    results = [contribution(rank, call_numel(it, call), call, it).cpu() for call in range(CALLS)]
    for tensor in results:
        dist.all_reduce(tensor, group=group)
    return results, group


def wake_the_victim(rank: int, it: Injection, folder: str) -> None:
    """The first of the others wakes a stopped process, when all of them have their error."""
    Path(folder, f"done.{rank}").touch()
    others = [other for other in range(it.size) if other != it.victim]
    if it.action != "stop" or rank != others[0]:
        return
    deadline = time.monotonic() + it.timeout + 2 * PATIENCE
    while not all(Path(folder, f"done.{other}").exists() for other in others) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(Path(folder, f"pid.{it.victim}").read_text())

    def wake() -> None:  # again and again: a timer may stop it later than this
        for _ in range(40):
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.25)

    threading.Thread(target=wake, daemon=True).start()


def strike(action: str) -> None:
    """End or stop this process."""
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "exit":
        os._exit(3)


def victims_call(it: Injection, call: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with which the victim calls, where that is its fault; where it is to be struck, it is."""
    if call != it.call:
        return tensor
    if it.action == "throw" and it.stage in ("before", "forwarded"):
        raise RuntimeError("the program of this rank fails")
    if it.stage == "before":
        strike(it.action)
    if it.timed and it.stage != "creating":
        threading.Timer(it.after, strike, [it.action]).start()
    if it.stage == "waiting":
        threading.Timer(HOLD / 2, strike, [it.action]).start()
    if it.action == "late":
        time.sleep(it.timeout + 1.5)
    if it.action == "size":
        return tensor[: tensor.numel() - 2048].clone()
    if it.action == "dtype":
        return tensor.to(torch.float16 if tensor.dtype == torch.bfloat16 else torch.bfloat16)
    if it.action == "shape":
        return tensor.view(-1, 16)
    return tensor


def error_of(tensor: torch.Tensor, group: Any, exact: bool) -> str:
    """The error of an all-reduce, empty if there is none. On devices the call after it tells."""
    try:
        all_reduce(tensor, group, exact)
        if tensor.is_cuda and tensor.isnan().any():
            all_reduce(tensor.clone(), group, exact)
            return "a device delivered NaN and no error"
    except dist.DistBackendError as error:
        return str(error)
    return ""


def is_right(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(tensor.cpu().view(-1).view(torch.int16), expected.view(torch.int16))


def make_calls(rank: int, it: Injection, groups: list[Any], expected: list[torch.Tensor], outcome: Outcome) -> None:
    """Until the first error. One call more than the fault needs: some faults show only in the next one."""
    import echo_pg

    victim = rank == it.victim
    # Who is struck in destroying the group gets there before the others are done.
    for number in range(TIMED_CALLS if it.timed else CALLS if victim and it.stage == "closing" else CALLS + 1):
        call = number % CALLS if it.timed else number
        if number == CALLS or (it.timed and call == 0):
            for group in groups:
                echo_pg.new_pass("forward", group)
        if victim and call == it.call and it.action in ("skip", "skip the last"):
            continue
        if victim and call == CALLS and it.action == "skip the last":
            return
        tensor = contribution(rank, call_numel(it, call), call, it)
        exact = it.forwarded
        if victim:
            tensor = victims_call(it, number, tensor)
            exact = exact or (it.action == "forward" and call == it.call)
        elif it.stage == "waiting" and call == it.call:
            time.sleep(HOLD)
        before = tensor.clone()
        outcome.begin(f"call {number}")
        start = time.monotonic()
        turn = groups if not (victim and it.action == "order" and call == it.call) else groups[::-1]
        for group in turn:
            outcome.text = error_of(tensor, group, exact)
            if outcome.text:
                break
        outcome.seconds = time.monotonic() - start
        if outcome.text:
            right = call < CALLS and tensor.numel() == expected[call].numel() and is_right(tensor, expected[call])
            if not (tensor.isnan().all() or torch.equal(tensor, before) or right or exact):
                outcome.problems.append("a tensor that is neither NaN nor as it was nor right")
            return
        if call < CALLS and it.action != "order":
            if is_right(tensor, expected[call]):
                outcome.right += 1
            else:
                outcome.problems.append(f"a wrong result of call {call}")


def check_that_it_stays_failed(rank: int, it: Injection, group: Any, outcome: Outcome) -> None:
    forwards = it.forwarded or (it.action == "forward" and rank == it.victim)
    if forwards and not it.diagnostics:
        return  # the inner backend's own failure
    start = time.monotonic()
    text = error_of(contribution(rank, 3000, 0, it), group, False)
    if "does not resume" not in text or time.monotonic() - start > 1:
        outcome.problems.append(f"a failed group answered: {text!r}")


def check_new_group(rank: int, it: Injection, outcome: Outcome, folder: str) -> None:
    """A group of those who live, over the old rendezvous where that lives, works."""
    alive = [other for other in range(it.size) if not (it.ends_process and other == it.victim)]
    if it.store == "rank 0" and it.victim == 0:
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/again", len(alive))
        dist.init_process_group(
            "gloo", store=store, rank=alive.index(rank), world_size=len(alive), timeout=timedelta(seconds=30)
        )
        members = None
    else:
        members = alive
    group = echo_group(it, "auto", 30.0, members)
    tensor = contribution(rank, 3000, 9, it)
    all_reduce(tensor, group, False)
    exact = sum(contribution(other, 3000, 9, it).float() for other in alive)
    # Two quantizations to 2^bits levels of groups that span less than 12 per rank.
    if not (tensor.cpu().float() - exact.cpu()).abs().max() < (len(alive) + 1) * len(alive) * 12 / (2**it.bits - 1):
        outcome.problems.append("a wrong result of the new group")
    dist.destroy_process_group(group)


def run_injection(rank: int, size: int, it: Injection, folder: str, port: int) -> Outcome:
    """Called on every rank. A rank that ends by the fault returns nothing."""
    from echo_pg import build

    if it.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    outcome = Outcome(os.getpid(), diary=diary_of(folder, rank))
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))
    store = make_store(rank, size, it, folder, port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    expected, twin = expected_results(rank, it)
    dist.barrier()
    before = held()
    victim = rank == it.victim
    if victim and it.stage == "creating":
        threading.Timer(it.after, strike, [it.action]).start()
    groups: list[Any] = []
    outcome.begin("making the group")
    start = time.monotonic()
    try:
        if it.action == "throw" and it.stage == "creating" and victim:
            dist.new_group(backend="echo", pg_options="no options")
        bits = 4 if it.action == "bits" and victim else it.bits
        groups = [echo_group(it, it.fabric, it.timeout, None, bits) for _ in range(2 if it.action == "order" else 1)]
    except (dist.DistBackendError, TypeError) as error:
        outcome.text, outcome.seconds = str(error), time.monotonic() - start
    if twin is not None:
        dist.destroy_process_group(twin)
        twin = None
    if groups and victim and it.stage in STEPS + DEVICE_STEPS:
        build.extension().testing.fail_at(
            groups[0]._get_backend(torch.device(it.device)), it.stage, call=it.call, tile=it.tile, action=it.action
        )
    if groups:
        try:
            make_calls(rank, it, groups, expected, outcome)
        except RuntimeError as error:
            outcome.text = str(error)
            time.sleep(it.timeout + PATIENCE)  # its program handles it and lives on
        if outcome.text and "this rank fails" not in outcome.text:
            check_that_it_stays_failed(rank, it, groups[-1 if it.action == "order" and victim else 0], outcome)
    outcome.begin("ending the group")
    ending = time.monotonic()
    while groups:
        dist.destroy_process_group(groups.pop())
    if it.ends_process and time.monotonic() - ending > PATIENCE:
        outcome.problems.append(f"the end of the group took {time.monotonic() - ending:.1f} s")
    if not victim:
        wake_the_victim(rank, it, folder)
    try:
        outcome.begin("going on after the fault")
        finish(rank, it, outcome, before, folder)
    except Exception:  # it must not hide what this rank saw of the fault
        outcome.problems.append(f"it could not go on after the fault: {traceback.format_exc()}")
    return outcome


def finish(rank: int, it: Injection, outcome: Outcome, before: Counter[str], folder: str) -> None:
    """Nothing is left, and life goes on."""
    deadline = time.monotonic() + 3.0  # threads that nobody waits for close what they held
    while (grown := held() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    if it.device == "cuda":
        grown = Counter()  # what a failed group maps on the device stays, since a kernel may still use it
        if (torch.ones(1, device="cuda") + 1).item() != 2:
            outcome.problems.append("the device does not work any more")
    if it.stage == "creating" or "connections of all ranks" in outcome.text or GLOO_WAITS_ON.search(outcome.text):
        # What Gloo opened to connect to a process that ended or stopped meanwhile stays until it gives up, and so does
        # what it still waits in because it did not notice that a process had ended.
        grown = Counter({name: count for name, count in grown.items() if "/dev/shm" in name})
    if grown:
        outcome.problems.append(f"left open: {dict(grown)}")
    check_new_group(rank, it, outcome, folder)


def make_store(rank: int, size: int, it: Injection, folder: str, port: int) -> Any:
    if it.store == "file":
        return dist.FileStore(f"{folder}/meet", size)
    if it.store == "launcher":
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (path := Path(folder, "port.new")).write_text(str(server.port))
        path.rename(Path(folder, "port"))
        return server
    while not Path(folder, "port").exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(Path(folder, "port").read_text()), is_master=False, wait_for_workers=False)
