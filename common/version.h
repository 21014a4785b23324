// The program's version, from CMake's project().
#pragma once

namespace ps {

inline constexpr char kVersion[] = PS_VERSION;

}  // namespace ps
