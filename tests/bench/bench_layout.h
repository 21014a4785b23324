// The models whose exchange is measured: --layout of ps_bench exchange.
#pragma once

#include <cstdint>

#include "ps/tensor.h"

namespace ps {

// One tensor of `bytes`, a multiple of 4.
Layout OneTensor(int64_t bytes);

// Those of a ResNet-50 in their order, but for the bias of its last layer: 160 tensors, together 25,556,032 elements
// (102 MB). 53 are kernels of convolutions of 4,096 to 2,359,296 elements (the first has 9,408), each followed by a
// scale and a shift of 64 to 2,048, and the last one is a matrix of 2,048,000. So two in three tensors are small, and
// nearly all bytes are in the others. Source: He et al., Deep Residual Learning, 2015 (arXiv:1512.03385), table 1.
Layout ManyTensors();

int64_t ModelBytes(const Layout& layout);

}  // namespace ps
