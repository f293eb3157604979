#include "shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

namespace echo::cpu {
namespace {

constexpr const char* kFileSystem = "/dev/shm";

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::byte* map(int fd, int64_t bytes) {
  void* address = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int error = errno;
  if (address == MAP_FAILED) fail(error, "mmap of " + std::to_string(bytes) + " bytes of shared memory");
  madvise(address, static_cast<size_t>(bytes), MADV_DONTFORK);
  return static_cast<std::byte*>(address);
}

std::string link_target(const char* path) {
  std::array<char, PATH_MAX> target;
  const ssize_t length = readlink(path, target.data(), target.size());
  return length < 0 ? std::string("unknown") : std::string(target.data(), static_cast<size_t>(length));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

std::string path_of(const MemoryHandle& handle) {
  return "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
}

// Only what create() makes: an unnamed file of this user in the shared-memory file system, of the right size.
void check_file(int fd, int64_t bytes) {
  struct stat file{};
  struct stat shm{};
  if (fstat(fd, &file) != 0 || stat(kFileSystem, &shm) != 0) fail(errno, "looking at a peer's shared memory");
  if (!S_ISREG(file.st_mode) || file.st_dev != shm.st_dev || file.st_nlink != 0) {
    fail(EINVAL, std::string("what a peer offers is no unnamed file in ") + kFileSystem);
  }
  if (file.st_uid != geteuid()) fail(EPERM, "what a peer offers belongs to another user");
  if (file.st_size != bytes) {
    fail(EINVAL, "a peer's shared memory has " + std::to_string(file.st_size) + " bytes, not " + std::to_string(bytes));
  }
}

int64_t file_bytes(const Seal& seal) { return seal.bytes + static_cast<int64_t>(sizeof(Seal)); }

}  // namespace

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedMemory::~SharedMemory() {
  close_handle();
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

SharedMemory SharedMemory::create(const Seal& seal) {
  const int64_t bytes = file_bytes(seal);
  SharedMemory memory;
  memory.handle_ = ::open(kFileSystem, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (memory.handle_ < 0) fail(errno, std::string("an unnamed file in ") + kFileSystem);
  int error = posix_fallocate(memory.handle_, 0, bytes);
  while (error == EINTR) error = posix_fallocate(memory.handle_, 0, bytes);
  if (error != 0) fail(error, "reserving " + std::to_string(bytes) + " bytes in " + kFileSystem);
  memory.data_ = map(memory.handle_, bytes);
  memory.bytes_ = bytes;
  std::memcpy(memory.data_ + seal.bytes, &seal, sizeof(seal));
  return memory;
}

// First as a mere place, which neither reads nor writes nor wakes whatever it may be; opened once it has passed.
SharedMemory SharedMemory::open(const MemoryHandle& handle, const Seal& expected) {
  const int64_t bytes = file_bytes(expected);
  const Descriptor place(::open(path_of(handle).c_str(), O_PATH | O_CLOEXEC));
  if (place.get() < 0) fail(errno, "opening a peer's shared memory");
  check_file(place.get(), bytes);
  SharedMemory memory;
  memory.handle_ = ::open(path_of({getpid(), place.get()}).c_str(), O_RDWR | O_CLOEXEC);
  if (memory.handle_ < 0) fail(errno, "opening a peer's shared memory");
  memory.data_ = map(memory.handle_, bytes);
  memory.bytes_ = bytes;
  Seal found;
  std::memcpy(&found, memory.data_ + expected.bytes, sizeof(found));
  const std::string wrong = describe_seal_mismatch(found, expected);
  if (!wrong.empty()) fail(EINVAL, "a peer's shared memory is refused: " + wrong);
  memory.close_handle();
  return memory;
}

MemoryHandle SharedMemory::handle() const { return {getpid(), handle_}; }

void SharedMemory::close_handle() noexcept {
  if (handle_ >= 0) close(handle_);
  handle_ = -1;
}

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat shm{};
  stat(kFileSystem, &shm);
  std::ostringstream identity;
  identity << boot << " " << link_target("/proc/self/ns/ipc") << " " << link_target("/proc/self/ns/pid")
           << " shm:" << shm.st_dev << ":" << shm.st_ino << " uid:" << geteuid();
  return identity.str();
}

PeerProcess::PeerProcess(pid_t pid) : pid_(pid) {
#if defined(SYS_pidfd_open)
  pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#endif
}

PeerProcess::~PeerProcess() {
  if (pidfd_ >= 0) close(pidfd_);
}

PeerProcess::PeerProcess(PeerProcess&& other) noexcept { *this = std::move(other); }

PeerProcess& PeerProcess::operator=(PeerProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  return *this;
}

bool PeerProcess::has_exited() const {
  if (pidfd_ >= 0) {
    pollfd watched{pidfd_, POLLIN, 0};
    return poll(&watched, 1, 0) > 0;
  }
  return pid_ > 0 && kill(pid_, 0) != 0 && errno == ESRCH;
}

// A thread is marked before it lets go of what the process has open, and all must be: that of main() may end alone.
bool PeerProcess::is_ending() const {
  if (pid_ <= 0) return false;
  if (has_exited()) return true;
  constexpr uint64_t kExiting = 4;  // the kernel's PF_EXITING
  bool any = false;
  std::error_code error;
  const std::filesystem::path tasks = "/proc/" + std::to_string(pid_) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks, error)) {
    std::ifstream file(task.path() / "stat");
    std::string text;
    std::getline(file, text);
    const size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) continue;  // it has gone meanwhile
    std::istringstream fields(text.substr(name_end + 1));
    std::string skipped;
    for (int field = 3; field < 9; ++field) fields >> skipped;
    uint64_t flags = 0;
    fields >> flags;
    if (fields.fail() || (flags & kExiting) == 0) return false;
    any = true;
  }
  return any || has_exited();
}

}  // namespace echo::cpu
