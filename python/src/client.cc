// psgrad._core: the C++ client as Python sees it; psgrad/client.py makes it pleasant.
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <stop_token>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/sync.h"
#include "ps/client.h"
#include "python/src/calls.h"
#include "python/src/observer.h"
#include "python/src/tensors.h"

namespace ps::python {

namespace nb = nanobind;

namespace {

std::atomic<bool> was_used = false;  // A client has joined in this process: it has threads.

// What the client says, from any thread, until Python asks for it.
class Notices {
 public:
  void Add(const std::string& text) {
    MutexLock lock(mutex_);
    if (texts_.size() < kMost) texts_.push_back(text);
  }
  std::vector<std::string> Take() {
    MutexLock lock(mutex_);
    return {std::make_move_iterator(texts_.begin()), std::make_move_iterator(std::exchange(texts_, {}).end())};
  }

 private:
  static constexpr size_t kMost = 1000;
  Mutex mutex_;
  std::vector<std::string> texts_ ABSL_GUARDED_BY(mutex_);
};

// Raises in a process that was forked from the client's: its threads are not there, and a wait would have no end.
void CheckProcess(pid_t owner) {
  if (getpid() == owner) return;
  Raise(Internal("this client belongs to process ", owner, ", and this is process ", getpid(),
                 ", which was forked from it; it needs a client of its own"));
}

// An exchange and the memory that it uses.
struct Flight {
  const pid_t owner = getpid();
  std::shared_ptr<Exchange> exchange;
  Layout layout;
  std::shared_ptr<Tensors> gradients;
  std::shared_ptr<Tensors> weights;
  std::vector<std::shared_ptr<void>> named_later;  // Let go of with the GIL.

  bool ended() const { return exchange->WaitFor(absl::ZeroDuration()).has_value(); }
};

class CoreExchange {
 public:
  explicit CoreExchange(std::shared_ptr<Flight> flight) : flight_(std::move(flight)) {}

  void Ready(size_t tensor, nb::object gradient) {
    CheckProcess(flight_->owner);
    std::span<const float> values;
    if (tensor >= flight_->layout.size()) throw nb::index_error(absl::StrCat("there is no tensor ", tensor).c_str());
    if (!gradient.is_none()) {
      values = SpanOf(flight_->layout[tensor], gradient, /*writable=*/false, "the gradient", &flight_->named_later);
    }
    const nb::gil_scoped_release without_gil;
    flight_->exchange->TensorReady(tensor, values, nullptr);
  }
  // A hook calls it: the memory is the caller's.
  void ReadyAt(size_t tensor, uintptr_t address) {
    const auto elements = static_cast<size_t>(flight_->layout.at(tensor).elements());
    flight_->exchange->TensorReady(tensor, {reinterpret_cast<const float*>(address), elements}, nullptr);
  }
  void Absent(size_t tensor) {
    CheckProcess(flight_->owner);
    if (tensor >= flight_->layout.size()) throw nb::index_error(absl::StrCat("there is no tensor ", tensor).c_str());
    flight_->exchange->TensorAbsent(tensor);
  }
  bool SetSamples(uint32_t samples) { return flight_->exchange->SetSamples(samples); }

  bool WaitTensorFor(size_t tensor, double seconds) {
    CheckProcess(flight_->owner);
    std::optional<absl::Status> status;
    {
      const nb::gil_scoped_release without_gil;
      status = flight_->exchange->WaitTensorFor(tensor, absl::Seconds(seconds));
    }
    if (status.has_value()) Check(*status);
    return status.has_value();
  }
  std::optional<ExchangeResult> WaitFor(double seconds) {
    CheckProcess(flight_->owner);
    std::optional<absl::StatusOr<ExchangeResult>> result;
    {
      const nb::gil_scoped_release without_gil;
      result = flight_->exchange->WaitFor(absl::Seconds(seconds));
    }
    if (!result.has_value()) return std::nullopt;
    flight_->named_later.clear();
    Check(result->status());
    return **result;
  }

 private:
  const std::shared_ptr<Flight> flight_;
};

// What calls on other threads share with the client's Python object. Nothing in it is Python's.
struct Core {
  ClientOptions options;
  Layout layout;
  std::stop_source stop;
  Notices notices;
  std::atomic<bool> asked_to_leave = false;
  std::shared_ptr<Client> client;  // Set by the join, which ends before anything else is called.

