// What a running process holds, from /proc: for tests that look for what stays behind.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/catch.h"

namespace ps {

struct Footprint {
  int64_t memory_kb = 0;  // Resident.
  int64_t descriptors = 0;
  int64_t threads = 0;
};

// The number after this name in a file of lines like "Threads: 4".
inline int64_t ReadField(const std::string& file, const std::string& name) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(name + ":", 0) == 0) return std::stoll(line.substr(name.size() + 1));
  }
  FAIL("there is no " << name << " in " << file);
  return 0;
}

// The footprint of a process that runs. VmRSS in `status` is added up from counts of each processor, and is off by
// megabytes on a machine with many of them; Rss in `smaps_rollup` is counted when it is read.
inline Footprint FootprintOf(pid_t process) {
  const std::string proc = "/proc/" + std::to_string(process);
  const std::filesystem::directory_iterator descriptors(proc + "/fd");
  return {.memory_kb = ReadField(proc + "/smaps_rollup", "Rss"),
          .descriptors = std::distance(begin(descriptors), end(descriptors)),
          .threads = ReadField(proc + "/status", "Threads")};
}

// The process that the calling thread has started, and that is the only one.
inline pid_t OnlyChild() {
  std::ifstream children("/proc/thread-self/children");
  pid_t child = 0;
  pid_t another = 0;
  children >> child >> another;
  REQUIRE(child > 0);
  REQUIRE(another == 0);
  return child;
}

}  // namespace ps
