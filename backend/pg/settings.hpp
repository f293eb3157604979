// A group's options, as Python hands them over and as the rest of the backend uses them: validated once, when the group
// is made.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include "../core/config.h"
#include "../core/policy.h"

namespace echo::pg {

// echo_pg.Options field by field, with plain values; what each means is said there.
struct Config {
  int64_t bits = 4;
  int64_t group_size = 128;
  int64_t rotation_size = 0;  // elements per rotated run, 0: no rotation
  std::string quantizer = "zero_aware";
  std::string scale_dtype = "auto";
  double tau = 0.125;
  double clip = 1.0;
  bool feedback = true;
  std::string residual = "local";
  double eta = 0.9;
  double a = 0.0;
  double beta1 = 0.7;
  double beta2 = 0.0;
  std::string state_dtype = "auto";
  int64_t early_count = 0;
  double early_fraction = 0.0;
  int64_t early_bits = 8;
  std::string rescale = "auto";
  std::string recompute = "feedback";
  std::string policy = "auto";
  int64_t min_bytes_cpu = 0;  // of tensors on the CPU, and on a GPU
  int64_t min_bytes_cuda = 0;
  std::vector<std::string> dtypes = {"bfloat16", "float16"};
  std::string allow;  // regular expressions, "" for none
  std::string deny;
  std::string fabric = "auto";
  int64_t workspace_bytes = 64 << 20;
  double timeout_s = -1.0;  // at most 0: the group's
  bool diagnostics = false;
  bool allow_shared_gpu = false;
};

// Throws c10::ValueError for a dtype that the codec does not know.
DType quantizable_dtype(c10::ScalarType dtype);

// Throws c10::ValueError for an unknown mode or a pattern that is no regular expression.
PolicyRules make_policy_rules(const Config& config);

// Throws c10::ValueError that names the field, its value and what is allowed.
void validate(const Config& config);

// Why tensors on a device of this type ("cpu", "cuda", ...) cannot be quantized by this build; empty if they can.
std::string_view device_obstacle(std::string_view device_type);

// What tells one call's plan from another's in a group.
struct PlanRequest {
  int64_t numel = 0;
  int32_t rank = 0;
  int32_t world_size = 1;
  DType dtype = DType::kBFloat16;
  bool first_site = true;
  bool early = false;
  bool recompute = false;
};

// Pre: validate(config) passed.
Plan make_plan(const Config& config, const PlanRequest& request);
bool wants_rescale(const Config& config, const Plan& plan, Direction direction);

}  // namespace echo::pg
