// The parts of the module, one file each, and the enumerations that cross the border as strings or small integers.
#pragma once

#include <string>

#include <pybind11/pybind11.h>

#include "../core/config.h"
#include "../core/policy.h"
#include "derived_groups.hpp"

namespace echo::pg {

void bind_config(pybind11::module_& m);
void bind_testing(pybind11::module_& m);
void bind_derived_groups(pybind11::module_& m);

// `make(store, rank, size, ranks, options)` returns the backend of a derived group; its exceptions pass through.
GroupDeriver group_deriver(pybind11::function make, pybind11::object pg_options);

// Throw c10::ValueError for an unknown name or number.
Direction parse_direction(const std::string& name);
ModuleRole parse_role(int role);

}  // namespace echo::pg
