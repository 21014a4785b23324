// A job of 2 workers and 2 shards, to which a third worker may come: the chief and the shards, joined by queues in
// place of the network. A test brings about what happens, in an order of its choice: slices that come, reports,
// messages, the shards' work, losses and rejoins.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/proto_values.h"
#include "server/chief/chief.h"
#include "server/shard/shard.h"
#include "tests/catch.h"
#include "tests/server/quiet_log.h"
#include "tests/server/test_client.h"

namespace ps {

class SmallJob {
 public:
  static constexpr uint32_t kShards = 2;
  static constexpr uint32_t kWorkers = 2;  // At the beginning.
  static constexpr uint32_t kPlaces = 3;

  struct Plan {
    ModeOptions mode;
    uint64_t steps = 1;    // Each worker makes so many.
    uint32_t slices = 1;   // Each shard has so many. Each is a tensor of one weight, 0 at first.
    bool elastic = false;  // A third worker may join; one of all is enough.
    bool partial = false;  // The pushes of step t carry the slices of shard t mod kShards alone.
    ScheduleOptions schedule;
    ClipOptions clip;
    std::vector<std::array<std::optional<float>, kWorkers>> rates;  // That pushes tell, by step.
    v1::OptimizerSettings optimizer;  // That the workers bring; without a name the servers have sgd with a rate of 1.
  };

  explicit SmallJob(const Plan& plan) : SmallJob(plan, TimePoint() + std::chrono::hours(1)) {
    Start({});
    for (uint32_t rank = 0; rank < kWorkers; ++rank) Join(rank);
    Settle();
    Initialise();
    Settle();
  }
  virtual ~SmallJob() = default;
  SmallJob(const SmallJob&) = delete;
  SmallJob& operator=(const SmallJob&) = delete;

  v1::ShardStatusReply ShardStatus(uint32_t shard) const { return shards_[shard]->Status(now_); }
  // The same without what was counted and timed, by which nothing is decided: states that differ in nothing else are
  // one.
  v1::ShardStatusReply StatusThatDecides(uint32_t shard) const {
    constexpr int kLastThatCounts = 20;
    v1::ShardStatusReply status = ShardStatus(shard);
    std::vector<const google::protobuf::FieldDescriptor*> fields;
    status.GetReflection()->ListFields(status, &fields);
    for (const auto* field : fields) {
      if (field->number() > kLastThatCounts) status.GetReflection()->ClearField(&status, field);
    }
    return status;
  }
  v1::StatusReply ChiefStatusThatDecides() {
    v1::StatusReply status = chief_->Status(now_);
    status.clear_progress();
    status.clear_shard_status();
    for (v1::WorkerStatus& worker : *status.mutable_workers()) {
      worker.clear_report();
      worker.clear_held_up_s();
      worker.clear_steps_per_s();
      worker.clear_slow();
    }
    return status;
  }
  uint64_t Version(uint32_t shard) const { return ShardStatus(shard).version(); }
  bool failed() { return chief_->Status(now_).phase() == v1::PHASE_FAILED; }
  bool all_answered() const {
    return std::all_of(workers_.begin(), workers_.end(),
                       [this](const Worker& w) { return !w.alive || w.step >= plan_.steps; });
  }
  // The weight that all of the shard's slices have in the version that it is at. Only while the job lives, and runs;
  // not a number where the shard is writing over it.
  float Weight(uint32_t shard) {
    const auto weight = std::make_shared<float>(std::nanf(""));
    shards_[shard]->Await(weight.get(), {.caller = {}, .push = {}, .weights = true, .version = {}, .wait = {}},
                          /*push_ended=*/false, ClientOf([weight](const absl::StatusOr<ShardAnswer>& answer) {
                            if (!answer.ok()) return;
                            *weight = answer->weights->weights()[0];
                            for (size_t local = 0; local < answer->weights->layout().slices(); ++local) {
                              CHECK(answer->weights->slice(local)[0] == *weight);
                            }
                          }));
    shards_[shard]->Gone(weight.get());
    return *weight;
  }

