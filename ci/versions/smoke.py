"""What must hold on every version of torch, in half a minute: two ranks, on GPUs of their own if there are two, else on
the CPU.

    python ci/versions/smoke.py       tests the echo_pg that is installed; prints a line per check, exits with 1 at the
                                      first that fails
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from ranks import run_ranks
from reference_group import RefGroup
from regions import Reduce
from torch import Tensor, nn

SIZE = 2
NUMEL = 5000  # no multiple of a quantization group
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8))


def contributions(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """One per rank, the same on all."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator).to(dtype) for _ in range(SIZE)]


def echo_group(**options: Any) -> Any:
    import echo_pg

    return dist.new_group(backend="echo", pg_options=echo_pg.Options(**({"policy": "all", "min_bytes": 0} | options)))


def check_tensor_parallel(rank: int, device: torch.device) -> None:
    """Unmodified DTensor code on a DeviceMesh; the sum of its forward pass is the reference's. The first of the checks:
    no all-reduce of the default group has gone before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import echo_pg

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    model = model.to(device, torch.bfloat16)
    x = torch.randn(32, 64).to(device, torch.bfloat16)
    up, down = (model[i].weight.detach().chunk(SIZE, dim) for i, dim in ((0, 0), (2, 1)))
    inner = [torch.relu(nn.functional.linear(x, shard)) for shard in up]
    partial = [nn.functional.linear(h, shard.contiguous()) for h, shard in zip(inner, down, strict=True)]
    expected = RefGroup(SIZE).all_reduce([p.reshape(-1).cpu() for p in partial]).output
    mesh = init_device_mesh(device.type, (SIZE,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x.requires_grad_()
    y = model(x)
    assert same_bytes(y, expected)
    y.float().sum().backward()
    passes = echo_pg.stats(dist.group.WORLD)["passes"]
    assert (passes["forward"], passes["backward"]) == (1, 1), passes

    tp = init_device_mesh(device.type, (1, SIZE), mesh_dim_names=("dp", "tp")).get_group("tp")
    assert dist.get_backend(tp) == "echo"
    y = torch.ones(4, device=device)
    dist.all_reduce(y, group=tp)
    assert y.tolist() == [SIZE] * 4


def check_quantized(rank: int, device: torch.device) -> None:
    """Two passes of three sites in each dtype, over each fabric: bytes of the reference."""
    import echo_pg

    for fabric in "wire", "peer":
        group = echo_group(fabric=fabric, dtypes=("float32", "bfloat16", "float16"))
        reference = RefGroup(SIZE)
        for seed in range(2):
            echo_pg.new_pass("forward", group)
            reference.new_pass("forward")
            for dtype in DTYPES * 3:
                parts = contributions(seed, dtype)
                mine = parts[rank].to(device, copy=True)
                dist.all_reduce(mine, group=group)
                assert same_bytes(mine, reference.all_reduce(parts).output), (fabric, dtype, seed)
        stats = echo_pg.stats(group)
        assert (stats["calls_quantized"], stats["fabric"]) == (18, fabric), stats
        dist.destroy_process_group(group)


def check_forwarded(rank: int, device: torch.device) -> None:
    import echo_pg

    exact, group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo"), echo_group()
    cases = [(torch.bfloat16, dist.ReduceOp.MAX), (torch.float64, dist.ReduceOp.SUM), (torch.int64, dist.ReduceOp.SUM)]
    for dtype, op in cases:
        one = contributions(0)[rank].to(device, dtype)
        other = one.clone()
        dist.all_reduce(one, op, group=exact)
        dist.all_reduce(other, op, group=group)
        assert same_bytes(one, other), (dtype, op)
    with echo_pg.exact():
        one = contributions(0)[rank].to(device)
        other = one.clone()
        dist.all_reduce(one, group=exact)
        dist.all_reduce(other, group=group)
        assert same_bytes(one, other)
    stats = echo_pg.stats(group)
    assert (stats["calls_quantized"], stats["calls_forwarded"]) == (0, 4), stats["forwarded"]


def check_works(rank: int, device: torch.device) -> None:
    group, sites = echo_group(), [contributions(seed) for seed in range(3)]
    tensors = [parts[rank].to(device, copy=True) for parts in sites]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    # Calls in flight together have lanes, and so states, of their own: each is a first site.
    for work, tensor, parts in reversed(list(zip(works, tensors, sites, strict=True))):
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert work.wait() and (device.type == "cuda" or work.is_completed())
        expected = RefGroup(SIZE).all_reduce(parts).output
        assert same_bytes(tensor, expected) and same_bytes(doubled.wait(), expected * 2)


def check_collectives(rank: int, device: torch.device) -> None:
    """Everything that is forwarded, under the names of this torch."""
    import torch.distributed._functional_collectives as functional

    group = echo_group()
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    mine, all_ranks = torch.full((3,), float(rank), device=device), torch.arange(SIZE, device=device).float()
    x = mine.clone()
    dist.broadcast(x, 1, group=group)
    assert x.tolist() == [1.0] * 3
    gathered = torch.empty(3 * SIZE, device=device)
    gather(gathered, mine, group=group)
    assert gathered.tolist() == [0, 0, 0, 1, 1, 1]
    part = torch.empty(1, device=device)
    scatter(part, all_ranks.clone(), group=group)
    assert part.item() == SIZE * rank
    exchanged = torch.empty(SIZE, device=device)
    dist.all_to_all_single(exchanged, mine[:SIZE].contiguous(), group=group)
    assert exchanged.tolist() == [0, 1]
    lists = [torch.empty(3, device=device) for _ in range(SIZE)]
    dist.all_gather(lists, mine, group=group)
    dist.gather(mine, lists if rank == 0 else None, 0, group=group)
    dist.scatter(x, lists if rank == 0 else None, 0, group=group)
    assert x.tolist() == [rank] * 3
    dist.reduce(x, 0, group=group)
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": 0}, {"rank": 1}]
    ops = [dist.P2POp(dist.isend, mine, 1 - rank, group), dist.P2POp(dist.irecv, x, 1 - rank, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert x.tolist() == [1 - rank] * 3
    with dist._coalescing_manager(group=group, device=device):
        for start in 0, 1:
            gather(gathered[3 * start : 3 * start + SIZE], mine[start : start + 1], group=group)
    assert gathered.tolist() == [0, 1, 0, 0, 1, 1]
    assert functional.all_gather_tensor(mine, 0, group).tolist() == [0, 0, 0, 1, 1, 1]
    assert functional.reduce_scatter_tensor(all_ranks.clone(), "sum", 0, group).item() == SIZE * rank
    if hasattr(dist, "gather_single"):
        target = torch.empty(3 * SIZE, device=device) if rank == 0 else None
        try:
            dist.gather_single(mine, target, group_dst=0, group=group)
            assert rank != 0 or target.tolist() == [0, 0, 0, 1, 1, 1]
        except RuntimeError as error:  # Gloo has none; what it says must come through
            assert device.type == "cpu" and "Backend gloo does not support gather_single" in str(error), error
    dist.barrier(group=group)


class Layer(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.linear, self.group = nn.Linear(16, 16), group

    def forward(self, x: Tensor) -> Tensor:
        return Reduce.apply(self.linear(x), self.group)


def check_passes(rank: int, device: torch.device) -> None:
    """Module calls and autograd tell the passes apart, recomputation too."""
    from torch.utils.checkpoint import checkpoint

    import echo_pg

    group = echo_group(policy="auto")
    layers = nn.Sequential(Layer(group), Layer(group)).to(device, torch.bfloat16)
    x = torch.ones(4, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        layers(x).float().sum().backward()
    checkpoint(layers, x, use_reentrant=True).float().sum().backward()
    stats = echo_pg.stats(group)
    assert stats["passes"] == {"forward": 3, "backward": 3, "recompute": 1}, stats["passes"]
    assert stats["calls_quantized"] == 14, stats["forwarded"]


def gradients(rank: int, device: torch.device, group: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(40, 30).to(device), process_group=group)
    for seed in range(2):
        model.zero_grad()
        model(contributions(seed, torch.float32)[rank][:40].to(device)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def check_data_parallel(rank: int, device: torch.device) -> None:
    """DDP's buckets are one-dimensional, so policy auto leaves them exact; policy all does not."""
    exact = gradients(rank, device, dist.new_group(backend="nccl" if device.type == "cuda" else "gloo"))
    auto = gradients(rank, device, echo_group(policy="auto", dtypes=("float32",)))
    assert all(same_bytes(a, b) for a, b in zip(exact, auto, strict=True))
    assert not same_bytes(exact[0], gradients(rank, device, echo_group(dtypes=("float32",)))[0])


