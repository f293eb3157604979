#include "call_record.h"

#include <sstream>

#include "numeric.h"

namespace echo {
namespace {

constexpr uint64_t kHashSeed = 0xcbf29ce484222325ull;
constexpr uint64_t kHashFactor = 0x100000001b3ull;

// FNV-1a over the value's bytes, least significant first.
uint64_t mix(uint64_t hash, uint64_t value) {
  for (int byte = 0; byte < 8; ++byte) {
    hash = (hash ^ ((value >> (8 * byte)) & 0xffu)) * kHashFactor;
  }
  return hash;
}

uint64_t hash_plan(const Plan& plan) {
  const Codec& codec = plan.codec;
  const Feedback& fb = plan.feedback;
  const uint64_t fields[] = {static_cast<uint64_t>(plan.numel),
                             static_cast<uint64_t>(plan.world_size),
                             static_cast<uint64_t>(plan.dtype),
                             static_cast<uint64_t>(plan.first_site),
                             static_cast<uint64_t>(codec.bits),
                             static_cast<uint64_t>(codec.group_elems),
                             static_cast<uint64_t>(codec.quantizer),
                             static_cast<uint64_t>(codec.scale_dtype),
                             static_cast<uint64_t>(codec.rotation_log2),
                             bits_of(codec.tau),
                             bits_of(codec.clip),
                             static_cast<uint64_t>(fb.enabled),
                             static_cast<uint64_t>(fb.residual),
                             static_cast<uint64_t>(fb.state_dtype),
                             bits_of(fb.beta1),
                             bits_of(fb.beta2),
                             bits_of(fb.k1),
                             bits_of(fb.k2),
                             bits_of(fb.k3)};
  uint64_t hash = kHashSeed;
  for (const uint64_t field : fields) hash = mix(hash, field);
  return hash;
}

const char* name_of(uint8_t direction) {
  switch (static_cast<Direction>(direction)) {
    case Direction::kForward:
      return "forward";
    case Direction::kBackward:
      return "backward";
    case Direction::kRecompute:
      return "recompute";
  }
  return "unknown";
}

const char* dtype_name(uint8_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "unknown";
}

}  // namespace

CallShape shape_of(const int64_t* sizes, size_t dims) {
  CallShape shape{.row_elems = dims > 0 ? sizes[dims - 1] : 0, .dims = static_cast<uint32_t>(dims), .hash = 0};
  uint64_t hash = kHashSeed;
  for (size_t d = 0; d < dims; ++d) hash = mix(hash, static_cast<uint64_t>(sizes[d]));
  shape.hash = static_cast<uint32_t>(hash >> 32) ^ static_cast<uint32_t>(hash);
  return shape;
}

std::string describe_call(const CallRecord& record) {
  std::ostringstream out;
  out << "number " << record.call_number << " after " << record.exact_calls << " exact ones, numel " << record.numel
      << ", dtype " << dtype_name(record.dtype) << ", " << int{record.bits} << " bits, " << name_of(record.direction)
      << (record.first_site ? ", first site of its pass" : "");
  if (record.dims > 0) out << ", " << record.dims << " dimensions, the last of " << record.row_elems;
  return out.str();
}

CallRecord make_call_record(const Plan& plan, Direction direction, uint64_t call_number, uint64_t exact_calls,
                            const CallShape& shape) {
  CallRecord record;
  record.exact_calls = exact_calls;
  record.call_number = call_number;
  record.numel = plan.numel;
  record.plan_hash = hash_plan(plan);
  record.dtype = static_cast<uint8_t>(plan.dtype);
  record.bits = static_cast<uint8_t>(plan.codec.bits);
  record.direction = static_cast<uint8_t>(direction);
  record.first_site = plan.first_site ? 1 : 0;
  record.row_elems = shape.row_elems;
  record.dims = shape.dims;
  record.shape_hash = shape.hash;
  return record;
}

std::string describe_mismatch(const CallRecord& mine, int32_t my_rank, const CallRecord& theirs, int32_t their_rank) {
  if (same_call(mine, theirs)) return {};
  std::ostringstream out;
  if (mine.magic != theirs.magic) {
    out << "rank " << their_rank << " speaks another version of the protocol than rank " << my_rank;
    return out.str();
  }
  out << "ranks disagree on a quantized all_reduce: rank " << my_rank << " called (" << describe_call(mine)
      << "), rank " << their_rank << " called (" << describe_call(theirs) << ")";
  return out.str();
}

}  // namespace echo