 protected:
  struct Worker {
    v1::Identity id;
    bool alive = false;
    uint64_t step = 0;
    uint64_t next_step = 0;                     // The highest that an answer named.
    std::array<uint64_t, kShards> pulled = {};  // Versions that it computes the step on.
    std::array<uint32_t, kShards> pushed = {};  // Slices.
    std::array<bool, kShards> answers = {};     // APPLIED or STALE came.
  };

  // What the servers of a generation begin with.
  struct Servers {
    uint64_t generation = 1;
    std::optional<ChiefOptions::Checkpoints> checkpoints = {};
    Chief::CheckpointCalls calls = {};
    std::array<CheckpointStore*, kShards> stores = {};
  };

  // A job that is yet to be started; its time begins now.
  SmallJob(const Plan& plan, TimePoint now) : plan_(plan), now_(now), metrics_(*MetricsWriter::Open("", "shard")) {
    const SlicePlan slices(Model(), kShards);
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      slices_[shard] = slices.shard_slices(shard);
      REQUIRE(slices_[shard].size() == plan_.slices);
    }
  }
  void Start(const Servers& servers) {
    const auto least = plan_.elastic ? std::optional<uint32_t>(1) : std::nullopt;
    const auto most = plan_.elastic ? std::optional<uint32_t>(kPlaces) : std::nullopt;
    chief_ = std::make_unique<Chief>(
        ChiefOptions{.generation = servers.generation,
                     .num_workers = kWorkers,
                     .min_workers = least,
                     .max_workers = most,
                     .num_shards = kShards,
                     .mode = plan_.mode,
                     .optimizer = plan_.optimizer.optimizer().empty() ? "sgd" : kFromWorker,
                     .schedule = plan_.schedule,
                     .lease = std::chrono::hours(100),
                     .checkpoints = servers.checkpoints},
        [](v1::Phase, const std::string&) {}, nullptr, servers.calls);
    for (uint32_t shard = 0; shard < kShards; ++shard) AddShard(shard, servers.stores[shard]);
  }
  // The servers are gone, and all that is on its way to or from them.
  void Stop() {
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      shards_[shard].reset();
      reports_[shard].clear();
      updates_[shard].clear();
    }
    chief_.reset();
    for (Worker& worker : workers_) {
      worker.alive = false;
      worker.next_step = 0;
    }
  }
  // Rank 0 sends initial values.
  void Initialise() {
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      for (const uint32_t slice : slices_[shard]) {
        REQUIRE(shards_[shard]->AddInitialSlices(workers_[0].id, {Slice(slice, 0)}).ok());
      }
    }
  }

  // A report is at the chief, a message at a shard; a shard has answered a push.
  virtual void OnReport(uint32_t /*shard*/, const v1::ShardReport& /*report*/) {}
  virtual void OnUpdate(uint32_t /*shard*/, const v1::ChiefUpdate& /*update*/) {}
  virtual void OnAnswer(uint32_t /*shard*/, const v1::Identity& /*id*/, uint64_t /*step*/, v1::Answer /*answer*/) {}

  // ---- What can happen

  // It has more slices for this shard, in a step that it may take.
  bool MayPush(uint32_t w, uint32_t s) const {
    return workers_[w].alive && workers_[w].step < plan_.steps && workers_[w].pushed[s] < Parts(w, s);
  }
  // The next slice of its push comes to the shard.
  void Push(uint32_t w, uint32_t s) {
    Worker& worker = workers_[w];
    const absl::Status added = Send(w, s, worker.pushed[s]++);
    // If it is not taken, the shard knows that the job failed, or that the worker is another now.
    if (added.ok() && worker.pushed[s] == Parts(w, s)) AwaitAnswer(worker, s);
    BeginSteps();
  }
  // The slice of this number of the shard's, of the step that the worker is at.
  absl::Status Send(uint32_t w, uint32_t s, uint32_t number) {
    const Worker& worker = workers_[w];
    v1::PushRequest header;
    *header.mutable_id() = worker.id;
    header.set_step(worker.step);
    header.set_version(worker.pulled[s]);
    header.set_samples(1);
    if (worker.step < plan_.rates.size() && plan_.rates[worker.step][w].has_value()) {
      header.set_learning_rate(*plan_.rates[worker.step][w]);
    }
    if (plan_.partial) {
      for (const uint32_t slice : slices_[worker.step % kShards]) {
        v1::SliceRange* const range = header.add_carries();
        range->set_begin(slice);
        range->set_end(slice + 1);
      }
    }
    if (!Carries(w, s)) return shards_[s]->AddSlices(nullptr, header, {});
    return shards_[s]->AddSlices(nullptr, header, {Slice(slices_[s][number], Gradient(w, worker.step))});
  }
  // Whether the worker's push of the step that it is at has slices for the shard, and in how many parts it comes there.
  bool Carries(uint32_t w, uint32_t s) const { return !plan_.partial || workers_[w].step % kShards == s; }
  uint32_t Parts(uint32_t w, uint32_t s) const { return Carries(w, s) ? plan_.slices : 1; }
  // The shard's oldest report reaches the chief.
  void Report(uint32_t s) {
    const v1::ShardReport report = std::move(reports_[s].front());
    reports_[s].pop_front();
    OnReport(s, report);
    chief_->OnReport(s, report, now_);
    BeginSteps();
  }
  // A report reaches the chief once more.
  void Repeat(uint32_t s, const v1::ShardReport& report) {
    chief_->OnReport(s, report, now_);
    BeginSteps();
  }
  // The oldest message to the shard reaches it.
  void Update(uint32_t s) {
    const v1::ChiefUpdate update = std::move(updates_[s].front());
    updates_[s].pop_front();
    OnUpdate(s, update);
    shards_[s]->OnChiefUpdate(update);
    BeginSteps();
  }
  // The shard measures and builds what it has to. Returns whether there was anything.
  bool Work(uint32_t s) {
    const bool worked = shards_[s]->ApplyPosted();
    BeginSteps();
    return worked;
  }
  void Lose(uint32_t w) {
    v1::LeaveRequest leave;
    *leave.mutable_id() = workers_[w].id;
    leave.set_reason("lost");
    REQUIRE(chief_->Leave(leave, now_).ok());
    workers_[w].alive = false;
  }
  // The worker is answered when all shards know of it.
  void Join(uint32_t rank, v1::JoinRequest request = {}) {
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_rank(rank);
    *request.mutable_layout() = ToProto(Model());
    if (!plan_.optimizer.optimizer().empty()) *request.mutable_optimizer() = plan_.optimizer;
    Worker& worker = workers_[rank];
    chief_->Join(request, now_, now_ + std::chrono::hours(1), [this, &worker](const auto& joined) {
      if (!joined.ok()) return;
      worker.id = joined->id();
      worker.alive = true;
      Begin(worker, joined->start_step());
    });
  }

  // Brings about all that is on its way. What workers have not sent yet stays unsent. Returns whether shards worked.
  bool Settle() {
    bool worked = false;
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t s = 0; s < kShards; ++s) {
        for (; !reports_[s].empty(); moved = true) Report(s);
        for (; !updates_[s].empty(); moved = true) Update(s);
        for (; Work(s); moved = true) worked = true;
      }
    }
    return worked;
  }

  // In step 0 the ranks' gradients are 1, 2 and 5, and in each step four times those of the last, or, where a third
  // worker may come, sixteen times: every line of sets of contributions has a sum of means of its own.
  virtual float Gradient(uint32_t rank, uint64_t step) const {
    return static_cast<float>((rank == 2 ? 5 : rank + 1) << ((plan_.elastic ? 4 : 2) * step));
  }

  const Plan plan_;
  TimePoint now_;
  std::unique_ptr<Chief> chief_;
  std::array<std::deque<v1::ShardReport>, kShards> reports_;  // On their way, as are the next.
  std::array<std::deque<v1::ChiefUpdate>, kShards> updates_;
  std::array<Worker, kPlaces> workers_;

 private:
  void AddShard(uint32_t shard, CheckpointStore* store) {
    ShardOptions options;
    options.shard = shard;
    options.num_shards = kShards;
    options.max_workers = plan_.elastic ? kPlaces : kWorkers;
    options.mode = plan_.mode;
    options.schedule = plan_.schedule;
    options.clip = plan_.clip;
    options.hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0};
    if (!plan_.optimizer.optimizer().empty()) options.optimizer = kFromWorker;
    options.apply_threads = 0;
    options.takes_checkpoints = store != nullptr;
    options.clock = [this] { return now_; };
    options.max_inline_elements = 0;  // All is built by Work.
    shards_[shard] = std::make_unique<Shard>(
        options,
        [this, shard](const v1::ShardReport& report) {
          // What only says how the shard gets on may be lost: no order of it and of others matters.
          if (!report.has_status()) reports_[shard].push_back(report);
        },
        metrics_.get(), store);
    v1::Registration registration;
    registration.set_protocol(v1::PROTOCOL_VERSION_1);
    registration.set_shard(shard);
    registration.set_job("default");
    registration.set_takes_changes(true);
    const auto send = [this, shard](const v1::ChiefUpdate& update) { updates_[shard].push_back(update); };
    REQUIRE(chief_->RegisterShard(registration, send, now_).ok());
  }

  Layout Model() const {
    Layout layout;
    for (uint32_t tensor = 0; tensor < kShards * plan_.slices; ++tensor) {
      layout.push_back({.name = std::string(1, static_cast<char>('a' + tensor)), .shape = {1}});
    }
    return layout;
  }

  static ReceivedSlice Slice(uint32_t index, float value) {
    auto owner = std::make_shared<float>(value);
    return {.index = index,
            .payload = Payload({Piece(reinterpret_cast<const uint8_t*>(owner.get()), sizeof(float))}, owner)};
  }

  void AwaitAnswer(Worker& worker, uint32_t s) {
    const auto answered = [this, &worker, s, id = worker.id,
                           step = worker.step](const absl::StatusOr<ShardAnswer>& answer) {
      if (!answer.ok() || answer->push->answer() == v1::ANSWER_FENCED) return;
      OnAnswer(s, id, step, answer->push->answer());
      if (id.incarnation() != worker.id.incarnation() || step != worker.step) return;
      worker.answers[s] = true;
      worker.next_step = std::max(worker.next_step, answer->push->next_step());
    };
    shards_[s]->Await(nullptr,
                      {.caller = {.id = worker.id, .peer = ""},
                       .push = worker.step,
                       .weights = false,
                       .version = {},
                       .wait = std::chrono::hours(1000)},
                      /*push_ended=*/true, ClientOf(answered));
  }

  // Who has all answers goes on. In a mode that gathers it reads the version of its step, else the newest.
  void BeginSteps() {
    for (Worker& worker : workers_) {
      if (std::all_of(worker.answers.begin(), worker.answers.end(), [](bool came) { return came; })) {
        Begin(worker, worker.next_step);
      }
    }
  }
  void Begin(Worker& worker, uint64_t step) {
    worker.step = step;
    worker.pushed = {};
    worker.answers = {};
    const bool gathers = plan_.mode.name == "bsp" || plan_.mode.name == "backup";
    for (uint32_t s = 0; s < kShards; ++s) worker.pulled[s] = gathers ? step : Version(s);
  }

  std::unique_ptr<MetricsWriter> metrics_;
  std::array<std::vector<uint32_t>, kShards> slices_;
  std::array<std::unique_ptr<Shard>, kShards> shards_;  // Last: their callbacks use the above.
};

}  // namespace ps
