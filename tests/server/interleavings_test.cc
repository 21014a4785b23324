// Small jobs of 2 workers and 2 shards in bsp and backup: the chief and the shards, joined by queues in place of the
// network. Every order in which slices, the building of the next version, reports and decisions can be brought about is
// enumerated, and in each of them every point at which a worker can be lost, and at which a third one can join.
#include <array>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/catch.h"
#include "tests/server/small_job.h"

namespace ps {
namespace {

enum class Kind { kPush, kReport, kUpdate, kBuild, kLose, kJoin };

struct Event {
  Kind kind;
  uint32_t worker = 0;
  uint32_t shard = 0;
};

struct Size {
  uint64_t steps = 1;
  uint32_t slices = 1;  // Each shard has so many.
  std::string mode = "bsp";
  std::string on_worker_loss = {};
  bool error_feedback = false;
  bool partial = false;  // SmallJob::Plan.
  bool elastic = false;  // A third worker comes, once.
};

// In backup the learning rate tells at which position of a schedule a version was made, late pushes counted.
SmallJob::Plan PlanOf(const Size& size) {
  SmallJob::Plan plan = {
      .mode = {.name = size.mode, .on_worker_loss = size.on_worker_loss, .error_feedback = size.error_feedback},
      .steps = size.steps,
      .slices = size.slices,
      .elastic = size.elastic,
      .partial = size.partial};
  if (size.mode == "backup") plan.schedule = {.schedule = "linear", .schedule_length = "64samples"};
  return plan;
}

class Job : public SmallJob {
 public:
  explicit Job(const Size& size) : SmallJob(PlanOf(size)) {}

  // What can happen next.
  std::vector<Event> Possible() const {
    std::vector<Event> events;
    for (uint32_t w = 0; w < kPlaces; ++w) {
      for (uint32_t s = 0; s < kShards; ++s) {
        // In backup one shard may be ahead for a moment.
        if (MayPush(w, s) && Version(s) >= workers_[w].step) events.push_back({Kind::kPush, w, s});
      }
      if (workers_[w].alive && !someone_lost_) events.push_back({Kind::kLose, w});
    }
    if (plan_.elastic && !someone_joined_) events.push_back({Kind::kJoin, kPlaces - 1});
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
      case Kind::kPush: {
        // Once two have pushed something here in this step, something new can be built.
        for (uint32_t other = 0; other < kPlaces; ++other) {
          const bool same = workers_[other].step == workers_[event.worker].step && workers_[other].pushed[s] > 0;
          if (other != event.worker && same) to_build_[s] = true;
        }
        Push(event.worker, s);
        break;
      }
      case Kind::kReport:
        Report(s);
        break;
      case Kind::kUpdate:
        Update(s);
        break;
      case Kind::kBuild:
        built_ = Work(s) || built_;
        to_build_[s] = false;
        break;
      case Kind::kLose:
        Lose(event.worker);
        someone_lost_ = true;
        break;
      case Kind::kJoin:
        Join(event.worker);
        someone_joined_ = true;
        break;
    }
  }
  // Whoever was lost is replaced by another worker.
  void Replace() {
    for (uint32_t w = 0; w < kWorkers; ++w) {
      if (!workers_[w].alive) Join(w);
    }
    Settle();
  }
  // After a loss too.
  bool goes_on() const { return MakeMode(plan_.mode, kWorkers)->OnLoss() == LossAction::kContinue; }
  // A push of the third worker was applied.
  bool third_takes_part() const { return third_takes_part_; }
  // Some build was an event of its own.
  bool built() const { return built_; }

  // Brings about all that happens if nobody is lost, and nobody joins, any more.
  void Finish() {
    for (Settle();; Settle()) {
      std::vector<Event> possible = Possible();
      std::erase_if(possible, [](const Event& event) { return event.kind >= Kind::kLose; });
      if (possible.empty()) return;
      Do(possible.front());
    }
  }

  // Brings about all that is on its way. What workers have not sent yet stays unsent.
  void Settle() {
    built_ = SmallJob::Settle() || built_;
    to_build_ = {};
  }

