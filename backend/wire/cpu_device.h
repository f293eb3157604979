// The stages for tensors in CPU memory, under the names that the composition calls. Blocking: when a function returns,
// its bytes are written.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include <ATen/ATen.h>

#include "../core/call_record.h"
#include "../core/reduce.h"
#include "../core/tuning.h"
#include "../cpu/stages.h"

namespace echo::wire {

class CpuDevice {
 public:
  explicit CpuDevice(const Site& site) : site_(site), stages_(cpu::active_stages()) {}

  static constexpr int64_t kTileElems = kWireTileElemsCpu;

  // Completes this rank's record with max|x| if a rescale is asked for, and writes it to `out`, sizeof(CallRecord)
  // bytes.
  void write_record(CallRecord record, bool rescale, std::byte* out) {
    if (rescale) record.max_magnitude = stages_.max_magnitude(site_, GroupRange{0, group_count(site_.plan)});
    std::memcpy(out, &record, sizeof(record));
  }

  // Pre: all records have arrived. Post: ranks agree and the rescale is set, or DistBackendError.
  void open_call(const std::byte* records) {
    const int32_t rank = site_.plan.rank;
    CallRecord mine;
    std::memcpy(&mine, records + rank * sizeof(CallRecord), sizeof(mine));
    uint32_t largest = 0;
    for (int32_t peer = 0; peer < site_.plan.world_size; ++peer) {
      CallRecord theirs;
      std::memcpy(&theirs, records + peer * sizeof(CallRecord), sizeof(theirs));
      const std::string mismatch = describe_mismatch(mine, rank, theirs, peer);
      TORCH_CHECK_WITH(DistBackendError, mismatch.empty(), mismatch);
      largest = std::max(largest, theirs.max_magnitude);
    }
    site_.rescale_log2 = rescale_exponent(largest);
  }

  void push(GroupRange groups, int64_t tile_groups, std::byte* tile) { stages_.push(site_, groups, tile_groups, tile); }
  void reduce(GroupRange groups, int64_t tile_groups, const std::byte* const* peer_tiles, std::byte* tile) {
    stages_.reduce(site_, groups, tile_groups, peer_tiles, tile);
  }
  void tail(GroupRange groups, int64_t tile_groups, const std::byte* tile) {
    stages_.tail(site_, groups, tile_groups, tile);
  }

 private:
  Site site_;
  const cpu::Stages& stages_;
};

}  // namespace echo::wire
