#include "tests/bench/crowd_bench.h"

#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/codec.h"
#include "common/metrics.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "server/base/resumable_end.h"
#include "server/chief/chief.h"
#include "server/shard/push_pull_session.h"
#include "server/shard/shard.h"
#include "server/transport/follower.h"
#include "tests/bench/measurement.h"

namespace ps {
namespace {

constexpr std::chrono::hours kLong(10);         // Nothing is late here.
constexpr std::chrono::milliseconds kTick(50);  // A server's ticker has the same.
constexpr float kLearningRate = 1.0F / 1024;    // Sums of it are exact.
constexpr float kTolerance = 1e-3F;             // The mean of N equal gradients is nearly one of them.
constexpr int64_t kCrowdWarmUp = 1;

// CPU time of this thread.
double ThreadCpu() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// The most memory that this process has had since the last call of ForgetPeak.
double PeakBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    double kib = 0;
    if (absl::StartsWith(line, "VmHWM:") && absl::SimpleAtod(line.substr(6, line.size() - 9), &kib)) return kib * 1024;
  }
  return 0;
}

void ForgetPeak() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // proc(5)
}

// The stream between a shard and the chief, as FollowCall and Follower keep it, but for gRPC.
class FollowLine {
 public:
  void Send(const v1::ChiefUpdate& update, absl::Status& problem) { problem.Update(updates_.Add(update)); }
  void Report(const v1::ShardReport& report, absl::Status& problem) { problem.Update(reports_.Add(report)); }

  // The oldest update reaches the shard, if there is one, as does a report the chief.
  bool PassUpdate(Shard& shard, absl::Status& problem) {
    const std::optional<grpc::ByteBuffer> bytes = updates_.Take();
    if (!bytes.has_value()) return false;
    sent_ += bytes->Length();
    v1::ChiefUpdate update;
    problem.Update(DecodeMessage(*bytes, &update));
    end_.OnReceived(update.received());
    if (end_.Receive(update.number())) shard.OnChiefUpdate(update);
    return true;
  }
  bool PassReport(Chief& chief, uint32_t shard, absl::Status& problem) {
    std::optional<v1::ShardReport> report = reports_.Take();
    if (report.has_value()) {
      end_.Add(&*report);
    } else if (end_.MustTell()) {
      end_.Tell(&report.emplace());
    } else {
      return false;
    }
    v1::ShardReport arrived;
    problem.Update(DecodeMessage(EncodeMessage(*report), &arrived));
    chief.OnReport(shard, arrived, Now());
    return true;
  }

  size_t sent() const { return sent_; }  // Bytes that reached the shard.

 private:
  UpdateQueue updates_;
  ReportQueue reports_;
  ResumableEnd<v1::ShardReport> end_;
  size_t sent_ = 0;
};

// Counts a push's answer, and keeps the version that came with it.
class CrowdClient final : public ShardClient {
 public:
  CrowdClient(absl::Status& problem, size_t& unanswered, uint64_t& version)
      : problem_(problem), unanswered_(unanswered), version_(version) {}

  void OnAnswer(absl::StatusOr<ShardAnswer> answer) override {
    --unanswered_;
    if (!answer.ok()) return problem_.Update(answer.status());
    const v1::PullReply header = HeaderOf(*answer);
    if (header.push().answer() != v1::ANSWER_APPLIED) problem_.Update(absl::InternalError("a push was not applied"));
    version_ = header.version();
  }
  void OnBuilt(BuiltSlices /*built*/) override {}

 private:
  absl::Status& problem_;
  size_t& unanswered_;
  uint64_t& version_;
};

// Compares weights with what they have to be.
class CrowdReader final : public ShardClient {
 public:
  CrowdReader(absl::Status& problem, float expected) : problem_(problem), expected_(expected) {}

  void OnAnswer(absl::StatusOr<ShardAnswer> answer) override {
    if (!answer.ok()) return problem_.Update(answer.status());
    for (size_t slice = 0; slice < answer->weights->layout().slices(); ++slice) {
      const float weight = answer->weights->slice(slice)[0];
      if (std::abs(weight - expected_) <= kTolerance * std::abs(expected_)) continue;
      problem_.Update(absl::InternalError(absl::StrCat("a weight is ", weight, " and has to be ", expected_)));
    }
  }
  void OnBuilt(BuiltSlices /*built*/) override {}

 private:
  absl::Status& problem_;
  const float expected_;
};

// One worker, as the servers see it.
struct CrowdWorker {
  explicit CrowdWorker(uint32_t servers) : versions(servers), sessions(servers) {}

