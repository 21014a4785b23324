#include "worker/model/device.h"

#include "common/status.h"
#include "tests/catch.h"
#include "worker/model/cuda/backend.h"

namespace ps {
namespace {

TEST_CASE("Devices go by their names, and others are refused with the flag") {
  for (const std::string device : {"cpu", "auto", "cuda", "cuda:0", "cuda:7"}) {
    CHECK(CheckDeviceOptions({.device = device}).ok());
  }
  for (const std::string device : {"", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999", "cpu:0"}) {
    const absl::Status refused = CheckDeviceOptions({.device = device});
    CHECK(absl::IsInvalidArgument(refused));
    CHECK(Message(refused).find("--device=" + device) != std::string::npos);
  }
  CHECK(absl::IsInvalidArgument(CheckDeviceOptions({.device = "cpu", .math = Math::kTf32})));
  CHECK(*ParseMath("bfloat16") == Math::kBfloat16);
  CHECK(Message(ParseMath("half").status()).find("--math=half") != std::string::npos);
}

TEST_CASE("Without a card cuda is refused by what is missing, and auto falls back to the CPU and says so") {
  if (cuda::CountCards().ok()) PS_SKIP("there is a card");
  std::string fallback;
  for (const std::string device : {"cuda", "cuda:1"}) {
    const auto found = FindDevice({.device = device}, &fallback);
    CHECK(absl::IsUnavailable(found.status()));
    CHECK(Message(found.status()).rfind("--device=" + device + ": ", 0) == 0);
  }
  CHECK(fallback.empty());
  const auto found = FindDevice({.device = "auto", .math = Math::kTf32, .threads = 3}, &fallback);
  REQUIRE(found.ok());
  CHECK(found->device == "cpu");
  CHECK(found->threads == 3);
  CHECK(fallback.find("--device=auto") != std::string::npos);
  CHECK((*CreateBackend(*found, 5))->unified());
}

TEST_CASE("Workers of a host spread over its cards by rank, and a card that is not there is named") {
  const auto cards = cuda::CountCards();
  if (!cards.ok()) PS_SKIP(Message(cards.status()));
  std::string fallback;
  const auto found = FindDevice({.device = "auto"}, &fallback);
  REQUIRE(found.ok());
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const auto backend = CreateBackend(*found, rank);
    REQUIRE(backend.ok());
    CHECK((*backend)->name().rfind("cuda:" + std::to_string(rank % static_cast<uint32_t>(*cards)) + " ", 0) == 0);
  }
  CHECK(absl::IsUnavailable(FindDevice({.device = "cuda:" + std::to_string(*cards)}, &fallback).status()));
}

}  // namespace
}  // namespace ps
