"""The compiled extension, as far as the package uses it; built from backend/pg/bindings.cpp."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import Store, Work

class Config:
    """`echo_pg.Options` resolved to plain values; see there for their meaning."""

    bits: int
    group_size: int
    rotation_size: int  # elements per rotated run, 0: no rotation
    quantizer: str
    scale_dtype: str
    tau: float
    clip: float
    feedback: bool
    residual: str
    eta: float
    a: float
    beta1: float
    beta2: float
    state_dtype: str
    early_count: int
    early_fraction: float
    early_bits: int
    rescale: str
    recompute: str
    policy: str
    min_bytes_cpu: int
    min_bytes_cuda: int
    dtypes: list[str]
    allow: str
    deny: str
    fabric: str
    workspace_bytes: int
    timeout_s: float  # at most 0: the group's own
    diagnostics: bool
    allow_shared_gpu: bool

class GroupOptions(Backend.Options):
    """What torch carries from a group to those it derives from it."""

    @property
    def chosen(self) -> Any: ...  # the group's pg_options

class Processes:
    """The processes of a group's ranks, from their introductions by rank; none: nothing is known of anyone."""

    def __init__(self, rank: int, size: int, introductions: list[str]) -> None: ...
    def exited(self) -> str: ...  # "the process of rank 1 has exited", empty if none has

class ProcessGroupEcho(Backend):
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        config: Config,
        inner_by_device: dict[str, Backend],
        make_later: Callable[[str], Backend | None] | None,
        make_wire: Callable[[str], Backend],
        timeout: timedelta,
        make_derived: Callable[[Store, int, int, list[int], Backend.Options | None], Backend],
        pg_options: Any,
        processes: Processes,
    ) -> None: ...
    @property
    def _config(self) -> Config: ...
    @property
    def _introductions(self) -> list[str]: ...  # of its ranks, by rank
    def _all_reduce(self, tensor: Tensor, async_op: bool, direction: str) -> Work: ...
    def _desc(self) -> str: ...
    def _explain(self, tensor: Tensor, op: str = "SUM") -> tuple[bool, str]: ...
    def _fault(self) -> str: ...
    def _inner(self, device_type: str) -> Backend: ...
    def _options(self) -> GroupOptions: ...
    def _new_pass(self, direction: str) -> None: ...
    def _last_forward_sites(self) -> int | None: ...
    def _resume_after(self, forward_sites: int) -> None: ...
    def _join_update(self, device: Any) -> None: ...  # for benchmarks: the current stream waits for the state's update
    def _set_look_ahead(self, tiles: int) -> None: ...  # for benchmarks: 0 takes the pipeline's overlap out
    def _stats(self) -> dict[str, Any]: ...

def decide(config: Config, facts: dict[str, Any]) -> tuple[bool, str]: ...
def current_context() -> dict[str, Any]: ...
def introduction() -> str: ...  # of this process, to other ranks
def has_exited(introduction: str) -> bool: ...
def watched_store(store: Store, processes: Processes, timeout: timedelta) -> Store: ...

class FaultReport:
    """What a rank said of a failure; as text "rank 1 reports: ..."."""

    @property
    def group_survives(self) -> bool: ...  # a forwarded call failed, and nothing else

def first_report(store: Store, rank: int, size: int, processes: Processes) -> FaultReport | None: ...
def fault_reports(store: Store, rank: int, size: int, processes: Processes, mine: str) -> str: ...
def build_flags() -> dict[str, Any]: ...
def cuda_obstacle(device: int) -> str: ...
def set_log_calls(on: bool) -> None: ...
def set_log_callback(callback: Callable[[str, dict[str, Any]], None] | None) -> None: ...
def set_hooks_installed(installed: bool) -> None: ...
def module_enter(role: int) -> int: ...
def module_exit() -> None: ...
def backward_enter() -> None: ...
def backward_exit() -> None: ...
def exact_enter() -> None: ...
def exact_exit() -> None: ...
def new_pass(direction: str) -> None: ...
