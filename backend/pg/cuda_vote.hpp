// What the ranks say to each other, as texts in the store, in the vote on peer memory between their GPUs; and by what
// is said why they can do without the rest of it. Nothing that is read is trusted. In builds with CUDA only.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "../cpu/memory_handle.h"
#include "../cuda/peer_memory.h"
#include "processes.hpp"

namespace echo::pg::cuda_vote {

constexpr char kGoodMark = '+';  // in front of a text that says what was asked for; any other tells a failure

// What a rank says of its device in the first round: kGoodMark and three words.
struct Introduction {
  std::string failure;  // why it knows nothing of itself
  cuda::DeviceFacts device;
};

std::string write_introduction(c10::Device device);
Introduction read_introduction(const std::string& text);

// Why these ranks cannot share memory; every rank comes to the same answer.
std::string objection(const Processes& processes, const std::vector<Introduction>& ranks, bool allow_shared_gpu);

struct Offer {
  cuda::MemoryHandle slab;
  cpu::MemoryHandle board;
};

std::string write_offer(const cuda::MemoryHandle& handle, const cpu::MemoryHandle& board);
// Throws std::runtime_error for anything that the process `pid` would not write.
Offer read_offer(const std::string& text, pid_t pid);

}  // namespace echo::pg::cuda_vote
