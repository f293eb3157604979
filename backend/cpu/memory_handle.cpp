#include "memory_handle.h"

#include <charconv>
#include <cstring>
#include <sstream>
#include <system_error>

namespace echo::cpu {
namespace {

constexpr std::string_view kHello = "echo 1 ";  // changes with what follows it

// Takes a number of digits alone, and one space behind it unless the text ends there.
template <typename Number>
bool take_number(std::string_view& text, Number& number) {
  if (text.empty() || text.front() < '0' || text.front() > '9') return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  if (text.empty()) return true;
  if (text.front() != ' ') return false;
  text.remove_prefix(1);
  return !text.empty();
}

}  // namespace

std::string write_handle(const MemoryHandle& handle) {
  return std::to_string(handle.pid) + " " + std::to_string(handle.fd);
}

std::optional<MemoryHandle> read_handle(std::string_view text) {
  MemoryHandle handle;
  if (!take_number(text, handle.pid) || handle.pid <= 0 || text.empty()) return std::nullopt;
  if (!take_number(text, handle.fd) || !text.empty()) return std::nullopt;
  return handle;
}

std::string describe_seal_mismatch(const Seal& found, const Seal& expected) {
  if (found.magic != expected.magic) return "it is no memory of echo";
  std::ostringstream out;
  if (found.protocol != expected.protocol) {
    out << "it is of version " << found.protocol << " of the protocol, not " << expected.protocol;
  } else if (found.kind != expected.kind) {
    out << "it is of kind " << static_cast<uint32_t>(found.kind) << ", not " << static_cast<uint32_t>(expected.kind);
  } else if (found.group != expected.group) {
    out << "it belongs to another group";
  } else if (found.rank != expected.rank) {
    out << "it belongs to rank " << found.rank << ", not to rank " << expected.rank;
  } else if (found.world_size != expected.world_size) {
    out << "it belongs to a group of " << found.world_size << ", not of " << expected.world_size;
  } else if (found.bytes != expected.bytes) {
    out << "it has " << found.bytes << " bytes, not " << expected.bytes;
  } else if (std::memcmp(&found, &expected, sizeof(Seal)) != 0) {
    out << "its seal is damaged";
  }
  return out.str();
}

std::string write_introduction(const Introduction& introduction) {
  std::ostringstream out;
  out << kHello << introduction.pid << " " << introduction.cores << " " << introduction.nonce << " "
      << introduction.host;
  return out.str();
}

std::optional<Introduction> read_introduction(std::string_view text) {
  if (!text.starts_with(kHello)) return std::nullopt;
  text.remove_prefix(kHello.size());
  Introduction it;
  if (!take_number(text, it.pid) || !take_number(text, it.cores) || !take_number(text, it.nonce) || text.empty()) {
    return std::nullopt;
  }
  if (!take_number(text, it.host) || !text.empty() || it.pid <= 0 || it.cores <= 0) return std::nullopt;
  return it;
}

uint64_t mix_nonce(uint64_t group, uint64_t nonce) {
  for (int byte = 0; byte < 8; ++byte) group = (group ^ ((nonce >> (8 * byte)) & 0xffu)) * 0x100000001b3ull;
  return group;
}

}  // namespace echo::cpu
