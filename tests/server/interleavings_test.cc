// Small jobs of 2 workers and 2 shards in bsp and backup: the chief and the shards, joined by queues in place of the
// network. Every order in which slices, the building of the next version, reports and decisions can be brought about is
// enumerated, and in each of them every point at which a worker can be lost.
#include <array>
#include <deque>
#include <functional>
#include <random>
#include <set>

#include <spdlog/spdlog.h>
#include "absl/cleanup/cleanup.h"
#include "common/layout_proto.h"
#include "common/status.h"
#include "server/chief.h"
#include "server/shard.h"
#include "tests/catch.h"

namespace ps {
namespace {

constexpr uint32_t kShards = 2;
constexpr uint32_t kWorkers = 2;

struct Size {
  uint64_t steps = 1;
  uint32_t slices = 1;  // Of each shard.
  std::string mode = "bsp";
};

enum class Kind { kPush, kReport, kUpdate, kBuild, kLose };

struct Event {
  Kind kind;
  uint32_t worker = 0;
  uint32_t shard = 0;
};

class Job {
 public:
  explicit Job(const Size& size)
      : size_(size),
        chief_({.num_workers = kWorkers, .num_shards = kShards, .mode = {.name = size.mode}, .schedule = Falling()},
               [](v1::Phase, const std::string&) {}),
        metrics_(*MetricsWriter::Open("", "shard")) {
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      ShardOptions options;
      options.shard = shard;
      options.num_shards = kShards;
      options.mode.name = size_.mode;
      options.num_workers = kWorkers;
      options.schedule = Falling();
      options.hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0};
      options.apply_threads = 0;
      options.clock = [this] { return now_; };
      options.max_inline_slices = 0;  // All is built by events of their own.
      shards_[shard] = std::make_unique<Shard>(
          options, [this, shard](const v1::ShardReport& report) { reports_[shard].push_back(report); }, metrics_.get());
      v1::Registration registration;
      registration.set_protocol(v1::PROTOCOL_VERSION_1);
      registration.set_shard(shard);
      registration.set_job("default");
      REQUIRE(chief_
                  .RegisterShard(
                      registration, [this, shard](const v1::ChiefUpdate& update) { updates_[shard].push_back(update); },
                      now_)
                  .ok());
    }
    for (uint32_t rank = 0; rank < kWorkers; ++rank) Join(rank);
    const SlicePlan plan(Model(), kShards);
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      slices_[shard] = plan.shard_slices(shard);
      REQUIRE(slices_[shard].size() == size_.slices);
      for (const uint32_t slice : slices_[shard]) {
        REQUIRE(shards_[shard]->AddInitialSlices(workers_[0].id, {Slice(slice, 0)}).ok());
      }
    }
    Settle();
  }

  // What can happen next.
  std::vector<Event> Possible() const {
    std::vector<Event> events;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      for (uint32_t s = 0; s < kShards; ++s) {
        if (workers_[w].alive && workers_[w].step < size_.steps && workers_[w].pushed[s] < size_.slices &&
            Version(s) >= workers_[w].step) {  // In backup one shard may be ahead for a moment.
          events.push_back({Kind::kPush, w, s});
        }
      }
      if (workers_[w].alive && !someone_lost_) events.push_back({Kind::kLose, w});
    }
    for (uint32_t s = 0; s < kShards; ++s) {
      if (!reports_[s].empty()) events.push_back({Kind::kReport, 0, s});
      if (!updates_[s].empty()) events.push_back({Kind::kUpdate, 0, s});
      if (to_build_[s]) events.push_back({Kind::kBuild, 0, s});
    }
    return events;
  }

  void Do(const Event& event) {
    const uint32_t s = event.shard;
    switch (event.kind) {
      case Kind::kPush:
        Push(event.worker, s);
        break;
      case Kind::kReport: {
        const v1::ShardReport report = reports_[s].front();
        reports_[s].pop_front();
        for (const auto& done : report.complete()) complete_.insert({s, done.rank(), done.step()});
        chief_.OnReport(s, report, now_);
        break;
      }
      case Kind::kUpdate: {
        const v1::ChiefUpdate update = updates_[s].front();
        updates_[s].pop_front();
        shards_[s]->OnChiefUpdate(update);
        to_build_[s] = to_build_[s] || update.decisions_size() > 0;
        break;
      }
      case Kind::kBuild:
        built_ = shards_[s]->ApplyPosted() || built_;
        to_build_[s] = false;
        break;
      case Kind::kLose: {
        v1::LeaveRequest leave;
        *leave.mutable_id() = workers_[event.worker].id;
        leave.set_reason("lost");
        REQUIRE(chief_.Leave(leave, now_).ok());
        workers_[event.worker].alive = false;
        someone_lost_ = true;
        break;
      }
    }
    for (Worker& worker : workers_) worker.NextStepIfAnswered();
  }
  // Some build was an event of its own.
  bool built() const { return built_; }

  // Brings about all that happens if nobody is lost any more.
  void Finish() {
    for (Settle();; Settle()) {
      std::vector<Event> possible = Possible();
      std::erase_if(possible, [](const Event& event) { return event.kind == Kind::kLose; });
      if (possible.empty()) return;
      Do(possible.front());
    }
  }

  // Brings about all that is on its way. What workers have not sent yet stays unsent.
  void Settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (const Event& event : Possible()) {
        if (event.kind == Kind::kPush || event.kind == Kind::kLose) continue;
        Do(event);
        moved = true;
        break;
      }
    }
  }

  uint64_t Version(uint32_t shard) const { return shards_[shard]->Status(now_).version(); }
  bool failed() { return chief_.Status(now_).phase() == v1::PHASE_FAILED; }
  bool all_answered() const {
    return std::all_of(workers_.begin(), workers_.end(),
                       [this](const Worker& w) { return !w.alive || w.step >= size_.steps; });
  }

  // The weight that all of the shard's slices have in the version that it is at. Only while the job lives.
  float Weight(uint32_t shard) {
    float weight = -1;
    shards_[shard]->Await(nullptr, {.caller = {}, .push = {}, .weights = true, .version = {}, .wait = {}},
                          /*push_ended=*/false, [&](const absl::StatusOr<ShardAnswer>& answer) {
                            if (!answer.ok()) return;
                            weight = answer->weights->weights()[0];
                            for (size_t local = 0; local < answer->weights->layout().slices(); ++local) {
                              CHECK(answer->weights->slice(local)[0] == weight);
                            }
                          });
    return weight;
  }

  // Everything that tells one state from another, but for the values of weights, which follow from the versions.
  std::string Fingerprint() {
    std::string text;
    for (uint32_t s = 0; s < kShards; ++s) {
      text += shards_[s]->Status(now_).SerializeAsString() + "|";
      for (const auto& report : reports_[s]) text += report.SerializeAsString() + ";";
      for (const auto& update : updates_[s]) text += update.SerializeAsString() + ";";
      text += to_build_[s] ? "b" : "-";
    }
    for (const Worker& w : workers_) {
      text += std::to_string(w.step) + (w.alive ? "alive" : "lost");
      for (uint32_t s = 0; s < kShards; ++s)
        text += std::to_string(w.pushed[s]) + (w.answers[s] ? "a" : "-") + std::to_string(w.next_step);
    }
    for (const auto& [s, rank, step] : complete_) text += std::to_string(100 * s + 10 * rank + step) + ",";
    return text;
  }

 private:
  struct Worker {
    v1::Identity id;
    bool alive = true;
    uint64_t step = 0;
    std::array<uint32_t, kShards> pushed = {};  // Slices.
    std::array<bool, kShards> answers = {};     // APPLIED or STALE came.
    uint64_t next_step = 0;                     // The highest that an answer named.
    void NextStepIfAnswered() {
      if (!answers[0] || !answers[1]) return;
      step = next_step;
      pushed = {};
      answers = {};
    }
  };

  // In backup the learning rate tells at which position of a schedule a version was made, late pushes counted.
  ScheduleOptions Falling() const {
    if (size_.mode != "backup") return {};
    return {.schedule = "linear", .schedule_length = "64samples"};
  }

  Layout Model() const {
    Layout layout;
    for (uint32_t tensor = 0; tensor < kShards * size_.slices; ++tensor) {
      layout.push_back({.name = std::string(1, static_cast<char>('a' + tensor)), .shape = {1}});
    }
    return layout;
  }

  void Join(uint32_t rank) {
    v1::JoinRequest request;
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_rank(rank);
    *request.mutable_layout() = ToProto(Model());
    absl::StatusOr<v1::JoinReply> joined = absl::UnknownError("no answer");
    chief_.Join(request, now_, now_ + std::chrono::seconds(1), [&](const auto& answer) { joined = answer; });
    Settle();
    REQUIRE(joined.ok());
    workers_[rank].id = joined->id();
  }

  // Rank r's gradient in step t is (r + 1)·4^t, so that every set of contributions has a sum of its own.
  static float Gradient(uint32_t rank, uint64_t step) { return static_cast<float>((rank + 1) << (2 * step)); }

  static ReceivedSlice Slice(uint32_t index, float value) {
    auto owner = std::make_shared<float>(value);
    return {.index = index,
            .payload = Payload({Piece(reinterpret_cast<const uint8_t*>(owner.get()), sizeof(float))}, owner)};
  }

  void Push(uint32_t w, uint32_t s) {
    Worker& worker = workers_[w];
    v1::PushRequest header;
    *header.mutable_id() = worker.id;
    header.set_step(worker.step);
    header.set_version(worker.step);
    header.set_samples(1);
    const uint32_t slice = slices_[s][worker.pushed[s]++];
    // Of all that both have pushed here in this step, something is new.
    const Worker& other = workers_[1 - w];
    if (other.step == worker.step && other.pushed[s] > 0) to_build_[s] = true;
    const absl::Status added = shards_[s]->AddSlices(nullptr, header, {Slice(slice, Gradient(w, worker.step))});
    if (!added.ok() || worker.pushed[s] < size_.slices) return;  // If not, the shard knows that the job failed.
    shards_[s]->Await(nullptr,
                      {.caller = {.id = worker.id, .peer = ""},
                       .push = worker.step,
                       .weights = false,
                       .version = {},
                       .wait = std::chrono::hours(1)},
                      /*push_ended=*/true, [&worker, s](const absl::StatusOr<ShardAnswer>& answer) {
                        if (!answer.ok() || answer->push->answer() == v1::ANSWER_FENCED) return;
                        worker.answers[s] = true;
                        worker.next_step = std::max(worker.next_step, answer->push->next_step());
                      });
  }

  const Size size_;
  const TimePoint now_ = TimePoint() + std::chrono::hours(1);
  Chief chief_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::array<std::deque<v1::ShardReport>, kShards> reports_;
  std::array<std::deque<v1::ChiefUpdate>, kShards> updates_;
  std::array<std::vector<uint32_t>, kShards> slices_;
  std::array<bool, kShards> to_build_ = {};
  bool built_ = false;
  std::array<Worker, kWorkers> workers_;
  std::set<std::tuple<uint32_t, uint32_t, uint64_t>> complete_;
  bool someone_lost_ = false;
  std::array<std::unique_ptr<Shard>, kShards> shards_;  // Last: their callbacks use the above.
};

