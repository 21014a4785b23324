// The parameter client: joins a job, pulls weights, pushes gradients. It does not need the rest of the worker.
//
//   auto client = ps::Client::Join({.server = "10.0.0.1:5000"}, layout);        // blocks; gets a rank
//   if ((*client)->should_initialise()) (*client)->Initialise(initial_values);
//   (*client)->Pull(weights);
//   for (…) (*client)->PushPull({.step = …, .samples = …}, gradients, weights);
//   (*client)->Done();  (*client)->Leave();
//
// Every wait is bounded. If a server cannot be reached for `connect_timeout`, the call fails with UNAVAILABLE and the
// server's address; where the job keeps checkpoints, after Client::server_timeout, for which servers that died are
// waited for. They come back as another generation of the job, for which a client is made anew (RejoinOptions). A wait
// for other workers is renewed (and reported to `on_notice`) for as long as the chief says that the job is alive; the
// chief drops a worker that is silent for longer than its lease. Transient errors are retried; a push counts once
// however often it is sent.
//
// Thread-safe, but a rank has one push in flight at a time: start the next exchange after the previous one has ended.
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
#include "ps/data_summary.h"
#include "ps/schedule.h"
#include "ps/tensor.h"
#include "ps/wire_type.h"

namespace ps {

// The optimizer that a worker was written for; see ps.proto, OptimizerSettings.
struct OptimizerSettings {
  std::string optimizer;                         // By the name of its flag.
  std::map<std::string, float> hyperparameters;  // By the names of their flags; the others have their defaults.
  std::optional<float> clip_value;
  std::optional<float> clip_tensor_norm;
  std::optional<float> clip_norm;
  // Of the groups 1, 2 and so on (TensorSpec::group), at most 1024: what differs from `hyperparameters`, of those that
  // may change while a job runs.
  std::vector<std::map<std::string, float>> groups = {};
};

struct ClientOptions {
  std::string server;  // The chief: HOST:PORT or unix:PATH.
  std::string job = "default";
  // Exchange with servers of this host and user through shared memory: auto (where a server offers it), off (gRPC), or
  // require (FAILED_PRECONDITION of the join, naming the shard, where it is not to be had).
  std::string shared_memory = "auto";
  // What may be on its way on a connection to another host grows with the link's delay: for round trips of some
  // milliseconds and more, with the same flag of the servers.
  bool long_links = false;
  std::string name;              // Empty: made of the host, the process and a random number. A live worker with this
                                 // name is replaced.
  std::optional<uint32_t> rank;  // Claims this rank; else the lowest free one.
  std::map<std::string, std::string> experiment;  // Settings that must be the same on all workers, by flag.
  // What the worker was started with, by flag: kept for whoever takes its rank later (FlagsOfJob). At most 64, of 16
  // KiB together.
  std::map<std::string, std::string> flags;
  // The number of samples in the training split, by which a schedule of the learning rate counts epochs. 0: this worker
  // does not tell it, which is an error where the job's schedule has lengths in epochs and no other worker has told it.
  uint64_t samples_per_epoch = 0;
  // Set, in the place of samples_per_epoch: this worker trains on samples of its own, and so do all others. The join
  // then waits until all workers have joined (start_timeout), and Client::data_of_all says what they have together.
  std::optional<DataSummary> own_data;
  // Pushes say that they count for 1 sample each, whatever their gradients were computed on. The join is refused where
  // a schedule of the servers counts samples.
  bool counts_steps = false;
  // The worker does what LocalSteps says of fragments, overlap and mix; else a job that needs it refuses it.
  bool does_fragments = false;
  // The optimizer that servers are to apply if they leave it to the workers (--optimizer=from_worker); other servers
  // must have been started with the same one. Unset: the worker takes whatever the servers apply.
  std::optional<OptimizerSettings> optimizer;
  // Durations are more than 0 and at most 240 h.
  absl::Duration connect_timeout = absl::Seconds(30);  // A server that is silent for this long is given up.
  // A worker that joins again (RejoinOptions) takes nobody's place. `rank` is then a wish.
  bool yields = false;
  // Unless 0, this is how long a worker that joins again waits for its servers (RejoinOptions). 0 to 240 h.
  absl::Duration rejoin_timeout = absl::ZeroDuration();
  // A worker that joins again tells the folder of complete checkpoints that it knows of, their generation and the
  // newest version (RejoinOptions). A chief that begins the job anew, and has none of them, refuses the worker.
  std::string known_dir;
  uint64_t known_generation = 0;
  uint64_t known_version = 0;
  absl::Duration start_timeout = absl::Minutes(10);  // For the job to start (all workers joined).
  absl::Duration notice_every = absl::Seconds(10);   // While waiting, on_notice is called about this often; ≥ 1 ms.
  // When a stop is requested, all waiting calls end with CANCELLED, and so do all later ones except Leave.
  std::stop_token stop;
  // True: a thread of the client looks at deferred gradients and passes them on. False: the thread that calls
  // TensorReady does.
  bool sender_thread = false;
  // Called once, from any thread, when an operator asks this worker to leave (ps_ctl drain); must not call the client.
  std::function<void()> on_asked_to_leave;
  // Gets one line on what is waited for or retried. Called from any thread; must not call the client.
  std::function<void(const std::string&)> on_notice;
};

// INVALID_ARGUMENT with every problem, one a line, each naming its flag or field. Client::Join checks the same.
absl::Status ValidateClientOptions(const ClientOptions& options);

// The outcome of a push on one shard. See ps.proto, Answer.
enum class PushAnswer { kNone = 0, kApplied = 1, kDuplicate = 2, kStale = 3, kFenced = 4 };

// What a push carries. See ps.proto, Contribution.
enum class PushContribution { kGradient = 0, kWeightDifference = 1 };

struct PushInfo {
  uint64_t step = 0;     // Ascending, from Client::start_step().
  uint64_t version = 0;  // The version that the gradient was computed on (ExchangeResult::version).
  // The version by shard (ExchangeResult::versions), if shards may differ; empty: `version` on all.
  std::vector<uint64_t> versions = {};
  uint32_t samples = 0;  // Samples that the mean gradient was computed on; 0: an empty contribution, nothing is sent.
  PushContribution contribution = PushContribution::kGradient;
  // Samples that this worker has used since its last push, which schedules count; unset: `samples`.
  std::optional<uint64_t> passed = {};
  // The job's learning rate from the version on that this push makes; what the lowest rank says counts. See ps.proto,
  // PushRequest.
  std::optional<float> learning_rate = {};
  // What differs by group from the version on that this push makes, in place of all that groups had of their own before
  // (OptimizerSettings::groups); the first one is of group 0, and changes what holds for all, but for the learning
  // rate. As for the learning rate, what the lowest rank says counts. Unset: as before. At most 32 KiB as it is sent.
  std::optional<std::vector<std::map<std::string, float>>> groups = {};
  // Where the job hands out runs: how many of the runs that this worker has taken, counted from its first one, are used
  // once this push is applied; each goes into one push. A job that goes back to a checkpoint hands out the others
  // again, and with --stale_runs=return also those whose push every shard refused. Unset: all that the worker has
  // taken.
  std::optional<uint64_t> runs = {};
  // Unless empty, the push is partial: it carries these tensors alone, by their index in the layout, ascending, and a
  // push_pull brings them alone. Servers leave all others as they are. Other blocks of memory may be empty. Where a
  // version is made of several workers' pushes, all carry the same (LocalSteps::fragments).
  std::vector<uint32_t> tensors = {};
  // What follows if a gradient is not finite. True: the push becomes an empty contribution, or, in a mode without those
  // (ModePolicy), nothing is pushed; weights are pulled all the same. False: the exchange fails.
  bool skip_not_finite = false;
  // The gradients lie, rounded, in the memory of Client::RoundedGradients. The exchange is still given a block for each
  // tensor, but does not read it; the block may be empty. INVALID_ARGUMENT where the job takes no rounded gradients, or
  // where nobody has asked for that memory.
  bool rounded = false;
};

// One memory block for each tensor of the layout, in order. The memory belongs to the caller. Until the exchange has
// ended, gradients must not be changed, and weights neither read (but see WaitTensor) nor changed. After an error
// weights may hold parts of several versions, and of one that was never made.
using ConstTensors = std::vector<std::span<const float>>;
using MutableTensors = std::vector<std::span<float>>;

// Weights where a server keeps them, to be read only. They stay as they are until the worker has pushed what it
// computed on them, and, as long as a copy of `pin` lives and the link lasts, also after that. The pin keeps the server
// from writing there, so it is to be let go of when the next weights have come. Empty: there are none.
struct WeightsView {
  ConstTensors tensors;
  std::shared_ptr<const void> pin;
  // The memory that the weights lie in; it begins with a page. It stays mapped for as long as a copy of this lives, but
  // may be written once the pin is let go of. Views of later versions lie in a few such pieces of memory in turn, so
  // what is done for a piece, as pinning it for a GPU, need not be done again.
  std::shared_ptr<const std::span<const std::byte>> pages;
};

struct ExchangeResult {
  uint64_t version = 0;             // The pulled weights': the lowest of all shards' (in bsp all are equal).
  std::vector<uint64_t> versions;   // By shard.
  std::vector<PushAnswer> answers;  // By shard; empty for a pull.
  // After a push: the step that this rank is to continue at, which is the highest that a shard names. It is the one
  // after the push, unless the job has gone on without this worker.
  uint64_t next_step = 0;
  // After a pull in a mode in which the worker takes steps by itself: the optimizer's hyperparameters for the step that
  // follows `version`, by the name of their flag, as they are on shard 0. Else empty.
  std::map<std::string, float> hyperparameters;
  // Where there are hyperparameters: the schedule of the learning rate, and its position at `version`.
  Schedule schedule = {};
  uint64_t position = 0;
  // After StartPushView, where the weights can be viewed: where they are. Then nothing was written to the caller's
  // memory.
  WeightsView view = {};
  // With PushInfo::skip_not_finite: the tensor whose gradient was not finite; empty: all were.
  std::string skipped = {};
  std::string why_skipped = {};  // What is wrong with it: "is not finite", or why else it cannot be sent.
  // Time spent, in seconds: sending, parked at the servers, receiving. The sum is the exchange's duration from the time
  // its last gradient was ready.
  double push_s = 0;
  double wait_s = 0;
  double pull_s = 0;
};

// A mode in which workers take optimizer steps by themselves, on weights of their own, between two exchanges. How each
// exchange goes is in ps.proto, LocalSteps.
struct LocalSteps {
  enum class Exchange { kAverageWeights, kAverageGradients, kElastic };
  Exchange exchange = Exchange::kAverageWeights;
  uint32_t steps = 1;  // Batches from one exchange to the next; 0 (kAverageGradients only): no gradients are exchanged.
  // With kAverageGradients: after how many batches or epochs weights are averaged; one of the two is set.
  uint64_t average_every_steps = 0;
  double average_every_epochs = 0;
  float alpha = 0;        // With kElastic.
  std::string optimizer;  // By the name of its flag.
  // How the worker clips its gradients, as ps_server's flags of these names say; 0: it does not.
  float clip_value = 0;
  float clip_tensor_norm = 0;
  float clip_norm = 0;
  // With kAverageWeights: push s carries fragment s mod fragments.size() alone, whose tensors these are, and its
  // weights are taken `overlap` batches after it, when the worker's become mix times its own and the rest what came.
  // One fragment has all tensors.
  std::vector<std::vector<uint32_t>> fragments;
  uint32_t overlap = 0;
  float mix = 0;
};

// What the job's mode asks of a worker.
struct ModePolicy {
  // In a step in which it has no samples, the worker pushes an empty contribution; else it pushes nothing.
  bool empty_contributions = false;
  // A push_pull of step v brings version v + 1, however often it is asked. Else it brings the newest, which in a
  // synchronous mode is at least that one; shards may differ.
  bool exact_versions = false;
  std::optional<LocalSteps> local_steps;  // Set: the worker takes optimizer steps by itself.
};

// What a worker asks for in a job that hands out runs (Client::hands_out_runs). The samples of the training split, in
// the order of an epoch's permutation, are cut into runs of batch_size, the last one shorter. Run r of the job is
// number r mod p of epoch r / p, where p is the number of runs of an epoch.
struct RunRequest {
  uint64_t number = 1;    // The worker numbers the runs that it takes, from 1; this is the one that it asks for.
  uint64_t finished = 0;  // So many of its runs, from the first on, are used: their push is answered.
  // These are the same on all workers.
  uint64_t samples = 0;     // The training split has so many.
  uint64_t batch_size = 0;  // A run has so many samples.
  uint64_t runs = 0;        // The whole job has so many.
  // So many runs, at most 64, are taken before they are used, so that their data can be read meanwhile. Then each push
  // has to say how many are used (PushInfo::runs).
  uint64_t ahead = 0;
  // How long the call waits while there is no run, but one may still come back from a worker that is lost. 0: not at
  // all.
  absl::Duration wait = absl::InfiniteDuration();
};

struct TakenRun {
  enum class Outcome {
    kRun,
    kWait,  // There is none now, but one may come back: ask again, with the same number.
    kDone,  // All have been used.
  };
  Outcome outcome = Outcome::kWait;
  uint64_t run = 0;  // Its number in the job, from 0.
};

// The fingerprint of a job's weights.
struct HashedWeights {
  std::string hash;                // 32 hexadecimal digits; see common/hash.h.
  std::vector<uint64_t> versions;  // The hashed version of each shard. In a synchronous mode all are the same.
};

// The hash, and the shards' versions where they differ: "0123… (the shards are at versions 7, 8)".
std::string ToString(const HashedWeights& weights);

// Memory of the client for the tensors of the layout: each block begins on a 64-byte boundary and is zeroed at first.
// It lives for as long as a copy of `owner` does, also after the client.
struct TensorMemory {
  MutableTensors tensors;
  std::shared_ptr<void> owner;
  // All of it, from the start of a page on, if it is one piece: gradients that servers of this host read where they
  // lie. A device may be told to copy there. After an exchange that failed it has to be told anew: then other pages are
  // at the same place.
  std::span<std::byte> block;

