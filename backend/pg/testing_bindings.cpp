// For tests alone: the codec on its own, to be compared byte for byte with the reference (one rank, one tile, no
// group), and the end of a rank at a chosen point of the peer-memory protocol.
#include <signal.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "../core/reduce.h"
#include "../cpu/memory_handle.h"
#include "../cpu/stages.h"
#include "bindings.hpp"
#include "gil.hpp"
#include "process_group_echo.hpp"
#include "settings.hpp"

namespace echo::pg {
namespace {

const cpu::Stages& stages_for(const std::string& isa) {
  if (isa.empty()) return cpu::active_stages();
  const cpu::Stages* const stages = cpu::stages_named(isa.c_str());
  TORCH_CHECK_VALUE(stages != nullptr, "isa '", isa, "' was not built or this processor lacks it");
  return *stages;
}

// How a single-rank stage is to see its tensor: as rank 0 of `world_size`, all groups in one tile.
struct Bench {
  Plan plan;
  Site site;
  GroupRange all;
};

struct BenchOptions {
  bool first_site = true;
  bool early = false;
  int rescale_log2 = 0;
  int world_size = 2;
};

Bench make_bench(const at::Tensor& tensor, const Config& config, const BenchOptions& options) {
  validate(config);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.numel() > 0, "tensor must be contiguous and not empty");
  Bench bench;
  bench.plan = make_plan(config, PlanRequest{.numel = tensor.numel(),
                                             .rank = 0,
                                             .world_size = options.world_size,
                                             .dtype = quantizable_dtype(tensor.scalar_type()),
                                             .first_site = options.first_site,
                                             .early = options.early});
  bench.site.plan = bench.plan;
  bench.site.tensor = tensor.data_ptr();
  bench.site.rescale_log2 = options.rescale_log2;
  bench.all = GroupRange{0, group_count(bench.plan)};
  return bench;
}

void attach_state(Bench& bench, const std::optional<at::Tensor>& state) {
  const int64_t needed = state_bytes(bench.plan);
  if (needed == 0) return;
  TORCH_CHECK_VALUE(state && state->scalar_type() == at::kByte && state->numel() >= needed,
                    "state must be a uint8 tensor of ", needed, " bytes");
  bench.site.state = state->data_ptr();
}

// x' to codes; with residual "local" `state` is read and updated in place.
at::Tensor encode(const at::Tensor& tensor, const Config& config, const std::optional<at::Tensor>& state,
                  bool first_site, bool early, int rescale_log2, const std::string& isa) {
  Bench bench = make_bench(tensor, config, {first_site, early, rescale_log2, 2});
  attach_state(bench, state);
  at::Tensor tile = at::empty({tile_bytes(bench.plan.codec, bench.all.end)}, at::kByte);
  stages_for(isa).push(bench.site, bench.all, bench.all.end, static_cast<std::byte*>(tile.data_ptr()));
  return tile;
}

// Codes to values, into `tensor`, which holds this rank's contribution before; with residual "group" `state` is read
// and updated in place.
void decode(const at::Tensor& tile, const at::Tensor& tensor, const Config& config,
            const std::optional<at::Tensor>& state, bool first_site, bool early, int rescale_log2, int world_size,
            const std::string& isa) {
  Bench bench = make_bench(tensor, config, {first_site, early, rescale_log2, world_size});
  attach_state(bench, state);
  const int64_t needed = tile_bytes(bench.plan.codec, bench.all.end);
  TORCH_CHECK_VALUE(tile.scalar_type() == at::kByte && tile.numel() == needed, "tile must be a uint8 tensor of ",
                    needed, " bytes");
  stages_for(isa).tail(bench.site, bench.all, bench.all.end, static_cast<const std::byte*>(tile.data_ptr()));
}

// What the next site would add, in the tensor's domain, as fp32.
at::Tensor correction(const at::Tensor& like, const Config& config, const at::Tensor& state, const std::string& isa) {
  Bench bench = make_bench(like, config, {false, false, 0, 2});
  attach_state(bench, state);
  at::Tensor values = at::empty({like.numel()}, at::kFloat);
  stages_for(isa).correction(bench.site, values.data_ptr<float>());
  return values;
}

int64_t state_slot_bytes(const at::Tensor& like, const Config& config) {
  return state_bytes(make_bench(like, config, {}).plan);
}

Step parse_step(const std::string& name) {
  static const std::map<std::string, Step> steps = {{"created", Step::kCreated}, {"mapped", Step::kMapped},
                                                    {"begun", Step::kBegun},     {"pushed", Step::kPushed},
                                                    {"reduced", Step::kReduced}, {"gather seen", Step::kGatherSeen},
                                                    {"updated", Step::kUpdated}, {"launched", Step::kLaunched},
                                                    {"ended", Step::kEnded},     {"closing", Step::kClosing}};
  const auto found = steps.find(name);
  TORCH_CHECK_VALUE(found != steps.end(), "no step is called '", name, "'");
  return found->second;
}

// What is to become of a rank at a chosen moment.
void do_to_this_process(const std::string& action) {
  if (action == "kill") kill(getpid(), SIGKILL);
  if (action == "stop") kill(getpid(), SIGSTOP);
  if (action == "exit") _exit(3);
  if (action == "throw") throw std::runtime_error("an exception that a test asked for");
}

// The action where this rank first does this step on this tile of this call.
void fail_at(ProcessGroupEcho& group, const std::string& step, uint64_t call_number, int64_t tile,
             const std::string& action) {
  TORCH_CHECK_VALUE(action == "kill" || action == "stop" || action == "exit" || action == "throw",
                    "no action is called '", action, "'");
  group.observe([step = parse_step(step), call_number, tile, action,
                 done = std::make_shared<std::atomic<bool>>(false)](const Moment& moment) {
    if (moment.step != step || moment.call_number != call_number || moment.tile != tile || done->exchange(true)) return;
    do_to_this_process(action);
  });
}

// As they are read from the store: what was understood, None for what is refused.
std::optional<std::pair<pid_t, int>> read_handle(const std::string& text) {
  const auto handle = cpu::read_handle(text);
  return handle ? std::optional(std::pair(handle->pid, handle->fd)) : std::nullopt;
}

std::optional<std::string> reread_introduction(const std::string& text) {
  const auto introduction = cpu::read_introduction(text);
  return introduction ? std::optional(cpu::write_introduction(*introduction)) : std::nullopt;
}

}  // namespace

