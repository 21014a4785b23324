// A folder for one test in memory, where there is such a file system: what waits for the disk does not wait there.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

namespace ps {

class MemoryFolder {
 public:
  MemoryFolder() {
    std::error_code error;
    const std::filesystem::path memory = "/dev/shm";
    const auto where = std::filesystem::is_directory(memory, error) ? memory : std::filesystem::temp_directory_path();
    std::string name = (where / "ps-test-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~MemoryFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  MemoryFolder(const MemoryFolder&) = delete;
  MemoryFolder& operator=(const MemoryFolder&) = delete;

  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace ps
