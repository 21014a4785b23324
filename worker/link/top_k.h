// The elements of a slice that are largest in magnitude.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ps {

// The positions of the `positions.size()` largest of the values, ascending; of two of the same magnitude the one that
// comes first. There are more values than that, at most 65,536, all finite.
void SelectLargest(std::span<const float> values, std::span<uint16_t> positions);

}  // namespace ps