struct Counts {
  size_t states = 0;
  size_t built = 0;
  size_t finished = 0;
  size_t failed = 0;
  std::set<uint64_t> versions_at_failure;
};

// Goes on from the state after `path` until nothing is on its way, and looks at what the job came to.
void CheckOutcome(const Size& size, const std::vector<Event>& path, Counts* counts) {
  Job job(size);
  for (const Event& event : path) job.Do(event);
  job.Settle();
  CHECK(job.Version(0) == job.Version(1));
  if (job.built()) ++counts->built;
  if (size.mode == "backup") {
    // Each rank's gradient of each step is another, so equal weights are of equal sets.
    CHECK(job.Weight(0) == job.Weight(1));
    job.Finish();
    CHECK(job.all_answered());
    CHECK(job.Version(0) == size.steps);
    CHECK(job.Version(1) == size.steps);
    CHECK(job.Weight(0) == job.Weight(1));
    counts->failed += job.failed() ? 1 : 0;
    return;
  }
  if (job.failed()) {
    ++counts->failed;
    counts->versions_at_failure.insert(job.Version(0));
    return;
  }
  const float expected[] = {0, -1.5F, -7.5F};  // Means of the gradients 1, 2 and 4, 8, taken off one after the other.
  for (uint32_t shard = 0; shard < kShards; ++shard) CHECK(job.Weight(shard) == expected[job.Version(shard)]);
  if (job.all_answered()) ++counts->finished;
}

