// Updater's part in what needs all slices first.
#include <utility>

#include "common/check.h"
#include "server/norm_totals.h"
#include "server/updater.h"

namespace ps {
namespace {

std::span<const double> Span(const google::protobuf::RepeatedField<double>& field) {
  return {field.data(), static_cast<size_t>(field.size())};
}

}  // namespace

using State = Updater::Update::State;
using Stage = Updater::Update::Stage;

bool Updater::NeedsGradientNorms(const Update& update) const {
  return update.clip.needs_norms() && !update.versions.front().empty() &&
         update.versions.front().clip_factors == nullptr;
}

bool Updater::NeedsTrustRatios(const Update& update) const {
  return update.optimizer->uses_trust_ratio() && !update.versions.front().empty();
}

bool Updater::OneAtATime(const Version& version) const {
  if (version.contribution() != v1::CONTRIBUTION_GRADIENT) return false;
  return gradients_->uses_trust_ratio() || (clip_.needs_norms() && mode_.delay_compensation() != 0);
}

void Updater::NextStage() {
  Update& update = *current_;
  if (update.stage == Stage::kNew && NeedsGradientNorms(update)) {
    update.stage = Stage::kGradientNorms;
  } else if (update.stage < Stage::kTrustRatios && NeedsTrustRatios(update)) {
    update.stage = Stage::kTrustRatios;
  } else {
    update.stage = Stage::kReady;
    return;
  }
  const size_t items = update.versions.size() * layout_->slices();
  update.memory = parameters_->Current();
  update.squares.assign(items, 0);
  update.weight_squares.assign(update.stage == Stage::kTrustRatios ? items : 0, 0);
  update.parts = 1;
  pool_.Post(
      items, [update = current_](size_t i) { update->MeasureItem(i); }, [this] { on_built_({}); });
}

void Updater::Update::MeasureItem(size_t i) {
  static const Isa isa = BestIsa();
  const size_t local = i % layout->slices();
  if (layout->tensor(local).kind != TensorKind::kWeight) return;  // It is no part of a norm.
  const Version& version = versions[i / layout->slices()];
  if (version.skips(local)) return;  // Nor is what there is no gradient of.
  const VersionInput input = Input(version, local);
  if (stage == Stage::kGradientNorms) {
    squares[i] = GradientSquares(input, Block(local), isa);
    return;
  }
  const TrustSquares trust = UpdateSquares(input, Block(local), *optimizer, isa);
  squares[i] = trust.update;
  weight_squares[i] = trust.weights;
}

void Updater::OnMeasured() {
  Update& update = *current_;
  if (!alone()) {
    Check(update.versions.size() == 1, "a round through the chief is of one version");
    v1::NormSums& sums = sums_.emplace_back();
    sums.mutable_round()->set_version(update.versions.front().context.update);
    sums.mutable_round()->set_kind(update.stage == Stage::kTrustRatios ? v1::NormRound::UPDATE
                                                                       : v1::NormRound::GRADIENT);
    sums.mutable_squares()->Add(update.squares.begin(), update.squares.end());
    sums.mutable_weight_squares()->Add(update.weight_squares.begin(), update.weight_squares.end());
    update.awaits_totals = true;
    return;
  }
  const size_t slices = layout_->slices();
  const auto totals = [&](const std::vector<double>& of_slices, size_t i) {
    if (of_slices.empty()) return std::vector<double>();
    return SumByTensor(layout_->plan(), std::span(of_slices).subspan(i * slices, slices));
  };
  for (size_t i = 0; i < update.versions.size(); ++i) {
    SetTotals(i, totals(update.squares, i), totals(update.weight_squares, i));
  }
  NextStage();
}

void Updater::SetTotals(size_t i, std::span<const double> squares, std::span<const double> weight_squares) {
  Version& version = current_->versions[i];
  if (current_->stage == Stage::kGradientNorms) {
    version.clip_factors = std::make_shared<const std::vector<float>>(ClipFactors(clip_, squares));
    return;
  }
  std::vector<float> ratios;
  ratios.reserve(squares.size());
  for (size_t tensor = 0; tensor < squares.size(); ++tensor) {
    ratios.push_back(TrustRatio({.weights = weight_squares[tensor], .update = squares[tensor]}));
  }
  version.trust_ratios = std::make_shared<const std::vector<float>>(std::move(ratios));
}

void Updater::OnTotals(const v1::NormTotals& totals) {
  if (current_ == nullptr || current_->state != State::kCommitted || !current_->awaits_totals) return;
  const bool trust = current_->stage == Stage::kTrustRatios;
  const v1::NormRound::Kind kind = trust ? v1::NormRound::UPDATE : v1::NormRound::GRADIENT;
  if (totals.round().version() != current_->versions.front().context.update || totals.round().kind() != kind) return;
  const auto tensors = static_cast<int>(layout_->plan().layout().size());
  Check(totals.squares_size() == tensors && totals.weight_squares_size() == (trust ? tensors : 0),
        "the chief knows the same model");
  current_->awaits_totals = false;
  SetTotals(0, Span(totals.squares()), Span(totals.weight_squares()));
  NextStage();
}

std::optional<uint64_t> Updater::awaits_totals() const {
  if (current_ == nullptr || !current_->awaits_totals) return std::nullopt;
  return current_->versions.front().context.update;
}

void Updater::GiveUpRound() {
  if (current_ == nullptr || alone() || current_->state != State::kCommitted || !current_->measuring()) return;
  given_up_ = true;
  current_->state = State::kAbandoned;
  current_->awaits_totals = false;
}

void Updater::MeasurePush(const std::shared_ptr<Push>& push, std::function<void(v1::NormSums)> measured) {
  const std::shared_ptr<Update> update = MakeUpdate({MakeVersion({push})});
  update->stage = Stage::kGradientNorms;
  update->squares.assign(layout_->slices(), 0);
  pool_.Post(
      layout_->slices(), [update](size_t i) { update->MeasureItem(i); },
      [update, measured = std::move(measured)] {
        const Push& of = *update->versions.front().pushes.front();
        v1::NormSums sums;
        sums.mutable_round()->set_rank(of.rank);
        sums.mutable_round()->set_incarnation(of.incarnation);
        sums.mutable_round()->set_step(of.step);
        sums.mutable_squares()->Add(update->squares.begin(), update->squares.end());
        measured(std::move(sums));
      });
}

TensorFactors Updater::ClipFactorsOf(const v1::NormTotals& totals) const {
  Check(totals.squares_size() == static_cast<int>(layout_->plan().layout().size()), "the chief knows the same model");
  return std::make_shared<const std::vector<float>>(ClipFactors(clip_, Span(totals.squares())));
}

}  // namespace ps
