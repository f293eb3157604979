// One call on one rank as the stages see it, and the stage names that every composition uses:
//
//   push    apply c, quantize what others own               (residual "local": update what was sent)
//   reduce  decode the copies, sum in rank order, quantize   (residual "local": update what is owned)
//   gather  the owner's code goes to everyone                (the exchange itself, no arithmetic)
//   tail    decode, store in the tensor's dtype              (residual "group": update everything, or afterwards from
//                                                             copies, see kept_bytes of tile.h)
#pragma once

#include "config.h"
#include "hd.h"
#include "numeric.h"

namespace echo {

struct Site {
  Plan plan;
  void* tensor = nullptr;    // contiguous, plan.numel elements; read by push and reduce, overwritten by tail
  void* state = nullptr;     // state_bytes(plan) bytes; nullptr without feedback
  int32_t rescale_log2 = 0;  // k: encoders take values times 2^k, decoded values are multiplied by 2^-k
};

}  // namespace echo
