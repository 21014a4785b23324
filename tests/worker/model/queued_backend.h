// A backend as a GPU's is, on the CPU: memory of its own, and work that is queued. What may be late is as late as the
// contract allows (computation and copies to the host: when an event is waited for), and what may be early as early
// (copies to the device: at once). So whoever does not keep the contract computes something else.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/model/device.h"

namespace ps {

class QueuedBackend final : public Backend {
 public:
  // free_bytes: what FreeDeviceBytes says.
  explicit QueuedBackend(int64_t free_bytes = INT64_MAX) : cpu_(*CreateCpuBackend(1)), free_bytes_(free_bytes) {}

  std::string name() const override { return "queued " + cpu_->name(); }
  bool unified() const override { return false; }
  absl::StatusOr<Memory> AllocateDevice(int64_t bytes) override { return cpu_->AllocateDevice(bytes); }
  absl::StatusOr<int64_t> FreeDeviceBytes() override { return free_bytes_; }
  absl::StatusOr<Memory> AllocateHost(int64_t bytes) override { return cpu_->AllocateDevice(bytes); }
  absl::StatusOr<Memory> PinHost(const Memory& memory, int64_t bytes) override { return cpu_->PinHost(memory, bytes); }

  absl::StatusOr<std::shared_ptr<const std::byte>> PinHostPages(const std::shared_ptr<const std::byte>& pages,
                                                                int64_t bytes) override {
    ++pinned_pages_;
    if (refuses_pages_) return absl::UnimplementedError("no pages are pinned here");
    return cpu_->PinHostPages(pages, bytes);
  }
  // How often it was asked to.
  size_t pinned_pages() const { return pinned_pages_; }
  void RefusePages() { refuses_pages_ = true; }

  absl::Status CopyToDevice(const void* host, void* device, int64_t bytes) override {
    return cpu_->CopyToDevice(host, device, bytes);
  }
  absl::Status CopyToHost(const void* device, void* host, int64_t bytes) override {
    return Queue([=, this] { return cpu_->CopyToHost(device, host, bytes); });
  }
  absl::Status Synchronize() override { return RunUntil(queue_.size()); }

  absl::Status RecordEvent(int event) override {
    events_[event] = queued_;
    return Queue([=, this] { return cpu_->RecordEvent(event); });
  }
  absl::Status WaitEvent(int event) override {
    const size_t done = queued_ - queue_.size();
    return events_[event] < done ? absl::OkStatus() : RunUntil(events_[event] - done + 1);
  }
  absl::StatusOr<double> SecondsBetween(int from, int to) override { return cpu_->SecondsBetween(from, to); }

  std::unique_ptr<Graph> MakeGraph() override {
    ++graphs_;
    return std::make_unique<QueuedGraph>(*this);
  }
  size_t graphs() const { return graphs_; }

  absl::Status DenseForward(const float* x, const float* weight, const float* bias, float* y, int64_t batch, int64_t in,
                            int64_t out, Activation activation) override {
    return Queue([=, this] { return cpu_->DenseForward(x, weight, bias, y, batch, in, out, activation); });
  }
  absl::Status DenseBackwardInput(const float* dy, const float* weight, const float* y, float* dx, int64_t batch,
                                  int64_t in, int64_t out, Activation activation) override {
    return Queue([=, this] { return cpu_->DenseBackwardInput(dy, weight, y, dx, batch, in, out, activation); });
  }
  absl::Status DenseBackwardWeights(const float* dy, const float* x, float* d_weight, float* d_bias, int64_t batch,
                                    int64_t in, int64_t out) override {
    return Queue([=, this] { return cpu_->DenseBackwardWeights(dy, x, d_weight, d_bias, batch, in, out); });
  }
  absl::Status LossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                               int64_t classes, LossSums* sums) override {
    return Queue([=, this] { return cpu_->LossAndGradient(loss, outputs, labels, d_outputs, batch, classes, sums); });
  }
  absl::Status SquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch,
                            LossSums* sums) override {
    return Queue([=, this] { return cpu_->SquaredError(outputs, targets, d_outputs, batch, sums); });
  }
  absl::Status Round(const float* values, int64_t count, WireType type, void* rounded) override {
    return Queue([=, this] { return cpu_->Round(values, count, type, rounded); });
  }
  absl::Status FindNotFinite(const void* values, int64_t count, WireType type, int32_t* found) override {
    return Queue([=, this] { return cpu_->FindNotFinite(values, count, type, found); });
  }
  absl::Status Gather(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features,
                      float* x) override {
    return Queue([=, this] { return cpu_->Gather(samples, indices, count, features, x); });
  }
  absl::Status Gather(const float* samples, const int32_t* indices, int64_t count, int64_t features,
                      float* x) override {
    return Queue([=, this] { return cpu_->Gather(samples, indices, count, features, x); });
  }
  absl::Status Gather(const int32_t* labels, const int32_t* indices, int64_t count, int32_t* gathered) override {
    return Queue([=, this] { return cpu_->Gather(labels, indices, count, gathered); });
  }

 private:
  using Work = std::function<absl::Status()>;

  // A graph that does its work at first as it comes, then records it, then replays it without asking again.
  class QueuedGraph final : public Graph {
   public:
    explicit QueuedGraph(QueuedBackend& backend) : backend_(backend) {}
    absl::Status Run(const Work& work) override {
      if (!done_) {
        done_ = true;
        return work();
      }
      if (recorded_.empty()) {
        backend_.recording_ = &recorded_;
        const absl::Status status = work();
        backend_.recording_ = nullptr;
        if (!status.ok()) return status;
      }
      for (const Work& each : recorded_) (void)backend_.Queue(each);
      return absl::OkStatus();
    }

   private:
    QueuedBackend& backend_;
    bool done_ = false;
    std::vector<Work> recorded_;
  };

  absl::Status Queue(Work work) {
    if (recording_ != nullptr) {
      recording_->push_back(std::move(work));
      return absl::OkStatus();
    }
    queue_.push_back(std::move(work));
    ++queued_;
    return absl::OkStatus();
  }

  absl::Status RunUntil(size_t count) {
    for (; count > 0; --count) {
      const Work work = std::move(queue_.front());
      queue_.pop_front();
      if (absl::Status status = work(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const std::unique_ptr<Backend> cpu_;
  const int64_t free_bytes_;
  std::deque<Work> queue_;
  size_t queued_ = 0;             // Ever.
  std::map<int, size_t> events_;  // The place of each in the queue, counted from the first ever.
  std::vector<Work>* recording_ = nullptr;
  size_t graphs_ = 0;
  size_t pinned_pages_ = 0;
  bool refuses_pages_ = false;
};

}  // namespace ps
