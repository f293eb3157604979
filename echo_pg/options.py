"""What the user may choose, and every ECHO_* environment variable: no other file reads them.

A field takes the value given to `Options(...)`; a field not given takes its environment variable ECHO_<FIELD>; else its
default. All values are checked here once, so that the rest of the code may trust them.
"""

import dataclasses
import difflib
import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from . import build
from .option_values import (
    AUTO,
    COUNT_LIMIT,
    FALSE_WORDS,
    TRUE_WORDS,
    is_float32,
    is_int,
    is_unicode,
    parse_boolean,
    parse_bytes,
    parse_bytes_or_auto,
    parse_count_or_fraction,
    parse_names,
    to_float32,
)

DTYPES = ("float32", "bfloat16", "float16")
_PLAIN_VARIABLES = ("OFF", "REPLACE", "LOG", "CUDA", "SANITIZE")
# min_bytes="auto". Two H200s over NVLink, bfloat16, median of 80 (ci/baseline/bench_allreduce_h200x2.jsonl): as shipped
# 0.69 times NCCL's speed at 1 MiB, where no options reached more than 0.79, and 1.32 times at 2 MiB, the next size
# measured. Two processes on two CPU cores, median of 20 (bench_allreduce_cpu_2_cores.jsonl): as shipped 2.8 times
# Gloo's speed at 1 MiB; smaller calls gain there too, but this leaves decoding, a token at a time, exact.
TUNED_MIN_BYTES = {"cpu": 1 << 20, "cuda": 2 << 20}
_already_warned: set[str] = set()


def _option(name: str, default: Any, parse: Callable[[str], Any] = str) -> Any:
    """A dataclass field whose default is looked up in the environment when an Options is made without it."""

    def look_up() -> Any:
        text = os.environ.get(f"ECHO_{name.upper()}")
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"ECHO_{name.upper()}={text!r} cannot be read: {error}") from None

    return field(default_factory=look_up)


