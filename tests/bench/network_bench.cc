#include "tests/bench/network_bench.h"

#include <cmath>

#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>
#include "absl/strings/str_cat.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/status.h"
#include "ps/client.h"
#include "ps/v1/ps.grpc.pb.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kCallTime(10);

absl::Status RoundTrip(v1::Chief::Stub& chief) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallTime);
  v1::StatusReply reply;
  return FromGrpc(chief.Status(&context, v1::StatusRequest(), &reply));
}

// Like Measure, but the work can fail.
template <typename Work>
absl::Status Add(const std::string& name, int repeats, double bytes, std::vector<Measurement>* rows, Work work) {
  absl::Status status;
  rows->push_back(Measure(name, repeats, bytes, [&] {
    if (status.ok()) status = work();
  }));
  return Annotate(status, name);
}

// A gradient whose elements differ, so that one in another's place is noticed.
std::vector<float> MakeGradient(size_t elements) {
  std::vector<float> gradient(elements);
  for (size_t i = 0; i < elements; ++i) gradient[i] = static_cast<float>(1 + i % 7);
  return gradient;
}

// From zero, SGD without decay (with or without momentum) moves each weight in proportion to its gradient.
absl::Status CheckWeights(const std::vector<float>& weights, const std::vector<float>& gradient) {
  for (size_t i = 0; i < weights.size(); ++i) {
    const float expected = weights[0] / gradient[0] * gradient[i];
    if (weights[0] < 0 && std::abs(weights[i] - expected) <= 1e-4F * std::abs(expected)) continue;
    return absl::DataLossError(absl::StrCat("weight ", i, " is ", weights[i], ", expected ", expected));
  }
  return absl::OkStatus();
}

absl::Status MeasureJob(Client& client, int64_t bytes, int repeats, std::vector<Measurement>* rows) {
  const std::vector<float> zeros(static_cast<size_t>(bytes) / sizeof(float));
  const std::vector<float> gradient = MakeGradient(zeros.size());
  std::vector<float> weights(zeros.size());
  const absl::StatusOr<ExchangeResult> started = client.Start({zeros}, {weights});
  if (!started.ok()) return started.status();
  uint64_t step = client.start_step();
  uint64_t version = started->version;
  const auto size = static_cast<double>(bytes);
  PS_RETURN_IF_ERROR(Add("push, to the server", repeats, size, rows, [&]() -> absl::Status {
    const absl::StatusOr<ExchangeResult> pushed =
        client.Push({.step = step++, .version = version, .samples = 1}, {gradient});
    if (pushed.ok()) version = pushed->version;
    return pushed.status();
  }));
  PS_RETURN_IF_ERROR(
      Add("pull, from the server", repeats, size, rows, [&] { return client.Pull({weights}).status(); }));
  PS_RETURN_IF_ERROR(CheckWeights(weights, gradient));
  return client.Done();
}

}  // namespace

absl::StatusOr<std::vector<Measurement>> RunNetworkBench(const std::string& server, int64_t bytes, int repeats) {
  std::vector<Measurement> rows;
  const absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Join({.server = server, .name = "ps_bench"}, {{"w", {bytes / static_cast<int64_t>(sizeof(float))}}});
  if (!client.ok()) return client.status();
  const auto chief = v1::Chief::NewStub(MakeChannel(server, grpc::InsecureChannelCredentials(), 0));
  absl::Status status = Add("round trip", repeats, 0, &rows, [&] { return RoundTrip(*chief); });
  if (status.ok()) status = MeasureJob(**client, bytes, repeats, &rows);
  const absl::Status left = (*client)->Leave(status.ok() ? "" : Message(status));
  if (!status.ok()) return status;
  if (!left.ok()) return left;
  return rows;
}

}  // namespace ps