  std::optional<v1::Identity> id;  // Once its join is answered.
  v1::Phase phase = v1::PHASE_UNSPECIFIED;
  bool initialises = false;                                // It was told to send the initial values.
  std::vector<uint64_t> versions;                          // That it has of each shard.
  std::vector<std::unique_ptr<PushPullSession>> sessions;  // Its push to each shard.
};

class CrowdJob {
 public:
  explicit CrowdJob(const CrowdBenchOptions& options)
      : options_(options),
        layout_(LayoutOf(options)),
        plan_(layout_, options.servers),
        chief_({.num_workers = options.workers,
                .num_shards = options.servers,
                .mode = {.name = options.mode},
                .lease = kLong},
               [this](v1::Phase phase, const std::string& failure) {
                 problem_.Update(absl::AbortedError(absl::StrCat("the job ended: ", v1::Phase_Name(phase), failure)));
               }),
        metrics_(*MetricsWriter::Open("", "shard")),
        lines_(options.servers) {
    *join_.mutable_layout() = ToProto(layout_);
    workers_.reserve(options.workers);
    for (uint32_t rank = 0; rank < options.workers; ++rank) workers_.emplace_back(options.servers);
    for (uint32_t shard = 0; shard < options.servers; ++shard) AddShard(shard);
  }

  absl::StatusOr<CrowdRow> Run() {
    CrowdRow row = {.workers = options_.workers};
    PassAll();
    (void)TakeCpu();
    PS_RETURN_IF_ERROR(JoinAll(row));
    std::vector<double> seconds;
    double cpu = 0;
    for (int64_t step = 0; step < kCrowdWarmUp + options_.steps; ++step) {
      const TimePoint began = Now();
      const size_t sent = SentBytes();
      Step(static_cast<uint64_t>(step));
      PS_RETURN_IF_ERROR(problem_);
      const double took = TakeCpu();
      if (step < kCrowdWarmUp) continue;
      seconds.push_back(Seconds(Now() - began));
      cpu += took;
      row.step_bytes = static_cast<double>(SentBytes() - sent);
    }
    const Measurement steps = Summarize("", seconds, 0);
    row.step_p50_s = steps.p50_s;
    row.step_p99_s = steps.p99_s;
    row.push_cpu_s = cpu / static_cast<double>(options_.steps) / options_.workers;
    row.peak_bytes = PeakBytes();
    PS_RETURN_IF_ERROR(CheckWeights());
    return row;
  }

 private:
  static Layout LayoutOf(const CrowdBenchOptions& options) {
    Layout layout;
    for (uint32_t tensor = 0; tensor < options.tensors; ++tensor) {
      layout.push_back({absl::StrCat("layer", tensor, ".weight"), {1}});
    }
    return layout;
  }

  void AddShard(uint32_t shard) {
    shards_.push_back(std::make_unique<Shard>(
        ShardOptions{.shard = shard,
                     .num_shards = options_.servers,
                     .max_workers = options_.workers,
                     .mode = {.name = options_.mode},
                     .hyperparameters = {.learning_rate = kLearningRate},
                     .apply_threads = 0},
        // The first one is in the chief's process.
        [this, shard](const v1::ShardReport& report) {
          shard == 0 ? chief_.OnReport(0, report, Now()) : lines_[shard].Report(report, problem_);
        },
        metrics_.get()));
    v1::Registration registration;
    registration.set_protocol(v1::PROTOCOL_VERSION_1);
    registration.set_shard(shard);
    registration.set_job("default");
    registration.set_process(shard);
    registration.set_takes_changes(true);
    const auto send = [this, shard](const v1::ChiefUpdate& update) {
      shard == 0 ? shards_[0]->OnChiefUpdate(update) : lines_[shard].Send(update, problem_);
    };
    problem_.Update(chief_.RegisterShard(registration, send, Now()).status());
  }

  // ---- The servers' time

  template <typename Call>
  void Serve(Call&& call) {
    const double began = ThreadCpu();
    call();
    cpu_ += ThreadCpu() - began;
  }
  double TakeCpu() { return std::exchange(cpu_, 0); }

