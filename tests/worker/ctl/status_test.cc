#include "worker/ctl/status.h"

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("NAME=VALUE arguments become values, and every one that is not of this form is named") {
  const auto request = ParseAssignments({"learning_rate=0.01", "momentum=1e-3"});
  REQUIRE(request.ok());
  CHECK(DescribeValues(request->values()) == "learning_rate=0.01 momentum=0.001");
  const auto bad = ParseAssignments({"learning_rate", "=1", "momentum=fast", "weight_decay=", "weight_decay=0"});
  CHECK(bad.status().code() == absl::StatusCode::kInvalidArgument);
  CHECK(Message(bad.status()) ==
        "learning_rate: expected NAME=VALUE, VALUE a number\n"
        "=1: expected NAME=VALUE, VALUE a number\n"
        "momentum=fast: expected NAME=VALUE, VALUE a number\n"
        "weight_decay=: expected NAME=VALUE, VALUE a number");
}

TEST_CASE("What is said of a schedule is text, and told after the values") {
  const auto request =
      ParseAssignments({"schedule=step", "learning_rate=0.5", "schedule_step=30epochs", "warmup=1epoch"});
  REQUIRE(request.ok());
  CHECK(request->values_size() == 1);
  CHECK(request->schedule().at("schedule_step") == "30epochs");
  v1::SetHyperparametersReply reply;
  reply.add_shards()->set_version(7);
  CHECK(DescribeChange(*request, reply) ==
        "learning_rate=0.5 schedule=step schedule_step=30epochs warmup=1epoch from version 7 on");
  CHECK(Message(ParseAssignments({"warmup=1epoch", "warmup=2epochs"}).status()) ==
        "warmup=2epochs: warmup is given twice");
}

TEST_CASE("A change is told with its version, by shard where they differ") {
  const v1::SetHyperparametersRequest request = *ParseAssignments({"learning_rate=0.01"});
  v1::SetHyperparametersReply reply;
  for (const uint32_t shard : {0U, 1U}) {
    reply.add_shards()->set_shard(shard);
    reply.mutable_shards(static_cast<int>(shard))->set_version(7);
  }
  CHECK(DescribeChange(request, reply) == "learning_rate=0.01 from version 7 on");
  reply.mutable_shards(1)->set_version(8);
  CHECK(DescribeChange(request, reply) == "learning_rate=0.01 from version 7 on shard 0, 8 on shard 1");
}

}  // namespace
}  // namespace ps
