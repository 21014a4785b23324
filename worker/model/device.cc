#include "worker/model/device.h"

#include <optional>

#include <spdlog/spdlog.h>
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "worker/model/cuda/backend.h"

namespace ps {
namespace {

constexpr int kCardsMax = 1024;

// The number in "cuda:I"; nothing for "cuda".
std::optional<int> CardOf(const std::string& device) {
  int card = 0;
  if (!absl::StartsWith(device, "cuda:") || !absl::SimpleAtoi(device.substr(5), &card)) return std::nullopt;
  return card;
}

constexpr size_t kMost = 64;  // Pieces of memory: more than a server shares.

}  // namespace

absl::StatusOr<Math> ParseMath(const std::string& text) {
  if (text == "float32") return Math::kFloat32;
  if (text == "tf32") return Math::kTf32;
  if (text == "bfloat16") return Math::kBfloat16;
  return InvalidArgument("--math=", text, ": expected float32, tf32 or bfloat16");
}

absl::Status CheckDeviceOptions(const DeviceOptions& options) {
  const std::string& device = options.device;
  const std::optional<int> card = CardOf(device);
  const bool known =
      device == "cpu" || device == "auto" || device == "cuda" || (card.has_value() && *card >= 0 && *card < kCardsMax);
  if (!known) return InvalidArgument("--device=", device, ": expected cpu, cuda, cuda:I or auto");
  if (device == "cpu" && options.math != Math::kFloat32) {
    return absl::InvalidArgumentError("--math: --device=cpu supports float32 only");
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceOptions> FindDevice(const DeviceOptions& options, std::string* fallback) {
  PS_RETURN_IF_ERROR(CheckDeviceOptions(options));
  DeviceOptions found = options;
  if (options.device == "cpu") return found;
  absl::StatusOr<int> cards = cuda::CountCards();
  if (cards.ok() && CardOf(options.device).value_or(0) >= *cards) {
    cards = Unavailable("the GPUs are cuda:0 to cuda:", *cards - 1);
  }
  if (options.device != "auto") {
    if (!cards.ok()) return Annotate(cards.status(), absl::StrCat("--device=", options.device));
    return found;
  }
  found.device = cards.ok() ? "cuda" : "cpu";
  if (cards.ok()) return found;
  found.math = Math::kFloat32;
  *fallback = absl::StrCat("--device=auto: using the CPU in float32: ", Message(cards.status()));
  return found;
}

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const DeviceOptions& options, uint32_t rank) {
  if (options.device == "cpu") return CreateCpuBackend(options.threads);
  PS_ASSIGN_OR_RETURN(const int cards, cuda::CountCards());
  const int card = CardOf(options.device).value_or(static_cast<int>(rank % static_cast<uint32_t>(cards)));
  return Annotate(cuda::CreateBackend(card, options.math), absl::StrCat("--device=", options.device));
}

void PinnedPages::Pin(const std::shared_ptr<const std::span<const std::byte>>& pages) {
  if (refused_ || pinned_.size() == kMost || pinned_.contains(pages->data())) return;
  absl::StatusOr<std::shared_ptr<const std::byte>> pinned =
      backend_.PinHostPages({pages, pages->data()}, static_cast<int64_t>(pages->size()));
  if (!pinned.ok()) {
    refused_ = true;
    spdlog::warn("weights are copied from the server's memory more slowly: {}", Message(pinned.status()));
    return;
  }
  pinned_.emplace(pages->data(), *std::move(pinned));
}

}  // namespace ps
