// Jobs of 2 workers and 2 shards that clip by the global norm: the chief and the shards, joined by queues in place of
// the network, in random orders of slices, reports, messages, measurements, repeated reports, losses, rejoins and a
// change of hyperparameters. Whatever the order: all shards apply the same pushes in the same order, none is applied
// twice, and nobody waits for ever.
#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/cleanup/cleanup.h"
#include "common/layout_proto.h"
#include "common/status.h"
#include "server/chief.h"
#include "server/shard.h"
#include "tests/catch.h"

namespace ps::norm_orders {
namespace {

constexpr uint32_t kShards = 2;
constexpr uint32_t kWorkers = 2;
const Layout kModel = {{"a", {1}}, {"b", {1}}};

struct Size {
  ModeOptions mode;
  uint64_t steps = 3;
  bool loses = true;  // Rank 1, at some time; and it comes back at some later one.
};

enum class Kind { kPush, kReport, kRepeat, kUpdate, kWork, kLose, kRejoin, kSet };

struct Event {
  Kind kind;
  uint32_t worker = 0;
  uint32_t shard = 0;
};

class Job {
 public:
  explicit Job(const Size& size)
      : size_(size),
        chief_({.num_workers = kWorkers, .num_shards = kShards, .mode = size.mode, .lease = std::chrono::hours(100)},
               [](v1::Phase, const std::string&) {}),
        metrics_(*MetricsWriter::Open("", "shard")) {
    for (uint32_t shard = 0; shard < kShards; ++shard) AddShard(shard);
    for (uint32_t rank = 0; rank < kWorkers; ++rank) Join(rank);
    Settle();
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      const uint32_t slice = SlicePlan(kModel, kShards).shard_slices(shard).front();
      REQUIRE(shards_[shard]->AddInitialSlices(workers_[0].id, {Slice(slice, 0)}).ok());
    }
    Settle();
    for (Worker& worker : workers_) Begin(worker, 0);
  }

  std::vector<Event> Possible() const {
    std::vector<Event> events;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      for (uint32_t s = 0; s < kShards; ++s) {
        if (workers_[w].alive && workers_[w].step < size_.steps && !workers_[w].pushed[s] && MayPush(w)) {
          events.push_back({Kind::kPush, w, s});
        }
      }
    }
    for (uint32_t s = 0; s < kShards; ++s) {
      if (!reports_[s].empty()) events.push_back({Kind::kReport, 0, s});
      if (last_norms_[s].has_value()) events.push_back({Kind::kRepeat, 0, s});
      if (!updates_[s].empty()) events.push_back({Kind::kUpdate, 0, s});
      events.push_back({Kind::kWork, 0, s});
    }
    if (size_.loses && !lost_) events.push_back({Kind::kLose, 1});
    if (lost_ && !rejoined_ && !failed()) events.push_back({Kind::kRejoin, 1});
    if (!set_) events.push_back({Kind::kSet});
    return events;
  }

  // Returns whether anything came of it.
  bool Do(const Event& event) {
    const uint32_t s = event.shard;
    bool moved = true;
    switch (event.kind) {
      case Kind::kPush:
        Push(event.worker, s);
        break;
      case Kind::kReport: {
        const v1::ShardReport report = reports_[s].front();
        reports_[s].pop_front();
        if (report.norms_size() > 0) last_norms_[s] = report;
        chief_.OnReport(s, report, now_);
        break;
      }
      case Kind::kRepeat:
        chief_.OnReport(s, *last_norms_[s], now_);
        break;
      case Kind::kUpdate: {
        const v1::ChiefUpdate update = updates_[s].front();
        updates_[s].pop_front();
        for (const v1::NormTotals& totals : update.norms()) refused_ = refused_ || totals.refused();
        shards_[s]->OnChiefUpdate(update);
        break;
      }
      case Kind::kWork:
        moved = shards_[s]->ApplyPosted();
        break;
      case Kind::kLose: {
        v1::LeaveRequest leave;
        *leave.mutable_id() = workers_[event.worker].id;
        leave.set_reason("lost");
        REQUIRE(chief_.Leave(leave, now_).ok());
        workers_[event.worker].alive = false;
        lost_ = true;
        break;
      }
      case Kind::kRejoin:
        rejoined_ = true;
        Join(event.worker);
        break;
      case Kind::kSet: {
        set_ = true;
        v1::SetHyperparametersRequest request;
        v1::Hyperparameter* const value = request.add_values();
        value->set_name("learning_rate");
        value->set_value(0.5F);
        chief_.SetHyperparameters(request, now_, now_ + std::chrono::hours(1), [](const auto&) {});
        break;
      }
    }
    for (Worker& worker : workers_) {
      if (worker.answers[0] && worker.answers[1]) Begin(worker, worker.step + 1);
    }
    return moved;
  }

