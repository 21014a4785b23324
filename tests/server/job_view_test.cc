// The views of a chief, whole and as changes, in the hands of shards.
#include "server/shard/job_view.h"

#include <array>

#include "tests/server/test_job.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

// A chief and two shards: the first one reads changes, the second one does not.
class TwoReaders {
 public:
  static constexpr uint32_t kShards = 2;

  TwoReaders() : chief_(Options(), [](v1::Phase, const std::string&) {}) {
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      v1::Registration registration;
      registration.set_protocol(v1::PROTOCOL_VERSION_1);
      registration.set_shard(shard);
      registration.set_job("default");
      registration.set_takes_changes(shard == 0);
      const auto send = [this, shard](const v1::ChiefUpdate& update) { OnUpdate(shard, update.view()); };
      REQUIRE(chief_.RegisterShard(registration, send, now_).ok());
    }
  }

  v1::Identity Join(const std::string& name, const Layout& layout = {{"w", {4}}, {"b", {2}}}) {
    v1::JoinRequest request;
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_name(name);
    *request.mutable_layout() = ToProto(layout);
    v1::Identity id;
    chief_.Join(request, now_, now_ + std::chrono::hours(1), [&](const auto& reply) { id = reply->id(); });
    CheckSame();
    return id;
  }
  void Leave(const v1::Identity& id) {
    v1::LeaveRequest request;
    *request.mutable_id() = id;
    request.set_reason("enough");
    REQUIRE(chief_.Leave(request, now_).ok());
    CheckSame();
  }
  void Done(const v1::Identity& id) {
    v1::DoneRequest request;
    *request.mutable_id() = id;
    chief_.Done(request, now_, now_ + std::chrono::hours(1), [](const auto&) {});
    CheckSame();
  }
  void Heartbeat(const v1::Identity& id, const std::string& busy_with) {
    v1::HeartbeatRequest request;
    *request.mutable_id() = id;
    request.set_busy_with(busy_with);
    REQUIRE(chief_.Heartbeat(request, now_).ok());
    CheckSame();
  }
  void Initialised() {
    for (uint32_t shard = 0; shard < kShards; ++shard) Report(shard, /*initialised=*/true);
    CheckSame();
  }

  const v1::View& last(uint32_t shard) const { return last_[shard]; }
  const JobView& view(uint32_t shard) const { return views_[shard]; }

 private:
  static ChiefOptions Options() {
    ChiefOptions options;
    options.num_workers = 3;
    options.num_shards = kShards;
    options.mode.name = "asp";
    return options;
  }

  void OnUpdate(uint32_t shard, const v1::View& view) {
    CHECK_FALSE(views_[shard].HasGap(view));
    CHECK(views_[shard].Accept(view));
    last_[shard] = view;
    Report(shard, /*initialised=*/false);
  }
  void Report(uint32_t shard, bool initialised) {
    v1::ShardReport report;
    report.set_acknowledged_view(views_[shard].view().number());
    report.set_initialised(initialised);
    chief_.OnReport(shard, report, now_);
  }

  void CheckSame() const {
    v1::View of_changes = views_[0].view();
    of_changes.clear_since();
    of_changes.clear_left();
    CHECK(of_changes.SerializeAsString() == views_[1].view().SerializeAsString());
    CHECK(views_[0].mode_members() == views_[1].mode_members());
    CHECK(views_[0].done() == views_[1].done());
    for (uint32_t rank = 0; rank < 3; ++rank) CHECK(views_[0].BusyWith(rank) == views_[1].BusyWith(rank));
  }

  TimePoint now_ = TimePoint() + std::chrono::hours(1);
  std::array<JobView, kShards> views_ = {JobView("default", 0), JobView("default", 1)};
  std::array<v1::View, kShards> last_;
  Chief chief_;
};

TEST_CASE("A shard that reads changes knows what one knows that gets whole views, and gets the model once") {
  TwoReaders job;
  const v1::Identity a = job.Join("a");
  CHECK(job.last(0).since() == 0);
  CHECK(job.last(0).layout().tensors_size() == 2);
  job.Join("b");
  CHECK(job.last(0).since() == job.last(0).number() - 1);
  CHECK_FALSE(job.last(0).has_layout());
  CHECK(job.last(0).members_size() == 1);
  CHECK(job.last(1).since() == 0);
  CHECK(job.last(1).members_size() == 2);
  const v1::Identity c = job.Join("c");
  job.Initialised();
  CHECK(job.view(0).running());
  job.Heartbeat(a, "evaluating");
  CHECK(job.view(0).BusyWith(a.rank()) == "evaluating");
  job.Heartbeat(a, "");
  job.Done(c);
  job.Leave(a);
  CHECK(job.last(0).left_size() == 1);
  job.Leave(c);
  CHECK(job.view(0).done().contains(c.rank()));
  job.Join("d");
  CHECK(job.view(0).view().layout().tensors_size() == 2);
}

TEST_CASE("Another model is told whole, and so is that there is none any more") {
  TwoReaders job;
  job.Leave(job.Join("a"));
  CHECK(job.last(0).since() == 0);
  CHECK_FALSE(job.view(0).view().has_layout());
  job.Join("b", {{"other", {1}}});
  CHECK(job.last(0).since() == 0);
  CHECK(job.view(0).view().layout().tensors(0).name() == "other");
}

TEST_CASE("A shard that gets changes of a view that it has not got fails, and says so") {
  TestShard test("bsp");
  test.NextView(v1::PHASE_RUNNING, [](v1::View* view) {
    view->set_since(view->number() - 2);
    view->clear_layout();
  });
  const std::vector<std::string> failures = test.Failures(1);
  REQUIRE(failures.size() == 1);
  CHECK(failures[0] == "shard 0 has view 2, and the chief's view 3 says what has changed since view 1");
}

}  // namespace
}  // namespace ps
