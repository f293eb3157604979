// Lets other Python threads run while this one blocks or takes locks that they may hold.
#pragma once

#include <Python.h>

namespace echo::pg {

// Does nothing on a thread that does not hold the GIL.
class GilRelease {
 public:
  GilRelease() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~GilRelease() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace echo::pg
