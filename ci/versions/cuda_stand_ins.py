"""Makes a torch that was built with CUDA importable where CUDA's libraries are not installed, for tests on the CPU.

    python ci/versions/cuda_stand_ins.py SITE_PACKAGES      (x86-64)

A package index that has no CPU build of a torch version has one that links more than 2 GB of CUDA libraries. Installed
with --no-deps it lacks them. Each missing library is made here, small and in torch/lib; together they define every
function that torch's libraries expect and that none of them defines. Each returns 100, CUDA's "no device", so that
torch finds no GPU. Texts of errors are the exception, since callers print them.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

NO_DEVICE = 100
FUNCTIONS = "libcuda_stand_ins.so"
OURS = re.compile(r"(__)?(cu|nccl|nv)")  # names of CUDA, NCCL, NVRTC, NVSHMEM
TEXTS = re.compile(r"Get(Error|Status)(String|Name)$|ncclGetLastError$")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing_libraries(libraries: list[Path]) -> set[str]:
    """What torch's libraries link of CUDA and do not bring. What the system has counts as missing too, so that the
    outcome is the same everywhere: the loader looks into torch/lib first."""
    needed = {name for path in libraries for name in re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", str(path)))}
    return {name for name in needed - {path.name for path in libraries} if re.match(r"lib(cu|nccl|nv)", name)}


def missing_functions(libraries: list[Path]) -> set[str]:
    """Names without their versions: the loader accepts a library without versions for any."""
    wanted, defined = set(), set()
    for path in libraries:
        wanted |= set(re.findall(r"^\s+U ([^@\s]+)", run("nm", "-D", str(path)), re.M))
        defined |= set(re.findall(r"^\w+ [^U\s] ([^@\s]+)", run("nm", "-D", str(path)), re.M))
    return {name for name in wanted - defined if OURS.match(name)}


def assembly(functions: set[str]) -> str:
    """Text of a source that defines all functions. Addresses of functions are taken too, so each has its own label."""
    lines = ['.section .note.GNU-stack,"",@progbits', ".text"]
    for name in sorted(functions):
        result = "lea text(%rip), %rax" if TEXTS.search(name) else f"mov ${NO_DEVICE}, %eax"
        lines.append(f".globl {name}\n.type {name}, @function\n{name}: {result}\nret")
    return "\n".join([*lines, 'text: .asciz "a stand-in for CUDA"', ""])


def main() -> int:
    folder = Path(sys.argv[1]) / "torch/lib"
    libraries = sorted(path for path in folder.iterdir() if ".so" in path.name and not path.is_symlink())
    missing = missing_libraries(libraries)
    if not missing:
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "stand_ins.s"
        source.write_text(assembly(missing_functions(libraries)))
        # All functions in a library of its own, which the others need: the loader takes a library without versions for
        # any version, but not one that has the very name that a version is asked of.
        run("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{FUNCTIONS}", str(source), "-o", str(folder / FUNCTIONS))
        for name in sorted(missing):
            needs = ["-Wl,--no-as-needed", f"-L{folder}", f"-l:{FUNCTIONS}", "-Wl,-rpath,$ORIGIN"]
            run("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", *needs, "-o", str(folder / name))
    print(f"{len(missing)} stand-ins for CUDA's libraries in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
