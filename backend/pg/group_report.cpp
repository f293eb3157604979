// What a group says of itself: its statistics, and what it logs of its calls and of what was never quantized.
#include "gil.hpp"
#include "process_group_echo.hpp"

namespace echo::pg {
namespace {

constexpr int64_t kIdlePasses = 3;  // passes with nothing quantized before a warning

}  // namespace

GroupReport ProcessGroupEcho::report() {
  const GilRelease no_gil;
  check_at_home(home_);
  GroupReport report;
  report.group = description();
  core_->look_at_devices();
  report.fault = core_->fault.text();
  report.counts = core_->stats.snapshot();
  report.fabric = report.counts.quantized.calls > 0 ? "wire" : "none";
  report.workspace_bytes = core_->workspace_bytes;
  const std::lock_guard lock(issue_mutex_);
  if (core_->peer && core_->peer->fabric) report.workspace_bytes += core_->peer->fabric->slab_bytes();
  report.workspace_bytes += core_->cuda_fabrics.slab_bytes() + core_->cuda_fabrics.kept_bytes();
  if (core_->peer_fabric != nullptr || core_->cuda_fabrics.has_fabric()) report.fabric = "peer";
  report.fabric_reason = core_->cuda_fabrics.refusal();
  if (report.fabric_reason.empty() && core_->peer) report.fabric_reason = core_->peer->reason;
  report.state_bytes = states_.total_bytes();
  for (int d = 0; d < kDirections; ++d) {
    const auto direction = static_cast<Direction>(d);
    report.passes[d] = passes_.passes(direction);
    report.sites[d] = passes_.sites(direction);
    report.last_sites[d] = passes_.last_sites(direction);
  }
  return report;
}

void ProcessGroupEcho::warn_if_idle(int64_t passes) {
  if (passes <= kIdlePasses || getRank() != 0 || getSize() < 2 || rules_.mode == PolicyMode::kOff) return;
  const GroupKind kind = group_kind();
  if (kind == GroupKind::kDenied || kind == GroupKind::kDeniedByUser) return;
  int64_t reduce_scatters = 0;
  {
    const std::lock_guard lock(issue_mutex_);
    if (calls_ > 0 || std::exchange(idle_warned_, true)) return;
    reduce_scatters = reduce_scatters_;
  }
  emit(LogEvent{"nothing_quantized",
                {{"group", description()},
                 {"size", int64_t{getSize()}},
                 {"reasons", top_reasons(core_->stats.snapshot())},
                 {"reduce_scatters", reduce_scatters}}});
}

// In a forward it is sequence parallelism, whose sums never come as all-reduces. Sharded data parallelism uses it in
// backward only.
void ProcessGroupEcho::note_reduce_scatter() {
  const GilRelease no_gil;
  const CallOrigin origin = current_origin();
  if (origin.context != CallContext::kForward) return;
  int64_t passes = 0;
  {
    const std::lock_guard lock(issue_mutex_);
    passes = passes_.book_exact(origin);
    ++reduce_scatters_;
  }
  warn_if_idle(passes);
}

void ProcessGroupEcho::log_call(const Tensors& tensors, std::string_view op, const CallOrigin& origin,
                                const Decision& decision) const {
  emit(LogEvent{"call",
                {{"group", description()},
                 {"rank", int64_t{getRank()}},
                 {"op", std::string(op)},
                 {"dtype", std::string(dtype_name(tensors.front().scalar_type()))},
                 {"shape", c10::str(tensors.front().sizes())},
                 {"tensors", static_cast<int64_t>(tensors.size())},
                 {"context", std::string(context_name(origin.context))},
                 {"quantized", decision.quantize},
                 {"reason", decision.reason}}});
}

void ProcessGroupEcho::log_destroyed() {
  if (getRank() != 0) return;
  const auto counts = core_->stats.snapshot();
  emit(LogEvent{"destroyed",
                {{"group", description()},
                 {"rank", int64_t{getRank()}},
                 {"size", int64_t{getSize()}},
                 {"calls_quantized", counts.quantized.calls},
                 {"bytes_quantized", counts.quantized.bytes},
                 {"calls_forwarded", counts.forwarded.calls},
                 {"bytes_forwarded", counts.forwarded.bytes},
                 {"reasons", top_reasons(counts)}}});
}

}  // namespace echo::pg
