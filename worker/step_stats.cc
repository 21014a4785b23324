#include "worker/step_stats.h"

#include <algorithm>

namespace ps {
namespace {

struct ExchangeTimes {
  double push_s = 0;
  double wait_s = 0;
  double pull_s = 0;
};

// What of an exchange was waited for. What was hidden behind computation came last.
ExchangeTimes Exposed(const ExchangeResult& exchanged, double exposed_s) {
  ExchangeTimes times = {.push_s = exchanged.push_s, .wait_s = exchanged.wait_s, .pull_s = exchanged.pull_s};
  double hidden_s = times.push_s + times.wait_s + times.pull_s - exposed_s;
  for (double* part : {&times.pull_s, &times.wait_s, &times.push_s}) {
    const double less = std::clamp(hidden_s, 0.0, *part);
    *part -= less;
    hidden_s -= less;
  }
  return times;
}

}  // namespace

void StepStats::Add(const StepRecord& step, TimePoint now) {
  const ExchangeTimes times = Exposed(step.exchanged, step.exposed_s);
  metrics_.Write("step", {{"step", step.push.step},
                          {"version", step.push.version},
                          {"loss", step.computed.loss},
                          {"samples", step.push.samples},
                          {"forward_s", step.computed.forward_s},
                          {"backward_s", step.computed.backward_s},
                          {"push_s", times.push_s},
                          {"wait_s", times.wait_s},
                          {"pull_s", times.pull_s}});
  progress_.Step(step.batch + 1, step.computed.loss, step.push.samples, now);
  if (step.batch < warm_up_steps_) return;
  totals_.samples += step.push.samples;
  totals_.forward_s += step.computed.forward_s;
  totals_.backward_s += step.computed.backward_s;
  totals_.push_s += times.push_s;
  totals_.wait_s += times.wait_s;
  totals_.pull_s += times.pull_s;
}

void StepStats::AddTime(int64_t batch, double seconds) {
  if (batch >= warm_up_steps_) totals_.train_s += seconds;
}

}  // namespace ps
