// Samples in any order, gathered into a batch.
#pragma once

#include <cstdint>

namespace ps {

// Rows `indices` [count] of samples [·, features] to x [count, features]; bytes become byte / 255.0f, correctly
// rounded.
void GatherRows(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features, float* x);
void GatherRows(const float* samples, const int32_t* indices, int64_t count, int64_t features, float* x);

}  // namespace ps