  ConstTensors Read() const { return {tensors.begin(), tensors.end()}; }
};

// Memory for gradients in the form in which a job with gradients of 16 bits sends them, with a block for each tensor: a
// weight's elements are of `type`, a buffer's (TensorKind) are float32, and a constant's block is not read. Each begins
// on a 64-byte boundary. `owner` as in TensorMemory. `block` is all of it, from the start of a page on, whether or not
// servers of this host read it; what TensorMemory says of devices and of exchanges that failed holds for it, too.
struct RoundedMemory {
  WireType type = WireType::kBfloat16;
  std::vector<std::span<std::byte>> tensors;
  std::shared_ptr<void> owner;
  std::span<std::byte> block;
};

// An exchange in progress: one push, one pull or both, over all shards. If the exchange is deferred, no shard has the
// whole push, and no weight is written, before the last tensor is ready.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // For an exchange started with `deferred`, once for each tensor: its gradient is final and may be sent. Never blocks.
  // The exchange fails if the gradient is not finite, or if the tensor was ready already. (In a mode that a lost worker
  // fails, a gradient that servers read in shared memory is looked at there, as it is applied, and then the job fails.)
  virtual void TensorReady(size_t tensor) = 0;
  // The same, for a gradient that the caller has found finite in the form in which it is sent: a GPU finds out faster.
  // A client that encodes what it sends looks all the same.
  virtual void TensorReadyFinite(size_t tensor) { TensorReady(tensor); }
  // The same, for a gradient whose memory is only known now. It must not change until the
  // exchange has ended or `release`, if any, is called: once, from any thread, which it must not block, and soon after
  // the end at the latest.
  virtual void TensorReady(size_t tensor, std::span<const float> gradient, std::function<void()> release) = 0;
  // Called once in the place of TensorReady: there is no gradient of this weight. Where other workers have one, this
  // worker's counts as zeros; a step in which nobody has one leaves the weight as it is, with the optimizer's state and
  // its count of updates. Only the absence is sent. Never blocks. The exchange fails unless it pushes gradients and the
  // tensor is a weight (TensorKind).
  virtual void TensorAbsent(size_t tensor) = 0;
  // Sets the number of samples that the push counts for, if it is another than PushInfo said; with 0 the push becomes
  // an empty contribution, as with skip_not_finite. Returns false, and changes nothing, once the last tensor is ready,
  // or if the exchange pushes nothing. Another number costs sending the gradients again.
  virtual bool SetSamples(uint32_t samples) = 0;
  // Blocks until this tensor's weights have arrived and are final, so that a forward pass can begin with the first
  // layers; tensors arrive in layout order. Weights that servers send before they have committed their version
  // (streaming) count as arrived when the version is committed, and never before. Without exact versions (ModePolicy) a
  // retried pull may bring another version, so this waits for the whole exchange there. Returns the error if the
  // exchange failed.
  virtual absl::Status WaitTensor(size_t tensor) = 0;
  // Blocks until the exchange has ended.
  virtual absl::StatusOr<ExchangeResult> Wait() = 0;
  // The same two, but they wait for this time at most. Nothing: the time was not long enough, and the exchange goes on.
  virtual std::optional<absl::Status> WaitTensorFor(size_t tensor, absl::Duration time) = 0;
  virtual std::optional<absl::StatusOr<ExchangeResult>> WaitFor(absl::Duration time) = 0;
};

