"""echo: a torch.distributed backend whose all-reduce carries tensor-parallel traffic in 4 bits with error feedback.

    import torch.distributed as dist
    dist.init_process_group("echo")          # importing torch is enough; options: pg_options=echo_pg.Options(bits=8)

Nothing here imports torch when the package is imported: torch itself imports this package to find the backend, and must
never fail over it. Where torch does not look for backends (TORCH_DEVICE_BACKEND_AUTOLOAD=0), importing this package
after torch registers it.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .options import Options
    from .report import Explanation, all_reduce, exact, explain, load_state_dict, new_pass, state_dict, stats

_HOMES = {
    "Options": "options",
    "Explanation": "report",
    "all_reduce": "report",
    "exact": "report",
    "explain": "report",
    "load_state_dict": "report",
    "new_pass": "report",
    "state_dict": "report",
    "stats": "report",
}

__all__ = [
    "Explanation",
    "Options",
    "__version__",
    "all_reduce",
    "exact",
    "explain",
    "load_state_dict",
    "new_pass",
    "state_dict",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'echo_pg' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


# Not while torch.distributed is itself being imported.
if hasattr(sys.modules.get("torch.distributed"), "init_process_group"):
    importlib.import_module(".registration", __name__).register()
