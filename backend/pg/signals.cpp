#include "signals.hpp"

namespace echo::pg {

void run_signal_handlers() {
  // A thread without a Python state of its own never runs handlers, and may be one that Python must not be entered on.
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace echo::pg
