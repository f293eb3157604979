#include "processes.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include <c10/util/Exception.h>

namespace echo::pg {
namespace {

using cpu::Introduction;

constexpr std::chrono::milliseconds kSettling{50};
constexpr std::chrono::milliseconds kPause{5};

int32_t usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));  // more cores than the set holds
}

// FNV-1a: enough to tell hosts apart, and short where a group has many ranks.
uint64_t own_host() {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : cpu::host_identity()) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

// One handle per process, however many groups watch it.
std::shared_ptr<const cpu::PeerProcess> watch(pid_t pid) {
  static auto* const mutex = new std::mutex();
  static auto* const watched = new std::map<pid_t, std::weak_ptr<const cpu::PeerProcess>>();
  const std::lock_guard lock(*mutex);
  std::weak_ptr<const cpu::PeerProcess>& known = (*watched)[pid];
  std::shared_ptr<const cpu::PeerProcess> process = known.lock();
  // A process that has ended may have left its number to another one.
  if (!process || process->has_exited()) known = process = std::make_shared<const cpu::PeerProcess>(pid);
  return process;
}

}  // namespace

std::string Processes::introduction() {
  std::random_device random;
  return cpu::write_introduction(
      {.pid = getpid(), .cores = usable_cores(), .nonce = (uint64_t{random()} << 32) | random(), .host = own_host()});
}

bool Processes::has_exited(const std::string& introduction) {
  const std::optional<Introduction> it = cpu::read_introduction(introduction);
  return it && it->host == own_host() && cpu::PeerProcess(it->pid).is_ending();
}

Processes::Processes(int32_t rank, int32_t size, std::vector<std::string> introductions)
    : introductions_(std::move(introductions)) {
  TORCH_CHECK_VALUE(introductions_.empty() || static_cast<int32_t>(introductions_.size()) == size, "a group of ", size,
                    " ranks was given ", introductions_.size(), " introductions");
  const uint64_t host = own_host();
  for (const std::string& text : introductions_) {
    const std::optional<Introduction> it = cpu::read_introduction(text);
    TORCH_CHECK_WITH(DistBackendError, it, "what rank ", members_.size(),
                     " said of itself in the store is no introduction");
    const bool watched = it->host == host && static_cast<int32_t>(members_.size()) != rank;
    members_.push_back({*it, watched ? watch(it->pid) : nullptr});
    number_ = cpu::mix_nonce(number_, it->nonce);
  }
}

bool Processes::has_exited(int32_t rank) const {
  return !members_.empty() && members_[rank].process && members_[rank].process->has_exited();
}

bool Processes::is_ending(int32_t rank) const {
  return !members_.empty() && members_[rank].process && members_[rank].process->is_ending();
}

std::string Processes::first_that(bool (Processes::*has_ended)(int32_t) const) const {
  for (int32_t rank = 0; rank < static_cast<int32_t>(members_.size()); ++rank) {
    if ((this->*has_ended)(rank)) return "the process of rank " + std::to_string(rank) + " has exited";
  }
  return {};
}

std::string Processes::exited() const { return first_that(&Processes::has_exited); }

std::string Processes::exited_by_now() const {
  const auto deadline = std::chrono::steady_clock::now() + kSettling;
  while (true) {
    std::string ended = first_that(&Processes::is_ending);
    if (!ended.empty() || std::chrono::steady_clock::now() >= deadline) return ended;
    std::this_thread::sleep_for(kPause);
  }
}

std::string Processes::obstacle() const {
  if (members_.empty()) return "its ranks did not introduce themselves";
  for (size_t rank = 1; rank < members_.size(); ++rank) {
    if (members_[rank].said.host == members_[0].said.host) continue;
    return "ranks 0 and " + std::to_string(rank) + " share no memory (other host, user, or IPC or PID namespace)";
  }
  return {};
}

int32_t Processes::cores_per_rank() const {
  int32_t cores = members_.front().said.cores;
  for (const Member& member : members_) cores = std::min(cores, member.said.cores);
  return cores / static_cast<int32_t>(members_.size());
}

}  // namespace echo::pg
