"""What a program passes on for NCCL takes effect on the inner NCCL group: its options, the time-out, the device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")


def run_options(rank: int, size: int, folder: str, replaced: bool) -> dict[str, Any]:
    if replaced:
        from echo_pg import registration

        registration.register()  # as torch does at its import, before which the environment of a test is not set
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 2, 8
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if replaced else "echo",
        store=dist.FileStore(f"{folder}/store{replaced}", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=41),
        device_id=device,
        pg_options=options,
    )
    dist.all_reduce(torch.ones(8, device=device))
    group = dist.group.WORLD._get_backend(device)
    inner = group._inner("cuda")
    made = inner.options
    assert options._timeout != timedelta(seconds=41), "the caller's own object stays as it was"
    found = {
        "class": type(inner).__name__,
        "echo": type(group).__name__,
        "high": made.is_high_priority_stream,
        "ctas": (made.config.min_ctas, made.config.max_ctas),
        "timeout": made._timeout.total_seconds(),
        "bound": inner.bound_device_id == device,
    }
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("replaced", [False, True])
def test_nccl_options(replaced: bool, tmp_path: Any) -> None:
    environment = {"ECHO_LOG": "off"} | ({"ECHO_REPLACE": "nccl"} if replaced else {})
    (found,) = run_ranks(run_options, 1, str(tmp_path), replaced, backend=None, env=environment, timeout=120)
    assert found == {
        "class": "ProcessGroupNCCL",
        "echo": "ProcessGroupEcho",
        "high": True,
        "ctas": (2, 8),
        "timeout": 41.0,
        "bound": True,
    }
