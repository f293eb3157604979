// A piece of memory that processes of one host share, and the facts by which they find out whether they can.
//
// An unnamed file of mode 0600 in the shared-memory file system, its pages reserved at creation, so that a later write
// cannot fail with SIGBUS. Peers reach it through its creator's file descriptor in /proc, which the kernel grants to
// the same user alone. As it never has a name, nothing is left behind however and whenever a process ends. A process
// that is forked does not have the mappings: it can neither spoil them nor keep the memory of ranks that are gone.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory_handle.h"

namespace echo::cpu {

class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;

  // Zeroed memory of `seal.bytes` bytes, and the seal behind them. Throws std::system_error; ENOSPC if the
  // shared-memory file system has no room for it.
  static SharedMemory create(const Seal& seal);
  // Maps what another process created with just this seal and still holds the handle of. Throws std::system_error: for
  // anything else, without having written to it.
  static SharedMemory open(const MemoryHandle& handle, const Seal& expected);

  // Where a peer can open it, until close_handle().
  MemoryHandle handle() const;
  // Called when every rank has mapped it; the mappings stay.
  void close_handle() noexcept;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_ - static_cast<int64_t>(sizeof(Seal)); }

 private:
  int handle_ = -1;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;  // with the seal
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

  // True also while it ends: its connections are closed a moment before it counts as ended, where a device's driver
  // tidies up after it up to a second. Reads files: for those who have met a failure already.
  bool is_ending() const;

 private:
  pid_t pid_ = 0;
  int pidfd_ = -1;  // -1 where the kernel has no pidfd_open: then the process id itself is probed
};

}  // namespace echo::cpu
