"""Unmodified DeepSpeed under echo: which of its all-reduces are quantized, which passes are seen, and what it costs.

Every kind of all-reduce that DeepSpeed issues is a row of a table here, quantized or exact with the reason; a row more
or less, or another number of calls, fails.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import deepspeed_runs as runs
import pytest
from deepspeed_runs import BATCH, HIDDEN, LAYERS, SEQUENCE, VOCAB
from harness import DEBUG, needs_four_devices, record, table
from ranks import run_ranks

HERE = Path(__file__).parent
EVERYTHING = {"ECHO_MIN_BYTES": "0"}  # these models' tensors are far below the default limit

HIDDEN_STATES = f"[{BATCH}, {SEQUENCE}, {HIDDEN}]"
PARAMETERS = "[49472]"  # of one tensor-parallel rank of the Llama here: data parallelism reduces them flattened
# A micro-batch: the outputs of attention and MLP forward; backward the gradient of the input of q, k, v, gate and up in
# each layer and of the output layer.
FORWARD, BACKWARD = 2 * LAYERS, 5 * LAYERS + 1


def activations(micro_batches: int, dtype: str = "bfloat16") -> dict[tuple[str, ...], int]:
    return {
        ("forward", "SUM", dtype, HIDDEN_STATES, "quantized"): micro_batches * FORWARD,
        ("backward", "SUM", dtype, HIDDEN_STATES, "quantized"): micro_batches * BACKWARD,
    }


INPUTS_EQUAL = {("forward", "SUM", "bfloat16", "[]", "one-dimensional"): 1}  # asked before the first batch
STEP = {
    ("none", "SUM", "bfloat16", PARAMETERS, "group of one rank"): 1,
    ("none", "MAX", "uint8", "[1]", "not a SUM"): 1,
    ("none", "SUM", "float32", "[1]", "dtype float32 not listed"): 1,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("store"))
    first, second = run_ranks(
        runs.run_two_ranks, 2, folder, free_port(), backend=None, env=DEBUG | EVERYTHING, timeout=180
    )
    assert {name: value for name, value in first.items() if name not in ("overflow", "domino")} == {
        name: value for name, value in second.items() if name not in ("overflow", "domino")
    }
    return first | {"overflow": [first["overflow"], second["overflow"]]}


def test_training(two_ranks: dict[str, Any]) -> None:
    decisions, passes = two_ranks["training"]
    assert decisions == activations(2) | INPUTS_EQUAL | STEP
    assert passes == {"forward": 2, "backward": 2, "recompute": 0}


def test_training_with_overlapped_communication(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["overlap"] == two_ranks["training"]


def test_training_with_checkpointed_layers(two_ranks: dict[str, Any]) -> None:
    """A layer that is run again sums attention's output again, and stops before the MLP's, which nothing needs."""
    decisions, passes = two_ranks["checkpointing"]
    again = {("recompute", "SUM", "bfloat16", HIDDEN_STATES, "quantized"): 2 * LAYERS}
    assert decisions == activations(2) | again | INPUTS_EQUAL | STEP
    assert passes == {"forward": 2, "backward": 2, "recompute": 2 * LAYERS}


def test_training_with_a_vocabulary_split_over_the_ranks(two_ranks: dict[str, Any]) -> None:
    decisions, passes = two_ranks["vocabulary"]
    tokens = f"[{BATCH}, {SEQUENCE - 1}]"
    extra = {
        ("forward", "SUM", "bfloat16", HIDDEN_STATES, "embedding"): 1,
        ("forward", "MAX", "float32", tokens, "not a SUM"): 1,
        ("forward", "SUM", "float32", tokens, "dtype float32 not listed"): 2,
        ("none", "SUM", "bfloat16", "[41280]", "group of one rank"): 1,  # embedding and output layer are one
    }
    step = {row: count for row, count in STEP.items() if row[3] != PARAMETERS}
    assert decisions == activations(1) | INPUTS_EQUAL | extra | step
    assert passes == {"forward": 1, "backward": 1, "recompute": 0}


def test_training_with_summed_logits(two_ranks: dict[str, Any]) -> None:
    decisions, passes = two_ranks["row head"]
    logits = {("forward", "SUM", "bfloat16", f"[{BATCH}, {SEQUENCE}, {VOCAB}]", "output layer"): 1}
    assert decisions == activations(1) | INPUTS_EQUAL | logits | STEP
    assert passes == {"forward": 1, "backward": 1, "recompute": 0}


def test_inference(two_ranks: dict[str, Any]) -> None:
    def step(tokens: int, count: int = 1) -> dict[tuple[str, ...], int]:
        hidden, logits = f"[{BATCH}, {tokens}, {HIDDEN}]", f"[{BATCH}, {tokens}, {VOCAB}]"
        return {
            ("forward", "SUM", "bfloat16", hidden, "quantized"): count * FORWARD,
            ("forward", "SUM", "bfloat16", logits, "output layer"): count,
        }

    prompt, first, second, (generated, passes) = two_ranks["inference"]
    one_pass = {"forward": 1, "backward": 0, "recompute": 0}
    assert prompt == (step(SEQUENCE), one_pass)
    assert first == second == (step(1), one_pass)
    # transformers asks for the logits of a prompt's last token only, DeepSpeed sums what it asks for.
    last = {("forward", "SUM", "bfloat16", HIDDEN_STATES, "quantized"): FORWARD}
    logits = {("forward", "SUM", "bfloat16", f"[{BATCH}, 1, {VOCAB}]", "output layer"): 3}
    assert generated == last | step(1, 2) | logits
    assert passes == {"forward": 3, "backward": 0, "recompute": 0}


def test_overflow_is_found_and_the_step_skipped(two_ranks: dict[str, Any]) -> None:
    for found in two_ranks["overflow"]:
        for steps in found.values():
            assert [step["overflow"] for step in steps] == [False, True, False, False]
            assert [step["skipped"] for step in steps] == [False, True, False, False]
            assert [step["scale"] for step in steps] == [256, 128, 128, 128]
        # The inf of rank 1 came to both ranks through a quantized all-reduce.
        assert [step["finite"] for step in found[0]] == [True, False, True, True]


@pytest.mark.parametrize("mode", [0, 1], ids=["overlap within layers", "overlap between layers"])
def test_halves_of_a_batch_share_no_feedback(two_ranks: dict[str, Any], mode: int) -> None:
    """Domino's halves take turns, with equal shapes and often without two calls in flight."""
    domino = two_ranks["domino"][mode]
    half = f"[8, 2, {HIDDEN}]"
    assert domino["table"] == {
        ("forward", "SUM", "bfloat16", half, "quantized"): 12,
        ("backward", "SUM", "bfloat16", half, "quantized"): 12,
    }
    assert domino["passes"] == {"forward": 1, "backward": 1, "recompute": 0}
    for direction in ("forward", "backward"):
        sites = domino["sites"][direction]
        assert [site[0] for site in sites] == [1, 2] * 6
        # Without a correction, as at the first site of a sequence, both errors are the same number.
        uncorrected = [index for index, (_, _, rho, delta) in enumerate(sites) if rho == delta]
        assert uncorrected == [0, 1]


