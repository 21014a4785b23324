# ps_compile_options: what every target of the project is compiled with.
add_library(ps_compile_options INTERFACE)
target_include_directories(ps_compile_options INTERFACE
  ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/common/include ${PROJECT_SOURCE_DIR}/worker/client/include)
# No contraction to fused multiply-add: the weights have the same bits on every instruction set. -fopenmp-simd: the
# kernels' `#pragma omp simd`, which GCC and Clang both know; no OpenMP runtime comes with it.
target_compile_options(ps_compile_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers
    -ffp-contract=off -fopenmp-simd>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of std::string's own operator+ (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105651).
  target_compile_options(ps_compile_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
# PS_WARNINGS_ARE_ERRORS: what PS_WARNINGS_AS_ERRORS comes to. AUTO leaves sanitizers' builds out: what they compile the
# release build has compiled, and instrumented code can give GCC warnings of what is none.
string(TOUPPER "${PS_WARNINGS_AS_ERRORS}" asked)
if(asked STREQUAL "AUTO")
  set(PS_WARNINGS_ARE_ERRORS OFF)
  if(NOT PS_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    set(PS_WARNINGS_ARE_ERRORS ON)
  endif()
elseif(asked MATCHES "^(1|ON|YES|TRUE|Y)$")
  set(PS_WARNINGS_ARE_ERRORS ON)
elseif(asked MATCHES "^(0|OFF|NO|FALSE|N)$")
  set(PS_WARNINGS_ARE_ERRORS OFF)
else()
  message(FATAL_ERROR "PS_WARNINGS_AS_ERRORS=${PS_WARNINGS_AS_ERRORS}: expected ON, OFF or AUTO")
endif()
if(PS_WARNINGS_ARE_ERRORS)
  target_compile_options(ps_compile_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(CMAKE_UNITY_BUILD)
  # These two take what one source keeps to itself for the next source's business.
  target_compile_options(ps_compile_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-shadow $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>>)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(ps_compile_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wthread-safety -Werror=thread-safety>)
endif()
if(PS_SANITIZE)
  target_compile_options(ps_compile_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PS_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all>)
  target_link_options(ps_compile_options INTERFACE -fsanitize=${PS_SANITIZE})
  if(PS_SANITIZE MATCHES "address" AND PS_SANITIZE MATCHES "undefined")
    # The address sanitizer sees what these would; together they take a fifth of a compilation.
    target_compile_options(ps_compile_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=null,vptr>)
  endif()
  if(PS_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Abseil's flags use a fence, which GCC warns that the thread sanitizer does not model.
    target_compile_options(ps_compile_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-tsan>)
  endif()
endif()

# GCC compiles a fifth faster if it need not collect its garbage. For the large sources of a unity build that takes up to
# 4 GiB of memory for each compiler that runs, so it is done where there is as much for each processor.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  cmake_host_system_information(RESULT processors QUERY NUMBER_OF_LOGICAL_CORES)
  cmake_host_system_information(RESULT memory_mib QUERY TOTAL_PHYSICAL_MEMORY)
  if(EXISTS /sys/fs/cgroup/memory.max)  # A container's limit, or "max".
    file(READ /sys/fs/cgroup/memory.max limit_bytes LIMIT 32)
    string(STRIP "${limit_bytes}" limit_bytes)
    if(limit_bytes MATCHES "^[0-9]+$")
      math(EXPR limit_mib "${limit_bytes} / 1048576")
      if(limit_mib LESS memory_mib)
        set(memory_mib ${limit_mib})
      endif()
    endif()
  endif()
  math(EXPR wanted_mib "4096 * ${processors}")
  if(NOT memory_mib LESS wanted_mib)
    target_compile_options(ps_compile_options INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param ggc-min-expand=1000 --param ggc-min-heapsize=2000000>")
  endif()
endif()

# A compiler cache is used where there is one; without the sloppiness it keeps nothing that is compiled with precompiled headers.
find_program(ccache ccache NO_CACHE)
if(ccache AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${ccache})
endif()
