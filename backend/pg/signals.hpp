// Ctrl-C, and whatever else Python handles by signal, while a thread waits inside of the extension.
#pragma once

namespace echo::pg {

// Runs the handlers of signals that have come, if this is the thread that Python runs them on. Throws what a handler
// raises (KeyboardInterrupt, usually) as pybind11::error_already_set. Must be called without the GIL and without locks
// that a handler may want.
void run_signal_handlers();

}  // namespace echo::pg
