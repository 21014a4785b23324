// What a reader of data guessed or noticed, for the log.
#pragma once

#include <string>
#include <vector>

namespace ps {

struct DataNote {
  bool warning = false;
  std::string text;  // Names the file.
};

using DataNotes = std::vector<DataNote>;

}  // namespace ps