Counts Enumerate(const Size& size) {
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::off);  // Thousands of jobs are started and lost.
  const absl::Cleanup restore = [level] { spdlog::set_level(level); };
  Counts counts;
  std::set<std::string> seen;
  std::vector<std::vector<Event>> paths = {{}};
  while (!paths.empty()) {
    const std::vector<Event> path = std::move(paths.back());
    paths.pop_back();
    Job job(size);
    for (const Event& event : path) job.Do(event);
    if (!seen.insert(job.Fingerprint()).second) continue;
    ++counts.states;
    CheckOutcome(size, path, &counts);
    for (const Event& event : job.Possible()) {
      paths.push_back(path);
      paths.back().push_back(event);
    }
  }
  return counts;
}

// The enumeration reached what it is about: jobs that end well, losses before, between and after the steps, and builds
// that wait while other things happen.
void CheckReached(const Counts& counts, size_t states, const std::set<uint64_t>& versions_at_failure) {
  CHECK(counts.states > states);
  CHECK(counts.built > 0);
  CHECK(counts.finished > 0);
  CHECK(counts.failed > 0);
  CHECK(counts.versions_at_failure == versions_at_failure);
}

TEST_CASE("2 shards, 2 workers, 2 steps: whatever the order, and whoever is lost, a step is on all shards or on none",
          "[enumeration]") {
  CheckReached(Enumerate({.steps = 2, .slices = 1}), 5000, {0, 1, 2});
}

