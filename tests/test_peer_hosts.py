"""Who may share memory: ranks in other namespaces, on other hosts and with too little room do without, all of them with
the same right results and one warning. Linux namespaces stand in for containers and hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import datetime, os, torch, torch.distributed as dist, echo_pg
rank, size = int(os.environ["RANK"]), int(os.environ["SIZE"])
store = dist.FileStore(os.environ["MEET"], size)
limit = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)

def run(fabric):
    options = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric)
    group = dist.new_group(backend="echo", pg_options=options)
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(rank)).bfloat16()
    dist.all_reduce(x, group=group)
    stats = echo_pg.stats(group)
    dist.destroy_process_group(group)
    return x.view(torch.int16), stats

result, stats = run("auto")
same = torch.equal(result, run("wire")[0])
print(f"fabric {stats['fabric']}, equal {same}, buffers {stats['workspace_bytes']}\\n", end="", flush=True)
dist.destroy_process_group()
"""

# What one of two ranks is started under, and whether they still share memory.
PLACES = {
    "own IPC namespace": (["unshare", "--ipc"], False),
    "own PID namespace": (["unshare", "--pid", "--fork", "--mount-proc"], False),
    "own user namespace": (["unshare", "--user", "--map-root-user"], False),
    "own mount namespace, own /dev/shm": (
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"],
        False,
    ),
    "own mount namespace, same /dev/shm": (["unshare", "--mount"], True),
    "another boot": (
        [
            *("unshare", "--mount", "sh", "-c"),
            'echo other > $MEET.boot && mount --bind $MEET.boot /proc/sys/kernel/random/boot_id && exec "$@"',
            "sh",
        ],
        False,
    ),
    "another host name": (["unshare", "--uts", "sh", "-c", 'hostname other && exec "$@"', "sh"], True),
}


def environment(folder: Path, size: int) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    own = {"MEET": str(folder / "meet"), "SIZE": str(size), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return base | own


def skip_unless_allowed(command: list[str], variables: dict[str, str]) -> None:
    try:
        tried = subprocess.run([*command, "true"], env=variables, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if tried.returncode != 0:
        pytest.skip(f"{command[:2]} is not permitted here: {tried.stderr.strip()}")


def ranks_of(prefixes: list[list[str]], variables: dict[str, str]) -> list[str]:
    """What each rank printed, standard error included."""
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", PROGRAM],
            env=variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, prefix in enumerate(prefixes)
    ]
    return [process.communicate(timeout=120)[0] for process in processes]


@pytest.mark.parametrize("place", PLACES)
def test_ranks_in_other_places(place: str, tmp_path: Path) -> None:
    prefix, shared = PLACES[place]
    variables = environment(tmp_path, 2)
    skip_unless_allowed(prefix, variables)
    outputs = ranks_of([[], prefix], variables)
    for output in outputs:
        assert f"fabric {'peer' if shared else 'wire'}, equal True" in output, output
    assert "".join(outputs).count("no peer memory") == (not shared), outputs


def run_in_room(room: str, size: int, folder: Path) -> str:
    """What `size` ranks print whose /dev/shm has just this much room."""
    command = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={room} tmpfs /dev/shm && exec "$@"', "sh"]
    variables = environment(folder, size)
    skip_unless_allowed(command, variables)
    script = f'for r in $(seq 0 {size - 1}); do RANK=$r "$@" & done; wait; echo "left $(du -s /dev/shm)"'
    ranks = ["sh", "-c", script, "sh", sys.executable, "-c", PROGRAM]
    done = subprocess.run([*command, *ranks], env=variables, capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


def test_too_little_room(tmp_path: Path) -> None:
    output = run_in_room("256k", 2, tmp_path)
    assert output.count("fabric wire, equal True") == 2, output
    assert output.count("no peer memory") == 1, output
    assert "--ipc=host" in output and "--shm-size" in output, output
    assert "left 0" in output, output


def test_smaller_slabs_for_less_room(tmp_path: Path) -> None:
    """22 ranks need 8.6 MB each, or a multiple of that with several lanes; half of that is above the floor and fits."""
    size = 22
    output = run_in_room("120m", size, tmp_path)
    assert output.count("fabric peer, equal True") == size, output
    buffers = {int(line.rpartition(" ")[2]) for line in output.splitlines() if line.startswith("fabric")}
    assert len(buffers) == 1 and 4 << 20 <= buffers.pop() < 120_000_000 / size, output
    assert "no peer memory" not in output and "left 0" in output, output
