#include "server/chief/shard_streams.h"

#include <optional>
#include <utility>

#include "server/chief/job_messages.h"

namespace ps {

bool ShardStreams::CanResume(const v1::Registration& registration) const {
  if (registration.resumes() == 0 || registration.process() == 0 || registration.shard() >= streams_.size()) {
    return false;
  }
  const Stream& stream = streams_[registration.shard()];
  return stream.process == registration.process() && stream.end.resumable();
}

std::vector<ToShard> ShardStreams::Open(uint64_t connection, const v1::Registration& registration) {
  Stream& stream = streams_[registration.shard()];
  if (!CanResume(registration)) {
    stream = {.process = registration.process(),
              .connection = connection,
              .takes_changes = registration.takes_changes(),
              .end = {}};
    return {};
  }
  stream.connection = connection;
  stream.end.OnReceived(registration.received());
  std::vector<ToShard> missed(1, {.connection = connection, .update = {}});
  stream.end.Tell(&missed[0].update);  // Before anything is sent again, it says what was received.
  stream.end.ForEachKept(
      [&](const v1::ChiefUpdate& update) { missed.push_back({.connection = connection, .update = update}); });
  return missed;
}

bool ShardStreams::Close(uint32_t shard, uint64_t connection) {
  Stream& stream = streams_[shard];
  if (connection == 0 || stream.connection != connection) return false;
  stream.connection = 0;
  return true;
}

std::optional<std::vector<ToShard>> ShardStreams::Receive(uint32_t shard, const v1::ShardReport& report) {
  Stream& stream = streams_[shard];
  std::vector<ToShard> answer;
  if (stream.process == 0) return answer;
  stream.end.OnReceived(report.received());
  if (report.number() == 0 || !stream.end.Receive(report.number())) return std::nullopt;
  if (stream.end.MustTell()) {
    v1::ChiefUpdate received;
    stream.end.Tell(&received);
    if (stream.connection != 0) answer.push_back({.connection = stream.connection, .update = std::move(received)});
  }
  return answer;
}

std::vector<ToShard> ShardStreams::Broadcast(v1::ChiefUpdate update, absl::FunctionRef<void(v1::View*)> add_model) {
  const bool has_view = update.has_view();
  std::optional<v1::View> changes;
  std::optional<v1::View> whole;  // Once somebody needs it.
  if (has_view) {
    changes = ViewChanges(view_, update.view());
    view_ = std::move(*update.mutable_view());
    update.clear_view();
  }
  std::vector<ToShard> sent;
  for (Stream& stream : streams_) {
    if (stream.process == 0 && stream.connection == 0) continue;
    v1::ChiefUpdate numbered = update;
    if (has_view) {
      const bool knows = std::exchange(stream.has_view, true) && stream.takes_changes;
      if (knows && changes.has_value()) {
        *numbered.mutable_view() = *changes;
      } else {
        if (!whole.has_value()) add_model(&whole.emplace(view_));
        *numbered.mutable_view() = *whole;
      }
    }
    if (stream.process != 0) stream.end.Add(&numbered);
    if (stream.connection != 0) sent.push_back({.connection = stream.connection, .update = std::move(numbered)});
  }
  return sent;
}

}  // namespace ps
