"""A run that is stopped and resumed gives the bytes of one that is not. Between passes a group holds one number, which
`echo_pg.state_dict` saves; feedback states end with their pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference_group import TWO_AVERAGES
from test_allreduce import digest
from test_overflow import WIDTH, Model

SETTINGS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "the paper's": TWO_AVERAGES | {"residual": "group", "state_dtype": "tensor", "scale_dtype": "float16"},
    "early sites by fraction": {"early_sites": 0.5},
}


class Deep(torch.nn.Module):
    def __init__(self, rank: int, size: int, group: Any) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Model(rank, size, group) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train(rank: int, size: int, settings: dict[str, Any], first: int, last: int, folder: str, keep: bool) -> list[str]:
    """Steps first..last-1, an evaluation without gradients before each, from the files of step `first` if that is
    not 0. Digests of all evaluations and of the last weights; with `keep` the state of the group is saved as well."""
    import echo_pg

    options = echo_pg.Options(min_bytes=0, **settings)
    group = dist.new_group(backend="echo", pg_options=options, group_desc="tp")
    model = Deep(rank, size, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    file = Path(folder) / f"{first}.{rank}.pt"
    if first > 0:
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if keep:
            echo_pg.load_state_dict(saved["echo"], group)
    found = []
    for step in range(first, last):
        gen = torch.Generator().manual_seed(step)
        x = torch.randn(32, WIDTH, generator=gen).half()
        with torch.no_grad():
            found.append(digest(model(x)))
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "echo": echo_pg.state_dict(group)}
    torch.save(state, Path(folder) / f"{last}.{rank}.pt")
    assert echo_pg.stats(group)["calls_quantized"] == (last - first) * 9, "3 sums to evaluate, 3 forward, 3 backward"
    dist.destroy_process_group(group)
    return [*found, digest(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))]


def run_all(rank: int, size: int, folder: str) -> None:
    for name, settings in SETTINGS.items():
        whole = train(rank, size, settings, 0, 4, folder, True)
        before = train(rank, size, settings, 0, 2, folder, True)
        after = train(rank, size, settings, 2, 4, folder, True)
        assert before[:2] + after == whole, name
        without = train(rank, size, settings, 2, 4, folder, False)
        if "early_sites" in settings:
            # What would be missed: how long a pass is, so that the first evaluation is 8 bits throughout.
            assert without[0] != after[0]
        else:
            assert without == after, f"{name}: nothing else is held between passes"


def test_resuming_gives_the_same_bytes_as_not_stopping(tmp_path: Path) -> None:
    run_ranks(run_all, 2, str(tmp_path), timeout=120)


def run_refusals(rank: int, size: int) -> None:
    import echo_pg

    group = dist.new_group(backend="echo", pg_options=echo_pg.Options(policy="all", min_bytes=0, early_sites=0.5))
    assert echo_pg.state_dict(group) == {"version": 1, "forward_sites": None}
    echo_pg.load_state_dict({"version": 1, "forward_sites": None}, group)
    bad: list[Any] = [{}, [], None, {"version": 2, "forward_sites": 3}, {"version": 1, "forward_sites": 3, "x": 1}]
    bad += [{"version": 1, "forward_sites": sites} for sites in (-1, 1.0, True, "3", 1 << 62)]
    for state in bad:
        with pytest.raises(ValueError, match=r"no state of an echo group|must be None or a count"):
            echo_pg.load_state_dict(state, group)
    echo_pg.load_state_dict({"version": 1, "forward_sites": 4}, group)
    assert echo_pg.state_dict(group)["forward_sites"] == 4
    echo_pg.new_pass("forward", group)
    for _ in range(3):
        dist.all_reduce(torch.ones(100).bfloat16(), group=group)
    assert echo_pg.state_dict(group)["forward_sites"] == 3, "of the pass that has just ended"
    with pytest.raises(ValueError, match="before the group's first quantized"):
        echo_pg.load_state_dict({"version": 1, "forward_sites": 4}, group)
    with pytest.raises(ValueError, match="not 'echo'"):
        echo_pg.state_dict()


def test_what_is_no_state_is_refused() -> None:
    run_ranks(run_refusals, 2)
