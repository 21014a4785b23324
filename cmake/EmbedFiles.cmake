# A script (cmake -P): writes OUTPUT, a C++ source that has the FILES, a list with commas, compressed (see
# common/http/embedded_files.h). PATH=NAME gives a file another name than its own.
cmake_policy(VERSION 3.25)
string(REPLACE "," ";" files "${FILES}")
set(names "")
foreach(file IN LISTS files)
  string(REGEX MATCH "^(.*)=([^=/]*)$" renamed "${file}")
  if(renamed)
    set(file "${CMAKE_MATCH_1}")
    set(name "${CMAKE_MATCH_2}")
  else()
    get_filename_component(name "${file}" NAME)
  endif()
  list(APPEND names "${name}")
  set("path_of_${name}" "${file}")
endforeach()
list(SORT names)
set(arrays "")
set(rows "")
set(number 0)
foreach(name IN LISTS names)
  set(file "${path_of_${name}}")
  file(ARCHIVE_CREATE OUTPUT ${OUTPUT}.gz PATHS "${file}" FORMAT raw COMPRESSION GZip COMPRESSION_LEVEL 9 MTIME 0)
  file(READ ${OUTPUT}.gz bytes HEX)
  file(SIZE "${file}" size)
  file(SHA256 "${file}" hash)
  string(SUBSTRING ${hash} 0 16 hash)
  string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  string(APPEND arrays "constexpr unsigned char kBytes${number}[] = {\n${bytes}};\n")
  string(APPEND rows "    {\"${name}\", \"${hash}\", kBytes${number}, ${size}},\n")
  math(EXPR number "${number} + 1")
endforeach()
file(REMOVE ${OUTPUT}.gz)
file(WRITE ${OUTPUT} "// Made by cmake/EmbedFiles.cmake.
#include \"common/http/embedded_files.h\"

namespace ps {
namespace {
${arrays}
constexpr EmbeddedFile kPageFiles[] = {
${rows}};
}  // namespace

std::span<const EmbeddedFile> PageFiles() { return kPageFiles; }

}  // namespace ps
")