// What Client::Reduce does with the numbers of all workers.
enum class Reduction { kSum = 0, kMin = 1, kMax = 2 };

struct Reduced {
  std::vector<double> values;
  uint32_t workers = 0;  // So many have brought theirs.
};

// The optimizer's state of all weights, as the servers have it. Each block is laid out as its tensor.
struct OptimizerState {
  struct Tensor {
    uint64_t updates = 0;                    // That the weight has had.
    std::vector<std::vector<float>> values;  // In the order of the optimizer (docs/optimizers.md); given to the servers
                                             // of a weight that has had no updates: none.
  };
  std::vector<Tensor> tensors;  // By index in the layout; those of other tensors than weights are empty.
};

// What a worker tells of a batch that it trained on, for whoever watches the job (Client::ReportStep). Nothing is
// decided by it. Seconds are those that training waited for: of an exchange what computation did not hide.
struct StepReport {
  uint64_t step = 0;  // The number of the step that the batch belongs to.
  uint32_t samples = 0;
  std::optional<double> loss;  // The mean over the samples; it may be NaN or infinite.
  double forward_s = 0;
  double backward_s = 0;
  double push_s = 0;
  double wait_s = 0;
  double pull_s = 0;
  double other_s = 0;      // Of the time since the report before: reading data, evaluating.
  uint64_t all_steps = 0;  // The worker is done after so many; 0: it is not known.
};

