"""From which size on calls are quantized: by device as shipped, equal on all ranks, and what tells it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import echo_pg
from echo_pg import Options, creation, doctor

MIB = 1 << 20
BY_DEVICE = {"cpu": MIB, "cuda": 2 * MIB}
CUDA: dict[str, Any] = {"device": "cuda", "device_supported": True}  # as a build that knows CUDA decides


@pytest.mark.parametrize(("facts", "least"), [({}, MIB), (CUDA, 2 * MIB)])
@pytest.mark.parametrize("policy", ["auto", "all"])
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_the_least_size_depends_on_the_device(
    facts: dict[str, Any], least: int, policy: str, dtype: str, size: int
) -> None:
    options = Options(policy=policy, dtypes=dtype)
    smaller = echo_pg.explain(numel=least // size - 1, dtype=dtype, options=options, **facts)
    assert (smaller.quantized, smaller.reason) == (False, "below min_bytes")
    assert smaller.facts["min_bytes"] == least and f"min_bytes={least}" in str(smaller)
    assert echo_pg.explain(numel=least // size, dtype=dtype, options=options, **facts).quantized


def test_a_number_means_the_same_on_every_device() -> None:
    for facts in {}, CUDA:
        found = [echo_pg.explain(numel=numel, options=Options(min_bytes=4096), **facts) for numel in (2047, 2048)]
        assert [answer.quantized for answer in found] == [False, True]
        assert found[0].facts["min_bytes"] == 4096
        assert echo_pg.explain(numel=1, options=Options(min_bytes=0), **facts)


def test_a_device_that_is_not_supported_has_no_size() -> None:
    answer = echo_pg.explain(numel=MIB, device="xpu")
    assert answer.reason == "device type not supported" and "min_bytes" not in answer.facts
    assert echo_pg.explain(numel=MIB, device="cuda", device_supported=False).reason == "device not supported"


def run_boundary(rank: int, size: int) -> tuple[dict[str, Any], str, list[bool]]:
    """What the counters say after a call just below 1 MiB and one of 1 MiB."""
    group = dist.new_group(backend="echo", pg_options=Options(policy="all"))
    below, at = (torch.ones(numel, dtype=torch.bfloat16) for numel in (MIB // 2 - 1, MIB // 2))
    answers = [echo_pg.explain(tensor, group=group) for tensor in (below, at)]
    for tensor in below, at:
        dist.all_reduce(tensor, group=group)
    return echo_pg.stats(group), str(answers[0]), [answer.quantized for answer in answers]


def test_the_boundary_on_cpu_as_shipped() -> None:
    for stats, said, answers in run_ranks(run_boundary, 2, env={"ECHO_LOG": "off"}):
        assert (stats["calls_quantized"], stats["bytes_quantized"]) == (1, MIB)
        assert stats["forwarded"] == {"below min_bytes": {"calls": 1, "bytes": MIB - 2}}
        assert stats["min_bytes"] == BY_DEVICE
        assert answers == [False, True] and f"min_bytes={MIB}" in said


def run_sums(rank: int, size: int) -> tuple[dict[str, int], dict[str, Any]]:
    groups = [dist.new_group(backend="echo", pg_options=Options(min_bytes=least)) for least in (64, "auto")]
    return echo_pg.stats(groups[0])["min_bytes"], echo_pg.stats()


def test_sizes_of_several_groups_are_not_summed() -> None:
    of_one, of_all = run_ranks(run_sums, 2)[1]
    assert of_one == {"cpu": 64, "cuda": 64} and of_all["groups"] == 2 and "min_bytes" not in of_all


def run_disagreeing(rank: int, size: int) -> str:
    # One rank as shipped, the other with the number that this means for the tensors at hand.
    options = Options(min_bytes="auto" if rank == 0 else MIB)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.new_group(backend="echo", pg_options=options)
    return str(caught.value)


def test_ranks_with_different_sizes_form_no_group() -> None:
    for text in run_ranks(run_disagreeing, 2, timeout=60):
        assert "ranks must agree: min_bytes is 'auto' on rank 0 and 1048576 on rank 1" in text


def test_the_sizes_reach_the_extension_and_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    shipped, chosen = Options().to_config(), Options(min_bytes=5).to_config()
    assert (shipped.min_bytes_cpu, shipped.min_bytes_cuda) == (MIB, 2 * MIB)
    assert (chosen.min_bytes_cpu, chosen.min_bytes_cuda) == (5, 5)
    assert creation.to_options(None).min_bytes == "auto"
    doctor.main()
    assert "min_bytes: 1.0 MiB on cpu, 2.0 MiB on cuda" in capsys.readouterr().out
