// A job whose workers are the test: it says what each of them pushes, and in which order. Real servers and clients, in
// this process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/integration/cluster.h"

namespace ps {

using Tensors = std::vector<std::vector<float>>;

// The first has two slices, which are on two of three servers.
inline const Layout kScriptedModel = {{"a", {40000}}, {"b", {17}}, {"c", {1}}};

inline Tensors AllOf(float value) {
  Tensors tensors;
  for (const TensorSpec& spec : kScriptedModel) tensors.emplace_back(static_cast<size_t>(spec.elements()), value);
  return tensors;
}
inline ConstTensors ReadOnly(const Tensors& tensors) { return {tensors.begin(), tensors.end()}; }
inline MutableTensors Writable(Tensors& tensors) { return {tensors.begin(), tensors.end()}; }

// In bsp and backup.
class ScriptedJob {
 public:
  // A tensor of no elements is absent.
  using GradientOf = std::function<Tensors(uint32_t rank, uint64_t step)>;

  ScriptedJob(const ServerOptions& options, const Tensors& initial, GradientOf gradient,
              const std::string& shared_memory = "auto")
      : cluster(options), gradient_(std::move(gradient)), weights_(options.num_workers, initial) {
    for (uint32_t rank = 0; rank < options.num_workers; ++rank) {
      auto client =
          Client::Join({.server = cluster.address(), .shared_memory = shared_memory, .rank = rank}, kScriptedModel);
      REQUIRE(client.ok());
      clients_.push_back(*std::move(client));
    }
    for (uint32_t rank = 0; rank < options.num_workers; ++rank) {
      REQUIRE(clients_[rank]->Start(ReadOnly(initial), Writable(weights_[rank])).ok());
    }
  }

  // The next step: its ranks push in this order. All but the last `late` make its version, and are answered before
  // those push, who come too late.
  void Step(const std::vector<uint32_t>& order, size_t late) {
    const size_t in_time = order.size() - late;
    std::vector<Tensors> gradients;
    gradients.reserve(order.size());
    for (const uint32_t rank : order) gradients.push_back(gradient_(rank, step_));
    std::vector<std::shared_ptr<Exchange>> exchanges;
    for (size_t i = 0; i < in_time; ++i) exchanges.push_back(Push(order[i], gradients[i]));
    for (const auto& exchange : exchanges) ExpectAnswer(*exchange, PushAnswer::kApplied);
    for (size_t i = in_time; i < order.size(); ++i) ExpectAnswer(*Push(order[i], gradients[i]), PushAnswer::kStale);
    for (const Tensors& weights : weights_) CHECK(weights == weights_[0]);
    ++step_;
  }

  // All leave. Returns the hash of the last version.
  std::string End() {
    const absl::StatusOr<HashedWeights> hashed = clients_[0]->WeightsHash();
    REQUIRE(hashed.ok());
    std::vector<std::thread> ends;
    ends.reserve(clients_.size());
    for (auto& client : clients_) {
      ends.emplace_back([&client] {
        (void)client->Done();
        (void)client->Leave();
      });
    }
    for (std::thread& end : ends) end.join();
    return hashed->hash;
  }

  const Tensors& weights() const { return weights_[0]; }

  Cluster cluster;

 private:
  std::shared_ptr<Exchange> Push(uint32_t rank, const Tensors& gradient) {
    const PushInfo info = {.step = step_, .version = step_, .samples = rank + 1};
    auto exchange =
        clients_[rank]->StartPushPull(info, ReadOnly(gradient), Writable(weights_[rank]), /*deferred=*/true);
    for (size_t tensor = 0; tensor < gradient.size(); ++tensor) {
      gradient[tensor].empty() ? exchange->TensorAbsent(tensor) : exchange->TensorReady(tensor);
    }
    return exchange;
  }
  void ExpectAnswer(Exchange& exchange, PushAnswer expected) const {
    const absl::StatusOr<ExchangeResult> result = exchange.Wait();
    INFO(result.status().ToString());
    REQUIRE(result.ok());
    CHECK(result->next_step == step_ + 1);
    CHECK(result->version == step_ + 1);
    CHECK(result->answers == std::vector<PushAnswer>(cluster.servers.size(), expected));
  }

  const GradientOf gradient_;
  std::vector<Tensors> weights_;  // One for each rank.
  std::vector<std::unique_ptr<Client>> clients_;
  uint64_t step_ = 0;
};

}  // namespace ps
