#include "passes.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace echo::pg {
namespace {

struct Frame {
  ModuleRole role = ModuleRole::kPlain;
  // Global forward hooks run before a module's own, so an all-reduce in an embedding's own hook finds the embedding
  // already gone: a call right after its exit still belongs to it.
  ModuleRole last_child = ModuleRole::kPlain;
};

// The autograd node that runs a part of the forward again, or none (task -1). Where a checkpoint wraps a module's
// forward, not its call, the parts of that module are outermost one after the other, and only the node tells that they
// belong together.
struct Segment {
  int task = -1;
  uint64_t node = 0;
  bool operator==(const Segment&) const = default;
};

// What a pass of module calls is known by.
struct PassOrigin {
  uint64_t mark = 0;
  Segment segment;
  bool no_grad = false;
};

// The modules entered on a thread. `base` hides those that were entered before the innermost autograd run on this
// thread.
struct ThreadStack {
  std::vector<Frame> frames;
  size_t base = 0;
  PassOrigin pass;
};

struct SuspendedStack {
  size_t base;
  PassOrigin pass;
};

thread_local ThreadStack t_stack;
thread_local std::vector<SuspendedStack> t_suspended;

std::atomic<uint64_t> g_last_mark{0};
std::atomic<uint64_t> g_backward_mark{0};
std::atomic<int> g_exact_depth{0};
std::atomic<bool> g_hooks_installed{false};

std::mutex g_announced_mutex;
Announcements g_announced;

uint64_t new_mark() { return g_last_mark.fetch_add(1, std::memory_order_relaxed) + 1; }

bool gradients_off() { return !c10::GradMode::is_enabled(); }

// What the node that autograd runs on this thread tells. A gradient on its way into a parameter, or a callback outside
// of any node, sums over replicas, not over partial results. Domino's column-parallel node serves both halves of a
// batch.
void read_node(CallOrigin& origin) {
  const auto node = torch::autograd::get_current_node();
  const std::string name = node == nullptr ? "" : node->name();
  origin.parameter_gradient = name.empty() || name.ends_with("AccumulateGrad");
  origin.alternates = name.starts_with("DominoAsync");
}

// Whether a call right after a module's exit still belongs to it.
bool outlasts_its_module(ModuleRole role) {
  return role == ModuleRole::kEmbedding || role == ModuleRole::kOutput || role == ModuleRole::kResidual;
}

Segment current_segment() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) return {};
  const auto node = torch::autograd::get_current_node();
  return node == nullptr ? Segment{} : Segment{.task = task, .node = node->sequence_nr()};
}

}  // namespace

int64_t module_enter(ModuleRole role) {
  ThreadStack& stack = t_stack;
  if (stack.frames.size() == stack.base) {
    const Segment segment = current_segment();
    if (segment == Segment{} || segment != stack.pass.segment) {
      stack.pass = {.mark = new_mark(), .segment = segment, .no_grad = gradients_off()};
    }
  } else {
    Frame& parent = stack.frames.back();
    parent.last_child = ModuleRole::kPlain;
    // torch.compile's wrapper enters the module that it wraps, whose own modules then go unseen.
    if (role == ModuleRole::kPlain && parent.role == ModuleRole::kOpaque) role = ModuleRole::kOpaque;
  }
  stack.frames.push_back(Frame{.role = role});
  return static_cast<int64_t>(stack.frames.size() - stack.base);
}

// Another global hook that raises before ours leaves an exit without its entry, hence the test.
void module_exit() {
  ThreadStack& stack = t_stack;
  if (stack.frames.size() == stack.base) return;
  const ModuleRole role = stack.frames.back().role;
  stack.frames.pop_back();
  if (stack.frames.size() > stack.base) {
    stack.frames.back().last_child = outlasts_its_module(role) ? role : ModuleRole::kPlain;
  }
}

// A reentrant checkpoint runs autograd inside autograd: only the outermost run starts a pass.
void backward_enter() {
  if (torch::autograd::get_current_graph_task_id() < 0) g_backward_mark.store(new_mark(), std::memory_order_relaxed);
  ThreadStack& stack = t_stack;
  t_suspended.push_back({stack.base, stack.pass});
  stack.base = stack.frames.size();
}

void backward_exit() {
  if (t_suspended.empty()) return;
  ThreadStack& stack = t_stack;
  const SuspendedStack suspended = t_suspended.back();
  t_suspended.pop_back();
  stack.frames.resize(std::min(stack.frames.size(), stack.base));
  stack.base = suspended.base;
  stack.pass = suspended.pass;
}

void set_hooks_installed(bool installed) { g_hooks_installed.store(installed, std::memory_order_relaxed); }

void exact_enter() { g_exact_depth.fetch_add(1, std::memory_order_relaxed); }
void exact_exit() { g_exact_depth.fetch_sub(1, std::memory_order_relaxed); }

CallOrigin current_origin() {
  const ThreadStack& stack = t_stack;
  const bool in_module = stack.frames.size() > stack.base;
  const bool in_autograd = torch::autograd::get_current_graph_task_id() >= 0;

  CallOrigin origin;
  origin.depth = static_cast<int64_t>(stack.frames.size() - stack.base);
  origin.no_grad = in_module ? stack.pass.no_grad : gradients_off();
  origin.hooks = g_hooks_installed.load(std::memory_order_relaxed);
  origin.exact = g_exact_depth.load(std::memory_order_relaxed) > 0;
  if (in_module) {
    const Frame& innermost = stack.frames.back();
    origin.context = in_autograd ? CallContext::kRecompute : CallContext::kForward;
    origin.role = innermost.role == ModuleRole::kPlain ? innermost.last_child : innermost.role;
    origin.alternates = innermost.role == ModuleRole::kAlternating;
    origin.pass_mark = stack.pass.mark;
  } else if (in_autograd) {
    // A checkpointed function that is no module shows by the hooks that pack its saved tensors.
    const bool packs_tensors = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
    origin.context = packs_tensors ? CallContext::kRecompute : CallContext::kBackward;
    read_node(origin);
    origin.pass_mark = g_backward_mark.load(std::memory_order_relaxed);
  }
  return origin;
}

void Announcements::add(Direction direction) {
  marks[static_cast<int>(direction)] = new_mark();
  no_grad[static_cast<int>(direction)] = gradients_off();
}

void announce_everywhere(Direction direction) {
  const std::lock_guard lock(g_announced_mutex);
  g_announced.add(direction);
}

Announcements announced_everywhere() {
  const std::lock_guard lock(g_announced_mutex);
  return g_announced;
}

}  // namespace echo::pg
