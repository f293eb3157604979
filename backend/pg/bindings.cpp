// The module echo_pg._C. Python objects are held where they can outlive the interpreter only by being leaked; whatever
// may block runs without the GIL.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "../cpu/stages.h"
#include "bindings.hpp"
#include "gil.hpp"
#include "process_group_echo.hpp"
#include "py_holder.hpp"
#include "watched_store.hpp"

namespace echo::pg {
namespace {

py::object to_python(const LogValue& value) {
  if (const auto* reasons = std::get_if<ReasonCounts>(&value)) return py::cast(*reasons);
  if (const auto* text = std::get_if<std::string>(&value)) return py::str(*text);
  if (const auto* flag = std::get_if<bool>(&value)) return py::bool_(*flag);
  return py::int_(std::get<int64_t>(value));
}

bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

void set_log_callback(const py::object& callback) {
  if (callback.is_none()) return set_log_sink(nullptr);
  const auto held = std::make_shared<PyHolder>(callback);
  set_log_sink([held](const LogEvent& event) {
    if (interpreter_ends()) return;
    const py::gil_scoped_acquire gil;
    try {
      py::dict payload;
      for (const auto& [key, value] : event.payload) payload[py::str(key)] = to_python(value);
      held->get()(event.name, payload);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("echo's log callback");
    }
  });
}

// Python makes the inner group; its exception crosses the layers without Python as text.
WireGroups::Make group_maker(py::function make) {
  const auto held = std::make_shared<PyHolder>(std::move(make));
  return [held](const std::string& device_type) {
    const py::gil_scoped_acquire gil;
    try {
      return held->get()(device_type).cast<BackendPtr>();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt
      const std::string text = error.what();
      error.restore();
      PyErr_Clear();
      TORCH_CHECK_WITH(DistBackendError, false, "making the inner group for ", device_type, " tensors: ", text);
    }
  };
}

// None: no group of CUDA tensors is to be made later.
InnerGroups::Make later_maker(const py::object& make) {
  if (make.is_none()) return nullptr;
  return [make = group_maker(make)] { return make("cuda"); };
}

c10::intrusive_ptr<ProcessGroupEcho> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                const Config& config, const py::dict& inner_by_device,
                                                const py::object& make_later, py::function make_wire,
                                                std::chrono::milliseconds timeout, py::function make_derived,
                                                py::object pg_options, const std::shared_ptr<Processes>& processes,
                                                bool prefers_device_barriers) {
  GroupSetup setup;
  setup.store = store;
  setup.rank = rank;
  setup.size = size;
  setup.config = config;
  setup.processes = processes;
  setup.prefers_device_barriers = prefers_device_barriers;
  for (const auto& [device, backend] : inner_by_device) {
    setup.inner.emplace(c10::Device(device.cast<std::string>()).type(), backend.cast<BackendPtr>());
  }
  setup.make_later = later_maker(make_later);
  setup.make_wire = group_maker(std::move(make_wire));
  setup.deriver = group_deriver(std::move(make_derived), std::move(pg_options));
  setup.inner_timeout = timeout;
  const bool own_limit = config.timeout_s > 0;
  setup.timeout = own_limit ? std::chrono::milliseconds(static_cast<int64_t>(config.timeout_s * 1000)) : timeout;
  const py::gil_scoped_release no_gil;
  return c10::make_intrusive<ProcessGroupEcho>(std::move(setup));
}

constexpr const char* kDirectionNames[kDirections] = {"forward", "backward", "recompute"};

py::dict by_direction(const std::array<int64_t, kDirections>& values) {
  py::dict dict;
  for (int d = 0; d < kDirections; ++d) dict[kDirectionNames[d]] = values[d];
  return dict;
}

py::dict errors_dict(const SiteErrors& errors) {
  py::dict dict;
  dict["site"] = errors.site;
  dict["lane"] = errors.lane;
  dict["half"] = errors.half;
  dict["numel"] = errors.numel;
  const std::pair<const char*, const ErrorNorms&> norms[] = {
      {"rho", errors.rho}, {"partial", errors.partial}, {"delta", errors.delta}};
  for (const auto& [name, value] : norms) {
    dict[py::str(std::string(name) + "_l2")] = value.l2;
    dict[py::str(std::string(name) + "_max")] = value.max_abs;
  }
  return dict;
}

py::dict stats_dict(ProcessGroupEcho& group) {
  const GroupReport report = group.report();
  py::dict forwarded;
  for (const auto& [reason, count] : report.counts.forwarded_by_reason) {
    py::dict entry;
    entry["calls"] = count.calls;
    entry["bytes"] = count.bytes;
    forwarded[py::str(reason)] = entry;
  }
  py::dict dict;
  dict["group"] = report.group;
  dict["rank"] = group.getRank();
  dict["size"] = group.getSize();
  dict["fabric"] = report.fabric;
  dict["fabric_reason"] = report.fabric_reason;
  dict["isa"] = std::string(cpu::active_isa());
  dict["min_bytes"] =
      py::dict(py::arg("cpu") = group.config().min_bytes_cpu, py::arg("cuda") = group.config().min_bytes_cuda);
  dict["fault"] = report.fault;
  dict["calls_quantized"] = report.counts.quantized.calls;
  dict["bytes_quantized"] = report.counts.quantized.bytes;
  dict["calls_forwarded"] = report.counts.forwarded.calls;
  dict["bytes_forwarded"] = report.counts.forwarded.bytes;
  dict["forwarded"] = forwarded;
  dict["other_calls"] = report.counts.other_calls;
  dict["wire_bytes"] = report.counts.wire_bytes;
  dict["wire_padding_bytes"] = report.counts.wire_padding_bytes;
  dict["state_bytes"] = report.state_bytes;
  dict["workspace_bytes"] = report.workspace_bytes;
  dict["passes"] = by_direction(report.passes);
  dict["sites"] = by_direction(report.sites);
  dict["sites_last"] = by_direction(report.last_sites);
  if (!group.config().diagnostics) return dict;
  py::dict diagnostics;
  for (int d = 0; d < kDirections; ++d) {
    py::list sites_of_pass;
    for (const SiteErrors& errors : group.site_errors(static_cast<Direction>(d)))
      sites_of_pass.append(errors_dict(errors));
    diagnostics[kDirectionNames[d]] = sites_of_pass;
  }
  dict["diagnostics"] = diagnostics;
  return dict;
}

py::dict build_flags() {
  py::dict flags;
#if defined(ECHO_WITH_CUDA)
  flags["cuda"] = true;
#else
  flags["cuda"] = false;
#endif
  py::list compiled;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (cpu::stages_named(isa) != nullptr) compiled.append(isa);
  }
  flags["isa"] = compiled;
  flags["isa_active"] = std::string(cpu::active_isa());
  flags["compiler"] = std::string(__VERSION__);
  return flags;
}

