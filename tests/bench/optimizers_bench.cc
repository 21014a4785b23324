#include "tests/bench/optimizers_bench.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/optimizers/optimizer.h"
#include "common/simd.h"
#include "common/status.h"
#include "common/sync.h"
#include "server/engine/updater.h"

namespace ps {
namespace {

constexpr int64_t kLargeElements = int64_t{16} << 20;
constexpr int kSmallTensors = 160;
constexpr float kSmallGradient = 0.001F;
constexpr std::chrono::minutes kUpdateLimit(5);

// Networks have such: most are biases and scales of 64 to 2,048 elements, and one in eight is a matrix.
Layout SmallTensors() {
  Layout layout;
  layout.reserve(kSmallTensors);
  for (int i = 0; i < kSmallTensors; ++i) {
    const int64_t elements = i % 8 < 6 ? int64_t{64} << (i % 6) : i % 8 == 6 ? 9216 : 65536;
    layout.push_back({absl::StrCat("tensor", i), {elements}});
  }
  return layout;
}

// The outer ones are what servers apply differences of weights with.
constexpr char kOuter[] = "outer nesterov";
constexpr char kDelayed[] = "delayed nesterov";

std::unique_ptr<Optimizer> OptimizerOf(const std::string& name) {
  if (name == kOuter) return MakeOuterOptimizer("nesterov");
  if (name == kDelayed) return MakeDelayedNesterov(/*buffer=*/4, /*momentum=*/true);
  return *MakeOptimizer(name);
}

Hyperparameters HyperparametersOf(const std::string& name) {
  Hyperparameters values = DefaultHyperparameters(name);
  values.outer_lr = 0.7F;
  values.outer_momentum = 0.9F;
  return values;
}

int64_t Elements(const Layout& layout) {
  int64_t elements = 0;
  for (const TensorSpec& tensor : layout) elements += tensor.elements();
  return elements;
}

// What work on the pool's threads reports its end to.
class Ending {
 public:
  void Set(bool good) {
    MutexLock lock(mutex_);
    ended_ = true;
    good_ = good_ && good;
    changed_.NotifyAll();
  }
  // Waits for it, and makes ready for the next. False if it failed, or took too long.
  bool Await() {
    MutexLock lock(mutex_);
    const TimePoint deadline = Now() + kUpdateLimit;
    while (!ended_) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    ended_ = false;
    return good_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool good_ ABSL_GUARDED_BY(mutex_) = true;
};

// A shard's updates of one model, each of one push.
class ShardUpdates {
 public:
  ShardUpdates(const std::string& optimizer, const Layout& layout, int threads)
      : optimizer_(OptimizerOf(optimizer)),
        hyperparameters_(HyperparametersOf(optimizer)),
        layout_(std::make_shared<const ShardLayout>(layout, 0, 1)),
        gradient_(std::make_shared<std::vector<float>>(layout_->elements(), kSmallGradient)),
        pool_(threads),
        parameters_(layout_, InitialState(), /*limits=*/2, /*max_kept=*/0, [] {}),
        updater_(*mode_, *optimizer_, *differences_, hyperparameters_, /*clip=*/{}, /*max_inline_elements=*/0, pool_,
                 [this](const std::vector<size_t>& slices) { OnBuilt(slices); }) {
    updater_.SetParameters(&parameters_, layout_);
    push_->samples = 1;
    const auto* bytes = reinterpret_cast<const uint8_t*>(gradient_->data());
    for (size_t local = 0; local < layout_->slices(); ++local) {
      const auto size = static_cast<size_t>(layout_->slice(local).bytes());
      push_->slices.push_back(Payload({Piece(bytes, size)}, gradient_));
      bytes += size;
    }
    push_->received = push_->slices.size();
  }
  ~ShardUpdates() { pool_.Stop(); }
  ShardUpdates(const ShardUpdates&) = delete;
  ShardUpdates& operator=(const ShardUpdates&) = delete;

  void Update() {
    {
      MutexLock lock(mutex_);
      updater_.Commit({push_}, Now());
      updater_.StartNext(Now());
    }
    good_ = ending_.Await() && good_;
    ++push_->version;
  }

  // That an update must move.
  double bytes() const {
    const int measured = optimizer_->uses_trust_ratio() ? 2 + optimizer_->state_tensors() : 0;  // Read before.
    const int floats = 3 + 2 * optimizer_->state_tensors() + measured;
    return static_cast<double>(layout_->bytes()) * floats;
  }

