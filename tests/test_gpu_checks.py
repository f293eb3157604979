"""ci/gpu without a GPU: its arguments, what it makes of the output of its programs, its limits of time, its records."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ci" / "gpu_checks"))

import gpu_main
import gpu_record
import gpu_steps

COMMON = {"gpus": "2x A GPU", "commit": "abc"}


def python(code, step="cpp", name="a check", limit_s=20.0, **more):
    return gpu_record.Check(step, name, [sys.executable, "-c", code], limit_s, **more)


def report(folder, seconds=100.0):
    return gpu_record.Report(folder / "checks.jsonl", folder / "logs", COMMON, seconds)


def records(folder):
    return [json.loads(line) for line in (folder / "checks.jsonl").read_text().splitlines()]


# ---- arguments
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    ((["--only", "cpp,speed"], "speed"), (["--only", ","], "','"), (["--seconds", "0"], "more than 0")),
)
def test_bad_arguments_are_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_main.main(arguments)
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def test_steps_keep_their_order():
    assert gpu_main._parse(["--only", "bench, build"]).only == ("build", "bench")
    assert gpu_main._parse([]).only == gpu_steps.STEPS


def test_commands_are_shown_as_in_the_root_of_the_sources():
    command = [sys.executable, "-m", "pip", "install", "-e", str(gpu_record.ROOT), f"{gpu_record.ROOT}/ci/gpu"]
    check = gpu_record.Check("build", "package", command, 1, variables={"A": "1"})
    assert gpu_record._shown(check) == ["A=1", "python", "-m", "pip", "install", "-e", ".", "ci/gpu"]


def test_machines_have_short_names():
    assert gpu_main.slug(["NVIDIA H200"] * 2) == "h200x2"
    assert gpu_main.slug(["NVIDIA GeForce RTX 4090"]) == "geforce_rtx_4090"


# ---- running
def test_what_passes_and_fails_is_told_and_written_at_once(tmp_path, capfd):
    made = report(tmp_path)
    made.together([python("print('all well')"), python("import sys; print('bad'); sys.exit(3)", name="another/check")])
    first, second = records(tmp_path)
    assert (first["outcome"], first["why"], first["commit"]) == ("passed", "", "abc")
    assert (second["outcome"], second["why"]) == ("failed", "exit code 3") and not made.all_passed()
    assert (tmp_path / "logs" / "cpp_another_check.log").read_text() == "bad\n"
    output = capfd.readouterr().out
    assert "all well" in output and "-- failed: cpp, another/check" in output


def test_the_newest_record_of_a_check_is_kept(tmp_path):
    for code in (1, 0):
        report(tmp_path).together([python(f"raise SystemExit({code})")])
        report(tmp_path).together([python("pass", name="other")])
    assert [(record["check"], record["outcome"]) for record in records(tmp_path)] == [
        ("a check", "passed"),
        ("other", "passed"),
    ]


def test_a_program_that_does_not_end_is_ended_with_its_children(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    start = time.monotonic()
    made = report(tmp_path)
    made.together([python(code, limit_s=2.0)])
    assert time.monotonic() - start < 20
    assert made.made[0]["outcome"] == "failed" and made.made[0]["why"] == "ended after 2 s"
    assert (tmp_path / "logs" / "cpp_a_check.log").read_text() == "begun\n"
    pid = (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)


def test_what_finds_no_time_or_no_tool_is_named(tmp_path):
    made = report(tmp_path, seconds=5.0)
    made.together([python("pass", name="late")])
    made.together([python("pass", name="tool", missing="nvcc is missing")])
    made.together([python("pass", name="gpus", impossible="needs two GPUs, 1 found")])
    made.together([gpu_record.Check("cpp", "program", [str(tmp_path / "absent")], 3.0)])
    late, tool, gpus, program = records(tmp_path)
    assert late["outcome"] == "not run" and "s of 5 were left" in late["why"]
    assert (tool["outcome"], tool["why"]) == ("failed", "nvcc is missing")
    assert (gpus["outcome"], gpus["why"]) == ("not run", "needs two GPUs, 1 found")
    assert program["outcome"] == "failed" and "could not be started" in program["why"]


# ---- reading
PYTEST = """\
collecting ... collected 4 items

