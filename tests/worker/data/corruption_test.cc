// Whatever bytes a file holds, a load ends with samples or with one line of error.
#include <random>

#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

std::string ValidImages() {
  std::string pixels(20 * 4 * 4, '\0');
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<char>(i * 7);
  return Idx(0x08, {20, 4, 4}, pixels);
}

std::string ValidLabels() {
  std::string labels(20, '\0');
  for (size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<char>(i % 4);
  return Idx(0x08, {20}, labels);
}

// True if the load succeeded; an error must be one line.
bool Loads(const std::string& dataset) {
  const absl::Status status = Load(dataset).status();
  if (status.ok()) return true;
  const std::string message(status.message().data(), status.message().size());
  REQUIRE_FALSE(message.empty());
  REQUIRE(message.find('\n') == std::string::npos);
  return false;
}

std::string Flip(std::string text, std::mt19937& random, int flips) {
  for (int i = 0; i < flips; ++i) {
    char& byte = text[random() % text.size()];
    byte = static_cast<char>(byte ^ (1 << random() % 8));
  }
  return text;
}

TEST_CASE("no truncation of an IDX file or of a gzip file is taken for a whole one") {
  const DataFolder folder;
  const std::string labels = folder.Write("l", ValidLabels());
  for (const std::string& valid : {ValidImages(), Gzip(ValidImages())}) {
    REQUIRE(Loads(IdxSpec(folder.Write("i", valid), labels)));
    for (size_t size = 0; size < valid.size(); ++size) {
      REQUIRE_FALSE(Loads(IdxSpec(folder.Write("i", valid.substr(0, size)), labels)));
    }
  }
}

TEST_CASE("flipped bits in IDX and gzip files never crash a load") {
  const DataFolder folder;
  std::mt19937 random(11);
  const std::string labels = folder.Write("l", ValidLabels());
  const std::string images = folder.Write("i", ValidImages());
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    const int flips = 1 + round % 4;
    const std::string header = Flip(ValidImages().substr(0, 16), random, flips);
    refused += static_cast<int>(!Loads(IdxSpec(folder.Write("a", header + ValidImages().substr(16)), labels)));
    Loads(IdxSpec(folder.Write("a", Flip(Gzip(ValidImages()), random, flips)), labels));
    Loads(IdxSpec(images, folder.Write("a", Flip(ValidLabels(), random, flips))));
  }
  CHECK(refused > 350);
}

TEST_CASE("a bit flipped in compressed pixels never changes what is loaded") {
  const DataFolder folder;
  std::mt19937 random(12);
  const std::string labels = folder.Write("l", ValidLabels());
  const std::string valid = Gzip(ValidImages());
  const auto good = Load(IdxSpec(folder.Write("i", valid), labels));
  REQUIRE(good.ok());
  for (size_t byte = 0; byte < valid.size(); ++byte) {
    std::string flipped = valid;
    flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << random() % 8));
    const auto splits = Load(IdxSpec(folder.Write("i", flipped), labels));
    // Bytes of the gzip header that name no content (time, system) may change; the content may not.
    if (splits.ok()) REQUIRE(splits->train.Fingerprint() == good->train.Fingerprint());
  }
}

TEST_CASE("random bytes never crash a load of any format") {
  const DataFolder folder;
  std::mt19937 random(13);
  for (int round = 0; round < 300; ++round) {
    std::string text(random() % 300, '\0');
    for (char& byte : text) byte = static_cast<char>(random());
    // Some look like the format for longer: a gzip header, an IDX magic.
    if (round % 3 == 1) text.insert(0, "\x1F\x8B\x08");
    if (round % 3 == 2) text.insert(0, std::string("\0\0\x08\x03", 4));
    const std::string file = folder.Write("f", text);
    Loads(IdxSpec(file, file));
    Loads("csv:" + file);
    Loads("libsvm:" + file);
  }
}

TEST_CASE("random texts made of a table's characters never crash a load") {
  const DataFolder folder;
  std::mt19937 random(14);
  const std::string letters = "0123456789+-.,:;eE \t\n\n\r\"#naif";
  int loaded = 0;
  for (int round = 0; round < 400; ++round) {
    std::string text(random() % 40, '\0');
    for (char& byte : text) byte = letters[random() % letters.size()];
    const std::string file = folder.Write("f", text);
    loaded += static_cast<int>(Loads("csv:" + file + ",label=first"));
    loaded += static_cast<int>(Loads("libsvm:" + file));
  }
  CHECK(loaded > 0);
}

}  // namespace
}  // namespace ps
