// The smallest test harness that reports a name, a place and the values: CHECK_EQ(a, b) counts and prints, main returns
// the number of failures.
#pragma once

#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace echo::testing {

struct Case {
  std::string name;
  std::function<void()> run;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

// How many times as much each test does as in its reduced form; `echo_core_tests --whole` sets it.
inline int& scale() {
  static int factor = 1;
  return factor;
}

struct Register {
  Register(const char* name, std::function<void()> run) { cases().push_back({name, std::move(run)}); }
};

// All cases whose names hold `wanted`, each told when it is over; then how many there are, what `about` says, and how
// many checks failed. The exit status.
inline int run_all(const std::string& about = {}, const std::string& wanted = {}) {
  for (const Case& test : cases()) {
    if (test.name.find(wanted) == std::string::npos) continue;
    const int before = failures();
    test.run();
    std::cout << (failures() == before ? "ok   " : "FAIL ") << test.name << "\n" << std::flush;
  }
  std::cout << cases().size() << " cases" << about << ", " << failures() << " failed checks\n";
  return failures() == 0 ? 0 : 1;
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  ++failures();
  std::cerr << file << ":" << line << ": " << text << ": " << a << " is not " << b << "\n";
}

}  // namespace echo::testing

#define ECHO_TEST(name)                                                     \
  static void test_##name();                                                \
  static const echo::testing::Register register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK_EQ(a, b) echo::testing::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK(condition) echo::testing::check_equal(static_cast<bool>(condition), true, #condition, __FILE__, __LINE__)
