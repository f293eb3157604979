// Questions to a store that may not answer: the client of a TCPStore waits for its server without a time-out, and a
// server that is stopped, or whose host has gone, leaves its connections open.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace echo::pg {

// Runs `question` on a thread of its own. False if it has not returned after `limit`: it stays behind on that thread
// until the store answers, so it must own what it uses. Throws what it throws, and what a signal handler raises
// meanwhile. Must be called without the GIL, which a store written in Python takes.
bool ask(std::function<void()> question, std::chrono::milliseconds limit);

// The same, for what `question` returns; nothing after `limit`.
template <typename Question>
auto answer_within(std::chrono::milliseconds limit, Question question) -> std::optional<decltype(question())> {
  const auto answer = std::make_shared<std::optional<decltype(question())>>();
  if (!ask([answer, question = std::move(question)] { *answer = question(); }, limit)) return std::nullopt;
  return std::move(*answer);
}

// How long a question may take where all of what it is asked for began at `start` and has `timeout` (0 or less: none).
// Never nothing, so that an answer that is there can be had.
std::chrono::milliseconds left_to_ask(std::chrono::steady_clock::time_point start, std::chrono::milliseconds timeout);

// Throws c10::DistBackendError unless `answered`.
void require_answer(bool answered);

}  // namespace echo::pg
