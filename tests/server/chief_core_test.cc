// The chief without its lock: an event goes in, and what is to be done comes out, as values and in order.
#include "server/chief/chief_core.h"

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/proto_values.h"
#include "tests/catch.h"

namespace ps {
namespace {

// What an action is, and to whom.
struct ActionName {
  std::string operator()(const ToShard& to) const {
    const std::string what = to.update.has_view() ? "view" : to.update.decisions_size() > 0 ? "decision" : "other";
    return absl::StrCat(what, " to ", to.connection);
  }
  std::string operator()(const ToMember& to) const {
    return absl::StrCat(to.state.has_value() ? "state to " : "end of ", to.watch);
  }
  template <typename Reply>
  std::string operator()(const Answer<Reply>& answer) const {
    return absl::StrCat("answer to ", answer.call, answer.reply.ok() ? "" : " ",
                        answer.reply.ok() ? "" : absl::StatusCodeToString(answer.reply.status().code()));
  }
  std::string operator()(const CommitCheckpoint& commit) const {
    return absl::StrCat("commit ", commit.manifest.number);
  }
  std::string operator()(const RollBack&) const { return "roll back"; }
  std::string operator()(const Ended& end) const { return v1::Phase_Name(end.phase); }
  std::string operator()(const WriteMetric& event) const { return event.event; }
};

// A job of two workers. Shard s has connection 10 + s.
class CoreJob {
 public:
  explicit CoreJob(uint32_t shards, const std::string& mode = "bsp")
      : shards_(shards), core(Options(shards, mode), now) {
    for (uint32_t shard = 0; shard < shards; ++shard) REQUIRE(core.RegisterShard(10 + shard, Of(shard), now).ok());
    TakeAll();
    for (uint32_t shard = 0; shard < shards; ++shard) core.OnReport(shard, Report(shard, /*initialised=*/false), now);
    TakeAll();
  }

  std::string Actions() {
    actions = core.TakeActions();
    return absl::StrJoin(actions, ", ", [](std::string* out, const ChiefAction& action) {
      absl::StrAppend(out, std::visit(ActionName(), action));
    });
  }
  v1::Registration Of(uint32_t shard) const {
    v1::Registration registration;
    registration.set_protocol(v1::PROTOCOL_VERSION_1);
    registration.set_job("default");
    registration.set_shard(shard);
    registration.set_process(77);
    return registration;
  }
  void Join(uint64_t call, const std::string& name) {
    v1::JoinRequest request;
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_name(name);
    *request.mutable_layout() = ToProto({{"w", {4}}, {"b", {4}}});
    CHECK(core.Join(call, request, now, now + std::chrono::seconds(60)) == call);
  }
  // The shard acts on the newest view, and may have its initial values.
  v1::ShardReport Report(uint32_t shard, bool initialised = true) {
    v1::ShardReport report;
    report.set_number(++reports_[shard]);
    report.set_acknowledged_view(view);
    report.set_initialised(initialised);
    return report;
  }
  // Both workers are members, and the job runs.
  void Run() {
    Join(1, "a");
    Join(2, "b");
    for (int round = 0; round < 3; ++round) {
      TakeAll();
      for (uint32_t shard = 0; shard < shards_; ++shard) core.OnReport(shard, Report(shard), now);
    }
    TakeAll();
    REQUIRE(core.Status(now, /*with_layout=*/false).phase() == v1::PHASE_RUNNING);
    REQUIRE(ids.size() == 2);
  }
  // Takes the actions, and notes what shards were told last, and who has joined.
  void TakeAll() {
    (void)Actions();
    for (const ChiefAction& action : actions) {
      if (const auto* const to = std::get_if<ToShard>(&action); to != nullptr) {
        told[to->connection] = to->update.number();
        if (to->update.has_view()) view = to->update.view().number();
      }
      if (const auto* const joined = std::get_if<Answer<v1::JoinReply>>(&action)) ids.push_back(joined->reply->id());
    }
  }
  void Watch(uint64_t watch, const v1::Identity& id) {
    v1::WatchRequest request;
    *request.mutable_id() = id;
    REQUIRE(core.Watch(watch, request, now).ok());
  }
  void Done(uint64_t call, const v1::Identity& id) {
    v1::DoneRequest request;
    *request.mutable_id() = id;
    core.Done(call, request, now, now + std::chrono::seconds(60));
  }

