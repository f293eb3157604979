"""Compiles what knows torch against the headers of a torch that is not installed: syntax and types, no code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The heaviest headers, parsed once per version. Those whose contents move between versions (c10d, autograd) are not
# among them, so that a source must include what it uses of them.
HEAVY = "#include <ATen/ATen.h>\n#include <torch/csrc/utils/pybind.h>\n"
# torch makes this one when it is configured, so a build without CUDA lacks it and no other of c10/cuda.
CUDA_MACROS = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n"


class NoHeaders(Exception):
    """The wheel of a version could not be had."""


def fetch(version: str, python: str, folder: Path) -> None:
    """Unpack torch/include of `version` into `folder`, once. Of the wheel for 64-bit ARM: up to 2.10 that is the build
    without CUDA, a small download, and its headers are the same."""
    if (folder / "include/torch").is_dir():
        return
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq", "--no-deps"]
        target = ["--only-binary", ":all:", "--platform", "manylinux_2_28_aarch64", "--python-version", python]
        done = subprocess.run([*pip, *target, "-d", temporary, f"torch=={version}"], capture_output=True, text=True)
        wheels = list(Path(temporary).glob("torch-*.whl"))
        if not wheels:
            raise NoHeaders(f"pip has no wheel of torch {version}:\n{done.stderr}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("torch/include/")]
            wheel.extractall(temporary, names)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(temporary) / "torch/include", folder / "include")
    macros = folder / "include/c10/cuda/impl/cuda_cmake_macros.h"
    if not macros.exists():
        macros.write_text(CUDA_MACROS)


def cuda_include() -> Path | None:
    """Of the toolkit that has nvcc, or of one in its usual place; None without one."""
    nvcc = shutil.which("nvcc")
    homes = [Path(nvcc).resolve().parent.parent] if nvcc else []
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    return next((home / "include" for home in homes if (home / "include/cuda_runtime.h").exists()), None)


def compile_all(folder: Path, python_include: str) -> tuple[int, str]:
    """How many sources were compiled, with CUDA's parts where its headers are, and the compiler's messages if any
    source failed."""
    include = folder / "include"
    flags = ["-std=c++20", "-Wall", "-Wextra", f"-I{ROOT / 'backend'}", "-DTORCH_EXTENSION_NAME=_C"]
    flags += ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    for system in include, include / "torch/csrc/api/include", python_include:
        flags += ["-isystem", str(system)]
    compiler = [os.environ.get("CXX", "g++"), *flags]
    sources = sorted([*(ROOT / "backend/pg").glob("*.cpp"), *(ROOT / "backend/wire").glob("*.cpp")])
    jobs = [(source, []) for source in sources]
    if cuda := cuda_include():
        with_cuda = ["-DECHO_WITH_CUDA=1", "-DUSE_C10D_NCCL", "-isystem", str(cuda)]
        jobs += [(source, with_cuda) for source in sources if re.search("cuda", source.read_text(), re.I)]
    heavy = folder / "heavy.hpp"
    heavy.write_text(HEAVY)
    subprocess.run([*compiler, "-x", "c++-header", heavy, "-o", f"{heavy}.gch"], check=True)

    def compile_one(job: tuple[Path, list[str]]) -> str:
        source, extra = job
        command = [*compiler, *extra, "-include", heavy, "-fsyntax-only", source]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        messages = list(pool.map(compile_one, jobs))
    # Large, and of one compiler: nothing to keep.
    Path(f"{heavy}.gch").unlink()
    return len(jobs), "\n".join(message[:3000] for message in messages if message)
