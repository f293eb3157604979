// What an owner does to one element: the sum in rank order, and the value whose difference from it is the residual.
//
// y_0 starts the sum (not 0, so that -0 + -0 keeps its sign); the owner's own contribution takes its place in full
// precision.
#pragma once

#include "config.h"
#include "hd.h"
#include "numeric.h"

namespace echo {

ECHO_HD float round_to_dtype(float x, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return from_bfloat16(to_bfloat16(x));
    case DType::kFloat16:
      return from_float16(to_float16(x));
    case DType::kFloat32:
      break;
  }
  return canonical_nan(x);
}

// Y of the residual: the delivered value widened, or with rotation what is decoded before the exit transform.
ECHO_HD float residual_reference(float decoded, const Plan& plan) {
  return plan.codec.rotation_log2 > 0 ? decoded : round_to_dtype(decoded, plan.dtype);
}

// k of the gradient rescale from the bits of max|x| over the ranks [paper 5.4, App. C].
ECHO_HD int32_t rescale_exponent(uint32_t max_magnitude) {
  if (max_magnitude == 0 || max_magnitude >= kInfBits32) return 0;
  const int32_t k = 8 - floor_log2_bits(max_magnitude);
  return k < -60 ? -60 : k > 60 ? 60 : k;
}

}  // namespace echo