def test_a_sum_that_holds_the_residual_is_exact(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["injected"] == {("forward", "SUM", "bfloat16", HIDDEN_STATES, "residual included"): 1}


def test_accelerate(two_ranks: dict[str, Any]) -> None:
    found = two_ranks["accelerate"]
    assert found["backends"] == ("echo", "echo", "echo") and found["type"] == "DistributedType.DEEPSPEED"
    assert found["table"] == activations(1) | INPUTS_EQUAL | STEP
    assert found["passes"] == {"forward": 1, "backward": 1, "recompute": 0}


def run_launched(rank: int, size: int, port: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """`python -m echo_pg run deepspeed_program.py` on one rank."""
    recorder = record()
    runs.environment(rank, size, port)
    import echo_pg
    from echo_pg import run

    assert run.main([str(HERE / "deepspeed_program.py")]) == 0
    from deepspeed.utils import groups

    calls = recorder.take()
    tensor_parallel = echo_pg.stats(groups.get_tensor_model_parallel_group())
    data_parallel = echo_pg.stats(groups.get_data_parallel_group())
    tables = [table(c for c in calls if c["group"] == stats["group"]) for stats in (tensor_parallel, data_parallel)]
    assert sum(tables[0].values()) + sum(tables[1].values()) == len(calls), "no other group sums"
    return tables, tensor_parallel["passes"], tensor_parallel["sites_last"]


@needs_four_devices
def test_a_program_that_names_no_backend_under_the_launcher() -> None:
    """Two times two ranks, ZeRO stage 1: gradients and norms of the data-parallel groups stay exact."""
    four = run_ranks(run_launched, 4, free_port(), backend=None, env=DEBUG | EVERYTHING, timeout=120)
    scalars = {
        ("none", "MAX", "uint8", "[1]", "not a SUM"): 1,
        ("none", "SUM", "float32", "[]", "dtype float32 not listed"): 1,
    }
    for (tensor_parallel, data_parallel), passes, sites in four:
        assert tensor_parallel == activations(2) | INPUTS_EQUAL | scalars
        assert data_parallel == {("none", "SUM", "bfloat16", PARAMETERS, "one-dimensional"): 1} | scalars
        assert passes == {"forward": 2, "backward": 2, "recompute": 0}
        assert sites == {"forward": FORWARD, "backward": BACKWARD, "recompute": 0}


@needs_four_devices
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_pipeline(tmp_path: Path, checkpointing: str) -> None:
    """Under 1F1B every micro-batch is a forward and a backward pass of each stage, in whatever order they come, and
    each block that checkpointing computes again a pass of its own."""
    micro_batches, blocks = 4, 2
    four = run_ranks(
        runs.run_pipeline, 4, str(tmp_path), micro_batches, checkpointing, backend=None, env=DEBUG | EVERYTHING,
        timeout=120,
    )  # fmt: skip
    assert len({loss for _, _, loss in four}) == 1
    again = 0 if checkpointing == "none" else micro_batches * blocks
    for decisions, stats, _ in four:
        rows = {
            (direction, "SUM", "bfloat16", HIDDEN_STATES, "quantized"): micro_batches * blocks
            for direction in ("forward", "backward") + (("recompute",) if again else ())
        }
        quantized = {row: count for row, count in decisions.items() if row[-1] == "quantized"}
        assert quantized == rows
        assert {row[0] for row in decisions if row[-1] != "quantized"} == {"none"}
        assert stats["passes"] == {"forward": micro_batches, "backward": micro_batches, "recompute": again}
        assert stats["sites_last"] == {"forward": blocks, "backward": blocks, "recompute": 1 if again else 0}


def test_losses(tmp_path: Path) -> None:
    """Switched off: the inner backend's to the bit. Switched on: within 1%, and nearer than without feedback."""
    settings: dict[str, Any] = {"backend": None, "env": EVERYTHING | {"ECHO_LOG": "off"}, "timeout": 120}
    seeds = [run_ranks(runs.run_losses, 2, str(tmp_path), 50, seed, **settings)[0] for seed in range(2)]
    found = {name: [losses[name] for losses in seeds] for name in runs.BACKENDS}
    assert found["off"] == found["inner"]
    late = slice(40, 50)

    def gap(name: str) -> float:
        pairs = zip(found[name], found["inner"], strict=True)
        return mean(abs(x - y) for losses, exact in pairs for x, y in zip(losses[late], exact[late], strict=True))

    loss = mean(value for losses in found["inner"] for value in losses[late])
    assert loss < 0.95 * mean(losses[0] for losses in found["inner"]), "the model learns"
    assert gap("echo") < 0.01 * loss
    assert gap("echo") < gap("no feedback")


def test_example() -> None:
    example = HERE.parents[1] / "examples" / "deepspeed_autotp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run([*command, str(free_port()), str(example)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    saved = re.search(r"(\d+) all-reduces quantized: ([\d.]+) of ([\d.]+) MiB saved", done.stdout)
    difference = re.search(r"loss ([\d.]+), with the exact backend ([\d.]+), ([\d.]+)% apart", done.stdout)
    assert saved and difference, done.stdout
    # 12 steps of 2 layers, each with 2 sums forward and 5 backward, and of the output layer's input, backward.
    assert int(saved[1]) == 12 * (2 * (2 + 5) + 1)
    assert 0.7 < float(saved[2]) / float(saved[3]) < 0.75 and float(difference[3]) < 1
    assert "'forward': 12, 'backward': 12, 'recompute': 0" in done.stdout, done.stdout
