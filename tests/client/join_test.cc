#include "worker/client/join.h"

#include <cmath>
#include <limits>

#include "tests/catch.h"

namespace ps {
namespace {

const Layout kJoinLayout = {{"a", {4}}, {"b", {3}}};

v1::JoinReply Reply(v1::LocalSteps::Exchange exchange) {
  v1::JoinReply reply;
  reply.set_mode("local_sgd");
  v1::LocalSteps& local = *reply.mutable_policy()->mutable_local_steps();
  local.set_exchange(exchange);
  local.set_steps(8);
  local.set_alpha(0.25F);
  local.set_optimizer("momentum");
  if (exchange == v1::LocalSteps::AVERAGE_GRADIENTS) local.set_average_every_epochs(0.5);
  return reply;
}

void CheckRefused(const v1::JoinReply& reply, const std::string& why) {
  const absl::StatusOr<ModePolicy> policy = PolicyOf(reply, kJoinLayout);
  CHECK(absl::IsFailedPrecondition(policy.status()));
  INFO(policy.status().ToString());
  CHECK(policy.status().ToString().find("--mode=local_sgd") != std::string::npos);
  CHECK(policy.status().ToString().find(why) != std::string::npos);
}

TEST_CASE("a mode's policy is what the chief's answer says, and nothing without it") {
  const absl::StatusOr<ModePolicy> none = PolicyOf({}, kJoinLayout);
  REQUIRE(none.ok());
  CHECK(!none->empty_contributions);
  CHECK(!none->exact_versions);
  CHECK(!none->local_steps.has_value());

  v1::JoinReply reply = Reply(v1::LocalSteps::AVERAGE_GRADIENTS);
  reply.mutable_policy()->set_empty_contributions(true);
  reply.mutable_policy()->set_exact_versions(true);
  const absl::StatusOr<ModePolicy> policy = PolicyOf(reply, kJoinLayout);
  REQUIRE(policy.ok());
  CHECK(policy->empty_contributions);
  CHECK(policy->exact_versions);
  REQUIRE(policy->local_steps.has_value());
  CHECK(policy->local_steps->exchange == LocalSteps::Exchange::kAverageGradients);
  CHECK(policy->local_steps->steps == 8);
  CHECK(policy->local_steps->average_every_steps == 0);
  CHECK(policy->local_steps->average_every_epochs == 0.5);
  CHECK(policy->local_steps->optimizer == "momentum");
  CHECK(PolicyOf(Reply(v1::LocalSteps::AVERAGE_WEIGHTS), kJoinLayout)->local_steps->exchange ==
        LocalSteps::Exchange::kAverageWeights);
  CHECK(PolicyOf(Reply(v1::LocalSteps::ELASTIC), kJoinLayout)->local_steps->alpha == 0.25F);
}

TEST_CASE("the tensors of a fragment are those that the layout says, and one fragment has all") {
  v1::JoinReply reply = Reply(v1::LocalSteps::AVERAGE_WEIGHTS);
  v1::LocalSteps& local = *reply.mutable_policy()->mutable_local_steps();
  local.set_fragments(1);
  CHECK(PolicyOf(reply, kJoinLayout)->local_steps->fragments.empty());
  local.set_fragments(2);
  local.set_overlap(3);
  local.set_mix(0.5F);
  const LocalSteps steps = *PolicyOf(reply, kJoinLayout)->local_steps;
  CHECK(steps.fragments == std::vector<std::vector<uint32_t>>{{0}, {1}});
  CHECK(steps.overlap == 3);
  CHECK(steps.mix == 0.5F);
}

TEST_CASE("local steps that the client does not know or nobody could take are refused by what is wrong") {
  v1::JoinReply reply = Reply(static_cast<v1::LocalSteps::Exchange>(77));
  CheckRefused(reply, "exchange 77");
  for (const auto exchange : {v1::LocalSteps::AVERAGE_WEIGHTS, v1::LocalSteps::ELASTIC}) {
    reply = Reply(exchange);
    reply.mutable_policy()->mutable_local_steps()->set_steps(0);
    CheckRefused(reply, "steps is 0");
  }
  for (const float alpha : {0.0F, -0.5F, 1.0F, std::numeric_limits<float>::quiet_NaN()}) {
    reply = Reply(v1::LocalSteps::ELASTIC);
    reply.mutable_policy()->mutable_local_steps()->set_alpha(alpha);
    CheckRefused(reply, "alpha");
  }
  reply = Reply(v1::LocalSteps::AVERAGE_WEIGHTS);
  v1::LocalSteps& local = *reply.mutable_policy()->mutable_local_steps();
  local.set_overlap(8);
  CheckRefused(reply, "overlap is 8 of 8 batches");
  local.set_overlap(0);
  for (const float mix : {-0.5F, 1.5F, std::numeric_limits<float>::quiet_NaN()}) {
    local.set_mix(mix);
    CheckRefused(reply, "mix is ");
  }
  local.set_mix(0);
  local.set_fragments(3);
  CheckRefused(reply, "--fragments=3: the model has only 2 tensors that pushes carry");
  local.set_fragments(4'000'000'000);
  CheckRefused(reply, "4000000000 fragments");
  local.set_fragments(2);
  local.set_exchange(v1::LocalSteps::ELASTIC);
  CheckRefused(reply, "fragments are of weights that are averaged");
  for (const float limit : {-0.5F, std::numeric_limits<float>::infinity()}) {
    reply = Reply(v1::LocalSteps::ELASTIC);
    reply.mutable_policy()->mutable_local_steps()->set_clip_norm(limit);
    CheckRefused(reply, "a limit of clipping is ");
  }
  reply = Reply(v1::LocalSteps::AVERAGE_GRADIENTS);
  reply.mutable_policy()->mutable_local_steps()->set_steps(0);  // Never.
  CHECK(PolicyOf(reply, kJoinLayout).ok());
  reply.mutable_policy()->mutable_local_steps()->set_average_every_steps(10);
  CheckRefused(reply, "average_every");  // Both.
  for (const double epochs : {0.0, -1.0, std::numeric_limits<double>::infinity()}) {
    reply.mutable_policy()->mutable_local_steps()->set_average_every_steps(0);
    reply.mutable_policy()->mutable_local_steps()->set_average_every_epochs(epochs);
    CheckRefused(reply, "average_every");
  }
}

}  // namespace
}  // namespace ps
