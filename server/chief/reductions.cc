#include "server/chief/reductions.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

double Combine(v1::ReduceRequest::Operation operation, double one, double other) {
  if (operation == v1::ReduceRequest::SUM) return one + other;
  if (std::isnan(one) || std::isnan(other)) return std::numeric_limits<double>::quiet_NaN();
  return operation == v1::ReduceRequest::MIN ? std::min(one, other) : std::max(one, other);
}

const char* NameOf(v1::ReduceRequest::Operation operation) {
  if (operation == v1::ReduceRequest::MIN) return "smallest";
  return operation == v1::ReduceRequest::MAX ? "largest" : "sum";
}

}  // namespace

std::string Reductions::Kind::ToString() const {
  const std::string numbers = absl::StrCat(NameOf(operation), " of ", count, count == 1 ? " number" : " numbers");
  return name.empty() ? numbers : absl::StrCat(name, " (", numbers, ")");
}

absl::Status Reductions::Check(const v1::ReduceRequest& request) {
  if (!v1::ReduceRequest::Operation_IsValid(request.operation())) {
    return InvalidArgument("operation: number ", static_cast<int>(request.operation()), " is unknown to this server");
  }
  if (request.values_size() > kMaxValues) {
    return InvalidArgument("values: ", request.values_size(), " numbers; at most ", kMaxValues, " can be reduced");
  }
  if (request.number() == 0) return absl::InvalidArgumentError("number: requests are counted from 1");
  return CheckText("the name of what is reduced", request.name(), kMaxNameBytes);
}

absl::StatusOr<bool> Reductions::Bring(const Participant& from, const v1::ReduceRequest& request) {
  const Owner owner = OwnerOf(from);
  const uint64_t number = request.number();
  const auto answered = answers_.find(owner);
  uint64_t last = answered == answers_.end() ? 0 : answered->second.number;
  if (open_.has_value()) {
    if (const auto own = open_->brought.find(owner); own != open_->brought.end()) last = own->second.number;
  }
  if (number == last) return false;
  if (number < last) return InvalidArgument("number=", number, ": the last of ", from.who, " was ", last);
  Kind kind = {
      .operation = request.operation(), .name = request.name(), .count = static_cast<size_t>(request.values_size())};
  if (const Past* const past = PassedWithout(from, kind, request.step()); past != nullptr) {
    answers_[owner] = {.number = number, .round = past->round, .reply = past->reply};
    return true;
  }
  if (open_.has_value()) {
    open_->brought.erase(owner);
    if (open_->brought.empty()) open_.reset();
  }
  if (!open_.has_value()) open_ = {.kind = kind, .step = request.step(), .brought = {}};
  if (kind != open_->kind) {
    return FailedPrecondition(from.who, " brings ", kind.ToString(), ", and ", open_->brought.begin()->second.who, " ",
                              open_->kind.ToString(), ": all workers have to bring the same, in the same order");
  }
  open_->step = std::max(open_->step, request.step());
  open_->brought[owner] = {
      .number = number, .who = from.who, .values = {request.values().begin(), request.values().end()}};
  return true;
}

const Reductions::Past* Reductions::PassedWithout(const Participant& from, const Kind& kind, uint64_t step) const {
  const bool takes_part = !from.from_step.has_value() || step >= *from.from_step;
  if (takes_part || step != past_step_) return nullptr;
  const auto answered = answers_.find(OwnerOf(from));
  const uint64_t after = answered == answers_.end() ? 0 : answered->second.round;
  const auto found = std::find_if(past_.begin(), past_.end(),
                                  [&](const Past& past) { return past.round > after && past.kind == kind; });
  return found == past_.end() ? nullptr : &*found;
}

void Reductions::Move(const std::vector<Participant>& participants) {
  if (empty()) return;
  const auto is_gone = [&participants](const auto& entry) {
    const auto at = std::lower_bound(participants.begin(), participants.end(), entry.first,
                                     [](const Participant& each, const Owner& owner) { return OwnerOf(each) < owner; });
    return at == participants.end() || OwnerOf(*at) != entry.first;
  };
  std::erase_if(answers_, is_gone);
  if (!open_.has_value()) return;
  std::erase_if(open_->brought, is_gone);
  if (open_->brought.empty()) return open_.reset();
  if (std::none_of(participants.begin(), participants.end(), [this](const auto& each) { return IsMissing(each); })) {
    End();
  }
}

bool Reductions::IsMissing(const Participant& participant) const {
  const Owner owner = OwnerOf(participant);
  if (open_->brought.contains(owner)) return false;
  return participant.from_step.has_value() ? open_->step >= *participant.from_step : answers_.contains(owner);
}

std::vector<uint32_t> Reductions::Missing(const std::vector<Participant>& participants) const {
  std::vector<uint32_t> ranks;
  for (const Participant& each : participants) {
    if (open_.has_value() && IsMissing(each)) ranks.push_back(each.rank);
  }
  return ranks;
}

std::string Reductions::What() const {
  if (!open_.has_value()) return "";
  return open_->kind.name.empty() ? open_->kind.ToString() : open_->kind.name;
}

void Reductions::End() {
  const Round round = *std::exchange(open_, std::nullopt);
  auto reply = std::make_shared<v1::ReduceReply>();
  reply->set_workers(static_cast<uint32_t>(round.brought.size()));
  for (size_t i = 0; i < round.kind.count; ++i) {
    auto brought = round.brought.begin();  // In the order of ranks.
    double value = brought->second.values[i];
    for (++brought; brought != round.brought.end(); ++brought) {
      value = Combine(round.kind.operation, value, brought->second.values[i]);
    }
    reply->add_values(value);
  }
  ++rounds_;
  for (const auto& [owner, brought] : round.brought) {
    answers_[owner] = {.number = brought.number, .round = rounds_, .reply = reply};
  }
  if (round.step > past_step_) past_.clear();
  past_step_ = std::max(past_step_, round.step);
  past_.push_back({.round = rounds_, .kind = round.kind, .reply = reply});
  if (past_.size() > kMaxPast) past_.pop_front();
}

std::shared_ptr<const v1::ReduceReply> Reductions::Find(uint32_t rank, uint64_t incarnation, uint64_t number) const {
  const auto answered = answers_.find({rank, incarnation});
  if (answered == answers_.end() || answered->second.number != number) return nullptr;
  return answered->second.reply;
}

}  // namespace ps
