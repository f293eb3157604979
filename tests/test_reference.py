"""Checks of the reference against theory and against itself: exact identities wherever there is one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import covering
import data
import pytest
import torch
from reference import (
    CANONICAL_NAN,
    FORMATS,
    LARGEST_ZERO_POINT,
    SMALLEST_SCALE,
    Codec,
    Encoded,
    Feedback,
    Site,
    all_reduce,
    butterflies,
    ceil16,
    decode,
    encode,
    exit_factor,
    f32,
    fmix32,
    leave,
    narrow,
    pack_tile,
    present_mask,
    rotate,
    run_signs,
    segments,
    to_groups,
    unpack_tile,
)
from reference_group import RefGroup
from torch import Tensor

QUANTIZERS = ("zero_aware", "asymmetric", "symmetric")
NO_FEEDBACK = Feedback(enabled=False)
EPS = 2.0**-24  # largest relative error of one fp32 rounding
# Largest error of encode + decode, in steps. Half a step of rint; before it 1/s, the product and the sum, after it the
# product round once each, on values of up to L + Z = 767 steps: 4 * 767 * EPS < 2^-12. A rounded zero point is at most
# 1/2 from the exact one and so moves neither end of the range further than the grid's end plus half a step.
HALF_STEP = 0.5 + 2.0**-12


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def encode_rows(rows: Tensor, codec: Codec) -> tuple[Encoded, Tensor]:
    present = torch.ones(rows.shape, dtype=torch.bool)
    encoded = encode(rows, present, codec)
    return encoded, decode(encoded, present)


@pytest.mark.parametrize("name", SMALLEST_SCALE)
def test_rounding_to_16_bits_over_all_patterns(name: str) -> None:
    dtype = FORMATS[name]
    infinity = torch.tensor([math.inf]).to(dtype).view(torch.int16).item()
    patterns = torch.arange(infinity + 1).to(torch.int16)  # +0 up to Inf
    values = patterns.view(dtype).float()
    assert equal_bits(narrow(values, dtype).view(torch.int16), patterns)
    assert equal_bits(ceil16(values, name), values)

    # Between two neighbours of the format: ceil16 goes up; rounding goes to the nearer one, from the exact middle to
    # the even pattern. What would follow the largest finite value is the next power of two, and becomes Inf.
    low, high = values[:-1], values[1:]
    high64 = high.double()
    high64[-1] = 2.0**16 if name == "float16" else 2.0**128
    middle = ((low.double() + high64) / 2).float()
    assert torch.equal(middle.double(), (low.double() + high64) / 2)
    even = torch.where(patterns[:-1] % 2 == 0, patterns[:-1], patterns[1:]).view(dtype).float()
    for sign in (1.0, -1.0):
        assert equal_bits(narrow(sign * torch.nextafter(middle, f32(0.0)), dtype).float(), sign * low)
        assert equal_bits(narrow(sign * torch.nextafter(middle, f32(math.inf)), dtype).float(), sign * high)
        assert equal_bits(narrow(sign * middle, dtype).float(), sign * even)
    for x in (torch.nextafter(low, f32(math.inf)), middle, torch.nextafter(high, f32(0.0))):
        assert equal_bits(ceil16(x, name), high)
        assert torch.equal(ceil16(-x, name), -low)


def test_every_nan_written_is_canonical() -> None:
    nans = torch.tensor([0x7F800001, 0x7FC12345, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    for dtype, bits in CANONICAL_NAN.items():
        written = narrow(nans, dtype).view(torch.int32 if dtype == torch.float32 else torch.int16)
        assert (written == bits).all()
        x = data.contributions("activations", 2, 300, dtype)
        x[1][200] = math.nan
        out = all_reduce(x, Codec(), NO_FEEDBACK).output
        assert not out[:128].isnan().any()
        assert (out[128:256].view(written.dtype) == bits).all(), "a bad group is NaN in every element"


@pytest.mark.parametrize("name", SMALLEST_SCALE)
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_grid_points_survive_exactly(quantizer: str, bits: int, name: str) -> None:
    half = 2 ** (bits - 1) - 1
    smallest, largest = (-half, half) if quantizer == "symmetric" else (-half, half + 1)
    gen = torch.Generator().manual_seed(1)
    points = torch.randint(smallest, largest + 1, (200, 16), generator=gen)
    points[:, 0], points[:, 1] = smallest, largest
    scales = ceil16(torch.rand(200, 1, generator=gen) + 1e-3, name)
    _, decoded = encode_rows(points.float() * scales, Codec(bits, 16, quantizer, scale_dtype=name))
    assert torch.equal(decoded, points.float() * scales)


@pytest.mark.parametrize("bits", (4, 8))
def test_zero_is_exact_in_straddling_groups(bits: int) -> None:
    rows = torch.randn(500, 16, generator=torch.Generator().manual_seed(2))
    rows[:, 3], rows[:, 4] = 0.0, -0.0
    encoded, decoded = encode_rows(rows, Codec(bits, 16, tau=0.0))
    assert torch.equal(encoded.z, encoded.z.round())
    assert (decoded[:, 3:5] == 0).all()
    _, naive = encode_rows(rows, Codec(bits, 16, "asymmetric"))
    assert (naive[:, 3:5] != 0).any(), "otherwise this test proves nothing"


def test_the_zero_point_blends_from_exact_to_rounded() -> None:
    rows = torch.linspace(1.0, 2.0, 16).repeat(50, 1)
    rows[:, 0] = -torch.linspace(1e-4, 0.5, 50)
    blended, naive, rounded = (encode_rows(rows, Codec(4, 16, tau=tau))[0].z for tau in (1.0, 1e9, 0.0))
    naive_quantizer = encode_rows(rows, Codec(4, 16, "asymmetric"))[0].z
    assert torch.equal(naive, naive_quantizer)
    assert torch.equal(rounded, rounded.round())
    assert ((blended - naive).abs() <= (rounded - naive).abs()).all()
    inside = -rows[:, 0] / (2.0 - rows[:, 0]) * 15
    assert torch.equal(blended[inside >= 1], rounded[inside >= 1])


@pytest.mark.parametrize("name", SMALLEST_SCALE)
@pytest.mark.parametrize("kind", ("constant", "positive", "negative"))
def test_one_sided_groups(kind: str, name: str) -> None:
    (flat,) = data.contributions(kind, 1, 96 * 64)
    rows = flat.view(-1, 32)
    for bits in (4, 8):
        for quantizer in ("zero_aware", "asymmetric"):
            encoded, decoded = encode_rows(rows, Codec(bits, 32, quantizer, scale_dtype=name))
            assert (encoded.z.abs() <= LARGEST_ZERO_POINT[name]).all() and (encoded.z <= 0).all()
            assert torch.equal(encoded.s < 0, rows[:, 0] < 0), "the mirror image stores a negative scale"
            assert ((decoded - rows).abs().double() <= encoded.s.abs()[:, None].double() * HALF_STEP).all()
            mirrored, decoded_mirror = encode_rows(-rows, Codec(bits, 32, quantizer, scale_dtype=name))
            assert torch.equal(mirrored.s, -encoded.s) and torch.equal(mirrored.codes, encoded.codes)
            assert torch.equal(decoded_mirror, -decoded)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("kind", data.KINDS)
def test_error_is_half_a_step(kind: str, quantizer: str, bits: int) -> None:
    for name in SMALLEST_SCALE:
        flat = torch.cat(data.contributions(kind, 2, 4096))
        rows, present = to_groups(flat[:-5], 64), present_mask(8187, 64)
        encoded = encode(rows, present, Codec(bits, 64, quantizer, scale_dtype=name))
        good = ~encoded.s.isnan()
        assert good.any() or (kind == "huge" and name == "float16")
        error = (decode(encoded, present) - rows).abs().double()[good]
        assert (error <= encoded.s[good].abs()[:, None].double() * HALF_STEP + 2.0**-149).all()
        assert (encoded.codes[~present] == 0).all()


def test_special_groups() -> None:
    rows = torch.ones(7, 8)
    rows[0, 3] = math.nan
    rows[1, 3] = -math.inf
    rows[2, 3], rows[2, 4] = 2e38, -2e38  # max - min overflows
    rows[3] = 1e6 * 15  # overflows the scales of fp16 only
    rows[4] = torch.tensor([0.0, -0.0] * 4)
    rows[5] = torch.arange(8) * 2.0**-149
    rows[6] = torch.arange(8) * 3e37
    for name, smallest in SMALLEST_SCALE.items():
        for quantizer in QUANTIZERS:
            codec = Codec(4, 8, quantizer, scale_dtype=name)
            encoded, decoded = encode_rows(rows, codec)
            bad = torch.tensor([True, True, True, name == "float16" and quantizer == "symmetric", False, False])
            bad = torch.cat((bad, torch.tensor([name == "float16"])))
            assert torch.equal(encoded.s.isnan(), bad)
            assert decoded[bad].isnan().all() and (encoded.codes[bad] == 0).all() and (encoded.z[bad] == 0).all()
            assert encoded.s[4] == 0 and equal_bits(decoded[4], torch.zeros(8))
            assert encoded.s[5] == smallest, "subnormal groups have the smallest scale"
            tile = pack_tile(encoded, codec)
            stride = 2 if quantizer == "symmetric" else 4
            parameters = tile[7 * 4 :][: 7 * stride].view(7, stride).tolist()
            nan = CANONICAL_NAN[FORMATS[name]]
            assert parameters[0] == [nan & 255, nan >> 8, 0, 0][:stride]
            assert parameters[4] == [0] * stride
    assert (encode_rows(rows[5:6] * 2.0**20, Codec(8, 8))[1] != 0).any(), "subnormals are kept"


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("kind", ("activations", "positive", "negative"))
def test_clip_and_absent_elements(kind: str, quantizer: str) -> None:
    rows = data.contributions(kind, 1, 64 * 50)[0].view(-1, 64)
    codec = Codec(4, 64, quantizer)
    whole, _ = encode_rows(rows, codec)
    clipped, _ = encode_rows(rows, replace(codec, clip=0.5))
    assert torch.equal(clipped.s, whole.s * 0.5) and torch.equal(clipped.z, whole.z), "exact: a power of two"

    present = torch.arange(64).expand_as(rows) < 41
    partial = encode(torch.where(present, rows, f32(0.0)), present, codec)
    filled, _ = encode_rows(torch.where(present, rows, rows[:, :1]), codec)
    assert torch.equal(partial.s, filled.s) and torch.equal(partial.z, filled.z), "absent is not zero"
    assert torch.equal(partial.codes[present], filled.codes[present]) and (partial.codes[~present] == 0).all()


@pytest.mark.parametrize("name", SMALLEST_SCALE)
@pytest.mark.parametrize("size", (1, 2, 8, 128))
def test_rotation(size: int, name: str) -> None:
    codec = Codec(group_size=128, rotation_size=size, scale_dtype=name)
    x = torch.randint(-99, 100, (5, 128), generator=torch.Generator().manual_seed(3)).float()
    present = present_mask(4 * 128 + 77, 128)
    rotated = rotate(x, present, codec, "entry")
    assert torch.equal(rotate(rotated, present, codec, "exit"), x), "exact: integers below 2^24, factors 2^-m"
    assert torch.equal(rotated[4], x[4]), "partial groups are not rotated"

    i = torch.arange(size)
    parity = torch.tensor([[bin(a & b).count("1") % 2 for b in i.tolist()] for a in i.tolist()])
    signs = torch.tensor([1.0 - 2.0 * (fmix32(a + 1) & 1) for a in i.tolist()])
    factor = 2.0 ** -math.ceil(math.log2(size) / 2) if name == "float16" else 1.0
    matrix = (1.0 - 2.0 * parity) * signs * factor
    assert torch.equal(rotated[:4].view(-1, size), x[:4].view(-1, size) @ matrix.T)


@pytest.mark.parametrize("name", SMALLEST_SCALE)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("size", (2, 8, 32, 128, 1024))
def test_what_leaves_the_rotation_is_rounded_once(size: int, quantizer: str, name: str) -> None:
    group_size = max(128, size)
    present = torch.ones(12, group_size, dtype=torch.bool)
    for bits, kind in itertools.product((4, 8), data.KINDS):
        codec = Codec(bits, group_size, quantizer, rotation_size=size, scale_dtype=name)
        x = data.contributions(kind, 1, present.numel(), torch.float32, seed=size)[0]
        encoded = encode(rotate(to_groups(x, group_size), present, codec, "entry"), present, codec)
        delivered, before = leave(encoded, present, codec), rotate(decode(encoded, present), present, codec, "exit")
        good = encoded.s.isfinite()
        assert delivered[~good].isnan().all() and not delivered[good].isnan().any()
        assert (delivered[encoded.s == 0] == 0).all()

        s, z = (p[good].double()[:, None, None] for p in (encoded.s, encoded.z))
        t = butterflies(encoded.codes[good].double().reshape(-1, size)).view(-1, group_size // size, size)
        t[..., :1] -= size * z
        exact = s * exit_factor(codec) * t * run_signs(size).double()
        error, error_before = ((v[good].view(exact.shape).double() - exact).abs() for v in (delivered, before))
        roundings = torch.ones(size, dtype=torch.float64)
        roundings[0] = 2 + 4 * EPS  # that of t_0, too; the last term: of second order, and those of double
        small = exact.abs() < 2.0**127
        assert (error <= exact.abs() * roundings * EPS + 2.0**-150)[small].all()
        nearest = small & (t == t.float().double()) & before[good].view(exact.shape).isfinite()
        assert (error <= error_before)[nearest].all()


def test_fmix32_and_the_signs_it_gives() -> None:
    assert (fmix32(0), fmix32(1), fmix32(0xFFFFFFFF)) == (0, 0x514E28B7, 0x81F16F39)  # published values
    assert 48 <= sum(fmix32(i + 1) & 1 for i in range(128)) <= 80


def test_tile_bytes() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15], [0, 0, 0, 0, 0, 0, 0, 9]], dtype=torch.int16)
    encoded = Encoded(torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.0]), codes)
    tile = pack_tile(encoded, Codec(4, 8))
    assert tile.tolist() == [0x21, 0x43, 0x65, 0xF7, 0, 0, 0, 0x90, 0x80, 0x3F, 0x40, 0x40, 0, 0xC0, 0, 0]
    signed = Encoded(torch.tensor([1.0]), torch.zeros(1), torch.tensor([[-7, 7, -1, 0, 0, 0, 0, 1]], dtype=torch.int16))
    symmetric = Codec(4, 8, "symmetric", scale_dtype="float16")
    assert pack_tile(signed, symmetric).tolist() == [0x79, 0x0F, 0, 0x10, 0, 0x3C] + 10 * [0]
    assert pack_tile(signed, replace(symmetric, bits=8))[:8].tolist() == [0xF9, 7, 0xFF, 0, 0, 0, 0, 1]
    for bits in (4, 8):
        for quantizer in QUANTIZERS:
            for name in SMALLEST_SCALE:
                codec = Codec(bits, 24, quantizer, scale_dtype=name)
                encoded, _ = encode_rows(to_groups(data.broken(24 * 37, torch.Generator().manual_seed(4)), 24), codec)
                tile = pack_tile(encoded, codec)
                back = unpack_tile(tile, 37, codec)
                assert tile.numel() % 16 == 0
                assert torch.equal(back.codes, encoded.codes) and equal_bits(back.z, encoded.z)
                assert torch.equal(back.s.nan_to_num(-1.0), encoded.s.nan_to_num(-1.0))


def test_segments_partition_the_groups() -> None:
    for size in (2, 3, 4, 8):
        for numel in (1, 15, 16, 17, 16 * size, 16 * (size + 1), 1000):
            parts = segments(numel, 16, size)
            assert parts[0][0] == 0 and parts[-1][1] == math.ceil(numel / 16)
            assert all(one[1] == two[0] for one, two in itertools.pairwise(parts))
            lengths = [end - begin for begin, end in parts]
            assert lengths == sorted(lengths, reverse=True) and len(set(lengths) - {0, lengths[0]}) <= 1
    assert segments(16 * 9, 16, 8) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9), (9, 9), (9, 9), (9, 9)]


def by_messages(x: list[Tensor], codec: Codec, c: Tensor) -> tuple[list[Tensor], Tensor]:
    """The same collective the way ranks see it: every rank on its own, knowing the others only by tiles of bytes."""
    size, numel, g = len(x), x[0].numel(), codec.group_size
    present, parts = present_mask(numel, g), segments(numel, g, len(x))
    mine = [rotate(to_groups(t, g), present, codec, "entry") + c[rank] for rank, t in enumerate(x)]
    gathered, sums = [], []
    for owner, (begin, end) in enumerate(parts):
        held, total = present[begin:end], torch.tensor([])
        for rank in range(size):
            values = mine[rank][begin:end]
            if rank != owner:
                values = decode(unpack_tile(pack_tile(encode(values, held, codec), codec), end - begin, codec), held)
            total = values if rank == 0 else total + values
        sums.append(total)
        gathered.append(pack_tile(encode(total, held, codec), codec))
    outputs = []
    for _ in range(size):
        tiles = [
            leave(unpack_tile(tile, end - begin, codec), present[begin:end], codec)
            for tile, (begin, end) in zip(gathered, parts, strict=True)
            if end > begin
        ]
        outputs.append(narrow(torch.cat(tiles).view(-1)[:numel], x[0].dtype))
    return outputs, torch.cat(sums)


@pytest.mark.parametrize("size", (2, 3, 8))
@pytest.mark.parametrize("numel", (1, 7, 39, 9 * 40, 2003))
def test_ranks_exchanging_bytes_get_the_same(size: int, numel: int) -> None:
    for bits, quantizer, run in ((4, "zero_aware", 0), (8, "symmetric", 8), (4, "asymmetric", 4)):
        group = RefGroup(
            size,
            bits=bits,
            quantizer=quantizer,
            group_size=40,
            rotation="hadamard" if run else "none",
            rotation_size=run,
        )
        c = torch.zeros(size, math.ceil(numel / 40), 40)
        for k in range(3):
            x = data.contributions("broken" if k == 1 else "activations", size, numel, torch.bfloat16, site=k)
            site = group.all_reduce(x)
            outputs, sums = by_messages(x, group.codec(torch.bfloat16), c)
            assert torch.equal(sums.nan_to_num(), site.S.nan_to_num()), "the same order of additions"
            for output in outputs:
                assert equal_bits(output.view(torch.int16), site.output.view(torch.int16))
            assert site.state is not None
            c = site.state.c.load()


def tolerance(site: Site, residual: str) -> Tensor:
    """Of sum(u) + delta, per element, from the fp32 roundings between them; decoding is common to both and exact here.

    local: u of a sent copy and of the owner round once each (EPS * |u|); S takes P - 1 additions, each rounds a partial
    sum of at most sum |y_i|, y_i = x'_i - u_i for copies. group: Y * invP rounds invP and the product, u rounds once.
    Factor 1 + 2^-10: terms of second order. 2^-149: a product may be subnormal, P of them.
    """
    size = site.x_sent.shape[0]
    u, x = site.u.abs().double(), site.x_sent.abs().double()
    others = (size - 1) * (x + u).sum(0) if residual == "local" else 2 * site.Y.abs().double()
    return (u.sum(0) + others) * EPS * (1 + 2.0**-10) + size * 2.0**-149


@pytest.mark.parametrize("row", covering.pairwise(), ids=lambda row: "-".join(str(v) for v in row.values()))
def test_residuals_add_up_to_minus_delta(row: covering.Row) -> None:
    dtype, numel = FORMATS[row["dtype"]], covering.numel_of(row)
    group = RefGroup(row["size"], **covering.options_of(row))
    kind = "gradients" if row["direction"] == "backward" else "activations"
    checked = 0
    for k in range(4):
        x = data.contributions(kind, row["size"], numel, dtype, site=k)
        site = group.all_reduce(x, row["direction"], no_grad=True)
        finite = site.u.isfinite().all(0) & site.Y.isfinite()
        excess = (site.u.double().sum(0) + site.delta).abs() - tolerance(site, group.options["residual"])
        assert (excess[finite] <= 0).all()
        assert (site.u[:, ~site.present] == 0).all() and (site.x_sent[:, ~site.present] == 0).all()
        assert (site.state is None) == (row["residual"] == "off")
        assert site.output.dtype == dtype and site.output.shape == x[0].shape
        if not row["rotation_size"]:
            assert torch.equal(site.Y.nan_to_num(), to_groups(site.output, row["group_size"]).nan_to_num())
        checked += int(finite.sum())
    assert checked > 0
