# The headers that take most of a compilation's time (gRPC, Protocol Buffers, Abseil, JSON, Catch2), compiled once. The
# sources include what they use all the same, so that they compile without this, as for clang-tidy.
option(PS_PRECOMPILED_HEADERS "Compile the large headers of libraries once" ON)

set(PS_WIRE_HEADERS
  <functional> <map> <memory> <optional> <string> <vector>
  <grpcpp/grpcpp.h> <nlohmann/json.hpp> <spdlog/spdlog.h>
  <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/strings/str_format.h> <absl/strings/str_join.h>
  <absl/time/time.h> <ps/v1/ps.grpc.pb.h>)

# ps_precompile(TARGET FROM): the target uses the headers that FROM has compiled; both link ps_wire.
function(ps_precompile target from)
  if(NOT PS_PRECOMPILED_HEADERS)
    return()
  endif()
  target_precompile_headers(${target} REUSE_FROM ${from})
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    target_compile_options(${target} PRIVATE -fPIC)  # Instead of -fPIE: as the headers are.
  endif()
endfunction()

# ps_precompiled(NAME LIBS HEADERS...): a library that compiles these headers for ps_precompile.
function(ps_precompiled name libs)
  if(NOT PS_PRECOMPILED_HEADERS)
    return()
  endif()
  add_library(${name} STATIC ${PROJECT_SOURCE_DIR}/cmake/precompiled/empty.cc)
  target_link_libraries(${name} PRIVATE ${libs})
  target_precompile_headers(${name} PRIVATE ${ARGN})
  if(CMAKE_CXX_COMPILER_LAUNCHER)
    set_target_properties(${name} PROPERTIES
      CXX_COMPILER_LAUNCHER "sh;${PROJECT_SOURCE_DIR}/cmake/precompiled/anew.sh;${CMAKE_CXX_COMPILER_LAUNCHER}")
  endif()
endfunction()