@dataclass(frozen=True)
class Options:
    """How one process group quantizes; give it as `pg_options=` to `init_process_group` or `new_group`, equal on all
    ranks.

    Every field can also be set as environment variable ECHO_<FIELD>; an argument wins over the variable. Raises
    ValueError, naming the value and the limit. Section numbers are those of arXiv 2610.14277.

    Codes [4.3]:
        bits: bits per element on the wire, 4 or 8.
        group_size: elements that share a scale and a zero point; a multiple of 8 from 16 to 1024.
        quantizer: "zero_aware" (zero is exact in groups that straddle it), "asymmetric" (the paper's naive form) or
            "symmetric".
        rotation: "hadamard" spreads outliers over a run of elements before quantizing; "none" does not (the paper).
        rotation_size: elements per run, a power of two dividing group_size; 0 means the largest there is.
        scale_dtype: format of scales and zero points: "float16" (the paper), "bfloat16", or "auto": float16 for float16
            tensors only.
        tau: zero_aware only: within how many steps of the edge zero moves off the grid gradually; at least 0.
        clip: factor in (0, 1] on each group's extremes before its scale is formed.
    Error feedback [5]:
        feedback: whether rounding errors of one site are given back at later sites of the same pass.
        residual: "local" (what this rank rounded away itself) or "group" (the paper's: contribution minus mean of the
            result).
        eta, a, beta1, beta2: gain, mix and decay of the two averages [5.1]; eta and a in [0, 1], beta1 and beta2 in [0,
            1). With a = 0 (or where the averages are one) a single one is kept, which halves state and traffic; with
            beta2 = 0 too it is the last error times eta.
        state_dtype: how the averages are kept: "int8", "float32", "tensor" (the tensor's own), or "auto": int8 for
            local, tensor for group.
        early_sites: first sites of a no-grad forward pass sent in early_bits [7.2]: a count, or a fraction in (0, 1) of
            the last pass's sites.
        early_bits: bits per element there, 4 or 8.
        rescale: power-of-two rescaling of small gradients [5.4, App. C]: "on", "off", or "auto": in backward with
            float16 scales.
        recompute: all-reduces that activation checkpointing runs again in backward: "feedback" (with a state that
            starts anew in each recomputed segment, so one that begins where the pass began repeats it to the bit),
            "plain" (quantized without feedback) or "exact" (forwarded). All three change gradients far less than
            quantization does; "feedback" least with two or more layers per checkpoint, "exact" with one
            (ci/baseline/recompute_cpu_2_cores.json). To change nothing, keep the sums: torch's selective checkpointing
            with _c10d_functional.all_reduce among what it saves.
    Which calls:
        policy: "auto" (tensor-parallel activations and their gradients), "all" (every SUM all-reduce of listed dtype
            and size), "off".
        min_bytes: smaller tensors are forwarded exactly; bytes, on every device, or "auto": 1 MiB for CPU tensors and 2
            MiB for CUDA ones (`TUNED_MIN_BYTES`). Speed does not ask for as much on CPU: two ranks on two cores ran
            bfloat16 quantized without rotation (residual "local") faster than Gloo from 64 KiB on, by 1.6 and more at
            every size tried up to 64 MiB.
        dtypes: tensor dtypes that may be quantized, of "float32", "bfloat16", "float16" (names or torch dtypes).
        allow, deny: regular expressions (ECMAScript) searched in the group's description: treat as tensor-parallel;
            never quantize.
    Transport:
        fabric: "peer" (memory that the processes of one host share, or that their GPUs reach in each other; an error
            where there is none), "wire" (codes through the inner backend), or "auto": peer where all ranks can.
        workspace_bytes: upper limit of exchange buffers per group; bytes, at least 4 MiB.
        timeout: longest wait for another rank, in seconds or as timedelta; None takes the group's own.
        diagnostics: also measure norms of the error (costs an exact all-reduce per call).
        allow_shared_gpu: permit peer memory between ranks on one GPU, where their kernels take turns: correct, but
            milliseconds per tile; for tests. With fewer GPUs than ranks Gloo, not NCCL, then carries what is forwarded.
        inner_options: `ProcessGroupNCCL.Options` handed to the inner NCCL group; no environment variable.
    """

    bits: int = _option("bits", 4, int)
    group_size: int = _option("group_size", 128, int)
    quantizer: str = _option("quantizer", "zero_aware")
    rotation: str = _option("rotation", "hadamard")
    rotation_size: int = _option("rotation_size", 0, int)
    scale_dtype: str = _option("scale_dtype", "auto")
    tau: float = _option("tau", 0.125, float)
    clip: float = _option("clip", 1.0, float)
    feedback: bool = _option("feedback", True, parse_boolean)
    residual: str = _option("residual", "local")
    eta: float = _option("eta", 0.9, float)
    a: float = _option("a", 0.0, float)
    beta1: float = _option("beta1", 0.7, float)
    beta2: float = _option("beta2", 0.0, float)
    state_dtype: str = _option("state_dtype", "auto")
    early_sites: int | float = _option("early_sites", 0, parse_count_or_fraction)
    early_bits: int = _option("early_bits", 8, int)
    rescale: str = _option("rescale", "auto")
    recompute: str = _option("recompute", "feedback")
    policy: str = _option("policy", "auto")
    min_bytes: int | str = _option("min_bytes", AUTO, parse_bytes_or_auto)
    dtypes: tuple[str, ...] = _option("dtypes", ("bfloat16", "float16"), parse_names)
    allow: str = _option("allow", "")
    deny: str = _option("deny", "")
    fabric: str = _option("fabric", "auto")
    workspace_bytes: int = _option("workspace_bytes", 64 << 20, parse_bytes)
    timeout: float | timedelta | None = _option("timeout", None, float)
    diagnostics: bool = _option("diagnostics", False, parse_boolean)
    allow_shared_gpu: bool = _option("allow_shared_gpu", False, parse_boolean)
    inner_options: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _warn_mistyped_variables()
        self._check_codes()
        self._check_feedback()
        self._check_policy_and_transport()

    @classmethod
    def paper(cls, **changes: Any) -> "Options":
        """The paper's method to the letter: its residual, scales, coefficients and state, no rotation [4.3, 5.1,
        5.4]."""
        # fmt: off
        method: dict[str, Any] = {
            "bits": 4, "group_size": 128, "quantizer": "zero_aware", "rotation": "none", "scale_dtype": "float16",
            "clip": 1.0, "feedback": True, "residual": "group", "eta": 0.75, "a": 0.35, "beta1": 0.7, "beta2": 0.3,
            "state_dtype": "tensor", "rescale": "auto",
        }
        # fmt: on
        return cls(**(method | changes))

    def _check_codes(self) -> None:
        self._require("bits", self.bits in (4, 8) and is_int(self.bits), "4 or 8")
        size = self.group_size
        self._require(
            "group_size", is_int(size) and 16 <= size <= 1024 and size % 8 == 0, "a multiple of 8 from 16 to 1024"
        )
        self._require_one_of("quantizer", "zero_aware", "asymmetric", "symmetric")
        self._require_one_of("rotation", "none", "hadamard")
        run = self.rotation_size
        self._require("rotation_size", is_int(run) and (run == 0 or run >= 2), "0 or a power of two of at least 2")
        if run:
            fits = run & (run - 1) == 0 and size % run == 0
            self._require("rotation_size", fits, f"a power of two that divides group_size={size} (0: the largest)")
        self._require_one_of("scale_dtype", "auto", "float16", "bfloat16")
        self._require("tau", is_float32(self.tau) and self.tau >= 0, "a finite number of at least 0")
        self._require("clip", is_float32(self.clip) and 0 < to_float32(self.clip) <= 1, "in (0, 1]")

    def _check_feedback(self) -> None:
        self._require_bool("feedback")
        self._require_one_of("residual", "local", "group")
        for name in ("eta", "a"):
            value = getattr(self, name)
            self._require(name, is_float32(value) and 0 <= value <= 1, "in [0, 1]")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            self._require(name, is_float32(value) and 0 <= value < 1, "in [0, 1)")
        self._require_one_of("state_dtype", "auto", "tensor", "float32", "int8")
        early = self.early_sites
        whole = is_int(early) and 0 <= early < COUNT_LIMIT
        fraction = isinstance(early, float) and 0 < early < 1
        self._require("early_sites", whole or fraction, "a count of at least 0, or a fraction in (0, 1)")
        self._require("early_bits", self.early_bits in (4, 8) and is_int(self.early_bits), "4 or 8")
        self._require_one_of("rescale", "auto", "on", "off")
        self._require_one_of("recompute", "exact", "plain", "feedback")

    def _check_policy_and_transport(self) -> None:
        self._require_one_of("policy", "auto", "all", "off")
        least = self.min_bytes
        in_range = least == AUTO if isinstance(least, str) else is_int(least) and 0 <= least < COUNT_LIMIT
        self._require("min_bytes", in_range, f"{AUTO!r} or a number of bytes of at least 0 and below 2**62")
        given = self.dtypes if isinstance(self.dtypes, (tuple, list, set, frozenset)) else (self.dtypes,)
        names = tuple(str(dtype).removeprefix("torch.") for dtype in given)
        self._require("dtypes", set(names) <= set(DTYPES), f"among {', '.join(DTYPES)}")
        object.__setattr__(self, "dtypes", tuple(name for name in DTYPES if name in names))
        self._require_regex("allow")
        self._require_regex("deny")
        self._require_one_of("fabric", "auto", "peer", "wire")
        self._require(
            "workspace_bytes",
            is_int(self.workspace_bytes) and 4 << 20 <= self.workspace_bytes <= 1 << 40,
            "from 4 MiB (4194304) to 1 TiB",
        )
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        in_range = seconds is None or (is_float32(seconds) and 0.001 <= seconds <= 1e8)
        self._require("timeout", in_range, "None or from 0.001 to 1e8 seconds")
        object.__setattr__(self, "timeout", None if seconds is None else float(seconds))
        self._require_bool("diagnostics")
        self._require_bool("allow_shared_gpu")

    def _require(self, name: str, holds: bool, limit: str) -> None:
        if not holds:
            variable = f"ECHO_{name.upper()}"
            hint = f" ({variable}={os.environ[variable]!r} is set)" if variable in os.environ else ""
            raise ValueError(f"{name}={getattr(self, name)!r} must be {limit}{hint}")

    def _require_one_of(self, name: str, *choices: str) -> None:
        self._require(name, getattr(self, name) in choices, f"one of {', '.join(map(repr, choices))}")

    def _require_bool(self, name: str) -> None:
        self._require(name, isinstance(getattr(self, name), bool), "True or False")

    def _require_regex(self, name: str) -> None:
        pattern = getattr(self, name)
        self._require(name, isinstance(pattern, str), "a regular expression as text ('' for none)")
        self._require(name, is_unicode(pattern), "text that can be encoded")
        try:
            re.compile(pattern)
        except re.error as error:
            self._require(name, False, f"a regular expression: {error}")
        # The search itself runs in C++ with ECMAScript syntax, where these would be errors or mean something else.
        self._require(
            name,
            not re.search(r"\(\?(?![:=!])|\\[AZ]", pattern),
            "without Python-only syntax such as (?i), (?P<x>) or \\Z",
        )

    @property
    def run_elems(self) -> int:
        """Elements per rotated run; 0 without rotation."""
        return 0 if self.rotation == "none" else self.rotation_size or self.group_size & -self.group_size

    def min_bytes_on(self, device_type: str) -> int:
        """Bytes from which on tensors on a device of this type, "cpu" or "cuda", may be quantized. Raises ValueError
        for any other type."""
        if device_type not in TUNED_MIN_BYTES:
            raise ValueError(f"device_type={device_type!r} must be one of {', '.join(map(repr, TUNED_MIN_BYTES))}")
        return TUNED_MIN_BYTES[device_type] if isinstance(self.min_bytes, str) else self.min_bytes

    def to_config(self) -> Any:
        """The same values as the C++ side takes them. Raises ImportError where the extension cannot be loaded."""
        config = build.extension().Config()
        resolved = {
            "rotation_size": self.run_elems,
            "min_bytes_cpu": self.min_bytes_on("cpu"),
            "min_bytes_cuda": self.min_bytes_on("cuda"),
            "dtypes": list(self.dtypes),
            "timeout_s": -1.0 if self.timeout is None else self.timeout,
            "early_count": self.early_sites if is_int(self.early_sites) else 0,
            "early_fraction": 0.0 if is_int(self.early_sites) else self.early_sites,
        }
        skipped = {"rotation", "min_bytes", "timeout", "early_sites", "inner_options"}
        for name, value in (dataclasses.asdict(dataclasses.replace(self, inner_options=None)) | resolved).items():
            if name not in skipped:
                setattr(config, name, value)
        return config

    def fingerprint(self, **found: Any) -> str:
        """What ranks of a group must have in common, as JSON text: all options, what the code was built from, and what
        else each `found` out."""
        values = dataclasses.asdict(dataclasses.replace(self, inner_options=None))
        del values["inner_options"]
        return json.dumps(build.identity() | values | found)