// An evaluation, for whoever watches the job.
struct EvaluationReport {
  std::string split;  // "test", "train", "validation".
  uint64_t step = 0;
  uint64_t version = 0;
  double loss = 0;
  std::optional<double> accuracy;  // 0 to 1.
};

class Client {
 public:
  using DoneCallback = std::function<void(absl::StatusOr<ExchangeResult>)>;

  // Joins the job. Blocks until all servers have accepted the worker. INVALID_ARGUMENT, FAILED_PRECONDITION (the model,
  // a setting or the number of workers does not match; the text says which), UNAVAILABLE, ABORTED (the job failed),
  // CANCELLED (a stop was requested), DEADLINE_EXCEEDED (start_timeout; the text says what was waited for). If no
  // answer came, it cancels the join at the server, which takes at most 2 s.
  static absl::StatusOr<std::unique_ptr<Client>> Join(const ClientOptions& options, const Layout& layout);
  // Leaves the job if Leave was not called, with the reason that the worker ended without leaving.
  virtual ~Client() = default;

  virtual uint32_t rank() const = 0;
  virtual uint64_t incarnation() const = 0;
  virtual uint64_t generation() const = 0;
  virtual uint32_t num_workers() const = 0;
  virtual uint32_t num_shards() const = 0;
  virtual const std::string& name() const = 0;
  virtual const std::string& mode() const = 0;
  // True in a mode where a version is made of one step of all workers, so that version and step advance together.
  virtual bool synchronous() const = 0;
  virtual const ModePolicy& policy() const = 0;
  virtual uint64_t start_step() const = 0;
  // Whether start_step() is the highest step that any rank has come to, and not this rank's own: so it is where ranks
  // go on by themselves and the job does not keep a lost rank's place (--on_worker_loss).
  virtual bool starts_with_others() const { return false; }
  // The live worker that this one replaced, by joining under its name or by claiming its rank after its connection was
  // lost, as "NAME on HOST"; empty if there was none.
  virtual const std::string& replaced() const = 0;

