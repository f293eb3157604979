"""The package as installed: import, registration, damaged installations, log lines, launcher.

Installations that are broken in some way are made in a folder of their own, which a child process finds before the real
one.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import echo_pg
from echo_pg import build, log, registration

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(echo_pg.__file__).parent


def python(code, *arguments, path=(), **variables):
    """Run `code` in a fresh interpreter; returns (exit code, output of both streams)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONWARNINGS": "default"} | variables
    command = [sys.executable, *(["-c", code] if code else []), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd="/")
    return done.returncode, done.stdout + done.stderr


ONE_RANK = """
import torch, torch.distributed as dist
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(8)
dist.all_reduce(x)
print(dist.get_backend(), x.sum().item())
dist.destroy_process_group()
"""


# ---- import and installation
# --------------------------------------------------------------------------------------------------------
def test_versions_agree():
    assert re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1] == echo_pg.__version__


def test_a_source_distribution_holds_what_it_is_built_from(tmp_path):
    source = tmp_path / "source"
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")
    for name in ("backend", "docs", "echo_pg"):
        shutil.copytree(ROOT / name, source / name, ignore=unbuilt)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    command = [sys.executable, "setup.py", "-q", "sdist", "--formats=tar", "--dist-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert expected - inside == set()


def test_importing_the_package_does_not_import_torch():
    code, output = python("import sys, echo_pg; assert 'torch' not in sys.modules; print(dir(echo_pg))")
    assert code == 0 and "Options" in output


@pytest.mark.parametrize("first", ["import echo_pg; echo_pg.Options", "import torch", "import echo_pg.registration"])
def test_import_torch_registers_the_backend_whatever_comes_first(first):
    code, output = python(f"{first}; import torch.distributed as dist; print(dist.is_backend_available('echo'))")
    assert (code, output.strip()) == (0, "True")


def test_without_torchs_autoload_importing_the_package_registers_it():
    code = "import torch, torch.distributed as dist; before = 'ECHO' in dist.Backend._plugins; import echo_pg\n"
    code += ONE_RANK.format(backend="echo") + "\nprint(before)"
    code, output = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0", ECHO_LOG="off")
    assert code == 0 and {"echo 8.0", "False"} <= set(output.splitlines()), output


def test_registering_twice_keeps_torchs_own_defaults():
    before = dict(dist.Backend.default_device_backend_map)
    registration.register()
    registration.register()
    assert dist.Backend.default_device_backend_map == before
    assert dist.Backend.backend_capability["echo"] == registration.devices()


def installation(folder, build_info, extension=None):
    """A copy of the package with the given record of its build and, as extension, the given bytes or none."""
    target = folder / "echo_pg"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py"))
    if build_info:
        (target / "_build_info.py").write_text("".join(f"{name} = {value!r}\n" for name, value in build_info.items()))
    if extension is not None:
        (target / "_C.abi3.so").write_bytes(extension)
    # An editable installation of the real package would step in for what is missing here.
    (folder / "sitecustomize.py").write_text(
        "import sys; sys.meta_path[:] = [finder for finder in sys.meta_path if 'Editable' not in repr(finder)]"
    )
    return folder


BUILT = {
    "TORCH": torch.__version__,
    "CUDA": "none",
    "CUDA_ARCHS": "",
    "PYTHON": "3",
    "SOURCE_HASH": "0",
    "PROTOCOL": 1,
    "FLAGS": "",
}
BROKEN = {
    "never built": ({}, None, "has not been built"),
    "no extension": (BUILT, None, "cannot be loaded"),
    "damaged extension": (BUILT, b"not an ELF file", "cannot be loaded"),
    "another torch": (
        BUILT | {"TORCH": "2.1.0"},
        None,
        "built for torch 2.1.0, but this is torch " + torch.__version__,
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_installation_never_breaks_torch_and_says_how_to_repair_it(kind, tmp_path):
    build_info, extension, complaint = BROKEN[kind]
    broken = installation(tmp_path, build_info, extension)
    assert python("import torch; print(torch.ones(1))", path=[broken]) == (0, "tensor([1.])\n")
    code, output = python(ONE_RANK.format(backend="echo"), path=[broken])
    assert code != 0 and complaint in output and "pip install --no-build-isolation" in output
    code, output = python(ONE_RANK.format(backend="echo"), path=[broken], ECHO_OFF="1")
    assert code == 0 and "echo 8.0" in output


def test_a_failing_registration_is_a_warning():
    code = "import torch.distributed as d; d.Backend.register_backend = None; d.Backend._plugins.clear()"
    code, output = python(f"{code}; from echo_pg import registration; registration.register(); print('alive')")
    assert code == 0 and "could not be registered" in output and "alive" in output


# ---- log, build record, launcher
# -----------------------------------------------------------------------------------------------------------
def test_log_lines(capsys, monkeypatch):
    class Extension:
        def set_log_callback(self, callback):
            self.callback = callback

        def set_log_calls(self, on):
            self.each_call = on

    monkeypatch.setenv("ECHO_LOG", "info")
    monkeypatch.setattr(log.logger, "handlers", [])
    extension = Extension()
    log.connect(extension)
    assert extension.each_call is False, "only with ECHO_LOG=debug"
    say = extension.callback
    group = {"group": "tp", "rank": 0, "size": 4}
    how = {"fabric": "wire", "bits": 4, "quantizer": "zero_aware", "rotation_size": 0}
    how |= {"feedback": True, "state_bytes": 2048}
    say("first_quantized", group | how)
    counts = {"calls_quantized": 3, "bytes_quantized": 3 << 20, "calls_forwarded": 2, "bytes_forwarded": 10}
    say("destroyed", group | counts | {"reasons": [("small", 2)]})
    say("nothing_quantized", group | {"reasons": []})
    say("nothing_quantized", group | {"reasons": [("not a SUM", 4)], "reduce_scatters": 8})
    say("notice", {"message": "100% of it", "level": "debug"})
    say("unknown", {})
    assert capsys.readouterr().err.splitlines() == [
        "[echo] group tp: quantizing over 4 ranks "
        "(fabric wire, 4 bits, zero_aware, feedback on (2.0 KiB of state), cpu)",
        "[echo] group tp ends: 3 calls quantized (3.0 MiB), 2 forwarded (10 B): small (2)",
        "[echo] group tp: nothing was quantized in three passes",
        "[echo] group tp: nothing was quantized in three passes: "
        "sequence parallelism is not quantized (reduce-scatter 8)",
    ]
    monkeypatch.setenv("ECHO_LOG", "off")
    log.connect(extension)
    say("nothing_quantized", group)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("ranks", "lines"), [(4, 0), (1, 1)])
def test_the_end_of_a_group_of_one_rank(capsys, monkeypatch, ranks, lines):
    """In a program of several ranks each would have such a line."""
    launched = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(log.logger, "handlers", [log._Stderr()])
    monkeypatch.setattr(log.logger, "level", logging.INFO)
    counts = {"calls_quantized": 0, "bytes_quantized": 0, "calls_forwarded": 2, "bytes_forwarded": 10}
    log.on_event("destroyed", {"group": "dp", "rank": 0, "size": 1, "reasons": [("group of one rank", 2)]} | counts)
    assert capsys.readouterr().err.count("group of one rank") == lines


def test_the_rebuild_command_names_this_python_and_the_source():
    assert build.rebuild_command().startswith(f"{sys.executable} -m pip install --no-build-isolation")
    if PACKAGE.parent == ROOT:
        assert build.rebuild_command().endswith(f"-e {ROOT}")


PROGRAM = """
import sys, torch.distributed as dist
print(__name__, sys.argv[1:], dist.init_process_group.__code__.co_filename.endswith("alias.py"))
"""


def test_run_starts_a_script_or_module_as_main_with_its_arguments(tmp_path):
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "program.py").write_text("import helper" + PROGRAM)
    script = str(tmp_path / "program.py")
    expected = "__main__ ['--replace', '-m'] True\n"
    arguments = ("--replace", "-m")
    assert python("", "-m", "echo_pg", "run", script, *arguments) == (0, expected)
    assert python("", "-m", "echo_pg", "run", "-m", "program", *arguments, path=[tmp_path]) == (0, expected)
    off = python("", "-m", "echo_pg", "run", script, *arguments, ECHO_OFF="1")
    assert off == (0, expected.replace("True", "False"))
    code, output = python("", "-m", "echo_pg", "run", str(tmp_path / "absent.py"))
    assert code == 2 and "there is no file" in output and "usage:" in output


def test_run_passes_an_exit_code_through(tmp_path):
    (tmp_path / "program.py").write_text("raise SystemExit(7)")
    assert python("", "-m", "echo_pg", "run", str(tmp_path / "program.py"))[0] == 7
