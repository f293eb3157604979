"""Ways to round and to give errors back that several benches compare, spelled out so that rows keep their meaning
whatever Options() is by default. Fields of `echo_pg.Options`.
"""

from typing import Any

UNROTATED: dict[str, Any] = {"rotation": "none"}
ROTATED: dict[str, Any] = {"rotation": "hadamard"}
# The coefficients of the paper's two averages; and one average, for which k2 of the stored recurrence is 0.
TWO_AVERAGES: dict[str, Any] = {"eta": 0.75, "a": 0.35, "beta1": 0.7, "beta2": 0.3}
ONE_AVERAGE: dict[str, Any] = {"eta": 0.9, "a": 0.0, "beta2": 0.0}
PLAIN: dict[str, Any] = UNROTATED | {"feedback": False}
UNROTATED_TWO: dict[str, Any] = UNROTATED | TWO_AVERAGES
# The paper's method in 4 bits.
PAPER: dict[str, Any] = UNROTATED_TWO | {
    "bits": 4, "quantizer": "zero_aware", "scale_dtype": "float16", "residual": "group", "state_dtype": "tensor",
    "rescale": "auto",
}  # fmt: skip
