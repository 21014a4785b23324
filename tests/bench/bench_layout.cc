#include "tests/bench/bench_layout.h"

#include <array>
#include <string>

#include "absl/strings/str_cat.h"

namespace ps {
namespace {

// A square kernel, and the scale and shift of the normalisation behind it.
void AddConvolution(const std::string& name, int64_t out, int64_t in, int64_t side, Layout& layout) {
  layout.push_back({absl::StrCat(name, ".weight"), {out, in, side, side}});
  layout.push_back({absl::StrCat(name, ".scale"), {out}});
  layout.push_back({absl::StrCat(name, ".shift"), {out}});
}

}  // namespace

Layout OneTensor(int64_t bytes) { return {{"w", {bytes / static_cast<int64_t>(sizeof(float))}}}; }

Layout ManyTensors() {
  constexpr std::array<int, 4> kBlocks = {3, 4, 6, 3};  // Each stage has so many.
  Layout layout;
  AddConvolution("stem", 64, 3, 7, layout);
  int64_t in = 64;
  for (size_t stage = 0; stage < kBlocks.size(); ++stage) {
    const int64_t width = int64_t{64} << stage;
    const int64_t out = 4 * width;
    for (int block = 0; block < kBlocks[stage]; ++block) {
      const std::string name = absl::StrCat("stage", stage, ".block", block);
      AddConvolution(absl::StrCat(name, ".reduce"), width, in, 1, layout);
      AddConvolution(absl::StrCat(name, ".middle"), width, width, 3, layout);
      AddConvolution(absl::StrCat(name, ".expand"), out, width, 1, layout);
      if (block == 0) AddConvolution(absl::StrCat(name, ".shortcut"), out, in, 1, layout);
      in = out;
    }
  }
  layout.push_back({"classes.weight", {1000, in}});
  return layout;
}

int64_t ModelBytes(const Layout& layout) {
  int64_t elements = 0;
  for (const TensorSpec& tensor : layout) elements += tensor.elements();
  return elements * static_cast<int64_t>(sizeof(float));
}

}  // namespace ps
