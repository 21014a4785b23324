#include "server/engine/parameters.h"

#include "absl/strings/str_cat.h"
#include "tests/catch.h"

namespace ps {
namespace {

const Reader kReader = {.rank = 0, .peer = ""};
constexpr int64_t kElements = 16;

Parameters Make(
    size_t max_versions, std::function<void()> on_release = [] {}, std::vector<float> state = {}) {
  return Parameters(std::make_shared<ShardLayout>(Layout{{"w", {kElements}}}, 0, 1), std::move(state), max_versions, 0,
                    std::move(on_release));
}

ReceivedSlice Values(uint32_t index, float value, size_t elements = kElements) {
  auto owner = std::make_shared<std::vector<float>>(elements, value);
  const Piece piece(reinterpret_cast<const uint8_t*>(owner->data()), owner->size() * sizeof(float));
  return {.index = index, .payload = Payload({piece}, owner)};
}

// Makes the next version, if a buffer is free.
bool MakeVersion(Parameters& parameters) {
  Parameters::Update update;
  if (!parameters.BeginUpdate(&update)) return false;
  parameters.Publish();
  return true;
}

TEST_CASE("An update is in place where nobody reads, else a copy, and a pinned version never changes") {
  Parameters parameters = Make(2);
  Parameters::Update update;
  REQUIRE(parameters.BeginUpdate(&update));
  CHECK(update.weights == update.new_weights);
  CHECK(parameters.updating_in_place());
  update.new_weights[0] = 1;
  parameters.Publish();
  CHECK(parameters.version() == 1);

  const VersionPin pin = parameters.Pin(kReader, TimePoint());
  REQUIRE(parameters.BeginUpdate(&update));
  CHECK(update.weights != update.new_weights);
  CHECK_FALSE(parameters.updating_in_place());
  update.new_weights[0] = 2;
  parameters.Publish();
  CHECK(pin.weights()[0] == 1);
  CHECK(pin.version() == 1);
  CHECK(parameters.Pin(kReader, TimePoint()).weights()[0] == 2);
}

TEST_CASE("When every buffer is pinned an update waits, and the last release calls") {
  int released = 0;
  Parameters parameters = Make(2, [&] { ++released; });
  VersionPin first = parameters.Pin(kReader, TimePoint());
  REQUIRE(MakeVersion(parameters));
  VersionPin second = parameters.Pin(kReader, TimePoint());
  CHECK_FALSE(MakeVersion(parameters));
  CHECK(released == 0);
  first = VersionPin();
  CHECK(released == 1);
  CHECK(MakeVersion(parameters));
  CHECK(second.version() == 1);
}

TEST_CASE("A speculative update touches neither weights nor state that are current, and may be abandoned") {
  Parameters parameters = Make(2, [] {}, {3});
  for (const bool publish : {false, true}) {
    CAPTURE(publish);
    Parameters::Update update;
    REQUIRE(parameters.BeginSpeculativeUpdate(&update));
    CHECK_FALSE(parameters.updating_in_place());
    CHECK(update.state[0] != update.new_state[0]);
    CHECK(update.state[0][5] == 3);
    update.new_weights[5] = 7;
    update.new_state[0][5] = 8;
    const Snapshot before = parameters.TakeSnapshot();
    publish ? parameters.Publish() : parameters.Abandon();
    CHECK(before.weights()[5] == 0);
    CHECK(before.state(0)[5] == 3);
  }
  const Snapshot after = parameters.TakeSnapshot();
  CHECK(after.version() == 1);
  CHECK(after.weights()[5] == 7);
  CHECK(after.state(0)[5] == 8);
}

TEST_CASE("A snapshot keeps weights and state of one version while updates go on, and costs no copy before") {
  Parameters parameters = Make(4, [] {}, {0.5F, 2});
  Parameters::Update update;
  REQUIRE(parameters.BeginUpdate(&update));
  for (float* memory : {update.new_weights, update.new_state[0], update.new_state[1]}) memory[0] = 1;
  parameters.Publish();

  const Snapshot snapshot = parameters.TakeSnapshot();
  CHECK(snapshot.weights().data() == update.new_weights);
  CHECK(snapshot.state_tensors() == 2);
  CHECK(snapshot.state(1).data() == update.new_state[1]);
  for (float value = 2; value < 5; ++value) {
    REQUIRE(parameters.BeginUpdate(&update));
    for (float* memory : {update.new_weights, update.new_state[0], update.new_state[1]}) memory[0] = value;
    parameters.Publish();
  }
  CHECK(parameters.version() == 4);
  CHECK(snapshot.version() == 1);
  CHECK(snapshot.weights()[0] == 1);
  CHECK(snapshot.state(0)[0] == 1);
  CHECK(snapshot.state(0)[1] == 0.5F);        // It is what it was at first.
  CHECK(parameters.readers().All().empty());  // It has a buffer of its own.
}

TEST_CASE("A snapshot has to wait while state is being overwritten, even if the weights are not") {
  Parameters parameters = Make(3, [] {}, {0});
  CHECK(parameters.may_snapshot());
  const VersionPin pin = parameters.Pin(kReader, TimePoint());
  Parameters::Update update;
  REQUIRE(parameters.BeginUpdate(&update));
  CHECK_FALSE(parameters.updating_in_place());
  CHECK_FALSE(parameters.may_snapshot());
  parameters.Publish();
  CHECK(parameters.may_snapshot());
  REQUIRE(parameters.BeginSpeculativeUpdate(&update));
  CHECK(parameters.may_snapshot());
}

TEST_CASE("With one weight buffer a snapshot holds updates up until it is let go of") {
  int released = 0;
  Parameters parameters = Make(1, [&] { ++released; }, {0});
  {
    const Snapshot snapshot = parameters.TakeSnapshot();
    CHECK_FALSE(MakeVersion(parameters));
  }
  CHECK(released == 1);
  CHECK(MakeVersion(parameters));
}

TEST_CASE("Weights that are not being overwritten can be read after an update that turned out wrong") {
  Parameters parameters = Make(2, [] {}, {0});
  const VersionPin pin = parameters.Pin(kReader, TimePoint());
  Parameters::Update update;
  REQUIRE(parameters.BeginUpdate(&update));
  parameters.GiveUp();
  CHECK_FALSE(parameters.updating_in_place());
  CHECK(parameters.Pin(kReader, TimePoint()).version() == 0);

  Parameters in_place = Make(2, [] {}, {0});
  REQUIRE(in_place.BeginUpdate(&update));
  in_place.GiveUp();
  CHECK(in_place.updating_in_place());
}

TEST_CASE("Holds outlive the parameters") {
  VersionPin pin;
  Snapshot snapshot;
  {
    Parameters parameters = Make(2, [] {}, {4});
    REQUIRE(parameters.AddInitial(1, {Values(0, 7)}).ok());
    pin = parameters.Pin(kReader, TimePoint());
    snapshot = parameters.TakeSnapshot();
  }
  CHECK(pin.slice(0)[3] == 7);
  CHECK(snapshot.weights()[3] == 7);
  CHECK(snapshot.state(0)[3] == 4);
}

TEST_CASE("Initial values count once all slices of one sender are here, and wrong ones are named") {
  Parameters parameters(std::make_shared<ShardLayout>(Layout{{"a", {2}}, {"b", {3}}}, 0, 1), {}, 2, 0, [] {});
  REQUIRE(parameters.AddInitial(1, {Values(0, 1, 2)}).ok());
  REQUIRE(parameters.AddInitial(2, {Values(1, 5, 3)}).ok());  // Another sender: the first one's do not count.
  CHECK_FALSE(parameters.initialised());
  CHECK(parameters.CheckInitialised().message().find("1 of the 2 slices") != std::string::npos);
  const absl::Status wrong = parameters.AddInitial(2, {Values(0, 5, 3)});
  CHECK(wrong.message().find("tensor a: 12 bytes, expected 8") != std::string::npos);
  REQUIRE(parameters.AddInitial(2, {Values(0, 4, 2), Values(1, 6, 3)}).ok());
  CHECK(parameters.initialised());
  const VersionPin pin = parameters.Pin(kReader, TimePoint());
  CHECK(pin.slice(0)[1] == 4);
  CHECK(pin.slice(1)[2] == 6);
}

TEST_CASE("No reader alone holds every buffer, nor do all who are no members") {
  for (const size_t versions : {1U, 2U, 3U, 4U, 8U}) {
    CAPTURE(versions);
    Parameters parameters = Make(versions);
    const Readers& readers = parameters.readers();
    const Reader other = {.rank = 1, .peer = ""};
    const Reader stranger = {.rank = {}, .peer = "ipv4:10.0.0.1:5"};
    std::vector<VersionPin> pins;
    // Reads each version in turn, until it may not or the next cannot be made. Returns how many it read.
    const auto read_all = [&](const Reader& reader) -> size_t {
      for (size_t read = 0;; ++read) {
        if (!readers.May(reader, parameters.version()).ok()) return read;
        pins.push_back(parameters.Pin(reader, TimePoint()));
        CHECK(readers.May(reader, parameters.version()).ok());  // The same once more holds no more.
        if (!MakeVersion(parameters)) return read + 1;
      }
    };
    CHECK(read_all(stranger) == (versions > 2 ? versions - 2 : 0));
    const absl::Status refused = readers.May(stranger, parameters.version());
    CHECK((versions > 2 ? absl::IsResourceExhausted(refused) : absl::IsFailedPrecondition(refused)));
    CHECK(refused.message().find(absl::StrCat("--max_versions=", versions)) != std::string::npos);
    pins.clear();
    CHECK(read_all(kReader) == (versions > 2 ? 2 : 1));
    CHECK(absl::IsUnavailable(readers.May(kReader, parameters.version())) == (versions > 1));
    CHECK(readers.May(other, parameters.version()).ok());
    pins.clear();
    CHECK(readers.May(kReader, parameters.version()).ok());
  }
}

TEST_CASE("It is known who reads what, since when, and told in a few words") {
  Parameters parameters = Make(4);
  const TimePoint now = TimePoint() + std::chrono::hours(1);
  const VersionPin first = parameters.Pin(kReader, now);
  const std::vector<VersionPin> copies(2, first);  // The same hold.
  CHECK(copies[1].version() == 0);
  REQUIRE(MakeVersion(parameters));
  {
    const VersionPin second = parameters.Pin({.rank = {}, .peer = "unix:"}, now + std::chrono::seconds(3));
    const std::vector<Reading> readings = parameters.readers().All();
    REQUIRE(readings.size() == 2);
    CHECK(readings[0].reader.ToString() == "rank 0");
    CHECK(readings[0].version == 0);
    CHECK(readings[0].since == now);
    CHECK(readings[1].reader.ToString() == "a reader at unix:");
    CHECK(readings[1].version == 1);
    CHECK(parameters.DescribeReaders(now + std::chrono::seconds(5)) ==
          "version 2: waiting for readers that hold all of --max_versions=4 weight buffers: rank 0 (version 0, for "
          "5.0 s), a reader at unix: (version 1, for 2.0 s)");
  }
  CHECK(parameters.readers().All().size() == 1);
}

}  // namespace
}  // namespace ps
