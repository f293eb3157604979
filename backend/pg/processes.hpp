// The processes of a group's ranks, as they introduced themselves when the group was made: who shares memory with whom,
// and who has ended.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../cpu/shared_memory.h"

namespace echo::pg {

class Processes {
 public:
  // What this process says of itself to the other ranks, another text each time.
  static std::string introduction();

  // True if a process of this host that introduced itself so has ended, or is about to.
  static bool has_exited(const std::string& introduction);

  // By rank; none: nothing is known of anyone. Throws c10::ValueError for a number of them that is not the group's,
  // c10::DistBackendError for what is no introduction.
  Processes(int32_t rank, int32_t size, std::vector<std::string> introductions);

  // Of the group, which all its ranks drew together: tells its memory from that of other groups.
  uint64_t number() const { return number_; }

  pid_t pid(int32_t rank) const { return members_[rank].said.pid; }

  // As given.
  const std::vector<std::string>& introductions() const { return introductions_; }

  // False for this rank, and for ranks of other hosts, whose end only their connections tell.
  bool has_exited(int32_t rank) const;

  // The same, and true also while the process ends: for those who have met a failure already.
  bool is_ending(int32_t rank) const;

  // "the process of rank 1 has exited", empty if none has.
  std::string exited() const;

  // The same of those that are ending, for who has lost a connection: waits a moment for it to show.
  std::string exited_by_now() const;

  // Why these ranks share no memory, the same text on all of them; empty if they do.
  std::string obstacle() const;

  // Cores per rank if those of the host are shared out evenly; 0 if there are fewer than ranks. The smallest count that
  // any rank may use decides.
  int32_t cores_per_rank() const;

 private:
  struct Member {
    cpu::Introduction said;
    std::shared_ptr<const cpu::PeerProcess> process;  // null where its host is not this one
  };

  // The words of exited() for the first rank of which that is true.
  std::string first_that(bool (Processes::*has_ended)(int32_t) const) const;

  std::vector<std::string> introductions_;
  std::vector<Member> members_;
  uint64_t number_ = 0;
};

}  // namespace echo::pg