  // Every weight is what the optimizer makes of it alone.
  absl::Status Check() {
    float weight = 0;
    std::vector<float> state = InitialState();
    state.resize(kMaxStateTensors);
    OptimizerBlock block = {.elements = 1, .gradient = &kSmallGradient, .weights = &weight, .new_weights = &weight};
    for (size_t k = 0; k < state.size(); ++k) block.state[k] = block.new_state[k] = &state[k];
    for (uint64_t update = 1; update <= push_->version; ++update) {
      UpdateContext context = {.update = update, .hyperparameters = hyperparameters_};
      context.trust_ratio = TrustRatio(optimizer_->Measure(block, context, BestIsa()));
      optimizer_->Apply(block, context, BestIsa());
    }
    // Norms of many equal weights are rounded otherwise than those of one.
    const float tolerance = optimizer_->uses_trust_ratio() ? 1e-3F * std::abs(weight) : 0;
    MutexLock lock(mutex_);
    if (!good_) return absl::InternalError("an update failed");
    const VersionPin pin = parameters_.Pin({.rank = 0, .peer = "ps_bench"}, Now());
    for (size_t local = 0; local < layout_->slices(); ++local) {
      for (const float each : pin.slice(local)) {
        if (std::abs(each - weight) <= tolerance) continue;
        return absl::InternalError(
            absl::StrCat(layout_->tensor(local).name, ": a weight is ", each, ", expected ", weight));
      }
    }
    return absl::OkStatus();
  }

 private:
  std::vector<float> InitialState() const {
    std::vector<float> state;
    state.reserve(static_cast<size_t>(optimizer_->state_tensors()));
    for (int k = 0; k < optimizer_->state_tensors(); ++k) {
      state.push_back(optimizer_->InitialState(k, hyperparameters_));
    }
    return state;
  }

  void OnBuilt(const std::vector<size_t>& slices) {
    MutexLock lock(mutex_);
    updater_.OnBuilt(slices);
    const std::optional<Updater::Ended> ended = updater_.TakeEnded();
    if (!ended.has_value()) {  // It was measured, and is built now.
      updater_.StartNext(Now());
      return;
    }
    ending_.Set(ended.has_value() && ended->outcome == Updater::Ended::Outcome::kPublished);
  }

  const std::unique_ptr<Optimizer> optimizer_;
  const std::unique_ptr<Optimizer> differences_ = MakeOuterOptimizer("sgd");
  const Hyperparameters hyperparameters_;
  const std::unique_ptr<Mode> mode_ = MakeMode({}, 1);
  const std::shared_ptr<const ShardLayout> layout_;
  const std::shared_ptr<std::vector<float>> gradient_;
  const std::shared_ptr<Push> push_ = std::make_shared<Push>();
  Ending ending_;
  bool good_ = true;
  ThreadPool pool_;
  Mutex mutex_;
  Parameters parameters_;  // Under the mutex, as the next.
  Updater updater_;
};

// The optimizer alone, over one tensor with a gradient that lies in one piece; each thread has its part.
class Kernels {
 public:
  Kernels(const std::string& optimizer, int64_t elements, int threads)
      : optimizer_(OptimizerOf(optimizer)),
        hyperparameters_(HyperparametersOf(optimizer)),
        threads_(static_cast<size_t>(threads)),
        part_(static_cast<size_t>(elements) / threads_),
        gradient_(part_ * threads_, kSmallGradient),
        weights_(gradient_.size()),
        pool_(threads) {
    for (int k = 0; k < optimizer_->state_tensors(); ++k) {
      state_[k].assign(gradient_.size(), optimizer_->InitialState(k, hyperparameters_));
    }
  }
  ~Kernels() { pool_.Stop(); }
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  void Update() {
    ++update_;
    pool_.Post(
        threads_, [this](size_t i) { UpdatePart(i * part_); }, [this] { ending_.Set(true); });
    good_ = ending_.Await() && good_;
  }
  bool good() const { return good_; }

 private:
  void UpdatePart(size_t begin) {
    const FlushSubnormals flush;
    OptimizerBlock block = {
        .elements = part_, .gradient = &gradient_[begin], .weights = &weights_[begin], .new_weights = &weights_[begin]};
    for (int k = 0; k < optimizer_->state_tensors(); ++k) block.state[k] = block.new_state[k] = &state_[k][begin];
    UpdateContext context = {.update = update_, .hyperparameters = hyperparameters_};
    if (optimizer_->uses_trust_ratio())
      context.trust_ratio = TrustRatio(optimizer_->Measure(block, context, BestIsa()));
    optimizer_->Apply(block, context, BestIsa());
  }

