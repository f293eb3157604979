// Which all-reduces are quantized: a pure function of facts that are equal on all ranks, never of values. In doubt,
// exact.
//
// The facts come from the issuing thread. Every refusal has a short reason, a stable string: statistics count by it and
// users read it.
#pragma once

#include <cstdint>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace echo {

enum class PolicyMode : uint8_t { kAuto, kAll, kOff };

// What a group is for, by its description.
enum class GroupKind : uint8_t { kNeutral, kAllowed, kDenied, kDeniedByUser };

// Where the call comes from: inside a module's forward, autograd's backward, a forward run again by it, or none of
// them.
enum class CallContext : uint8_t { kNone, kForward, kBackward, kRecompute };

// kOpaque: a compiled module, inside which modules are entered unseen. kResidual: a module that adds the residual
// before it sums, so that the sum is no block's output alone. kAlternating: a module that runs two halves of a batch
// side by side, whose calls take turns; as eligible as a plain one.
enum class ModuleRole : uint8_t { kPlain, kEmbedding, kOutput, kOpaque, kResidual, kAlternating };

struct PolicyRules {
  PolicyMode mode = PolicyMode::kAuto;
  int64_t min_bytes_cpu = 0;  // smaller tensors of that kind of memory stay exact
  int64_t min_bytes_cuda = 0;
  bool exact_recompute = false;     // what backward recomputes stays exact
  std::vector<std::string> dtypes;  // "bfloat16", "float16", "float32"
  std::optional<std::regex> allow;  // searched in the group's description; both win over the built-in lists
  std::optional<std::regex> deny;   // wins over allow
};

// The smallest hidden size and the smallest quantization group. Shorter rows hold a few numbers per token (losses,
// maxima of logits, weights of a router), no features.
inline constexpr int64_t kMinRowElems = 16;

struct CallFacts {
  std::string_view op = "SUM";  // name of the c10d reduce operation
  std::string_view dtype = "bfloat16";
  std::string_view device_obstacle;  // why this device's tensors cannot be quantized here, empty if they can
  bool on_cuda = false;              // else in memory of the host
  int64_t tensors = 1;
  int64_t numel = 0;
  int64_t ndim = 2;
  int64_t row_elems = kMinRowElems;  // of the last dimension
  int64_t group_size = 2;
  GroupKind group = GroupKind::kNeutral;
  CallContext context = CallContext::kNone;
  ModuleRole role = ModuleRole::kPlain;
  bool sparse = false;
  bool coalesced = false;           // between startCoalescing and endCoalescing
  bool exact = false;               // inside exact()
  bool capturing = false;           // the stream records a graph
  bool parameter_gradient = false;  // the current node accumulates a gradient, or backward runs no node at all
  bool hooks = true;                // module hooks are installed, so that a context of kNone means something
  bool hand_set = false;            // the caller announced a pass by hand
};

struct Decision {
  bool quantize = false;
  std::string reason;
};

GroupKind classify_group(const PolicyRules& rules, std::string_view description);
Decision decide(const PolicyRules& rules, const CallFacts& facts);

// "none", "forward", "backward" or "recompute".
std::string_view context_name(CallContext context);

// Bytes per element of the dtypes that a rule may list, 0 for any other.
int64_t quantizable_elem_bytes(std::string_view dtype);

}  // namespace echo
