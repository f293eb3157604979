"""GPUs that this build has no code for: every rank forwards, and says whose GPU it is.

One rank hides the kernels from itself: the driver is told to take PTX instead of code, and to translate none. torch's
own kernels are hidden there as well, so tensors are made on the host and sums go through Gloo, which needs no kernels.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_cuda_peer import peer_group

MISSING = "this build of echo has no kernels for its GPU (compute capability"


def run_calls(rank: int, size: int, fabric: str) -> dict[str, Any]:
    import echo_pg

    if rank == 1:
        os.environ.update({"CUDA_FORCE_PTX_JIT": "1", "CUDA_DISABLE_PTX_JIT": "1"})
    torch.cuda.set_device(0)
    group = peer_group(fabric=fabric)
    tensors = [torch.full((64, 128 + i), rank + 1.5, dtype=torch.bfloat16).to("cuda") for i in range(3)]
    before = echo_pg.explain(tensors[0], group=group).reason
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    try:
        echo_pg.all_reduce(tensors[0], group)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    stats = echo_pg.stats(group)
    return {
        "sums": [tensor.cpu().float().unique().tolist() for tensor in tensors],
        "before": before,
        "after": echo_pg.explain(tensors[0], group=group).reason,
        "refusal": refusal,
        "forwarded": stats["forwarded"],
        "quantized": stats["calls_quantized"],
    }


@pytest.mark.parametrize("fabric", ["auto", "wire"])
def test_calls_are_forwarded_on_all_ranks_where_one_has_no_kernels(fabric: str) -> None:
    outcomes = run_ranks(run_calls, 2, fabric, timeout=120, group_timeout=60)
    assert MISSING in outcomes[1]["before"] and MISSING not in outcomes[0]["before"]
    for outcome in outcomes:
        assert outcome["sums"] == [[4.0]] * 3 and outcome["quantized"] == 0
        assert outcome["after"].startswith(f"rank 1: {MISSING}")
        assert list(outcome["forwarded"]) == [outcome["after"]]
        assert outcome["after"] in outcome["refusal"]
