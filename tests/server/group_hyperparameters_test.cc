// Groups of tensors that have hyperparameters of their own: from the join on, as pushes tell them, beside what is set,
// and in what a shard saves.
#include "server/checkpoint/saved_state.h"
#include "server/engine/hyperparameter_timeline.h"
#include "tests/server/test_job.h"
#include "tests/server/test_shard.h"
#include "tests/server/updater_bench.h"

namespace ps {
namespace {

ToldValues Groups(GroupValues groups, std::optional<float> rate = {}) {
  return {.learning_rate = rate, .groups = std::make_shared<const GroupValues>(std::move(groups))};
}

// What a tensor of this group is stepped with, by the timeline.
Hyperparameters OfGroup(const HyperparameterTimeline::Values& values, size_t group) {
  const bool own = values.groups != nullptr && group < values.groups->size();
  return own ? Changed(values.of_all, (*values.groups)[group]) : values.of_all;
}

TEST_CASE("Groups begin with what the job began with, and have what was told last, in place of all they had") {
  HyperparameterTimeline timeline({.momentum = 0.5F, .weight_decay = 0}, {{}, {{"momentum", 0.25F}}});
  timeline.Tell(3, Groups({{}, {}, {{"weight_decay", 2}}}));
  CHECK(OfGroup(timeline.At(2), 0).momentum == 0.5F);
  CHECK(OfGroup(timeline.At(2), 1).momentum == 0.25F);
  CHECK(OfGroup(timeline.At(3), 1).momentum == 0.5F);
  CHECK(OfGroup(timeline.At(3), 2).weight_decay == 2);
  CHECK(OfGroup(timeline.At(9), 3).weight_decay == 0);
  // As if a push had told it.
  CHECK(OfGroup(timeline.At(4, Groups({{{"momentum", 0.75F}}})), 2).weight_decay == 0);
  CHECK(OfGroup(timeline.At(4, Groups({{{"momentum", 0.75F}}})), 2).momentum == 0.75F);
  timeline.ForgetTold(2);
  CHECK(OfGroup(timeline.At(3), 1).momentum == 0.25F);
}

TEST_CASE("What is told of group 0 changes for all, and what it does not name stays") {
  HyperparameterTimeline timeline({.momentum = 0.5F, .weight_decay = 1});
  timeline.Tell(2, Groups({{{"momentum", 0.25F}}}));
  timeline.Tell(4, Groups({{{"weight_decay", 3}}}));
  CHECK(timeline.At(1).of_all.momentum == 0.5F);
  for (const uint64_t made : {1U, 2U, 3U}) {
    CHECK(timeline.At(3).of_all.momentum == 0.25F);
    CHECK(timeline.At(3).of_all.weight_decay == 1);
    CHECK(timeline.At(4).of_all.momentum == 0.25F);
    CHECK(timeline.At(4).of_all.weight_decay == 3);
    timeline.TakeMade(made);
  }
}

TEST_CASE("What is set holds for all groups, until one is told again, and at one version counts before what is told") {
  HyperparameterTimeline timeline({.learning_rate = 1}, {{}, {{"learning_rate", 8}, {"momentum", 0.25F}}});
  timeline.Add({.version = 3, .values = {{"learning_rate", 2}}});
  timeline.Tell(3, Groups({{}, {{"learning_rate", 16}}, {{"momentum", 0.5F}}}, 4));
  timeline.Tell(5, Groups({{}, {{"learning_rate", 32}}}));
  const auto rate = [&](uint64_t version, size_t group) { return OfGroup(timeline.At(version), group).learning_rate; };
  CHECK(rate(2, 1) == 8);
  CHECK(rate(3, 0) == 2);
  CHECK(rate(3, 1) == 2);
  CHECK(OfGroup(timeline.At(3), 2).momentum == 0.5F);  // Told at the same version, and not set.
  CHECK(rate(4, 1) == 2);
  CHECK(rate(5, 0) == 2);
  CHECK(rate(5, 1) == 32);
  CHECK(rate(2, 1) == 8);  // Nothing was taken away from what was told or set for others.
  for (const uint64_t version : {1U, 2U, 3U, 4U, 5U}) timeline.TakeMade(version);
  CHECK(rate(6, 0) == 2);
  CHECK(rate(6, 1) == 32);
}

TEST_CASE("Each tensor steps with what its group has of its own, and with its factors") {
  Layout layout = {{"a", {1}, 0.5F}, {"b", {1}}};
  layout[0].group = 2;
  layout[1].group = 1;
  UpdaterBench bench({.layout = layout});
  const auto step = [&](const ToldValues& told) {
    const float a = bench.Weight(0);
    const float b = bench.Weight(1);
    auto push = bench.MakePush(1, 1);
    push->told = told;
    bench.updater_.Commit({push}, bench.now_);
    bench.Work();
    REQUIRE(bench.Ended() == UpdaterBench::Outcome::kPublished);
    Updater::Version made;
    made.context.update = bench.parameters_.version();
    bench.updater_.TakeEffective(made);
    return std::pair(a - bench.Weight(0), b - bench.Weight(1));
  };
  CHECK(step({}) == std::pair(0.5F, 1.0F));
  CHECK(step(Groups({{}, {}, {{"learning_rate", 8}}})) == std::pair(4.0F, 1.0F));
  CHECK(step({.learning_rate = 2, .groups = nullptr}) == std::pair(4.0F, 2.0F));
  CHECK(step({}) == std::pair(4.0F, 2.0F));
  CHECK(step(Groups({{}, {{"learning_rate", 0}}})) == std::pair(1.0F, 0.0F));
  CHECK(step(Groups({{}})) == std::pair(1.0F, 2.0F));
}

TEST_CASE("Versions that are made in one pass have each what its push has told") {
  Layout layout = {{"a", {1}}, {"b", {1}}};
  layout[1].group = 1;
  UpdaterBench bench({.mode = {.name = "asp"}, .layout = layout});
  bench.updater_.SetLowestRank(0);
  for (const float rate : {2.0F, 4.0F}) {
    auto push = bench.MakePush(1, 1);
    push->told = Groups({{}, {{"learning_rate", rate}}});
    bench.updater_.Commit({push}, bench.now_);
    auto other = bench.MakePush(1, 1, 1);  // Not the lowest rank: nobody hears what it tells.
    other->told = Groups({{}, {{"learning_rate", 64}}});
    bench.updater_.Commit({other}, bench.now_);
  }
  bench.Work();
  REQUIRE(bench.Ended() == UpdaterBench::Outcome::kPublished);
  CHECK(bench.parameters_.version() == 4);
  CHECK(bench.Weight(0) == -4);
  CHECK(bench.Weight(1) == -12);
}

// ---- A shard

v1::PushRequest Telling(uint32_t rank, uint64_t step, const GroupValues& groups, uint32_t samples = 1) {
  v1::PushRequest header = TestShard::Header(rank, step, samples);
  header.set_version(step);
  ToProto(groups, header.mutable_groups());
  return header;
}

Layout TwoGroups() {
  Layout layout = {{"a", {4}}, {"b", {4}}};
  layout[0].group = 1;
  layout[1].group = 2;
  return layout;
}

std::vector<ReceivedSlice> Ones() { return {TestShard::Slice(0, {1, 1, 1, 1}), TestShard::Slice(1, {1, 1, 1, 1})}; }

float WeightOf(TestShard& job, uint64_t version, size_t slice) {
  Reply<VersionPin> reply;
  job.AwaitPull({.id = TestShard::Id(0), .peer = ""}, version, TestShard::kLong, reply.Callback());
  const auto pin = reply.Wait();
  REQUIRE(pin.ok());
  return pin->slice(slice)[0];
}

TEST_CASE("Where all push together the lowest rank tells of groups, with an empty contribution too") {
  TestShard job("bsp", {.optimizer = "sgd"}, TwoGroups());
  const auto step = [&](uint64_t number, const GroupValues& of_0, bool empty) {
    const float a = WeightOf(job, number, 0);
    const float b = WeightOf(job, number, 1);
    REQUIRE(job.Add(Telling(1, number, {{}, {{"learning_rate", 64}}}), Ones()).ok());
    const uint32_t samples = empty ? 0 : 1;
    REQUIRE(job.Add(Telling(0, number, of_0, samples), empty ? std::vector<ReceivedSlice>() : Ones()).ok());
    return std::pair(a - WeightOf(job, number + 1, 0), b - WeightOf(job, number + 1, 1));
  };
  CHECK(step(0, {}, false) == std::pair(1.0F, 1.0F));
  CHECK(step(1, {{}, {{"learning_rate", 2}}}, false) == std::pair(2.0F, 1.0F));
  CHECK(step(2, {{}, {}, {{"learning_rate", 0.5F}}}, true) == std::pair(1.0F, 0.5F));
  CHECK(step(3, {}, false) == std::pair(1.0F, 0.5F));
}

TEST_CASE("A version that is built before its step is decided on has what its push tells of groups") {
  TestShard job("bsp", {.optimizer = "sgd"}, TwoGroups());
  for (uint64_t step = 0; step < 2; ++step) {
    const GroupValues told = {{}, {{"learning_rate", step == 0 ? 0.5F : 0.125F}}, {{"learning_rate", 0.25F}}};
    // What both have pushed of a is built while b is missing.
    REQUIRE(job.Add(Telling(0, step, told), {Ones()[0]}).ok());
    REQUIRE(job.Add(Telling(1, step, {}), {Ones()[0]}).ok());
    REQUIRE(job.Add(Telling(1, step, {}), {Ones()[1]}).ok());
    REQUIRE(job.Add(Telling(0, step, told), {Ones()[1]}).ok());
  }
  CHECK(WeightOf(job, 2, 0) == 1 - 0.5F - 0.125F);
  CHECK(WeightOf(job, 2, 1) == 1 - 0.25F - 0.25F);
}

TEST_CASE("A push that is begun anew and tells something else of groups is another push") {
  TestShard job("bsp", {.optimizer = "sgd"}, TwoGroups());
  REQUIRE(job.Add(Telling(1, 0, {}), Ones()).ok());
  REQUIRE(job.Add(Telling(0, 0, {{}, {{"learning_rate", 0.5F}}}), {Ones()[0]}).ok());
  REQUIRE(job.Add(Telling(0, 0, {{}, {{"learning_rate", 0.25F}}}), Ones()).ok());
  CHECK(WeightOf(job, 1, 0) == 0.75F);
  CHECK(WeightOf(job, 1, 1) == 0);
}

TEST_CASE("What a push cannot tell of groups is refused by group and name") {
  const auto refusal = [](const GroupValues& groups) {
    TestShard job("bsp", {.optimizer = "sgd"}, TwoGroups());
    const absl::Status refused = job.Add(Telling(1, 0, groups), Ones());
    CHECK(absl::IsInvalidArgument(refused));
    return Message(refused);
  };
  CHECK(refusal({{}, {}, {{"learning_rate", -1}}}) ==
        "rank 1, step 0: groups: group 2: learning_rate=-1: expected 0 or more");
  CHECK(refusal({{{"learning_rate", 1}}}) ==
        "rank 1, step 0: groups: group 0: learning_rate=1: the learning rate of all is told by itself");
  CHECK(refusal({{}, {{"beta1", 0.5F}}}).find("rank 1, step 0: groups: group 1: beta1=0.5: not used by") == 0);
  CHECK(refusal(GroupValues(kMaxGroups + 2)) ==
        "rank 1, step 0: groups: there are 1025 groups; at most 1024 are supported");
}

TEST_CASE("What a shard saves of groups it goes on with") {
  SavedUpdates updates;
  updates.timeline.made_with = {.learning_rate = 1, .momentum = 0.5F};
  v1::SavedShard saved = SaveShard({}, updates, false);
  CHECK(saved.groups_size() == 0);
  CHECK(RestoreShard(saved, {})->updater.timeline.groups == nullptr);

  HyperparameterTimeline timeline(updates.timeline.made_with);
  timeline.Tell(1, Groups({{{"momentum", 0.25F}}, {}, {{"learning_rate", 0}}}));
  timeline.TakeMade(1);
  timeline.Tell(2, Groups({{}, {{"momentum", 0.75F}}}));  // It comes again.
  updates.timeline = timeline.Save();
  saved = SaveShard({}, updates, false);
  CHECK(saved.groups_size() == 3);
  CHECK(saved.groups(0).hyperparameters_size() == 0);
  v1::SavedShard read;
  REQUIRE(JsonToMessage(MessageToJson(saved), &read).ok());
  const auto restored = RestoreShard(read, {});
  REQUIRE(restored.ok());
  HyperparameterTimeline again({});
  again.Restore(restored->updater.timeline);
  CHECK(OfGroup(again.At(2), 1).momentum == 0.25F);
  CHECK(OfGroup(again.At(2), 2).learning_rate == 0);
  CHECK(OfGroup(again.At(2), 1).learning_rate == 1);

  // A flag that was changed wins, for all groups.
  HyperparameterTimeline::Saved changed = restored->updater.timeline;
  ApplyChangedFlags({{"learning_rate", "1"}}, {{"learning_rate", "3"}}, {.learning_rate = 3}, {}, changed);
  again.Restore(changed);
  CHECK(OfGroup(again.At(2), 2).learning_rate == 3);

  read.mutable_groups(2)->mutable_hyperparameters(0)->set_name("beta3");
  CHECK(Message(RestoreShard(read, {}).status()) == "groups: hyperparameters: beta3 is unknown");
}

// ---- Joins

v1::OptimizerSettings Settings(const GroupValues& groups, const std::string& optimizer = "adamw") {
  v1::OptimizerSettings settings;
  settings.set_optimizer(optimizer);
  ToProto(groups, settings.mutable_groups());
  return settings;
}

class GroupsJob : public TestJob {
 public:
  explicit GroupsJob(const std::string& optimizer) : TestJob(With(optimizer)) {}
  static ChiefOptions With(const std::string& optimizer) {
    ChiefOptions options = Options("bsp", 2, 1, /*hands_out_runs=*/false);
    options.optimizer = optimizer;
    return options;
  }
  absl::Status JoinWith(const std::string& name, const GroupValues& groups, uint32_t group = 0) {
    v1::JoinRequest request = Request(name);
    request.mutable_layout()->mutable_tensors(0)->set_group(group);
    *request.mutable_optimizer() = Settings(groups, optimizer);
    return Join(request).status();
  }

