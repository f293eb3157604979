// How a peer's shared memory is named and told from any other: the handle says where the kernel keeps it, the seal at
// its end says whose it is. Both come from outside of this process and are believed in nothing that was not checked.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "../core/call_record.h"

namespace echo::cpu {

// A file that process `pid` holds open. As text "pid fd"; nothing but two numbers, so that no text can name a path.
struct MemoryHandle {
  pid_t pid = 0;
  int fd = -1;
};

std::string write_handle(const MemoryHandle& handle);
// Nullopt for anything that write_handle() does not write.
std::optional<MemoryHandle> read_handle(std::string_view text);

enum class MemoryKind : uint32_t { kSlab = 1, kNotices = 2 };

// The last 64 bytes of the memory, written before its handle is told to anybody.
struct Seal {
  uint64_t magic = 0x6c6165736f686365ull;
  uint32_t protocol = kProtocolVersion;
  MemoryKind kind = MemoryKind::kSlab;
  uint64_t group = 0;  // drawn when the group was made, equal on all of its ranks
  int64_t bytes = 0;   // in front of the seal
  int32_t rank = 0;    // whose memory it is
  int32_t world_size = 0;
  uint64_t reserved[3] = {0, 0, 0};
};
static_assert(sizeof(Seal) == 64);

// Empty if the two are equal, else what is wrong with `found`: "it belongs to rank 2, not to rank 1".
std::string describe_seal_mismatch(const Seal& found, const Seal& expected);

// What a rank says of itself before anybody opens its memory. As text "echo 1 <pid> <cores> <nonce> <host>".
struct Introduction {
  pid_t pid = 0;
  int32_t cores = 1;   // that its process may use
  uint64_t nonce = 0;  // this rank's part of the group's number
  uint64_t host = 0;   // equal for processes that can share memory
};

std::string write_introduction(const Introduction& introduction);
// Nullopt for anything that write_introduction() does not write.
std::optional<Introduction> read_introduction(std::string_view text);

// The number of a group whose ranks drew these nonces; FNV-1a, in rank order.
uint64_t mix_nonce(uint64_t group, uint64_t nonce);

}  // namespace echo::cpu
