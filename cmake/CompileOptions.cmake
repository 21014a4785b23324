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
if(PS_WARNINGS_AS_ERRORS)
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
