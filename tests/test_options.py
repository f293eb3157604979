"""Options: defaults, environment, limits, and what ranks compare. No extension needed."""

import dataclasses
import json
import os
import warnings
from datetime import timedelta

import pytest
import torch

from echo_pg import Options, options
from echo_pg.options import option_names


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ECHO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(options, "_already_warned", set())


def test_defaults_are_the_documented_ones():
    chosen = Options()
    assert (chosen.bits, chosen.group_size, chosen.quantizer, chosen.tau, chosen.clip) == (
        4,
        128,
        "zero_aware",
        0.125,
        1.0,
    )
    assert (chosen.rotation, chosen.rotation_size, chosen.scale_dtype) == ("hadamard", 0, "auto")
    assert (chosen.feedback, chosen.residual, chosen.state_dtype) == (True, "local", "auto")
    assert (chosen.eta, chosen.a, chosen.beta1, chosen.beta2) == (0.9, 0.0, 0.7, 0.0)
    assert (chosen.early_sites, chosen.early_bits, chosen.rescale) == (0, 8, "auto")
    assert chosen.recompute == "feedback"
    assert (chosen.policy, chosen.min_bytes, chosen.dtypes) == ("auto", "auto", ("bfloat16", "float16"))
    assert (chosen.allow, chosen.deny, chosen.fabric, chosen.workspace_bytes) == ("", "", "auto", 64 << 20)
    assert (chosen.timeout, chosen.diagnostics, chosen.allow_shared_gpu) == (None, False, False)


def test_paper_is_the_papers_method_whatever_the_environment(monkeypatch):
    monkeypatch.setenv("ECHO_RESIDUAL", "local")
    chosen = Options.paper(bits=8)
    assert (chosen.residual, chosen.rotation, chosen.scale_dtype, chosen.state_dtype) == (
        "group",
        "none",
        "float16",
        "tensor",
    )
    assert (chosen.bits, chosen.rescale, chosen.eta, chosen.a) == (8, "auto", 0.75, 0.35)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().bits = 8


FROM_TEXT = {
    "bits": ("8", 8),
    "group_size": ("64", 64),
    "quantizer": ("symmetric", "symmetric"),
    "rotation": ("none", "none"),
    "rotation_size": ("32", 32),
    "scale_dtype": ("float16", "float16"),
    "tau": ("0.5", 0.5),
    "clip": ("0.95", 0.95),
    "feedback": ("0", False),
    "residual": ("group", "group"),
    "eta": ("1", 1.0),
    "a": ("0.25", 0.25),
    "beta1": ("0.9", 0.9),
    "beta2": ("0.125", 0.125),
    "state_dtype": ("int8", "int8"),
    "early_sites": ("0.1", 0.1),
    "early_bits": ("4", 4),
    "rescale": ("on", "on"),
    "recompute": ("exact", "exact"),
    "policy": ("all", "all"),
    "min_bytes": ("64 KiB", 65536),
    "dtypes": ("float32, float16", ("float32", "float16")),
    "allow": ("^tp", "^tp"),
    "deny": ("dp|fsdp", "dp|fsdp"),
    "fabric": ("wire", "wire"),
    "workspace_bytes": ("8MiB", 8 << 20),
    "timeout": ("12.5", 12.5),
    "diagnostics": ("true", True),
    "allow_shared_gpu": ("yes", True),
}


def test_every_field_is_in_the_table():
    assert set(FROM_TEXT) == set(option_names())


@pytest.mark.parametrize("name", FROM_TEXT)
def test_every_field_is_read_from_the_environment_and_an_argument_wins(name, monkeypatch):
    default = getattr(Options(), name)
    text, value = FROM_TEXT[name]
    monkeypatch.setenv(f"ECHO_{name.upper()}", text)
    assert getattr(Options(), name) == value != default
    assert getattr(Options(**{name: default}), name) == default


BAD = [
    ("bits", 5, "4 or 8"),
    ("bits", 4.0, "4 or 8"),
    ("bits", True, "4 or 8"),
    ("group_size", 8, "multiple of 8 from 16 to 1024"),
    ("group_size", 100, "multiple of 8 from 16 to 1024"),
    ("group_size", 1032, "multiple of 8 from 16 to 1024"),
    ("quantizer", "zero", "'zero_aware', 'asymmetric', 'symmetric'"),
    ("rotation", "fourier", "'none', 'hadamard'"),
    ("rotation_size", 1, "power of two"),
    ("rotation_size", 48, "divides group_size=128"),
    ("rotation_size", 256, "divides group_size=128"),
    ("scale_dtype", "float32", "'auto', 'float16', 'bfloat16'"),
    ("tau", -0.1, "at least 0"),
    ("tau", float("nan"), "at least 0"),
    ("clip", 0.0, "(0, 1]"),
    ("clip", 1.5, "(0, 1]"),
    ("clip", 1e-60, "(0, 1]"),
    ("feedback", 1, "True or False"),
    ("residual", "global", "'local', 'group'"),
    ("eta", 1.01, "[0, 1]"),
    ("a", -1, "[0, 1]"),
    ("beta1", 1, "[0, 1)"),
    ("beta2", "0.5", "[0, 1)"),
    ("state_dtype", "int4", "'auto', 'tensor', 'float32', 'int8'"),
    ("early_sites", -1, "count of at least 0"),
    ("early_sites", 1.0, "fraction in (0, 1)"),
    ("early_bits", 16, "4 or 8"),
    ("rescale", True, "'auto', 'on', 'off'"),
    ("recompute", "twice", "'exact', 'plain', 'feedback'"),
    ("policy", "some", "'auto', 'all', 'off'"),
    ("min_bytes", -1, "'auto' or a number of bytes of at least 0 and below 2**62"),
    ("min_bytes", 1 << 62, "at least 0 and below 2**62"),
    ("min_bytes", "1 MiB", "'auto' or a number of bytes"),
    ("min_bytes", True, "'auto' or a number of bytes"),
    ("min_bytes", None, "'auto' or a number of bytes"),
    ("early_sites", 1 << 70, "count of at least 0"),
    ("allow", "\ud800", "can be encoded"),
    ("dtypes", ("float64",), "float32, bfloat16, float16"),
    ("dtypes", torch.int8, "float32, bfloat16, float16"),
    ("allow", "(", "regular expression"),
    ("deny", "(?i)tp", "Python-only"),
    ("fabric", "nvlink", "'auto', 'peer', 'wire'"),
    ("workspace_bytes", (4 << 20) - 1, "from 4 MiB"),
    ("timeout", 0, "0.001 to 1e8 seconds"),
    ("timeout", timedelta(seconds=-1), "0.001 to 1e8 seconds"),
    ("diagnostics", None, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "limit"), BAD)