  // Brings about all that is on its way. What workers have not sent yet stays unsent.
  void Settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (const Kind kind : {Kind::kReport, Kind::kUpdate, Kind::kWork}) {
        for (uint32_t s = 0; s < kShards; ++s) {
          if (kind == Kind::kReport && reports_[s].empty()) continue;
          if (kind == Kind::kUpdate && updates_[s].empty()) continue;
          moved = Do({kind, 0, s}) || moved;
        }
      }
    }
  }

  // Brings about all that happens if nobody is lost any more.
  void Finish() {
    for (bool moved = true; moved;) {
      Settle();
      moved = false;
      for (const Event& event : Possible()) {
        if (event.kind != Kind::kPush) continue;
        Do(event);
        moved = true;
        break;
      }
      // A cut is tried again after a while; a shard that has waited for its end goes on.
      if (moved) continue;
      for (int i = 0; i < 4; ++i) {
        now_ += std::chrono::milliseconds(600);
        chief_.Tick(now_);
        Settle();
      }
      const std::vector<Event> possible = Possible();
      moved = std::any_of(possible.begin(), possible.end(), [](const Event& each) { return each.kind == Kind::kPush; });
    }
  }

  bool failed() const { return failed_; }
  void LookAtPhase() { failed_ = chief_.Status(now_).phase() == v1::PHASE_FAILED; }
  bool all_answered() const {
    for (const Worker& worker : workers_) {
      if (worker.alive && worker.step < size_.steps) return false;
    }
    return true;
  }
  bool refused() const { return refused_; }
  uint64_t applied(uint32_t shard) const { return applied_[shard]; }
  uint64_t Version(uint32_t shard) const { return shards_[shard]->Status(now_).version(); }
  uint64_t stale(uint32_t shard) const { return shards_[shard]->Status(now_).stale(); }
  float Weight(uint32_t shard) {
    float weight = std::nanf("");
    shards_[shard]->Await(nullptr, {.caller = {}, .push = {}, .weights = true, .version = {}, .wait = {}},
                          /*push_ended=*/false, [&](const absl::StatusOr<ShardAnswer>& answer) {
                            if (answer.ok()) weight = answer->weights->weights()[0];
                          });
    return weight;
  }

 private:
  struct Worker {
    v1::Identity id;
    bool alive = false;
    uint64_t step = 0;
    std::array<uint64_t, kShards> pulled = {};
    std::array<bool, kShards> pushed = {};
    std::array<bool, kShards> answers = {};
  };

  void AddShard(uint32_t shard) {
    ShardOptions options;
    options.shard = shard;
    options.num_shards = kShards;
    options.num_workers = kWorkers;
    options.mode = size_.mode;
    options.hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0};
    options.clip.norm = 3;
    options.apply_threads = 0;
    options.clock = [this] { return now_; };
    options.max_inline_slices = 0;
    shards_[shard] = std::make_unique<Shard>(
        options, [this, shard](const v1::ShardReport& report) { reports_[shard].push_back(report); }, metrics_.get());
    v1::Registration registration;
    registration.set_protocol(v1::PROTOCOL_VERSION_1);
    registration.set_shard(shard);
    registration.set_job("default");
    const auto send = [this, shard](const v1::ChiefUpdate& update) { updates_[shard].push_back(update); };
    REQUIRE(chief_.RegisterShard(registration, send, now_).ok());
  }

  void Join(uint32_t rank) {
    v1::JoinRequest request;
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_rank(rank);
    *request.mutable_layout() = ToProto(kModel);
    Worker& worker = workers_[rank];
    chief_.Join(request, now_, now_ + std::chrono::hours(1), [this, &worker](const auto& joined) {
      if (!joined.ok()) return;
      worker.id = joined->id();
      worker.alive = true;
      Begin(worker, joined->start_step());
    });
  }

  // It has read the newest weights, and computes this step on them.
  void Begin(Worker& worker, uint64_t step) {
    worker.step = step;
    worker.pushed = worker.answers = {};
    for (uint32_t s = 0; s < kShards; ++s) worker.pulled[s] = Version(s);
  }

  bool gathers() const { return size_.mode.name == "bsp"; }
  bool MayPush(uint32_t w) const {
    return !gathers() || (Version(0) >= workers_[w].step && Version(1) >= workers_[w].step);
  }

  // Rank r's gradient in step t is (r + 1)·4^t on both shards.
  static float Gradient(uint32_t rank, uint64_t step) { return static_cast<float>((rank + 1) << (2 * step)); }

  static ReceivedSlice Slice(uint32_t index, float value) {
    auto owner = std::make_shared<float>(value);
    return {.index = index,
            .payload = Payload({Piece(reinterpret_cast<const uint8_t*>(owner.get()), sizeof(float))}, owner)};
  }

  void Push(uint32_t w, uint32_t s) {
    Worker& worker = workers_[w];
    worker.pushed[s] = true;
    v1::PushRequest header;
    *header.mutable_id() = worker.id;
    header.set_step(worker.step);
    header.set_version(gathers() ? worker.step : worker.pulled[s]);
    header.set_samples(1);
    const uint32_t slice = SlicePlan(kModel, kShards).shard_slices(s).front();
    if (!shards_[s]->AddSlices(nullptr, header, {Slice(slice, Gradient(w, worker.step))}).ok()) return;
    const auto waits = std::make_pair(worker.id.incarnation(), worker.step);
    shards_[s]->Await(nullptr,
                      {.caller = {.id = worker.id, .peer = ""},
                       .push = worker.step,
                       .weights = false,
                       .version = {},
                       .wait = std::chrono::hours(1000)},
                      /*push_ended=*/true, [this, &worker, s, waits](const absl::StatusOr<ShardAnswer>& answer) {
                        if (!answer.ok() || answer->push->answer() == v1::ANSWER_FENCED) return;
                        if (answer->push->answer() == v1::ANSWER_APPLIED) ++applied_[s];
                        if (std::make_pair(worker.id.incarnation(), worker.step) == waits) worker.answers[s] = true;
                      });
  }

  const Size size_;
  TimePoint now_ = TimePoint() + std::chrono::hours(1);
  Chief chief_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::array<std::deque<v1::ShardReport>, kShards> reports_;
  std::array<std::deque<v1::ChiefUpdate>, kShards> updates_;
  std::array<std::optional<v1::ShardReport>, kShards> last_norms_;
  std::array<Worker, kWorkers> workers_;
  std::array<uint64_t, kShards> applied_ = {};
  bool lost_ = false;
  bool rejoined_ = false;
  bool set_ = false;
  bool refused_ = false;
  bool failed_ = false;
  std::array<std::unique_ptr<Shard>, kShards> shards_;  // Last: their callbacks use the above.
};

