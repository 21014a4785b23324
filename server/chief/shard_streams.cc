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

uint64_t ShardStreams::Open(const v1::Registration& registration, SendFunction send) {
  Stream& stream = streams_[registration.shard()];
  if (CanResume(registration)) {
    stream.send = std::move(send);
    stream.connection = ++last_connection_;
    stream.end.OnReceived(registration.received());
    v1::ChiefUpdate first;  // Before anything is sent again, it says what was received.
    stream.end.Tell(&first);
    Send(stream, std::move(first));
    stream.end.ForEachKept([&](const v1::ChiefUpdate& update) { Send(stream, update); });
    return stream.connection;
  }
  stream = {.process = registration.process(),
            .connection = ++last_connection_,
            .send = std::move(send),
            .takes_changes = registration.takes_changes(),
            .end = {}};
  return stream.connection;
}

bool ShardStreams::Close(uint32_t shard, uint64_t connection) {
  Stream& stream = streams_[shard];
  if (connection == 0 || stream.connection != connection) return false;
  stream.connection = 0;
  stream.send = nullptr;
  return true;
}

bool ShardStreams::Receive(uint32_t shard, const v1::ShardReport& report) {
  Stream& stream = streams_[shard];
  if (stream.process == 0) return true;
  stream.end.OnReceived(report.received());
  if (report.number() == 0 || !stream.end.Receive(report.number())) return false;
  if (stream.end.MustTell()) {
    v1::ChiefUpdate received;
    stream.end.Tell(&received);
    Send(stream, std::move(received));
  }
  return true;
}

void ShardStreams::Broadcast(v1::ChiefUpdate update) {
  const bool has_view = update.has_view();
  std::optional<v1::View> changes;
  if (has_view) {
    changes = ViewChanges(view_, update.view());
    view_ = std::move(*update.mutable_view());
    update.clear_view();
  }
  for (Stream& stream : streams_) {
    if (stream.process == 0 && !stream.send) continue;
    v1::ChiefUpdate numbered = update;
    if (has_view) {
      const bool knows = std::exchange(stream.has_view, true) && stream.takes_changes;
      *numbered.mutable_view() = knows && changes.has_value() ? *changes : view_;
    }
    if (stream.process != 0) stream.end.Add(&numbered);
    Send(stream, std::move(numbered));
  }
}

void ShardStreams::Send(const Stream& stream, v1::ChiefUpdate update) {
  if (stream.send) outbox_.Add([send = stream.send, update = std::move(update)] { send(update); });
}

}  // namespace ps
