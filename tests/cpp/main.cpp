#include "check.h"

int main() {
  for (const auto& test : echo::testing::cases()) {
    const int before = echo::testing::failures();
    test.run();
    std::cout << (echo::testing::failures() == before ? "ok   " : "FAIL ") << test.name << "\n";
  }
  std::cout << echo::testing::cases().size() << " cases, " << echo::testing::failures() << " failed checks\n";
  return echo::testing::failures() == 0 ? 0 : 1;
}