def option_names() -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(Options) if f.name != "inner_options")


def variables_in_effect(also: str = "") -> dict[str, str]:
    """The ECHO_* variables that this package reads and that are set now; and those whose names start with `also`."""
    known = [f"ECHO_{name.upper()}" for name in (*option_names(), *_PLAIN_VARIABLES)]
    known += sorted(name for name in os.environ if also and name.startswith(also))
    return {name: os.environ[name] for name in known if name in os.environ}


def is_off() -> bool:
    """ECHO_OFF=1: forward every call exactly, whatever else is set. A value that is neither 1 nor 0 is taken as 1."""
    text = os.environ.get("ECHO_OFF", "").lower()
    if text not in TRUE_WORDS + FALSE_WORDS:
        _warn_once("ECHO_OFF", f"ECHO_OFF={text!r} is neither 1 nor 0; taken as 1")
    return text not in FALSE_WORDS


def replaced_backends() -> tuple[str, ...]:
    """ECHO_REPLACE=nccl|gloo (or both, with a comma): backend names that are to mean echo. Other names are warned about
    and left out."""
    names = parse_names(os.environ.get("ECHO_REPLACE", "").lower())
    unknown = [name for name in names if name not in ("nccl", "gloo")]
    if unknown:
        warnings.warn(f"ECHO_REPLACE={os.environ['ECHO_REPLACE']!r}: only nccl and gloo can be replaced", stacklevel=2)
    return tuple(name for name in names if name in ("nccl", "gloo"))