  const std::unique_ptr<Optimizer> optimizer_;
  const Hyperparameters hyperparameters_;
  const size_t threads_;
  const size_t part_;  // A thread's share, in elements.
  const std::vector<float> gradient_;
  std::vector<float> weights_;
  std::vector<float> state_[kMaxStateTensors];
  uint64_t update_ = 0;
  Ending ending_;
  bool good_ = true;
  ThreadPool pool_;
};

// Copies that read and write so many bytes together, each thread its part.
class Copies {
 public:
  Copies(double bytes, int threads)
      : threads_(static_cast<size_t>(threads)),
        from_(static_cast<size_t>(bytes) / 2 / threads_ * threads_, 1),
        to_(from_.size()),
        pool_(threads) {}
  ~Copies() { pool_.Stop(); }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  void Copy() {
    const size_t part = from_.size() / threads_;
    pool_.Post(
        threads_, [this, part](size_t i) { std::memcpy(&to_[i * part], &from_[i * part], part); },
        [this] { ending_.Set(true); });
    good_ = ending_.Await() && good_;
  }
  bool good() const { return good_ && to_ == from_; }

 private:
  const size_t threads_;
  const std::vector<uint8_t> from_;
  std::vector<uint8_t> to_;
  Ending ending_;
  bool good_ = true;
  ThreadPool pool_;
};

std::string Megabytes(int64_t elements) { return absl::StrFormat("%.1f MB", static_cast<double>(elements) * 4 / 1e6); }

std::string Threads(int threads) { return absl::StrCat(threads, threads == 1 ? " thread" : " threads"); }

// A copy, the optimizer alone, and a server's update of one large tensor.
absl::Status MeasureLarge(const std::string& optimizer, int threads, int repeats, std::vector<Measurement>& rows) {
  ShardUpdates updates(optimizer, {{"w", {kLargeElements}}}, threads);
  Kernels kernels(optimizer, kLargeElements, threads);
  Copies copies(updates.bytes(), threads);
  std::vector<Measurement> measured = MeasureInTurn(
      repeats, updates.bytes(), {[&] { copies.Copy(); }, [&] { kernels.Update(); }, [&] { updates.Update(); }});
  PS_RETURN_IF_ERROR(Annotate(updates.Check(), optimizer));
  if (!copies.good() || !kernels.good()) return absl::InternalError("a copy is wrong, or took too long");
  const std::string size = absl::StrCat(" ", Megabytes(kLargeElements), ", ", Threads(threads));
  measured[0].name = absl::StrCat("a copy, ", Threads(threads));
  measured[1].name = absl::StrCat(optimizer, " alone,", size);
  measured[2].name = absl::StrCat(optimizer, ", update,", size);
  rows.insert(rows.end(), measured.begin(), measured.end());
  return absl::OkStatus();
}

// A server's update of one tensor, and of small ones of the same size.
absl::Status MeasureSmall(const std::string& optimizer, int threads, int repeats, std::vector<Measurement>& rows) {
  const Layout small = SmallTensors();
  ShardUpdates one(optimizer, {{"w", {Elements(small)}}}, threads);
  ShardUpdates many(optimizer, small, threads);
  std::vector<Measurement> measured =
      MeasureInTurn(repeats, many.bytes(), {[&] { one.Update(); }, [&] { many.Update(); }});
  PS_RETURN_IF_ERROR(Annotate(one.Check(), optimizer));
  PS_RETURN_IF_ERROR(Annotate(many.Check(), optimizer));
  const std::string size = absl::StrCat(" ", Megabytes(Elements(small)), ", ", Threads(threads));
  measured[0].name = absl::StrCat(optimizer, ", update,", size);
  measured[1].name = absl::StrCat(optimizer, ", ", small.size(), " tensors,", size);
  rows.insert(rows.end(), measured.begin(), measured.end());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Measurement>> RunOptimizersBench(int repeats) {
  std::vector<Measurement> rows;
  for (const int threads : {1, 2}) {
    std::vector<std::string> names = OptimizerNames();
    names.insert(names.end(), {kOuter, kDelayed});
    for (const std::string& optimizer : names) {
      PS_RETURN_IF_ERROR(MeasureLarge(optimizer, threads, repeats, rows));
      PS_RETURN_IF_ERROR(MeasureSmall(optimizer, threads, repeats, rows));
    }
  }
  return rows;
}

}  // namespace ps
