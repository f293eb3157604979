#include "settings.hpp"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <utility>

#include <c10/util/Exception.h>

namespace echo::pg {
namespace {

template <typename Enum>
Enum parse(const char* field, const std::string& value, std::initializer_list<std::pair<const char*, Enum>> names) {
  for (const auto& [name, enumerator] : names) {
    if (value == name) return enumerator;
  }
  std::string allowed;
  for (const auto& [name, enumerator] : names) {
    allowed += std::string(allowed.empty() ? "'" : ", '") + name + "'";
  }
  TORCH_CHECK_VALUE(false, field, " is '", value, "', but must be one of ", allowed);
}

enum class Recompute : uint8_t { kFeedback, kPlain, kExact };
enum class StateChoice : uint8_t { kAuto, kTensor, kFloat32, kInt8 };

std::optional<std::regex> parse_pattern(const char* field, const std::string& text) {
  if (text.empty()) return std::nullopt;
  try {
    return std::regex(text, std::regex::ECMAScript | std::regex::optimize);
  } catch (const std::regex_error& error) {
    TORCH_CHECK_VALUE(false, field, " '", text, "' is not a regular expression: ", error.what());
  }
}

Quantizer parse_quantizer(const std::string& name) {
  return parse<Quantizer>("quantizer", name,
                          {{"zero_aware", Quantizer::kZeroAware},
                           {"asymmetric", Quantizer::kAsymmetric},
                           {"symmetric", Quantizer::kSymmetric}});
}

Residual parse_residual(const std::string& name) {
  return parse<Residual>("residual", name, {{"local", Residual::kLocal}, {"group", Residual::kGroup}});
}

// nullopt: by the tensor's dtype.
std::optional<ScaleDType> parse_scale_dtype(const std::string& name) {
  return parse<std::optional<ScaleDType>>(
      "scale_dtype", name,
      {{"auto", std::nullopt}, {"float16", ScaleDType::kFloat16}, {"bfloat16", ScaleDType::kBFloat16}});
}

StateChoice parse_state_dtype(const std::string& name) {
  return parse<StateChoice>("state_dtype", name,
                            {{"auto", StateChoice::kAuto},
                             {"tensor", StateChoice::kTensor},
                             {"float32", StateChoice::kFloat32},
                             {"int8", StateChoice::kInt8}});
}

// nullopt: where the scale's range asks for it.
std::optional<bool> parse_rescale(const std::string& name) {
  return parse<std::optional<bool>>("rescale", name, {{"auto", std::nullopt}, {"on", true}, {"off", false}});
}

Recompute parse_recompute(const std::string& name) {
  return parse<Recompute>(
      "recompute", name,
      {{"feedback", Recompute::kFeedback}, {"plain", Recompute::kPlain}, {"exact", Recompute::kExact}});
}

StateDType state_dtype_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return StateDType::kFloat32;
    case DType::kBFloat16:
      return StateDType::kBFloat16;
    case DType::kFloat16:
      break;
  }
  return StateDType::kFloat16;
}

// What `local` keeps is about half a step, which 8 bits hold well; `group` keeps whole contributions.
StateDType state_dtype_for(const Config& config, DType dtype) {
  const bool local = parse_residual(config.residual) == Residual::kLocal;
  switch (parse_state_dtype(config.state_dtype)) {
    case StateChoice::kAuto:
      return local ? StateDType::kInt8 : state_dtype_of(dtype);
    case StateChoice::kTensor:
      return state_dtype_of(dtype);
    case StateChoice::kFloat32:
      return StateDType::kFloat32;
    case StateChoice::kInt8:
      break;
  }
  return StateDType::kInt8;
}

void check_range(const char* field, double value, double low, double high) {
  TORCH_CHECK_VALUE(value >= low && value <= high, field, " is ", value, ", but must lie in [", low, ", ", high, "]");
}

void check_bits(const char* field, int64_t bits) {
  TORCH_CHECK_VALUE(bits == 4 || bits == 8, field, " is ", bits, ", but must be 4 or 8");
}

void validate_codec(const Config& config) {
  check_bits("bits", config.bits);
  check_bits("early_bits", config.early_bits);
  const int64_t group = config.group_size;
  TORCH_CHECK_VALUE(group >= kMinGroupElems && group <= kMaxGroupElems && group % 8 == 0, "group_size is ", group,
                    ", but must be a multiple of 8 from ", kMinGroupElems, " to ", kMaxGroupElems);
  const int64_t run = config.rotation_size;
  TORCH_CHECK_VALUE(run == 0 || (run >= 2 && std::has_single_bit(static_cast<uint64_t>(run)) && group % run == 0),
                    "rotation_size is ", run, ", but must be a power of two that divides group_size (", group,
                    "), or 0 for none");
  parse_quantizer(config.quantizer);
  parse_scale_dtype(config.scale_dtype);
  TORCH_CHECK_VALUE(config.tau >= 0.0, "tau is ", config.tau, ", but must not be negative");
  TORCH_CHECK_VALUE(config.clip > 0.0 && config.clip <= 1.0, "clip is ", config.clip, ", but must lie in (0, 1]");
}