struct Counts {
  size_t finished = 0;
  size_t failed = 0;
  size_t refused = 0;
};

Counts Walk(const Size& size, int walks) {
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::off);
  const absl::Cleanup restore = [level] { spdlog::set_level(level); };
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
      job.LookAtPhase();
    }
    job.Finish();
    job.LookAtPhase();
    if (job.refused()) ++counts.refused;
    if (job.failed()) {
      ++counts.failed;
      CHECK(job.Version(0) == job.Version(1));
      continue;
    }
    ++counts.finished;
    CHECK(job.all_answered());
    if (size.mode.max_staleness.has_value()) continue;
    CHECK(job.Version(0) == job.Version(1));
    CHECK(job.Weight(0) == job.Weight(1));
    CHECK(job.stale(0) + job.stale(1) == 0);
  }
  return counts;
}

TEST_CASE("bsp that clips by the global norm: a step is on all shards or on none, in random orders") {
  const Counts counts = Walk({.mode = {.name = "bsp"}, .steps = 2}, 300);
  CHECK(counts.finished > 50);
  CHECK(counts.failed > 50);
  CHECK(counts.refused == 0);
}

TEST_CASE("asp and ssp that clip by the global norm apply the same pushes in one order on all shards") {
  for (const char* mode : {"asp", "ssp"}) {
    const Counts counts = Walk({.mode = {.name = mode, .staleness = 100}}, 300);
    CHECK(counts.finished == 300);
    CHECK(counts.refused == 0);
  }
}

TEST_CASE("A push that one shard refuses as stale before all have measured it keeps no other waiting") {
  ModeOptions mode = {.name = "asp"};
  for (const uint64_t staleness : {0, 1}) {
    mode.max_staleness = staleness;
    const Counts counts = Walk({.mode = mode}, 300);
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