  // Unless 0, the job keeps checkpoints, and this is how long servers that cannot be reached are waited for.
  virtual absl::Duration server_timeout() const { return absl::ZeroDuration(); }
  // The version of the checkpoint that this generation began with; 0: there was none, or it was the first.
  virtual uint64_t restored_version() const { return 0; }
  // The newest generation known to this worker that had a complete checkpoint, and the folder of its checkpoints as its
  // chief sees it. That is this client's generation, once the job has run or where it began with a checkpoint; else it
  // is the one that the options name. If there is none, the folder is empty.
  struct KnownCheckpoints {
    std::string dir;
    uint64_t generation = 0;
    uint64_t version = 0;  // The newest that one of them has; 0: none, or the first.
  };
  virtual KnownCheckpoints known_checkpoints() const { return {}; }
  // Unless both are 0, a checkpoint was restored with another number of workers, at this step, when these many samples
  // had been used: fixed shares of the samples are counted from there.
  struct Resized {
    uint64_t step = 0;
    uint64_t samples = 0;
  };
  virtual Resized resized() const { return {}; }
  // What all workers have together, in a job whose workers train on samples of their own. It is the same for all
  // workers, and for as long as the job goes on, also from a checkpoint.
  virtual std::optional<DataSummary> data_of_all() const { return std::nullopt; }
  // The job was rolled back to a checkpoint: another generation runs. This client is over, and everything that it is
  // asked ends with FAILED_PRECONDITION; the worker may join again (RejoinOptions). Once true, it stays so. What has
  // ended the client otherwise (another worker owns the rank, the job failed, a stop) is final.
  virtual bool rolled_back() const { return false; }
  // This worker is no member any more, since it was silent for too long: it was lost, or another one has its rank.
  // Whatever is asked ends with FAILED_PRECONDITION, which says so; the worker may join again (RejoinOptions). Once
  // true, it stays so.
  virtual bool fenced() const { return false; }

