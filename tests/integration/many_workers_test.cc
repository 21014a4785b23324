// Many workers of one server: a real one, and clients in this process.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/hash.h"
#include "common/status.h"
#include "common/sync.h"
#include "ps/client.h"
#include "tests/integration/client_threads.h"
#include "tests/integration/process.h"
#include "tests/integration/raw_calls.h"

namespace ps {
namespace {

constexpr uint32_t kWorkers = 256;
constexpr uint64_t kSteps = 4;
constexpr size_t kElements = 1000;
constexpr float kLearningRate = 0.1F;
constexpr size_t kMostCharacters = 400;  // A line has no more; the one with all settings is the longest.

float InitialAt(size_t i) { return static_cast<float>(i % 13) * 0.01F; }
// Values whose sum depends on the order in which they are added.
float GradientAt(uint32_t rank, uint64_t step, size_t i) {
  return static_cast<float>((rank * 31 + step * 17 + i * 7) % 1001) / 1001.0F - 0.5F;
}
uint32_t SamplesOf(uint32_t rank) { return 1 + rank % 5; }

// The weights that SGD makes with the mean over all samples, added up in the order of ranks.
std::vector<float> ExpectedWeights() {
  uint32_t samples = 0;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) samples += SamplesOf(rank);
  std::vector<float> weights(kElements);
  for (size_t i = 0; i < kElements; ++i) {
    weights[i] = InitialAt(i);
    for (uint64_t step = 0; step < kSteps; ++step) {
      float mean = 0;
      for (uint32_t rank = 0; rank < kWorkers; ++rank) {
        mean += static_cast<float>(SamplesOf(rank) / static_cast<double>(samples)) * GradientAt(rank, step, i);
      }
      weights[i] -= kLearningRate * mean;
    }
  }
  return weights;
}

// One of many workers in bsp.
class Trainee {
 public:
  absl::Status Join(const ClientOptions& options) {
    absl::StatusOr<std::unique_ptr<Client>> joined = Client::Join(options, {{"w", {kElements}}});
    PS_RETURN_IF_ERROR(joined.status());
    client_ = *std::move(joined);
    return absl::OkStatus();
  }

  absl::Status Start() {
    for (size_t i = 0; i < kElements; ++i) gradient_[i] = InitialAt(i);
    return client_->Start({gradient_}, {weights_}).status();
  }

  std::shared_ptr<Exchange> StartStep(uint64_t step) {
    const uint32_t rank = client_->rank();
    for (size_t i = 0; i < kElements; ++i) gradient_[i] = GradientAt(rank, step, i);
    return client_->StartPushPull({.step = step, .version = step, .samples = SamplesOf(rank)}, {gradient_}, {weights_},
                                  /*deferred=*/false);
  }

  absl::Status End() {
    PS_RETURN_IF_ERROR(client_->Done());
    return client_->Leave();
  }

  Client& client() { return *client_; }
  const std::vector<float>& weights() const { return weights_; }

 private:
  std::unique_ptr<Client> client_;
  std::vector<float> gradient_ = std::vector<float>(kElements);
  std::vector<float> weights_ = std::vector<float>(kElements);
};

// What ps_ctl status prints once the job waits for this rank, and maybe for others.
std::string StatusThatWaits(const std::string& server, uint64_t step, uint32_t rank) {
  const TempFolder folder;
  const std::string waits = absl::StrCat("step ", step, ": waiting for rank ", rank, " ");
  std::string output;
  int status = 0;
  (void)Eventually([&] {
    Process ctl("ps_ctl", {"--server=" + server, "--timeout=60s", "status"}, folder.File("status"));
    status = ctl.Wait();
    output = ctl.Output();
    return status != 0 || output.find(waits) != std::string::npos;
  });
  CHECK(status == 0);
  CHECK(output.find(waits) != std::string::npos);
  return output;
}

// It has no line that is too long to be read, and one for each worker.
void CheckReadable(const std::string& status) {
  const std::vector<std::string> lines = absl::StrSplit(status, '\n', absl::SkipEmpty());
  for (const std::string& line : lines) {
    INFO(line.size() << " characters: " << line.substr(0, kMostCharacters) << "…");
    CHECK(line.size() <= kMostCharacters);
  }
  const auto all = std::find(lines.begin(), lines.end(), absl::StrCat("workers: ", kWorkers, " of ", kWorkers));
  CHECK(all - lines.begin() < 20);
  REQUIRE(lines.end() - all == 2 + kWorkers);  // The names of the columns stand between.
  for (uint32_t rank = 0; rank < kWorkers; ++rank) CHECK(std::stoul(all[2 + rank]) == rank);
}

// What a worker is told while it waits.
class Notices {
 public:
  void Add(const std::string& notice) {
    MutexLock lock(mutex_);
    newest_ = notice;
  }
  // The next one; empty if none comes within 2 minutes.
  std::string Next() {
    Add("");
    std::string next;
    (void)Eventually([&] {
      MutexLock lock(mutex_);
      next = newest_;
      return !next.empty();
    });
    return next;
  }