  static std::shared_ptr<Core> Make(ClientOptions options, Layout layout) {
    auto core = std::make_shared<Core>();
    core->options = std::move(options);
    core->layout = std::move(layout);
    core->options.stop = core->stop.get_token();
    core->options.sender_thread = true;
    core->options.on_notice = [weak = std::weak_ptr<Core>(core)](const std::string& text) {
      if (const auto strong = weak.lock(); strong != nullptr) strong->notices.Add(text);
    };
    core->options.on_asked_to_leave = [weak = std::weak_ptr<Core>(core)] {
      if (const auto strong = weak.lock(); strong != nullptr) strong->asked_to_leave = true;
    };
    return core;
  }
};

class CoreClient {
 public:
  CoreClient(ClientOptions options, Layout layout) : core_(Core::Make(std::move(options), std::move(layout))) {}
  // In a process that was forked from its own it has no threads, so there is nothing that could be ended.
  ~CoreClient() {
    if (getpid() != owner_) {
      (void)new std::shared_ptr<Core>(std::move(core_));
      (void)new std::vector<std::shared_ptr<Flight>>(std::move(flights_));
      return;
    }
    const nb::gil_scoped_release without_gil;
    core_->stop.request_stop();
    for (const auto& flight : flights_) (void)flight->exchange->Wait();  // Nobody uses their memory any more.
    core_.reset();
  }
  CoreClient(const CoreClient&) = delete;
  CoreClient& operator=(const CoreClient&) = delete;

  Call Join() {
    return Call(
        [core = core_]() -> absl::Status {
          absl::StatusOr<std::unique_ptr<Client>> joined = Client::Join(core->options, core->layout);
          if (joined.ok()) core->client = *std::move(joined);
          was_used = true;
          return joined.status();
        },
        nullptr, {});
  }

  // A client that joins again in the place of this one, which was rolled back.
  std::shared_ptr<CoreClient> Again() const {
    return std::make_shared<CoreClient>(RejoinOptions(core_->options, client()), core_->layout);
  }

  Client& client() const {
    CheckProcess(owner_);
    if (core_->client == nullptr) Raise(absl::CancelledError("this client has not joined"));
    return *core_->client;
  }

  void Stop() { core_->stop.request_stop(); }
  std::vector<std::string> TakeNotices() { return core_->notices.Take(); }
  bool asked_to_leave() const { return core_->asked_to_leave; }

  nb::list GradientBuffers() { return ArraysOf(core_->layout, Take(client().GradientBuffers())); }
  nb::list WeightBuffers() { return ArraysOf(core_->layout, Take(client().WeightBuffers())); }
  std::shared_ptr<Tensors> Prepare(nb::sequence arrays, bool writable, const std::string& what) {
    return MakeTensors(core_->layout, std::move(arrays), writable, what);
  }

  std::shared_ptr<CoreExchange> Begin(const PushInfo& push, std::shared_ptr<Tensors> gradients,
                                      std::shared_ptr<Tensors> weights, bool deferred) {
    CheckWritable(weights);
    Client& with = client();
    std::erase_if(flights_, [](const auto& flight) { return flight->ended(); });
    auto flight = std::make_shared<Flight>();
    flight->layout = core_->layout;
    {
      const nb::gil_scoped_release without_gil;
      flight->exchange = with.StartPushPull(push, gradients == nullptr ? ConstTensors() : gradients->Read(),
                                            weights == nullptr ? MutableTensors() : weights->spans, deferred);
    }
    flight->gradients = std::move(gradients);
    flight->weights = std::move(weights);
    flights_.push_back(flight);
    return std::make_shared<CoreExchange>(std::move(flight));
  }

