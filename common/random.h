// Randomness that is the same on every machine: std::mt19937_64, whose numbers the C++ standard fixes, and draws of our
// own, because the standard's distributions differ between libraries.
#pragma once

#include <cstdint>
#include <random>

namespace ps {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): spreads a number's bits.
inline uint64_t MixBits(uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

// The generator of one of many independent streams of a seed.
inline std::mt19937_64 MakeRandom(uint64_t seed, uint64_t stream) {
  return std::mt19937_64(MixBits(MixBits(seed) ^ stream));
}

// Uniform in [0, bound): the high half of a 128-bit product, rejecting the few that would make some numbers more likely
// (Lemire: Fast random integer generation in an interval, 2019). bound must be above 0.
inline uint64_t UniformBelow(std::mt19937_64& random, uint64_t bound) {
  for (;;) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(random()) * bound;
    if (static_cast<uint64_t>(product) >= -bound % bound) return static_cast<uint64_t>(product >> 64);
  }
}

// Uniform in [0, 1), a multiple of 2^-24.
inline float UniformFloat(std::mt19937_64& random) { return static_cast<float>(random() >> 40) * 0x1.0p-24F; }

}  // namespace ps
