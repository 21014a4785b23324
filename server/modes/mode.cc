#include "server/modes/mode.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"

namespace ps {

Admission AdmitOnly(uint64_t step, const PushHeader& push, const char* what) {
  if (push.step == step) return {};
  return {.kind = Admission::Kind::kReject,
          .why = absl::OutOfRangeError(absl::StrCat("rank ", push.rank, ", step ", push.step, ": ", what, step))};
}

float Mode::LearningRateFactor(size_t gradients) const {
  const uint32_t usual = usual_gradients();
  if (options_.lr_scale == "none" || usual == 0) return 1.0F;
  const float ratio = static_cast<float>(gradients) / static_cast<float>(usual);
  return options_.lr_scale == "sqrt" ? std::sqrt(ratio) : ratio;
}

absl::Status CheckSavedMode(const nlohmann::ordered_json& state, const std::string& name) {
  const auto mode = state.find("mode");
  if (mode == state.end() || !mode->is_string()) {
    return absl::InvalidArgumentError("the mode's state: mode: expected a name");
  }
  if (*mode == name) return absl::OkStatus();
  return InvalidArgument("the mode's state: mode: ", mode->get<std::string>(), ", but --mode=", name);
}

absl::StatusOr<uint64_t> SavedNumber(const nlohmann::ordered_json& state, const std::string& name,
                                     const std::string& field) {
  PS_RETURN_IF_ERROR(CheckSavedMode(state, name));
  const auto number = state.find(field);
  if (number != state.end() && number->is_number_unsigned()) return number->get<uint64_t>();
  return InvalidArgument("the mode's state: ", field, ": expected a number");
}

std::unique_ptr<Mode> MakeMode(const ModeOptions& given, uint32_t num_workers) {
  ModeOptions options = given;
  options.name = CanonicalMode(given.name);
  static const std::map<std::string, std::unique_ptr<Mode> (*)(const ModeOptions&, uint32_t)> makers = {
      {"bsp", MakeBsp},
      {"asp", MakeAsp},
      {"ssp", MakeSsp},
      {"backup", MakeBackup},
      {"local_sgd", MakeLocalSgd},
      {"diloco", MakeDiloco},
      {"easgd", MakeEasgd}};
  const auto maker = makers.find(options.name);
  Check(maker != makers.end(), "the mode's name is valid");
  return maker->second(options, num_workers);
}

}  // namespace ps
