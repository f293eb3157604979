"""A tensor of more than 4 Gi elements. Its memory would be 8 GiB on every rank, so all but its ends and the part around
element 2^32 is one small piece of memory, mapped again and again, and zero: zeros stay zeros whoever sums them first.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference import Codec, decode, encode, narrow, present_mask, to_groups
from torch import Tensor

PIECE = 16 << 20  # bytes; the mapped piece
NUMEL = (1 << 32) + 12 * (PIECE // 2) + 77
SPOT = 4096  # elements looked at in each place
PLACES = (0, NUMEL // 2 // 128 * 128 - SPOT, (1 << 31) - SPOT // 2, (1 << 32) - SPOT // 2, NUMEL - SPOT)


def huge_tensor() -> Tensor:
    """Zeros of bfloat16; the pieces that hold PLACES are memory of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    access, pieces = mmap.PROT_READ | mmap.PROT_WRITE, -(-NUMEL * 2 // PIECE)
    shared = os.memfd_create("piece")
    os.truncate(shared, PIECE)
    base = libc.mmap(None, pieces * PIECE, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)  # NORESERVE
    assert base not in (None, ctypes.c_void_p(-1).value)
    own = {(place + offset) * 2 // PIECE for place in PLACES for offset in (0, SPOT - 1)}
    for piece in set(range(pieces)) - own:
        fixed = libc.mmap(base + piece * PIECE, PIECE, access, mmap.MAP_SHARED | 0x10, shared, 0)  # MAP_FIXED
        assert fixed == base + piece * PIECE
    os.close(shared)
    return torch.frombuffer((ctypes.c_char * (NUMEL * 2)).from_address(base), dtype=torch.bfloat16)


def content(rank: int, place: int) -> Tensor:
    return torch.randn(SPOT, generator=torch.Generator().manual_seed(1000 * rank + PLACES.index(place))).bfloat16()


def run_large(rank: int, size: int, fabric: str) -> list[Tensor]:
    import echo_pg

    group = dist.new_group(
        backend="echo",
        pg_options=echo_pg.Options(policy="all", feedback=False, rotation="none", fabric=fabric, timeout=200.0),
    )
    tensor = huge_tensor()
    for place in PLACES:
        tensor[place : place + SPOT] = content(rank, place)
    dist.all_reduce(tensor, group=group)
    assert echo_pg.stats(group)["bytes_quantized"] == 2 * NUMEL
    return [tensor[place : place + SPOT].clone() for place in PLACES]


def expected(place: int) -> Tensor:
    """What reference.all_reduce computes for the groups from `place` on, which belong to one owner."""
    first = place % 128
    groups = -(-NUMEL // 128)
    owner = 0 if place // 128 < -(-groups // 2) else 1
    assert owner == (0 if (place + SPOT - 1) // 128 < -(-groups // 2) else 1)
    padded = [torch.cat((torch.zeros(first).bfloat16(), content(rank, place))) for rank in range(2)]
    at_end = place + SPOT == NUMEL
    rows = [to_groups(x, 128) for x in padded]
    count = len(padded[0]) if at_end else rows[0].numel()
    present = present_mask(count, 128)
    codec = Codec()
    sent = decode(encode(rows[1 - owner], present, codec), present)
    parts = [rows[0], sent] if owner == 0 else [sent, rows[1]]
    delivered = decode(encode(parts[0] + parts[1], present, codec), present)
    return narrow(delivered, torch.bfloat16).view(-1)[first : first + SPOT]


@pytest.mark.parametrize("fabric", ["peer"])
def test_more_than_4_gi_elements_are_summed_like_any_others(fabric: str) -> None:
    outcomes = run_ranks(run_large, 2, fabric, timeout=250)
    for results in outcomes:
        for place, result in zip(PLACES, results, strict=True):
            assert torch.equal(result.view(torch.int16), expected(place).view(torch.int16)), place
