#include "server/transport/follower.h"

#include "common/codec.h"
#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

v1::ChiefUpdate Decision(uint64_t step) {
  v1::ChiefUpdate update;
  update.add_decisions()->set_step(step);
  return update;
}

v1::ShardReport Complete(uint64_t view, uint32_t rank, uint64_t step) {
  v1::ShardReport report;
  report.set_acknowledged_view(view);
  report.set_applied_version(step);
  v1::PushDone* done = report.add_complete();
  done->set_rank(rank);
  done->set_step(step);
  return report;
}

TEST_CASE("Updates leave in their order, each as it was") {
  UpdateQueue queue;
  CHECK_FALSE(queue.Take().has_value());
  for (uint64_t step = 0; step < 3; ++step) REQUIRE(queue.Add(Decision(step)).ok());
  for (uint64_t step = 0; step < 3; ++step) {
    v1::ChiefUpdate update;
    REQUIRE(DecodeMessage(queue.Take().value(), &update).ok());
    CHECK(update.decisions(0).step() == step);
  }
  CHECK_FALSE(queue.Take().has_value());
}

TEST_CASE("A shard that does not read its updates has a limit of them, by number and by bytes") {
  UpdateQueue few({.messages = 2, .bytes = 1 << 20});
  REQUIRE(few.Add(Decision(0)).ok());
  REQUIRE(few.Add(Decision(1)).ok());
  const absl::Status refused = few.Add(Decision(2));
  CHECK(absl::IsResourceExhausted(refused));
  CHECK(Message(refused).find("does not read the chief's updates: 2 of ") != std::string::npos);
  CHECK(few.Take().has_value());
  CHECK(few.Add(Decision(2)).ok());

  UpdateQueue small({.messages = 100, .bytes = 1000});
  v1::ChiefUpdate large;
  large.mutable_view()->set_failure(std::string(2000, 'x'));
  REQUIRE(small.Add(large).ok());  // Alone it may be of any size.
  CHECK(absl::IsResourceExhausted(small.Add(Decision(0))));
}

TEST_CASE("Reports that wait become one, with the newest state and every complete push in order") {
  ReportQueue queue;
  CHECK_FALSE(queue.Take().has_value());
  v1::ShardReport first = Complete(3, 0, 7);
  first.set_initialised(true);
  first.set_failure("the disk is full");
  first.set_waiting_for("a reader");
  v1::ShardReport last = Complete(4, 1, 8);
  last.set_failure("and more");
  REQUIRE(queue.Add(first).ok());
  REQUIRE(queue.Add(last).ok());
  const auto merged = queue.Take();
  REQUIRE(merged.has_value());
  CHECK(merged->acknowledged_view() == 4);
  CHECK(merged->applied_version() == 8);
  CHECK_FALSE(merged->initialised());  // By now it would speak of another model.
  CHECK(merged->waiting_for().empty());
  CHECK(merged->failure() == "the disk is full");
  REQUIRE(merged->complete_size() == 2);
  CHECK(merged->complete(0).step() == 7);
  CHECK(merged->complete(1).step() == 8);
  CHECK_FALSE(queue.Take().has_value());
}

TEST_CASE("A shard's status leaves after its other reports, in one of its own, and of several only the newest") {
  ReportQueue queue;
  v1::ShardReport status;
  for (uint64_t updates = 1; updates <= 3; ++updates) {
    status.mutable_status()->set_updates(updates);
    REQUIRE(queue.Add(status).ok());
    if (updates == 2) REQUIRE(queue.Add(Complete(3, 0, 7)).ok());
  }
  const auto report = queue.Take();
  REQUIRE(report.has_value());
  CHECK(report->acknowledged_view() == 3);
  CHECK(report->complete_size() == 1);
  CHECK_FALSE(report->has_status());
  const auto last = queue.Take();
  REQUIRE(last.has_value());
  CHECK(last->status().updates() == 3);
  CHECK_FALSE(queue.Take().has_value());
}

TEST_CASE("No complete push is lost to the limit of reports: one more is an error") {
  ReportQueue queue;
  for (int push = 0; push < ReportQueue::kMaxPushes; ++push) {
    if (!queue.Add(Complete(1, UINT32_MAX, UINT64_MAX)).ok()) FAIL("refused too early");
  }
  const absl::Status refused = queue.Add(Complete(2, 0, 1));
  CHECK(absl::IsResourceExhausted(refused));
  CHECK(Message(refused).find("does not read this shard's reports") != std::string::npos);
  CHECK(queue.Add(v1::ShardReport()).ok());  // State alone is merged.
  const auto report = queue.Take();
  REQUIRE(report.has_value());
  CHECK(report->complete_size() == ReportQueue::kMaxPushes);
  CHECK(report->ByteSizeLong() < kMaxReportBytes);
}

v1::ShardReport Norms(uint64_t version, int slices) {
  v1::ShardReport report;
  v1::NormSums* const sums = report.add_norms();
  sums->mutable_round()->set_version(version);
  for (int slice = 0; slice < slices; ++slice) sums->add_squares(0.1);
  return report;
}

TEST_CASE("Sums of squares follow in as many reports as they need, each with the newest state, and none is lost") {
  ReportQueue queue;
  REQUIRE(queue.Add(Complete(3, 0, 7)).ok());
  for (const uint64_t version : {1, 2, 3}) REQUIRE(queue.Add(Norms(version, 170'000)).ok());
  v1::ShardReport last;
  last.set_acknowledged_view(9);
  REQUIRE(queue.Add(last).ok());
  std::vector<uint64_t> versions;
  int complete = 0;
  int reports = 0;
  while (const std::optional<v1::ShardReport> report = queue.Take()) {
    ++reports;
    complete += report->complete_size();
    CHECK(report->acknowledged_view() == 9);
    CHECK(report->ByteSizeLong() < kMaxReportBytes);
    for (const v1::NormSums& sums : report->norms()) versions.push_back(sums.round().version());
  }
  CHECK(versions == std::vector<uint64_t>{1, 2, 3});
  CHECK(complete == 1);
  CHECK(reports == 2);
}

}  // namespace
}  // namespace ps
