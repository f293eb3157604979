"""A selection of PyTorch's own distributed suite on echo; ci/conformance runs all of it and compares."""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest
from only_by_name import CALLED_CUSTOM, ONLY_BY_NAME

# One or two of each kind; all pass on Gloo (ci/baseline/conformance_cpu.json).
SELECTION = [
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_all_gather_coalesced_simple",
    "test_all_gather_full_group",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_max",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_barrier_full_group",
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_gather_checks",
    "test_get_backend",
    "test_get_future",
    "test_irecv",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_reduce_sum_twice",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.mark.parametrize("variant", ["named", "replaced"])
def test_pytorchs_own_tests(variant: str, tmp_path: Path) -> None:
    conformance.run([variant], "cpu", SELECTION, tmp_path, jobs=1, seconds=150)
    found = conformance.outcomes(tmp_path, variant)
    got = {test: found.get(test, ["missing", "the suite ended before"])[:2] for test in SELECTION}
    wrong = {test: entry for test, entry in got.items() if entry[0] != conformance.expected_outcome(test, variant)}
    assert not wrong
    if variant == "named":
        reasons = {test: entry[1] for test, entry in got.items() if entry[0] == "skipped"}
        assert list(map(wording, reasons.values())) == [wording(ONLY_BY_NAME[test]) for test in reasons]


def wording(reason: str) -> str:
    """Without the grammar that a version of torch mended in its texts: "Only Gloo backend support ..."."""
    return reason.replace("supports", "support")


def entries(**outcomes: str) -> dict[str, conformance.Outcomes]:
    return {variant: {"test_x": [outcome, "", "0"]} for variant, outcome in outcomes.items()}


def test_a_lost_test_is_noticed() -> None:
    assert conformance.problems(entries(inner="passed", named="passed", replaced="passed")) == []
    assert conformance.problems(entries(inner="skipped", named="passed", replaced="skipped")) == []
    assert len(conformance.problems(entries(inner="passed", named="skipped", replaced="failed"))) == 2
    assert len(conformance.problems(entries(inner="failed", named="failed", replaced="passed"))) == 1
    assert len(conformance.problems({"inner": {"test_x": ["passed", "", "0"]}, "named": {}, "replaced": {}})) == 2
    assert not set(CALLED_CUSTOM) & set(ONLY_BY_NAME)