  TimePoint now = TimePoint() + std::chrono::hours(1);
  std::vector<ChiefAction> actions;
  std::vector<v1::Identity> ids;
  std::map<uint64_t, uint64_t> told;  // By connection, the number of the message.
  uint64_t view = 0;

 private:
  static ChiefOptions Options(uint32_t shards, const std::string& mode) {
    ChiefOptions options;
    options.num_workers = 2;
    options.num_shards = shards;
    options.mode.name = mode;
    return options;
  }

  const uint32_t shards_;
  std::map<uint32_t, uint64_t> reports_;

 public:
  ChiefCore core;
};

TEST_CASE("A join makes a view for every shard, and is answered by the report with which the last of them has it") {
  CoreJob job(2);
  job.Join(5, "a");
  CHECK(job.Actions() == "view to 10, view to 11");
  job.view = std::get<ToShard>(job.actions[0]).update.view().number();
  job.core.OnReport(0, job.Report(0, /*initialised=*/false), job.now);
  CHECK(job.Actions().empty());
  job.core.OnReport(1, job.Report(1, /*initialised=*/false), job.now);
  CHECK(job.Actions() == "answer to 5");
  const auto& answer = std::get<Answer<v1::JoinReply>>(job.actions[0]);
  REQUIRE(answer.reply.ok());
  CHECK(answer.reply->id().rank() == 0);
}

TEST_CASE(
    "The set that the last push of a step makes goes to all shards, in the event of the report that completes it") {
  CoreJob job(2, "backup");
  job.Run();
  const auto complete = [&](uint32_t shard, uint32_t rank) {
    v1::ShardReport report = job.Report(shard);
    v1::PushDone* const done = report.add_complete();
    done->set_rank(rank);
    done->set_incarnation(1);
    done->set_samples(1);
    job.core.OnReport(shard, report, job.now);
    return job.Actions();
  };
  for (const uint32_t rank : {0U, 1U}) CHECK(complete(0, rank).empty());
  std::string decided = complete(1, 0);
  if (decided.empty()) decided = complete(1, 1);
  CHECK(decided == "decision to 10, decision to 11");
  CHECK(std::get<ToShard>(job.actions[0]).update.decisions(0).step() == 0);
}

TEST_CASE("A failure is told to shards, to who waits and to members before the server ends, and told once") {
  CoreJob job(1);
  job.Run();
  job.Watch(20, job.ids[0]);
  CHECK(job.Actions() == "state to 20");
  job.Done(30, job.ids[1]);
  (void)job.Actions();
  job.core.Fail("out of luck", job.now);
  CHECK(job.Actions() == "view to 10, answer to 30 ABORTED, state to 20, PHASE_FAILED");
  CHECK(std::get<Ended>(job.actions.back()).failure == "out of luck");
  job.core.Fail("again", job.now);
  job.core.Tick(job.now);
  CHECK(job.Actions().empty());
}

TEST_CASE("A member that opens another stream, or asks again, ends its earlier stream or call") {
  CoreJob job(1);
  job.Run();
  job.Watch(20, job.ids[0]);
  (void)job.Actions();
  job.Watch(21, job.ids[0]);
  CHECK(job.Actions() == "end of 20, state to 21");
  job.Done(30, job.ids[0]);
  (void)job.Actions();
  job.Done(31, job.ids[0]);
  CHECK(job.Actions() == "answer to 30 CANCELLED");
}

TEST_CASE("What a shard has not received goes to the connection by which its process comes back, and nothing before") {
  CoreJob job(2);
  job.Run();
  job.core.OnShardGone(1, 11, job.now);
  job.Done(30, job.ids[0]);
  CHECK(job.Actions() == "view to 10");
  v1::Registration registration = job.Of(1);
  registration.set_resumes(1);
  registration.set_received(job.told[11]);
  REQUIRE(job.core.RegisterShard(12, registration, job.now).ok());
  // What the chief has received comes first, then the view that was missed, then the one with this shard.
  CHECK(job.Actions() == "other to 12, view to 12, view to 10, view to 12");
}

}  // namespace
}  // namespace ps
