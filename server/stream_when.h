// When slices of the next version leave before it is committed (--stream).
#pragma once

#include <optional>
#include <string>

namespace ps {

enum class StreamWhen {
  kAuto,    // As they are built, unless a worker of this host pushes, too: its pushes to other servers would share the
            // link out of the host with them, and the next version needs those first.
  kAlways,  // As they are built.
  kNever,
};

inline std::optional<StreamWhen> ParseStreamWhen(const std::string& text) {
  if (text == "auto") return StreamWhen::kAuto;
  if (text == "always") return StreamWhen::kAlways;
  if (text == "never") return StreamWhen::kNever;
  return std::nullopt;
}

}  // namespace ps
