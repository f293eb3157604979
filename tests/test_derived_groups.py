"""Groups that torch derives from an echo group: split, a mesh over a bound device, shrink, merge; and what torch asks
of ranks outside a new group. Where torch wants an accelerator, it is made to believe in one."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from test_backend import contribution, exact_sum, is_close
from torch import Tensor, nn

import echo_pg
from echo_pg import Options, compatibility, creation, inner_backends

CPU = torch.device("cpu")
ALL = {"policy": "all", "min_bytes": 0}


def backend_of(group: Any) -> Any:
    return group._get_backend(CPU)


def bound_device_of(group: Any) -> torch.device | None:
    return echo_pg._C.testing.bound_device(backend_of(group)._inner("cuda"))


def reduced(group: Any, member: int, size: int, seed: int = 0) -> Tensor:
    """A quantized all-reduce over the group; `member` is this rank's place in it."""
    tensor = contribution(member, seed=seed)
    group.allreduce([tensor]).wait()
    assert is_close(tensor, size, seed) and not torch.equal(tensor.float(), exact_sum(size, seed=seed))
    return tensor


def start_bound(rank: int, size: int, folder: str, **options: Any) -> None:
    """init_process_group("echo", device_id=...) as on a machine with GPUs, with a second Gloo group in NCCL's place."""

    def gloo_for_cuda(place: Any, role: str, inner_options: Any) -> Any:
        return inner_backends.make_gloo(place, role, "cuda")

    inner_backends.make_nccl = gloo_for_cuda
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.device_count = lambda: size
    dist.Backend.backend_capability["echo"] = ["cpu", "cuda"]
    store, device = dist.FileStore(f"{folder}/store", size), torch.device("cuda", rank)
    dist.init_process_group(
        "echo", store=store, rank=rank, world_size=size, device_id=device, pg_options=Options(**options)
    )


# ---- split ----------------------------------------------------------------------------------------------------------


def run_split(rank: int, size: int) -> tuple[bytes, dict[str, Any]]:
    world = dist.group.WORLD
    ranks = [0, 1] if rank < 2 else [3, 2]
    half = world.split_group(ranks, timeout=timedelta(seconds=17), group_name=f"half{rank // 2}", group_desc="tp")
    member = ranks.index(rank) if ranks == [0, 1] else half.rank()
    assert half.size() == 2 and half.group_desc == "tp"
    outcome = reduced(half, member, 2)
    inner = backend_of(half)._inner("cpu").options
    assert inner._timeout == timedelta(seconds=17) and list(inner.global_ranks_in_group) in ([0, 1], [2, 3], [3, 2])
    assert backend_of(half)._config.bits == 8, "the options of the parent"
    reduced(world, rank, size)

    middle = world.split_group([1, 2], opts=Options(bits=4, **ALL), group_name="middle")
    assert (middle is None) == (rank in (0, 3)), "ranks outside get none, and wait for nobody"
    if middle is not None:
        assert backend_of(middle)._config.bits == 4, "the caller's own options"
        reduced(middle, rank - 1, 2, seed=1)
        twin = middle.split_group([0, 1], opts=copy.deepcopy(backend_of(middle).options), group_name="twin")
        assert backend_of(twin)._config.bits == 4
        twin.split_group([0], group_name="alone") if rank == 1 else None
        reduced(twin, rank - 1, 2, seed=2)
    return outcome.view(torch.int16).numpy().tobytes(), backend_of(half)._stats()


def test_split_off_groups_quantize_on_their_own() -> None:
    outcomes = run_ranks(run_split, 4, backend="echo", pg_options=Options(bits=8, **ALL))
    assert outcomes[0][0] == outcomes[1][0] and outcomes[2][0] == outcomes[3][0]
    assert [stats["calls_quantized"] for _, stats in outcomes] == [1] * 4
    assert {stats["group"] for _, stats in outcomes} == {"tp"}


def run_disagreeing_split(rank: int, size: int) -> tuple[str, bool]:
    world, text = dist.group.WORLD, ""
    try:
        world.split_group([0, 1], opts=Options(bits=4 + 4 * rank), group_name="unequal")
    except dist.DistBackendError as error:
        text = str(error)
    with pytest.raises(ValueError, match=r"rank 5 to split off must be in \[0, 2\)"):
        world.split_group([rank, 5], group_name="foreign")
    return text, is_close(reduced(world, rank, size), size)


def test_members_of_a_split_must_agree_and_the_parent_goes_on() -> None:
    for text, works in run_ranks(run_disagreeing_split, 2, backend="echo", pg_options=Options(**ALL)):
        assert "bits is 4 on rank 0 and 8 on rank 1" in text and works


