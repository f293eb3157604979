"""The codec of one rank against the reference, byte for byte: every combination of format options, on every
instruction set that this machine runs.

Encoding is compared as a tile, decoding as what a tensor holds afterwards, the compensator by feeding a sequence of
contributions to a single state.
"""

from __future__ import annotations

import itertools

import data
import pytest
import torch
from reference import (
    Codec,
    Feedback,
    decode,
    encode,
    leave,
    narrow,
    pack_tile,
    present_mask,
    rotate,
    to_groups,
    unpack_tile,
    update,
)
from reference_group import RefGroup
from torch import Tensor

import echo_pg
from echo_pg import build

testing = build.extension().testing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Group sizes with a rotation size that divides them; 0: no rotation.
GROUPS = ((16, 0), (16, 16), (24, 8), (40, 0), (128, 0), (128, 128), (128, 32), (136, 8), (1000, 0), (1024, 1024))


def available_isas() -> list[str]:
    found = []
    for isa in ("baseline", "avx2", "avx512"):
        try:
            testing.encode(torch.zeros(1), echo_pg.Options().to_config(), isa=isa)
        except ValueError:
            continue
        found.append(isa)
    return found


ISAS = available_isas()


def options_for(group: tuple[int, int], **fields: object) -> echo_pg.Options:
    size, run = group
    return echo_pg.Options(
        group_size=size, rotation="hadamard" if run else "none", rotation_size=run, feedback=False, **fields
    )


def codec_for(options: echo_pg.Options, dtype: torch.dtype) -> Codec:
    names = ("bits", "group_size", "quantizer", "rotation", "rotation_size", "scale_dtype", "tau", "clip")
    return RefGroup(2, **{name: getattr(options, name) for name in names}).codec(dtype)


def first_difference(actual: Tensor, expected: Tensor) -> str | None:
    a, e = actual.contiguous().view(torch.uint8).view(-1), expected.contiguous().view(torch.uint8).view(-1)
    assert a.numel() == e.numel()
    if torch.equal(a, e):
        return None
    byte = int((a != e).nonzero()[0])
    return f"byte {byte} (element {byte // actual.element_size()}): got {a[byte]}, expected {e[byte]}"


def inputs_of(dtype: torch.dtype, numel: int) -> list[tuple[str, Tensor]]:
    return [(kind, data.contributions(kind, 1, numel, dtype, seed=5)[0]) for kind in data.KINDS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_tiles_and_decoded_values(group: tuple[int, int], dtype: torch.dtype) -> None:
    numel = 5 * group[0] + 3
    present = present_mask(numel, group[0])
    formats = itertools.product(
        (4, 8),
        ("symmetric", "asymmetric", "zero_aware"),
        ("bfloat16", "float16"),
        ((0.125, 1.0), (0.0, 0.95), (1.0, 0.5)),
    )
    for bits, quantizer, scale_dtype, (tau, clip) in formats:
        options = options_for(group, bits=bits, quantizer=quantizer, scale_dtype=scale_dtype, tau=tau, clip=clip)
        codec, config = codec_for(options, dtype), options.to_config()
        for kind, x in inputs_of(dtype, numel):
            where = f"{kind} {codec}"
            rows = rotate(to_groups(x, group[0]), present, codec, "entry")
            expected_tile = pack_tile(encode(rows, present, codec), codec)
            delivered = leave(unpack_tile(expected_tile, len(present), codec), present, codec)
            expected = narrow(delivered.view(-1)[:numel], dtype)
            for isa in ISAS:
                tile = testing.encode(x, config, isa=isa)
                assert not (difference := first_difference(tile, expected_tile)), f"{isa} {where}: {difference}"
                out = x.clone()
                testing.decode(tile, out, config, isa=isa)
                assert not (difference := first_difference(out, expected)), f"{isa} {where}: {difference}"


@pytest.mark.parametrize("rescale_log2", (-60, -7, 3, 60))
def test_rescaled_codes(rescale_log2: int) -> None:
    options = options_for((128, 128), scale_dtype="float16")
    codec, config = codec_for(options, torch.bfloat16), options.to_config()
    x = data.contributions("gradients", 1, 700, torch.bfloat16)[0]
    present = present_mask(700, 128)
    up = torch.tensor(2.0**rescale_log2)
    encoded = encode(rotate(to_groups(x, 128), present, codec, "entry") * up, present, codec)
    expected = narrow(leave(encoded, present, codec, rescale_log2).view(-1)[:700], torch.bfloat16)
    tile = testing.encode(x, config, rescale_log2=rescale_log2)
    assert not first_difference(tile, pack_tile(encoded, codec))
    testing.decode(tile, x, config, rescale_log2=rescale_log2)
    assert not first_difference(x, expected)


@pytest.mark.parametrize("state_dtype", ("int8", "float32", "tensor"))
@pytest.mark.parametrize("a", (0.35, 0.0))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", ((128, 0), (40, 8)))
def test_compensator_over_sites(group: tuple[int, int], dtype: torch.dtype, a: float, state_dtype: str) -> None:
    size, run = group
    rotation = {"rotation": "hadamard" if run else "none", "rotation_size": run}
    options = echo_pg.Options(group_size=size, a=a, state_dtype=state_dtype, **rotation)
    codec, config = codec_for(options, dtype), options.to_config()
    stored_as = state_dtype if state_dtype != "tensor" else str(dtype).removeprefix("torch.")
    feedback = Feedback(a=a, state_dtype=stored_as)
    numel = 4 * size + 5
    present = present_mask(numel, size)
    for isa in ISAS:
        state = None
        memory = torch.zeros(testing.state_bytes(torch.empty(numel, dtype=dtype), config), dtype=torch.uint8)
        for site in range(40):
            kind = "huge" if site == 30 else "broken" if site == 35 else "activations" if site % 2 else "gradients"
            x = data.contributions(kind, 1, numel, dtype, site=site)[0]
            rows = rotate(to_groups(x, size), present, codec, "entry")
            sent = rows if state is None else rows + state.c.load()
            encoded = encode(sent, present, codec)
            state = update(state, sent - decode(encoded, present), feedback)
            tile = testing.encode(x, config, state=memory, first_site=site == 0, isa=isa)
            assert not (difference := first_difference(tile, pack_tile(encoded, codec))), f"{isa} {site}: {difference}"
            given = testing.correction(x, config, memory, isa=isa)
            expected = rotate(torch.where(present, state.c.load(), torch.tensor(0.0)), present, codec, "exit")
            assert not (difference := first_difference(given, expected.view(-1)[:numel])), f"{isa} {site}: {difference}"
