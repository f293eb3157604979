// The stages on CPU memory: the same functions, compiled for several instruction sets, chosen once at run time; all
// give the same bytes.
//
// A tile is the part of one segment that travels together: `groups` of it hold data, its buffer has room for
// `tile_groups` (tile.h). Every stage sets the floating-point environment itself (nearest even, subnormals kept) and
// restores the caller's. Tensors may have any alignment of their element type or none; tiles and state are 16-byte
// aligned. No stage allocates, blocks or throws.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/site.h"
#include "../core/tile.h"

namespace echo::cpu {

struct Stages {
  const char* isa;

  // Bits of max|x| over the groups, before rotation and compensation; at or above kInfBits32 if any value is not
  // finite.
  uint32_t (*max_magnitude)(const Site& site, GroupRange groups);

  // Pre: `groups` belong to another rank's segment. Post: the tile is written whole, padding included; with residual
  // "local" the state of these groups is updated. Caller still owes the hand-over.
  void (*push)(const Site& site, GroupRange groups, int64_t tile_groups, std::byte* tile);

  // Pre: `groups` belong to this rank's segment; peer_tiles[r] holds rank r's push of them, the entry of this rank is
  // not read. Post: as push.
  void (*reduce)(const Site& site, GroupRange groups, int64_t tile_groups, const std::byte* const* peer_tiles,
                 std::byte* tile);

  // Pre: the tile is the owner's reduce of `groups`; the tensor still holds this rank's contribution there. Post: the
  // tensor holds the result; with residual "group" the state of these groups is updated.
  void (*tail)(const Site& site, GroupRange groups, int64_t tile_groups, const std::byte* tile);

  // out[i] = the correction that the next site would add, in the tensor's own domain (rotation undone); plan.numel
  // values.
  void (*correction)(const Site& site, float* out);
};

// The widest instruction set that was built and that this processor has: "avx512", "avx2" or "baseline".
const Stages& active_stages();

// A certain one by name, for tests and benchmarks; nullptr if it was not built or the processor lacks it.
const Stages* stages_named(const char* isa);

inline const char* active_isa() { return active_stages().isa; }

}  // namespace echo::cpu