def replace_in_children(*names: str) -> None:
    """Set ECHO_REPLACE for processes that this one starts."""
    os.environ["ECHO_REPLACE"] = ",".join(names)


def set_unless_given(variable: str, value: str) -> None:
    """Set an environment variable for this process and those that it starts, unless the caller has set it."""
    os.environ.setdefault(variable, value)


def tell_frameworks(rank: int, size: int, local_rank: int | None) -> None:
    """Set the variables by which frameworks learn their rank, for a process that torchrun did not start or that shares
    its GPU; `local_rank` is the index of its GPU. None: it uses the CPU, and is not to see any GPU."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank or 0)}
    if local_rank is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def launched_ranks() -> tuple[int, int, int] | None:
    """(rank, world size, rank on this host) as torchrun sets them; None for a program started by itself."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names):
        return None
    rank, size, local = (int(os.environ[name]) for name in names[:3])
    return rank, size, local


def log_level() -> str:
    """ECHO_LOG=off|info|debug; info if unset or not one of them."""
    level = os.environ.get("ECHO_LOG", "info").lower()
    if level not in ("off", "info", "debug"):
        _warn_once("ECHO_LOG", f"ECHO_LOG={level!r} is none of off, info, debug; using info")
        return "info"
    return level


def _warn_once(key: str, message: str) -> None:
    if key not in _already_warned:
        _already_warned.add(key)
        warnings.warn(message, stacklevel=3)


def _warn_mistyped_variables() -> None:
    """Say so where an ECHO_* variable is no option but looks like one; unlike names belong to other programs and are
    left alone."""
    known = [name.upper() for name in (*option_names(), *_PLAIN_VARIABLES)]
    for variable in os.environ:
        name = variable.removeprefix("ECHO_")
        if name == variable or name in known:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            _warn_once(variable, f"{variable} is not an option of echo; did you mean ECHO_{near[0]}?")
