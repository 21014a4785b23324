#include "server/store.h"

#include "absl/strings/str_cat.h"
#include "tests/catch.h"

namespace ps {
namespace {

const Reader kReader = {.rank = 0, .peer = ""};

TEST_CASE("An update is in place where nobody reads, else a copy, and a pinned version never changes") {
  VersionStore store(16, 2, [] {});
  const auto* update = store.BeginUpdate(true);
  REQUIRE(update != nullptr);
  CHECK(update->weights == update->new_weights);
  CHECK(store.updating_in_place());
  update->new_weights[0] = 1;
  store.Publish();
  CHECK(store.version() == 1);

  const VersionPin pin = store.Pin(kReader, TimePoint());
  update = store.BeginUpdate(true);
  REQUIRE(update != nullptr);
  CHECK(update->weights != update->new_weights);
  CHECK_FALSE(store.updating_in_place());
  update->new_weights[0] = 2;
  store.Publish();
  CHECK(pin.weights()[0] == 1);
  CHECK(pin.version() == 1);
  CHECK(store.Pin(kReader, TimePoint()).weights()[0] == 2);
}

TEST_CASE("When every buffer is pinned an update waits, and the last release calls") {
  int released = 0;
  VersionStore store(16, 2, [&] { ++released; });
  VersionPin first = store.Pin(kReader, TimePoint());
  REQUIRE(store.BeginUpdate(true) != nullptr);
  store.Publish();
  VersionPin second = store.Pin(kReader, TimePoint());
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
    pin = store.Pin(kReader, TimePoint());
  }
  CHECK(pin.weights()[3] == 7);
}

TEST_CASE("No reader alone holds every buffer, nor do all who are no members") {
  for (const size_t versions : {1U, 2U, 3U, 4U, 8U}) {
    CAPTURE(versions);
    VersionStore store(4, versions, [] {});
    const Reader other = {.rank = 1, .peer = ""};
    const Reader stranger = {.rank = {}, .peer = "ipv4:10.0.0.1:5"};
    std::vector<VersionPin> pins;
    // Reads each version in turn, until it may not or the next cannot be made. Returns how many it read.
    const auto read_all = [&](const Reader& reader) -> size_t {
      for (size_t read = 0;; ++read) {
        if (!store.MayPin(reader).ok()) return read;
        pins.push_back(store.Pin(reader, TimePoint()));
        CHECK(store.MayPin(reader).ok());  // The same once more holds no more.
        if (store.BeginUpdate(true) == nullptr) return read + 1;
        store.Publish();
      }
    };
    CHECK(read_all(stranger) == (versions > 2 ? versions - 2 : 0));
    const absl::Status refused = store.MayPin(stranger);
    CHECK((versions > 2 ? absl::IsResourceExhausted(refused) : absl::IsFailedPrecondition(refused)));
    CHECK(refused.message().find(absl::StrCat("--max_versions=", versions)) != std::string::npos);
    pins.clear();
    CHECK(read_all(kReader) == (versions > 2 ? 2 : 1));
    CHECK(absl::IsUnavailable(store.MayPin(kReader)) == (versions > 1));
    CHECK(store.MayPin(other).ok());
    pins.clear();
    CHECK(store.MayPin(kReader).ok());
  }
}

TEST_CASE("The store knows who reads what, since when") {
  VersionStore store(4, 4, [] {});
  const TimePoint now = TimePoint() + std::chrono::hours(1);
  const VersionPin first = store.Pin(kReader, now);
  const std::vector<VersionPin> copies(2, first);  // The same hold.
  CHECK(copies[1].version() == 0);
  REQUIRE(store.BeginUpdate(true) != nullptr);
  store.Publish();
  {
    const VersionPin second = store.Pin({.rank = {}, .peer = "unix:"}, now + std::chrono::seconds(3));
    const std::vector<Reading> readings = store.Readings();
    REQUIRE(readings.size() == 2);
    CHECK(readings[0].reader.ToString() == "rank 0");
    CHECK(readings[0].version == 0);
    CHECK(readings[0].since == now);
    CHECK(readings[1].reader.ToString() == "a reader at unix:");
    CHECK(readings[1].version == 1);
  }
  CHECK(store.Readings().size() == 1);
}

}  // namespace
}  // namespace ps