  std::string optimizer = "adamw";  // That workers bring.
};

TEST_CASE("The first join brings what groups have of their own, and a later one must agree, by group and name") {
  GroupsJob job(kFromWorker);
  REQUIRE(job.JoinWith("a", {{}, {{"beta1", 0.5F}, {"eps", 0.25F}}, {}}, 2).ok());
  REQUIRE(job.view.optimizer().groups_size() == 2);  // The last one differs in nothing.
  CHECK(job.view.optimizer().groups(1).hyperparameters(0).name() == "beta1");
  CHECK(job.view.layout().tensors(0).group() == 2);
  const absl::Status differs = job.JoinWith("b", {{{"eps", 0.5F}}, {{"beta1", 0.75F}, {"eps", 0.25F}}}, 2);
  CHECK(absl::IsFailedPrecondition(differs));
  CHECK(Message(differs) ==
        "the worker's optimizer differs from the job's: group 1: eps=0.5 (the job has none of its own), group 2: "
        "beta1=0.75 (the job has 0.5)");
  const absl::Status other_group = job.JoinWith("b", {{}, {{"beta1", 0.5F}, {"eps", 0.25F}}}, 1);
  CHECK(absl::IsFailedPrecondition(other_group));
  CHECK(Message(other_group).find("groups: the worker has tensor ") == 0);
  CHECK(Message(other_group).find(" in group 1, but the job's is in group 2") != std::string::npos);
  CHECK(job.JoinWith("b", {{}, {{"beta1", 0.5F}, {"eps", 0.25F}}}, 2).ok());
}

TEST_CASE("Servers whose flags say the optimizer refuse groups with hyperparameters of their own") {
  GroupsJob job("momentum");
  job.optimizer = "momentum";
  const absl::Status refused = job.JoinWith("a", {{{"momentum", 0.5F}}});
  CHECK(absl::IsFailedPrecondition(refused));
  CHECK(Message(refused).find("group 1: momentum=0.5 (the servers have none of its own); flags give no group") !=
        std::string::npos);
  CHECK(job.JoinWith("a", {{}, {}}, 2).ok());  // Factors of tensors, and pushes, may say all that there is.
}

TEST_CASE("Groups that cannot be are refused with all that is wrong") {
  GroupsJob job(kFromWorker);
  const absl::Status refused = job.JoinWith("a", {{{"beta1", 1}}, {{"momentum", 0.5F}, {"learning_rate", 0}}});
  CHECK(absl::IsInvalidArgument(refused));
  CHECK(Message(refused) ==
        "the worker's optimizer: group 1: beta1=1: expected 0 or more, below 1\n"
        "group 2: momentum=0.5: not used by --optimizer=adamw; expected one of learning_rate, weight_decay, beta1, "
        "beta2, "
        "eps");
  const GroupValues accumulator = {{{"initial_accumulator_value", 1}}};
  CHECK(Message(SetupOf(Settings(accumulator, "adagrad"), {}, 1).status()) ==
        "group 1: initial_accumulator_value=1: is the same in all groups: it is what the sum of squared gradients "
        "begins with");
  CHECK(Message(SetupOf(Settings(GroupValues(kMaxGroups + 1)), {}, 1).status()) ==
        "there are 1025 groups; at most 1024 are supported");
  CHECK(Message(job.JoinWith("a", {}, kMaxGroups + 1)).find(" is of group 1025; there are at most 1024") !=
        std::string::npos);
}

TEST_CASE("The hash of a layout says its groups, and is what it was without them") {
  Layout layout = {{"a", {2}}, {"b", {3, 2}}};
  const std::string without = LayoutHash(layout);
  CHECK(without == LayoutHash({{"a", {2}}, {"b", {3, 2}}}));
  layout[1].group = 1;
  const std::string with = LayoutHash(layout);
  CHECK(with != without);
  std::swap(layout[0].group, layout[1].group);
  CHECK(LayoutHash(layout) != with);
  CHECK(FromProto(ToProto(layout))[0].group == 1);
}

}  // namespace
}  // namespace ps
