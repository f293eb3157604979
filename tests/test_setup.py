"""setup.py: for which GPUs the kernels are built."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.delenv("ECHO_CUDA_ARCHS", raising=False)
    spec = importlib.util.spec_from_file_location("echo_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_with(*gpus: tuple[int, int]) -> Any:
    cuda = SimpleNamespace(
        is_available=lambda: bool(gpus), device_count=lambda: len(gpus), get_device_capability=gpus.__getitem__
    )
    return SimpleNamespace(cuda=cuda)


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\necho compute_90; echo compute_100; echo compute_120\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "gpus, expected",
    [
        ((), "80-real;90"),
        (((9, 0), (8, 6)), "80-real;90"),
        (((10, 0), (9, 0), (10, 0)), "80-real;90;100-real"),
        (((12, 0), (10, 0)), "80-real;90;100-real;120-real"),
        (((13, 0),), "80-real;90"),  # which this nvcc does not know: the driver translates PTX
    ],
)
def test_by_default_the_usual_ones_and_newer_ones_that_are_here(
    setup: ModuleType, nvcc: Path, gpus: tuple[tuple[int, int], ...], expected: str
) -> None:
    assert setup.as_cmake_has_it(setup.cuda_archs(torch_with(*gpus), nvcc)) == expected


@pytest.mark.parametrize(
    "chosen, expected", [("9.0", "90-real"), ("8.6;9.0+PTX", "86-real;90"), ("8.0, 12.0", "80-real;120-real")]
)
def test_the_variable_says_which(
    setup: ModuleType, nvcc: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, expected: str
) -> None:
    monkeypatch.setenv("ECHO_CUDA_ARCHS", chosen)
    assert setup.as_cmake_has_it(setup.cuda_archs(torch_with((10, 0)), nvcc)) == expected


@pytest.mark.parametrize("chosen", ["7.5 8.0", "9", "sm_90", "9.0a", "native"])
def test_what_it_cannot_be_stops_the_build_with_the_value_and_the_limit(
    setup: ModuleType, nvcc: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("ECHO_CUDA_ARCHS", chosen)
    with pytest.raises(SystemExit) as stopped:
        setup.as_cmake_has_it(setup.cuda_archs(torch_with(), nvcc))
    assert repr(chosen.split()[0]) in str(stopped.value) and "from 8.0 on" in str(stopped.value)
