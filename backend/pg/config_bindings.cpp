// Config, and decide() as Python calls it: with a dictionary of facts.
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <map>

#include "bindings.hpp"
#include "settings.hpp"

namespace echo::pg {
namespace {

CallContext parse_context(const std::string& name) {
  for (const auto context :
       {CallContext::kNone, CallContext::kForward, CallContext::kBackward, CallContext::kRecompute}) {
    if (name == context_name(context)) return context;
  }
  TORCH_CHECK_VALUE(false, "context is '", name, "', but must be 'none', 'forward', 'backward' or 'recompute'");
}

// Facts as given, and the strings that CallFacts only points into.
struct NamedFacts {
  CallFacts facts;
  std::string op = "SUM";
  std::string dtype = "bfloat16";
  std::string device = "cpu";
  std::string group_desc = "default_pg";
  std::optional<bool> device_supported;  // nullopt: as this build says
};

using Setter = std::function<void(NamedFacts&, py::handle)>;

template <typename Value>
Setter set(Value CallFacts::* field) {
  return [field](NamedFacts& named, py::handle value) { named.facts.*field = value.cast<Value>(); };
}

template <typename Value>
Setter set(Value NamedFacts::* field) {
  return [field](NamedFacts& named, py::handle value) { named.*field = value.cast<Value>(); };
}

std::map<std::string, Setter> fact_setters() {
  return {{"op", set(&NamedFacts::op)},
          {"dtype", set(&NamedFacts::dtype)},
          {"device", set(&NamedFacts::device)},
          {"device_supported", set(&NamedFacts::device_supported)},
          {"group_desc", set(&NamedFacts::group_desc)},
          {"tensors", set(&CallFacts::tensors)},
          {"numel", set(&CallFacts::numel)},
          {"ndim", set(&CallFacts::ndim)},
          {"row_elems", set(&CallFacts::row_elems)},
          {"group_size", set(&CallFacts::group_size)},
          {"sparse", set(&CallFacts::sparse)},
          {"coalesced", set(&CallFacts::coalesced)},
          {"exact", set(&CallFacts::exact)},
          {"capturing", set(&CallFacts::capturing)},
          {"accumulate_grad", set(&CallFacts::parameter_gradient)},
          {"hooks", set(&CallFacts::hooks)},
          {"hand_set", set(&CallFacts::hand_set)},
          {"context",
           [](NamedFacts& named, py::handle value) { named.facts.context = parse_context(value.cast<std::string>()); }},
          {"role", [](NamedFacts& named, py::handle value) { named.facts.role = parse_role(value.cast<int>()); }}};
}

std::pair<bool, std::string> decide_from_python(const Config& config, const py::dict& given) {
  const std::map<std::string, Setter> setters = fact_setters();
  NamedFacts named;
  named.facts.context = CallContext::kForward;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    const auto setter = setters.find(name);
    if (setter == setters.end()) {
      std::string known;
      for (const auto& [fact, unused] : setters) known += (known.empty() ? "" : ", ") + fact;
      TORCH_CHECK_VALUE(false, "unknown fact '", name, "'; known are: ", known);
    }
    setter->second(named, value);
  }
  validate(config);
  const PolicyRules rules = make_policy_rules(config);
  named.facts.op = named.op;
  named.facts.dtype = named.dtype;
  named.facts.on_cuda = named.device == "cuda";
  const std::string_view told = named.device_supported.value_or(true) ? "" : "device not supported";
  named.facts.device_obstacle = named.device_supported ? told : device_obstacle(named.device);
  named.facts.group = classify_group(rules, named.group_desc);
  const Decision decision = decide(rules, named.facts);
  return {decision.quantize, decision.reason};
}

}  // namespace

Direction parse_direction(const std::string& name) {
  if (name == "forward") return Direction::kForward;
  if (name == "backward") return Direction::kBackward;
  if (name == "recompute") return Direction::kRecompute;
  TORCH_CHECK_VALUE(false, "direction is '", name, "', but must be 'forward', 'backward' or 'recompute'");
}

ModuleRole parse_role(int role) {
  TORCH_CHECK_VALUE(role >= 0 && role <= static_cast<int>(ModuleRole::kAlternating), "role is ", role,
                    ", but must be 0..5");
  return static_cast<ModuleRole>(role);
}

void bind_config(py::module_& m) {
  py::class_<Config>(m, "Config")
      .def(py::init<>())
      .def_readwrite("bits", &Config::bits)
      .def_readwrite("group_size", &Config::group_size)
      .def_readwrite("rotation_size", &Config::rotation_size)
      .def_readwrite("quantizer", &Config::quantizer)
      .def_readwrite("scale_dtype", &Config::scale_dtype)
      .def_readwrite("tau", &Config::tau)
      .def_readwrite("clip", &Config::clip)
      .def_readwrite("feedback", &Config::feedback)
      .def_readwrite("residual", &Config::residual)
      .def_readwrite("eta", &Config::eta)
      .def_readwrite("a", &Config::a)
      .def_readwrite("beta1", &Config::beta1)
      .def_readwrite("beta2", &Config::beta2)
      .def_readwrite("state_dtype", &Config::state_dtype)
      .def_readwrite("early_count", &Config::early_count)
      .def_readwrite("early_fraction", &Config::early_fraction)
      .def_readwrite("early_bits", &Config::early_bits)
      .def_readwrite("rescale", &Config::rescale)
      .def_readwrite("recompute", &Config::recompute)
      .def_readwrite("policy", &Config::policy)
      .def_readwrite("min_bytes_cpu", &Config::min_bytes_cpu)
      .def_readwrite("min_bytes_cuda", &Config::min_bytes_cuda)
      .def_readwrite("dtypes", &Config::dtypes)
      .def_readwrite("allow", &Config::allow)
      .def_readwrite("deny", &Config::deny)
      .def_readwrite("fabric", &Config::fabric)
      .def_readwrite("workspace_bytes", &Config::workspace_bytes)
      .def_readwrite("timeout_s", &Config::timeout_s)
      .def_readwrite("diagnostics", &Config::diagnostics)
      .def_readwrite("allow_shared_gpu", &Config::allow_shared_gpu);
  m.def("decide", &decide_from_python, py::arg("config"), py::arg("facts"));
}

}  // namespace echo::pg
