// The parts of the module, one file each, and the enumerations that cross the border as strings or small integers.
#pragma once

#include <string>

#include <pybind11/pybind11.h>

#include "../core/config.h"
#include "../core/policy.h"

namespace echo::pg {

void bind_config(pybind11::module_& m);
void bind_testing(pybind11::module_& m);

// Throw c10::ValueError for an unknown name or number.
Direction parse_direction(const std::string& name);
ModuleRole parse_role(int role);

}  // namespace echo::pg
