// A mode with its default options.
#pragma once

#include <string>

#include "server/config/mode_options.h"

namespace ps {

// GCC 12 takes the texts of options for uninitialised where they are written in the place of an argument's field.
inline ModeOptions ModeNamed(const std::string& name) {
  ModeOptions options;
  options.name = name;
  return options;
}

}  // namespace ps