  // Everything that tells one state from another, but for the values of weights, which follow from the versions.
  std::string Fingerprint() {
    std::string text;
    for (uint32_t s = 0; s < kShards; ++s) {
      text += StatusThatDecides(s).SerializeAsString() + "|";
      for (const auto& report : reports_[s]) text += report.SerializeAsString() + ";";
      for (const auto& update : updates_[s]) text += update.SerializeAsString() + ";";
      text += to_build_[s] ? "b" : "-";
    }
    for (const Worker& w : workers_) {
      text += std::to_string(w.step) + (w.alive ? "alive" : "lost");
      for (uint32_t s = 0; s < kShards; ++s) {
        text += std::to_string(w.pushed[s]) + (w.answers[s] ? "a" : "-") + std::to_string(w.next_step);
      }
    }
    if (plan_.elastic) text += ChiefStatusThatDecides().SerializeAsString() + (someone_joined_ ? "joined" : "");
    for (const auto& [s, rank, step] : complete_) text += std::to_string(100 * s + 10 * rank + step) + ",";
    return text;
  }

 private:
  void OnReport(uint32_t shard, const v1::ShardReport& report) override {
    for (const auto& done : report.complete()) complete_.insert({shard, done.rank(), done.step()});
  }
  void OnUpdate(uint32_t shard, const v1::ChiefUpdate& update) override {
    to_build_[shard] = to_build_[shard] || update.decisions_size() > 0;
  }

  void OnAnswer(uint32_t /*shard*/, const v1::Identity& id, uint64_t /*step*/, v1::Answer answer) override {
    third_takes_part_ = third_takes_part_ || (id.rank() == kPlaces - 1 && answer == v1::ANSWER_APPLIED);
  }

