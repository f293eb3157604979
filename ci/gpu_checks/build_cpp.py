"""Builds the C++ tests of the kernels without torch: python build_cpp.py NVCC ARCHITECTURE FOLDER."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("cuda_exit_test", "cuda_stages_test", "cuda_peer_test")
_PROGRAMS = (*TESTS, "cuda_update_speed")  # which measures, for those who tune
_ALONE = "cuda_exit_test"  # needs nothing but headers
ISAS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"],
}
_CORE = ("call_record", "fault_text")


def compilations(nvcc: str, arch: str, folder: Path) -> list[list[str]]:
    """What may run at the same time; the longest first, so that no core waits for it in the end."""
    gxx = [os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-ffp-contract=off"]
    # Line numbers are for compute-sanitizer; they change no instruction.
    cuda = [nvcc, "-std=c++20", "-O3", "--fmad=false", "-Xcompiler", "-ffp-contract=off", f"-arch={arch}", "-lineinfo"]
    kernels = sorted((ROOT / "backend/cuda").glob("*.cu"), key=lambda path: "4bit" not in path.name)
    plain = [ROOT / "backend/cpu/dispatch.cpp", *(ROOT / f"backend/core/{name}.cpp" for name in _CORE)]
    tests = [ROOT / f"tests/cpp/{name}.cu" for name in _PROGRAMS]
    commands = [
        [*cuda, "-split-compile=0", "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
        for source in (*kernels, *tests, *plain)
    ]
    stages = str(ROOT / "backend/cpu/stages_impl.cpp")
    commands += [
        [*gxx, *flags, f"-DECHO_ISA={isa}", "-c", stages, "-o", str(folder / f"stages_{isa}.o")]
        for isa, flags in ISAS.items()
    ]
    return commands


def links(nvcc: str, arch: str, folder: Path) -> list[list[str]]:
    names = [path.stem for path in sorted((ROOT / "backend/cuda").glob("*.cu"))]
    names += [*_CORE, "dispatch", *(f"stages_{isa}" for isa in ISAS)]
    objects = [str(folder / f"{name}.o") for name in names]
    link = [nvcc, f"-arch={arch}", "-o"]
    return [
        [*link, str(folder / name), str(folder / f"{name}.o"), *([] if name == _ALONE else objects)]
        for name in _PROGRAMS
    ]


def main(nvcc: str, arch: str, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for commands in (compilations(nvcc, arch, folder), links(nvcc, arch, folder)):
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            done = list(pool.map(lambda command: (command, subprocess.run(command).returncode), commands))
        for command, code in done:
            if code != 0:
                print("failed: " + " ".join(command))
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
