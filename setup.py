"""Builds the extension echo_pg._C with CMake, against the torch that is installed here.

    pip install --no-build-isolation .        (or -e . for development)

A binary fits one minor version of torch, so the build never fetches a torch of its own: it uses the caller's, and
records in echo_pg/_build_info.py what it was built for. Environment: ECHO_CUDA=0 leaves the CUDA parts out;
ECHO_CUDA_ARCHS names the compute capabilities to build for, as "8.0 9.0+PTX"; ECHO_SANITIZE=thread|address; MAX_JOBS
limits the compilers that run at a time; CC, CXX and CUDA_HOME as usual.
"""

import glob
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

import setuptools
from setuptools import Extension
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
INSTALL = "pip install --no-build-isolation ."
OLDEST_TORCH, NEWEST_TORCH = (2, 9), (2, 14)
OLDEST_GPU = (8, 0)
# Code for 8.x and 9.x, and PTX that drivers translate for GPUs to come.
CUDA_ARCHS = "8.0 9.0+PTX"


def stop(message: str) -> NoReturn:
    raise SystemExit(f"\necho-pg cannot be built: {message}\n")


def installed_torch() -> Any:
    """torch as installed, without its plugins: a broken echo must not prevent its own repair."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch
    except Exception as error:
        stop(f"torch cannot be imported ({error}).\nWith torch installed, let the build see it:\n    {INSTALL}")
    minor = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST_TORCH <= minor <= NEWEST_TORCH:
        stop(f"it needs torch >= 2.9, < 2.15, and this environment has torch {torch.__version__}")
    return torch


def nvcc_release(nvcc: Path) -> tuple[int, int]:
    try:
        text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0, 0
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def pip_cuda_folders(*names: str) -> list[Path]:
    """Where pip puts NVIDIA's packages, in every site folder of this Python."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return [Path(root) / name for root in roots for name in names]