  std::array<bool, kShards> to_build_ = {};
  bool built_ = false;
  std::set<std::tuple<uint32_t, uint32_t, uint64_t>> complete_;  // That the chief knows of.
  bool someone_lost_ = false;
  bool someone_joined_ = false;
  bool third_takes_part_ = false;
};

struct Counts {
  size_t states = 0;
  size_t built = 0;
  size_t finished = 0;
  size_t failed = 0;
  size_t with_third = 0;  // Its push was answered.
  std::set<uint64_t> versions_at_failure;
};

// Goes on from the state after `path` until nothing is on its way, and looks at what the job came to.
void CheckOutcome(const Size& size, const std::vector<Event>& path, Counts* counts) {
  Job job(size);
  for (const Event& event : path) job.Do(event);
  job.Settle();
  CHECK(job.Version(0) == job.Version(1));
  if (job.built()) ++counts->built;
  if (job.goes_on()) {
    // Each rank's gradient of each step is another, so equal weights are of equal sets.
    CHECK(job.Weight(0) == job.Weight(1));
    job.Finish();
    CHECK(job.all_answered());
    CHECK(job.Version(0) == size.steps);
    CHECK(job.Version(1) == size.steps);
    CHECK(job.Weight(0) == job.Weight(1));
    counts->failed += job.failed() ? 1 : 0;
    counts->with_third += job.third_takes_part() ? 1 : 0;
    return;
  }
  if (size.on_worker_loss == "wait") {
    job.Replace();
    job.Finish();
    CHECK(!job.failed());
    CHECK(job.all_answered());
    CHECK(job.Version(0) == size.steps);
  }
  if (job.failed()) {
    ++counts->failed;
    counts->versions_at_failure.insert(job.Version(0));
    return;
  }
  // Means of the gradients 1, 2 and 4, 8, taken off one after the other; of partial pushes each shard has one.
  const float expected[] = {0, -1.5F, -7.5F};
  const float of_partial[Job::kShards][3] = {{0, -1.5F, -1.5F}, {0, 0, -6}};
  for (uint32_t shard = 0; shard < Job::kShards; ++shard) {
    const uint64_t version = job.Version(shard);
    CHECK(job.Weight(shard) == (size.partial ? of_partial[shard][version] : expected[version]));
  }
  if (job.all_answered()) ++counts->finished;
}

Counts Enumerate(const Size& size) {
  const QuietLog quiet;
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

// Events in a random order, fewer than `longest`; `loses`: somebody may be lost.
std::vector<Event> RandomPath(const Size& size, size_t longest, std::mt19937& random, bool loses = true) {
  std::vector<Event> path;
  Job job(size);
  while (path.size() < longest) {
    std::vector<Event> possible = job.Possible();
    std::erase_if(possible, [&](const Event& event) { return !loses && event.kind == Kind::kLose; });
    if (possible.empty()) break;
    path.push_back(possible[random() % possible.size()]);
    job.Do(path.back());
  }
  return path;
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
          "[unsanitized]") {
  CheckReached(Enumerate({.steps = 2, .slices = 1}), 5000, {0, 1, 2});
}

TEST_CASE("2 shards of 2 slices: a step that is half pushed, or built ahead, is on all shards or on none",
          "[unsanitized]") {
  CheckReached(Enumerate({.steps = 1, .slices = 2}), 1000, {0, 1});
}

TEST_CASE("Partial pushes, of which one shard gets nothing but the header, make each step on all shards or on none",
          "[unsanitized]") {
  CheckReached(Enumerate({.steps = 2, .slices = 1, .partial = true}), 5000, {0, 1, 2});
  CheckReached(Enumerate({.steps = 1, .slices = 2, .partial = true}), 200, {0, 1});
  const Counts counts = Enumerate({.steps = 2, .slices = 1, .on_worker_loss = "wait", .partial = true});
  CHECK(counts.states > 1000);
  CHECK(counts.finished == counts.states);
  CHECK(counts.failed == 0);
}

TEST_CASE("bsp that goes on without a lost worker makes each step of the same pushes on 2 shards", "[unsanitized]") {
  const Counts counts = Enumerate({.steps = 2, .slices = 1, .on_worker_loss = "continue"});
  CHECK(counts.states > 1000);
  CHECK(counts.built > 0);
  CHECK(counts.failed == 0);
}

TEST_CASE("bsp to which a third worker comes at any time makes each step of the same pushes on 2 shards",
          "[unsanitized]") {
  const Counts counts = Enumerate({.steps = 1, .slices = 1, .on_worker_loss = "continue", .elastic = true});
  CHECK(counts.states > 1000);
  CHECK(counts.built > 0);
  CHECK(counts.failed == 0);
  CHECK(counts.with_third > 100);
}

TEST_CASE(
    "In random orders of 2 shards, to which a third worker comes, bsp and backup make each step of the same pushes") {
  const QuietLog quiet;
  std::mt19937 random(13);
  for (const char* mode : {"bsp", "backup"}) {
    const Size size = {.steps = 3, .slices = 2, .mode = mode, .on_worker_loss = "continue", .elastic = true};
    Counts counts;
    for (int walk = 0; walk < 200; ++walk) {
      CheckOutcome(size, RandomPath(size, random() % 80, random), &counts);
    }
    CHECK(counts.built > 0);
    CHECK(counts.failed == 0);
    CHECK(counts.with_third > 50);
  }
}

TEST_CASE("bsp that waits for a lost worker's replacement ends with the weights of a job that lost nobody, on 2 shards",
          "[unsanitized]") {
  const Counts counts = Enumerate({.steps = 1, .slices = 2, .on_worker_loss = "wait"});
  CHECK(counts.states > 1000);
  CHECK(counts.finished == counts.states);
  CHECK(counts.failed == 0);
}

TEST_CASE("It does so too where a lost worker's push does not stand for its replacement's", "[unsanitized]") {
  const Counts counts = Enumerate({.steps = 1, .slices = 2, .on_worker_loss = "wait", .error_feedback = true});
  CHECK(counts.states > 1000);
  CHECK(counts.finished == counts.states);
  CHECK(counts.failed == 0);
}

TEST_CASE("backup: the first push makes a step, the same on 2 shards, and a loss blocks nobody", "[unsanitized]") {
  const Counts counts = Enumerate({.steps = 1, .slices = 1, .mode = "backup"});
  CHECK(counts.states > 100);
  CHECK(counts.failed == 0);
}

TEST_CASE("In random orders of 2 shards and 2 workers, backup makes each step of the same pushes on both") {
  const QuietLog quiet;
  std::mt19937 random(12);
  const Size size = {.steps = 3, .slices = 2, .mode = "backup"};
  Counts counts;
  for (int walk = 0; walk < 200; ++walk) {
    CheckOutcome(size, RandomPath(size, random() % 60, random), &counts);
  }
  CHECK(counts.failed == 0);
}

// A sample of the above that is small enough for the sanitizers: how much is freed when a job ends in the middle of
// something depends on the order.
TEST_CASE("In random orders of 2 shards and 2 workers a step is on all shards or on none") {
  const QuietLog quiet;
  std::mt19937 random(11);
  for (const Size& size : {Size{.steps = 2, .slices = 1}, Size{.steps = 1, .slices = 2}}) {
    Counts counts;
    for (int walk = 0; walk < 100; ++walk) {
      const bool loses = walk % 2 == 0;  // Else hardly a walk would come to its end without a loss.
      CheckOutcome(size, RandomPath(size, random() % 40, random, loses), &counts);
    }
    CHECK(counts.built > 0);
    CHECK(counts.finished > 0);
    CHECK(counts.failed > 0);
  }
}

}  // namespace
}  // namespace ps
