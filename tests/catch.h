// Catch2, versions 2 and 3 alike.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include <iostream>
#include <string>

// Ends the test case as skipped: CTest reads this line (SKIP_REGULAR_EXPRESSION) and reports the test as skipped.
#define PS_SKIP(reason)                                \
  do {                                                 \
    std::cout << "SKIPPED: " << (reason) << std::endl; \
    SUCCEED("skipped");                                \
    return;                                            \
  } while (false)
