// One shard, in the test's hand.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/proto_values.h"
#include "server/shard/shard.h"
#include "tests/catch.h"
#include "tests/server/test_client.h"

namespace ps {

// An answer on its way. Copies of its callback may outlive it.
template <typename T>
class Reply {
 public:
  std::function<void(absl::StatusOr<T>)> Callback() {
    return [state = state_](absl::StatusOr<T> answer) {
      MutexLock lock(state->mutex);
      state->answer = std::move(answer);
      state->changed.NotifyAll();
    };
  }

  absl::StatusOr<T> Wait() {
    MutexLock lock(state_->mutex);
    const TimePoint deadline = Now() + std::chrono::minutes(2);
    while (!state_->answer.has_value()) {
      if (!state_->changed.WaitUntil(state_->mutex, deadline)) return absl::UnknownError("no answer came");
    }
    return *state_->answer;
  }

 private:
  struct State {
    Mutex mutex;
    CondVar changed;
    std::optional<absl::StatusOr<T>> answer ABSL_GUARDED_BY(mutex);
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// One shard with two workers on a model of four weights, all 1; the learning rate is 1.
class TestShard {
 public:
  explicit TestShard(const std::string& mode, ShardOptions options = {}, const Layout& model = {{"w", {4}}},
                     bool run = true, CheckpointStore* store = nullptr)
      : layout(model),
        metrics(*MetricsWriter::Open("", "shard")),
        shard(
            WithClock(With(std::move(options), mode)),
            [this](const v1::ShardReport& report) {
              MutexLock lock(reports_mutex);
              reports.push_back(report);
              reported.NotifyAll();
            },
            metrics.get(), store) {
    v1::ChiefUpdate update;
    *update.mutable_view() = View(1, v1::PHASE_GATHERING, layout);
    shard.OnChiefUpdate(update);
    if (!run) return;
    for (uint32_t slice = 0; slice < layout.size(); ++slice) {
      REQUIRE(shard.AddInitialSlices(Id(0), {Slice(slice, std::vector<float>(layout[slice].elements(), 1))}).ok());
    }
    *update.mutable_view() = View(2, v1::PHASE_RUNNING, layout);
    shard.OnChiefUpdate(update);
  }

  static ShardOptions With(ShardOptions options, const std::string& mode) {
    options.mode.name = mode;
    options.max_workers = 2;
    options.hyperparameters = {.learning_rate = 1, .momentum = 0.5F, .weight_decay = 0};
    return options;
  }

  ShardOptions WithClock(ShardOptions options) const {
    options.clock = [this] { return now; };
    return options;
  }

  static v1::View View(uint64_t number, v1::Phase phase, const Layout& layout = {{"w", {4}}}) {
    v1::View view;
    view.set_number(number);
    view.set_generation(1);
    view.set_phase(phase);
    *view.mutable_layout() = ToProto(layout);
    for (uint32_t rank : {0U, 1U}) {
      v1::Member* member = view.add_members();
      member->set_rank(rank);
      member->set_incarnation(1);
      member->set_initialiser(rank == 0);
    }
    return view;
  }

  static v1::Identity Id(uint32_t rank, uint64_t incarnation = 1) {
    v1::Identity id;
    id.set_job("default");
    id.set_generation(1);
    id.set_rank(rank);
    id.set_incarnation(incarnation);
    return id;
  }

  static ReceivedSlice Slice(uint32_t index, std::vector<float> values) {
    auto owner = std::make_shared<std::vector<float>>(std::move(values));
    const Piece piece(reinterpret_cast<const uint8_t*>(owner->data()), owner->size() * sizeof(float));
    return {.index = index, .payload = Payload({piece}, owner)};
  }

  static v1::PushRequest Header(uint32_t rank, uint64_t step, uint32_t samples = 1) {
    v1::PushRequest header;
    *header.mutable_id() = Id(rank);
    header.set_step(step);
    header.set_samples(samples);
    return header;
  }

