// The rules, in the order in which a call is told why it stays exact: what the collective cannot do, what the caller
// switched off, what the group is for, where the call comes from.
#include "policy.h"

#include <algorithm>

namespace echo {
namespace {

enum class Match : uint8_t { kWhole, kPrefix, kSuffix };

struct NameRule {
  Match match;
  std::string_view text;
  GroupKind kind;
};

// Descriptions that Megatron-Core, DeepSpeed and DeviceMesh give their groups; the first rule that matches counts.
// Where a sum is over replicas of parameters, over tokens, or over host copies of a group, its values are no partial
// sums of activations.
constexpr NameRule kNameRules[] = {
    {Match::kSuffix, "GLOO", GroupKind::kDenied},
    {Match::kSuffix, "cpu", GroupKind::kDenied},
    {Match::kWhole, "MODEL_PARALLEL_GROUP", GroupKind::kDenied},
    {Match::kPrefix, "DATA_PARALLEL", GroupKind::kDenied},
    {Match::kPrefix, "INTRA_", GroupKind::kDenied},
    {Match::kPrefix, "INTER_", GroupKind::kDenied},
    {Match::kPrefix, "EMBEDDING", GroupKind::kDenied},
    {Match::kPrefix, "POSITION", GroupKind::kDenied},
    {Match::kPrefix, "PIPELINE", GroupKind::kDenied},
    {Match::kPrefix, "CONTEXT", GroupKind::kDenied},
    {Match::kPrefix, "HIERARCHICAL_CONTEXT", GroupKind::kDenied},
    {Match::kPrefix, "HYBRID_DP_CP", GroupKind::kDenied},
    {Match::kPrefix, "GTP_", GroupKind::kDenied},
    {Match::kPrefix, "TENSOR_AND_", GroupKind::kDenied},
    {Match::kPrefix, "EXPERT_", GroupKind::kDenied},
    {Match::kPrefix, "mesh_dp", GroupKind::kDenied},
    {Match::kPrefix, "mesh_data_parallel", GroupKind::kDenied},
    {Match::kPrefix, "mesh_fsdp", GroupKind::kDenied},
    {Match::kPrefix, "mesh_pp", GroupKind::kDenied},
    {Match::kPrefix, "mesh_cp", GroupKind::kDenied},
    {Match::kPrefix, "mesh_ep", GroupKind::kDenied},
    {Match::kPrefix, "TENSOR_MODEL_PARALLEL_GROUP", GroupKind::kAllowed},
    {Match::kPrefix, "mesh_tensor_parallel", GroupKind::kAllowed},
    {Match::kPrefix, "mesh_tp", GroupKind::kAllowed},
    {Match::kPrefix, "tp", GroupKind::kAllowed},
};

bool matches(const NameRule& rule, std::string_view name) {
  switch (rule.match) {
    case Match::kWhole:
      return name == rule.text;
    case Match::kPrefix:
      return name.starts_with(rule.text);
    case Match::kSuffix:
      return name.ends_with(rule.text);
  }
  return false;
}

bool found(const std::optional<std::regex>& pattern, std::string_view name) {
  return pattern && std::regex_search(name.begin(), name.end(), *pattern);
}

Decision exact(std::string reason) { return Decision{false, std::move(reason)}; }
Decision quantized(std::string reason) { return Decision{true, std::move(reason)}; }

// What no mode can change: the collective sums one dense tensor of a listed dtype over several ranks, eagerly.
std::string obstacle(const PolicyRules& rules, const CallFacts& facts) {
  if (facts.group_size < 2) return "group of one rank";
  if (facts.tensors != 1) return "several tensors";
  if (facts.op != "SUM") return "not a SUM";
  if (facts.sparse) return "sparse tensor";
  if (std::find(rules.dtypes.begin(), rules.dtypes.end(), facts.dtype) == rules.dtypes.end()) {
    return "dtype " + std::string(facts.dtype) + " not listed";
  }
  if (facts.numel == 0) return "empty tensor";
  if (!facts.device_obstacle.empty()) return std::string(facts.device_obstacle);
  if (facts.coalesced) return "inside a coalescing bracket";
  if (facts.capturing) return "stream capture";
  if (facts.exact) return "exact()";
  const int64_t min_bytes = facts.on_cuda ? rules.min_bytes_cuda : rules.min_bytes_cpu;
  if (facts.numel * quantizable_elem_bytes(facts.dtype) < min_bytes) return "below min_bytes";
  if (facts.group == GroupKind::kDeniedByUser) return "denied group";
  return {};
}

// Without hooks or after a pass announced by hand, a context of kNone may still be a forward: trusted in allow-listed
// groups only.
bool in_pass(const CallFacts& facts) {
  if (facts.context != CallContext::kNone) return true;
  return facts.group == GroupKind::kAllowed && (!facts.hooks || facts.hand_set);
}

}  // namespace

int64_t quantizable_elem_bytes(std::string_view dtype) {
  if (dtype == "bfloat16" || dtype == "float16") return 2;
  return dtype == "float32" ? 4 : 0;
}

std::string_view context_name(CallContext context) {
  constexpr std::string_view kNames[] = {"none", "forward", "backward", "recompute"};
  return kNames[static_cast<size_t>(context)];
}

GroupKind classify_group(const PolicyRules& rules, std::string_view description) {
  if (found(rules.deny, description)) return GroupKind::kDeniedByUser;
  if (found(rules.allow, description)) return GroupKind::kAllowed;
  for (const NameRule& rule : kNameRules) {
    if (matches(rule, description)) return rule.kind;
  }
  return GroupKind::kNeutral;
}

Decision decide(const PolicyRules& rules, const CallFacts& facts) {
  if (rules.mode == PolicyMode::kOff) return exact("policy off");
  if (std::string reason = obstacle(rules, facts); !reason.empty()) return exact(std::move(reason));
  if (rules.mode == PolicyMode::kAll) return quantized("policy all");

  if (facts.ndim < 2) return exact("one-dimensional");
  if (facts.row_elems < kMinRowElems) return exact("rows shorter than 16");
  if (facts.group == GroupKind::kDenied) return exact("denied group");
  if (facts.parameter_gradient) return exact("parameter gradient");
  if (!in_pass(facts)) return exact("outside a module and autograd");
  if (rules.exact_recompute && facts.context == CallContext::kRecompute) return exact("recomputed forward");
  // Modules are on the stack only in a forward or one run again.
  if (facts.role == ModuleRole::kEmbedding) return exact("embedding");
  if (facts.role == ModuleRole::kOutput) return exact("output layer");
  if (facts.role == ModuleRole::kResidual) return exact("residual included");
  if (facts.role == ModuleRole::kOpaque && facts.group != GroupKind::kAllowed) {
    return exact("compiled module, roles unknown");
  }
  return quantized("tensor parallel");
}

}  // namespace echo
