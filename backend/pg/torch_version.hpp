// Which torch this is compiled against, where its interface differs between minor versions.
#pragma once

#include <torch/version.h>

#define ECHO_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))