  // Without `weights` what is pulled is dropped: the start is waited for all the same.
  Call Start(std::shared_ptr<Tensors> initial, std::shared_ptr<Tensors> weights,
             std::shared_ptr<OptimizerState> state) {
    CheckWritable(weights);
    return Exchanging({nb::cast(initial), nb::cast(weights)},
                      [values = initial == nullptr ? ConstTensors() : initial->Read(), state,
                       in = weights == nullptr ? MutableTensors() : weights->spans,
                       core = core_](Client& client) -> absl::StatusOr<ExchangeResult> {
                        std::vector<std::vector<float>> dropped;
                        MutableTensors into = in;
                        for (size_t i = 0; in.empty() && i < core->layout.size(); ++i) {
                          dropped.emplace_back(static_cast<size_t>(core->layout[i].elements()));
                          into.emplace_back(dropped.back());
                        }
                        absl::StatusOr<ExchangeResult> started =
                            state == nullptr ? client.Start(values, into) : client.StartWithState(values, *state, into);
                        if (!started.ok()) return started;
                        // Others may have gone on between the join and the start.
                        started->next_step =
                            std::max(client.start_step(), client.synchronous() ? started->version : uint64_t{0});
                        return started;
                      });
  }
  Call Pull(std::shared_ptr<Tensors> weights, std::optional<uint64_t> version, std::optional<uint64_t> step,
            bool float32) {
    CheckWritable(weights);
    return Exchanging({nb::cast(weights)}, [in = weights->spans, version, step, float32](Client& client) {
      return float32 ? client.PullFloat32(in) : client.Pull(in, version, step);
    });
  }
  Call Done(bool counts_as_empty) {
    return Calling([counts_as_empty](Client& client) { return client.Done(counts_as_empty); });
  }
  // What has ended the client, the next exchange says.
  void CountLocalStep() { (void)client().CountLocalStep(); }
  void SetBusy(const std::string& what) { client().SetBusy(what); }
  void ReportStep(uint64_t step, uint32_t samples, std::optional<double> loss, const std::array<double, 6>& seconds,
                  uint64_t all_steps) {
    client().ReportStep({.step = step,
                         .samples = samples,
                         .loss = loss,
                         .forward_s = seconds[0],
                         .backward_s = seconds[1],
                         .push_s = seconds[2],
                         .wait_s = seconds[3],
                         .pull_s = seconds[4],
                         .other_s = seconds[5],
                         .all_steps = all_steps});
  }
  void ReportEvaluation(const std::string& split, uint64_t step, uint64_t version, double loss,
                        std::optional<double> accuracy) {
    client().ReportEvaluation({.split = split, .step = step, .version = version, .loss = loss, .accuracy = accuracy});
  }
  void ReportDevice(const std::string& device) { client().ReportDevice(device); }
  Call Leave(const std::string& reason) {
    return Calling([reason](Client& client) { return client.Leave(reason); });
  }
  Call WeightsHash() {
    auto hash = std::make_shared<HashedWeights>();
    return Calling(
        [hash](Client& client) {
          absl::StatusOr<HashedWeights> hashed = client.WeightsHash();
          if (hashed.ok()) *hash = *hashed;
          return hashed.status();
        },
        [hash] { return nb::cast(ToString(*hash)); });
  }
  std::shared_ptr<OptimizerState> PrepareState(const nb::sequence& state) const {
    return StateFrom(core_->layout, state);
  }
  Call PullState(std::optional<uint64_t> version) {
    auto state = std::make_shared<OptimizerState>();
    return Calling(
        [state, version](Client& client) {
          absl::StatusOr<OptimizerState> pulled = client.PullState(version);
          if (pulled.ok()) *state = *std::move(pulled);
          return pulled.status();
        },
        [state, core = core_]() -> nb::object { return ListOf(core->layout, state); });
  }
  // The values and how many workers have brought theirs.
  Call Reduce(const std::string& operation, const std::string& name, std::vector<double> values) {
    static const std::map<std::string, Reduction> operations = {
        {"sum", Reduction::kSum}, {"min", Reduction::kMin}, {"max", Reduction::kMax}};
    const auto found = operations.find(operation);
    if (found == operations.end()) {
      throw nb::value_error(absl::StrCat("operation=", operation, ": expected sum, min or max").c_str());
    }
    auto reduced = std::make_shared<Reduced>();
    return Calling(
        [reduced, name, by = found->second, values = std::move(values)](Client& client) {
          absl::StatusOr<Reduced> result = client.Reduce(name, by, values);
          if (result.ok()) *reduced = *std::move(result);
          return result.status();
        },
        [reduced] { return nb::cast(std::make_pair(reduced->values, reduced->workers)); });
  }
  // The run, or nothing: all have been used; or -1: there is none now.
  Call TakeRun(const RunRequest& request) {
    auto taken = std::make_shared<TakenRun>();
    return Calling(
        [taken, request](Client& client) {
          const absl::StatusOr<TakenRun> run = client.TakeRun(request);
          if (run.ok()) *taken = *run;
          return run.status();
        },
        [taken]() -> nb::object {
          if (taken->outcome == TakenRun::Outcome::kDone) return nb::none();
          return taken->outcome == TakenRun::Outcome::kWait ? nb::cast(-1) : nb::cast(taken->run);
        });
  }

