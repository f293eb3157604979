"""What the quantized all-reduce computes, written down in plain torch.

The implementations (CPU, CUDA, wire) are tested byte for byte against this file, so it favours the wording of the
specification over speed: every rounding is one torch operation on fp32 tensors. Fused forms (`torch.add(alpha=)`,
`addcmul`, `lerp`) and division by Python scalars round differently and are not used.

Layout: a tensor of N elements is a matrix of G = ceil(N/g) rows, one row per group of elements. A partial last row is
padded with +0.0 and `present` marks what is there; padding never enters statistics and is +0.0 in every result.
All ranks are simulated at once: "[P, G, g]" is a matrix per rank.

From top to bottom: numbers, groups and segments, rotation, quantizers, wire bytes, feedback state, the collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CANONICAL_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}
SMALLEST_SCALE = {"bfloat16": 2.0**-126, "float16": 2.0**-24}
LARGEST_ZERO_POINT = {"bfloat16": 64, "float16": 512}  # of one-sided groups: 16 bits hold it to within 1/8 step
TILE_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Codec:
    """How a group becomes codes. `scale_dtype` is resolved (never "auto"); `rotation_size` 0 means none."""

    bits: int = 4
    group_size: int = 128
    quantizer: str = "zero_aware"  # | "asymmetric" | "symmetric"
    rotation_size: int = 0
    scale_dtype: str = "bfloat16"
    tau: float = 0.125
    clip: float = 1.0


@dataclass(frozen=True)
class Feedback:
    """The error compensator; by itself with the paper's coefficients. `state_dtype` is resolved: "bfloat16", "float16",
    "float32" or "int8"."""

    enabled: bool = True
    residual: str = "local"  # | "group"
    eta: float = 0.75
    a: float = 0.35
    beta1: float = 0.7
    beta2: float = 0.3
    state_dtype: str = "int8"


def f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to `dtype`, nearest even, may give Inf; every NaN gets the canonical bits."""
    if dtype == torch.bfloat16:
        bits = x.contiguous().view(torch.int32)
        y = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(torch.int16).view(torch.bfloat16)
    else:
        y = x.to(dtype, copy=True)
    y.view(torch.int32 if dtype == torch.float32 else torch.int16)[torch.isnan(x)] = CANONICAL_NAN[dtype]
    return y


def round16(x: Tensor, name: str) -> Tensor:
    return narrow(x, FORMATS[name]).float()


def ceil16(x: Tensor, name: str) -> Tensor:
    """Smallest value of the 16-bit format that is not below `x`."""
    nearest = narrow(x, FORMATS[name])
    bits = nearest.view(torch.int16)
    above = torch.where(bits >= 0, bits + 1, bits - 1).to(torch.int16).view(nearest.dtype)
    return torch.where(nearest.float() < x, above, nearest).float()


def to_groups(flat: Tensor, group_size: int) -> Tensor:
    padded = torch.zeros(math.ceil(flat.numel() / group_size) * group_size, dtype=torch.float32)
    padded[: flat.numel()] = flat.float()
    return padded.view(-1, group_size)


def present_mask(numel: int, group_size: int) -> Tensor:
    groups = math.ceil(numel / group_size)
    return (torch.arange(groups * group_size) < numel).view(groups, group_size)


def segments(numel: int, group_size: int, size: int) -> list[tuple[int, int]]:
    """Half-open range of groups that each rank owns."""
    groups = math.ceil(numel / group_size)
    share = math.ceil(groups / size)
    return [(min(groups, j * share), min(groups, (j + 1) * share)) for j in range(size)]


