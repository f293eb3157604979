"""Megatron-core, unmodified: which of its all-reduces are quantized, in which pass, and what training makes of it.

On a machine without GPUs the CPU answers what Megatron asks of CUDA (examples/megatron_on_cpu.py); with GPUs the same
tests run there. The exact backend is Gloo or NCCL.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DEBUG, Warnings, device_of, needs_four_devices, record, table
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
EXACT = "nccl" if torch.cuda.is_available() else "gloo"
TENSOR_PARALLEL = "TENSOR_MODEL_PARALLEL_GROUP"
LAYERS, HIDDEN, VOCABULARY, TENSOR = 2, 128, 256, 2
SEQUENCE, MICRO_BATCH = 16, 2
ALL_SIZES = {"ECHO_MIN_BYTES": "0"}
REPLICATION = ("use_distributed_optimizer", "grad_reduce_in_fp32", "overlap_grad_reduce")

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

Table = Counter[tuple[str, ...]]
_starts = itertools.count()


@contextlib.contextmanager
def megatron(rank: int, size: int, folder: str, backend: str, pipeline: int = 1) -> Iterator[torch.device]:
    """A default group of `backend`, and Megatron's groups, which are made without a name and so inherit it."""
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megatron.core import parallel_state

    device = device_of(rank)
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    if device.type == "cpu" and "megatron_on_cpu" not in sys.modules:
        import megatron_on_cpu

        megatron_on_cpu.install()
    store = dist.FileStore(f"{folder}/store{next(_starts)}", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(TENSOR, pipeline)
    try:
        yield device
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        dist.destroy_process_group()


def train(
    device: torch.device,
    micro_batches: int,
    steps: int,
    shape: tuple[int, int] = (SEQUENCE, MICRO_BATCH),
    **changes: Any,
) -> list[float]:
    """The loss of every step. `shape`: tokens per sequence, sequences per micro-batch. `changes`: of the model's
    configuration or its replication."""
    import megatron_core

    replication = {name: changes.pop(name) for name in REPLICATION if name in changes}
    config = megatron_core.make_config(LAYERS, HIDDEN, TENSOR, **changes)
    return megatron_core.train(config, *shape, micro_batches, steps, device, **replication)


def tables(calls: list[dict[str, Any]]) -> dict[str, Table]:
    return {group: table(call for call in calls if call["group"] == group) for group in {c["group"] for c in calls}}


def one_step(
    recorder: Any, rank: int, size: int, folder: str, micro_batches: int, backend: str = "echo", **changes: Any
) -> tuple[dict[str, Table], dict[str, int]]:
    """What echo decided about each group's all-reduces in one training step, and the passes of the tensor-parallel
    group."""
    from megatron.core import parallel_state

    import echo_pg

    with megatron(rank, size, folder, backend, changes.get("pipeline_model_parallel_size", 1)) as device:
        recorder.take()
        train(device, micro_batches, 1, **changes)
        group = parallel_state.get_tensor_model_parallel_group()
        return tables(recorder.take()), echo_pg.stats(group)["passes"]


def expected(
    micro_batches: int, layers: int = LAYERS, first: bool = True, last: bool = True, recomputed: bool = False
) -> Table:
    """The all-reduces of the tensor-parallel group in one step of a pipeline stage with `layers` layers.

    Two row-parallel outputs and two column-parallel input gradients per layer, and the input gradient of the logits
    layer. Exact are the vocabulary-parallel embedding, the maximum and two sums of the cross-entropy, and once per step
    the gradients of the weights of both norms in attention (qk_layernorm), which every rank has in full.
    """
    stream = f"[{SEQUENCE}, {MICRO_BATCH}, {HIDDEN}]"
    counts: Table = Counter()
    counts["forward", "SUM", "bfloat16", stream, "quantized"] = 2 * layers * micro_batches
    counts["backward", "SUM", "bfloat16", stream, "quantized"] = (2 * layers + last) * micro_batches
    counts["none", "SUM", "float32", f"[{layers * 2 * HIDDEN // 8}]", "dtype float32 not listed"] = 1
    if recomputed:
        counts["recompute", "SUM", "bfloat16", stream, "quantized"] = 2 * layers * micro_batches
    if first:
        counts["forward", "SUM", "bfloat16", f"[{MICRO_BATCH}, {SEQUENCE}, {HIDDEN}]", "embedding"] = micro_batches
    if last:
        counts["forward", "MAX", "float32", f"[{SEQUENCE}, {MICRO_BATCH}]", "not a SUM"] = micro_batches
        tokens = f"[{SEQUENCE}, {MICRO_BATCH}]"
        counts["forward", "SUM", "float32", tokens, "dtype float32 not listed"] = 2 * micro_batches
    return counts


def replaced(counts: Table, reason: str, by: str, dtype: str = "float32") -> Table:
    """The table where the exact calls that had `reason` have another one and dtype."""
    return Counter({(*r[:2], dtype, r[3], by) if r[4] == reason else r: n for r, n in counts.items()})


def run_two(rank: int, size: int, folder: str) -> dict[str, Any]:
    recorder = record()
    found: dict[str, Any] = {}

    def run(name: str, micro_batches: int = 1, **changes: Any) -> None:
        found[name] = one_step(recorder, rank, size, folder, micro_batches, **changes)

    run("accumulated", 3)
    run("recomputed", 2, **RECOMPUTED)
    run("bfloat16 gradients", grad_reduce_in_fp32=False)
    os.environ["ECHO_DTYPES"] = "bfloat16,float32"
    run("float32 listed")
    del os.environ["ECHO_DTYPES"]

    from echo_pg import alias, registration

    os.environ["ECHO_REPLACE"] = EXACT
    registration.register()  # as torch does at its import
    run("replaced", backend=EXACT)
    alias.uninstall()
    found["sequence parallel"] = sequence_parallel(recorder, rank, size, folder)
    return found


def sequence_parallel(recorder: Any, rank: int, size: int, folder: str) -> tuple[list[str], dict[str, Table]]:
    """Five training passes of Megatron's column- and row-parallel layers with sequence parallelism: what was warned of,
    and the all-reduces."""
    warned = Warnings()
    logging.getLogger("echo_pg").addHandler(warned)
    with megatron(rank, size, folder, "echo") as device:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron_core import make_config

        config = make_config(LAYERS, HIDDEN, TENSOR, sequence_parallel=True)
        how = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        column = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **how).to(device)
        row = RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, **how).to(device)

        class Block(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return row(column(x)[0])[0]

        block = Block()
        recorder.take()
        for _ in range(5):
            part = torch.ones(SEQUENCE // size, MICRO_BATCH, HIDDEN, dtype=torch.bfloat16, device=device)
            block(part.requires_grad_()).sum().backward()
        return warned.texts, tables(recorder.take())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("two"))
    return run_ranks(run_two, 2, folder, backend=None, timeout=250, env=DEBUG | ALL_SIZES)


def test_decisions_and_passes_with_accumulation(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        decided, passes = found["accumulated"]
        assert decided.pop(TENSOR_PARALLEL) == expected(3)
        # Gradient norm and overflow flag.
        (counts,) = decided.values()
        assert counts == {
            ("none", "SUM", "float32", "[1]", "dtype float32 not listed"): 1,
            ("none", "MAX", "int32", "[1]", "not a SUM"): 1,
        }
        assert passes == {"forward": 3, "backward": 3, "recompute": 0}


def test_recomputed_layers_have_passes_of_their_own(two_ranks: list[dict[str, Any]]) -> None:
    """Megatron's full recomputation is reentrant: autograd runs inside autograd, under a task of its own per layer."""
    for found in two_ranks:
        decided, passes = found["recomputed"]
        assert decided[TENSOR_PARALLEL] == expected(2, recomputed=True)
        assert passes == {"forward": 2, "backward": 2, "recompute": 2 * LAYERS}


def test_gradients_in_bfloat16_stay_exact(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        counts = found["bfloat16 gradients"][0][TENSOR_PARALLEL]
        norms = [row for row in expected(1) if row[0] == "none"]
        assert Counter({row: n for row, n in counts.items() if row[0] == "none"}) == replaced(
            Counter(norms), "dtype float32 not listed", "one-dimensional", "bfloat16"
        )


def test_cross_entropy_stays_exact_where_float32_is_listed(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        counts = found["float32 listed"][0][TENSOR_PARALLEL]
        exact = {row[0] + row[4]: n for row, n in counts.items() if row[1:3] == ("SUM", "float32")}
        assert exact == {"forwardrows shorter than 16": 2, "noneone-dimensional": 1}


def test_a_replaced_name_means_echo(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["replaced"][0][TENSOR_PARALLEL] == expected(1)


def test_sequence_parallelism_is_warned_of_once(two_ranks: list[dict[str, Any]]) -> None:
    (texts, calls), (silent, _) = (found["sequence parallel"] for found in two_ranks)
    assert texts == [
        f"group {TENSOR_PARALLEL}: nothing was quantized in three passes: sequence parallelism is not quantized "
        "(reduce-scatter 4)"
    ]
    assert silent == []
    assert calls == {}


def run_four(rank: int, size: int, folder: str) -> dict[str, Any]:
    recorder = record()

    def run(micro_batches: int, **changes: Any) -> tuple[dict[str, Table], dict[str, int]]:
        return one_step(recorder, rank, size, folder, micro_batches, **changes)

    return {
        "sharded": run(2),
        "replicated": run(2, use_distributed_optimizer=False, overlap_grad_reduce=True, grad_reduce_in_fp32=False),
        "pipeline": run(4, pipeline_model_parallel_size=2, **RECOMPUTED),
    }


def quantized_groups(decided: dict[str, Table]) -> set[str]:
    return {group for group, counts in decided.items() if any(row[-1] == "quantized" for row in counts)}


@needs_four_devices
@pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="four ranks need four GPUs, or none")
def test_four_ranks(tmp_path: Path) -> None:
    for rank, found in enumerate(
        run_ranks(run_four, 4, str(tmp_path), backend=None, timeout=250, env=DEBUG | ALL_SIZES)
    ):
        for decided, _ in found.values():
            assert quantized_groups(decided) == {TENSOR_PARALLEL}

        decided, passes = found["sharded"]
        assert decided[TENSOR_PARALLEL] == expected(2)
        assert passes == {"forward": 2, "backward": 2, "recompute": 0}

        decided, _ = found["replicated"]
        (gradients,) = decided["DATA_PARALLEL_GROUP_WITH_CP"].items()
        assert gradients[0][1:3] == ("SUM", "bfloat16") and gradients[0][4] == "several tensors"
        assert decided["MODEL_PARALLEL_GROUP"].keys() == {
            ("none", "SUM", "float32", "[1]", "dtype float32 not listed"),
            ("none", "MAX", "int32", "[1]", "not a SUM"),
        }

        # 1F1B with four micro-batches, layers recomputed: ranks 0 and 1 hold the first layer, 2 and 3 the last. The
        # stages share the embedding's weights: its values at the start, then its gradients.
        decided, passes = found["pipeline"]
        first = rank < 2
        assert decided[TENSOR_PARALLEL] == expected(4, layers=1, first=first, last=not first, recomputed=True)
        assert passes == {"forward": 4, "backward": 4, "recompute": 4}
        shared = f"[{VOCABULARY // TENSOR}, {HIDDEN}]"
        assert decided["EMBEDDING_GROUP"] == {
            ("none", "SUM", "bfloat16", shared, "denied group"): 1,
            ("none", "SUM", "float32", shared, "dtype float32 not listed"): 1,
        }


def run_losses(rank: int, size: int, folder: str) -> dict[str, list[float]]:
    runs = {
        "exact": (EXACT, {}),
        "off": ("echo", {"ECHO_POLICY": "off"}),
        "echo": ("echo", {}),
        "without feedback": ("echo", {"ECHO_FEEDBACK": "0"}),
    }
    found = {}
    for name, (backend, settings) in runs.items():
        os.environ.update(settings)
        with megatron(rank, size, folder, backend) as device:
            found[name] = train(device, 1, 5 if name == "off" else 50, shape=(64, 8))
        for variable in settings:
            del os.environ[variable]
    return found


def test_training_follows_the_exact_backend(tmp_path: Path) -> None:
    """Steps 41 to 50 of a small model, on CPU 0.32 % apart, and 0.85 % without feedback."""
    for found in run_ranks(run_losses, 2, str(tmp_path), backend=None, timeout=250, env=ALL_SIZES):
        exact = found["exact"]
        assert exact[40] < exact[0] - 1  # it learns
        assert found["off"] == exact[:5]
        away = {
            name: sum(abs(x - y) for x, y in zip(found[name][40:], exact[40:], strict=True)) / sum(exact[40:])
            for name in ("echo", "without feedback")
        }
        assert 0 < away["echo"] < 0.01
        assert away["echo"] < away["without feedback"]


def test_example_under_the_launcher() -> None:
    """`python -m echo_pg run`: the program names another backend, as Megatron-LM's --distributed-backend does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "echo_pg", "run", str(EXAMPLES / "megatron_core.py"), "--backend", "nccl", "--steps", "3"]
    env = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "ECHO_LOG": "info",
    }
    done = subprocess.run(launcher + program, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    differences = [float(text) for text in re.findall(r"([+-][0-9.]+) %", done.stdout)]
    assert len(differences) == 3 and 0 < max(map(abs, differences)) < 1
    assert "27 all-reduces quantized" in done.stdout and "(3.76 times fewer)" in done.stdout
    assert f"group {TENSOR_PARALLEL}: quantizing over 2 ranks" in done.stderr
