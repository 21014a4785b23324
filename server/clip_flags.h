// The flags that clip gradients, and the one table of them that the flags' help, the checks and the fingerprint of a
// job's settings are made from. Every mode and optimizer uses them: where workers take steps by themselves, they clip
// their own gradients (LocalSteps, in ps.proto).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/clipping.h"
#include "common/problems.h"

namespace ps {

// A row of the table: unset, it does nothing; set, it is finite and above 0.
struct ClipFlag {
  std::string flag;  // Its name, without dashes.
  std::optional<float> ClipOptions::*field = nullptr;
  std::string help;
};

const std::vector<ClipFlag>& ClipFlags();
// The help of one field's flag.
std::string ClipHelp(std::optional<float> ClipOptions::*field);

// Notes every problem, by flag.
void ValidateClipOptions(const ClipOptions& options, Problems& problems);

// The flags and their values as text: what all servers share.
std::map<std::string, std::string> ClipSettings(const ClipOptions& options);

}  // namespace ps
