// What the ranks tell each other at the start of a call, before any code moves: 64 bytes, compared field by field, so
// that ranks that disagree on the call fault at once and say how, instead of decoding each other's bytes under another
// plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "config.h"
#include "hd.h"
#include "tile.h"

namespace echo {

inline constexpr int kProtocolVersion = 5;                    // ranks with different versions never form a group
constexpr uint64_t kCallRecordMagic = 0x3330304f48434521ull;  // changes with the layout below

// The sizes of a tensor as far as a record has room: enough to compare them, and to say what differs.
struct CallShape {
  int64_t row_elems = 0;
  uint32_t dims = 0;
  uint32_t hash = 0;
};
CallShape shape_of(const int64_t* sizes, size_t dims);

struct CallRecord {
  uint64_t magic = kCallRecordMagic;
  uint64_t exact_calls = 0;  // all-reduces that this group forwarded before this call
  uint64_t call_number = 0;  // quantized calls of this group so far
  int64_t numel = 0;
  uint64_t plan_hash = 0;  // every field of the plan that must agree
  uint8_t dtype = 0;
  uint8_t bits = 0;
  uint8_t direction = 0;
  uint8_t first_site = 0;
  uint32_t max_magnitude = 0;  // bits of max|x| of this rank where a rescale is asked for, else 0
  int64_t row_elems = 0;       // last dimension of the tensor
  uint32_t dims = 0;
  uint32_t shape_hash = 0;  // of all dimensions
};
static_assert(sizeof(CallRecord) == 64);

// True if the two describe the same call; max_magnitude is each rank's own.
ECHO_HD bool same_call(const CallRecord& a, const CallRecord& b) {
  return a.magic == b.magic && a.exact_calls == b.exact_calls && a.call_number == b.call_number && a.numel == b.numel &&
         a.plan_hash == b.plan_hash && a.dtype == b.dtype && a.bits == b.bits && a.direction == b.direction &&
         a.first_site == b.first_site && a.row_elems == b.row_elems && a.dims == b.dims && a.shape_hash == b.shape_hash;
}

// What tells the tickets of one call from those of another.
ECHO_HD uint32_t ticket_hash(const CallRecord& record) {
  const uint64_t mixed = record.plan_hash ^ (record.call_number * 0x9e3779b97f4a7c15ull) ^
                         (record.exact_calls * 0xc2b2ae3d27d4eb4full) ^ (uint64_t{record.direction} << 56) ^
                         (record.shape_hash * 0x165667b19e3779f9ull);
  return static_cast<uint32_t>(mixed >> 32) ^ static_cast<uint32_t>(mixed);
}

// Bytes that one rank sends for a call in such tiles, its record to every peer included.
inline int64_t sent_call_bytes(const Plan& plan, const TileCut& cut) {
  return sent_tile_bytes(plan, cut) + (plan.world_size - 1) * static_cast<int64_t>(sizeof(CallRecord));
}

// `call_number` and `exact_calls` count what the group did before: a rank that forwarded what another quantized shows.
CallRecord make_call_record(const Plan& plan, Direction direction, uint64_t call_number, uint64_t exact_calls,
                            const CallShape& shape = {});

// "number 7 after 0 exact ones, numel 12, ...".
std::string describe_call(const CallRecord& record);

// Empty if the two agree, else what differs, in words: "rank 1 called all_reduce number 7 with numel 12, rank 0 with
// 16".
std::string describe_mismatch(const CallRecord& mine, int32_t my_rank, const CallRecord& theirs, int32_t their_rank);

}  // namespace echo
