"""`python -m echo_pg bench allreduce`: its formulas, arguments and report, and tiny runs from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import echo_pg
from echo_pg.__main__ import main
from echo_pg.bench import allreduce, cases, launch, measure, plot, results, two_collective

KIB, MIB = 1 << 10, 1 << 20
COMMON = {
    "bench": "allreduce", "date": "2026-11-30T00:00:00+00:00", "device": "cpu", "device_name": "a processor",
    "cores": 2, "threads": 1, "isa": "avx2", "torch": "2.13.0", "echo": "0.1.0", "commit": "abc", "variables": {},
}  # fmt: skip


# ---- formulas, tables, plots from fixed data
def test_percentiles_lie_between_the_nearest_values():
    assert results.percentile([5.0], 0.9) == 5.0
    assert [results.percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0, 0.5, 1)] == [1.0, 2.5, 4.0]
    assert results.percentile([float(i) for i in range(11)], 0.1) == 1.0
    with pytest.raises(ValueError, match="0 values"):
        results.percentile([], 0.5)


@pytest.mark.parametrize(("ranks", "factor"), ((2, 1.0), (4, 1.5), (8, 1.75)))
def test_bus_bandwidth_is_that_of_nccl_tests(ranks, factor):
    assert results.bus_factor(ranks) == factor


def measured(device, name, seconds, **changes):
    row = next(row for row in cases.ROWS[device] if row.name == name)
    options = echo_pg.Options() if row.kind == "echo" else None
    values = {"options": options, "path": "peer" if options else "gloo", "note": "", "forwarded": "", "wire_bytes": 100}
    return results.Measured(row=row, relative_error=0.125, error_share=0.5, seconds=seconds, **(values | changes))


def some_records(size=MIB, scale=1.0):
    rows = [
        measured("cpu", "gloo", [0.004 * scale, 0.002 * scale, 0.003 * scale]),
        measured("cpu", "echo4", [0.001, 0.0015, 0.002]),
        measured("cpu", "echo4-d0", [0.002, 0.0025, 0.003]),
        measured("cpu", "default", [0.003, 0.003, 0.003], forwarded="below min_bytes"),
    ]
    return results.records(COMMON, 4, "bfloat16", size, rows)


def test_a_record_holds_the_ratios_of_its_times():
    gloo, echo4, _, default = some_records()
    assert (gloo["median_ms"], gloo["speedup"], echo4["speedup"]) == (3.0, 1.0, 2.0)
    assert echo4["algbw_gbps"] == pytest.approx(MIB / 0.0015 / 1e9)
    assert echo4["busbw_gbps"] == pytest.approx(1.5 * MIB / 0.0015 / 1e9)
    assert (echo4["quantized"], default["quantized"], gloo["quantized"]) == (True, False, False)
    assert echo4["options"]["bits"] == 4 and gloo["options"] is None and json.loads(json.dumps(echo4)) == echo4


def test_what_the_matmul_takes_alone_is_subtracted():
    rows = [
        measured("cuda", "nccl", [0.003]),
        measured("cuda", "matmul", [0.002]),
        measured("cuda", "nccl+mm", [0.005]),
        measured("cuda", "local1+mm", [0.003]),
        measured("cuda", "group+mm", [0.001]),  # shorter than the multiplication: no call has a negative time
    ]
    made = results.records(COMMON | {"device": "cuda"}, 2, "bfloat16", MIB, rows)
    assert [record["speedup"] for record in made] == [1.0, None, 1.0, pytest.approx(3.0), None]
    assert made[3]["net_ms"] == pytest.approx(1.0) and made[3]["median_ms"] == pytest.approx(3.0)
    assert results.table(made).splitlines()[-1].split()[4] == "-"


def test_the_table():
    assert results.table(some_records()).splitlines() == [
        "bfloat16, 4 ranks, 1.0 MiB",
        "row       median ms    p10    p90  x gloo  algbw  busbw   sent  rel. error  path",
        "--------  ---------  -----  -----  ------  -----  -----  -----  ----------  --------------------------",
        "gloo          3.000  2.200  3.800    1.00   0.35   0.52  100 B    1.25e-01  gloo",
        "echo4         1.500  1.100  1.900    2.00   0.70   1.05  100 B    1.25e-01  peer",
        "echo4-d0      2.500  2.100  2.900    1.20   0.42   0.63  100 B    1.25e-01  peer",
        "default       3.000  3.000  3.000    1.00   0.35   0.52  100 B    1.25e-01  forwarded: below min_bytes",
    ]


def test_time_on_the_host_is_told_where_calls_return_early():
    rows = [
        measured("cuda", "nccl", [0.003], host_seconds=20e-6),
        measured("cuda", "default", [0.003], forwarded="below min_bytes", host_seconds=22.5e-6),
        measured("cuda", "matmul", [0.002]),
    ]
    made = results.records(COMMON | {"device": "cuda"}, 2, "bfloat16", 64 * KIB, rows)
    assert [record["host_us"] for record in made] == [pytest.approx(20), pytest.approx(22.5), None]
    assert [record["host_extra_us"] for record in made] == [0, pytest.approx(2.5), None]
    lines = results.table(made).splitlines()
    assert "rel. error  host us  path" in lines[1] and "host us" in results.legend(made)
    assert lines[4].endswith("22.5  forwarded: below min_bytes") and lines[5].split()[-2] == "-"
    earlier = [{name: value for name, value in record.items() if "host" not in name} for record in made]
    assert "host us" not in results.table(earlier) + results.legend(earlier)


def test_the_host_is_timed_until_the_call_returns(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = measure.DeviceClock()
    for call_s in (0.2, 0.0, 0.001):  # the first is warm-up
        clock.start(7)
        time.sleep(call_s)
        clock.returned()
        time.sleep(0.05)
        clock.stop()
    assert 0.0005 <= clock.host_seconds(7, 1) < min(clock.seconds(7)) and len(clock.seconds(7)) == 3


def test_variables_that_bind_the_baseline_are_recorded(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("ECHO_BITS", "8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A GPU")
    assert results.circumstances("cuda", 1)["variables"] == {"ECHO_BITS": "8", "NCCL_P2P_DISABLE": "1"}
    assert results.circumstances("cpu", 1)["variables"] == {"ECHO_BITS": "8"}


def test_the_summary_has_a_column_per_size():
    made = some_records(64 * KIB) + some_records(MIB, scale=2.0)
    assert results.summary(made).splitlines()[3:5] == [
        "gloo          1.00     1.00",
        "echo4         2.00     4.00",
    ]


def test_plots_are_drawn_per_dtype_and_number_of_ranks(tmp_path):
    pytest.importorskip("matplotlib")
    made = some_records(64 * KIB) + some_records(MIB, scale=2.0)
    made += [record | {"ranks": 2} for record in made]
    drawn = plot.draw(made, tmp_path, "stem")
    assert [path.name for path in drawn] == ["stem-bfloat16-p4.png", "stem-bfloat16-p2.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in drawn)


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path, capsys):
    results.append(tmp_path / "some.jsonl", some_records())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "allreduce", "--report-only", str(tmp_path / "some.jsonl"), "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "echo-pg[bench]" in output and results.table(some_records()) in output
    assert list(tmp_path.glob("*.png")) == []


def test_a_file_of_other_things_is_refused(tmp_path, capsys):
    path = tmp_path / "other.jsonl"
    for text, complaint in (("", "holds no record"), ("{\n", ":1: no JSON"), ('{"a": 1}\n', ":1: no record")):
        path.write_text(text)
        assert main(["bench", "allreduce", "--report-only", str(path)]) == 2
        assert complaint in capsys.readouterr().err


# ---- arguments
@pytest.mark.parametrize(
    ("arguments", "complaints"),
    (
        (["--ranks", "1"], ("'1'", "from 2", "64")),
        (["--ranks", "2,x"], ("'x'",)),
        (["--ranks", ","], ("names nothing",)),
        (["--sizes", "3"], ("'3'", "multiple of 4")),
        (["--sizes", "32GiB"], ("'32GiB'", "at most 16 GiB")),
        (["--sizes", "1 parsec"], ("'1 parsec'", "MiB")),
        (["--dtypes", "int8"], ("'int8'", "bfloat16")),
        (["--rows", "gloo,fast"], ("'fast'", "echo4")),
        (["--iterations", "0"], ("0", "from 1")),
        (["--warmup", "-1"], ("-1", "from 0")),
        (["--report-only", "absent.jsonl"], ("absent.jsonl",)),
    ),
)
def test_bad_arguments_are_refused_with_value_and_limit(arguments, complaints, capsys, tmp_path):
    assert main(["bench", "allreduce", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert all(complaint in error for complaint in complaints), error
    assert not (tmp_path / "out").exists()


def test_switched_off_there_is_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setenv("ECHO_OFF", "1")
    assert main(["bench", "allreduce"]) == 2
    assert "ECHO_OFF=1" in capsys.readouterr().err


def test_a_row_brings_what_it_is_compared_with():
    assert [row.name for row in cases.choose_rows("cpu", "local1")] == ["gloo", "local1"]
    assert [row.name for row in cases.choose_rows("cuda", "group+mm")] == ["nccl", "matmul", "nccl+mm", "group+mm"]
    for device in ("cpu", "cuda"):
        assert not [row for row in cases.choose_rows(device, None) if row.name.startswith("wire")]
        asked = cases.choose_rows(device, "wire4,wire8,wire-local1")[1:]
        assert [(row.name, row.changes["fabric"]) for row in asked] == [
            (name, "wire") for name in ("wire8", "wire4", "wire-local1")
        ]
    assert not [row.name for row in cases.choose_rows("cpu", None) if row.name.startswith("two")]


def test_two_collectives_do_without_deepspeed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", None)
    assert two_collective.deepspeed_quantizer() is None


# ---- ranks
def die(rank, size, store_path, folder):
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        os._exit(3)
    time.sleep(100)


def complain(rank, size, store_path):
    raise ValueError("no such thing")


def test_a_rank_that_dies_ends_the_run_and_leaves_no_process(tmp_path):
    began = time.monotonic()
    with pytest.raises(launch.RankError, match="rank 1: ended with exit code 3"):
        launch.run_ranks(die, 2, str(tmp_path))
    assert time.monotonic() - began < 30
    for rank in range(2):
        path = tmp_path / str(rank)
        assert not path.exists() or not Path(f"/proc/{path.read_text()}").exists()


def test_ranks_that_say_the_same_are_named_together():
    with pytest.raises(launch.RankError, match=r"rank 0, 1: Traceback(?s:.*)ValueError: no such thing"):
        launch.run_ranks(complain, 2)


# ---- from end to end
ROWS = "echo8,echo4,local1,local1-rot,default,echo4-d0,two4,wire4,wire-local1"
TINY = ["--iterations", "3", "--warmup", "1", "--dtypes", "bf16"]


def bench(launcher, *arguments, folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    command = [*launcher, "-m", "echo_pg", "bench", "allreduce", "--out", str(folder), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.jsonl")
    return done.stdout, path


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return bench([sys.executable], "--sizes", "64KiB,1MiB", "--rows", ROWS, *TINY, folder=folder)


def test_every_row_at_every_size_is_recorded(tiny_run):
    made = results.read(tiny_run[1])
    rows = ["gloo", *("echo8", "echo4", "local1", "local1-rot", "default", "echo4-d0", "two4", "wire4", "wire-local1")]
    assert [(record["bytes"], record["row"]) for record in made] == [(s, row) for s in (64 * KIB, MIB) for row in rows]
    for record in made:
        assert (record["ranks"], record["dtype"], record["iterations"]) == (2, "bfloat16", 3)
        assert len(record["samples_ms"]) == 3 and 0 < record["p10_ms"] <= record["median_ms"] <= record["p90_ms"]
        assert record["isa"] in ("baseline", "avx2", "avx512") and record["torch"] == torch.__version__


def test_ratios_bytes_and_errors_fit_together(tiny_run):
    for made in results.by(results.read(tiny_run[1]), "bytes"):
        row = {record["row"]: record for record in made}
        for record in made:
            assert record["speedup"] == pytest.approx(row["gloo"]["median_ms"] / record["median_ms"])
            assert record["algbw_gbps"] == pytest.approx(record["bytes"] / record["median_ms"] / 1e6)
            assert record["busbw_gbps"] == pytest.approx(record["algbw_gbps"])
            assert 0 < record["error_share"] <= 1
        assert row["gloo"]["wire_bytes"] == made[0]["bytes"]
        assert 3.7 < made[0]["bytes"] / row["echo4"]["wire_bytes"] < 3.77
        assert row["echo8"]["relative_error"] < 0.02 < row["echo4"]["relative_error"]
        assert row["echo4-d0"]["relative_error"] == row["echo4"]["relative_error"] == row["two4"]["relative_error"]
        assert (row["echo4"]["path"], row["two4"]["path"], row["echo4-d0"]["look_ahead"]) == ("peer", "wire", 0)
        for wire, peer in (("wire4", "echo4"), ("wire-local1", "local1")):
            assert row[wire]["path"] == "wire" and row[wire]["relative_error"] == row[peer]["relative_error"]
            assert row[wire]["host_us"] is None, "a call on CPU tensors blocks"


def test_a_forwarded_row_says_so(tiny_run):
    output, path = tiny_run
    small, large = (record for record in results.read(path) if record["row"] == "default")
    assert (small["quantized"], large["quantized"], large["forwarded"]) == (False, True, "")
    assert small["forwarded"] and f"forwarded: {small['forwarded']}" in output


def test_the_report_can_be_shown_again(tiny_run, capsys, tmp_path):
    output, path = tiny_run
    assert main(["bench", "allreduce", "--report-only", str(path), "--out", str(tmp_path)]) == 0
    again = capsys.readouterr().out
    for made in results.by(results.read(path), "bytes"):
        assert results.table(made) in output and results.table(made) in again


def test_under_torchrun_its_ranks_are_joined(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    output, path = bench(
        [*launcher, "--nproc-per-node", "2"], "--sizes", "64KiB", "--rows", "echo4", *TINY, folder=tmp_path
    )
    assert [(record["row"], record["ranks"]) for record in results.read(path)] == [("gloo", 2), ("echo4", 2)]
    assert output.count("bfloat16, 2 ranks, 64.0 KiB") == 1


def test_torchrun_and_ranks_must_agree():
    chosen = {"device": "cpu", "ranks": "4", "sizes": None, "dtypes": None, "rows": None, "iterations": 1, "warmup": 0}
    with pytest.raises(ValueError, match=r"started 2 rank.*--ranks is 4"):
        allreduce._plan(type("Chosen", (), chosen), (0, 2, 0))