 private:
  Mutex mutex_;
  std::string newest_ ABSL_GUARDED_BY(mutex_);
};

void CheckNames(const std::string& notice, const std::string& who) {
  INFO(notice.substr(0, kMostCharacters));
  CHECK(notice.find(who) != std::string::npos);
}

// All workers of a job, which join at once.
class Crowd {
 public:
  Crowd(const std::string& server, const std::string& shared_memory) : server_(server) {
    const auto on_notice = [this](const std::string& notice) { notices_of_0_.Add(notice); };
    const absl::Status joined = InParallel(kWorkers, [&](uint32_t rank) {
      ClientOptions options = {.server = server, .shared_memory = shared_memory, .rank = rank};
      options.notice_every = absl::Seconds(1);
      if (rank == 0) options.on_notice = on_notice;
      return trainees_[rank].Join(options);
    });
    REQUIRE(joined == absl::OkStatus());
  }

  void Train(uint64_t steps) {
    const absl::Status trained = InParallel(kWorkers, [&](uint32_t rank) {
      PS_RETURN_IF_ERROR(trainees_[rank].Start());
      for (uint64_t step = 0; step < steps; ++step) {
        PS_RETURN_IF_ERROR(CheckApplied(trainees_[rank].StartStep(step)->Wait()));
      }
      return absl::OkStatus();
    });
    REQUIRE(trained == absl::OkStatus());
  }

  // A step in which first all but one are waited for, then one is.
  void TrainSlowly(uint64_t step) {
    std::vector<std::shared_ptr<Exchange>> exchanges = {trainees_[0].StartStep(step)};
    CheckReadable(StatusThatWaits(server_, step, 1));
    CheckNames(notices_of_0_.Next(), "waiting for rank 1 ");
    while (exchanges.size() + 1 < kWorkers) exchanges.push_back(trainees_[exchanges.size()].StartStep(step));
    CheckReadable(StatusThatWaits(server_, step, kWorkers - 1));
    exchanges.push_back(trainees_.back().StartStep(step));
    for (const auto& exchange : exchanges) CHECK(CheckApplied(exchange->Wait()) == absl::OkStatus());
  }

  void ExpectWeights(const std::vector<float>& expected) {
    for (const Trainee& trainee : trainees_) CHECK(trainee.weights() == expected);
    const absl::StatusOr<HashedWeights> hashed = trainees_[0].client().WeightsHash();
    REQUIRE(hashed.ok());
    CHECK(hashed->hash == WeightsHash({HashSlice(expected)}));
  }

  absl::Status End() {
    return InParallel(kWorkers, [&](uint32_t rank) { return trainees_[rank].End(); });
  }

 private:
  const std::string server_;
  Notices notices_of_0_;
  std::vector<Trainee> trainees_ = std::vector<Trainee>(kWorkers);
};

void TrainCrowd(const std::string& shared_memory) {
  const TempFolder folder;
  // Who is busy on a busy machine is not lost.
  Process server("ps_server",
                 {"--mode=bsp", "--lease=5m", absl::StrCat("--num_workers=", kWorkers),
                  absl::StrCat("--learning_rate=", kLearningRate)},
                 folder.File("server"));
  Crowd crowd(server.Address(), shared_memory);
  crowd.Train(kSteps - 1);
  crowd.TrainSlowly(kSteps - 1);
  crowd.ExpectWeights(ExpectedWeights());
  CHECK(crowd.End() == absl::OkStatus());
  CHECK(server.Wait() == 0);
}

TEST_CASE("256 workers of one server train to the right weights over gRPC, and status stays readable", "[crowd]") {
  TrainCrowd("off");
}

TEST_CASE("256 workers of one server train to the right weights in shared memory, and status stays readable",
          "[crowd]") {
  TrainCrowd("require");
}

}  // namespace
}  // namespace ps
