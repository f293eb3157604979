// What the ranks of one host tell each other apart from any exchange: a page per rank, written by it and read by all.
// It needs no kernel, no store and no answer, so a rank that fails outside a call can say so, and a rank that leaves
// waits for nobody.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "../cpu/shared_memory.h"

namespace echo::pg {

class NoticeBoard {
 public:
  enum class Leaving : uint32_t {
    kNo,
    kUnmapped,  // this rank has closed what it had mapped of its peers
    kKept,      // it has not, and will not: its peers' memory must stay
  };

  NoticeBoard() = default;

  // A page for this rank of the group numbered `group`. Throws std::system_error.
  NoticeBoard(int32_t rank, int32_t size, uint64_t group);

  cpu::MemoryHandle handle() const { return pages_.front().handle(); }
  // Maps the pages of the peers, `handles` by rank. Throws std::system_error.
  void open(const std::vector<cpu::MemoryHandle>& handles);
  // Called when every rank has opened it.
  void close_handle() noexcept {
    if (!pages_.empty()) pages_.front().close_handle();
  }

  // This rank ends the group; the first text stays.
  void give_up(const std::string& reason) noexcept;
  // "rank 1: its reason" of the first peer that gave up; empty if none did.
  std::string peers_reason() const;

  void leave(Leaving how) noexcept;
  Leaving leaving(int32_t rank) const;

 private:
  static constexpr size_t kTextBytes = 2048;
  static constexpr uint32_t kWriting = 1;
  static constexpr uint32_t kGivenUp = 2;
  // At rest all zero. `given_up` and `leaving` are stored with release and read with acquire; `given_up` is kGivenUp
  // once the text is there, which the thread that made it kWriting has written.
  struct Page {
    std::atomic<uint32_t> given_up;
    std::atomic<uint32_t> leaving;
    char text[kTextBytes];  // ends with a zero
  };

  cpu::Seal seal_of(int32_t rank) const;

  std::vector<cpu::SharedMemory> pages_;  // own first
  std::vector<Page*> by_rank_;
  int32_t rank_ = 0;
  int32_t size_ = 0;
  uint64_t group_ = 0;
};

}  // namespace echo::pg
