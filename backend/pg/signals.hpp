// Ctrl-C, and whatever else Python handles by signal, while a thread waits inside of the extension.
#pragma once

#include <chrono>

#include <pybind11/pybind11.h>

namespace echo::pg {

// How often who waits looks at signals: Ctrl-C is to return within a second.
constexpr std::chrono::milliseconds kSignalPeriod{200};

// Runs the handlers of signals that have come, if this is the thread that Python runs them on. Throws what a handler
// raises (KeyboardInterrupt, usually) as pybind11::error_already_set. Must be called without the GIL and without locks
// that a handler may want.
void run_signal_handlers();

// What `wait` returns and throws. Where a signal handler has raised meanwhile, `give_up` is called first.
template <typename Wait, typename GiveUp>
auto unless_interrupted(Wait&& wait, GiveUp&& give_up) {
  try {
    return wait();
  } catch (const pybind11::error_already_set&) {
    give_up();
    throw;
  }
}

}  // namespace echo::pg
