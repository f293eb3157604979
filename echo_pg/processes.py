"""What group creation asks of the ranks' processes: how they are watched, and that this one may open enough files."""

import os
import resource
from typing import Any

from . import build, options, report
from .agreement import NO_WATCH, ProcessWatch

# Beside Gloo's connection to each rank: what it listens and waits with, the watch over processes, and room to connect.
# A process's first group was counted to hold 6 in all with 2 ranks on a host and 10 with 4; the exchange of quantized
# calls takes more, at the first of them.
_DESCRIPTORS_PER_GROUP = 8


def require_descriptors(size: int) -> None:
    """Raises OSError where this process may not open what a group of that many ranks needs. Gloo and the store would
    meet it later, and tell of a lost connection or a time-out."""
    needed = size + _DESCRIPTORS_PER_GROUP
    held = []
    try:
        held = [os.open("/", os.O_PATH | os.O_CLOEXEC)]
        held += [os.dup(held[0]) for _ in range(needed - 1)]
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno or 0)}: a group of {size} ranks needs {needed} file descriptors, and this "
            f"process can have {len(held)} more of its {limit} (ulimit -n)",
        ) from None
    finally:
        for descriptor in held:
            os.close(descriptor)


def watch(place: Any) -> ProcessWatch:
    """Without the extension nothing is watched; that it is missing is said later, to all ranks."""
    if options.is_off():
        return NO_WATCH
    try:
        extension = build.extension()
        return ProcessWatch(extension.introduction(), extension.has_exited, _known_processes(place))
    except Exception:
        return NO_WATCH


def _known_processes(place: Any) -> dict[int, str]:
    """Introductions by rank of the new group, as other echo groups of this process have them: a rank that ends before
    it comes to the new group is then missed as soon as it has ended."""
    from torch.distributed import distributed_c10d as c10d

    known: dict[int, str] = {}
    for group, ranks in c10d._world.pg_group_ranks.items():
        introductions = getattr(report.echo_in(group), "_introductions", None)
        if introductions:
            by_global_rank = {global_rank: introductions[group_rank] for global_rank, group_rank in ranks.items()}
            known |= {rank: by_global_rank[r] for rank, r in enumerate(place.global_ranks) if r in by_global_rank}
    return known
