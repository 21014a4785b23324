// What is wrong with a connection: gRPC's long messages in a few words.
#pragma once

#include <string>

#include "absl/strings/match.h"
#include "common/status.h"

namespace ps {

// "connection refused", "unknown host name" … for an UNAVAILABLE or DEADLINE_EXCEEDED of gRPC; else its text.
inline std::string ConnectionProblem(const absl::Status& status) {
  const std::string text = Message(status);
  if (absl::StrContains(text, "Connection refused")) return "connection refused";
  if (absl::StrContains(text, "DNS resolution failed") || absl::StrContains(text, "Name or service not known")) {
    return "unknown host name";
  }
  if (absl::StrContains(text, "No such file or directory")) return "no such socket";
  if (absl::StrContains(text, "Connection reset") || absl::StrContains(text, "Socket closed")) return "connection lost";
  if (absl::StrContains(text, "No route to host")) return "no route to host";
  if (absl::StrContains(text, "etwork is unreachable")) return "network unreachable";
  // A server whose wait ended in time says what it waited for; gRPC says this where no answer came.
  if (absl::StrContains(text, "timed out") || absl::StrContains(text, "imeout occurred") ||
      text == "Deadline Exceeded") {
    return "no answer (timed out)";
  }
  // What a peer that answers, but not in gRPC's way, comes out as.
  if (text == "OK" || absl::StrContains(text, "Trying to connect an http1.x server")) {
    return "what answers there is no gRPC server";
  }
  const size_t last = text.rfind("last error: ");
  return last == std::string::npos ? text : text.substr(last + 12);
}

}  // namespace ps
