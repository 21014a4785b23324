// How the servers of a benchmark say that pushes and weights are sent.
#pragma once

#include <string>
#include <vector>

#include "server/config/options.h"

namespace ps {

// The servers' flags of these names.
struct WireOptions {
  std::string wire_dtype = "float32";
  std::string weights_wire_dtype = "float32";
  std::string compress = "none";
  bool error_feedback = false;
  bool weights_delta = false;

  void Set(ServerOptions& options) const {
    options.wire_dtype = wire_dtype;
    options.weights_wire_dtype = weights_wire_dtype;
    options.compress = compress;
    options.error_feedback = error_feedback;
    options.weights_delta = weights_delta;
  }
  std::vector<std::string> Flags() const {
    return {"--wire_dtype=" + wire_dtype, "--weights_wire_dtype=" + weights_wire_dtype, "--compress=" + compress,
            error_feedback ? "--error_feedback" : "--noerror_feedback",
            weights_delta ? "--weights_delta" : "--noweights_delta"};
  }
  // The format that servers with these flags would use.
  WireFormat Format() const {
    ServerOptions options;
    Set(options);
    return WireFormatOf(options);
  }
  // For the name of a row; empty: float32, all of it.
  std::string Text() const {
    std::string text;
    if (wire_dtype != "float32") text += ", " + wire_dtype + " gradients";
    if (weights_wire_dtype != "float32") text += ", " + weights_wire_dtype + " weights";
    if (compress != "none") text += ", " + compress;
    if (error_feedback && compress == "none") text += ", error feedback";
    if (weights_delta) text += ", changed weights";
    return text;
  }
};

}  // namespace ps
