#include "common/slices.h"

#include <algorithm>
#include <limits>
#include <random>
#include <set>

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Slices cover every tensor once, in order, with at most 32,768 elements") {
  const SlicePlan plan({{"a", {1000, 1000}}, {"b", {7}}, {"c", {kSliceElements}}}, 3);
  REQUIRE(plan.slices().size() == 31 + 1 + 1);
  int64_t covered = 0;
  for (const SliceInfo& slice : plan.slices()) {
    CHECK(slice.elements >= 1);
    CHECK(slice.elements <= kSliceElements);
    covered += slice.elements;
  }
  CHECK(covered == plan.total_elements());
  CHECK(plan.slices()[30].offset == 30 * kSliceElements);
  CHECK(plan.slices()[30].elements == 1000000 - 30 * kSliceElements);
}

TEST_CASE("Shards differ by at most one slice, and their buffers do not overlap") {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    Layout layout;
    for (uint32_t i = 0; i <= random() % 8; ++i) {
      layout.push_back({"t" + std::to_string(i), {static_cast<int64_t>(1 + random() % 2000000)}});
    }
    const uint32_t shards = 1 + random() % 6;
    const SlicePlan plan(layout, shards);
    int64_t least = INT64_MAX;
    int64_t most = 0;
    for (uint32_t shard = 0; shard < shards; ++shard) {
      least = std::min(least, plan.shard_elements(shard));
      most = std::max(most, plan.shard_elements(shard));
      int64_t end = 0;
      for (uint32_t index : plan.shard_slices(shard)) {
        const SliceInfo& slice = plan.slices()[index];
        CHECK(slice.shard == shard);
        CHECK(slice.shard_offset >= end);
        CHECK(slice.shard_offset % kSliceAlignment == 0);
        end = slice.shard_offset + slice.elements;
      }
      CHECK(end <= plan.shard_buffer_elements(shard));
    }
    CHECK(most - least <= kSliceElements);
  }
}

TEST_CASE("A push carries the slices of all tensors but constants, in the order of the model") {
  const SlicePlan plan({{"weight", {40000}},
                        {.name = "constant", .shape = {40000}, .kind = TensorKind::kConstant},
                        {.name = "lowest", .shape = {5}, .kind = TensorKind::kBufferLowest},
                        {.name = "mean", .shape = {5}, .kind = TensorKind::kBufferMean}},
                       2);
  std::vector<uint32_t> pushed;
  for (uint32_t shard = 0; shard < 2; ++shard) {
    const std::vector<uint32_t>& of_shard = plan.pushed_shard_slices(shard);
    CHECK(std::is_sorted(of_shard.begin(), of_shard.end()));
    for (const uint32_t index : of_shard) CHECK(plan.slices()[index].shard == shard);
    pushed.insert(pushed.end(), of_shard.begin(), of_shard.end());
  }
  std::sort(pushed.begin(), pushed.end());
  CHECK(pushed == std::vector<uint32_t>{0, 1, 4, 5});
}

TEST_CASE("A layout that cannot be right is refused by the tensor's name") {
  CHECK_FALSE(ValidateLayout({}).ok());
  CHECK_FALSE(ValidateLayout({{"", {1}}}).ok());
  CHECK_FALSE(ValidateLayout({{"a", {1}}, {"a", {1}}}).ok());
  const absl::Status huge = ValidateLayout({{"big", {1LL << 40, 1LL << 40}}});
  CHECK_FALSE(huge.ok());
  CHECK(std::string(huge.message()).find("big") != std::string::npos);
  CHECK_FALSE(ValidateLayout({{"a", {0}}}).ok());
  CHECK_FALSE(ValidateLayout({{"a", {-3}}}).ok());
  CHECK(ValidateLayout({{"a", {3, 4}}, {"scalar", {}}}).ok());
}

TEST_CASE("A tensor has no name that the files of a model keep for themselves") {
  CHECK(Message(ValidateLayout({{"a", {1}}, {"__metadata__", {1}}})) ==
        "tensor __metadata__: the format of checkpoints and exported files keeps this name for itself");
  CHECK(ValidateLayout({{"__metadata__.a", {1}}, {"metadata", {1}}}).ok());
}

