// What a worker tells its chief of its training (ps.proto, WorkerReport), put together of what it did. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ps/client.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// The seconds of a step, and of all of its phases together.
v1::StepTimes TimesOf(const StepReport& step);
double SecondsOf(const StepReport& step);

class TrainingReport {
 public:
  // The worker has trained on a batch. `unix_ms`: now.
  void AddStep(const StepReport& step, uint64_t unix_ms);
  // A push of so many samples was answered. It counts as a batch, unless the worker tells of its steps itself.
  void AddPush(uint64_t step, uint32_t samples);
  void AddEvaluation(const EvaluationReport& evaluation);
  void SetDevice(const std::string& device);
  // So many reports could not be sent, as the one before was not answered yet.
  void CountDropped(uint64_t reports) { dropped_ += reports; }

  // Something was added since the last report.
  bool has_news() const { return news_; }
  // The next report. What is said of the batches since the one before begins anew.
  v1::WorkerReport Take();
  // The last report did not reach the chief: what it says of its batches is part of the next one.
  void TakeBack();

 private:
  // Of the batches since a report.
  struct Batches {
    v1::LossRange loss;                 // Its mean is known when the report is made.
    double loss_sum = 0;                // Weighted by samples,
    double loss_samples = 0;            // of which there are so many.
    std::vector<v1::SlowStep> slowest;  // The slowest first.

    void AddLoss(double loss, uint32_t samples);
    void Add(const Batches& more);
    bool IsAmongSlowest(double seconds) const;
    void KeepSlowest(const v1::SlowStep& step);
  };
  uint64_t SamplesAt(uint64_t step) const;

  uint64_t number_ = 0;
  uint64_t steps_ = 0;
  uint64_t samples_ = 0;
  uint64_t all_steps_ = 0;
  bool told_ = false;  // The worker tells of its steps.
  std::optional<uint64_t> first_step_;
  uint64_t last_step_ = 0;
  uint32_t last_push_samples_ = 0;
  v1::StepTimes seconds_;
  bool has_seconds_ = false;
  Batches batches_;                                           // Since the last report,
  Batches reported_;                                          // and those of the last report.
  std::array<std::optional<v1::Evaluation>, 2> evaluations_;  // Of the last two splits; the newer one first.
  std::string device_;
  uint64_t dropped_ = 0;
  bool news_ = false;
};

}  // namespace ps
