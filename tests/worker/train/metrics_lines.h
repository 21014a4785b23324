// A metrics file of its own, and what was written to it.
#pragma once

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "common/metrics.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {

class MetricsLines {
 public:
  MetricsLines() : writer_(*MetricsWriter::Open(folder_.File("metrics.jsonl"), "rank")) {
    writer_->Begin(/*append=*/false, {});
  }

  // Until Take.
  MetricsWriter& writer() { return *writer_; }

  // Ends the writer. What was written after the event `start`, without the time and the rank.
  std::vector<nlohmann::ordered_json> Take() {
    writer_ = nullptr;
    std::ifstream file(folder_.File("metrics.jsonl"));
    std::vector<nlohmann::ordered_json> lines;
    for (std::string line; std::getline(file, line);) {
      lines.push_back(nlohmann::ordered_json::parse(line));
      lines.back().erase("t");
      lines.back().erase("rank");
    }
    REQUIRE(!lines.empty());
    lines.erase(lines.begin());
    return lines;
  }

 private:
  TempFolder folder_;
  std::unique_ptr<MetricsWriter> writer_;
};

}  // namespace ps
