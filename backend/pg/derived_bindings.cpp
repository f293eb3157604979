// How Python is asked to make a derived group, and the options that torch hands it on the way.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bindings.hpp"
#include "derived_groups.hpp"
#include "py_holder.hpp"

namespace echo::pg {
namespace {

using OptionsPtr = c10::intrusive_ptr<GroupOptions>;

// Lets echo_pg.Options stand where torch's C++ wants options of its own kind: dist.split_group(pg_options=...).
PyObject* convert_options(PyObject* given, PyTypeObject*) {
  try {
    if (!py::isinstance(given, py::module_::import("echo_pg.options").attr("Options"))) return nullptr;
    const auto holder = std::make_shared<PyHolder>(py::reinterpret_borrow<py::object>(given));
    return py::cast(c10::make_intrusive<GroupOptions>(holder, kBackendDefaultTimeout)).release().ptr();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("echo's conversion of options");
    return nullptr;
  }
}

}  // namespace

GroupDeriver group_deriver(py::function make, py::object pg_options) {
  const auto held = std::make_shared<PyHolder>(std::move(make));
  return {.make =
              [held](const DerivedGroup& wanted) {
                const py::gil_scoped_acquire gil;
                return held->get()(wanted.store, wanted.rank, wanted.size, wanted.ranks, wanted.options)
                    .cast<c10::intrusive_ptr<c10d::Backend>>();
              },
          .pg_options = std::make_shared<PyHolder>(std::move(pg_options))};
}

void bind_derived_groups(py::module_& m) {
  const auto copied = [](const GroupOptions& options) { return c10::make_intrusive<GroupOptions>(options); };
  py::class_<GroupOptions, c10d::Backend::Options, OptionsPtr>(m, "GroupOptions")
      .def_property_readonly(
          "chosen",
          [](const GroupOptions& options) { return py::reinterpret_borrow<py::object>(options.chosen->get()); })
      .def("__copy__", copied)
      .def("__deepcopy__", [copied](const GroupOptions& options, const py::dict&) { return copied(options); });
  py::detail::get_type_info(typeid(c10d::Backend::Options), /*throw_if_missing=*/true)
      ->implicit_conversions.push_back(&convert_options);
}

}  // namespace echo::pg
