"""Real groups of two ranks: good and bad options, switches, reports, the doctor. Needs the extension.

Each case is a short program, run once per rank in processes of its own that meet over a file.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import echo_pg
from echo_pg import Options

PRELUDE = """
import datetime, os, sys, time, warnings, torch, torch.distributed as dist, torch.nn as nn
import echo_pg
from echo_pg import Options
rank = int(os.environ["RANK"])
warnings.simplefilter("ignore")

# `place`: another file for a second group, since a FileStore removes its file with its last user, whoever else has
# opened it by then.
def start(backend="echo", seconds=20, place="", **keywords):
    store = dist.FileStore(os.environ["MEET"] + place, 2)
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit, **keywords)

def attempt(*arguments, **keywords):
    try:
        start(*arguments, **keywords)
        x = torch.ones(4)
        dist.all_reduce(x)
        print("sum", x[0].item())
    except Exception as error:
        print(type(error).__name__, error)
    if dist.is_initialized():
        dist.destroy_process_group()

class Row(nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.lm_head = Row(), Row(), Row()

    def forward(self, x):
        return self.lm_head(self.b(self.a(x)))
"""


def two_ranks(program, folder, variables=({}, {})):
    """What each rank printed, both streams together."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    base |= {"MEET": str(folder / "meet"), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program],
            env=base | {"RANK": str(rank)} | variables[rank],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
        )
        for rank in range(2)
    ]
    return [process.communicate(timeout=120)[0] for process in processes]


def test_a_group_without_any_setting(tmp_path):
    for output in two_ranks("attempt()", tmp_path):
        assert "sum 2.0" in output


def test_unequal_options_fail_on_both_ranks_and_a_new_group_works(tmp_path):
    for output in two_ranks("attempt(pg_options=Options(bits=4 + 4 * rank)); attempt(place='2')", tmp_path):
        assert "DistBackendError" in output and "bits is 4 on rank 0 and 8 on rank 1" in output
        assert output.count('"group_size": 128') == 2 and "sum 2.0" in output


def test_a_variable_set_on_one_rank_only_is_noticed(tmp_path):
    for output in two_ranks("attempt()", tmp_path, ({}, {"ECHO_ETA": "0.5"})):
        assert "eta is 0.9 on rank 0 and 0.5 on rank 1" in output


def test_a_rank_with_unusable_options_tells_its_peer_at_once(tmp_path):
    first, second = two_ranks("attempt(seconds=60)", tmp_path, ({}, {"ECHO_BITS": "5"}))
    assert second.startswith("ValueError bits=5 must be 4 or 8 (ECHO_BITS='5' is set)")
    assert "DistBackendError" in first and "rank 1: bits=5 must be 4 or 8" in first
    first, second = two_ranks("attempt(pg_options=7 if rank == 0 else None)", tmp_path / "..")
    assert first.startswith("TypeError pg_options must be") and "rank 0: pg_options must be" in second


def test_switched_off_on_one_rank_only_is_an_error_on_the_other(tmp_path):
    first, _ = two_ranks("attempt(seconds=3)", tmp_path, ({}, {"ECHO_OFF": "1"}))
    assert "rank 1: ECHO_OFF=1 is set here and not on all ranks" in first


def test_a_rank_that_comes_too_late_is_named_on_both(tmp_path):
    for output in two_ranks("time.sleep(5 * rank); attempt(seconds=2)", tmp_path):
        assert "DistBackendError" in output and "1 of 2 ranks did not come (rank 1)" in output


def test_switched_off_everywhere_forwards_everything(tmp_path):
    program = """
start(pg_options=Options(policy="all", min_bytes=0, dtypes="float32"))
x = torch.full((64,), 0.1 + rank)
dist.all_reduce(x)
print(sorted(set(x.tolist())) == [torch.tensor(0.1) + torch.tensor(1.1)], echo_pg.stats()["calls_quantized"])
dist.destroy_process_group()
"""
    off = {"ECHO_OFF": "1", "ECHO_BITS": "nonsense", "ECHO_LOG": "off"}
    assert two_ranks(program.replace("pg_options=", "pg_options=None and "), tmp_path, (off, off)) == ["True 0\n"] * 2


@pytest.mark.parametrize("asked", ["gloo", "cpu:gloo", None])
def test_a_replaced_name_means_echo_also_in_subgroups(asked, tmp_path):
    program = f"""
start({asked!r})
pair, single = dist.new_group([0, 1], backend="gloo"), dist.new_group([1])
groups = [dist.group.WORLD, pair] + ([single] if rank == 1 else [])
print(*[group._get_backend(torch.device("cpu")).name() for group in groups])
print(*[dist.get_backend(group) for group in groups], dist.get_backend() is dist.Backend.GLOO)
dist.destroy_process_group()
"""
    quiet = {"ECHO_REPLACE": "gloo", "ECHO_LOG": "off"}
    outputs = [output.splitlines() for output in two_ranks(program, tmp_path, (quiet, quiet))]
    assert [means for means, _ in outputs] == ["echo echo", "echo echo echo"]
    default = asked or "gloo"
    assert outputs[0][1] == f"{default} gloo {default == 'gloo'}", "the names that the program gave"
    assert outputs[1][1] == f"{default} gloo {default} {default == 'gloo'}"