  // True while this worker is the job's lead (as last reported by the chief): the lowest live rank, which evaluates
  // during training, and evaluates and saves at the end.
  virtual bool lead() const = 0;

  // Memory to compute gradients into, and to pull weights into. Each is made at its first call, and later calls return
  // the same. RESOURCE_EXHAUSTED, naming the tensor, if there is not enough. An exchange takes any memory, but this
  // memory can be shared with servers on the same host, where the transport does so; elsewhere it is plain memory.
  virtual absl::StatusOr<TensorMemory> GradientBuffers() = 0;
  // Whether servers of this host read gradients where they lie, in the memory of GradientBuffers.
  virtual bool shares_gradients() const { return false; }
  virtual absl::StatusOr<TensorMemory> WeightBuffers() = 0;
  // For workers that round on a device: memory for gradients as the job sends them. A worker rounds as the client
  // would: to the nearest value, and, where two values are equally near, to the one whose last bit is 0 (IEEE 754-2019,
  // 4.3.1). A value that is not finite, or too large for the type, must not be finite in this memory, so that it is
  // found and refused. A push of what lies here says so (PushInfo::rounded). The memory is made at the first call, and
  // later calls return the same. Nothing is returned where the job sends float32, or where the client has to round
  // because it keeps what is not sent (--error_feedback, --compress). RESOURCE_EXHAUSTED if there is not enough memory.
  virtual absl::StatusOr<std::optional<RoundedMemory>> RoundedGradients() { return std::nullopt; }

  // True while the chief asks this worker for the initial values. This can happen after Join, if the worker that was
  // asked first is lost; Start then sends its `initial_values`.
  virtual bool should_initialise() const = 0;
  // Sends the initial values to every shard.
  virtual absl::Status Initialise(const ConstTensors& values) = 0;

