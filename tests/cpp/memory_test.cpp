// Shared memory that is offered by a peer: only what create() made with just this seal is mapped, and whatever else a
// text from the store names is refused, untouched.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "../../backend/cpu/shared_memory.h"
#include "check.h"

namespace {

using namespace echo;
using cpu::Introduction;
using cpu::MemoryHandle;
using cpu::MemoryKind;
using cpu::Seal;
using cpu::SharedMemory;

const Seal kSeal{.kind = MemoryKind::kSlab, .group = 77, .bytes = 8192, .rank = 1, .world_size = 3};

// Why it is refused; empty if it is mapped.
std::string refusal(const MemoryHandle& handle, const Seal& expected) {
  try {
    SharedMemory::open(handle, expected);
  } catch (const std::system_error& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

ECHO_TEST(sealed_memory_is_shared) {
  SharedMemory mine = SharedMemory::create(kSeal);
  SharedMemory theirs = SharedMemory::open(mine.handle(), kSeal);
  CHECK_EQ(mine.bytes(), int64_t{8192});
  CHECK_EQ(theirs.bytes(), int64_t{8192});
  mine.data()[8191] = std::byte{42};
  CHECK(theirs.data()[8191] == std::byte{42});
  CHECK(theirs.data()[0] == std::byte{0});
  mine.close_handle();
  CHECK(!refusal({getpid(), 1 << 20}, kSeal).empty());
}

ECHO_TEST(each_field_of_a_seal_counts) {
  SharedMemory mine = SharedMemory::create(kSeal);
  CHECK(refusal(mine.handle(), kSeal).empty());
  struct Mutation {
    const char* words;
    void (*apply)(Seal&);
  };
  const Mutation mutations[] = {
      {"no memory of echo", [](Seal& s) { s.magic ^= 1; }},
      {"version", [](Seal& s) { ++s.protocol; }},
      {"kind", [](Seal& s) { s.kind = MemoryKind::kNotices; }},
      {"another group", [](Seal& s) { ++s.group; }},
      {"belongs to rank", [](Seal& s) { ++s.rank; }},
      {"belongs to a group of", [](Seal& s) { ++s.world_size; }},
      {"bytes, not", [](Seal& s) { s.bytes += 4096; }},
      {"damaged", [](Seal& s) { s.reserved[2] = 1; }},
  };
  for (const Mutation& mutation : mutations) {
    Seal other = kSeal;
    mutation.apply(other);
    CHECK(contains(refusal(mine.handle(), other), mutation.words));
  }
  std::memset(mine.data() + kSeal.bytes, 0, sizeof(Seal));
  CHECK(contains(refusal(mine.handle(), kSeal), "no memory of echo"));
}

ECHO_TEST(files_of_other_kinds_are_refused_untouched) {
  const auto bytes = static_cast<off_t>(kSeal.bytes + sizeof(Seal));
  const auto file_at = [&](const char* folder) {
    const int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, bytes) == 0 && pwrite(fd, &kSeal, sizeof(kSeal), kSeal.bytes) == sizeof(kSeal));
    return fd;
  };
  struct stat shm{};
  struct stat here{};
  CHECK(stat("/dev/shm", &shm) == 0 && stat(".", &here) == 0);
  if (shm.st_dev != here.st_dev) {
    const int elsewhere = file_at(".");
    CHECK(contains(refusal({getpid(), elsewhere}, kSeal), "no unnamed file in /dev/shm"));
    close(elsewhere);
  }
  const int named = file_at("/dev/shm");
  const std::string name = "/dev/shm/echo_memory_test." + std::to_string(getpid());
  CHECK_EQ(
      linkat(AT_FDCWD, ("/proc/self/fd/" + std::to_string(named)).c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW),
      0);
  CHECK(contains(refusal({getpid(), named}, kSeal), "no unnamed file"));
  unlink(name.c_str());
  CHECK(refusal({getpid(), named}, kSeal).empty());
  if (geteuid() == 0) {
    CHECK_EQ(fchown(named, 65534, 65534), 0);
    CHECK(contains(refusal({getpid(), named}, kSeal), "another user"));
  }
  close(named);
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  CHECK(contains(refusal({getpid(), ends[0]}, kSeal), "no unnamed file"));
  for (const int end : ends) close(end);
  for (const char* path : {"/dev/null", "/dev/zero", "/proc/self/mem", "/"}) {
    const int fd = open(path, O_PATH | O_CLOEXEC);
    CHECK(contains(refusal({getpid(), fd}, kSeal), "no unnamed file"));
    close(fd);
  }
  CHECK(!refusal({getpid(), 12345}, kSeal).empty());
  CHECK(!refusal({1 << 30, 0}, kSeal).empty());
}

ECHO_TEST(handles_are_two_numbers_and_nothing_else) {
  const auto back = cpu::read_handle(cpu::write_handle({123, 45}));
  CHECK(back && back->pid == 123 && back->fd == 45);
  for (const char* text : {"",
                           " ",
                           "1",
                           "1 ",
                           " 1 2",
                           "1  2",
                           "1 2 ",
                           "1 2 3",
                           "-1 2",
                           "1 -2",
                           "+1 2",
                           "0 2",
                           "1 2x",
                           "0x1 2",
                           "1\t2",
                           "1 2\n",
                           "99999999999 2",
                           "1 99999999999",
                           "/proc/1/mem",
                           "../../etc/passwd",
                           "1 2/../../..",
                           "self 3"}) {
    CHECK(!cpu::read_handle(text));
  }
  CHECK(!cpu::read_handle(std::string_view("1 2\0", 4)));
}

ECHO_TEST(introductions_are_read_as_written) {
  const Introduction mine{.pid = 9, .cores = 2, .nonce = ~uint64_t{0}, .host = 7};
  const auto back = cpu::read_introduction(cpu::write_introduction(mine));
  CHECK(back && back->pid == 9 && back->cores == 2 && back->nonce == mine.nonce && back->host == 7);
  for (const char* text : {"", "echo 1 ", "echo 2 9 2 7 1", "echo 1 9 2 7", "echo 1 9 2 7 ", "echo 1 -9 2 7 1",
                           "echo 1 0 2 7 1", "echo 1 9 0 7 1", "echo 1 9 2 1", "echo 1 9 2 7 1 ", "echo 1 9 2 7 1 1",
                           "echo 1 9 2 7 host", "echo 1 9 2 99999999999999999999 1", "9 2 1"}) {
    CHECK(!cpu::read_introduction(text));
  }
}

// Texts a few edits away from right ones. A reader must take what was written back as it was, and never fall over.
ECHO_TEST(mutated_texts_are_read_or_refused) {
  std::mt19937 chance(7);
  const std::vector<std::string> seeds = {cpu::write_handle({4242, 17}),
                                          cpu::write_introduction({.pid = 7, .cores = 64, .nonce = 1, .host = 1})};
  for (int round = 0; round < 20000 * testing::scale(); ++round) {
    std::string text = seeds[chance() % seeds.size()];
    for (unsigned edits = 1 + chance() % 4; edits > 0; --edits) {
      const size_t at = chance() % (text.size() + 1);
      const char byte = chance() % 2 == 0 ? static_cast<char>(chance()) : "0123456789 -+/e"[chance() % 15];
      if (chance() % 3 == 0 && at < text.size()) {
        text.erase(at, 1 + chance() % 3);
      } else if (chance() % 2 == 0 && at < text.size()) {
        text[at] = byte;
      } else {
        text.insert(at, 1, byte);
      }
    }
    if (const auto handle = cpu::read_handle(text)) {
      CHECK(handle->pid > 0 && handle->fd >= 0);
      CHECK(cpu::read_handle(cpu::write_handle(*handle)).has_value());
    }
    if (const auto it = cpu::read_introduction(text)) {
      CHECK(it->pid > 0 && it->cores > 0);
      CHECK_EQ(cpu::read_introduction(cpu::write_introduction(*it))->host, it->host);
    }
  }
}

}  // namespace