  // One message of each stream, each way, and what shards have to build. Returns whether there was anything.
  bool Pass() {
    bool passed = false;
    Serve([&] {
      for (uint32_t shard = 0; shard < options_.servers; ++shard) {
        passed = lines_[shard].PassUpdate(*shards_[shard], problem_) || passed;
        passed = lines_[shard].PassReport(chief_, shard, problem_) || passed;
        passed = shards_[shard]->ApplyPosted() || passed;
      }
      if (const TimePoint now = Now(); now >= tick_at_) {
        tick_at_ = now + kTick;
        chief_.Tick(now);
        for (const auto& shard : shards_) shard->Tick(now);
      }
    });
    return passed;
  }
  void PassAll() {
    while (problem_.ok() && Pass()) {
    }
  }

  size_t SentBytes() const {
    size_t sent = 0;
    for (const FollowLine& line : lines_) sent += line.sent();
    return sent;
  }

  // ---- Joining

  absl::Status JoinAll(CrowdRow& row) {
    const TimePoint began = Now();
    const size_t sent = SentBytes();
    for (uint32_t rank = 0; rank < options_.workers; ++rank) {
      Join(rank);
      if ((rank + 1) % options_.burst != 0) continue;
      Pass();
      ReactToAnswers();
      PS_RETURN_IF_ERROR(problem_);
    }
    while (problem_.ok() && (ReactToAnswers() || Pass())) {
    }
    PS_RETURN_IF_ERROR(problem_);
    const auto runs = [](const CrowdWorker& worker) { return worker.phase == v1::PHASE_RUNNING; };
    const auto running = std::count_if(workers_.begin(), workers_.end(), runs);
    if (running != options_.workers) {
      return absl::InternalError(absl::StrCat("the job runs for ", running, " of ", options_.workers, " workers"));
    }
    row.joined_s = Seconds(Now() - began);
    row.join_cpu_s = TakeCpu() / options_.workers;
    row.joining_bytes = static_cast<double>(SentBytes() - sent);
    return absl::OkStatus();
  }

  void Join(uint32_t rank) {
    join_.set_protocol(v1::PROTOCOL_VERSION_1);
    join_.set_job("default");
    join_.set_name(absl::StrCat("worker-", rank));
    join_.set_host(absl::StrCat("node-", rank / 8));
    join_.set_rank(rank);
    join_.set_join_request_id(rank + 1);
    join_.set_watches(true);
    const grpc::ByteBuffer bytes = EncodeMessage(join_);
    Serve([&] {
      v1::JoinRequest request;
      problem_.Update(DecodeMessage(bytes, &request));
      const TimePoint now = Now();
      chief_.Join(request, now, now + kLong, [this, rank](const absl::StatusOr<v1::JoinReply>& reply) {
        problem_.Update(reply.status());
        if (reply.ok()) answers_.emplace_back(rank, EncodeMessage(*reply));
      });
    });
  }

  // Workers do what the answers to their joins, and their streams, ask for. Returns whether they asked for anything.
  bool ReactToAnswers() {
    const bool any = !answers_.empty() || told_initialise_.has_value();
    for (; !answers_.empty(); answers_.pop_front()) {
      auto& [rank, bytes] = answers_.front();
      v1::JoinReply reply;
      problem_.Update(DecodeMessage(bytes, &reply));
      workers_[rank].id = reply.id();
      if (reply.initialise()) told_initialise_ = rank;
      Watch(rank, reply.id());
    }
    if (const auto rank = std::exchange(told_initialise_, std::nullopt); rank.has_value()) Initialise(workers_[*rank]);
    return any;
  }

  void Watch(uint32_t rank, const v1::Identity& id) {
    v1::WatchRequest request;
    *request.mutable_id() = id;
    const auto tell = [this, rank](const std::optional<v1::HeartbeatReply>& state) {
      if (!state.has_value()) return problem_.Update(absl::InternalError("a member's stream was ended"));
      (void)EncodeMessage(*state);
      workers_[rank].phase = state->phase();
      if (state->initialise()) told_initialise_ = rank;
    };
    Serve([&] { problem_.Update(chief_.Watch(request, Now(), tell).status()); });
  }

  void Initialise(CrowdWorker& worker) {
    if (std::exchange(worker.initialises, true)) return;
    for (uint32_t shard = 0; shard < options_.servers; ++shard) {
      const std::vector<ReceivedSlice> slices = SlicesOf(shard, initial_);
      Serve([&] { problem_.Update(shards_[shard]->AddInitialSlices(*worker.id, slices)); });
    }
  }

  // ---- Steps

  // The slices of this shard; each has this one element.
  std::vector<ReceivedSlice> SlicesOf(uint32_t shard, const std::shared_ptr<const float>& value) const {
    const Piece piece(reinterpret_cast<const uint8_t*>(value.get()), sizeof(float));
    std::vector<ReceivedSlice> slices;
    for (const uint32_t slice : plan_.shard_slices(shard)) {
      slices.push_back({.index = slice, .payload = Payload({piece}, value)});
    }
    return slices;
  }

