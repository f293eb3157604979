"""One rank of `bench ttft` and `bench step`, from its start to its end."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import options
from . import end_to_end_report, measure, results
from .cases import BASELINES
from .end_to_end_model import AGAIN, NOTHING, Decoding, Shape, Sums, Training, Variant, first_tokens, make, part_of
from .load import Load
from .progress import Bar

_TIMEOUT = timedelta(minutes=10)
_CACHE_UNIT = 16  # places; fused attention wants its keys aligned
# Of GPU memory, beside what grows with the batch: workspaces, what NCCL allocates, tensors of the all-reduce alone.
_SPARE_BYTES = 4 << 30
# Per element of a sum and row: two averages in bfloat16, and as much again while a call is under way.
_STATE_BYTES = 8
_APART_ROUNDS = 2


def batches_to_try(largest: int) -> list[int]:
    """Descending: the largest, and all powers of two and their halves more (1.5 times) below it."""
    steps = {number << shift for number in (1, 3) for shift in range(largest.bit_length())}
    return sorted({largest} | {step for step in steps if step < largest}, reverse=True)


class Rank:
    """What one rank holds: the model, the groups of all variants, the records' common part."""

    def __init__(
        self, rank: int, size: int, store_path: str | None, plan: dict[str, Any], path: str, local_rank: int | None
    ) -> None:
        self.rank, self.size, self.plan, self.path, self.began = rank, size, plan, Path(path), time.monotonic()
        on_gpu = plan["device"] == "cuda"
        index = (rank if local_rank is None else local_rank) % max(1, torch.cuda.device_count()) if on_gpu else None
        self.device = torch.device("cuda", index) if index is not None else torch.device("cpu")
        threads = max(1, len(results.usable_cores()) // size)
        torch.set_num_threads(threads)
        if on_gpu:
            torch.cuda.set_device(self.device)
        store = dist.FileStore(store_path, size) if store_path is not None else None
        place = {"store": store, "rank": rank, "world_size": size} if store is not None else {}
        dist.init_process_group("gloo", timeout=_TIMEOUT, **place)
        gpus = min(size, torch.cuda.device_count()) if on_gpu else 0
        self.load = Load(plan["device"], gpus) if rank == 0 and any(plan["loads"]) else None
        self.inner = "gloo" if plan["shared_gpu"] else BASELINES[plan["device"]]
        self.shape, self.sums = Shape(**plan["model"]), Sums()
        self.model = make(self.shape, 2 * plan["length"], size, rank, self.device, self.sums)
        settings = measure.Settings(plan["device"], (), plan["rows"], 0, 1, index, self.inner)
        self.alone = measure.Rank(settings)
        self.training = Training(self.model, self.alone.inner) if plan["bench"] == "step" else None
        self.common = results.circumstances(plan["device"], threads, index) | {
            "bench": plan["bench"], "ranks": size, "inner": self.inner, "shape": plan["shape"], "model": plan["model"],
            "length": plan["length"], "dtype": "bfloat16", "seed": 0, "transformers": version("transformers"),
            "load_what": self.load.what if self.load is not None else "none",
        }  # fmt: skip
        self.common["commit"] = plan["commit"] or self.common["commit"]

    # --- the batch ---

    def choose_batch(self) -> int:
        """The largest one that fits on all ranks: tried without sums, so that none waits for one that ran out of
        memory. Raises RuntimeError where not even one sequence fits."""
        if self.device.type == "cpu":
            return int(self.plan["batch"])
        for batch in batches_to_try(self.plan["batch"]):
            fits = torch.tensor([int(self._fits(batch))])
            dist.all_reduce(fits, op=dist.ReduceOp.MIN)
            self._free()
            if fits.item():
                return batch
        raise RuntimeError("not even a batch of one fits into the GPU's memory")

    def _fits(self, batch: int) -> bool:
        try:
            call = self.pass_of(batch, joined=False)
            for _ in range(2):  # the optimizer's moments come with the end of the first step
                call()
            ended = True
        except torch.OutOfMemoryError:
            ended = False
            if self.training is not None:
                self.training.forget()
        dist.barrier()  # ranks on one GPU: all hold what they need
        free, _ = torch.cuda.mem_get_info(self.device)
        dist.barrier()
        directions = 2 if self.training is not None else 1
        state = _STATE_BYTES * directions * len(self.plan["rows"]) * self.sum_elems(batch)
        return ended and free >= _SPARE_BYTES + state

    def sum_elems(self, batch: int) -> int:
        return int(batch * self.plan["length"] * self.shape.width)

    def pass_of(self, batch: int, joined: bool = True) -> Callable[[], Any]:
        """What is timed: a prefill or a training step of `batch` sequences; without any exact sum unless `joined`."""
        generator = torch.Generator().manual_seed(1)
        size = (batch, self.plan["length"] + 1)
        tokens = torch.randint(self.shape.vocabulary, size, generator=generator).to(self.device)
        if self.training is None:
            return lambda: first_tokens(self.model, tokens[:, :-1])
        training, given, targets = self.training, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return lambda: training.step(given, targets, joined)

    # --- variants ---

    def variants(self, shipped_sizes: bool) -> list[Variant]:
        """The baseline, nothing, and a group for each row of echo; with `shipped_sizes` small tensors stay exact."""
        baseline, *rows = self.plan["rows"]
        made = [Variant(baseline, self.alone.inner), Variant(NOTHING, None)]
        if not shipped_sizes:
            made += [Variant(part_of(baseline, share), self.alone.inner, share=share) for share in self.plan["parts"]]
        for row in rows:
            sizes: dict[str, Any] = {} if shipped_sizes or row.shipped else {"min_bytes": 0}
            chosen = options.Options(**(sizes | row.changes))
            group = dist.new_group(backend="echo", group_desc="tp", pg_options=chosen, timeout=_TIMEOUT)
            made.append(Variant(row, group, chosen, self.device.type))
        return made

    def interleave(
        self, calls: list[Callable[[], Any]], prepare: Callable[[], None], rounds: range, bar: Bar, graphs: bool
    ) -> list[list[float]]:
        """Seconds [calls][rounds] of the slowest rank: all calls in turn, in each round first another one. With graphs
        a device's time, else from the call to its end on the host."""
        clock = measure.DeviceClock() if graphs else measure.HostClock()
        for number in rounds:
            for turn in range(len(calls)):
                index = (number + turn) % len(calls)
                prepare()
                self.alone.barrier(head_start=graphs)
                clock.start(index)
                calls[index]()
                clock.stop()
            bar.step()
        measured = torch.tensor([clock.seconds(index) for index in range(len(calls))]).double()
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
        return [list(seconds) for seconds in measured.tolist()]

    def measure_model(self, variants: list[Variant], batch: int, duty: int) -> None:
        """The prefill or the step under one load; recorded round by round, because a round may take half a minute."""
        run, sums = self.pass_of(batch), self.shape.layers * (2 if self.training is None else 4)
        sum_bytes = 2 * self.sum_elems(batch)

        def with_sums_of(variant: Variant) -> Callable[[], None]:
            def call() -> None:
                self.sums.group, self.sums.share = variant.group, variant.share
                run()

            variant.check(call, lambda: sums * variant.quantizes(sum_bytes))
            return call

        phase, iterations = "prefill" if self.training is None else "step", self.plan["iterations"]
        extra = {"load": duty, "phase": phase, "batch": batch, "sum_bytes": sum_bytes, "sums": sums}
        extra["pause_s"] = self.plan["pause"]
        calls = [with_sums_of(variant) for variant in variants]
        bar = Bar(f"{phase}, load {duty} %", iterations, enabled=self.rank == 0)
        self.set_load(duty)
        for number in range(iterations):
            seconds = self.interleave(calls, self._pause, range(number, number + 1), bar, graphs=False)
            self._record(variants, seconds, extra)
        bar.done()
        self._record_apart(variants, calls, extra)

    def _record_apart(self, variants: list[Variant], calls: list[Callable[[], Any]], extra: dict[str, Any]) -> None:
        """Passes once more, for what a sum takes within them and what is left: where power limits a device, sums that
        let it rest make what follows them faster, which no all-reduce alone shows. Events lie around the sums here, so
        these passes are not the ones that are compared."""
        bar = Bar("sums apart from the rest", _APART_ROUNDS, enabled=self.rank == 0)
        found: list[list[tuple[float, float]]] = [[] for _ in variants]
        for number in range(_APART_ROUNDS):
            for turn in range(len(calls)):
                index = (number + turn) % len(calls)
                found[index].append(self._apart(variants[index], calls[index]))
            bar.step()
        bar.done()
        apart = [
            {
                "sum_samples_ms": [round(1e3 * each, 5) for each, _ in passes],
                "apart_samples_ms": [round(1e3 * whole, 5) for _, whole in passes],
            }
            for passes in found
        ]
        self._record(variants, [[] for _ in variants], extra, apart)

    def _apart(self, variant: Variant, call: Callable[[], Any]) -> tuple[float, float]:
        """Seconds: of a sum on average, counted from when the last rank came to it, and of the slowest rank's pass."""
        on_device = self.device.type == "cuda"
        self.sums.clock = measure.DeviceClock() if on_device else measure.HostClock()
        self._pause()
        self.alone.barrier(head_start=False)
        began = time.perf_counter()
        call()
        if on_device:
            torch.cuda.synchronize(self.device)
        whole = torch.tensor(time.perf_counter() - began).double()
        each = torch.tensor(self.sums.clock.seconds(0) if variant.group is not None else [0.0]).double()
        self.sums.clock = None
        dist.all_reduce(whole, op=dist.ReduceOp.MAX)
        dist.all_reduce(each, op=dist.ReduceOp.MIN)  # whoever came earlier has waited for the others as well
        return each.mean().item(), whole.item()

    def _pause(self) -> None:
        """In which a GPU whose power is limited recovers, so that the limit does not shape what comes."""
        time.sleep(self.plan["pause"])

    def measure_decoding(self, variants: list[Variant], batch: int, duty: int) -> None:
        """One token of each of `batch` sequences under one load."""
        cached = -(-self.plan["length"] // _CACHE_UNIT) * _CACHE_UNIT
        decoding = Decoding(self.model, batch, cached, self.device)
        graphs = self.device.type == "cuda" and not self.plan["shared_gpu"]
        variants = [*variants, Variant(AGAIN, self.alone.inner)]
        calls = [self._decoding_call(decoding, variant, graphs) for variant in variants]
        iterations = self.plan["decode_iterations"]
        warmup = max(1, iterations // 10)
        bar = Bar(f"decoding {batch}, load {duty} %", warmup + iterations, enabled=self.rank == 0)
        self.interleave(calls, decoding.rewind, range(warmup), bar, graphs)
        self.set_load(duty)
        seconds = self.interleave(calls, decoding.rewind, range(iterations), bar, graphs)
        bar.done()
        extra = {"load": duty, "phase": "decode", "batch": batch, "sum_bytes": 2 * batch * self.shape.width}
        extra |= {"sums": 2 * self.shape.layers, "cached": cached, "graph": graphs}
        self._record(variants, seconds, extra)

    def _decoding_call(self, decoding: Decoding, variant: Variant, graphs: bool) -> Callable[[], Any]:
        """What makes one step with the sums of a variant."""

        def call() -> None:
            self.sums.group, self.sums.share = variant.group, variant.share
            decoding.step().cpu()

        sums, sum_bytes = 2 * self.shape.layers, 2 * decoding.token.numel() * self.shape.width
        decoding.rewind()
        if not graphs:
            variant.check(call, lambda: sums * variant.quantizes(sum_bytes))
            return call
        self.sums.group, self.sums.share = variant.group, variant.share
        # Two steps in eager mode, and the recorded one, which is counted once.
        replay: Callable[[], Any] = variant.check(
            decoding.record,
            lambda: sums * (2 * variant.quantizes(sum_bytes) + variant.quantizes(sum_bytes, recorded=True)),
        )
        return replay

    def measure_alone(self, sizes: set[int], duty: int) -> None:
        """The all-reduce by itself, as `bench allreduce` checks and times it."""
        calls = self.plan["calls"]
        settings = measure.Settings(
            self.plan["device"], tuple(sorted(sizes)), self.plan["rows"], max(1, calls // 4), calls,
            self.device.index, self.inner,
        )  # fmt: skip
        self.alone.settings = settings

        def done(size: int, rows: list[results.Measured]) -> None:
            variants = [Variant(row.row, None, row.options, self.device.type) for row in rows]
            extra = {"load": duty, "phase": "alone", "batch": None, "sum_bytes": size, "sums": 1}
            self._record(variants, [row.seconds for row in rows], extra)

        self.set_load(duty)
        self.alone.measure("bfloat16", lambda _: None, lambda _: None, done)

    def _record(
        self,
        variants: list[Variant],
        seconds: list[list[float]],
        extra: dict[str, Any],
        own: list[dict[str, Any]] | None = None,
    ) -> None:
        """Appends what was measured, so that it outlives this process: without what only all of it together tells.
        own: what each variant's record has besides."""
        extra |= {"load_gbps": self.set_load(extra["load"])}
        if self.rank:
            return
        made = []
        for variant, samples, more in zip(variants, seconds, own or [{}] * len(variants), strict=True):
            row = {
                "row": variant.row.name, "label": variant.row.label, "kind": variant.row.kind,
                "options": results.plain_options(variant.chosen),
                "quantized": variant.quantizes(extra["sum_bytes"], extra.get("graph", False)),
                "samples_ms": [round(1e3 * second, 5) for second in samples],
            }  # fmt: skip
            made.append(self.common | extra | row | more)
        results.append(self.path, made)

    # --- all of it ---

    def set_load(self, duty: int) -> float:
        """On all ranks from here on; returns GB/s since the last call, on the first rank."""
        moved = self.load.set(duty) if self.load is not None else 0.0
        dist.barrier()
        return moved

    def run(self) -> None:
        batch = self.choose_batch()
        self._say(f"{self.plan['shape']}: batch {batch}")
        variants = self.variants(shipped_sizes=False)
        decoders = self.variants(shipped_sizes=True) if self.plan["decode"] else []
        for duty in self.plan["loads"]:
            self.measure_alone({2 * self.sum_elems(batch), self.plan["fixed"]}, duty)
            self._free()
            self.measure_model(variants, batch, duty)
            self._free()
            for decoded in self.plan["decode"]:
                self.measure_decoding(decoders, decoded, duty)
                self._free()
            self._say(f"load {duty} % measured")
        if self.rank == 0:
            end_to_end_report.complete_file(self.path, self.plan["bench"])

    def _say(self, what: str) -> None:
        if self.rank == 0:
            print(f"{what} ({time.monotonic() - self.began:.0f} s)", flush=True)

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        if self.load is not None:
            self.load.close()
        dist.destroy_process_group()


def run(
    rank: int, size: int, store_path: str | None, plan: dict[str, Any], path: str, local_rank: int | None = None
) -> None:
    """All that the plan names; the first rank appends records while they are made, and at last completes them."""
    bench = Rank(rank, size, store_path, plan, path, local_rank)
    bench.run()
    bench.close()
