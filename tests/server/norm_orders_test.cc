// Jobs of 2 workers and 2 shards that clip by the global norm: the chief and the shards, joined by queues in place of
// the network, in random orders of slices, reports, messages, measurements, repeated reports, losses, rejoins and a
// change of hyperparameters. Whatever the order: all shards apply the same pushes in the same order, each push that is
// answered as applied was applied once and no other was, and nobody waits for ever.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "tests/catch.h"
#include "tests/server/small_job.h"

namespace ps::norm_orders {
namespace {

struct Size {
  ModeOptions mode;
  uint64_t steps = 3;
  bool loses = true;  // Rank 1, at some time; and it comes back at some later one.
  float norm = 3;     // That gradients are clipped to.
};

enum class Kind { kPush, kReport, kRepeat, kUpdate, kWork, kLose, kRejoin, kSet };

struct Event {
  Kind kind;
  uint32_t worker = 0;
  uint32_t shard = 0;
};

// Rank, incarnation and step.
using PushId = std::tuple<uint32_t, uint64_t, uint64_t>;

class Job : public SmallJob {
 public:
  explicit Job(const Size& size)
      : SmallJob({.mode = size.mode, .steps = size.steps, .clip = {.norm = size.norm}}), loses_(size.loses) {}

  std::vector<Event> Possible() {
    std::vector<Event> events;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      for (uint32_t s = 0; s < kShards; ++s) {
        if (MayPush(w, s) && HasRead(w)) events.push_back({Kind::kPush, w, s});
      }
    }
    for (uint32_t s = 0; s < kShards; ++s) {
      if (!reports_[s].empty()) events.push_back({Kind::kReport, 0, s});
      if (last_norms_[s].has_value()) events.push_back({Kind::kRepeat, 0, s});
      if (!updates_[s].empty()) events.push_back({Kind::kUpdate, 0, s});
      events.push_back({Kind::kWork, 0, s});
    }
    if (loses_ && !lost_) events.push_back({Kind::kLose, 1});
    if (lost_ && !rejoined_ && !failed()) events.push_back({Kind::kRejoin, 1});
    if (!set_) events.push_back({Kind::kSet});
    return events;
  }

  void Do(const Event& event) {
    switch (event.kind) {
      case Kind::kPush:
        return Push(event.worker, event.shard);
      case Kind::kReport:
        return Report(event.shard);
      case Kind::kRepeat:
        return Repeat(event.shard, *last_norms_[event.shard]);
      case Kind::kUpdate:
        return Update(event.shard);
      case Kind::kWork:
        Work(event.shard);
        return;
      case Kind::kLose:
        lost_ = true;
        return Lose(event.worker);
      case Kind::kRejoin:
        rejoined_ = true;
        return Join(event.worker);
      case Kind::kSet:
        set_ = true;
        return Set();
    }
  }

  // Brings about all that happens if nobody is lost any more.
  void Finish() {
    for (bool moved = true; moved;) {
      Settle();
      moved = PushNext();
      // A cut is tried again after a while; a shard that has waited for its end goes on.
      for (int i = 0; !moved && i < 4; ++i) {
        now_ += std::chrono::milliseconds(600);
        chief_->Tick(now_);
        Settle();
      }
      moved = moved || PushNext();
    }
  }

  bool lost() const { return lost_; }
  // Some push was refused on all shards, since one had refused it.
  bool refused() const { return refused_; }
  uint64_t stale(uint32_t shard) const { return ShardStatus(shard).stale(); }

  // The pushes that were answered as applied are those that versions were made of. Where rank 1 was lost, the answer to
  // its last one may not have come. To be asked in the end.
  void CheckAnswers() const {
    const uint64_t pushes = plan_.mode.name == "bsp" ? kWorkers : 1;  // A version.
    for (uint32_t s = 0; s < kShards; ++s) {
      const uint64_t made = pushes * Version(s);
      CHECK(applied_[s].size() <= made);
      CHECK(applied_[s].size() + (lost_ ? 1 : 0) >= made);
    }
    // On all shards the same.
    for (uint32_t s = 0; s < kShards; ++s) {
      for (const PushId& push : applied_[s]) {
        const bool owner = std::get<1>(push) == workers_[std::get<0>(push)].id.incarnation();
        if (owner && workers_[std::get<0>(push)].alive) CHECK(applied_[1 - s].contains(push));
      }
    }
  }
  // Where every gradient's norm is above the limit, each version moves the weight by as much: so the weight tells how
  // many were made, and how many of them after the change of the learning rate.
  void CheckWeight(uint32_t shard, float norm) {
    const uint64_t version = Version(shard);
    CHECK(set_ == set_from_[shard].has_value());
    const uint64_t before = std::min(version, set_from_[shard].value_or(UINT64_MAX) - 1);
    const double rates = static_cast<double>(before) + kChangedRate * static_cast<double>(version - before);
    CHECK(std::abs(Weight(shard) + rates * norm / std::sqrt(2.0)) < 1e-5);
  }

 private:
  static constexpr float kChangedRate = 0.5F;