  void Step(uint64_t step) {
    unanswered_ = size_t{options_.workers} * options_.servers;
    for (CrowdWorker& worker : workers_) {
      Push(worker, step);
      Pass();
      if (!problem_.ok()) return;
    }
    while (problem_.ok() && unanswered_ > 0) {
      if (!Pass()) problem_ = absl::InternalError(absl::StrCat(unanswered_, " pushes got no answer"));
    }
    Serve([&] {
      for (CrowdWorker& worker : workers_) {
        for (auto& session : worker.sessions) session.reset();
      }
    });
  }

  void Push(CrowdWorker& worker, uint64_t step) {
    std::vector<std::pair<v1::PushRequest, std::vector<ReceivedSlice>>> pushes(options_.servers);
    for (uint32_t shard = 0; shard < options_.servers; ++shard) {
      v1::PushRequest& header = pushes[shard].first;
      *header.mutable_id() = *worker.id;
      header.set_step(step);
      header.set_version(worker.versions[shard]);
      header.set_samples(1);
      pushes[shard].second = SlicesOf(shard, gradient_);
    }
    Serve([&] {
      for (uint32_t shard = 0; shard < options_.servers; ++shard) {
        worker.sessions[shard] = std::make_unique<PushPullSession>(
            *shards_[shard], "", false, WaitLimits{.wait_default = kLong, .wait_max = kLong});
        PushPullSession& session = *worker.sessions[shard];
        problem_.Update(session.Add(std::move(pushes[shard].first), std::move(pushes[shard].second)));
        session.Finish(/*weights=*/true, std::make_shared<CrowdClient>(problem_, unanswered_, worker.versions[shard]));
      }
    });
  }

  absl::Status CheckWeights() {
    const auto pushes = static_cast<float>(kCrowdWarmUp + options_.steps) *
                        (options_.mode == "asp" ? static_cast<float>(options_.workers) : 1.0F);
    const float expected = *initial_ - pushes * kLearningRate * *gradient_;
    for (const auto& shard : shards_) {
      PushPullSession session(*shard, "", false, {});
      session.Pull({}, std::make_shared<CrowdReader>(problem_, expected));
    }
    return problem_;
  }

  const CrowdBenchOptions options_;
  const Layout layout_;
  const SlicePlan plan_;
  const std::shared_ptr<const float> initial_ = std::make_shared<const float>(1.0F);
  const std::shared_ptr<const float> gradient_ = std::make_shared<const float>(1.0F);
  v1::JoinRequest join_;
  absl::Status problem_;
  double cpu_ = 0;
  TimePoint tick_at_;
  std::deque<std::pair<uint32_t, grpc::ByteBuffer>> answers_;  // To joins, by rank, on their way.
  std::optional<uint32_t> told_initialise_;
  size_t unanswered_ = 0;  // Pushes of this step, each to one shard.
  Chief chief_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::vector<FollowLine> lines_;  // By shard; the first one is not used.
  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<CrowdWorker> workers_;  // Last: their sessions use the above.
};

}  // namespace

absl::StatusOr<CrowdRow> RunCrowdBench(const CrowdBenchOptions& options) {
  ForgetPeak();
  return CrowdJob(options).Run();
}

std::string CrowdTable(const std::vector<CrowdRow>& rows) {
  std::string table =
      "| workers | all run after s | CPU ms a join | MB to shards | CPU us a push | ratio | step p50 ms | step p99 ms "
      "| "
      "KB to shards a step | peak MB |\n"
      "|--------:|----------------:|--------------:|-------------:|--------------:|------:|------------:|------------:|"
      "--------------------:|--------:|\n";
  for (const CrowdRow& row : rows) {
    absl::StrAppendFormat(&table,
                          "| %7d | %15.2f | %13.3f | %12.1f | %13.1f | %5.2f | %11.1f | %11.1f | %19.1f | %7.0f |\n",
                          row.workers, row.joined_s, row.join_cpu_s * 1e3, row.joining_bytes / 1e6,
                          row.push_cpu_s * 1e6, row.push_cpu_s / rows.front().push_cpu_s, row.step_p50_s * 1e3,
                          row.step_p99_s * 1e3, row.step_bytes / 1e3, row.peak_bytes / 1e6);
  }
  return table;
}

}  // namespace ps