// Why all-reduces on a CUDA device of this process cannot be quantized, empty if they can.
std::string cuda_obstacle(int device) {
  const std::string_view in_general = device_obstacle("cuda");
  if (!in_general.empty()) return std::string(in_general);
  const GilRelease no_gil;
  return CudaFabrics::missing_code(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

py::dict context_dict() {
  const CallOrigin origin = current_origin();
  constexpr const char* kContextNames[] = {"none", "forward", "backward", "recompute"};
  py::dict dict;
  dict["context"] = kContextNames[static_cast<int>(origin.context)];
  dict["role"] = static_cast<int>(origin.role);
  dict["depth"] = origin.depth;
  dict["no_grad"] = origin.no_grad;
  dict["parameter_gradient"] = origin.parameter_gradient;
  dict["exact"] = origin.exact;
  dict["hooks"] = origin.hooks;
  return dict;
}

void bind_signals(py::module_& m) {
  m.def("module_enter", [](int role) { return module_enter(parse_role(role)); });
  m.def("module_exit", &module_exit);
  m.def("backward_enter", &backward_enter);
  m.def("backward_exit", &backward_exit);
  m.def("exact_enter", &exact_enter);
  m.def("exact_exit", &exact_exit);
  m.def("set_hooks_installed", &set_hooks_installed);
  m.def("new_pass", [](const std::string& direction) { announce_everywhere(parse_direction(direction)); });
  m.def("current_context", &context_dict);
}

// What group creation uses, before there is a group.
void bind_processes(py::module_& m) {
  py::class_<Processes, std::shared_ptr<Processes>>(m, "Processes")
      .def(py::init<int32_t, int32_t, const std::vector<std::string>&>(), py::arg("rank"), py::arg("size"),
           py::arg("introductions"))
      .def("exited", &Processes::exited);
  m.def("introduction", &Processes::introduction);
  m.def("has_exited", py::overload_cast<const std::string&>(&Processes::has_exited), py::arg("introduction"));
  m.def(
      "watched_store",
      [](c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Processes> processes,
         std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Store> {
        return c10::make_intrusive<WatchedStore>(std::move(store), std::move(processes), timeout);
      },
      py::arg("store"), py::arg("processes"), py::arg("timeout"));
  py::class_<FaultReport>(m, "FaultReport")
      .def_property_readonly("group_survives",
                             [](const FaultReport& report) { return report.fate == GroupFate::kSurvives; })
      .def("__str__", &FaultReport::in_words);
  m.def(
      "first_report",
      [](c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t size, std::shared_ptr<Processes> processes) {
        return FaultReports(std::move(store), rank, size, std::move(processes)).first_heard();
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("processes"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "fault_reports",
      [](c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t size, std::shared_ptr<Processes> processes,
         const std::string& mine) {
        return FaultReports(std::move(store), rank, size, std::move(processes)).exchange(mine, GroupFate::kEnds);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("processes"), py::arg("mine"),
      py::call_guard<py::gil_scoped_release>());
}

void bind_group(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<ProcessGroupEcho, c10d::Backend, c10::intrusive_ptr<ProcessGroupEcho>>(m, "ProcessGroupEcho",
                                                                                    py::dynamic_attr())
      .def(py::init(&make_group), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("config"),
           py::arg("inner_by_device"), py::arg("make_later"), py::arg("make_wire"), py::arg("timeout"),
           py::arg("make_derived"), py::arg("pg_options"), py::arg("processes"), py::arg("prefers_device_barriers"))
      .def(
          "_all_reduce",
          [](ProcessGroupEcho& group, const at::Tensor& tensor, bool async_op,
             const std::optional<std::string>& direction) {
            std::optional<Direction> forced;
            if (direction) forced = parse_direction(*direction);
            return group.all_reduce_quantized(tensor, async_op, forced);
          },
          py::arg("tensor"), py::arg("async_op") = false, py::arg("direction") = py::none(), no_gil)
      .def(
          "_explain",
          [](ProcessGroupEcho& group, const at::Tensor& tensor, const std::string& op) {
            const Decision decision = group.explain(tensor, op);
            return std::pair(decision.quantize, decision.reason);
          },
          py::arg("tensor"), py::arg("op") = "SUM", no_gil)
      .def(
          "_new_pass",
          [](ProcessGroupEcho& group, const std::string& direction) { group.new_pass(parse_direction(direction)); },
          no_gil)
      .def("_last_forward_sites", &ProcessGroupEcho::last_forward_sites)
      .def("_resume_after", &ProcessGroupEcho::resume_after, py::arg("forward_sites"))
      .def("_set_look_ahead", &ProcessGroupEcho::set_look_ahead, py::arg("tiles"))
      .def("_join_update", &ProcessGroupEcho::join_update, py::arg("device"))
      .def("_stats", &stats_dict)
      .def("_options", &ProcessGroupEcho::getBackendOptions)
      .def("_fault", [](ProcessGroupEcho& group) { return group.report().fault; })
      .def("_desc", &ProcessGroupEcho::description)
      .def("_inner",
           [](ProcessGroupEcho& group, const std::string& type) { return group.inner(c10::Device(type).type()); })
      .def_property_readonly("_introductions", &ProcessGroupEcho::introductions)
      .def_property_readonly("_config", &ProcessGroupEcho::config, py::return_value_policy::copy);
}

}  // namespace
}  // namespace echo::pg

PYBIND11_MODULE(_C, m) {
  m.doc() = "echo's c10d backend and the signals it is steered by.";
  // c10d::Backend, the base class, is known to pybind11 only once this module is loaded.
  py::module_::import("torch.distributed");
  echo::pg::bind_config(m);
  echo::pg::bind_signals(m);
  echo::pg::bind_derived_groups(m);
  echo::pg::bind_processes(m);
  echo::pg::bind_group(m);
  echo::pg::bind_testing(m);
  m.def("set_log_callback", &echo::pg::set_log_callback);
  m.def("set_log_calls", &echo::pg::set_log_calls, py::arg("on"));
  m.def("build_flags", &echo::pg::build_flags);
  m.def("cuda_obstacle", &echo::pg::cuda_obstacle, py::arg("device"));
}
