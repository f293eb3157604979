// A Python object kept by C++, which may outlive the interpreter.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace echo::pg {

// Drops its reference where that is still allowed, and leaks it otherwise.
struct PyHolder {
  explicit PyHolder(py::object held) : object(held.release().ptr()) {}
  ~PyHolder() {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(object);
  }
  PyHolder(const PyHolder&) = delete;
  PyHolder& operator=(const PyHolder&) = delete;

  py::handle get() const { return object; }

  PyObject* object;
};

}  // namespace echo::pg
