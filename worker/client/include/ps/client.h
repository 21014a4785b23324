// The parameter client: joins a job, pulls weights, pushes gradients. Usable without the rest of the worker.
//
//   auto client = ps::Client::Join({.server = "10.0.0.1:5000"}, layout);        // blocks; gets a rank
//   if ((*client)->should_initialise()) (*client)->Initialise(initial_values);
//   (*client)->Pull(weights);
//   for (…) (*client)->PushPull({.step = …, .samples = …}, gradients, weights);
//   (*client)->Done();  (*client)->Leave();
//
// Every wait is bounded: a server that cannot be reached for `connect_timeout` ends the call with UNAVAILABLE and its
// address; a wait for other workers is renewed (and told to `on_notice`) for as long as the chief says that the job
// lives, and the chief gives up on whoever is silent for its lease. A call that failed with a transient error is
// retried; pushes are counted once however often they are sent.
//
// Thread-safe, but a rank has one push in flight at a time: start the next exchange when the last has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ps/tensor.h"

namespace ps {

struct ClientOptions {
  std::string server;  // The chief: HOST:PORT or unix:PATH.
  std::string job = "default";
  std::string name;              // Empty: made of the host, the process and a random number. A live worker of this
                                 // name is replaced.
  std::optional<uint32_t> rank;  // Claims this rank; else the lowest free one.
  std::map<std::string, std::string> experiment;       // Settings that must be the same on all workers.
  absl::Duration connect_timeout = absl::Seconds(30);  // A server that is silent for so long is lost.
  absl::Duration start_timeout = absl::Minutes(10);    // For the job to start (all workers joined).
  absl::Duration notice_every = absl::Seconds(10);     // While waiting, on_notice is called about so often.
  // When a stop is requested, whatever waits ends with CANCELLED, and so does all that begins later but Leave.
  std::stop_token stop;
  // Told what is waited for, and what is tried again: one line. Called from any thread; must not call the client.
  std::function<void(const std::string&)> on_notice;
};

// What became of a push on one shard. See ps.proto, Answer.
enum class PushAnswer { kNone = 0, kApplied = 1, kDuplicate = 2, kStale = 3, kFenced = 4 };

struct PushInfo {
  uint64_t step = 0;     // Ascending, from Client::start_step().
  uint64_t version = 0;  // The version that the gradient was computed on (ExchangeResult::version).
  // The same by shard (ExchangeResult::versions), where shards may differ; empty: `version` on all.
  std::vector<uint64_t> versions = {};
  uint32_t samples = 0;  // Samples that the mean gradient is over; 0: an empty contribution, nothing is sent.
};

struct ExchangeResult {
  uint64_t version = 0;             // Of the pulled weights: the lowest over the shards (in bsp all are equal).
  std::vector<uint64_t> versions;   // By shard.
  std::vector<PushAnswer> answers;  // By shard; empty for a pull.
  // Where the time went, in seconds: sending, parked at the servers, receiving. They sum to the exchange's duration
  // since its last gradient was ready.
  double push_s = 0;
  double wait_s = 0;
  double pull_s = 0;
};

// The fingerprint of a job's weights.
struct HashedWeights {
  std::string hash;                // 32 hexadecimal digits; see common/hash.h.
  std::vector<uint64_t> versions;  // What was hashed, by shard. In a mode that gathers all are the same.
};

// The hash, and the shards' versions where they differ: "0123… (the shards are at versions 7, 8)".
std::string ToString(const HashedWeights& weights);

// One memory block for each tensor of the layout, in order. The memory stays the caller's, and must stay as it is (or,
// for weights, untouched) until the exchange has ended.
using ConstTensors = std::vector<std::span<const float>>;
using MutableTensors = std::vector<std::span<float>>;

// An exchange that is under way.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // For an exchange started with `deferred`: the gradient of this tensor is final and may be sent. Never blocks.
  virtual void TensorReady(size_t tensor) = 0;
  // Blocks until these weights are here and will not change any more, so that a forward pass can begin with the first
  // layers'; tensors come in layout order. In a mode that does not gather, a pull that is tried again may bring another
  // version: there it waits for the end. The error, if the exchange has ended with one.
  virtual absl::Status WaitTensor(size_t tensor) = 0;
  // Blocks until the end.
  virtual absl::StatusOr<ExchangeResult> Wait() = 0;
};

