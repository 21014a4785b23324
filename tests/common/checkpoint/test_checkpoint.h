// A model with optimizer state whose every value says which it is, and checkpoints of it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/checkpoint/manifest.h"
#include "common/checkpoint/shard_checkpoint.h"
#include "common/files.h"
#include "common/slices.h"
#include "tests/catch.h"

namespace ps::checkpoint_test {

struct TestModel {
  explicit TestModel(size_t num_state = 2) : state(num_state) {
    float next = 0;
    for (const TensorSpec& tensor : layout) {
      const auto elements = static_cast<size_t>(tensor.elements());
      const auto fill = [&](std::vector<float>* values) {
        for (size_t i = 0; i < elements; ++i) values->push_back(next += 0.5F);
      };
      fill(&weights.emplace_back());
      for (auto& tensors : state) fill(&tensors.emplace_back());
    }
  }

  // The second tensor has three slices.
  Layout layout = {{.name = "a", .shape = {2, 3}},
                   {.name = "b", .shape = {600, 1000}, .learning_rate_factor = 0.1F, .weight_decay_factor = 0},
                   {.name = "mean", .shape = {7}, .kind = TensorKind::kBufferMean},
                   {.name = "fixed", .shape = {}, .kind = TensorKind::kConstant},
                   {.name = "last", .shape = {5}, .kind = TensorKind::kBufferLowest}};
  std::vector<std::vector<float>> weights;             // By tensor.
  std::vector<std::vector<std::vector<float>>> state;  // By number and tensor.
};

inline Manifest TestManifest(const Layout& layout) {
  return {.job = "job",
          .generation = 3,
          .number = 12,
          .num_workers = 4,
          .layout = layout,
          .shards = {},
          .settings = {{"mode", "bsp"}, {"optimizer", "adam"}},
          .state = {{"epoch", 7}, {"runs", {1, 2}}}};
}

// Slice i was left alone i times.
inline std::vector<ShardPart> PartsOf(const TestModel& model, const SlicePlan& plan, uint32_t shard) {
  std::vector<ShardPart> parts;
  for (const uint32_t index : plan.shard_slices(shard)) {
    const SliceInfo& slice = plan.slices()[index];
    const auto cut = [&](const std::vector<std::vector<float>>& tensors) {
      return std::span<const float>(tensors[slice.tensor])
          .subspan(static_cast<size_t>(slice.offset), static_cast<size_t>(slice.elements));
    };
    ShardPart& part = parts.emplace_back();
    part = {
        .tensor = slice.tensor, .first = slice.offset, .weights = cut(model.weights), .state = {}, .skipped = index};
    for (const auto& tensors : model.state) part.state.push_back(cut(tensors));
  }
  return parts;
}

// In a folder that exists.
inline Manifest WriteCheckpoint(const std::string& folder, const TestModel& model, uint32_t num_shards) {
  const SlicePlan plan(model.layout, num_shards);
  Manifest manifest = TestManifest(model.layout);
  for (uint32_t shard = 0; shard < num_shards; ++shard) {
    const ShardCheckpoint checkpoint = {.shard = shard,
                                        .num_shards = num_shards,
                                        .version = 40 + shard,
                                        .generation = manifest.generation,
                                        .state = {{"applied", shard}}};
    const auto checksum = WriteShardCheckpoint(folder, model.layout, checkpoint, PartsOf(model, plan, shard));
    REQUIRE(checksum.ok());
    manifest.shards.push_back({.version = checkpoint.version, .checksum = *checksum});
  }
  REQUIRE(WriteManifest(folder, manifest).ok());
  return manifest;
}

// Memory for what a shard wants, and the wants.
struct ShardMemory {
  ShardMemory(const SlicePlan& plan, uint32_t shard, size_t num_state) {
    slices = plan.shard_slices(shard);
    values.resize(slices.size() * (1 + num_state));
    skipped.resize(slices.size(), 99);
    for (size_t i = 0; i < slices.size(); ++i) {
      const SliceInfo& slice = plan.slices()[slices[i]];
      WantedPart& part = wanted.emplace_back();
      part = {.tensor = slice.tensor, .first = slice.offset, .weights = {}, .state = {}, .skipped = &skipped[i]};
      for (size_t k = 0; k <= num_state; ++k) {
        std::vector<float>& memory = values[i * (1 + num_state) + k];
        memory.resize(static_cast<size_t>(slice.elements), -1);
        if (k == 0) part.weights = memory;
        if (k > 0) part.state.emplace_back(memory);
      }
    }
  }

  std::vector<uint32_t> slices;
  std::vector<std::vector<float>> values;  // Weights, then state, of each slice.
  std::vector<int64_t> skipped;
  std::vector<WantedPart> wanted;
};

inline absl::Status ReadAllWeights(const std::string& folder, const Manifest& manifest) {
  const SlicePlan plan(manifest.layout, 1);
  const ShardMemory memory(plan, 0, 0);
  return ReadParts(folder, manifest, memory.wanted);
}

}  // namespace ps::checkpoint_test
