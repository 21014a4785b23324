#include "server/shard/build_streams.h"

#include <algorithm>
#include <utility>

namespace ps {

void BuildStreams::Open(const void* session, uint32_t rank, uint64_t step, SliceRanges carries, bool this_host,
                        std::shared_ptr<ShardClient> client) {
  if (streams_.contains(session) || when_ == StreamWhen::kNever) return;
  streams_[session] = {
      .rank = rank, .step = step, .carries = std::move(carries), .this_host = this_host, .client = std::move(client)};
  told_slices_ = 0;  // This one knows nothing.
}

std::shared_ptr<ShardClient> BuildStreams::Close(const void* session) {
  auto stream = streams_.extract(session);
  return stream.empty() ? nullptr : std::move(stream.mapped().client);
}

std::vector<ToldSlices> BuildStreams::Tell(const Updater::Update* making, uint64_t build, const PinFunction& pin) {
  std::vector<ToldSlices> told;
  const uint64_t now = making == nullptr ? 0 : build;
  const size_t slices = making == nullptr ? 0 : making->built.size();
  if (now == told_build_ && slices == told_slices_) return told;  // So it is after most events.
  told_build_ = now;
  told_slices_ = slices;
  const bool tells = making != nullptr && !Waits(*making);
  for (auto& [session, stream] : streams_) {
    if (stream.build != 0 && stream.build != now) told.push_back(Release(stream));
    if (!tells || stream.client == nullptr) continue;
    std::vector<size_t> unknown = NewSlices(stream, *making);
    if (unknown.empty()) continue;
    stream.build = build;
    told.push_back({.client = stream.client,
                    .built = {.build = build, .weights = pin(stream.rank), .slices = std::move(unknown)}});
  }
  return told;
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
  return std::any_of(streams_.begin(), streams_.end(), [&](const auto& each) {
    return each.second.this_host && FindPush(each.second, making) != nullptr;
  });
}

ToldSlices BuildStreams::Release(Stream& stream) {
  stream.told = 0;
  return {.client = stream.client, .built = {.build = std::exchange(stream.build, 0), .weights = {}, .slices = {}}};
}

std::vector<size_t> BuildStreams::NewSlices(Stream& stream, const Updater::Update& making) {
  std::vector<size_t> slices;
  if (FindPush(stream, making) == nullptr) return slices;
  for (size_t i = stream.told; i < making.built.size(); ++i) {
    const size_t local = making.built[i];
    const bool carried = stream.carries.empty() || Contain(stream.carries, making.layout->slice(local).index);
    if (carried && making.layout->is_pushed(local)) slices.push_back(local);
  }
  stream.told = making.built.size();
  return slices;
}

}  // namespace ps