  // The start of training: sends `initial_values` if (or as soon as) the chief asks for them, waits until the job is
  // running, and pulls the newest version. A newcomer to a job whose workers come and go and wait for each other first
  // makes an empty contribution to the step that they are at, so that none of them waits for its first gradient:
  // start_step() is the step after that from then on.
  virtual absl::StatusOr<ExchangeResult> Start(const ConstTensors& initial_values, const MutableTensors& weights) = 0;

  // The same, and gives the servers' optimizer the state of an earlier job, say, to begin with, where the chief asks
  // for initial values. All workers must bring the same. INVALID_ARGUMENT, naming the tensor, if it does not fit the
  // model or the servers' optimizer, is not finite, or comes to a mode in which the workers' optimizers step.
  virtual absl::StatusOr<ExchangeResult> StartWithState(const ConstTensors& initial_values,
                                                        const OptimizerState& initial_state,
                                                        const MutableTensors& weights) {
    (void)initial_values, (void)initial_state, (void)weights;
    return absl::UnimplementedError("this client gives no state");
  }

  // Blocking forms.
  virtual absl::StatusOr<ExchangeResult> Push(const PushInfo& push, const ConstTensors& gradients) = 0;
  // Pulls exactly this version, or the newest. `step`: the step of the gradient that is to be computed on it, unless
  // that is the one after the last push; a mode may let a worker wait for others that are behind.
  virtual absl::StatusOr<ExchangeResult> Pull(const MutableTensors& weights,
                                              std::optional<uint64_t> version = std::nullopt,
                                              std::optional<uint64_t> step = std::nullopt) = 0;
  // Pulls the newest weights as the servers keep them, to evaluate or save them. Weights that Pull or a push brings are
  // for computing: they are rounded where the job says so (--weights_wire_dtype).
  virtual absl::StatusOr<ExchangeResult> PullFloat32(const MutableTensors& weights) = 0;
  virtual absl::StatusOr<ExchangeResult> PushPull(const PushInfo& push, const ConstTensors& gradients,
                                                  const MutableTensors& weights) = 0;

  // Asynchronous form. Without `weights` only a push, without `gradients` only a pull (and `push` is not used). Tensors
  // that do not fit the layout fail the exchange with INVALID_ARGUMENT. The callback, if any, is called once, from a
  // thread of the client; it must not block. `deferred`: a gradient is sent when TensorReady is called.
  virtual std::shared_ptr<Exchange> StartPushPull(const PushInfo& push, const ConstTensors& gradients,
                                                  const MutableTensors& weights, bool deferred,
                                                  DoneCallback callback = nullptr) = 0;

  // Whether weights can be read where the server keeps them: there is one server, on this host, that shares its memory
  // and has a buffer for each worker (docs/shared-memory.md). It can become false, if the server ends the link.
  virtual bool can_view() const { return false; }
  // The same, but where can_view(), the weights are not copied to `weights`: ExchangeResult::view says where they are.
  virtual std::shared_ptr<Exchange> StartPushView(const PushInfo& push, const ConstTensors& gradients,
                                                  const MutableTensors& weights, bool deferred) {
    return StartPushPull(push, gradients, weights, deferred);
  }

  // Whether the budget is the whole job's (--budget=job): workers take runs of samples from the chief, until all are
  // used. Else each worker has a fixed share.
  virtual bool hands_out_runs() const = 0;
  // Takes the next run. The chief allows two that are not finished, and `ahead` more, so that the next one can be taken
  // while the push of the last is under way. Blocks for `wait` at most, and not at all while runs of this worker are
  // not finished, since others may be waiting for those. A repeat with the number of the last run that this worker got
  // brings that run again. The errors are those of a wait, as above, and FAILED_PRECONDITION if the job hands out no
  // runs, if its runs are others than `request` says, or if too many are not finished.
  virtual absl::StatusOr<TakenRun> TakeRun(const RunRequest& request) = 0;