  void OnReport(uint32_t shard, const v1::ShardReport& report) override {
    if (report.norms_size() > 0) last_norms_[shard] = report;
  }
  void OnUpdate(uint32_t /*shard*/, const v1::ChiefUpdate& update) override {
    for (const v1::NormTotals& totals : update.norms()) refused_ = refused_ || totals.refused();
  }
  void OnAnswer(uint32_t shard, const v1::Identity& id, uint64_t step, v1::Answer answer) override {
    if (answer == v1::ANSWER_APPLIED) CHECK(applied_[shard].insert({id.rank(), id.incarnation(), step}).second);
  }

  // In bsp: the weights of its step, on all shards.
  bool HasRead(uint32_t w) const {
    return plan_.mode.name != "bsp" || (Version(0) >= workers_[w].step && Version(1) >= workers_[w].step);
  }

  // Returns whether there was one.
  bool PushNext() {
    for (const Event& event : Possible()) {
      if (event.kind != Kind::kPush) continue;
      Do(event);
      return true;
    }
    return false;
  }

  void Set() {
    v1::SetHyperparametersRequest request;
    v1::Hyperparameter* const value = request.add_values();
    value->set_name("learning_rate");
    value->set_value(kChangedRate);
    chief_->SetHyperparameters(request, now_, now_ + std::chrono::hours(1), [this](const auto& reply) {
      if (!reply.ok()) return;  // The job has failed.
      for (uint32_t s = 0; s < kShards; ++s) set_from_[s] = reply->shards(static_cast<int>(s)).version();
    });
  }

  const bool loses_;
  std::array<std::optional<v1::ShardReport>, kShards> last_norms_;
  std::array<std::set<PushId>, kShards> applied_;  // By the answers to their workers.
  bool lost_ = false;
  bool rejoined_ = false;
  bool set_ = false;
  std::array<std::optional<uint64_t>, kShards> set_from_;  // The first version with the changed rate.
  bool refused_ = false;
};

struct Counts {
  size_t finished = 0;
  size_t failed = 0;
  size_t refused = 0;
};

constexpr float kSmallNorm = 0.5F;  // Below that of every gradient.

Counts Walk(const Size& size, int walks) {
  const QuietLog quiet;
  std::mt19937 random(17);
  Counts counts;
  for (int walk = 0; walk < walks; ++walk) {
    CAPTURE(size.mode.name, walk);
    Job job(size);
    const size_t longest = random() % 120;
    for (size_t i = 0; i < longest; ++i) {
      const std::vector<Event> possible = job.Possible();
      // A loss in a walk of many events would else come soon in all of them.
      const Event& event = possible[random() % possible.size()];
      if (event.kind == Kind::kLose && random() % 8 != 0) continue;
      job.Do(event);
    }
    job.Finish();
    if (job.refused()) ++counts.refused;
    if (job.failed()) {
      ++counts.failed;
      CHECK(job.Version(0) == job.Version(1));
      continue;
    }
    ++counts.finished;
    CHECK(job.all_answered());
    if (size.norm == kSmallNorm) {
      for (uint32_t shard = 0; shard < Job::kShards; ++shard) job.CheckWeight(shard, size.norm);
    }
    if (size.mode.max_staleness.has_value()) continue;
    job.CheckAnswers();
    CHECK(job.Version(0) == job.Version(1));
    CHECK(job.Weight(0) == job.Weight(1));
    CHECK(job.stale(0) + job.stale(1) == 0);
  }
  return counts;
}

TEST_CASE("bsp that clips by the global norm: a step is on all shards or on none, in random orders") {
  for (const float norm : {3.0F, kSmallNorm}) {
    const Counts counts = Walk({.mode = {.name = "bsp"}, .steps = 2, .norm = norm}, 300);
    CHECK(counts.finished > 50);
    CHECK(counts.failed > 50);
    CHECK(counts.refused == 0);
  }
}

TEST_CASE("asp and ssp that clip by the global norm apply the same pushes in one order on all shards") {
  for (const char* mode : {"asp", "ssp"}) {
    for (const float norm : {3.0F, kSmallNorm}) {
      const Counts counts = Walk({.mode = {.name = mode, .staleness = 100}, .norm = norm}, 300);
      CHECK(counts.finished == 300);
      CHECK(counts.refused == 0);
    }
  }
}

TEST_CASE("A push that one shard refuses as stale before all have measured it keeps no other waiting") {
  ModeOptions mode = {.name = "asp"};
  for (const uint64_t staleness : {0, 1}) {
    mode.max_staleness = staleness;
    const Counts counts = Walk({.mode = mode, .norm = kSmallNorm}, 300);
    CHECK(counts.finished == 300);
    CHECK(counts.refused > 20);
  }
}

TEST_CASE("A mean gradient over two shards is clipped to the norm that both have together") {
  Job job({.mode = {.name = "bsp"}, .steps = 2, .loses = false});
  job.Finish();
  CHECK(job.Version(0) == 2);
  // Means of 1 and 2, and of 4 and 8: the norm of the second is sqrt(72).
  const auto factor = static_cast<float>(3 / (std::sqrt(72.0) + 1e-6));
  CHECK(job.Weight(0) == -1.5F - factor * 6);
  CHECK(job.Weight(1) == job.Weight(0));
}

}  // namespace
}  // namespace ps::norm_orders