void bind_testing(py::module_& m) {
  py::module_ testing =
      m.def_submodule("testing", "For tests: the codec on one rank, what torch does not show, ranks that end.");
  testing.def("encode", &encode, py::arg("tensor"), py::arg("config"), py::arg("state") = py::none(),
              py::arg("first_site") = true, py::arg("early") = false, py::arg("rescale_log2") = 0, py::arg("isa") = "");
  testing.def("decode", &decode, py::arg("tile"), py::arg("tensor"), py::arg("config"), py::arg("state") = py::none(),
              py::arg("first_site") = true, py::arg("early") = false, py::arg("rescale_log2") = 0,
              py::arg("world_size") = 2, py::arg("isa") = "");
  testing.def("correction", &correction, py::arg("like"), py::arg("config"), py::arg("state"), py::arg("isa") = "");
  testing.def("state_bytes", &state_slot_bytes, py::arg("like"), py::arg("config"));
  testing.attr("deferred_update_bytes") = kDeferredUpdateBytes;
  testing.def("read_handle", &read_handle, py::arg("text"));
  testing.def("reread_introduction", &reread_introduction, py::arg("text"));
  testing.def("bound_device", [](const c10d::Backend& backend) { return backend.getBoundDeviceId(); });
  testing.def("fail_at", &fail_at, py::arg("group"), py::arg("step"), py::arg("call") = 0, py::arg("tile") = 0,
              py::arg("action") = "kill");
  testing.def(
      "counters",
      [](const ProcessGroupEcho& group, const at::Device& device) {
        const GilRelease no_gil;
        return CudaFabrics::counters(group.cuda_fabric(device));
      },
      py::arg("group"), py::arg("device"));
  testing.def(
      "count_from",
      [](const ProcessGroupEcho& group, const at::Device& device, uint64_t tiles, uint64_t calls) {
        const GilRelease no_gil;
        CudaFabrics::count_from(group.cuda_fabric(device), tiles, calls);
      },
      py::arg("group"), py::arg("device"), py::arg("tiles"), py::arg("calls"));
  testing.def(
      "abort_work",
      [](c10d::Work& work) {
        const GilRelease no_gil;
        work.abort();
      },
      py::arg("work"));
  testing.def("rescale_exponent", [](float max_abs) { return rescale_exponent(bits_of(max_abs)); });
}

}  // namespace echo::pg
