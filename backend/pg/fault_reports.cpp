#include "fault_reports.hpp"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "store_answer.hpp"

namespace echo::pg {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

struct FaultReports::Member {
  c10::intrusive_ptr<c10d::Store> store;
  int32_t rank = 0;
  int32_t size = 1;
  std::shared_ptr<const Processes> processes;
};

namespace {

constexpr milliseconds kPause{10};
constexpr size_t kShownRanks = 4;  // in one error

using Member = FaultReports::Member;

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Member>> members;
};

// Never destroyed: groups may outlive static objects.
Registry& registry() {
  static auto* const groups = new Registry();
  return *groups;
}

constexpr char kFirstKey[] = "first";  // one question tells whether any rank has failed
std::string own_key(int32_t rank) { return "own/" + std::to_string(rank); }
std::string other_key(int32_t rank) { return "other/" + std::to_string(rank); }

void write(const Member& member, const std::string& key, const FaultReport& report) {
  const std::string stored = to_stored(report);
  member.store->set(key, std::vector<uint8_t>(stored.begin(), stored.end()));
}

std::optional<FaultReport> read(const Member& member, const std::string& key) {
  if (!member.store->check({key})) return std::nullopt;
  return from_stored(member.store->get_to_str(key), member.size);
}

// Nothing of theirs has failed: who waits there learns why this rank does not come.
void tell_other_groups(const std::shared_ptr<Member>& own, const std::string& text) {
  std::vector<std::weak_ptr<Member>> members;
  {
    const std::lock_guard lock(registry().mutex);
    members = registry().members;
  }
  for (const std::weak_ptr<Member>& weak : members) {
    const std::shared_ptr<Member> member = weak.lock();
    if (!member || member == own) continue;
    try {
      write(*member, other_key(member->rank), {member->rank, GroupFate::kSurvives, text});
    } catch (const std::exception&) {
      // Its store has gone with its process.
    }
  }
}

// Texts by rank, as they come in.
struct Heard {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int32_t, std::string> texts;
  bool complete = false;
};

void say(const Member& member, const FaultReport& mine) {
  write(member, own_key(member.rank), mine);
  // What the group has survived gives way to what ends it, and never the other way round, whoever writes meanwhile.
  if (mine.fate == GroupFate::kSurvives) {
    member.store->compareSet(kFirstKey, "", to_stored(mine));
    return;
  }
  const std::optional<FaultReport> first = read(member, kFirstKey);
  if (!first || first->fate == GroupFate::kSurvives) write(member, kFirstKey, mine);
}

// Talks to the store, which may not answer for ever: on a thread that nobody waits for longer than kPatience.
void converse(const std::shared_ptr<Member>& member, const FaultReport& mine, const std::shared_ptr<Heard>& heard) {
  try {
    say(*member, mine);
    tell_other_groups(member, mine.text);
    const auto deadline = Clock::now() + FaultReports::kPatience;
    std::vector<int32_t> missing;
    for (int32_t rank = 0; rank < member->size; ++rank) {
      if (rank != member->rank) missing.push_back(rank);
    }
    while (true) {
      const bool last = Clock::now() + kPause >= deadline;
      std::erase_if(missing, [&](int32_t rank) {
        const bool exited = member->processes->has_exited(rank);  // asked first: what it said before it ended counts
        std::optional<FaultReport> report = read(*member, own_key(rank));
        if (!report && last) report = read(*member, other_key(rank));
        const std::lock_guard lock(heard->mutex);
        if (report) heard->texts[rank] = report->text;
        return exited || report.has_value();
      });
      if (missing.empty() || last) break;
      std::this_thread::sleep_for(kPause);
    }
  } catch (const std::exception&) {
    // The store has gone with its process; what has been heard stands.
  }
  const std::lock_guard lock(heard->mutex);
  heard->complete = true;
  heard->changed.notify_all();
}

std::string in_words(const Member& member, const std::map<int32_t, std::string>& texts) {
  std::vector<std::string> exited;
  std::vector<std::string> silent;
  std::vector<std::string> said;
  for (int32_t rank = 0; rank < member.size; ++rank) {
    if (rank == member.rank) continue;
    const auto text = texts.find(rank);
    if (member.processes->is_ending(rank)) {
      exited.push_back("the process of rank " + std::to_string(rank) + " has exited");
    } else if (text == texts.end()) {
      silent.push_back("rank " + std::to_string(rank) + " reports nothing (it is late, stopped, or out of reach)");
    } else {
      said.push_back("rank " + std::to_string(rank) + " reports: " + text->second);
    }
  }
  std::string words;
  size_t shown = 0;
  for (const std::vector<std::string>* kind : {&exited, &silent, &said}) {
    for (const std::string& each : *kind) {
      if (shown++ < kShownRanks) words += "; " + each;
    }
  }
  return words;
}

}  // namespace

FaultReports::FaultReports(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t size,
                           std::shared_ptr<const Processes> processes)
    : member_(std::make_shared<Member>(Member{c10::make_intrusive<c10d::PrefixStore>("faults", std::move(store)), rank,
                                              size, std::move(processes)})) {
  const std::lock_guard lock(registry().mutex);
  std::erase_if(registry().members, [](const auto& member) { return member.expired(); });
  registry().members.push_back(member_);
}

FaultReports::~FaultReports() = default;

std::optional<FaultReport> FaultReports::first_heard() const {
  return answer_within(kPatience, [member = member_] { return read(*member, kFirstKey); }).value_or(std::nullopt);
}

const std::shared_ptr<const Processes>& FaultReports::processes() const { return member_->processes; }

std::string FaultReports::name() const {
  return "rank " + std::to_string(member_->rank) + " of " + std::to_string(member_->size);
}

std::string FaultReports::exchange(const std::string& text, GroupFate fate) const {
  if (member_->size > kMostRanks) {
    const std::string exited = member_->processes->exited();
    return exited.empty() ? exited : "; " + exited;
  }
  const FaultReport mine{member_->rank, fate, text};
  const auto heard = std::make_shared<Heard>();
  try {
    std::thread([member = member_, mine, heard] { converse(member, mine, heard); }).detach();
  } catch (const std::system_error&) {
    // Out of memory or threads, which may be the failure itself: the others hear of it, this rank of nobody.
    try {
      say(*member_, mine);
    } catch (const std::exception&) {
    }
    return {};
  }
  std::unique_lock lock(heard->mutex);
  heard->changed.wait_for(lock, kPatience + kPause, [&] { return heard->complete; });
  const std::map<int32_t, std::string> texts = heard->texts;
  lock.unlock();
  if (static_cast<int32_t>(texts.size()) + 1 < member_->size) member_->processes->exited_by_now();
  return in_words(*member_, texts);
}

}  // namespace echo::pg
