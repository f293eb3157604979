// A piece of memory that processes of one host share, and the facts by which they find out whether they can.
//
// An unnamed file of mode 0600 in the shared-memory file system, its pages reserved at creation, so that a later write
// cannot fail with SIGBUS. Peers reach it through its creator's file descriptor in /proc, which the kernel grants to
// the same user alone. As it never has a name, nothing is left behind however and whenever a process ends.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace echo::cpu {

class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;

  // Zeroed memory of `bytes` bytes. Throws std::system_error; ENOSPC if the shared-memory file system has no room for
  // it.
  static SharedMemory create(int64_t bytes);
  // Maps what another process created and still holds the handle of. Throws std::system_error.
  static SharedMemory open(const std::string& path, int64_t bytes);

  // Where a peer can open it, until close_handle().
  std::string path() const;
  // Called when every rank has mapped it; the mappings stay.
  void close_handle() noexcept;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int handle_ = -1;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Equal for processes that can share memory and see each other's process ids: boot, IPC and PID namespaces,
// shared-memory mount.
std::string host_identity();

// A peer's process, watched without a signal or a thread.
class PeerProcess {
 public:
  PeerProcess() = default;
  explicit PeerProcess(pid_t pid);
  ~PeerProcess();
  PeerProcess(PeerProcess&& other) noexcept;
  PeerProcess& operator=(PeerProcess&& other) noexcept;

  bool has_exited() const;

 private:
  pid_t pid_ = 0;
  int pidfd_ = -1;  // -1 where the kernel has no pidfd_open: then the process id itself is probed
};

}  // namespace echo::cpu