  // Adds up numbers of all workers that are not done (in the order of their ranks), or finds the smallest or largest
  // of each: at most 4096. All of them have to call it, in the same order, with as many numbers, the same operation and
  // `name`, which messages have; the one that is last ends the others' wait. Blocks, also for one that is slow, until
  // the job fails (--progress_timeout); the errors are those of a wait, as above, and FAILED_PRECONDITION, naming both,
  // if what a worker brings is not what another one has brought. A worker that is lost, leaves or is done is not waited
  // for any more, and what it had brought does not count; one that joined a running job takes part when it has made a
  // step by itself (where steps are not everybody's: from its first call on). One call at a time.
  virtual absl::StatusOr<Reduced> Reduce(const std::string& name, Reduction operation, std::span<const double> values) {
    (void)name, (void)operation, (void)values;
    return absl::UnimplementedError("this client reduces nothing");
  }

  // The optimizer's state of one version, which servers have to themselves else: of `version`, or of the newest, which
  // in a synchronous mode is the same on all shards. While the job is running it may need retries; RESOURCE_EXHAUSTED
  // if others read it all the time. FAILED_PRECONDITION if the servers have none (in modes in which the workers'
  // optimizers step), or not of this version any more. Blocks.
  virtual absl::StatusOr<OptimizerState> PullState(std::optional<uint64_t> version) {
    (void)version;
    return absl::UnimplementedError("this client pulls no state");
  }

  // Says that this worker has taken a step of its own, between two exchanges (LocalSteps). The chief is told within a
  // third of the lease; as long as there are such steps, --progress_timeout does not count. Returns what has ended this
  // client, if something has: the round will not be exchanged. Thread-safe; does not wait.
  virtual absl::Status CountLocalStep() = 0;

  // Says that this worker makes no step for a while though nothing is wrong ("evaluating"), so that those who wait for
  // it are told, and --progress_timeout does not count meanwhile. The chief is told within a third of the lease, so it
  // may never hear of what is over sooner. "": the worker makes steps again. Thread-safe; does not wait.
  virtual void SetBusy(const std::string& what) = 0;

  // Says how training gets on, for whoever watches the job: the chief is told of all steps together, at most once a
  // second. A client that is told of no steps counts its pushes and their samples. Thread-safe; does not wait, and
  // costs less than a microsecond.
  virtual void ReportStep(const StepReport& step) { (void)step; }
  virtual void ReportEvaluation(const EvaluationReport& evaluation) { (void)evaluation; }
  // The device that this worker computes on, by its flag.
  virtual void ReportDevice(const std::string& device) { (void)device; }

  // Reports that this worker has used up its budget, and waits until all workers have. It then returns on the lead
  // first: lead() is true, and this worker must pull, evaluate and save before it leaves. On the others it returns when
  // the lead has left; if the lead is lost, it returns on the next one, which is then the lead. `counts_as_empty`: in
  // steps that others still make, this worker counts as an empty contribution.
  virtual absl::Status Done(bool counts_as_empty = false) = 0;
  // Leaves the job: normally after Done, else for this reason.
  virtual absl::Status Leave(const std::string& reason = "") = 0;

  // The weights hash of the newest version. In a synchronous mode, all shards are hashed at the same version; while
  // the job is running this may need retries, for up to connect_timeout. In other modes each shard's own newest version
  // is hashed.
  virtual absl::StatusOr<HashedWeights> WeightsHash() = 0;
};

// The flags that a worker which is about to join the job should be started with, `job` among them: those of the last
// owner of its rank (options.rank, else the lowest free one). Empty before the job runs, or where no worker has told
// its flags. The options that it uses are `server`, `rank`, `connect_timeout`, `stop` and `on_notice`. `waits`: whether
// it waits for a server that cannot be reached yet, as a join does; else it ends with UNAVAILABLE at once.
// UNIMPLEMENTED: the server is older than this call.
absl::StatusOr<std::map<std::string, std::string>> FlagsOfJob(const ClientOptions& options, bool waits);

// The options to join again under the name of a client that was fenced(), was rolled back, or lost its servers. The
// join waits for them for as long as that one would have, and tells on_notice every few seconds. After one that was
// fenced() or rolled_back() it yields: it takes its former rank if that is free, else the lowest free one;
// ALREADY_EXISTS or FAILED_PRECONDITION names who has its place.
ClientOptions RejoinOptions(ClientOptions options, const Client& over);

}  // namespace ps
