// Exact errors of quantized calls, for studies of the method: costs two exchanges in fp64 and several copies per call.
//
//   rho      delivered - sum of the raw contributions          partial  sum of rho over the pass so far
//   delta    delivered - sum of the contributions as sent, that is with their corrections
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../core/config.h"
#include "state_pool.hpp"

namespace echo::pg {

struct ErrorNorms {
  double l2 = 0.0;
  double max_abs = 0.0;
};

struct SiteErrors {
  int64_t site = 0;
  int32_t lane = 0;
  int32_t half = 0;
  int64_t numel = 0;
  ErrorNorms rho;
  ErrorNorms partial;
  ErrorNorms delta;
};

// What a call needs to be measured: where it belongs, and its operands before it ran.
struct MeasuredSite {
  Direction direction = Direction::kForward;
  bool starts_pass = false;
  int64_t site = 0;
  SlotKey key;
};

class Diagnostics {
 public:
  // Sums over the ranks, in fp64 on the tensor's device, taken before the call.
  struct Before {
    at::Tensor raw_sum;
    at::Tensor correction_sum;
  };

  // Collective over `inner`. `correction` is what this rank adds, undefined at a first site or without feedback; `wait`
  // is how to wait for a collective, empty: its own wait().
  static Before measure_before(const at::Tensor& tensor, const at::Tensor& correction, c10d::Backend& inner,
                               const std::function<void(c10d::Work&)>& wait);
  void measure_after(const MeasuredSite& site, const Before& before, const at::Tensor& delivered);

  // Sites of the pass under way.
  std::vector<SiteErrors> errors(Direction direction) const;

 private:
  mutable std::mutex mutex_;
  std::array<std::vector<SiteErrors>, kDirections> errors_;
  std::array<std::map<SlotKey, at::Tensor>, kDirections> partial_sums_;
};

}  // namespace echo::pg