class Client {
 public:
  using DoneCallback = std::function<void(absl::StatusOr<ExchangeResult>)>;

  // Joins the job. Blocks until all servers have taken the worker in. INVALID_ARGUMENT, FAILED_PRECONDITION (the model,
  // the settings or the number of workers do not fit; named), UNAVAILABLE, ABORTED (the job failed), CANCELLED (a stop
  // was requested), DEADLINE_EXCEEDED (start_timeout; who is waited for). Without an answer it cancels the join, for
  // which a server that does not answer either is given 2 s.
  static absl::StatusOr<std::unique_ptr<Client>> Join(const ClientOptions& options, const Layout& layout);
  // Leaves, if Leave was not called: the job then knows that this worker did not end in order.
  virtual ~Client() = default;

  virtual uint32_t rank() const = 0;
  virtual uint64_t incarnation() const = 0;
  virtual uint64_t generation() const = 0;
  virtual uint32_t num_workers() const = 0;
  virtual uint32_t num_shards() const = 0;
  virtual const std::string& name() const = 0;
  virtual const std::string& mode() const = 0;
  // True in a mode where a version is made of one step of all workers, so that version and step run together.
  virtual bool gathers() const = 0;
  virtual uint64_t start_step() const = 0;
  // The live worker whose rank this one took by joining under its name, or after its connection had ended, as "NAME on
  // HOST"; empty if there was none.
  virtual const std::string& replaced() const = 0;

  // True while this worker is the job's lead, as the chief last said: the lowest live rank, which evaluates along the
  // way and makes the end.
  virtual bool lead() const = 0;

  // True while the chief asks this worker for the initial values. The grant can come later than Join, when the worker
  // that had it is lost: Start sends its `initial_values` then.
  virtual bool should_initialise() const = 0;
  // Sends the initial values to every shard.
  virtual absl::Status Initialise(const ConstTensors& values) = 0;

  // The start of training: sends `initial_values` if (or as soon as) the chief asks for them, waits until the job runs,
  // and pulls the newest version.
  virtual absl::StatusOr<ExchangeResult> Start(const ConstTensors& initial_values, const MutableTensors& weights) = 0;

  // Blocking forms.
  virtual absl::StatusOr<ExchangeResult> Push(const PushInfo& push, const ConstTensors& gradients) = 0;
  virtual absl::StatusOr<ExchangeResult> Pull(const MutableTensors& weights,
                                              std::optional<uint64_t> version = std::nullopt) = 0;
  virtual absl::StatusOr<ExchangeResult> PushPull(const PushInfo& push, const ConstTensors& gradients,
                                                  const MutableTensors& weights) = 0;

  // Asynchronous forms. Without `weights` only a push, without `gradients` only a pull. The callback, if any, is called
  // once, from a thread of the client; it must not block. `deferred`: nothing is sent until TensorReady says so.
  virtual std::shared_ptr<Exchange> StartPushPull(const PushInfo& push, const ConstTensors& gradients,
                                                  const MutableTensors& weights, bool deferred,
                                                  DoneCallback callback = nullptr) = 0;

  // Says that this worker's budget is spent and waits until every worker's is. Then it returns on the lead first: lead()
  // is true, and the end (pulling, evaluating, saving) is this worker's to make before it leaves. On the others it
  // returns when the lead has left; if the lead is lost, on the next one as lead.
  virtual absl::Status Done() = 0;
  // Leaves the job: in order after Done, else for this reason.
  virtual absl::Status Leave(const std::string& reason = "") = 0;

  // The weights hash of the newest version. In a mode that gathers it is of one version on all shards, for which it
  // asks again for up to connect_timeout while the job runs; in others each shard's own newest version.
  virtual absl::StatusOr<HashedWeights> WeightsHash() = 0;
};

}  // namespace ps
