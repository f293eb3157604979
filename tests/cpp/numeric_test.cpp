// Number formats against what the compiler's own types say, over every 16-bit pattern.
#include <cfenv>
#include <cmath>
#include <random>

#include "../../backend/core/numeric.h"
#include "check.h"

namespace {

using namespace echo;

// Every finite bf16 or fp16 value in increasing order of magnitude has a successor one bit pattern up: enough to check
// both roundings.
template <typename Widen, typename Narrow>
void check_format(Widen widen, Narrow narrow, uint16_t inf_bits, uint16_t nan_bits, ScaleDType format) {
  for (uint32_t pattern = 0; pattern < inf_bits; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const float value = widen(bits);
    CHECK_EQ(narrow(value), bits);
    CHECK_EQ(narrow(-value), static_cast<uint16_t>(bits | 0x8000u));
    CHECK_EQ(ceil16(value, format), bits);
    const float next = widen(static_cast<uint16_t>(pattern + 1));
    if (!std::isfinite(next)) continue;
    const float middle = static_cast<float>((static_cast<double>(value) + next) / 2);
    const auto even = static_cast<uint16_t>((pattern & 1u) ? pattern + 1 : pattern);
    CHECK_EQ(narrow(middle), even);
    CHECK_EQ(narrow(std::nextafter(middle, 0.0f)), bits);
    CHECK_EQ(narrow(std::nextafter(middle, INFINITY)), static_cast<uint16_t>(pattern + 1));
    CHECK_EQ(ceil16(std::nextafter(value, INFINITY), format), static_cast<uint16_t>(pattern + 1));
  }
  CHECK_EQ(narrow(INFINITY), inf_bits);
  CHECK_EQ(narrow(-INFINITY), static_cast<uint16_t>(inf_bits | 0x8000u));
  CHECK_EQ(narrow(3.4e38f), inf_bits);
  CHECK_EQ(ceil16(3.402e38f, format), inf_bits);
  CHECK_EQ(narrow(NAN), nan_bits);
  CHECK_EQ(narrow(float_of(0xff812345u)), nan_bits);
  CHECK(std::isnan(widen(nan_bits)));
  CHECK(std::isinf(widen(inf_bits)));
}

ECHO_TEST(bfloat16_rounds_to_nearest_even_and_up) {
  check_format([](uint16_t h) { return from_bfloat16(h); }, [](float x) { return to_bfloat16(x); }, 0x7f80, 0x7fc0,
               ScaleDType::kBFloat16);
}

ECHO_TEST(float16_rounds_to_nearest_even_and_up) {
  check_format([](uint16_t h) { return from_float16(h); }, [](float x) { return to_float16(x); }, 0x7c00, 0x7e00,
               ScaleDType::kFloat16);
}

ECHO_TEST(round_to_int_is_nearest_even) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> values(-300.0f, 300.0f);
  for (int i = 0; i < 100000 * testing::scale(); ++i) {
    const float x = values(random);
    CHECK_EQ(round_to_int(x), std::nearbyintf(x));
  }
  for (int i = -300; i < 300; ++i) CHECK_EQ(round_to_int(i + 0.5f), std::nearbyintf(i + 0.5f));
}

ECHO_TEST(floor_log2_of_every_exponent) {
  for (int exponent = -149; exponent <= 127; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    CHECK_EQ(floor_log2_bits(bits_of(power)), exponent);
    if (exponent > -140) CHECK_EQ(floor_log2_bits(bits_of(std::nextafter(power, 0.0f))), exponent - 1);
  }
}

}  // namespace
