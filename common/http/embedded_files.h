// What cmake/EmbedFiles.cmake makes of files: they are in the program's memory, compressed.
#pragma once

#include <cstddef>
#include <span>

namespace ps {

struct EmbeddedFile {
  const char* name;  // "page.js"
  const char* hash;  // Of what is in the file: another one has another.
  std::span<const unsigned char> gzip;
  size_t bytes;  // When it is not compressed.
};

// By name, ascending.
std::span<const EmbeddedFile> PageFiles();

}  // namespace ps
