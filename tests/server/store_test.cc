#include "server/store.h"

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("An update is in place where nobody reads, else a copy, and a pinned version never changes") {
  VersionStore store(16, 2, [] {});
  const auto* update = store.BeginUpdate(true);
  REQUIRE(update != nullptr);
  CHECK(update->weights == update->new_weights);
  CHECK(store.updating_in_place());
  update->new_weights[0] = 1;
  store.Publish();
  CHECK(store.version() == 1);

  const VersionPin pin = store.Pin();
  update = store.BeginUpdate(true);
  REQUIRE(update != nullptr);
  CHECK(update->weights != update->new_weights);
  CHECK_FALSE(store.updating_in_place());
  update->new_weights[0] = 2;
  store.Publish();
  CHECK(pin.weights()[0] == 1);
  CHECK(pin.version() == 1);
  CHECK(store.Pin().weights()[0] == 2);
}

TEST_CASE("When every buffer is pinned an update waits, and the last release calls") {
  int released = 0;
  VersionStore store(16, 2, [&] { ++released; });
  VersionPin first = store.Pin();
  REQUIRE(store.BeginUpdate(true) != nullptr);
  store.Publish();
  VersionPin second = store.Pin();
  CHECK(store.BeginUpdate(true) == nullptr);
  CHECK(released == 0);
  first = VersionPin();
  CHECK(released == 1);
  CHECK(store.BeginUpdate(true) != nullptr);
  store.Publish();
  CHECK(second.version() == 1);
}

TEST_CASE("A pin outlives its store") {
  VersionPin pin;
  {
    VersionStore store(4, 2, [] {});
    store.initial_weights()[3] = 7;
    pin = store.Pin();
  }
  CHECK(pin.weights()[3] == 7);
}

}  // namespace
}  // namespace ps
