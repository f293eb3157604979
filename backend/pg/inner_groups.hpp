// The inner groups that serve forwarded calls, one per device type.
//
// That of CUDA tensors may be made at its first use: making one of NCCL starts CUDA's driver, and a program that names
// echo for CPU tensors on a machine with GPUs must not pay for that, nor lose the right to fork.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "wire_groups.hpp"

namespace echo::pg {

class InnerGroups {
 public:
  // Makes the group of CUDA tensors, without the other ranks; null where this machine has no use for one. May take the
  // GIL.
  using Make = std::function<BackendPtr()>;

  // `later` is empty where all there can be was made.
  InnerGroups(BackendsByDevice made, Make later) : made_(std::move(made)), later_(std::move(later)) {}

  // Made now if it was to be made later; null if there is none.
  BackendPtr get(c10::DeviceType type);

  // Those made so far.
  BackendsByDevice made() const;
  bool has_made(c10::DeviceType type) const { return made().count(type) > 0; }
  // Of an accelerator, made or not.
  bool may_have_device() const;

  // For those to come, too.
  void set_timeout(std::chrono::milliseconds timeout);
  void set_uid(const std::string& uid);
  // While a coalescing bracket is open, what is made joins it. Returns what had been made by then, for the caller to
  // start or end.
  BackendsByDevice set_bracket(bool open);

  // What is being made comes too late, too.
  void make_no_more();
  // What was made, to be destroyed; nothing is made any more.
  BackendsByDevice take_all();
  // In a forked process, where locks may be held for ever: all stay to the end of the process.
  void leave_behind() { new BackendsByDevice(std::move(made_)); }

 private:
  BackendPtr make_later();

  std::mutex make_mutex_;     // held while one is made. Never taken with the GIL, which making takes
  mutable std::mutex mutex_;  // guards what follows
  BackendsByDevice made_;
  Make later_;
  std::optional<std::chrono::milliseconds> timeout_;
  std::optional<std::string> uid_;
  bool bracket_open_ = false;
};

}  // namespace echo::pg
