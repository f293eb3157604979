// What a quantized all-reduce is asked to do, as plain data that host and device share.
//
// Owns: the enumerations, the codec and feedback parameters, and the plan of one call. No arithmetic beyond the
// coefficients of the compensator, no torch, no CUDA runtime.
#pragma once

#include <cstdint>

namespace echo {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16 };
enum class Quantizer : uint8_t { kSymmetric, kAsymmetric, kZeroAware };
enum class ScaleDType : uint8_t { kBFloat16, kFloat16 };
enum class StateDType : uint8_t { kFloat32, kBFloat16, kFloat16, kInt8 };
enum class Residual : uint8_t { kLocal, kGroup };
enum class Direction : uint8_t { kForward, kBackward, kRecompute };

constexpr int kDirections = 3;
constexpr int32_t kMinGroupElems = 16;
constexpr int32_t kMaxGroupElems = 1024;

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// How values become codes [paper 4.3].
struct Codec {
  int32_t bits = 4;           // 4 or 8
  int32_t group_elems = 128;  // g: multiple of 8, kMinGroupElems..kMaxGroupElems
  Quantizer quantizer = Quantizer::kZeroAware;
  ScaleDType scale_dtype = ScaleDType::kBFloat16;
  int32_t rotation_log2 = 0;  // runs of 2^m elements are rotated; 0: no rotation
  float tau = 0.125f;         // steps inside the range over which zero_aware blends
  float clip = 1.0f;          // factor on min and max before the scale is formed
};

// How rounding errors come back into later sites [paper 5]. c and m1 are the stored state; m1 exists only where k2 !=
// 0.
struct Feedback {
  bool enabled = false;
  Residual residual = Residual::kLocal;
  StateDType state_dtype = StateDType::kInt8;
  float beta1 = 0.0f;
  float beta2 = 0.0f;
  float k1 = 0.0f;
  float k2 = 0.0f;
  float k3 = 0.0f;
};

// The recurrence of two averages (m1, m2), rewritten for the state (c, m1); in double, rounded once.
inline Feedback make_feedback(Residual residual, StateDType state_dtype, double eta, double a, double beta1,
                              double beta2) {
  return Feedback{.enabled = true,
                  .residual = residual,
                  .state_dtype = state_dtype,
                  .beta1 = static_cast<float>(beta1),
                  .beta2 = static_cast<float>(beta2),
                  .k1 = static_cast<float>(1.0 - beta1),
                  .k2 = static_cast<float>(eta * a * (beta1 - beta2)),
                  .k3 = static_cast<float>(eta * (a * (1.0 - beta1) + (1.0 - a) * (1.0 - beta2)))};
}

// One call as every stage sees it; equal on all ranks but for `rank`.
struct Plan {
  int64_t numel = 0;
  int32_t rank = 0;
  int32_t world_size = 1;
  DType dtype = DType::kBFloat16;
  bool first_site = true;  // first site of a pass: no correction is added, the state is overwritten
  Codec codec;
  Feedback feedback;
};

}  // namespace echo
