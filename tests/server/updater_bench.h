// An updater in the test's hand.
#pragma once

#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>

#include "server/engine/updater.h"

namespace ps {

struct UpdaterBenchOptions {
  ModeOptions mode;
  ClipOptions clip;
  uint32_t shards = 1;
  size_t max_versions = 3;
  Layout layout = {{"a", {1}}, {"b", {1}}};
  std::string optimizer = "sgd";
  Hyperparameters hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0};
  bool keeps_changes = false;
};

// An updater of shard 0's part of a model of two tensors of one weight each, all 0 at first, by SGD with a rate of 1
// (unless options say otherwise). Nothing is built but by hand.
class UpdaterBench {
 public:
  using Outcome = Updater::Ended::Outcome;

  explicit UpdaterBench(const UpdaterBenchOptions& options = {})
      : mode_(MakeMode(options.mode, 2)),
        optimizer_(*MakeOptimizer(options.optimizer)),
        layout_(std::make_shared<ShardLayout>(options.layout, 0, options.shards)),
        parameters_(
            layout_, std::vector<float>(static_cast<size_t>(optimizer_->state_tensors())), options.max_versions, 0,
            [] {}, /*shared=*/false, WireType::kFloat32, options.keeps_changes),
        updater_(*mode_, *optimizer_, *outer_, options.hyperparameters, options.clip,
                 /*max_inline_elements=*/1, pool_,
                 [this](const std::vector<size_t>& slices) { updater_.OnBuilt(slices); }) {
    updater_.SetParameters(&parameters_, layout_);
  }

  // A push with these gradients, as far as the shard has the weights; kMissing: not here yet.
  std::shared_ptr<Push> MakePush(float a, float b, uint32_t rank = 0) const {
    auto push = std::make_shared<Push>();
    push->rank = rank;
    push->samples = 1;
    push->slices.resize(layout_->slices());
    size_t local = 0;
    for (const float gradient : {a, b}) {
      if (local < push->slices.size() && gradient == gradient) Place(*push, local, gradient);
      ++local;
    }
    return push;
  }
  static void Place(Push& push, size_t local, float gradient) {
    auto value = std::make_shared<float>(gradient);
    push.slices[local] = Payload({Piece(reinterpret_cast<const uint8_t*>(value.get()), sizeof(float))}, value);
    ++push.received;
  }

  static void PlaceAbsent(Push& push, size_t local) {
    push.slices[local] = {};
    push.slices[local].set_absent();
    ++push.received;
    ++push.absent;
  }
  // With one gradient for each slice; nothing: it is absent.
  std::shared_ptr<Push> MakePushOf(const std::vector<std::optional<float>>& gradients, uint32_t rank = 0) const {
    auto push = MakePush(kMissing, kMissing, rank);
    for (size_t local = 0; local < gradients.size(); ++local) {
      gradients[local].has_value() ? Place(*push, local, *gradients[local]) : PlaceAbsent(*push, local);
    }
    return push;
  }

  void Commit(float a, float b) { updater_.Commit({MakePush(a, b)}, now_); }
  void Build(const Updater::Part& ready) {
    if (ready.update == nullptr) return;
    ready.update->Build(ready.slices);
    updater_.OnBuilt(ready.slices);
  }
  // Works until nothing moves.
  void Work() {
    do updater_.StartNext(now_);
    while (pool_.RunPosted());
  }
  std::optional<Outcome> Ended() {
    const auto ended = updater_.TakeEnded();
    return ended.has_value() ? std::optional<Outcome>(ended->outcome) : std::nullopt;
  }
  float Weight(size_t local) { return parameters_.Pin({.rank = 0, .peer = ""}, now_).slice(local)[0]; }

  static constexpr float kMissing = std::numeric_limits<float>::quiet_NaN();
  const TimePoint now_ = TimePoint() + std::chrono::hours(1);
  const std::unique_ptr<Mode> mode_;
  const std::unique_ptr<Optimizer> optimizer_;
  const std::unique_ptr<Optimizer> outer_ = MakeOuterOptimizer("sgd");
  ThreadPool pool_ = ThreadPool(0);
  std::shared_ptr<const ShardLayout> layout_;
  Parameters parameters_;
  Updater updater_;
};

}  // namespace ps
