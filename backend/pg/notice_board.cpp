#include "notice_board.hpp"

#include <cstring>

namespace echo::pg {

NoticeBoard::NoticeBoard(int32_t rank, int32_t size, uint64_t group) : rank_(rank), size_(size), group_(group) {
  pages_.push_back(cpu::SharedMemory::create(seal_of(rank)));
}

cpu::Seal NoticeBoard::seal_of(int32_t rank) const {
  return {.kind = cpu::MemoryKind::kNotices, .group = group_, .bytes = sizeof(Page), .rank = rank, .world_size = size_};
}

void NoticeBoard::open(const std::vector<cpu::MemoryHandle>& handles) {
  by_rank_.resize(handles.size());
  for (int32_t rank = 0; rank < static_cast<int32_t>(handles.size()); ++rank) {
    if (rank != rank_) pages_.push_back(cpu::SharedMemory::open(handles[rank], seal_of(rank)));
    by_rank_[rank] = reinterpret_cast<Page*>((rank == rank_ ? pages_.front() : pages_.back()).data());
  }
}

void NoticeBoard::give_up(const std::string& reason) noexcept {
  Page& page = *by_rank_[rank_];
  uint32_t none = 0;
  if (!page.given_up.compare_exchange_strong(none, kWriting, std::memory_order_relaxed)) return;
  std::strncpy(page.text, reason.c_str(), kTextBytes - 1);
  page.given_up.store(kGivenUp, std::memory_order_release);
}

std::string NoticeBoard::peers_reason() const {
  for (int32_t rank = 0; rank < static_cast<int32_t>(by_rank_.size()); ++rank) {
    const Page& page = *by_rank_[rank];
    if (rank == rank_ || page.given_up.load(std::memory_order_acquire) != kGivenUp) continue;
    return "rank " + std::to_string(rank) + ": " + page.text;
  }
  return {};
}

void NoticeBoard::leave(Leaving how) noexcept {
  by_rank_[rank_]->leaving.store(static_cast<uint32_t>(how), std::memory_order_release);
}

NoticeBoard::Leaving NoticeBoard::leaving(int32_t rank) const {
  return static_cast<Leaving>(by_rank_[rank]->leaving.load(std::memory_order_acquire));
}

}  // namespace echo::pg
