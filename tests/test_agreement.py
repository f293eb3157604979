"""Before a group exists: backend names that mean echo, and the agreement of its ranks, tried with threads on one store.
No extension needed."""

import json
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echo_pg import agreement, alias


# ---- names that mean echo
# ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def replaced():
    yield alias.install
    alias.uninstall()


def test_translation(replaced):
    replaced(["nccl"])
    assert alias.translate("nccl") == alias.translate("NCCL") == "echo"
    assert alias.translate("gloo") == "gloo"
    assert alias.translate("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:echo"
    replaced(["gloo"])
    assert alias.translate("cpu:gloo,cuda:nccl") == "echo"


def test_all_functions_are_replaced_everywhere_and_restored(replaced):
    from torch.distributed import device_mesh, distributed_c10d

    functions = ("init_process_group", "new_group", "get_backend")
    before = {name: getattr(dist, name) for name in functions}
    replaced(["gloo"])
    replaced(["gloo"])
    for name in functions:
        held = {getattr(module, name) for module in (dist, distributed_c10d, device_mesh)}
        assert len(held) == 1 and held != {before[name]} and held.pop().__name__ == name
    alias.uninstall()
    assert all(
        getattr(module, name) is before[name] for name in functions for module in (dist, distributed_c10d, device_mesh)
    )


def test_the_wrapped_function_gets_the_new_name_and_the_old_default_time_out(monkeypatch, replaced):
    from torch.distributed import distributed_c10d as c10d

    calls = []

    def init_process_group(backend=None, init_method=None, timeout=None, device_id=None):
        calls.append((backend, timeout))

    # Wherever the alias will put its wrapper, so that both are undone: first the alias, then this.
    for module in (dist, c10d):
        monkeypatch.setattr(module, "init_process_group", init_process_group)
    replaced(["nccl"])
    c10d.init_process_group("nccl")
    c10d.init_process_group(backend="cpu:gloo,cuda:nccl", timeout=timedelta(seconds=7))
    c10d.init_process_group("gloo")
    c10d.init_process_group()
    c10d.init_process_group(device_id=torch.device("cuda", 0))
    nccl_default = c10d._get_default_timeout(c10d.Backend("nccl"))
    unnamed = "echo" if torch._C._get_accelerator().type == "cuda" else None
    assert calls[:3] == [("echo", nccl_default), ("cpu:gloo,cuda:echo", timedelta(seconds=7)), ("gloo", None)]
    assert calls[3][0] == unnamed and calls[4] == ("echo", nccl_default)
    with pytest.raises(TypeError):
        c10d.init_process_group(bogus=1)


# ---- agreement of ranks
# ----------------------------------------------------------------------------------------------------------------
def meet(fingerprints, timeout=20.0, store=None):
    """Each rank's outcome in a group with these fingerprints; None stays away, an Exception withdraws."""
    store = store or dist.HashStore()
    outcomes = [None] * len(fingerprints)

    def run(rank, mine):
        joined = agreement.Agreement(store, rank, len(fingerprints), timedelta(seconds=timeout))
        try:
            if isinstance(mine, Exception):
                joined.withdraw(str(mine))
                outcomes[rank] = "withdrew"
            else:
                joined.reach(mine, timedelta(seconds=timeout))
                outcomes[rank] = "agreed"
        except dist.DistBackendError as error:
            outcomes[rank] = str(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(fingerprints) if pair[1] is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


SAME, OTHER = json.dumps({"echo": "1", "bits": 4}), json.dumps({"echo": "1", "bits": 8})


def test_equal_ranks_agree_again_and_again_on_one_store():
    store = dist.HashStore()
    for _ in range(3):
        assert meet([SAME] * 3, store=store) == ["agreed"] * 3
    assert all("bits is" in text for text in meet([SAME, OTHER, SAME], store=store))
    assert meet([OTHER] * 3, store=store) == ["agreed"] * 3


def test_a_difference_is_shown_on_every_rank_with_both_sides():
    for text in meet([SAME, SAME, OTHER]):
        assert "bits is 4 on rank 0 and 8 on rank 2" in text and SAME in text and OTHER in text


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_stays_away_is_named_within_the_time_out(absent):
    fingerprints = [SAME] * 3
    fingerprints[absent] = None
    for rank, text in enumerate(meet(fingerprints, timeout=1.0)):
        assert rank == absent or (f"1 of 3 ranks did not come (rank {absent})" in text and "time-out 1 s" in text)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_join_tells_the_others_at_once(failing):
    fingerprints = [SAME] * 3
    fingerprints[failing] = ValueError("bits=5 must be 4 or 8")
    for rank, text in enumerate(meet(fingerprints)):
        assert text == "withdrew" if rank == failing else f"rank {failing}: bits=5 must be 4 or 8" in text


@pytest.mark.parametrize("when", ["before the first question", "before the second"])
def test_whoever_took_the_store_with_him_is_named(when):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    asked = []

    def has_exited(introduction):  # a process closes its connections some moments before it has ended
        asked.append(introduction)
        return len(asked) > 3

    watch = agreement.ProcessWatch("rank 1's", has_exited, {0: "rank 0's", 1: "rank 1's"})
    with pytest.raises(
        dist.DistBackendError,
        match=r"rank 1 of 2: this group cannot be created: (rank 1 waited: )?the process of rank 0 has exited; ",
    ):
        if when == "before the first question":
            del server
        joined = agreement.Agreement(client, 1, 2, timedelta(seconds=5), watch)
        del server
        joined.reach(SAME, timedelta(seconds=5))
    assert set(asked) == {"rank 0's"}


def test_a_group_of_one_asks_nobody():
    lonely = agreement.Agreement(dist.HashStore(), 0, 1, timedelta(seconds=1))
    lonely.reach(SAME, timedelta(seconds=1))
    lonely.withdraw("nothing")