TEST_CASE("2 shards of 2 slices: a step that is half pushed, or built ahead, is on all shards or on none",
          "[enumeration]") {
  CheckReached(Enumerate({.steps = 1, .slices = 2}), 1000, {0, 1});
}

TEST_CASE("backup: the first push makes a step, the same on 2 shards, and a loss blocks nobody", "[enumeration]") {
  const Counts counts = Enumerate({.steps = 1, .slices = 1, .mode = "backup"});
  CHECK(counts.states > 100);
  CHECK(counts.failed == 0);
}

TEST_CASE("In random orders of 2 shards and 2 workers, backup makes each step of the same pushes on both") {
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::off);
  const absl::Cleanup restore = [level] { spdlog::set_level(level); };
  std::mt19937 random(12);
  const Size size = {.steps = 3, .slices = 2, .mode = "backup"};
  Counts counts;
  for (int walk = 0; walk < 200; ++walk) {
    const size_t longest = random() % 60;
    std::vector<Event> path;
    Job job(size);
    while (path.size() < longest) {
      const std::vector<Event> possible = job.Possible();
      if (possible.empty()) break;
      path.push_back(possible[random() % possible.size()]);
      job.Do(path.back());
    }
    CheckOutcome(size, path, &counts);
  }
  CHECK(counts.failed == 0);
}

// A sample of the above that is small enough for the sanitizers: how much is freed when a job ends in the middle of
// something depends on the order.
TEST_CASE("In random orders of 2 shards and 2 workers a step is on all shards or on none") {
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::off);
  const absl::Cleanup restore = [level] { spdlog::set_level(level); };
  std::mt19937 random(11);
  for (const Size& size : {Size{.steps = 2, .slices = 1}, Size{.steps = 1, .slices = 2}}) {
    Counts counts;
    for (int walk = 0; walk < 100; ++walk) {
      const bool loses = walk % 2 == 0;  // Else hardly a walk would come to its end without a loss.
      const size_t longest = random() % 40;
      std::vector<Event> path;
      Job job(size);
      while (path.size() < longest) {
        std::vector<Event> possible = job.Possible();
        std::erase_if(possible, [&](const Event& event) { return !loses && event.kind == Kind::kLose; });
        if (possible.empty()) break;
        path.push_back(possible[random() % possible.size()]);
        job.Do(path.back());
      }
      CheckOutcome(size, path, &counts);
    }
    CHECK(counts.built > 0);
    CHECK(counts.finished > 0);
    CHECK(counts.failed > 0);
  }
}

}  // namespace
}  // namespace ps
