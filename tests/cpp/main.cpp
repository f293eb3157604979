#include <cstring>

#include "check.h"

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "--whole") == 0) echo::testing::scale() = 20;
  for (const auto& test : echo::testing::cases()) {
    const int before = echo::testing::failures();
    test.run();
    std::cout << (echo::testing::failures() == before ? "ok   " : "FAIL ") << test.name << "\n";
  }
  std::cout << echo::testing::cases().size() << " cases, " << echo::testing::failures() << " failed checks\n";
  return echo::testing::failures() == 0 ? 0 : 1;
}
