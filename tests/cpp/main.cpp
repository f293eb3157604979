#include <cstring>

#include "check.h"

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "--whole") == 0) echo::testing::scale() = 20;
  return echo::testing::run_all();
}