def test_a_bad_value_is_named_with_its_limit(name, value, limit):
    with pytest.raises(ValueError) as caught:
        Options(**{name: value})
    assert f"{name}={value!r}" in str(caught.value) and limit in str(caught.value)


def test_runs_are_the_largest_powers_of_two_that_divide_a_group_unless_told():
    assert Options(group_size=96, rotation_size=16).run_elems == 16
    assert [Options(group_size=size).run_elems for size in (16, 64, 96, 128, 136, 1024)] == [16, 64, 32, 128, 8, 1024]
    assert Options(rotation="none").run_elems == Options.paper().run_elems == 0
    with pytest.raises(ValueError, match="rotation_size=64 must be a power of two that divides group_size=96"):
        Options(group_size=96, rotation_size=64)


@pytest.mark.parametrize(
    ("name", "text"), [("BITS", "four"), ("FEEDBACK", "maybe"), ("MIN_BYTES", "3 pounds"), ("TAU", "x")]
)
def test_an_unreadable_variable_is_named(name, text, monkeypatch):
    monkeypatch.setenv(f"ECHO_{name}", text)
    with pytest.raises(ValueError, match=f"ECHO_{name}='{text}' cannot be read"):
        Options()


def test_min_bytes_by_device(monkeypatch):
    for shipped in Options(), Options(min_bytes="auto"), Options.paper():
        assert (shipped.min_bytes_on("cpu"), shipped.min_bytes_on("cuda")) == (1 << 20, 2 << 20)
    for least in 0, 3 << 20, (1 << 62) - 1:
        assert {Options(min_bytes=least).min_bytes_on(device) for device in ("cpu", "cuda")} == {least}
    with pytest.raises(ValueError, match="device_type='xpu' must be one of 'cpu', 'cuda'"):
        Options().min_bytes_on("xpu")
    for text, least in ("auto", "auto"), (" Auto ", "auto"), ("1MiB", 1 << 20), ("0", 0):
        monkeypatch.setenv("ECHO_MIN_BYTES", text)
        assert Options().min_bytes == least
    assert Options(min_bytes="auto").min_bytes == "auto", "an argument wins"
    monkeypatch.setenv("ECHO_MIN_BYTES", "car")
    with pytest.raises(ValueError, match=r"ECHO_MIN_BYTES='car' cannot be read: use .* KiB, MiB or GiB, or auto"):
        Options()


def test_an_out_of_range_variable_is_named(monkeypatch):
    monkeypatch.setenv("ECHO_BITS", "5")
    with pytest.raises(ValueError, match="ECHO_BITS='5' is set"):
        Options()


def test_dtypes_accepts_torch_dtypes_in_any_order():
    assert Options(dtypes=[torch.float16, "float32"]).dtypes == ("float32", "float16")
    assert Options(dtypes=torch.bfloat16).dtypes == ("bfloat16",)


def test_timeout_as_timedelta():
    assert Options(timeout=timedelta(minutes=2)).timeout == 120.0


def test_a_mistyped_variable_is_pointed_out_once_and_others_are_left_alone(monkeypatch):
    monkeypatch.setenv("ECHO_BIT", "8")
    monkeypatch.setenv("ECHO_SERVER_PORT", "80")
    with pytest.warns(UserWarning, match="ECHO_BIT is not an option of echo; did you mean ECHO_BITS"):
        Options()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Options()


def test_plain_variables(monkeypatch):
    assert not options.is_off() and options.replaced_backends() == () and options.log_level() == "info"
    monkeypatch.setenv("ECHO_OFF", "1")
    monkeypatch.setenv("ECHO_REPLACE", "NCCL,gloo")
    monkeypatch.setenv("ECHO_LOG", "debug")
    assert options.is_off() and options.replaced_backends() == ("nccl", "gloo") and options.log_level() == "debug"
    monkeypatch.setenv("ECHO_OFF", "0")
    monkeypatch.setenv("ECHO_REPLACE", "mpi")
    monkeypatch.setenv("ECHO_LOG", "loud")
    assert not options.is_off()
    with pytest.warns(UserWarning, match="only nccl and gloo"):
        assert options.replaced_backends() == ()
    with pytest.warns(UserWarning, match="using info"):
        assert options.log_level() == "info"


def test_the_fingerprint_shows_every_option_and_differs_with_each():
    shown = json.loads(Options().fingerprint())
    assert set(option_names()) <= set(shown)
    assert {"echo", "source", "protocol", "torch"} <= set(shown)
    assert Options().fingerprint() == Options().fingerprint()
    assert Options(tau=0.25).fingerprint() != Options().fingerprint()
    assert Options(inner_options=object()).fingerprint() == Options().fingerprint()
