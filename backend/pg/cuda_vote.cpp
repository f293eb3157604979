#if defined(ECHO_WITH_CUDA)

#include "cuda_vote.hpp"

#include <charconv>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace echo::pg::cuda_vote {
namespace {

constexpr size_t kMostUuidChars = 64;

// kGoodMark, the device memory's handle in hexadecimal digits, and that of the notice board.
constexpr size_t kHandleChars = 2 * cuda::kMemoryHandleBytes;

std::string pair_of(size_t one, size_t two) { return "ranks " + std::to_string(one) + " and " + std::to_string(two); }

}  // namespace

std::string write_introduction(c10::Device device) {
  const cuda::DeviceFacts facts = cuda::device_facts(device.index());
  std::ostringstream out;
  out << kGoodMark << facts.uuid << " " << facts.multiprocessors << " " << facts.is_mig;
  return out.str();
}

Introduction read_introduction(const std::string& text) {
  Introduction it;
  if (!text.starts_with(kGoodMark)) {
    it.failure = text;
    return it;
  }
  std::istringstream in(text.substr(1));
  in >> it.device.uuid >> it.device.multiprocessors >> it.device.is_mig;
  if (in.fail() || it.device.uuid.size() > kMostUuidChars || it.device.multiprocessors <= 0) {
    it.failure = "what it said of its device in the store cannot be read";
  }
  return it;
}

std::string objection(const Processes& processes, const std::vector<Introduction>& ranks, bool allow_shared_gpu) {
  if (std::string obstacle = processes.obstacle(); !obstacle.empty()) return obstacle;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const Introduction& it = ranks[rank];
    if (!it.failure.empty()) return "rank " + std::to_string(rank) + ": " + it.failure;
    if (it.device.is_mig) return "rank " + std::to_string(rank) + " has a MIG slice, which reaches no other device";
    for (size_t other = 0; other < rank; ++other) {
      const bool one_process = processes.pid(static_cast<int32_t>(other)) == processes.pid(static_cast<int32_t>(rank));
      if (one_process) return pair_of(other, rank) + " are one process";
      if (!allow_shared_gpu && ranks[other].device.uuid == it.device.uuid) {
        return pair_of(other, rank) +
               " use one GPU, where kernels that wait for each other take turns; "
               "allow_shared_gpu=True permits that, for tests";
      }
    }
  }
  return {};
}

std::string write_offer(const cuda::MemoryHandle& handle, const cpu::MemoryHandle& board) {
  std::ostringstream out;
  out << kGoodMark << std::hex;
  for (const std::byte byte : handle) out << (static_cast<int>(byte) >> 4) << (static_cast<int>(byte) & 15);
  out << cpu::write_handle(board);
  return out.str();
}

Offer read_offer(const std::string& text, pid_t pid) {
  Offer offer;
  bool good = text.size() > 1 + kHandleChars && text.front() == kGoodMark;
  for (size_t i = 0; good && i < offer.slab.size(); ++i) {
    unsigned byte = 0;
    const char* const at = text.data() + 1 + 2 * i;
    const auto [end, error] = std::from_chars(at, at + 2, byte, 16);
    good = error == std::errc{} && end == at + 2;
    offer.slab[i] = static_cast<std::byte>(byte);
  }
  const auto board = good ? cpu::read_handle(std::string_view(text).substr(1 + kHandleChars)) : std::nullopt;
  if (!board || board->pid != pid) throw std::runtime_error("what a peer offers is no handle of its process");
  offer.board = *board;
  return offer;
}

}  // namespace echo::pg::cuda_vote

#endif  // defined(ECHO_WITH_CUDA)
