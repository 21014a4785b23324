#include "server/shard/build_streams.h"

#include <algorithm>

namespace ps {

void BuildStreams::Open(const void* session, uint32_t rank, uint64_t step, bool this_host, Callback callback) {
  const bool known =
      std::any_of(streams_.begin(), streams_.end(), [&](const Stream& each) { return each.session == session; });
  if (known || when_ == StreamWhen::kNever) return;
  streams_.push_back(
      {.session = session, .rank = rank, .step = step, .this_host = this_host, .callback = std::move(callback)});
  told_slices_ = 0;  // This one knows nothing.
}

void BuildStreams::Close(const void* session) {
  std::erase_if(streams_, [&](Stream& stream) {
    if (stream.session != session) return false;
    outbox_.Add([callback = std::move(stream.callback)] {});  // Let go of without the owner's lock.
    return true;
  });
}

void BuildStreams::Tell(const Updater::Update* making, uint64_t build, const PinFunction& pin) {
  const uint64_t now = making == nullptr ? 0 : build;
  const size_t slices = making == nullptr ? 0 : making->built.size();
  if (now == told_build_ && slices == told_slices_) return;  // After most events.
  told_build_ = now;
  told_slices_ = slices;
  const bool tells = making != nullptr && !Waits(*making);
  for (Stream& stream : streams_) {
    if (stream.build != 0 && stream.build != now) Release(stream);
    if (tells && stream.callback) TellOne(stream, *making, build, pin);
  }
}

const Push* BuildStreams::FindPush(const Stream& stream, const Updater::Update& making) {
  const Pushes& pushes = making.versions.front().pushes;
  const auto push = std::lower_bound(pushes.begin(), pushes.end(), stream.rank,
                                     [](const auto& each, uint32_t rank) { return each->rank < rank; });
  const bool found = push != pushes.end() && (*push)->rank == stream.rank && (*push)->step == stream.step;
  return found ? push->get() : nullptr;
}

bool BuildStreams::Waits(const Updater::Update& making) const {
  if (when_ == StreamWhen::kAlways) return false;
  return std::any_of(streams_.begin(), streams_.end(),
                     [&](const Stream& each) { return each.this_host && FindPush(each, making) != nullptr; });
}

void BuildStreams::Release(Stream& stream) {
  outbox_.Add(
      [callback = stream.callback, build = stream.build] { callback({.build = build, .weights = {}, .slices = {}}); });
  stream.build = 0;
  stream.told = 0;
}

void BuildStreams::TellOne(Stream& stream, const Updater::Update& making, uint64_t build, const PinFunction& pin) {
  if (FindPush(stream, making) == nullptr) return;
  std::vector<size_t> slices;
  for (size_t i = stream.told; i < making.built.size(); ++i) {
    if (making.layout->is_pushed(making.built[i])) slices.push_back(making.built[i]);
  }
  stream.told = making.built.size();
  if (slices.empty()) return;
  stream.build = build;
  BuiltSlices built = {.build = build, .weights = pin(stream.rank), .slices = std::move(slices)};
  outbox_.Add([callback = stream.callback, built = std::move(built)] { callback(built); });
}

}  // namespace ps