def fmix32(h: int) -> int:
    """Finalizer of MurmurHash3."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def butterflies(runs: Tensor) -> Tensor:
    """Walsh-Hadamard transform in natural order of the last dimension, strides 1, 2, 4, ..."""
    size, stride = runs.shape[-1], 1
    while stride < size:
        a, b = runs.reshape(-1, size // (2 * stride), 2, stride).unbind(2)
        runs = torch.stack((a + b, a - b), dim=2)
        stride *= 2
    return runs.reshape(-1, size)


def run_signs(size: int) -> Tensor:
    return torch.tensor([-1.0 if fmix32(i + 1) & 1 else 1.0 for i in range(size)])


def rotate(v: Tensor, present: Tensor, codec: Codec, way: str) -> Tensor:
    """Rows into ("entry") or out of ("exit") the rotated domain; partial groups stay as they are. What is delivered
    leaves it another way, see `leave`."""
    size = codec.rotation_size
    if size == 0:
        return v
    m = size.bit_length() - 1
    signs = run_signs(size)
    half = codec.scale_dtype == "float16"  # half of the factor 2^-m on entry keeps the scales within fp16
    if way == "entry":
        runs = butterflies(v.reshape(-1, size) * signs)
        runs = runs * f32(2.0 ** -((m + 1) // 2)) if half else runs
    else:
        runs = butterflies(v.reshape(-1, size)) * f32(exit_factor(codec)) * signs
    return torch.where(present.all(-1, keepdim=True), runs.view(v.shape), v)


def exit_factor(codec: Codec) -> float:
    m = codec.rotation_size.bit_length() - 1
    return 2.0 ** -(m // 2 if codec.scale_dtype == "float16" else m)


@dataclass
class Encoded:
    """Parameters [rows] as fp32 values of the parameter format, codes [rows, g] as int16 (signed when symmetric)."""

    s: Tensor
    z: Tensor
    codes: Tensor


def encode(v: Tensor, present: Tensor, codec: Codec) -> Encoded:
    """`v` [rows, g] fp32, `present` [rows, g] bool."""
    lo = torch.where(present, v, f32(math.inf)).amin(1) * f32(codec.clip) + f32(0.0)
    hi = torch.where(present, v, f32(-math.inf)).amax(1) * f32(codec.clip) + f32(0.0)
    half = 2 ** (codec.bits - 1) - 1
    if codec.quantizer == "symmetric":
        smallest, largest = -half, half
        s, z = scale_from(torch.maximum(lo.abs(), hi.abs()) / f32(half), codec.scale_dtype), torch.zeros_like(lo)
    else:
        smallest, largest = 0, 2 * half + 1
        s, z = affine_parameters(lo, hi, codec)
    zero = (v == 0).all(1)
    bad = ~torch.isfinite(v).all(1) | torch.isinf(hi - lo) | torch.isinf(s)
    s = torch.where(zero, f32(0.0), torch.where(bad, f32(math.nan), s))
    z = torch.where(zero | bad, f32(0.0), z)

    r = f32(1.0) / s
    codes = torch.round(v * r[:, None] + z[:, None]).clamp(smallest, largest)
    codes = torch.where(present & ~(zero | bad)[:, None], codes, f32(0.0))
    return Encoded(s, z, codes.to(torch.int16))


def scale_from(step: Tensor, name: str) -> Tensor:
    return torch.maximum(ceil16(step, name), f32(SMALLEST_SCALE[name]))


def affine_parameters(lo: Tensor, hi: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    levels = f32(2**codec.bits - 1)
    largest_z = f32(LARGEST_ZERO_POINT[codec.scale_dtype])
    kz = largest_z / (levels + largest_z)
    positive = lo >= 0
    mirrored = ~positive & (hi <= 0)
    one_sided = positive | mirrored
    near = torch.where(mirrored, -hi, lo) + f32(0.0)
    far = torch.where(mirrored, -lo, hi)
    bottom = torch.where(one_sided, torch.minimum(near, far * kz), lo)  # value of code 0 (of -x when mirrored)
    s = scale_from((far - bottom) / levels, codec.scale_dtype)
    zf = (-bottom) / s
    z, weight = zf, f32(1.0)
    if codec.quantizer == "zero_aware":
        if codec.tau > 0:
            inside = (torch.minimum(-lo, hi) / (hi - lo)) * levels  # steps between zero and the nearer end
            weight = (inside / f32(codec.tau)).clamp(0, 1)
        z = torch.where(one_sided, zf, weight * torch.round(zf) + (f32(1.0) - weight) * zf)
    return torch.where(mirrored, -s, s), round16(z, codec.scale_dtype) + f32(0.0)


def decode(encoded: Encoded, present: Tensor) -> Tensor:
    values = encoded.s[:, None] * (encoded.codes.to(torch.float32) - encoded.z[:, None])
    return torch.where(present, values, f32(0.0))


def leave(encoded: Encoded, present: Tensor, codec: Codec, k: int = 0) -> Tensor:
    """What is delivered of encoded rows, before its rounding to the tensor's dtype; `k` is the rescale's. Rotated rows
    are transformed as codes, in integers: fl(fl(s * f) * t) is all that rounds, but for t of a run's first element."""
    values, size = decode(encoded, present) * f32(2.0**-k), codec.rotation_size
    if size == 0:
        return values
    per_row = (-1, codec.group_size // size, size)
    t = butterflies(encoded.codes.to(torch.int32).reshape(-1, size)).float().view(per_row)
    t[..., 0] = t[..., 0] - (f32(float(size)) * encoded.z)[:, None]
    runs = (encoded.s * f32(exit_factor(codec) * 2.0**-k))[:, None, None] * t * run_signs(size)
    return torch.where(present.all(-1, keepdim=True), runs.view(values.shape), values)


def pack_tile(encoded: Encoded, codec: Codec) -> Tensor:
    """A tile's bytes: codes of all groups, then (s, z) of all groups, then zeros up to the alignment."""
    codes = encoded.codes & (2**codec.bits - 1)
    if codec.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    parameters = [encoded.s] if codec.quantizer == "symmetric" else [encoded.s, encoded.z]
    words = narrow(torch.stack(parameters, dim=1), FORMATS[codec.scale_dtype]).view(torch.int16).to(torch.int32)
    words = torch.stack((words & 0xFF, (words >> 8) & 0xFF), dim=-1)
    tile = torch.cat((codes.reshape(-1).to(torch.uint8), words.reshape(-1).to(torch.uint8)))
    return torch.cat((tile, tile.new_zeros(-tile.numel() % TILE_ALIGN_BYTES)))


def unpack_tile(tile: Tensor, groups: int, codec: Codec) -> Encoded:
    code_bytes = codec.group_size * codec.bits // 8
    per_group = 1 if codec.quantizer == "symmetric" else 2
    codes = tile[: groups * code_bytes].view(groups, code_bytes).to(torch.int16)
    if codec.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(groups, codec.group_size)
    if codec.quantizer == "symmetric":
        codes = torch.where(codes >= 2 ** (codec.bits - 1), codes - 2**codec.bits, codes)
    pairs = tile[groups * code_bytes :][: groups * per_group * 2].view(groups, per_group, 2).to(torch.int32)
    bits = pairs[..., 0] + (pairs[..., 1] << 8)
    words = torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(FORMATS[codec.scale_dtype])
    z = words[:, 1] if per_group == 2 else torch.zeros_like(words[:, 0])
    return Encoded(words[:, 0].float(), z.float(), codes)


@dataclass
class Stored:
    """One state tensor as it lies in memory: [P, G, g] in the state's format, and bf16 scales [P, G] for int8."""

    values: Tensor
    scales: Tensor | None = None

    def load(self) -> Tensor:
        values = self.values.float()
        return values if self.scales is None else self.scales.float()[..., None] * values


def store(v: Tensor, state_dtype: str) -> Stored:
    v = torch.where(torch.isfinite(v), v, f32(0.0))
    if state_dtype != "int8":
        values = narrow(v, FORMATS[state_dtype])
        return Stored(torch.where(torch.isinf(values), torch.zeros_like(values), values))
    largest = v.abs().amax(-1)
    scale = torch.maximum(ceil16(largest / f32(127.0), "bfloat16"), f32(SMALLEST_SCALE["bfloat16"]))
    codes = torch.round(v * (f32(1.0) / scale)[..., None]).clamp(-127, 127)  # all 0 where largest is 0
    scale = torch.where(largest == 0, f32(0.0), scale)
    return Stored(codes.to(torch.int8), narrow(scale, torch.bfloat16))


@dataclass
class State:
    """Correction c to add at the next site, and the slow average m1 (absent when one average suffices)."""

    c: Stored
    m1: Stored | None


def coefficients(feedback: Feedback) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(b1, b2, k1, k2, k3), formed in double and rounded once."""
    eta, a, b1, b2 = feedback.eta, feedback.a, feedback.beta1, feedback.beta2
    k2, k3 = eta * a * (b1 - b2), eta * (a * (1.0 - b1) + (1.0 - a) * (1.0 - b2))
    return f32(b1), f32(b2), f32(1.0 - b1), f32(k2), f32(k3)


def update(state: State | None, u: Tensor, feedback: Feedback) -> State:
    """State after a site with residual `u`; `state` None means the first site of a pass."""
    b1, b2, k1, k2, k3 = coefficients(feedback)
    u = torch.where(torch.isfinite(u), u, f32(0.0))
    c, m1 = k3 * u, k1 * u
    if state is not None and state.m1 is not None:
        old_c, old_m1 = state.c.load(), state.m1.load()
        c = (b2 * old_c + k2 * old_m1) + c
        m1 = b1 * old_m1 + m1
    elif state is not None and b2 != 0:
        c = b2 * state.c.load() + c
    return State(store(c, feedback.state_dtype), store(m1, feedback.state_dtype) if k2 != 0 else None)


@dataclass
class Site:
    """Everything one quantized all-reduce produced. Inner values live in the rotated domain, absent elements are 0."""

    output: Tensor  # what every rank holds afterwards, in the shape and dtype of the contributions
    state: State | None
    k: int  # gradient rescale exponent
    present: Tensor  # [G, g]
    own: Tensor  # [P, G]: the rank owns the group
    x_sent: Tensor  # [P, G, g] x'
    sent: Encoded  # of x', P * G rows; rows of own groups never travel
    total: Encoded  # of S, G rows
    S: Tensor  # [G, g]
    Y: Tensor  # [G, g]
    u: Tensor  # [P, G, g] before storage

    @property
    def delta(self) -> Tensor:
        """Delivered sum minus exact sum of the contributions as sent, in double."""
        return self.Y.double() - self.x_sent.double().sum(0)


def rescale_exponent(contributions: Sequence[Tensor]) -> int:
    largest = torch.stack([x.float().abs().max() for x in contributions]).max()  # max keeps NaN
    if not torch.isfinite(largest) or largest == 0:
        return 0
    return max(-60, min(60, 8 - (math.frexp(largest.item())[1] - 1)))


def all_reduce(
    contributions: Sequence[Tensor],
    codec: Codec,
    feedback: Feedback,
    state: State | None = None,
    *,
    rescale: bool = False,
) -> Site:
    """One site over P = len(contributions) ranks. An early site is a call with `codec.bits` = early_bits."""
    size, first = len(contributions), contributions[0]
    assert size >= 2 and first.numel() >= 1, "one rank, or nothing to add, is forwarded"
    numel, g = first.numel(), codec.group_size
    present = present_mask(numel, g)
    everywhere = present.repeat(size, 1)
    own = torch.zeros(size, len(present), dtype=torch.bool)
    for rank, (begin, end) in enumerate(segments(numel, g, size)):
        own[rank, begin:end] = True
    k = rescale_exponent(contributions) if rescale else 0
    up, down = f32(2.0**k), f32(2.0**-k)

    # apply
    x = torch.stack([rotate(to_groups(t.reshape(-1), g), present, codec, "entry") for t in contributions])
    x_sent = x if state is None else x + state.c.load()

    # push
    sent = encode((x_sent * up).view(-1, g), everywhere, codec)
    copies = (decode(sent, everywhere) * down).view(x.shape)

    # reduce: rank order, the owner's place holds its own unquantized values
    parts = torch.where(own[..., None], x_sent, copies)
    S = parts[0]
    for rank in range(1, size):
        S = S + parts[rank]
    total = encode(S * up, present, codec)

    # gather and tail: the owner decodes its own codes like everyone else
    delivered = decode(total, present) * down
    output = narrow(leave(total, present, codec, k).view(-1)[:numel], first.dtype)
    Y = delivered if codec.rotation_size else to_groups(output, g)

    # update
    if feedback.residual == "local":
        u = torch.where(own[..., None], S - Y, x_sent - copies)
    else:
        u = x_sent - Y * (f32(1.0) / f32(float(size)))
    new_state = update(state, u, feedback) if feedback.enabled else None
    return Site(output.view(first.shape), new_state, k, present, own, x_sent, sent, total, S, Y, u)
