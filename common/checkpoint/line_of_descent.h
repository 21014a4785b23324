// Which generations of a job go on from each other.
//
// A job that begins where nothing is known of an earlier one takes a number at random, and counts from there, so that
// two jobs, or two folders of checkpoints, have no number in common. What goes on from one of them has the next number,
// so all of them are of one line: their numbers agree but for the last bits. A line has 65,535 generations, which is
// more than a job has servers that die.
#pragma once

#include <cstdint>

namespace ps {

constexpr int kLineBits = 16;

// Below the first generation of the line that this random number begins.
constexpr uint64_t NewLine(uint32_t random) { return uint64_t{random} << kLineBits; }

constexpr bool SameLine(uint64_t generation, uint64_t other) { return generation >> kLineBits == other >> kLineBits; }

}  // namespace ps
