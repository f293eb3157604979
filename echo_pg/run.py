"""`python -m echo_pg run script.py args`: runs a program unchanged, with "nccl" and "gloo" meaning echo.

For programs whose backend name is fixed or checked: Megatron keeps `--distributed-backend nccl`, DeepSpeed its default.
Works the same under torchrun (`torchrun --nproc-per-node 8 -m echo_pg run script.py args`) and for modules (`run -m
package.module args`).
"""

import os
import runpy
import sys

from . import alias, options

USAGE = "usage: python -m echo_pg run [-m] script.py|module [arguments ...]"


def main(arguments: list[str]) -> int:
    """Run the program that `arguments` name as __main__ and return 0; its own exit or exception passes through."""
    as_module = arguments[:1] == ["-m"]
    program = arguments[1:] if as_module else arguments
    if not program or program[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 0 if program else 2
    if not as_module and not os.path.exists(program[0]):
        print(f"echo_pg run: there is no file {program[0]!r}\n{USAGE}", file=sys.stderr)
        return 2
    if not options.is_off():
        options.replace_in_children("nccl", "gloo")
        alias.install(("nccl", "gloo"))
    sys.argv = program
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")
    return 0
