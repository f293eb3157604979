"""The policy as the pure function that it is: every fact that keeps a call exact, and what wins over what."""

from __future__ import annotations

from typing import Any

import pytest

from echo_pg import build

ELIGIBLE: dict[str, Any] = {"numel": 1 << 20, "context": "forward"}


def decide(facts: dict[str, Any], **config: Any) -> tuple[bool, str]:
    extension = build.extension()
    chosen = extension.Config()
    for name, value in config.items():
        setattr(chosen, name, value)
    return extension.decide(chosen, ELIGIBLE | facts)  # type: ignore[no-any-return]


# Facts that keep a call exact whatever the mode, and their reasons.
ALWAYS = [
    ({"group_size": 1}, "group of one rank"),
    ({"tensors": 2}, "several tensors"),
    ({"op": "AVG"}, "not a SUM"),
    ({"op": "PREMUL_SUM"}, "not a SUM"),
    ({"op": "MAX"}, "not a SUM"),
    ({"sparse": True}, "sparse tensor"),
    ({"dtype": "float32"}, "dtype float32 not listed"),
    ({"dtype": "int64"}, "dtype int64 not listed"),
    ({"numel": 0}, "empty tensor"),
    ({"device": "xpu"}, "device type not supported"),
    ({"coalesced": True}, "inside a coalescing bracket"),
    ({"capturing": True}, "stream capture"),
    ({"exact": True}, "exact()"),
]
# Facts that count under policy auto only.
AUTO = [
    ({"ndim": 1}, "one-dimensional"),
    ({"ndim": 0}, "one-dimensional"),
    ({"row_elems": 15}, "rows shorter than 16"),
    ({"accumulate_grad": True, "context": "backward"}, "parameter gradient"),
    ({"context": "none"}, "outside a module and autograd"),
    ({"role": 1}, "embedding"),
    ({"role": 2}, "output layer"),
    ({"role": 3}, "compiled module, roles unknown"),
    ({"role": 4}, "residual included"),
    ({"group_desc": "DATA_PARALLEL_GROUP_WITH_CP"}, "denied group"),
    ({"group_desc": "mesh_dp_shard"}, "denied group"),
]


@pytest.mark.parametrize(("facts", "reason"), ALWAYS)
@pytest.mark.parametrize("policy", ["auto", "all"])
def test_what_no_mode_quantizes(facts: dict[str, Any], reason: str, policy: str) -> None:
    assert decide(facts, policy=policy) == (False, reason)


@pytest.mark.parametrize(("facts", "reason"), AUTO)
def test_what_auto_leaves_exact_and_all_does_not(facts: dict[str, Any], reason: str) -> None:
    assert decide(facts) == (False, reason)
    assert decide(facts, policy="all") == (True, "policy all")
    assert decide(facts, policy="off") == (False, "policy off")


@pytest.mark.parametrize("context", ["forward", "backward", "recompute"])
@pytest.mark.parametrize("desc", ["default_pg", "undefined", "", "mesh_tp", "TENSOR_MODEL_PARALLEL_GROUP"])
def test_what_auto_quantizes(context: str, desc: str) -> None:
    assert decide({"context": context, "group_desc": desc}) == (True, "tensor parallel")


def test_recomputed_forward() -> None:
    for way in "feedback", "plain":
        assert decide({"context": "recompute"}, recompute=way) == (True, "tensor parallel")
    assert decide({"context": "recompute"}, recompute="exact") == (False, "recomputed forward")
    assert decide({"context": "recompute"}, recompute="exact", policy="all") == (True, "policy all")
    assert decide({"context": "forward"}, recompute="exact")[0]


def test_halves_of_a_batch_are_as_eligible_as_the_whole() -> None:
    assert decide({"role": 5}) == (True, "tensor parallel")


def test_size_and_dtypes() -> None:
    assert decide({"row_elems": 16}) == (True, "tensor parallel")
    assert decide({"numel": 512}, min_bytes_cpu=1024) == (True, "tensor parallel")
    assert decide({"numel": 511}, min_bytes_cpu=1024) == (False, "below min_bytes")
    assert decide({"numel": 256, "dtype": "float32"}, min_bytes_cpu=1024, dtypes=["float32"])[0]
    assert decide({"numel": 511}, min_bytes_cpu=1024, policy="all") == (False, "below min_bytes")
    cuda = {"device": "cuda", "device_supported": True}
    assert decide({"numel": 1024} | cuda, min_bytes_cpu=1024, min_bytes_cuda=2048) == (True, "tensor parallel")
    assert decide({"numel": 1023} | cuda, min_bytes_cpu=1024, min_bytes_cuda=2048) == (False, "below min_bytes")
    with pytest.raises(ValueError, match="min_bytes is -1, but must not be negative"):
        decide({}, min_bytes_cuda=-1)


@pytest.mark.parametrize(
    "desc",
    [
        "DATA_PARALLEL_GROUP", "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "MODEL_PARALLEL_GROUP",
        "EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP",
        "CONTEXT_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_GLOO", "GTP_WEIGHT_REMAT_GROUP",
        "HYBRID_DP_CP_GROUP_2", "mesh_dp", "mesh_fsdp",
        "mesh_data_parallel", "mesh_tp_cpu",
    ],
)  # fmt: skip
def test_groups_that_are_denied_by_name(desc: str) -> None:
    assert decide({"group_desc": desc}) == (False, "denied group")
    assert decide({"group_desc": desc}, allow=".")[0], "the user's word wins over the list"


def test_patterns_of_the_user() -> None:
    assert decide({"group_desc": "mesh_tp"}, deny="tp$") == (False, "denied group")
    assert decide({"group_desc": "mesh_tp"}, deny="tp$", policy="all") == (False, "denied group")
    assert decide({"group_desc": "mesh_tp"}, allow="tp", deny="tp") == (False, "denied group"), "deny wins over allow"
    assert decide({"group_desc": "mine", "role": 3}, allow="^mine$")[0]
    with pytest.raises(ValueError, match="not a regular expression"):
        decide({}, allow="(")


def test_without_hooks_or_by_hand_only_allowed_groups_are_trusted() -> None:
    outside: dict[str, Any] = {"context": "none"}
    for trusted in ({"hooks": False}, {"hand_set": True}):
        assert not decide(outside | trusted)[0]
        assert decide(outside | trusted | {"group_desc": "mesh_tp"})[0]
    assert not decide(outside | {"group_desc": "mesh_tp"})[0]


def test_unknown_facts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown fact 'size'.*numel"):
        decide({"size": 3})
    with pytest.raises(ValueError, match="context is 'sideways'"):
        decide({"context": "sideways"})
