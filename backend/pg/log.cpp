#include "log.hpp"

#include <atomic>
#include <memory>
#include <mutex>

namespace echo::pg {
namespace {

std::mutex g_mutex;
std::atomic<bool> g_logs_calls{false};

// Leaked: worker threads may emit while static objects are being destroyed.
std::shared_ptr<LogSink>& sink_slot() {
  static auto* const slot = new std::shared_ptr<LogSink>;
  return *slot;
}

}  // namespace

void set_log_sink(LogSink sink) {
  auto next = sink ? std::make_shared<LogSink>(std::move(sink)) : nullptr;
  const std::lock_guard lock(g_mutex);
  sink_slot().swap(next);
}

void set_log_calls(bool on) { g_logs_calls.store(on, std::memory_order_relaxed); }

bool logs_calls() { return g_logs_calls.load(std::memory_order_relaxed); }

void emit(const LogEvent& event) noexcept {
  std::shared_ptr<LogSink> sink;
  {
    const std::lock_guard lock(g_mutex);
    sink = sink_slot();
  }
  try {
    if (sink) (*sink)(event);
  } catch (...) {
    // A log line that cannot be written must not fail the collective that it speaks of.
  }
}

void emit_notice(const std::string& message, const char* level) noexcept {
  try {
    emit(LogEvent{"notice", {{"message", message}, {"level", std::string(level)}}});
  } catch (...) {
  }
}

}  // namespace echo::pg
