#include "tests/bench/link_worker.h"

#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/clock.h"
#include "common/slices.h"
#include "common/status.h"
#include "ps/client.h"
#include "ps/tensor.h"
#include "tests/bench/known_job.h"
#include "tests/bench/measurement.h"

namespace ps {
namespace {

// There are as many equal tensors as a network may have layers, so that their order plays its part.
Layout Model(int64_t bytes) {
  constexpr int64_t kTensors = 8;
  const int64_t elements = bytes / static_cast<int64_t>(sizeof(float));
  Layout layout;
  for (int64_t i = 0; i < kTensors; ++i) {
    const int64_t size = elements * (i + 1) / kTensors - elements * i / kTensors;
    if (size > 0) layout.push_back({absl::StrFormat("w%d", i), {size}});
  }
  return layout;
}

absl::Status AwaitLine() {
  std::string line;
  return std::getline(std::cin, line) ? absl::OkStatus() : absl::AbortedError("nobody says to go on");
}

PushContribution Pushed(const LinkWorkerOptions& options) {
  return options.rounds.has_value() ? PushContribution::kWeightDifference : PushContribution::kGradient;
}

absl::Status TakeSteps(const LinkWorkerOptions& options, const Layout& layout, Client& client) {
  const absl::StatusOr<TensorMemory> gradients = client.GradientBuffers();
  if (!gradients.ok()) return gradients.status();
  const absl::StatusOr<TensorMemory> weights = client.WeightBuffers();
  if (!weights.ok()) return weights.status();
  FillKnownGradients(client.rank(), gradients->tensors);
  PS_RETURN_IF_ERROR(StartKnownJob(client, layout, weights->tensors));
  const auto push_of = [&](uint64_t step) {
    return PushInfo{.step = step, .version = step, .samples = 1, .contribution = Pushed(options)};
  };
  const uint32_t fragments = options.rounds.has_value() ? options.rounds->fragments : 1;
  const std::vector<std::vector<uint32_t>> parts = FragmentsOf(layout, fragments);
  const auto exchange_part = [&](uint64_t step, std::chrono::nanoseconds before) {
    std::this_thread::sleep_for(before);
    PushInfo push = push_of(step);
    if (fragments > 1) push.tensors = parts[step % fragments];
    const auto exchange = client.StartPushPull(push, gradients->Read(), weights->tensors, /*deferred=*/false);
    std::this_thread::sleep_for(options.rounds->overlap);
    return exchange->Wait();
  };
  TimePoint last;
  uint64_t step = 0;
  // Rounds are long; the first brings what is new to a connection.
  for (int i = options.rounds.has_value() ? -1 : -kWarmUp; i < options.repeats; ++i, ++step) {
    if (i == 0) {
      std::cout << "begin" << std::endl;
      PS_RETURN_IF_ERROR(AwaitLine());
      last = Now();
    }
    const auto result = options.rounds.has_value() ? exchange_part(step, options.rounds->before_push)
                        : options.op == "push"     ? client.Push(push_of(step), gradients->Read())
                                               : client.PushPull(push_of(step), gradients->Read(), weights->tensors);
    if (!result.ok()) return result.status();
    const TimePoint now = Now();
    if (i >= 0) std::cout << absl::StrFormat("%.9f", Seconds(now - last)) << std::endl;
    last = now;
  }
  std::cout << "end" << std::endl;
  for (; step % fragments != 0; ++step) PS_RETURN_IF_ERROR(exchange_part(step, {}).status());  // All equally often.
  if (options.op == "push") {
    const auto pulled = client.Pull(weights->tensors, step);
    if (!pulled.ok()) return pulled.status();
  }
  return KnownWeights(layout, options.workers, options.wire.Format(), options.workers, Pushed(options))
      .Check(weights->Read(), step / fragments);
}

}  // namespace

absl::Status RunLinkWorker(const LinkWorkerOptions& options) {
  const Layout layout = Model(options.bytes);
  auto client = Client::Join({.server = options.server,
                              .shared_memory = "off",
                              .long_links = options.long_links,
                              .rank = options.rank,
                              .does_fragments = true},
                             layout);
  if (!client.ok()) return client.status();
  absl::Status status = TakeSteps(options, layout, **client);
  if (status.ok()) status = AwaitLine();
  if (status.ok()) status = (*client)->Done();
  const absl::Status left = (*client)->Leave(status.ok() ? "" : Message(status));
  return status.ok() ? left : status;
}

}  // namespace ps
