"""From seconds to records, from records to JSON lines and tables.

A record is a flat dictionary, one per row and size; its fields are those of `record` and `circumstances`. All that is
drawn is drawn from records, so that a file of them is enough.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import __version__, build, log, options
from .cases import BASELINES, MATMUL, Row

Record = dict[str, Any]


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest order statistics, linearly; share in [0, 1], 0.5 is the median."""
    if not values or not 0 <= share <= 1:
        raise ValueError(f"percentile of {len(values)} values at {share}: needs a value, and a share in [0, 1]")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def bus_factor(ranks: int) -> float:
    """busbw / algbw of an all-reduce as nccl-tests defines it: 2 (P - 1) / P."""
    return 2 * (ranks - 1) / ranks


def circumstances(device: str, threads: int, device_index: int | None = None) -> Record:
    """Where, when and with what a run is made."""
    import torch

    names = re.findall(r"^model name\s*: (.+)", _text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    cpu = names[0] if names else platform.machine()
    on_gpu = device == "cuda"
    built = build.info()
    return {
        "bench": "allreduce",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "device_name": torch.cuda.get_device_name(device_index) if on_gpu else cpu,
        "cpu": cpu,
        "cores": len(usable_cores()),
        "threads": threads,
        "isa": build.extension().build_flags()["isa_active"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "echo": __version__,
        "source": built.SOURCE_HASH if built else "",
        "commit": commit(),
        # Those of NCCL bind the baseline, and what echo sends over it.
        "variables": {
            name: value
            for name, value in options.variables_in_effect("NCCL_" if on_gpu else "").items()
            if name != "ECHO_LOG"
        },
    }


def usable_cores() -> set[int]:
    """Those that this process may run on."""
    return os.sched_getaffinity(0)


def commit() -> str:
    """The checkout that this package lies in, "+" if it has changes; empty if it lies in none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        git = ["git", "-C", str(root)]
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.stdout.strip() + ("+" if changes.stdout.strip() else "")


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One row at one size. seconds: of the slowest rank, per iteration. host_seconds: until the call returns, the
    largest of the ranks' medians; None where it blocks or there is none."""

    row: Row
    options: Any  # echo_pg.Options, or None
    path: str
    note: str
    forwarded: str
    wire_bytes: int
    relative_error: float
    error_share: float  # largest error in units of what rounding explains at most
    seconds: list[float]
    host_seconds: float | None = None


def records(common: Record, ranks: int, dtype: str, size_bytes: int, rows: list[Measured]) -> list[Record]:
    """Of all rows at one size, in their order; `common` holds the circumstances."""
    medians = {measured.row.name: percentile(measured.seconds, 0.5) for measured in rows}
    host = {measured.row.name: measured.host_seconds for measured in rows}
    baseline = BASELINES[common["device"]]

    def net(name: str) -> float:
        """Seconds of the call: what a matrix multiplication after it takes by itself is subtracted."""
        return medians[name] - (medians[MATMUL] if name.endswith("+mm") else 0.0)

    made = []
    for measured in rows:
        name = measured.row.name
        against = net(f"{baseline}+mm" if measured.row.then_matmul and name != MATMUL else baseline)
        own = net(name)
        # Differences of medians may come out as nothing or less where the call is short beside the multiplication.
        comparable = name != MATMUL and own > 0 and against > 0
        algbw = size_bytes / own / 1e9 if comparable else None
        took, baseline_took = host[name], host[baseline]
        made.append(
            common
            | {
                "ranks": ranks,
                "dtype": dtype,
                "bytes": size_bytes,
                "row": name,
                "label": measured.row.label,
                "baseline": baseline,
                "options": plain_options(measured.options),
                "look_ahead": measured.row.look_ahead,
                "then_update": measured.row.then_update,
                "then_matmul": measured.row.then_matmul,
                "path": measured.path,
                "note": measured.note,
                "quantized": measured.options is not None and not measured.forwarded,
                "forwarded": measured.forwarded,
                "iterations": len(measured.seconds),
                "median_ms": medians[name] * 1e3,
                "p10_ms": percentile(measured.seconds, 0.1) * 1e3,
                "p90_ms": percentile(measured.seconds, 0.9) * 1e3,
                "net_ms": own * 1e3,
                "speedup": against / own if comparable else None,
                "algbw_gbps": algbw,
                "busbw_gbps": algbw * bus_factor(ranks) if algbw is not None else None,
                "host_us": None if took is None else took * 1e6,
                "host_extra_us": None if took is None or baseline_took is None else (took - baseline_took) * 1e6,
                "wire_bytes": measured.wire_bytes,
                "relative_error": measured.relative_error,
                "error_share": measured.error_share,
                "samples_ms": [round(second * 1e3, 5) for second in measured.seconds],
            }
        )
    return made


def plain_options(chosen: Any) -> Record | None:
    """echo_pg.Options as they are written to JSON; None for None."""
    if chosen is None:
        return None
    fields = dataclasses.asdict(dataclasses.replace(chosen, inner_options=None))
    del fields["inner_options"]
    return fields | {"dtypes": list(chosen.dtypes)}


def append(path: Path, made: Iterable[Record]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in made)


def read(path: Path, bench: str = "allreduce") -> list[Record]:
    """Raises ValueError, naming the line, for what is no record of the benchmark `bench`."""
    made = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: no JSON: {error}") from None
        if not isinstance(record, dict) or record.get("bench") != bench:
            raise ValueError(f"{path}:{number}: no record of `bench {bench}`")
        made.append(record)
    if not made:
        raise ValueError(f"{path}: holds no record")
    return made


def read_if_there(path: Path, bench: str) -> list[Record]:
    return read(path, bench) if path.exists() else []


def key(record: Record, names: Iterable[str]) -> str:
    """Equal for records that agree in the fields `names`; a field that is missing counts as None."""
    return json.dumps({name: record.get(name) for name in names}, sort_keys=True)


# --- tables ---

HEAD = ("row", "median ms", "p10", "p90", "x {}", "algbw", "busbw", "sent", "rel. error", "path")
HOST = "host us"  # stands before the path where calls return before they are done


def header(record: Record) -> str:
    """What holds for all rows of a run."""
    where = f"{record['device_name']}, {record['cores']} cores, instruction set {record['isa']}"
    with_what = f"torch {record['torch']}, echo {record['echo']} {record['commit']}".rstrip()
    lines = [f"{where}; {with_what}; {record['date']}"]
    if record["device"] == "cpu":
        lines.append(f"{record['threads']} thread(s) of torch per rank, the same for all rows")
    if record["variables"]:
        lines.append("set: " + " ".join(f"{name}={value}" for name, value in record["variables"].items()))
    return "\n".join(lines)


def legend(made: list[Record]) -> str:
    """What the names of the rows stand for."""
    rows = {record["row"]: record for record in made}
    width = max(map(len, rows))
    lines = [
        f"  {name.ljust(width)}  {record['label']}" + (f" ({record['note']})" if record["note"] else "")
        for name, record in rows.items()
    ]
    lines.append("  times: slowest rank; sent: by one rank per call (2 (P-1)/P of the tensor where exact)")
    lines.append("  algbw, busbw: GB/s; rel. error: to the exact sum, 2-norms")
    lines.append("  with feedback: second site of a pass, whose sum also gives back what the first one lost")
    if any(_host(record) != "-" for record in made):
        lines.append(f"  {HOST}: until the call returns, nothing of it waited for; the larger of the ranks' medians")
    if any(record["then_matmul"] for record in made):
        lines.append("  +mm: median, p10, p90 with the multiplication, all else without it")
    return "\n".join(lines)


def table(made: list[Record]) -> str:
    """Of the records of one size, dtype and number of ranks."""
    first = made[0]
    title = f"{first['dtype']}, {first['ranks']} ranks, {log.byte_size(first['bytes'])}"
    head = [cell.format(first["baseline"]) for cell in HEAD]
    lines = [head, *([*_cells(record)] for record in made)]
    if any(_host(record) != "-" for record in made):
        for line, host in zip(lines, (HOST, *map(_host, made)), strict=True):
            line.insert(-1, host)
    return f"{title}\n" + grid(lines)


def _cells(record: Record) -> Iterable[str]:
    yield record["row"]
    for key in ("median_ms", "p10_ms", "p90_ms"):
        yield f"{record[key]:.3f}"
    for key, shape in (("speedup", "{:.2f}"), ("algbw_gbps", "{:.2f}"), ("busbw_gbps", "{:.2f}")):
        yield "-" if record[key] is None else shape.format(record[key])
    yield log.byte_size(record["wire_bytes"])
    yield f"{record['relative_error']:.2e}"
    yield f"forwarded: {record['forwarded']}" if record["forwarded"] else record["path"]


def _host(record: Record) -> str:
    """Records of earlier versions do not tell."""
    return "-" if record.get("host_us") is None else f"{record['host_us']:.1f}"


def summary(made: list[Record]) -> str:
    """Speed-up over the baseline, rows against sizes, of the records of one dtype and number of ranks."""
    first = made[0]
    sizes = sorted({record["bytes"] for record in made})
    names = list(dict.fromkeys(record["row"] for record in made))
    found = {(record["row"], record["bytes"]): record["speedup"] for record in made}
    lines = [["row", *(log.byte_size(size) for size in sizes)]]
    for name in names:
        values = [found.get((name, size)) for size in sizes]
        lines.append([name, *("-" if value is None else f"{value:.2f}" for value in values)])
    return f"{first['dtype']}, {first['ranks']} ranks: times faster than {first['baseline']}\n" + grid(lines)


def grid(lines: list[list[str]]) -> str:
    """Columns as wide as they must be, the first and a textual last one to the left."""
    columns = len(lines[0])
    widths = [max(len(line[i]) for line in lines) for i in range(columns)]
    last_is_text = lines[0][-1] == HEAD[-1]

    def cell(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i == 0 or (last_is_text and i == columns - 1) else text.rjust(widths[i])

    drawn = ["  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines]
    return "\n".join([drawn[0], "  ".join("-" * width for width in widths), *drawn[1:]])


def by(made: list[Record], *keys: str) -> list[list[Record]]:
    """Grouped by the values of keys, in order of appearance."""
    groups: dict[str, list[Record]] = {}
    for record in made:
        groups.setdefault(key(record, keys), []).append(record)
    return list(groups.values())