void validate_feedback(const Config& config) {
  parse_residual(config.residual);
  parse_state_dtype(config.state_dtype);
  parse_rescale(config.rescale);
  parse_recompute(config.recompute);
  check_range("eta", config.eta, 0.0, 1.0);
  check_range("a", config.a, 0.0, 1.0);
  TORCH_CHECK_VALUE(config.beta1 >= 0.0 && config.beta1 < 1.0, "beta1 is ", config.beta1, ", but must lie in [0, 1)");
  TORCH_CHECK_VALUE(config.beta2 >= 0.0 && config.beta2 < 1.0, "beta2 is ", config.beta2, ", but must lie in [0, 1)");
  TORCH_CHECK_VALUE(config.early_count >= 0, "early_sites is ", config.early_count, ", but must not be negative");
  TORCH_CHECK_VALUE(config.early_fraction >= 0.0 && config.early_fraction < 1.0, "early_sites is ",
                    config.early_fraction, ", but a fraction must lie in [0, 1)");
}

}  // namespace

DType quantizable_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return DType::kFloat32;
    case c10::ScalarType::BFloat16:
      return DType::kBFloat16;
    case c10::ScalarType::Half:
      return DType::kFloat16;
    default:
      TORCH_CHECK_VALUE(false, "tensor has dtype ", dtype, ", which cannot be quantized");
  }
}

PolicyRules make_policy_rules(const Config& config) {
  PolicyRules rules;
  rules.mode = parse<PolicyMode>("policy", config.policy,
                                 {{"auto", PolicyMode::kAuto}, {"all", PolicyMode::kAll}, {"off", PolicyMode::kOff}});
  rules.min_bytes_cpu = config.min_bytes_cpu;
  rules.min_bytes_cuda = config.min_bytes_cuda;
  rules.exact_recompute = parse_recompute(config.recompute) == Recompute::kExact;
  rules.dtypes = config.dtypes;
  rules.allow = parse_pattern("allow", config.allow);
  rules.deny = parse_pattern("deny", config.deny);
  return rules;
}

void validate(const Config& config) {
  validate_codec(config);
  validate_feedback(config);
  for (const int64_t bytes : {config.min_bytes_cpu, config.min_bytes_cuda}) {
    TORCH_CHECK_VALUE(bytes >= 0, "min_bytes is ", bytes, ", but must not be negative");
  }
  TORCH_CHECK_VALUE(config.workspace_bytes > 0, "workspace_bytes is ", config.workspace_bytes,
                    ", but must be positive");
  for (const std::string& dtype : config.dtypes) {
    TORCH_CHECK_VALUE(quantizable_elem_bytes(dtype) > 0, "dtypes has '", dtype,
                      "', but only 'bfloat16', 'float16' and 'float32' can be quantized");
  }
  TORCH_CHECK_VALUE(config.fabric == "auto" || config.fabric == "wire" || config.fabric == "peer", "fabric is '",
                    config.fabric, "', but must be one of 'auto', 'peer', 'wire'");
  make_policy_rules(config);
}

std::string_view device_obstacle(std::string_view device_type) {
  if (device_type == "cpu") return {};
  if (device_type != "cuda") return "device type not supported";
#if defined(ECHO_WITH_CUDA)
  return {};
#else
  return "built without CUDA";
#endif
}

Plan make_plan(const Config& config, const PlanRequest& request) {
  const ScaleDType by_tensor = request.dtype == DType::kFloat16 ? ScaleDType::kFloat16 : ScaleDType::kBFloat16;
  Plan plan;
  plan.numel = request.numel;
  plan.rank = request.rank;
  plan.world_size = request.world_size;
  plan.dtype = request.dtype;
  plan.first_site = request.first_site;
  plan.codec = Codec{
      .bits = static_cast<int32_t>(request.early ? config.early_bits : config.bits),
      .group_elems = static_cast<int32_t>(config.group_size),
      .quantizer = parse_quantizer(config.quantizer),
      .scale_dtype = parse_scale_dtype(config.scale_dtype).value_or(by_tensor),
      .rotation_log2 = config.rotation_size == 0 ? 0 : std::countr_zero(static_cast<uint64_t>(config.rotation_size)),
      .tau = static_cast<float>(config.tau),
      .clip = static_cast<float>(config.clip)};
  const bool plain = request.recompute && parse_recompute(config.recompute) == Recompute::kPlain;
  if (config.feedback && !plain) {
    plan.feedback = make_feedback(parse_residual(config.residual), state_dtype_for(config, request.dtype), config.eta,
                                  config.a, config.beta1, config.beta2);
  }
  return plan;
}

// fp16 scales neither hold large sums nor small gradients; bf16 scales hold both [paper App. C].
bool wants_rescale(const Config& config, const Plan& plan, Direction direction) {
  const bool by_range = plan.codec.scale_dtype == ScaleDType::kFloat16 && direction == Direction::kBackward;
  return parse_rescale(config.rescale).value_or(by_range);
}

}  // namespace echo::pg