def find_nvcc(torch: Any) -> Path | None:
    """An nvcc of torch's CUDA major version; None if CUDA is not wanted. The build stops where one is missing."""
    if not torch.version.cuda or os.environ.get("ECHO_CUDA") == "0":
        return None
    major, minor = (int(part) for part in torch.version.cuda.split(".")[:2])
    candidates = [Path(home) / "bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates += [home / "bin/nvcc" for home in pip_cuda_folders(f"cu{major}", "cuda_nvcc")]
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    seen = []
    for nvcc in candidates:
        release = nvcc_release(nvcc) if nvcc.exists() else (0, 0)
        if release[0] == major:
            return nvcc
        if release[0]:
            seen.append(f"{nvcc} is of CUDA {release[0]}.{release[1]}")
    parts = [f'"nvidia-{part}=={major}.{minor}.*"' for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-cccl")]
    advice = (
        f"pip install {' '.join(parts)}"
        if major >= 13
        else f"conda install -c nvidia cuda-nvcc={major}.{minor}   (or point CUDA_HOME to a CUDA {major} toolkit)"
    )
    found = "; ".join(seen) or "there is none in CUDA_HOME, PATH or pip's packages"
    stop(
        f"torch {torch.__version__} needs an nvcc of CUDA {major} for its CUDA {torch.version.cuda}, and {found}.\n"
        f"Get one with\n    {advice}\n"
        f"or build without CUDA (CUDA tensors are then forwarded to NCCL, unquantized):\n    ECHO_CUDA=0 {INSTALL}"
    )


def cuda_archs(torch: Any, nvcc: Path) -> str:
    """The compute capabilities to build for, as in TORCH_CUDA_ARCH_LIST: those of ECHO_CUDA_ARCHS; by default the usual
    ones and those of this machine's GPUs that are newer, if nvcc knows them: there a driver would translate PTX."""
    if chosen := os.environ.get("ECHO_CUDA_ARCHS"):
        return " ".join(re.split(r"[\s;,]+", chosen.strip()))
    archs = CUDA_ARCHS.split()
    newest = max(capability_of(arch) for arch in archs)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    newer = {gpu for gpu in map(torch.cuda.get_device_capability, gpus) if gpu[0] > newest[0]}
    if newer:
        known = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
        archs += [f"{major}.{minor}" for major, minor in sorted(newer) if f"compute_{major}{minor}" in known]
    return " ".join(archs)


def capability_of(arch: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.(\d)(\+PTX)?", arch)
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    if capability < OLDEST_GPU:
        oldest = ".".join(map(str, OLDEST_GPU))
        stop(f"ECHO_CUDA_ARCHS has {arch!r}, but takes compute capabilities from {oldest} on, as {CUDA_ARCHS!r}")
    return capability


def as_cmake_has_it(archs: str) -> str:
    """CMAKE_CUDA_ARCHITECTURES: a number alone stands for code and PTX."""
    named = []
    for arch in archs.split():
        major, minor = capability_of(arch)
        named.append(f"{major}{minor}{'' if arch.endswith('+PTX') else '-real'}")
    return ";".join(named)


def cuda_runtime(torch: Any, nvcc: Path) -> str:
    """The shared CUDA runtime to link: by its file, because pip's packages have no development link."""
    major = torch.version.cuda.split(".")[0]
    home = nvcc.resolve().parent.parent
    folders = [home / "lib64", home / "lib"]
    folders += [folder / "lib" for folder in pip_cuda_folders(f"cu{major}", "cuda_runtime")]
    for folder in folders:
        for name in (f"libcudart.so.{major}*", "libcudart.so"):
            if found := sorted(glob.glob(str(folder / name))):
                return found[0]
    stop(f"no libcudart.so.{major} in {', '.join(map(str, folders))}")


def source_hash() -> str:
    """One hash over all sources of both halves: ranks that run different code must notice before they exchange a
    byte."""
    digest = hashlib.sha256()
    files = [p for p in (ROOT / "backend").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh", ".txt"}]
    for path in sorted(files + [p for p in (ROOT / "echo_pg").rglob("*.py") if p.name != "_build_info.py"]):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def protocol_version() -> int:
    for header in sorted((ROOT / "backend/core").glob("*.h")):
        if found := re.search(r"kProtocolVersion\s*=\s*(\d+)", header.read_text()):
            return int(found[1])
    stop("no kProtocolVersion in backend/core/*.h")


def write_build_info(path: Path, torch: Any, nvcc: Path | None) -> None:
    sanitize = os.environ.get("ECHO_SANITIZE", "")
    values = {
        "ECHO": re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1],  # type: ignore[index]
        "TORCH": torch.__version__,
        "CUDA": torch.version.cuda if nvcc else "none",
        "CUDA_ARCHS": cuda_archs(torch, nvcc) if nvcc else "",
        "PYTHON": f"{sys.version_info.major}.{sys.version_info.minor}",
        "SOURCE_HASH": source_hash(),
        "PROTOCOL": protocol_version(),
        "FLAGS": f"-O2 -ffp-contract=off{' -fsanitize=' + sanitize if sanitize else ''}",
    }
    lines = ['"""Written by setup.py: what the extension beside this file was built for."""', ""]
    lines += [f"{name} = {value!r}" for name, value in values.items()]
    path.write_text("\n".join(lines).replace("'", '"') + "\n")


class CMakeBuild(build_ext):
    """Configures backend/ and builds its one target `_C`; setuptools only decides where the file goes."""

    def build_extension(self, ext: Extension) -> None:
        torch = installed_torch()
        cmake = shutil.which("cmake")
        if cmake is None:
            stop("cmake is not on PATH. Get it with\n    pip install cmake ninja")
        nvcc = find_nvcc(torch)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # The folder stays between builds, so that a second one compiles only what changed.
        sanitize = os.environ.get("ECHO_SANITIZE", "")
        name = f"cp{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}"
        build = ROOT / "build" / (name + (f"-{sanitize}" if sanitize else ""))
        subprocess.run([str(cmake), *self.configure_arguments(torch, nvcc, build, sanitize)], check=True)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        subprocess.run([str(cmake), "--build", str(build), "--target", "_C", "-j", jobs], check=True)
        built = build / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        if b"libstdc++.so.6" not in built.read_bytes():
            stop(
                "the C++ compiler linked its own copy of libstdc++ into the extension, which crashes beside torch's.\n"
                f"Use the system compiler:\n    CC=/usr/bin/gcc CXX=/usr/bin/g++ CUDAHOSTCXX=/usr/bin/g++ {INSTALL}"
            )
        target.unlink(missing_ok=True)  # never written in place: a running program may have it mapped
        shutil.copy2(built, target)
        write_build_info(target.parent / "_build_info.py", torch, nvcc)

    def configure_arguments(self, torch: Any, nvcc: Path | None, build: Path, sanitize: str) -> list[str]:
        from torch.utils.cpp_extension import include_paths

        definitions = {
            "CMAKE_BUILD_TYPE": "Release",
            "ECHO_TORCH_INCLUDE": ";".join(include_paths()),
            "ECHO_TORCH_LIB": str(Path(torch.__file__).parent / "lib"),
            "ECHO_TORCH_CXX11_ABI": str(int(torch.compiled_with_cxx11_abi())),
            "ECHO_PYTHON_INCLUDE": sysconfig.get_paths()["include"],
            "ECHO_EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
            "ECHO_SANITIZE": sanitize,
            "ECHO_CUDA": "ON" if nvcc else "OFF",
        }
        if nvcc:
            definitions["CMAKE_CUDA_COMPILER"] = str(nvcc)
            definitions["ECHO_CUDA_ARCHS"] = as_cmake_has_it(cuda_archs(torch, nvcc))
            definitions["ECHO_CUDA_RUNTIME"] = cuda_runtime(torch, nvcc)
        fresh = not (build / "CMakeCache.txt").exists()
        generator = ["-G", "Ninja"] if fresh and shutil.which("ninja") else []
        flags = [f"-D{name}={value}" for name, value in definitions.items()]
        return ["-S", str(ROOT / "backend"), "-B", str(build), *generator, *flags]

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for ext in self.extensions:
            source = Path(self.build_lib) / Path(self.get_ext_filename(self.get_ext_fullname(ext.name)))
            shutil.copy2(source.parent / "_build_info.py", ROOT / "echo_pg/_build_info.py")


if importlib.util.find_spec("wheel") is None and int(setuptools.__version__.split(".")[0]) <= 70:
    stop(f"setuptools {setuptools.__version__} is too old to build wheels alone.\n    pip install -U setuptools")
setuptools.setup(ext_modules=[Extension("echo_pg._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
