"""The compiled extension: whether it fits the torch of this process, how to rebuild it, and what identifies the code of
a rank."""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from . import __version__


def info() -> ModuleType | None:
    """What setup.py wrote down when it built the extension; None if it was never built."""
    try:
        return importlib.import_module("._build_info", __package__)
    except ImportError:
        return None


def minor_of(version: str) -> str:
    """ "2.13" of "2.13.0+cpu": the part of torch's version that decides whether a binary fits."""
    return ".".join(version.split(".")[:2])


def rebuild_command() -> str:
    """The command that builds the extension for the torch of this Python, from where it was installed from."""
    pip = f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall"
    root = Path(__file__).resolve().parent.parent
    if (root / "setup.py").exists() and (root / "backend").is_dir():
        return f"{pip} -e {root}"
    try:
        origin = importlib.metadata.distribution("echo-pg").read_text("direct_url.json")
        source = json.loads(origin or "{}").get("url", "echo-pg").removeprefix("file://")
    except importlib.metadata.PackageNotFoundError:
        source = "echo-pg"
    return f"{pip} {source}"


def why_unusable() -> str | None:
    """Why the extension cannot serve this process, with the command that cures it; None if it was built for this
    torch."""
    import torch

    built = info()
    if built is None:
        return f"the extension of echo_pg has not been built. Build it with\n    {rebuild_command()}"
    if minor_of(built.TORCH) != minor_of(torch.__version__):
        return (
            f"echo_pg was built for torch {built.TORCH}, but this is torch {torch.__version__}; a binary fits one "
            f"minor version only. Rebuild it with\n    {rebuild_command()}"
        )
    return None


def extension() -> Any:
    """The module echo_pg._C, after the check that it was built for this torch. Raises ImportError with the cure
    otherwise."""
    if problem := why_unusable():
        raise ImportError(problem)
    try:
        return importlib.import_module("._C", __package__)
    except ImportError as error:
        raise ImportError(
            f"the extension of echo_pg cannot be loaded ({error}). Rebuild it with\n    {rebuild_command()}"
        ) from error


def identity() -> dict[str, Any]:
    """What two ranks must share to compute and exchange the same bytes, options aside."""
    import torch

    built = info()
    return {
        "echo": __version__,
        "source": built.SOURCE_HASH if built else "unbuilt",
        "protocol": built.PROTOCOL if built else 0,
        "torch": minor_of(torch.__version__),
        "with_cuda": bool(built and built.CUDA != "none"),
    }
