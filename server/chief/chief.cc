#include "server/chief/chief.h"

#include <utility>

namespace ps {

struct Chief::Performer {
  void operator()(const ToShard& message) {
    if (const auto send = chief.Take<SendFunction>(message.connection, /*stays=*/true)) send(message.update);
  }
  void operator()(const ToMember& message) {
    const auto send = chief.Take<WatchFunction>(message.watch, /*stays=*/message.state.has_value());
    if (send) send(message.state);
  }
  template <typename Reply>
  void operator()(const Answer<Reply>& answer) {
    if (const auto callback = chief.Take<Callback<Reply>>(answer.call)) callback(answer.reply);
  }
  void operator()(CommitCheckpoint& checkpoint) {
    const uint64_t number = checkpoint.manifest.number;
    chief.checkpoint_calls_.commit(std::move(checkpoint.manifest),
                                   [&chief = chief, number](const absl::Status& committed) {
                                     chief.Do(&ChiefCore::OnCommitted, number, committed, Now());
                                   });
  }
  void operator()(const RollBack& back) { chief.checkpoint_calls_.roll_back(back); }
  void operator()(const Ended& end) { chief.on_end_(end.phase, end.failure); }
  void operator()(const WriteMetric& event) {
    if (chief.metrics_ != nullptr) chief.metrics_->Write(event.event, event.fields);
  }

  Chief& chief;
};

Chief::Chief(const ChiefOptions& options, std::function<void(v1::Phase, const std::string&)> on_end,
             MetricsWriter* metrics, CheckpointCalls checkpoint_calls)
    : on_end_(std::move(on_end)),
      metrics_(metrics),
      checkpoint_calls_(std::move(checkpoint_calls)),
      outbox_([this](ChiefAction& action) { std::visit(Performer{*this}, action); }),
      core_(options, Now()) {}

}  // namespace ps