tests/gpu/test_cuda_flat.py::test_one PASSED                       [ 25%]
property host_us = 18.5
tests/gpu/test_cuda_flat.py::test_two[False] FAILED                [ 50%]
E   assert 1 == 2
tests/gpu/test_cuda_flat.py::test_three SKIPPED (needs two GPUs)   [ 75%]
tests/gpu/test_cuda_flat.py::test_four """


def test_tests_are_counted_and_named():
    why, found = gpu_steps.read_pytest(-1, PYTEST)
    assert why == "failed: test_two[False]"
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["properties"] == {"host_us": 18.5}
    assert (found["names_of_skipped"], found["under_way"]) == (["test_three"], ["test_four"])
    assert gpu_steps.read_pytest(5, "collected 0 items\n")[0] == "exit code 5, 0 tests seen"
    assert gpu_steps.read_pytest(0, PYTEST.replace("FAILED", "PASSED"))[0] == ""
    why, found = gpu_steps.read_pytest(0, PYTEST.replace("FAILED", "SKIPPED").replace("PASSED", "SKIPPED"))
    assert (why, found["outcome"], found["skipped"]) == ("every test was skipped", gpu_record.NOT_RUN, 3)


def test_a_file_of_tests_tells_at_once(tmp_path):
    """Through pytest itself and the conftest of tests/gpu."""
    (tmp_path / "conftest.py").write_text((gpu_steps.ROOT / "tests/gpu/conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(
        "def test_one(record_property):\n    record_property('host_us', 2.5)\n\n\ndef test_two():\n    assert 1 == 2\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "test_some.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    why, found = gpu_steps.read_pytest(done.returncode, done.stdout)
    assert (why, found["passed"], found["properties"]) == ("failed: test_two", 1, {"host_us": 2.5}), done.stdout
    assert done.stdout.index("assert 1 == 2") < done.stdout.index("= FAILURES =")


@pytest.mark.parametrize(
    ("code", "output", "why"),
    (
        (0, "========= COMPUTE-SANITIZER\nok x\n========= ERROR SUMMARY: 0 errors\n", ""),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", ""),
        (1, "========= ERROR SUMMARY: 0 errors\n", "no findings, but exit code 1: the test itself failed"),
        (1, "========= Error: Device not supported\n", "exit code 1, no summary"),
        (
            99,
            "========= COMPUTE-SANITIZER\n========= Invalid __global__ read\n========= ERROR SUMMARY: 2 errors\n",
            "2 findings, the first: Invalid __global__ read",
        ),
    ),
)
def test_findings_of_the_sanitizer(code, output, why):
    assert gpu_steps.read_sanitizer(code, output)[0] == why


# ---- the whole flow, with stand-ins for GPUs and programs
STAND_INS = {
    "nvidia-smi": "echo 580.1",
    "nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.1'",
    "compute-sanitizer": 'case "$2" in racecheck) exit 7;; esac; echo "========= ERROR SUMMARY: 0 errors"',
    "cuda_exit_test": "echo 1 case",
    "cuda_stages_test": "echo 6 cases",
    "cuda_peer_test": "echo 8 cases; exit 1",
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    torch = {"torch": "2.11.0", "count": 2, "names": ["NVIDIA H200"] * 2, "capability": [9, 0]}
    text_of = gpu_main._text
    monkeypatch.setattr(
        gpu_main, "_text", lambda command: json.dumps(torch) if gpu_main._ASK_TORCH in command else text_of(command)
    )
    monkeypatch.setattr(gpu_steps, "BUILD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield tmp_path / "out"
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_steps_run_to_the_end_and_all_is_recorded(machine, capfd):
    assert gpu_main.main(["--only", "cpp,sanitize", "--out", str(machine), "--commit", "f00"]) == 1
    made = [json.loads(line) for line in (machine / "gpu_checks_h200x2.jsonl").read_text().splitlines()]
    failed = {record["check"]: record["why"] for record in made if record["outcome"] != "passed"}
    assert failed == {
        "cuda_peer_test": "exit code 1",
        "racecheck of cuda_exit_test": "exit code 7, no summary",
        "racecheck of cuda_stages_test": "exit code 7, no summary",
        "racecheck of cuda_peer_test": "exit code 7, no summary",
    }
    assert len(made) == 3 + 3 * 4
    assert {(r["gpus"], r["driver"], r["torch"], r["nvcc"], r["commit"]) for r in made} == {
        ("2x NVIDIA H200", "580.1", "2.11.0", "13.0", "f00")
    }
    assert "== step sanitize: 9 passed, 3 failed" in capfd.readouterr().out


def test_what_is_missing_fails(machine, monkeypatch):
    monkeypatch.setattr(gpu_steps, "tool", lambda name: None)
    (gpu_steps.BUILD / "cuda_stages_test").unlink()
    assert gpu_main.main(["--only", "build,cpp", "--out", str(machine)]) == 1
    made = [json.loads(line) for line in (machine / "gpu_checks_h200x2.jsonl").read_text().splitlines()]
    assert all(record["outcome"] == "failed" and "nvcc is missing" in record["why"] for record in made[:2])
    assert {record["step"] for record in made} == {"build"}, "other steps would test what was built before"
    assert gpu_main.main(["--only", "cpp,sanitize", "--out", str(machine)]) == 1
    whys = [json.loads(line)["why"] for line in (machine / "gpu_checks_h200x2.jsonl").read_text().splitlines()]
    assert any("step build makes it" in why for why in whys)
    assert sum("compute-sanitizer is missing" in why for why in whys) == 12


def test_what_one_tool_does_not_get_through_is_not_tried_with_the_next():
    checks = gpu_steps._sanitize()
    skipped = [gpu_steps.skip_after(check, [checks[-3]]).impossible for check in checks]
    assert skipped == [""] * 8 + [f"{checks[-3].name} did not end in time"] * 4


def test_benchmarks_are_gathered(tmp_path):
    two, one = (gpu_steps.Machine(gpus, "sm_90", None) for gpus in (2, 1))
    assert all("needs two GPUs" in check.impossible for check in gpu_steps._bench(one, False, tmp_path))
    names = [check.name for check in gpu_steps._bench(two, True, tmp_path)]
    assert names == ["allreduce", "wire", "sockets"]
    results, out = tmp_path / "results", tmp_path / "out"
    out.mkdir()
    for name in names:
        (results / name).mkdir(parents=True)
        (results / name / "allreduce-cuda-1.jsonl").write_text("{}\n")
    gpu_steps.collect(results, out, "h200x2", complete=True)
    whole = [f"bench_{name}_h200x2.jsonl" for name in sorted(names)]
    assert sorted(path.name for path in out.iterdir()) == whole
    (results / "wire" / "allreduce-cuda-2.jsonl").write_text("[]\n")
    assert [path.name for path in gpu_steps.collect(results, out, "h200x2", complete=False)] == [
        "bench_wire_h200x2_unfinished.jsonl"
    ]
    assert all((out / name).read_text() == "{}\n" for name in whole)


def test_every_row_that_is_asked_for_exists():
    from echo_pg.bench import cases

    for arguments in (gpu_steps._REDUCED, gpu_steps._WIRE, gpu_steps._SOCKETS):
        assert cases.choose_rows("cuda", arguments[arguments.index("--rows") + 1])
        assert cases.choose_sizes("cuda", arguments[1], ("bfloat16",))