TEST_CASE("A tensor has a known kind, and a model has a weight") {
  CHECK(Message(ValidateLayout({{"a", {1}}, {.name = "b", .shape = {1}, .kind = static_cast<TensorKind>(4)}})) ==
        "tensor b: there is no kind 4 of tensors");
  CHECK(Message(ValidateLayout({{.name = "b", .shape = {1}, .kind = TensorKind::kBufferMean}})) ==
        "the model has no weights: all of its tensors are constants or buffers");
}

TEST_CASE("A tensor's factors are finite numbers of 0 or more") {
  CHECK(ValidateLayout({{"a", {1}, 0, 0}, {"b", {1}, 1e30F, 0.5F}}).ok());
  CHECK(Message(ValidateLayout({{"a", {1}}, {"b", {1}, 1, -0.5F}})) ==
        "tensor b: the factor -0.5 of the weight decay is not a finite number of 0 or more");
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  CHECK_FALSE(ValidateLayout({{"a", {1}, kInfinite}}).ok());
  CHECK_FALSE(ValidateLayout({{"a", {1}, std::numeric_limits<float>::quiet_NaN()}}).ok());
}

TEST_CASE("The names of a model's tensors have a length that messages and files can hold") {
  Layout layout;
  for (int i = 0; i < 33; ++i) layout.push_back({std::string(1 << 20, static_cast<char>('A' + i)), {1}});
  CHECK(Message(ValidateLayout(layout)) ==
        "the names of the model's tensors have 34603008 bytes together; at most 33554432 are supported");
  layout.pop_back();
  CHECK(ValidateLayout(layout).ok());
}

TEST_CASE("Fragments have nearly equal sizes, take turns over the layers, and have each pushed tensor once") {
  const Layout layout = {{"a", {8}}, {"b", {3}}, {.name = "c", .shape = {100}, .kind = TensorKind::kConstant},
                         {"d", {4}}, {"e", {2}}, {.name = "f", .shape = {1}, .kind = TensorKind::kBufferMean}};
  using Fragments = std::vector<std::vector<uint32_t>>;
  CHECK(FragmentsOf(layout, 1) == Fragments{{0, 1, 3, 4, 5}});
  CHECK(FragmentsOf(layout, 2) == Fragments{{0, 5}, {1, 3, 4}});
  CHECK(FragmentsOf(layout, 3) == Fragments{{0}, {1, 4}, {3, 5}});
  CHECK(FragmentsOf(layout, 6) == Fragments{{0}, {1}, {3}, {4}, {5}, {}});
}

TEST_CASE("The slices of some tensors are ranges that are apart, and contain each of them and no other") {
  const SlicePlan plan({{"a", {kSliceElements + 1}}, {"b", {5}}, {"c", {2 * kSliceElements}}, {"d", {1}}}, 2);
  const std::vector<uint32_t> none;
  CHECK(SlicesOf(plan, none).empty());
  CHECK(SlicesOf(plan, std::vector<uint32_t>{0, 1}) == SliceRanges{{0, 3}});
  CHECK(SlicesOf(plan, std::vector<uint32_t>{0, 1, 2, 3}) == SliceRanges{{0, 6}});
  const SliceRanges ranges = SlicesOf(plan, std::vector<uint32_t>{0, 2});
  CHECK(ranges == SliceRanges{{0, 2}, {3, 5}});
  for (uint32_t slice = 0; slice < 7; ++slice) {
    CHECK(Contain(ranges, slice) == (slice < 2 || slice == 3 || slice == 4));
    CHECK_FALSE(Contain({}, slice));
  }
}

TEST_CASE("Whatever a layout says changes its hash") {
  const Layout layout = {{"a", {2, 3}}, {"b", {4}}};
  std::set<std::string> hashes = {
      LayoutHash(layout),
      LayoutHash({{"a", {2, 3}}}),
      LayoutHash({{"b", {4}}, {"a", {2, 3}}}),
      LayoutHash({{"ab", {2, 3}}, {"", {4}}}),
      LayoutHash({{"a", {2}}, {"b", {3, 4}}}),
      LayoutHash({{"a", {2, 3}, 0.5F}, {"b", {4}}}),
      LayoutHash({{"a", {2, 3}, 1, 0.5F}, {"b", {4}}}),
      LayoutHash({{"a", {2, 3}}, {.name = "b", .shape = {4}, .kind = TensorKind::kConstant}}),
  };
  CHECK(hashes.size() == 8);
  CHECK(hashes.contains(LayoutHash(Layout(layout))));
}

}  // namespace
}  // namespace ps