REPORTS = """
start(pg_options=Options(min_bytes=0))
model = Model()
x = torch.randn(64, 64, dtype=torch.bfloat16)
for _ in range(2):
    model(x.clone())
with echo_pg.exact():
    model(x.clone())
s = echo_pg.stats(dist.group.WORLD)
print(s["calls_quantized"], s["calls_forwarded"], s["sites"]["forward"], s["passes"]["forward"], sorted(s["forwarded"]))
print(echo_pg.stats()["calls_quantized"], echo_pg.stats()["groups"])
here = echo_pg.explain(x, group=dist.group.WORLD)
inside = echo_pg.explain(x, group=dist.group.WORLD, context="forward")
print(bool(here), bool(inside), str(here).splitlines()[0])
y = torch.randn(100)
work = echo_pg.all_reduce(y, async_op=True)
work.wait()
echo_pg.new_pass("backward")
echo_pg.all_reduce(y, dist.group.WORLD, "backward")
print(echo_pg.stats()["sites"])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_reports_of_a_live_group(debug, tmp_path):
    quiet = {"ECHO_LOG": "off", "TORCH_DISTRIBUTED_DEBUG": debug}
    for output in two_ranks(REPORTS, tmp_path, (quiet, quiet)):
        assert output.splitlines() == [
            "4 5 2 2 ['exact()', 'output layer']",
            "4 1",
            "False True exact: outside a module and autograd",
            "{'forward': 3, 'backward': 1, 'recompute': 0}",
        ]


def test_the_log_says_that_it_works(tmp_path):
    first, second = two_ranks(REPORTS, tmp_path)
    assert "[echo] group default_pg: quantizing over 2 ranks (fabric peer, 4 bits" in first
    assert "[echo] group default_pg ends: 6 calls quantized" in first and "exact() (3)" in first
    assert "[echo]" not in second


@pytest.fixture
def gloo_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_questions_about_other_groups_are_refused(gloo_alone):
    with pytest.raises(ValueError, match="uses the backend 'gloo', not 'echo'"):
        echo_pg.stats(dist.group.WORLD)
    with pytest.raises(ValueError, match="uses the backend 'gloo', not 'echo'"):
        echo_pg.all_reduce(torch.ones(4))
    with pytest.raises(ValueError, match="no process group"):
        echo_pg.stats(-100)
    with pytest.raises(ValueError, match="direction='sideways' must be one of"):
        echo_pg.new_pass("sideways")
    nothing = echo_pg.stats()
    assert not any(count for name, count in nothing.items() if name not in ("forwarded", "passes", "sites"))
    directions = {"forward": 0, "backward": 0, "recompute": 0}
    assert (nothing["forwarded"], nothing["passes"], nothing["sites"]) == ({}, directions, directions)


def test_questions_without_a_group():
    assert echo_pg.explain(shape=(1024, 1024)).quantized
    assert not echo_pg.explain(numel=10, options=Options(min_bytes=21))
    assert echo_pg.explain(torch.ones(10, 10), options=Options(policy="all", min_bytes=0, dtypes="float32"))
    with pytest.raises(ValueError, match="unknown fact 'colour'"):
        echo_pg.explain(numel=10, colour="red")
    with pytest.raises(ValueError, match="needs a tensor, or one of numel= and shape="):
        echo_pg.explain()
    with pytest.raises(ValueError, match="no default process group"):
        echo_pg.stats(None) and echo_pg.all_reduce(torch.ones(4))


def test_every_option_reaches_the_extension():
    config = Options(group_size=96, rotation="hadamard", rotation_size=32, early_sites=0.25, timeout=5).to_config()
    assert (config.group_size, config.rotation_size, config.timeout_s) == (96, 32, 5.0)
    assert (config.early_count, config.early_fraction) == (0, 0.25)
    config = Options(early_sites=3, dtypes="float16", allow="^tp").to_config()
    assert (config.early_count, config.early_fraction, config.rotation_size, config.timeout_s) == (3, 0.0, 128, -1.0)
    assert (config.dtypes, config.allow, config.bits, config.quantizer) == (["float16"], "^tp", 4, "zero_aware")


def test_the_doctor_over_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "-m", "echo_pg", "doctor"], capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("live: 2 ranks, fabric peer") == 3 and "All is well." in done.stdout


def run_again(rank, size, folder):
    """The default group five times on one store; each time one rank comes late, and meets the other's last address."""
    store = dist.FileStore(f"{folder}/again", size)
    for turn in range(5):
        if turn % size == rank:
            time.sleep(0.2)
        dist.init_process_group("echo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=10))
        x = torch.full((4,), float(rank + turn))
        dist.all_reduce(x)
        assert x.eq(1 + 2 * turn).all()
        dist.destroy_process_group()


def test_a_group_made_again_on_the_same_store(tmp_path):
    """Gloo alone finds the addresses of the group before there, and waits for those who have left."""
    run_ranks(run_again, 2, str(tmp_path), backend=None, timeout=60)
