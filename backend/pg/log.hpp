// What a group has to say, as events with plain payloads; the Python side formats and filters them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace echo::pg {

using ReasonCounts = std::vector<std::pair<std::string, int64_t>>;
using LogValue = std::variant<bool, int64_t, std::string, ReasonCounts>;

struct LogEvent {
  std::string name;
  std::vector<std::pair<std::string, LogValue>> payload;
};

// The sink takes the GIL: nobody emits while holding a lock that a thread with the GIL may wait for.
using LogSink = std::function<void(const LogEvent&)>;

void set_log_sink(LogSink sink);
// Whether every call is an event too.
void set_log_calls(bool on);
bool logs_calls();
void emit(const LogEvent& event) noexcept;
void emit_notice(const std::string& message, const char* level) noexcept;

}  // namespace echo::pg