def check_end(rank: int, device: torch.device, meeting: str) -> None:
    """A destroyed group refuses calls, and the default group can be made again."""
    group = echo_group()
    backend = group._get_backend(device)
    dist.destroy_process_group(group)
    try:
        backend.barrier().wait()
        raise AssertionError("a destroyed group went on")
    except RuntimeError as error:
        assert "has been destroyed" in str(error), error
    dist.destroy_process_group()
    dist.init_process_group("echo", store=dist.FileStore(meeting, SIZE), rank=rank, world_size=SIZE)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    assert x.tolist() == [SIZE] * 4


CHECKS = [
    check_tensor_parallel, check_quantized, check_forwarded, check_works, check_collectives, check_passes,
    check_data_parallel,
]  # fmt: skip


def run_checks(rank: int, size: int, device_type: str, meeting: str) -> dict[str, float]:
    """Seconds by check. The default group was made by its name alone, without an import of echo_pg."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    seconds = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for check in [*CHECKS, lambda rank, device: check_end(rank, device, meeting)]:
            began = time.perf_counter()
            check(rank, device)
            seconds[check.__name__.removeprefix("check_").replace("<lambda>", "end")] = time.perf_counter() - began
    ours = [str(warning.message) for warning in caught if "echo_pg" in warning.filename]
    assert not ours, ours
    return seconds


def check_import() -> None:
    """`import torch` alone makes the name known, and from torch 2.14 on even without that step."""
    import echo_pg.build

    assert echo_pg.build.why_unusable() is None, echo_pg.build.why_unusable()
    code = "import torch.distributed as dist; print(dist.is_backend_available('echo'))"
    late = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
    for autoload, expected in (("1", True), ("0", late)):
        environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/")
        assert (done.returncode, done.stdout.strip()) == (0, str(expected)), (autoload, done)


def main() -> int:
    device_type = "cuda" if torch.cuda.device_count() >= SIZE else "cpu"
    began = time.perf_counter()
    check_import()
    print(f"ok    import {time.perf_counter() - began:.1f} s")
    # The cheap processes of run_ranks are safe with CUDA as well: none of this touches a device before they start.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the ranks look into the current folder first, where the sources may lie
        options = {"ECHO_MIN_BYTES": "0", "ECHO_LOG": "off"}
        meeting = str(Path(folder) / "again")
        times = run_ranks(run_checks, SIZE, device_type, meeting, backend="echo", env=options, timeout=240)[0]
    for name, seconds in times.items():
        print(f"ok    {name} {seconds:.1f} s")
    total = time.perf_counter() - began
    print(f"torch {torch.__version__}, {device_type}: {len(times) + 1} checks passed in {total:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
