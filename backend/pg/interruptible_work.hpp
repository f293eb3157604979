// Forwarded calls of CPU tensors whose waits Ctrl-C ends: Gloo's own Works in all else.
//
// Gloo waits without a look at Python's signals. Here a wait is cut into slices, and handlers run between them. A call
// that is given up is left to Gloo, which owns its tensors and waits on for the peer or the time-out.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "forwarded_calls.hpp"

namespace echo::pg {

// What `inner` does, and throws, with the thread's state of torch, on a thread of its own that is left behind where a
// signal handler raises; `leave` then gets what tells of its end.
void run_on_thread(std::function<void()> inner, const std::function<void(std::future<void>)>& leave);

// In place of `work`, which Gloo has returned for CPU tensors; null for null.
c10::intrusive_ptr<c10d::Work> make_interruptible(c10::intrusive_ptr<c10d::Work> work,
                                                  const std::shared_ptr<ForwardedCalls>& calls);

// Gloo's reduce-scatter is an all-reduce of a copy, of which the Work that waits for it hides the parts. This is the
// same from parts that can be waited for in slices. Null where the arguments do not fit: Gloo itself is to say so.
c10::intrusive_ptr<c10d::Work> reduce_then_scatter(c10d::Backend& inner, const std::vector<at::Tensor>& outputs,
                                                   const std::vector<at::Tensor>& inputs,
                                                   const c10d::ReduceScatterOptions& options,
                                                   const std::shared_ptr<ForwardedCalls>& calls);

}  // namespace echo::pg
