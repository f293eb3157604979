"""What is measured: the rows of the table, sizes and dtypes, and the choice of them from the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..option_values import parse_bytes
from ..options import DTYPES
from . import methods

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Beyond this a size is a typing mistake: the tensor and its exact sum would no longer fit a machine.
_MOST_BYTES = 16 * GIB


@dataclass(frozen=True)
class Row:
    """One line of the table.

    kind: "inner" (Gloo or NCCL itself), "echo", "two_collective", "two_shot" (symmetric memory), "unfused" (feedback as
        separate torch operations around an echo call without it), or "nothing" (only what follows the call).
    changes: fields of `echo_pg.Options`; kind "echo" and "unfused" only.
    shipped: keep min_bytes and dtypes as shipped, so that small or unlisted tensors are forwarded.
    look_ahead: tiles that push runs ahead; None for the tuned number.
    then_update: the update that the call leaves to a stream of its own is waited for, and timed with it.
    then_matmul: a matrix multiplication follows the call and is timed with it.
    on_request: measured only if --rows names it.
    """

    name: str
    label: str
    kind: str = "echo"
    changes: dict[str, Any] = field(default_factory=dict)
    shipped: bool = False
    look_ahead: int | None = None
    then_update: bool = False
    then_matmul: bool = False
    on_request: bool = False


PLAIN4 = methods.PLAIN | {"bits": 4}
PLAIN8 = methods.PLAIN | {"bits": 8}
ONE_AVERAGE = methods.UNROTATED | methods.ONE_AVERAGE | {"bits": 4, "residual": "local"}
TWO_AVERAGES = methods.UNROTATED_TWO | {"bits": 4, "residual": "local"}
GROUP = TWO_AVERAGES | {"residual": "group"}
ROTATED = methods.ROTATED
INT8, TENSOR = {"state_dtype": "int8"}, {"state_dtype": "tensor"}

_ECHO_ROWS = (
    Row("echo8", "8 bits, no feedback", changes=PLAIN8),
    Row("echo4", "4 bits, no feedback", changes=PLAIN4),
    Row("local1", "4 bits, local, one average, int8 state", changes=ONE_AVERAGE | INT8),
    Row("local1-tensor", "4 bits, local, one average, state in the tensor's dtype", changes=ONE_AVERAGE | TENSOR),
    Row("local2", "4 bits, local, two averages, int8 state", changes=TWO_AVERAGES | INT8),
    Row("group", "4 bits, group, two averages", changes=GROUP),
    Row("echo4-rot", "4 bits, no feedback, rotation", changes=PLAIN4 | ROTATED),
    Row("local1-rot", "4 bits, local, one average, int8 state, rotation", changes=ONE_AVERAGE | INT8 | ROTATED),
    Row("default", "Options() as shipped", shipped=True),
)

# What carries the codes is the inner backend, as without peer memory or over hosts; to be asked for under variables
# such as NCCL_P2P_DISABLE=1, which bind it and the baseline alike.
WIRE = {"fabric": "wire"}
_WIRE_ROWS = (
    Row("wire8", "8 bits, no feedback, over the wire", changes=PLAIN8 | WIRE, on_request=True),
    Row("wire4", "4 bits, no feedback, over the wire", changes=PLAIN4 | WIRE, on_request=True),
    Row(
        "wire-local1",
        "4 bits, local, one average, int8 state, over the wire",
        changes=ONE_AVERAGE | INT8 | WIRE,
        on_request=True,
    ),
)

CPU_ROWS = (
    Row("gloo", "Gloo", kind="inner"),
    *_ECHO_ROWS,
    Row("echo4-d0", "4 bits, no feedback, look-ahead 0", changes=PLAIN4, look_ahead=0),
    Row("local1-d0", "4 bits, local, one average, int8 state, look-ahead 0", changes=ONE_AVERAGE | INT8, look_ahead=0),
    Row("two4", "two collectives, 4 bits", kind="two_collective", changes=PLAIN4, on_request=True),
    Row("two8", "two collectives, 8 bits", kind="two_collective", changes=PLAIN8, on_request=True),
    *_WIRE_ROWS,
)

_UNFUSED = Row("unfused4", "4 bits, group, feedback in separate operations", kind="unfused", changes=PLAIN4)
_LOCAL2_TENSOR = Row(
    "local2-tensor", "4 bits, local, two averages, state in the tensor's dtype", changes=TWO_AVERAGES | TENSOR
)
# The tensor is the caller's again before the update has run; "group" is the time until then.
_GROUP_CUDA = Row("group", "4 bits, group, two averages, update on its own stream", changes=GROUP)
_GROUP_UPDATED = Row(
    "group+update", "4 bits, group, two averages, until its update ends", changes=GROUP, then_update=True
)
_NCCL = Row("nccl", "NCCL", kind="inner")


def _with_matmul(row: Row) -> Row:
    changed = {"name": f"{row.name}+mm", "label": f"{row.label}, then matmul", "then_matmul": True}
    return Row(**(vars(row) | changed))


_ECHO_CUDA_ROWS = tuple(_GROUP_CUDA if row.name == _GROUP_CUDA.name else row for row in _ECHO_ROWS)
_COMPENSATED = (
    _UNFUSED,
    *(row for row in _ECHO_CUDA_ROWS if row.changes.get("feedback", True)),
    _LOCAL2_TENSOR,
)
CUDA_ROWS = (
    _NCCL,
    Row("two8", "two collectives, 8 bits", kind="two_collective", changes=PLAIN8),
    Row("two4", "two collectives, 4 bits", kind="two_collective", changes=PLAIN4),
    Row("two-shot", "symmetric memory, two-shot", kind="two_shot"),
    *_ECHO_CUDA_ROWS,
    _GROUP_UPDATED,
    _LOCAL2_TENSOR,
    _UNFUSED,
    *_WIRE_ROWS,
    Row("matmul", "matmul alone", kind="nothing", then_matmul=True),
    *(_with_matmul(row) for row in (_NCCL, *_COMPENSATED)),
)
ROWS = {"cpu": CPU_ROWS, "cuda": CUDA_ROWS}
BASELINES = {"cpu": "gloo", "cuda": "nccl"}
MATMUL = "matmul"

DEFAULT_SIZES = {
    "cpu": (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    "cuda": (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB),
}
DEFAULT_DTYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16",)}
# (warm-up, measured): on CUDA those of the paper's table 3.
DEFAULT_ITERATIONS = {"cpu": (3, 20), "cuda": (30, 80)}


def choose_rows(device: str, text: str | None) -> tuple[Row, ...]:
    """The rows that a comma-separated list names, in the order of the table; None: all but those on request.

    The baseline is always among them, and with a row that multiplies matrices also the two rows that it is compared
    with. Raises ValueError for a name that is none.
    """
    rows = {row.name: row for row in ROWS[device]}
    if text is None:
        return tuple(row for row in rows.values() if not row.on_request)
    names = _split(text, "--rows")
    for name in names:
        if name not in rows:
            raise ValueError(f"--rows: {name!r} must be one of {', '.join(rows)}")
    baseline = BASELINES[device]
    wanted = {baseline, *names}
    if any(rows[name].then_matmul for name in names):
        wanted |= {MATMUL, f"{baseline}+mm"}
    return tuple(row for name, row in rows.items() if name in wanted)


def choose_sizes(device: str, text: str | None, dtypes: tuple[str, ...]) -> tuple[int, ...]:
    """Bytes, ascending, of a list such as "64KiB,1MiB". Raises ValueError for one that is no multiple of an element."""
    if text is None:
        return DEFAULT_SIZES[device]
    sizes = set()
    unit = max(ELEMENT_BYTES[dtype] for dtype in dtypes)
    for part in _split(text, "--sizes"):
        try:
            size = parse_bytes(part)
        except ValueError as error:
            raise ValueError(f"--sizes: {part!r}: {error}") from None
        if not 0 < size <= _MOST_BYTES or size % unit:
            raise ValueError(f"--sizes: {part!r} must be a multiple of {unit} bytes, at least {unit}, at most 16 GiB")
        sizes.add(size)
    return tuple(sorted(sizes))


def choose_dtypes(device: str, text: str | None) -> tuple[str, ...]:
    """dtypes of a list such as "bf16,float32". Raises ValueError for one that echo does not know."""
    if text is None:
        return DEFAULT_DTYPES[device]
    chosen = []
    for part in _split(text, "--dtypes"):
        name = _SHORT_DTYPES.get(part, part)
        if name not in DTYPES:
            raise ValueError(f"--dtypes: {part!r} must be one of {', '.join((*DTYPES, *_SHORT_DTYPES))}")
        if name not in chosen:
            chosen.append(name)
    return tuple(chosen)


def choose_ranks(text: str, most: int, why: str) -> tuple[int, ...]:
    """Group sizes of a list such as "2,4". Raises ValueError for one outside [2, most]; `why` says whence `most`."""
    chosen = []
    for part in _split(text, "--ranks"):
        if not part.isdecimal() or not 2 <= int(part) <= most:
            raise ValueError(
                f"--ranks: {part!r} must be a number from 2 (one rank has nothing to add up) to {most} {why}"
            )
        if int(part) not in chosen:
            chosen.append(int(part))
    return tuple(chosen)


def _split(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{option}: {text!r} names nothing; give a list with commas")
    return parts
