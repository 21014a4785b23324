#include "common/event_file.h"

#include <cmath>
#include <filesystem>
#include <limits>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

v1::Event Loss(int64_t step, float loss) {
  v1::Event event;
  event.set_step(step);
  v1::Summary::Value* const value = event.mutable_summary()->add_value();
  value->set_tag("loss/train");
  value->set_simple_value(loss);
  return event;
}

// The check value of CRC-32C, as catalogues of checksums give it, turned and shifted as records have it.
TEST_CASE("The checksum of records is the masked CRC-32C") {
  const uint32_t crc = 0xe3069283;
  CHECK(MaskedCrc32c("123456789") == ((crc >> 15) | (crc << 17)) + 0xa282ead8U);
}

// Made with TensorFlow's own writer's layout: length 13, its checksum, the bytes, their checksum.
TEST_CASE("An event's bytes are those that TensorFlow's message has, with its length and checksums around them") {
  v1::Event event;
  event.set_wall_time(1.5);
  event.set_step(7);
  const std::string record = EventRecord(event);
  const std::string bytes("\x09\0\0\0\0\0\0\xf8\x3f\x10\x07", 11);
  REQUIRE(record.size() == 8 + 4 + bytes.size() + 4);
  CHECK(record.substr(0, 8) == std::string("\x0b\0\0\0\0\0\0\0", 8));
  CHECK(record.substr(12, bytes.size()) == bytes);
}

TEST_CASE("Events are read as they were written, and a record that is cut off anywhere is left out") {
  const std::string first = EventRecord(Loss(1, 0.5F));
  const std::string second = EventRecord(Loss(2, std::numeric_limits<float>::quiet_NaN()));
  const auto whole = ParseEventFile(first + second);
  REQUIRE(whole.ok());
  REQUIRE(whole->events.size() == 2);
  CHECK_FALSE(whole->cut_off);
  CHECK(whole->events[0].step() == 1);
  CHECK(whole->events[0].summary().value(0).simple_value() == 0.5F);
  CHECK(std::isnan(whole->events[1].summary().value(0).simple_value()));
  for (size_t size = first.size() + 1; size < first.size() + second.size(); ++size) {
    const auto cut = ParseEventFile((first + second).substr(0, size));
    REQUIRE(cut.ok());
    CHECK(cut->events.size() == 1);
    CHECK(cut->cut_off);
  }
}

TEST_CASE("A record in which any bit has changed is refused") {
  const std::string record = EventRecord(Loss(3, 0.25F));
  for (size_t bit = 0; bit < 8 * record.size(); ++bit) {
    std::string changed = record;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << (bit % 8)));
    CHECK(absl::IsDataLoss(ParseEventFile(changed).status()));
  }
}

TEST_CASE("A file of events begins with its version, and has what was added, and where the job went back") {
  const TempFolder folder;
  auto file = EventFile::Open("--tensorboard_dir", folder.File("new/rank-0"));
  REQUIRE(file.ok());
  const std::string path = (*file)->path();
  (*file)->Add(4, 100.5, {{.tag = "loss/train", .value = 0.5}, {.tag = "speed/steps_per_s", .value = 12}});
  (*file)->Restart(2, 101);
  REQUIRE((*file)->Flush(Now() + std::chrono::seconds(30)));  // While it is being written.
  const auto read = ParseEventFile(ReadFile(path));
  REQUIRE(read.ok());
  REQUIRE(read->events.size() == 3);
  CHECK(read->events[0].file_version() == "brain.Event:2");
  CHECK(read->events[1].wall_time() == 100.5);
  CHECK(read->events[1].step() == 4);
  REQUIRE(read->events[1].summary().value_size() == 2);
  CHECK(read->events[1].summary().value(1).tag() == "speed/steps_per_s");
  CHECK(read->events[1].summary().value(1).simple_value() == 12);
  CHECK(read->events[2].session_log().status() == v1::SessionLog::START);
  CHECK(read->events[2].step() == 2);
  const auto other = EventFile::Open("--tensorboard_dir", folder.File("new/rank-0"));
  REQUIRE(other.ok());
  CHECK((*other)->path() != path);
}

TEST_CASE("A folder of events that cannot be made is refused by its flag") {
  const TempFolder folder;
  std::ofstream(folder.File("file")) << "x";
  const absl::Status refused = EventFile::Open("--tensorboard_dir", folder.File("file/rank-0")).status();
  CHECK(Message(refused).find("--tensorboard_dir: " + folder.File("file/rank-0")) == 0);
}

}  // namespace
}  // namespace ps