def run_two_device_types(rank: int, size: int) -> int:
    """torch up to 2.13 splits the backend once for each device type that it serves."""
    made = []
    original = creation._create_checked
    creation._create_checked = lambda *arguments: made.append(1) or original(*arguments)  # type: ignore[assignment]
    pair = dist.ProcessGroup(dist.HashStore() if size == 1 else dist.group.WORLD.get_group_store(), rank, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    pair._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        pair._register_backend(torch.device(device), kind, backend_of(dist.group.WORLD))
    for name in ("first", "second"):
        child = pair.split_group([0, 1], group_name=name)
        assert child._get_backend(torch.device("cuda")) is backend_of(child)
        assert type(backend_of(child)).__name__ == "ProcessGroupEcho"
    return len(made)


def test_one_group_serves_all_device_types() -> None:
    assert run_ranks(run_two_device_types, 2, backend="echo") == [2, 2]


# ---- meshes over a bound device -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def run_mesh(rank: int, size: int, folder: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    start_bound(rank, size, folder, min_bytes=0)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    assert dist.get_backend(tp) == dist.get_backend(dp) == "echo"
    assert dist.get_process_group_ranks(tp) == ([0, 1] if rank < 2 else [2, 3])
    assert dist.get_process_group_ranks(dp) == [rank % 2, rank % 2 + 2]

    torch.manual_seed(0)
    model = parallelize_module(Block().bfloat16(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    torch.manual_seed(1 + rank // 2)
    model(torch.randn(32, 64, dtype=torch.bfloat16)).float().square().mean().backward()
    gradient = model.up.weight.grad.to_local()
    average, total = gradient.clone(), [torch.empty_like(gradient) for _ in range(2)]
    dist.all_reduce(average, group=dp)
    dist.all_gather(total, gradient, group=dp)
    assert torch.equal(average, total[0] + total[1]), "gradients over dp stay exact"

    pair = dist.split_group(split_ranks=[[0, 2]], pg_options=Options(bits=8, **ALL), group_desc="pair")
    assert (pair is None) == (rank % 2 == 1)
    if pair is not None:
        reduced(pair, rank // 2, 2)
    return {"tp": echo_pg.stats(tp), "dp": echo_pg.stats(dp)}


def test_a_mesh_of_two_dimensions_over_a_bound_device(tmp_path: Path) -> None:
    for stats in run_ranks(run_mesh, 4, str(tmp_path), backend=None):
        assert (stats["tp"]["group"], stats["tp"]["calls_quantized"]) == ("mesh_tp", 1)
        assert (stats["dp"]["group"], stats["dp"]["calls_quantized"]) == ("mesh_dp", 0)


def run_new_groups_when_bound(rank: int, size: int, folder: str) -> None:
    """Ranks that are not in a new group must neither split anything nor wait."""
    start_bound(rank, size, folder, **ALL)
    device = torch.device("cuda", rank)
    assert bound_device_of(dist.group.WORLD) == device, "device_id reaches the inner backend"
    single = [dist.new_group([member]) for member in range(size)][rank]
    gloo = dist.new_group([0], backend="gloo")
    if rank == 1:
        dist.new_group([1], backend="echo", use_local_synchronization=True)
    assert bound_device_of(single) == bound_device_of(dist.split_group(split_ranks=[[0], [1], [2]])) == device
    assert dist.get_backend(single) == "echo" and (rank == 0) == (gloo != dist.GroupMember.NON_GROUP_MEMBER)
    assert dist.distributed_c10d._get_split_source(dist.group.WORLD) is None
    assert backend_of(dist.group.WORLD).supports_splitting
    reduced(dist.group.WORLD, rank, size)


def test_new_groups_over_a_bound_device_need_their_members_alone(tmp_path: Path) -> None:
    run_ranks(run_new_groups_when_bound, 3, str(tmp_path), backend=None)


# ---- shrink, merge --------------------------------------------------------------------------------------------------


def run_shrink(rank: int, size: int) -> tuple[str, int]:
    if rank == 1:
        return "left", 0
    smaller = dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT if size == 4 else 0)
    assert smaller is dist.group.WORLD and dist.get_world_size() == size - 1
    member = rank - (rank > 1)
    assert dist.get_rank() == member
    tensor = contribution(member)
    dist.all_reduce(tensor)
    assert is_close(tensor, size - 1)
    return dist.get_backend(), echo_pg.stats(smaller)["calls_quantized"]


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch 2.9 has no shrink")
@pytest.mark.parametrize("size", [3, 4])
def test_a_shrunken_group_is_an_echo_group_of_the_others(size: int) -> None:
    assert run_ranks(run_shrink, size, backend="echo", pg_options=Options(**ALL)) == [
        ("left", 0) if rank == 1 else ("echo", 1) for rank in range(size)
    ]


def run_merge(rank: int, size: int) -> int:
    own = [dist.new_group([member], pg_options=Options(bits=8, **ALL)) for member in range(size)][rank]
    store = dist.PrefixStore("merging", dist.group.WORLD.get_group_store())
    merged = own.merge_remote_group(store, size, timedelta(seconds=20), "merged", "all of them")
    assert merged.size() == size and backend_of(merged)._config.bits == 8
    reduced(merged, merged.rank(), size)
    return merged.rank()


def test_groups_merge_into_one() -> None:
    assert sorted(run_ranks(run_merge, 3, backend="echo", pg_options=Options(**ALL))) == [0, 1, 2]


def run_shrink_wrongly(rank: int, size: int) -> None:
    backend_of(dist.group.WORLD).shrink([rank], 0, None)


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch 2.9 has no shrink")
def test_an_excluded_rank_cannot_shrink() -> None:
    with pytest.raises(RankError, match="is to be excluded and must not take part itself"):
        run_ranks(run_shrink_wrongly, 2, backend="echo")


# ---- an NCCL default group, in name alone ---------------------------------------------------------------------------


class FakeNccl:
    """As much of ProcessGroupNCCL as the creator touches; remembers what it was made with."""

    class Options:
        is_high_priority_stream = split_from = split_color = config = None

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    def __init__(self, store: Any = None, rank: int = 0, size: int = 1, options: Any = None) -> None:
        self.options, self.splits = options, []  # type: ignore[var-annotated]

    def _set_sequence_number_for_group(self) -> None: ...

    def perform_nocolor_split(self, device: Any) -> None:
        self.splits.append(device)


@pytest.fixture
def nccl_world(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """A default group that torch's Python takes for an NCCL group bound to a device."""
    world, device = FakeNccl(), torch.device("cuda", 0)
    c10d = dist.distributed_c10d
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: SimpleNamespace(bound_device_id=device))
    monkeypatch.setattr(c10d, "_get_split_source", lambda group: world)
    monkeypatch.setattr(inner_backends, "nccl_class", lambda: FakeNccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return world


def wanted(**changes: Any) -> Any:
    facts = {"store": dist.HashStore(), "group_rank": 0, "group_size": 1, "timeout": timedelta(seconds=5)}
    return SimpleNamespace(**(facts | {"group_id": "9", "global_ranks_in_group": [3]} | changes))


def test_members_split_from_the_group_that_the_others_split(nccl_world: FakeNccl) -> None:
    place = inner_backends.Place(dist.HashStore(), 0, 1, timedelta(seconds=5), "9", [3], split_from=nccl_world)
    mine = FakeNccl.Options(is_high_priority_stream=True)
    inner = {role: inner_backends.make_nccl(place, role, mine).options for role in ("pass", "wire")}
    color = dist.distributed_c10d._process_group_color([3])
    assert (inner["pass"].split_from, inner["pass"].split_color) == (nccl_world, color)
    assert inner["wire"].split_from is None, "made later, by members alone"
    for options in inner.values():
        assert (options._timeout, options.is_high_priority_stream) == (timedelta(seconds=5), True)
    assert mine.split_from is None, "the caller's options stay as they are"
    assert creation._split_source(place) is nccl_world
    default = inner_backends.Place(dist.HashStore(), 0, 1, timedelta(seconds=5), "0", [])
    assert creation._split_source(default) is None


def test_a_failed_creation_releases_the_ranks_that_split(nccl_world: FakeNccl) -> None:
    with pytest.raises(TypeError, match="pg_options must be"):
        creation.create_group(wanted(), 7)
    assert nccl_world.splits == [torch.device("cuda", 0)]
    with pytest.raises(TypeError):
        creation.create_group(wanted(global_ranks_in_group=[]), 7)
    assert len(nccl_world.splits) == 1


def test_options_that_cannot_be_copied_deeply_are_copied_by_hand() -> None:
    class Closed(FakeNccl.Options):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle")

    given = Closed(is_high_priority_stream=True)
    given.config = "as given"
    copied = compatibility.copy_nccl_options(given)
    assert copied is not given and (copied.is_high_priority_stream, copied.config) == (True, "as given")


def test_memory_pools_are_registered_with_the_inner_nccl_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    inner = SimpleNamespace(
        register_mem_pool=lambda pool, symm=False: calls.append((pool, symm)),
        deregister_mem_pool=lambda pool: calls.append((pool,)),
    )

    class Echo:
        register_mem_pool = compatibility._of_inner_nccl("register_mem_pool")
        deregister_mem_pool = compatibility._of_inner_nccl("deregister_mem_pool")

    monkeypatch.setattr(compatibility, "_inner_nccl", lambda group: inner)
    group: Any = Echo()
    group.register_mem_pool("pool", symm=True)
    group.deregister_mem_pool("pool")
    assert calls == [("pool", True), ("pool",)]
    monkeypatch.setattr(compatibility, "_inner_nccl", lambda group: None)
    assert not hasattr(group, "register_mem_pool"), "as over a backend that has none"