  absl::Status Add(const v1::PushRequest& header, std::vector<ReceivedSlice> slices) {
    return shard.AddSlices(nullptr, header, std::move(slices));
  }
  absl::Status Add(uint32_t rank, uint64_t step, std::vector<float> values) {
    return Add(Header(rank, step), {Slice(0, std::move(values))});
  }

  static constexpr std::chrono::hours kLong{1};

  // Asks for the answer to a push that has ended.
  void AwaitPush(const v1::PushRequest& header, std::chrono::nanoseconds wait,
                 const std::function<void(absl::StatusOr<v1::PushReply>)>& callback) {
    shard.Await(nullptr,
                {.caller = {.id = header.id(), .peer = ""},
                 .push = header.step(),
                 .weights = false,
                 .version = {},
                 .wait = wait},
                /*push_ended=*/true, ClientOf([callback](const absl::StatusOr<ShardAnswer>& answer) {
                  if (!answer.ok()) return callback(answer.status());
                  callback(*answer->push);
                }));
  }
  void AwaitPull(const Caller& caller, std::optional<uint64_t> version, std::chrono::nanoseconds wait,
                 const std::function<void(absl::StatusOr<VersionPin>)>& callback) {
    shard.Await(nullptr, {.caller = caller, .push = {}, .weights = true, .version = version, .wait = wait},
                /*push_ended=*/false, ClientOf([callback](const absl::StatusOr<ShardAnswer>& answer) {
                  if (!answer.ok()) return callback(answer.status());
                  callback(*answer->weights);
                }));
  }

  // Callbacks are made by whichever thread drains the shard's outbox, so every answer is waited for.
  absl::StatusOr<v1::PushReply> Answer(uint32_t rank, uint64_t step) {
    Reply<v1::PushReply> reply;
    AwaitPush(Header(rank, step), kLong, reply.Callback());
    return reply.Wait();
  }

  // The version, or DEADLINE_EXCEEDED if it is not there now.
  absl::StatusOr<VersionPin> Pull(std::optional<uint64_t> version, uint32_t rank = 0) {
    return PullAs(Id(rank), version);
  }
  // The same for a reader who is no member.
  absl::StatusOr<VersionPin> PullUnnamed(std::optional<uint64_t> version) { return PullAs({}, version); }
  absl::StatusOr<VersionPin> PullAs(const v1::Identity& id, std::optional<uint64_t> version) {
    Reply<VersionPin> reply;
    AwaitPull({.id = id, .peer = "ipv4:10.0.0.1:5"}, version, {}, reply.Callback());
    shard.Tick(now);
    return reply.Wait();
  }

  // Another view of the same members, but for what `change` does to it.
  void NextView(v1::Phase phase, const std::function<void(v1::View*)>& change = {}) {
    v1::ChiefUpdate update;
    *update.mutable_view() = View(next_view++, phase, layout);
    if (change) change(update.mutable_view());
    shard.OnChiefUpdate(update);
  }

  // Every reason that the shard has given for the job's end, when there are `count` of them.
  std::vector<std::string> Failures(size_t count) {
    MutexLock lock(reports_mutex);
    const TimePoint deadline = Now() + std::chrono::minutes(2);
    std::vector<std::string> failures;
    do {
      failures.clear();
      for (const v1::ShardReport& report : reports) {
        if (!report.failure().empty()) failures.push_back(report.failure());
      }
    } while (failures.size() < count && reported.WaitUntil(reports_mutex, deadline));
    return failures;
  }

  const Layout layout;
  uint64_t next_view = 3;
  Mutex reports_mutex;
  CondVar reported;
  std::vector<v1::ShardReport> reports ABSL_GUARDED_BY(reports_mutex);
  TimePoint now = TimePoint() + std::chrono::hours(1);
  std::unique_ptr<MetricsWriter> metrics;
  Shard shard;
};

}  // namespace ps