 private:
  static TensorMemory Take(absl::StatusOr<TensorMemory> memory) {
    if (!memory.ok()) Raise(memory.status());
    return *std::move(memory);
  }
  static void CheckWritable(const std::shared_ptr<Tensors>& weights) {
    if (weights != nullptr && !weights->writable) throw nb::type_error("the weights are not to be written");
  }
  Call Calling(std::function<absl::Status(Client&)> call, std::function<nb::object()> result = nullptr,
               std::vector<nb::object> keep = {}) {
    (void)client();
    return Call([core = core_, call = std::move(call)] { return call(*core->client); }, std::move(result),
                std::move(keep));
  }
  Call Exchanging(std::vector<nb::object> keep, std::function<absl::StatusOr<ExchangeResult>(Client&)> call) {
    auto brought = std::make_shared<ExchangeResult>();
    return Calling(
        [brought, call = std::move(call)](Client& client) {
          absl::StatusOr<ExchangeResult> result = call(client);
          if (result.ok()) *brought = *std::move(result);
          return result.status();
        },
        [brought] { return nb::cast(*brought); }, std::move(keep));
  }

  const pid_t owner_ = getpid();
  std::shared_ptr<Core> core_;
  std::vector<std::shared_ptr<Flight>> flights_;  // That may not have ended: their memory is in use.
};

// ---- Descriptions

const char* NameOf(PushAnswer answer) {
  constexpr std::array kNames = {"none", "applied", "duplicate", "stale", "fenced"};
  const auto place = static_cast<size_t>(answer);  // A newer server may have others.
  return place < kNames.size() ? kNames[place] : "unknown";
}

TensorSpec MakeSpec(std::string name, std::vector<int64_t> shape, float learning_rate_factor, float weight_decay_factor,
                    const std::string& kind, uint32_t group) {
  static const std::map<std::string, TensorKind> kinds = {{"weight", TensorKind::kWeight},
                                                          {"constant", TensorKind::kConstant},
                                                          {"buffer_lowest", TensorKind::kBufferLowest},
                                                          {"buffer_mean", TensorKind::kBufferMean}};
  const auto found = kinds.find(kind);
  if (found == kinds.end()) {
    throw nb::value_error(
        absl::StrCat("tensor ", name, ": kind=", kind, ": expected weight, constant, buffer_lowest or buffer_mean")
            .c_str());
  }
  return {.name = std::move(name),
          .shape = std::move(shape),
          .learning_rate_factor = learning_rate_factor,
          .weight_decay_factor = weight_decay_factor,
          .kind = found->second,
          .group = group};
}

void DefineSettings(nb::module_& module) {
  nb::class_<TensorSpec>(module, "TensorSpec")
      .def("__init__", [](TensorSpec* self, std::string name, std::vector<int64_t> shape, float learning_rate_factor,
                          float weight_decay_factor, const std::string& kind, uint32_t group) {
        new (self) TensorSpec(
            MakeSpec(std::move(name), std::move(shape), learning_rate_factor, weight_decay_factor, kind, group));
      });
  nb::class_<OptimizerSettings>(module, "OptimizerSettings")
      .def(
          "__init__",
          [](OptimizerSettings* self, std::string optimizer, std::map<std::string, float> hyperparameters,
             std::optional<float> clip_value, std::optional<float> clip_tensor_norm, std::optional<float> clip_norm,
             std::vector<std::map<std::string, float>> groups) {
            new (self) OptimizerSettings{.optimizer = std::move(optimizer),
                                         .hyperparameters = std::move(hyperparameters),
                                         .clip_value = clip_value,
                                         .clip_tensor_norm = clip_tensor_norm,
                                         .clip_norm = clip_norm,
                                         .groups = std::move(groups)};
          },
          nb::arg("optimizer"), nb::arg("hyperparameters"), nb::arg("clip_value").none(),
          nb::arg("clip_tensor_norm").none(), nb::arg("clip_norm").none(), nb::arg("groups"));
  nb::class_<ClientOptions>(module, "ClientOptions")
      .def(nb::init<>())
      .def_rw("server", &ClientOptions::server)
      .def_rw("job", &ClientOptions::job)
      .def_rw("name", &ClientOptions::name)
      .def_rw("rank", &ClientOptions::rank)
      .def_rw("shared_memory", &ClientOptions::shared_memory)
      .def_rw("long_links", &ClientOptions::long_links)
      .def_rw("experiment", &ClientOptions::experiment)
      .def_rw("samples_per_epoch", &ClientOptions::samples_per_epoch)
      .def_rw("counts_steps", &ClientOptions::counts_steps)
      .def_rw("does_fragments", &ClientOptions::does_fragments)
      .def_rw("optimizer", &ClientOptions::optimizer)
      .def("set_times", [](ClientOptions& self, double connect_timeout, double start_timeout, double notice_every) {
        self.connect_timeout = absl::Seconds(connect_timeout);
        self.start_timeout = absl::Seconds(start_timeout);
        self.notice_every = absl::Seconds(notice_every);
      });
  nb::class_<PushInfo>(module, "PushInfo")
      .def(nb::init<>())
      .def_rw("step", &PushInfo::step)
      .def_rw("version", &PushInfo::version)
      .def_rw("versions", &PushInfo::versions)
      .def_rw("samples", &PushInfo::samples)
      .def_rw("passed", &PushInfo::passed)
      .def_rw("runs", &PushInfo::runs)
      .def_rw("learning_rate", &PushInfo::learning_rate)
      .def_rw("groups", &PushInfo::groups)
      .def_rw("tensors", &PushInfo::tensors)
      .def_rw("skip_not_finite", &PushInfo::skip_not_finite)
      .def_prop_rw(
          "is_difference",
          [](const PushInfo& self) { return self.contribution == PushContribution::kWeightDifference; },
          [](PushInfo& self, bool is) {
            self.contribution = is ? PushContribution::kWeightDifference : PushContribution::kGradient;
          });
}

void DefineResults(nb::module_& module) {
  nb::class_<ExchangeResult>(module, "Result")
      .def_ro("version", &ExchangeResult::version)
      .def_ro("versions", &ExchangeResult::versions)
      .def_prop_ro("answers",
                   [](const ExchangeResult& self) {
                     std::vector<std::string> names;
                     for (const PushAnswer answer : self.answers) names.emplace_back(NameOf(answer));
                     return names;
                   })
      .def_ro("next_step", &ExchangeResult::next_step)
      .def_ro("hyperparameters", &ExchangeResult::hyperparameters)
      .def_ro("position", &ExchangeResult::position)
      .def_prop_ro("learning_rate_factor",
                   [](const ExchangeResult& self) { return self.schedule.Factor(self.position); })
      .def_ro("skipped", &ExchangeResult::skipped)
      .def_ro("why_skipped", &ExchangeResult::why_skipped)
      .def_ro("push_s", &ExchangeResult::push_s)
      .def_ro("wait_s", &ExchangeResult::wait_s)
      .def_ro("pull_s", &ExchangeResult::pull_s);
  nb::class_<LocalSteps>(module, "LocalSteps")
      .def_prop_ro("exchange",
                   [](const LocalSteps& self) {
                     constexpr const char* kNames[] = {"average_weights", "average_gradients", "elastic"};
                     return kNames[static_cast<int>(self.exchange)];
                   })
      .def_ro("steps", &LocalSteps::steps)
      .def_ro("average_every_steps", &LocalSteps::average_every_steps)
      .def_ro("average_every_epochs", &LocalSteps::average_every_epochs)
      .def_ro("alpha", &LocalSteps::alpha)
      .def_ro("fragments", &LocalSteps::fragments)
      .def_ro("overlap", &LocalSteps::overlap)
      .def_ro("mix", &LocalSteps::mix)
      .def_ro("optimizer", &LocalSteps::optimizer)
      .def_ro("clip_value", &LocalSteps::clip_value)
      .def_ro("clip_tensor_norm", &LocalSteps::clip_tensor_norm)
      .def_ro("clip_norm", &LocalSteps::clip_norm);
}

void DefineClient(nb::module_& module) {
  module.def("was_used", [] { return was_used.load(); });
  nb::class_<CoreExchange>(module, "Exchange")
      .def("ready", &CoreExchange::Ready, nb::arg("tensor"), nb::arg("gradient").none())
      .def("ready_at", &CoreExchange::ReadyAt)
      .def("absent", &CoreExchange::Absent)
      .def("set_samples", &CoreExchange::SetSamples)
      .def("wait_tensor_for", &CoreExchange::WaitTensorFor)
      .def("wait_for", &CoreExchange::WaitFor);
  nb::class_<CoreClient>(module, "Client")
      .def(nb::init<ClientOptions, Layout>())
      .def("join", &CoreClient::Join)
      .def("again", &CoreClient::Again)
      .def("stop", &CoreClient::Stop)
      .def("take_notices", &CoreClient::TakeNotices)
      .def("gradient_buffers", &CoreClient::GradientBuffers)
      .def("weight_buffers", &CoreClient::WeightBuffers)
      .def("prepare", &CoreClient::Prepare)
      .def("begin", &CoreClient::Begin, nb::arg("push"), nb::arg("gradients").none(), nb::arg("weights").none(),
           nb::arg("deferred"))
      .def("start", &CoreClient::Start, nb::arg("initial").none(), nb::arg("weights").none(), nb::arg("state").none())
      .def("prepare_state", &CoreClient::PrepareState)
      .def("pull_state", &CoreClient::PullState, nb::arg("version").none())
      .def("pull", &CoreClient::Pull, nb::arg("weights"), nb::arg("version").none(), nb::arg("step").none(),
           nb::arg("float32"))
      .def("done", &CoreClient::Done)
      .def("count_local_step", &CoreClient::CountLocalStep)
      .def("set_busy", &CoreClient::SetBusy)
      .def("report_step", &CoreClient::ReportStep, nb::arg("step"), nb::arg("samples"), nb::arg("loss").none(),
           nb::arg("seconds"), nb::arg("all_steps"))
      .def("report_evaluation", &CoreClient::ReportEvaluation, nb::arg("split"), nb::arg("step"), nb::arg("version"),
           nb::arg("loss"), nb::arg("accuracy").none())
      .def("report_device", &CoreClient::ReportDevice)
      .def("leave", &CoreClient::Leave)
      .def("weights_hash", &CoreClient::WeightsHash)
      .def("reduce", &CoreClient::Reduce)
      .def(
          "take_run",
          [](CoreClient& self, uint64_t number, uint64_t finished, uint64_t samples, uint64_t batch_size, uint64_t runs,
             std::optional<double> wait, uint64_t ahead) {
            return self.TakeRun({.number = number,
                                 .finished = finished,
                                 .samples = samples,
                                 .batch_size = batch_size,
                                 .runs = runs,
                                 .ahead = ahead,
                                 .wait = wait.has_value() ? absl::Seconds(*wait) : absl::InfiniteDuration()});
          },
          nb::arg("number"), nb::arg("finished"), nb::arg("samples"), nb::arg("batch_size"), nb::arg("runs"),
          nb::arg("wait").none(), nb::arg("ahead"))
      .def_prop_ro("rank", [](const CoreClient& self) { return self.client().rank(); })
      .def_prop_ro("incarnation", [](const CoreClient& self) { return self.client().incarnation(); })
      .def_prop_ro("generation", [](const CoreClient& self) { return self.client().generation(); })
      .def_prop_ro("resized",
                   [](const CoreClient& self) {
                     const Client::Resized resized = self.client().resized();
                     return std::make_pair(resized.step, resized.samples);
                   })
      .def_prop_ro("server_timeout",
                   [](const CoreClient& self) { return absl::ToDoubleSeconds(self.client().server_timeout()); })
      .def_prop_ro("num_workers", [](const CoreClient& self) { return self.client().num_workers(); })
      .def_prop_ro("num_shards", [](const CoreClient& self) { return self.client().num_shards(); })
      .def_prop_ro("name", [](const CoreClient& self) { return self.client().name(); })
      .def_prop_ro("mode", [](const CoreClient& self) { return self.client().mode(); })
      .def_prop_ro("synchronous", [](const CoreClient& self) { return self.client().synchronous(); })
      .def_prop_ro("start_step", [](const CoreClient& self) { return self.client().start_step(); })
      .def_prop_ro("replaced", [](const CoreClient& self) { return self.client().replaced(); })
      .def_prop_ro("lead", [](const CoreClient& self) { return self.client().lead(); })
      .def_prop_ro("asked_to_leave", &CoreClient::asked_to_leave)
      .def_prop_ro("hands_out_runs", [](const CoreClient& self) { return self.client().hands_out_runs(); })
      .def_prop_ro("exact_versions", [](const CoreClient& self) { return self.client().policy().exact_versions; })
      .def_prop_ro("empty_contributions",
                   [](const CoreClient& self) { return self.client().policy().empty_contributions; })
      .def_prop_ro("local_steps", [](const CoreClient& self) { return self.client().policy().local_steps; });
}

}  // namespace
}  // namespace ps::python

NB_MODULE(_core, module) {
  nanobind::set_leak_warnings(false);  // A daemon thread may hold a client when the interpreter ends.
  ps::python::DefineCalls(module);
  ps::python::DefineTensors(module);
  ps::python::DefineSettings(module);
  ps::python::DefineResults(module);
  ps::python::DefineClient(module);
  ps::python::DefineObserver(module);
}
