#include "server/engine/parameters.h"

#include <string>

#include "tests/catch.h"
#include "tests/server/updater_bench.h"

namespace ps {
namespace version_changes_test {

using Positions = std::vector<uint16_t>;
constexpr size_t kElements = 1000;

// What an update has changed of the one slice.
std::shared_ptr<const VersionChanges> Update(uint64_t from, uint64_t to, std::optional<Positions> changed) {
  auto update = std::make_shared<VersionChanges>();
  update->from = from;
  update->to = to;
  update->slices = {changed.has_value() ? std::make_shared<const Positions>(*changed) : nullptr};
  update->Count();
  return update;
}

TEST_CASE("What has changed since a version is all that the updates after it have changed, each position once") {
  auto history = ChangeHistory::With(nullptr, Update(3, 4, Positions{1, 5}), kElements);
  history = ChangeHistory::With(history.get(), Update(4, 7, Positions{2, 5, 9}), kElements);  // Three in one pass.
  history = ChangeHistory::With(history.get(), Update(7, 8, Positions{}), kElements);
  CHECK(history->Since(8, 0) == Positions{});
  CHECK(history->Since(7, 0) == Positions{});
  CHECK(history->Since(4, 0) == Positions{2, 5, 9});
  CHECK(history->Since(3, 0) == Positions{1, 2, 5, 9});
}

TEST_CASE("It is not known what has changed since a version that nobody had, is too old, or is not here yet") {
  auto history = ChangeHistory::With(nullptr, Update(3, 4, Positions{1}), kElements);
  history = ChangeHistory::With(history.get(), Update(4, 7, Positions{2}), kElements);
  for (const uint64_t base : {0, 2, 5, 6, 8, 99}) {
    CAPTURE(base);
    CHECK_FALSE(history->Since(base, 0).has_value());
  }
}

TEST_CASE("An update that may have changed all makes it unknown since any version before it") {
  auto history = ChangeHistory::With(nullptr, Update(0, 1, Positions{1}), kElements);
  history = ChangeHistory::With(history.get(), Update(1, 2, std::nullopt), kElements);
  history = ChangeHistory::With(history.get(), Update(2, 3, Positions{4}), kElements);
  CHECK_FALSE(history->Since(0, 0).has_value());
  CHECK_FALSE(history->Since(1, 0).has_value());
  CHECK(history->Since(2, 0) == Positions{4});
}

TEST_CASE("Updates that do not follow the ones before begin anew") {
  auto history = ChangeHistory::With(nullptr, Update(0, 1, Positions{1}), kElements);
  history = ChangeHistory::With(history.get(), Update(5, 6, Positions{2}), kElements);
  CHECK_FALSE(history->Since(0, 0).has_value());
  CHECK(history->Since(5, 0) == Positions{2});
}

// A push of some elements of one slice, each of this value.
std::shared_ptr<Push> SparsePush(const Positions& positions, float value) {
  struct Sent {
    Positions positions;
    std::vector<float> values;
  };
  const auto sent = std::make_shared<const Sent>(Sent{positions, std::vector<float>(positions.size(), value)});
  Payload payload({BytesOf(sent->values)}, sent);
  payload.set_positions(
      {Piece(reinterpret_cast<const uint8_t*>(sent->positions.data()), positions.size() * sizeof(uint16_t))});
  REQUIRE(payload.Unpack().ok());
  auto push = std::make_shared<Push>();
  push->samples = 1;
  push->slices = {std::move(payload)};
  push->received = 1;
  return push;
}

TEST_CASE("Versions that were made in one pass have changed together what all their pushes have") {
  UpdaterBench bench({.mode = {.name = "asp"}, .layout = {{"w", {20}}}, .keeps_changes = true});
  const uint64_t without = bench.parameters_.bytes();
  const auto commit = [&](const Positions& positions) {
    bench.updater_.Commit({SparsePush(positions, 1)}, bench.now_);
  };
  for (const Positions& positions : {Positions{5}, Positions{0, 19}}) {  // The first may change all.
    commit(positions);
    bench.Work();
    CHECK(bench.Ended() == UpdaterBench::Outcome::kPublished);
  }
  CHECK(bench.parameters_.bytes() == without + 2 * sizeof(uint16_t));  // Positions 0 and 19.
  commit({1, 7});
  commit({1, 3, 8});
  commit({2, 3});
  bench.Work();
  CHECK(bench.Ended() == UpdaterBench::Outcome::kPublished);
  const VersionPin pin = bench.parameters_.Pin({}, bench.now_);
  REQUIRE(pin.version() == 5);
  CHECK_FALSE(pin.changed(0, 0).has_value());
  CHECK(pin.changed(1, 0) == Positions{0, 1, 2, 3, 7, 8, 19});
  CHECK(pin.changed(2, 0) == Positions{1, 2, 3, 7, 8});
  CHECK_FALSE(pin.changed(3, 0).has_value());  // Nobody had it.
  CHECK(pin.changed(5, 0) == Positions{});
  const std::vector<float> weights(pin.weights().begin(), pin.weights().begin() + 10);
  CHECK(weights == std::vector<float>{-1, -2, -1, -2, 0, -1, 0, -1, -1, 0});
}

TEST_CASE("A history has a limit of updates, and one of positions, but always the newest update") {
  std::shared_ptr<const ChangeHistory> history;
  for (uint64_t version = 0; version < 100; ++version) {
    history = ChangeHistory::With(history.get(), Update(version, version + 1, Positions{7}), kElements);
  }
  CHECK(history->Since(100 - 64, 0).has_value());
  CHECK_FALSE(history->Since(100 - 65, 0).has_value());
  CHECK(history->bytes() == 64 * sizeof(uint16_t));
  Positions many(600);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<uint16_t>(i);
  history = ChangeHistory::With(history.get(), Update(100, 101, many), kElements);
  history = ChangeHistory::With(history.get(), Update(101, 102, many), kElements);
  CHECK(history->Since(101, 0) == many);
  CHECK_FALSE(history->Since(100, 0).has_value());  // Both would be more than the elements.
  CHECK(history->bytes() == 2 * many.size());
}

}  // namespace version_changes_test
}  // namespace ps
