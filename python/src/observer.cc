#include "python/src/observer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "common/status.h"
#include "ps/observer.h"
#include "python/src/calls.h"
#include "python/src/tensors.h"

namespace ps::python {

namespace nb = nanobind;

namespace {

const char* NameOf(TensorKind kind) {
  switch (kind) {
    case TensorKind::kConstant:
      return "constant";
    case TensorKind::kBufferLowest:
      return "buffer_lowest";
    case TensorKind::kBufferMean:
      return "buffer_mean";
    case TensorKind::kWeight:
      break;
  }
  return "weight";
}

// What calls on other threads share with the Python object. Nothing in it is Python's.
struct Looking {
  std::stop_source stop;
  std::optional<Observer> observer;
};

class CoreObserver {
 public:
  CoreObserver(const std::string& server, double timeout) {
    looking_->observer.emplace(
        ObserverOptions{.server = server, .timeout = absl::Seconds(timeout), .stop = looking_->stop.get_token()});
  }
  // In a process that was forked from its own there are no threads of gRPC that could end anything.
  ~CoreObserver() {
    if (getpid() != owner_) {
      (void)new std::shared_ptr<Looking>(std::move(looking_));
      return;
    }
    looking_->stop.request_stop();
  }
  CoreObserver(const CoreObserver&) = delete;
  CoreObserver& operator=(const CoreObserver&) = delete;

  void Stop() { looking_->stop.request_stop(); }
  std::vector<std::string> TakeNotices() { return {}; }

  // [(name, shape, factor of the learning rate, and of the weight decay, kind)]
  Call GetLayout() {
    CheckProcess();
    auto layout = std::make_shared<Layout>();
    return Call(
        [looking = looking_, layout] {
          absl::StatusOr<Layout> found = looking->observer->GetLayout();
          if (found.ok()) *layout = *std::move(found);
          return found.status();
        },
        [layout]() -> nb::object {
          nb::list tensors;
          for (const TensorSpec& tensor : *layout) {
            tensors.append(nb::make_tuple(tensor.name, nb::tuple(nb::cast(tensor.shape)), tensor.learning_rate_factor,
                                          tensor.weight_decay_factor, NameOf(tensor.kind)));
          }
          return tensors;
        },
        {});
  }

  // (version of each shard, generation)
  Call Pull(std::shared_ptr<Tensors> weights, std::optional<uint64_t> version) {
    CheckProcess();
    auto pulled = std::make_shared<ObservedVersion>();
    return Call(
        [looking = looking_, pulled, version, into = weights->spans] {
          absl::StatusOr<ObservedVersion> found = looking->observer->Pull(into, version);
          if (found.ok()) *pulled = *std::move(found);
          return found.status();
        },
        [pulled]() -> nb::object { return nb::make_tuple(pulled->versions, pulled->generation); },
        {nb::cast(std::move(weights))});
  }

  // (job, generation, phase, failure, whom it waits for, workers)
  Call Status() {
    CheckProcess();
    auto status = std::make_shared<ObservedJob>();
    return Call(
        [looking = looking_, status] {
          absl::StatusOr<ObservedJob> found = looking->observer->Status();
          if (found.ok()) *status = *std::move(found);
          return found.status();
        },
        [status]() -> nb::object {
          return nb::make_tuple(status->job, status->generation, status->phase, status->failure, status->waiting_for,
                                status->workers);
        },
        {});
  }

 private:
  void CheckProcess() const {
    if (getpid() == owner_) return;
    Raise(Internal("this observer belongs to process ", owner_, ", and this is process ", getpid(),
                   ", which was forked from it; it needs an observer of its own"));
  }

  const pid_t owner_ = getpid();
  std::shared_ptr<Looking> looking_ = std::make_shared<Looking>();
};

}  // namespace

void DefineObserver(nb::module_& module) {
  nb::class_<CoreObserver>(module, "Observer")
      .def(nb::init<const std::string&, double>())
      .def("stop", &CoreObserver::Stop)
      .def("take_notices", &CoreObserver::TakeNotices)
      .def("layout", &CoreObserver::GetLayout)
      .def("pull", &CoreObserver::Pull, nb::arg("weights"), nb::arg("version").none())
      .def("status", &CoreObserver::Status);
  module.def("tensors", [](const std::vector<TensorSpec>& layout, nb::sequence arrays, const std::string& what) {
    return MakeTensors(layout, std::move(arrays), /*writable=*/true, what);
  });
}

}  // namespace ps::python
