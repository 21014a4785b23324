#include "server/shard/push_table.h"

#include <limits>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/engine/reduce.h"
#include "server/modes/each_push.h"
#include "tests/catch.h"

namespace ps {
namespace {

// A push table on a model of two slices, a and b, of 8 bytes each, that is told events in words and answers in words:
//
//   RANK:STEP SLICES [samples N] [version V] [edition E] [incarnation I] [session S] [carries 12]   some slices of a
//                                    push, which carries slices 1 to before 2 alone
//                                    ("-": none; "~a": a is absent; "!a": so it says, but has values; "?a": its values
//                                    are not finite)
//   end RANK:STEP session S          no more slices come
//   take STEP: RANKS                 these make a version;   record RANK / release: how that ended
//   refuse                           what has become stale is refused
//   owner RANK I                     the rank has a new owner;   newest V: the shard's version
class Scenario {
 public:
  explicit Scenario(const std::string& mode, uint64_t max_bytes = 64)
      : Scenario(MakeMode({.name = mode}, 2), max_bytes) {}
  explicit Scenario(std::unique_ptr<Mode> mode, uint64_t max_bytes = 64) : mode_(std::move(mode)) {
    table_.SetLayout(std::make_shared<ShardLayout>(Layout{{"a", {2}}, {"b", {2}}}, 0, 1), max_bytes);
    SetOwners();
  }

  std::string Tell(const std::string& event) {
    std::istringstream words(event);
    std::string first;
    words >> first;
    std::string said = first == "end"       ? End(words)
                       : first == "take"    ? Take(words)
                       : first == "record"  ? Record(words)
                       : first == "release" ? Release()
                       : first == "refuse"  ? Refuse()
                       : first == "owner"   ? NewOwner(words)
                       : first == "newest"  ? NewVersion(words)
                                            : Push(first, words);
    if (!table_.TakeDropped().empty()) said += ", dropped";
    return absl::StrCat(said, ", ", table_.inflight_bytes(), " B");
  }

  PushTable& table() { return table_; }

 private:
  static std::pair<uint32_t, uint64_t> Parse(const std::string& push) {
    const size_t colon = push.find(':');
    return {static_cast<uint32_t>(std::stoul(push)), std::stoul(push.substr(colon + 1))};
  }

  void SetOwners() {
    v1::View view;
    view.set_number(++view_);
    for (const auto& [rank, incarnation] : owners_) {
      v1::Member* member = view.add_members();
      member->set_rank(rank);
      member->set_incarnation(incarnation);
    }
    job_.Accept(view);
    table_.DropOrphans(job_, *mode_);
  }

  std::string Push(const std::string& push, std::istringstream& words) {
    v1::PushRequest header;
    header.mutable_id()->set_rank(Parse(push).first);
    header.mutable_id()->set_incarnation(owners_[Parse(push).first]);
    header.set_step(Parse(push).second);
    header.set_samples(1);
    std::string slices;
    std::string key;
    uint64_t session = 0;
    words >> slices;
    for (uint64_t value = 0; words >> key >> value;) {
      if (key == "samples") header.set_samples(static_cast<uint32_t>(value));
      if (key == "version") header.set_version(value);
      if (key == "edition") header.set_edition(value);
      if (key == "incarnation") header.mutable_id()->set_incarnation(value);
      if (key == "session") session = value;
      if (key == "carries") {
        v1::SliceRange* const range = header.add_carries();
        range->set_begin(static_cast<uint32_t>(value / 10));
        range->set_end(static_cast<uint32_t>(value % 10));
      }
      if (key == "contribution") header.set_contribution(static_cast<v1::Contribution>(value));
    }
    std::vector<ReceivedSlice> received;
    char mark = 0;
    for (const char slice : slices) {
      if (slice == '-') continue;
      if (slice == '~' || slice == '!' || slice == '?') {
        mark = slice;
        continue;
      }
      const float value = mark == '?' ? std::numeric_limits<float>::infinity() : 1;
      auto values = std::make_shared<std::vector<float>>(slice == 'B' ? 3 : 2, value);  // B is b, but too long.
      const Piece piece(reinterpret_cast<const uint8_t*>(values->data()), values->size() * sizeof(float));
      received.push_back({.index = slice == 'a' ? 0U : slice == 'z' ? 9U : 1U, .payload = Payload({piece}, values)});
      if (mark == '~') received.back().payload = {};
      if (mark == '~' || mark == '!') received.back().payload.set_absent();
      mark = 0;
    }
    const std::optional<size_t> not_finite = FindNotFinite(received, BestIsa());
    const auto arrival = table_.Add(&sessions_[session], header, std::move(received), not_finite, *mode_, newest_);
    if (!arrival.ok()) return Message(arrival.status());
    if (arrival->push == nullptr) return "not needed";
    std::string said = "new:";
    for (const size_t local : arrival->slices) said += local == 0 ? " a" : " b";
    if (!arrival->push->has_all()) return said;
    table_.Complete(header.id().rank());
    return said + ", complete";
  }

  std::string End(std::istringstream& words) {
    std::string push;
    std::string key;
    uint64_t session = 0;
    words >> push >> key >> session;
    v1::Identity id;
    id.set_rank(Parse(push).first);
    const absl::Status ended = table_.End(&sessions_[session], id, Parse(push).second);
    return ended.ok() ? "ended" : Message(ended);
  }

  std::string Take(std::istringstream& words) {
    StepSet set;
    char colon = 0;
    words >> set.step >> colon;
    for (uint32_t rank = 0; words >> rank;) set.ranks.push_back(rank);
    absl::StatusOr<Pushes> taken = table_.Take(set);
    if (!taken.ok()) return Message(taken.status());
    mode_->Decided(set);
    taken_.insert(taken_.end(), taken->begin(), taken->end());
    return "taken";
  }

  std::string Record(std::istringstream& words) {
    uint32_t rank = 0;
    words >> rank;
    for (auto push = taken_.begin(); push != taken_.end(); ++push) {
      if ((*push)->rank != rank) continue;
      table_.Record(**push, v1::ANSWER_APPLIED);
      taken_.erase(push);
      ++newest_;
      return "recorded";
    }
    return "nothing taken";
  }

  std::string Release() {
    for (const auto& push : taken_) table_.Release(*push);
    taken_.clear();
    return "released";
  }

  std::string Refuse() { return table_.RefuseStale(*mode_) ? "refused" : "none is stale"; }

  std::string NewOwner(std::istringstream& words) {
    uint32_t rank = 0;
    words >> rank >> owners_[rank];
    SetOwners();
    return "owned";
  }

  std::string NewVersion(std::istringstream& words) {
    words >> newest_;
    return "newest";
  }

  const std::unique_ptr<Mode> mode_;
  PushTable table_;
  JobView job_ = JobView("default", 0);
  std::map<uint32_t, uint64_t> owners_ = {{0, 1}, {1, 1}};
  uint64_t view_ = 0;
  uint64_t newest_ = 0;
  Pushes taken_;
  char sessions_[4] = {};
};

// The mode asp, but a push that was computed on version 0 is stale.
class NewVersionsOnly final : public EachPush {
 public:
  NewVersionsOnly() : EachPush({.name = "new_versions_only"}, 2) {}
  Admission Admit(const PushHeader& push, uint64_t expected) const override {
    Admission admission = EachPush::Admit(push, expected);
    if (admission.kind == Admission::Kind::kAccept && push.version == 0) admission.kind = Admission::Kind::kStale;
    return admission;
  }
  Oldest oldest() const override { return {.version = 1}; }
};

struct Line {
  const char* event;
  const char* said;
};

void Follow(Scenario& scenario, std::initializer_list<Line> lines) {
  for (const Line& line : lines) {
    CAPTURE(line.event);
    CHECK(scenario.Tell(line.event) == line.said);
  }
}

TEST_CASE(
    "A push is assembled from its slices, a repeated one counts once, and its bytes are held until it is recorded") {
  Scenario asp("asp");
  Follow(asp, {{"0:0 a", "new: a, 16 B"},
               {"0:0 a", "new:, 16 B"},
               {"0:0 ab", "new: b, complete, 16 B"},
               {"0:0 ab", "not needed, 16 B"},
               {"take 0: 0", "taken, 16 B"},
               {"0:0 ab", "not needed, 16 B"},
               {"record 0", "recorded, 0 B"},
               {"0:0 ab", "not needed, 0 B"},
               {"0:1 ab", "new: a b, complete, 16 B"}});
  CHECK(asp.table().HighestStep() == 2);
  CHECK(asp.table().Tell(0, 0) == v1::ANSWER_APPLIED);
  CHECK(asp.table().Tell(0, 0) == v1::ANSWER_DUPLICATE);
  CHECK(asp.table().told(v1::ANSWER_DUPLICATE) == 1);
}

TEST_CASE("A slice that is absent is here without values, and completes its push") {
  Scenario asp("asp");
  Follow(asp, {{"0:0 ~a", "new: a, 16 B"},
               {"0:0 a", "new:, 16 B"},
               {"0:0 ~a~b", "new: b, complete, 16 B"},
               {"1:0 a edition 2", "new: a, 32 B"},
               {"1:0 ~ab edition 4", "new: a b, complete, dropped, 32 B"}});
  CHECK(asp.table().Find(0)->absent == 2);
  CHECK(asp.table().Find(1)->absent == 1);
}

TEST_CASE("A partial push is complete with the slices that it carries, and holds their bytes alone") {
  Scenario asp("asp");
  Follow(asp, {{"0:0 a carries 1", "new: a, complete, 8 B"},
               {"1:0 - carries 12", "new:, 16 B"},
               {"1:0 b carries 12", "new: b, complete, 16 B"}});
  CHECK(asp.table().Find(0)->leaves_out(1));
  CHECK_FALSE(asp.table().Find(0)->leaves_out(0));
  CHECK(asp.table().Find(0)->absent == 1);
  Follow(asp, {{"take 0: 0", "taken, 16 B"},
               {"record 0", "recorded, 8 B"},
               {"0:1 ~a carries 1", "new: a, complete, 16 B"},  // Carried, but without a gradient.
               {"end 1:0 session 0", "ended, 16 B"}});
  Scenario half("asp");
  Follow(half, {{"0:0 - carries 2 session 1", "new:, 16 B"},
                {"0:0 a carries 2 session 1", "new: a, 16 B"},
                {"end 0:0 session 1", "rank 0, step 0: only 1 of the 2 slices of shard 0 arrived, dropped, 0 B"},
                {"0:0 a carries 2 samples 0", "rank 0, step 0: there are slices, but samples is 0, dropped, 0 B"},
                {"0:0 - carries 1 samples 0", "new:, complete, 0 B"}});
}

TEST_CASE("A partial push that brings what it does not carry, or carries what there is not, is refused in one line") {
  Scenario asp("asp");
  Follow(asp, {{"0:0 b carries 1",
                "rank 0, step 0: slice 1 of tensor b came, but the push says that it does not carry it, dropped, 0 B"},
               {"0:0 a carries 13",
                "rank 0, step 0: it carries slices 1 to before 3, which do not follow those before, or are none of the "
                "model's 2, 0 B"},
               {"0:0 a carries 11",
                "rank 0, step 0: it carries slices 1 to before 1, which do not follow those before, or are none of the "
                "model's 2, 0 B"},
               {"0:0 a carries 12 carries 1",
                "rank 0, step 0: it carries slices 0 to before 1, which do not follow those before, or are none of the "
                "model's 2, 0 B"},
               {"0:0 - carries 1 edition 2", "new:, 8 B"},
               {"0:0 b carries 12 edition 2",
                "rank 0, step 0: a call carries other slices than another call of the same push, 8 B"},
               // A rank that begins its push anew may carry something else.
               {"0:0 - carries 12 edition 4", "new:, dropped, 8 B"},
               {"0:0 - carries 1 edition 6", "new:, dropped, 8 B"},
               {"0:0 a edition 8", "new: a, dropped, 16 B"}});
}

TEST_CASE("Where a step is made of all workers' pushes they carry the same, and empty ones nothing") {
  Scenario bsp("bsp");
  Follow(bsp, {{"0:0 a carries 1", "new: a, complete, 8 B"},
               {"1:0 b carries 12", "rank 1, step 0: carries other slices of the model than the push of rank 0, 8 B"},
               {"1:0 a", "rank 1, step 0: carries other slices of the model than the push of rank 0, 8 B"},
               {"1:0 - samples 0", "new:, complete, 8 B"},
               {"take 0: 0 1", "taken, 8 B"}});
}

TEST_CASE("An absent slice that makes no sense is refused in one line, and drops its push") {
  Scenario asp("asp");
  Follow(asp, {{"0:0 b", "new: b, 16 B"},
               {"0:0 !a", "rank 0, step 0: slice 0 of tensor a: 8 bytes, expected 0, as it is absent, dropped, 0 B"},
               {"0:0 ~z", "rank 0, step 0: slice 9: the model's slices are 0 to 1, dropped, 0 B"},
               {"0:0 ~a samples 0", "rank 0, step 0: there are slices, but samples is 0, dropped, 0 B"}});
  Scenario easgd("easgd");
  Follow(easgd,
         {{"0:0 ~a contribution 1",
           "rank 0, step 0: slice 0 of tensor a is absent, which only the gradient of a weight can be, dropped, 0 B"}});
}

TEST_CASE("A slice that is not finite is refused by the name of its tensor, wherever it is among those that come") {
  Scenario asp("asp");
  Follow(asp, {{"0:0 ?ab", "rank 0, step 0: the gradient of tensor a is not finite, dropped, 0 B"},
               {"0:0 a?b", "rank 0, step 0: the gradient of tensor b is not finite, dropped, 0 B"},
               {"0:0 b?a", "rank 0, step 0: the gradient of tensor a is not finite, dropped, 0 B"},
               {"0:0 ab", "new: a b, complete, 16 B"},
               {"0:0 ?ab", "not needed, 16 B"}});  // It counts already.
}

TEST_CASE("A push that is begun anew, or differs, drops what was here of the rank's push") {
  Scenario asp("asp");
  Follow(asp, {{"0:0 a samples 2", "new: a, 16 B"},
               {"0:0 b samples 3", "new: b, dropped, 16 B"},
               {"0:0 a samples 3", "new: a, complete, 16 B"},
               {"1:0 a", "new: a, 32 B"},
               {"1:0 B", "rank 1, step 0: slice 1 of tensor b: 12 bytes, expected 8, dropped, 16 B"},
               {"1:0 - samples 0", "new:, complete, 16 B"}});
}

TEST_CASE("A push is made of slices of one edition, the newest, and what is late of an earlier one does no harm") {
  Scenario given_up("asp");
  Follow(given_up, {{"0:0 a edition 2 session 1", "new: a, 16 B"},
                    {"0:0 b edition 4 session 2", "new: b, dropped, 16 B"},  // In the rest it is as equal as it may be.
                    {"0:0 a edition 2 session 1", "not needed, 16 B"},
                    {"end 0:0 session 1", "ended, 16 B"},
                    {"0:0 ab edition 3 session 1", "not needed, 16 B"},
                    {"0:0 a edition 4 session 2", "new: a, complete, 16 B"},
                    {"0:0 ab edition 6 session 3", "not needed, 16 B"}});  // It counts already.
  // The next owner of the rank begins to count anew.
  Follow(given_up, {{"1:0 a edition 8", "new: a, 32 B"},
                    {"owner 1 2", "owned, dropped, 16 B"},
                    {"1:0 a edition 2", "new: a, 32 B"}});
}

TEST_CASE("What is late of an earlier edition is not refused as stale in the place of the later one") {
  Scenario mode(std::make_unique<NewVersionsOnly>());
  Follow(mode, {{"newest 1", "newest, 0 B"},
                {"0:0 a version 1 edition 4", "new: a, 16 B"},
                {"0:0 b version 0 edition 2", "not needed, 16 B"},
                {"0:0 b version 1 edition 4", "new: b, complete, 16 B"}});
}

TEST_CASE("The end of a session drops its push if slices are missing, unless another session has taken it over") {
  Scenario asp("asp");
  Follow(asp, {{"0:0 a session 1", "new: a, 16 B"},
               {"0:0 - session 2", "new:, 16 B"},
               {"end 0:0 session 1", "ended, 16 B"},
               {"end 0:0 session 2", "rank 0, step 0: only 1 of the 2 slices of shard 0 arrived, dropped, 0 B"},
               {"end 0:0 session 2", "ended, 0 B"}});
}

TEST_CASE("A rank's new owner drops the half push of the old one, and may go on further ahead") {
  Scenario asp("asp");
  Follow(asp, {{"1:0 a", "new: a, 16 B"},
               {"owner 1 2", "owned, dropped, 0 B"},
               {"1:5 ab", "new: a b, complete, 16 B"},
               {"1:6 ab", "rank 1, step 6: step 5 of this rank is still in progress, 16 B"},
               {"take 5: 1", "taken, 16 B"},
               {"record 1", "recorded, 0 B"},
               {"1:7 ab", "rank 1, step 7: the next step of this rank is 6, 0 B"}});
}

TEST_CASE("Half pushes reserve all of their bytes, and past the limit a push is refused") {
  Scenario asp("asp", 31);
  Follow(asp, {{"0:0 a", "new: a, 16 B"},
               {"1:0 a",
                "rank 1, step 0: shard 0 holds 16 bytes of gradients; with 16 more it would exceed "
                "--max_inflight_bytes=31, 16 B"},
               {"0:0 b", "new: b, complete, 16 B"},
               {"1:0 - samples 0", "new:, complete, 16 B"}});
}

TEST_CASE("A set is taken whole or not at all, and what is released has no answer") {
  Scenario bsp("bsp");
  Follow(bsp, {{"1:0 ab", "new: a b, complete, 16 B"},
               {"take 0: 0 1", "step 0: the push of rank 0 belongs to it but is missing on shard 0, 16 B"},
               {"0:0 ab", "new: a b, complete, 32 B"},
               {"0:1 ab", "rank 0, step 1: the job's current step is 0, 32 B"},
               {"0:0 ab version 1", "not needed, 32 B"},
               {"take 0: 0 1", "taken, 32 B"},
               {"0:1 a version 1", "rank 0, step 1: computed on version 1, but shard 0 is at version 0, 32 B"},
               {"release", "released, 0 B"}});
  CHECK_FALSE(bsp.table().ledger().Seen(0, 0));
}

TEST_CASE("A push that the mode calls stale is answered STALE, holds nothing and is not applied") {
  Scenario mode(std::make_unique<NewVersionsOnly>());
  Follow(mode, {{"0:0 a", "not needed, 0 B"}, {"0:0 b", "not needed, 0 B"}});
  CHECK(mode.table().Tell(0, 0) == v1::ANSWER_STALE);
  CHECK(mode.table().Tell(0, 0) == v1::ANSWER_STALE);
  CHECK(mode.table().told(v1::ANSWER_STALE) == 2);
  Follow(mode, {{"1:0 - samples 0", "not needed, 0 B"},
                {"0:1 a version 1", "rank 0, step 1: computed on version 1, but shard 0 is at version 0, 0 B"}});
}

TEST_CASE("Those who have begun a step are known, and all of them together once everybody has") {
  Scenario bsp("bsp");
  PushTable& table = bsp.table();
  Follow(bsp, {{"0:0 a", "new: a, 16 B"}});
  CHECK(table.Begun(0) == std::set<uint32_t>{0});
  CHECK(table.FindAll({0, 1}, 0).empty());
  Follow(bsp, {{"1:0 ab", "new: a b, complete, 32 B"}});
  CHECK(table.Begun(0) == std::set<uint32_t>{0, 1});
  CHECK(table.FindAll({0, 1}, 0).size() == 2);
  CHECK(table.FindAll({0, 1}, 1).empty());
}

TEST_CASE("What is known of a step follows the pushes that begin, are complete, and are dropped or taken") {
  Scenario bsp("bsp");
  PushTable& table = bsp.table();
  Follow(bsp, {{"0:0 a", "new: a, 16 B"}, {"1:0 ab", "new: a b, complete, 32 B"}});
  CHECK(table.complete(0) == 1);
  CHECK(table.HighestStep() == 1);
  // In bsp a push that is complete counts for whoever owns the rank.
  Follow(bsp, {{"owner 1 2", "owned, 32 B"}, {"1:0 ab", "not needed, 32 B"}, {"owner 0 2", "owned, dropped, 16 B"}});
  CHECK(table.Begun(0) == std::set<uint32_t>{1});
  CHECK(table.FindComplete(1, 1, 0) != nullptr);
  Follow(bsp, {{"0:0 ab", "new: a b, complete, 32 B"}});
  CHECK(table.complete(0) == 2);
  Follow(bsp, {{"take 0: 0 1", "taken, 32 B"}});
  CHECK(table.complete(0) == 0);
  CHECK(table.Begun(0).empty());
  CHECK(table.IsComplete(1, 0));
  CHECK(table.HighestStep() == 1);
  CHECK(table.TakeAnswered().empty());
  Follow(bsp, {{"record 1", "recorded, 16 B"}, {"record 0", "recorded, 0 B"}});
  CHECK(table.TakeAnswered() == std::vector<uint32_t>{1, 0});

  Scenario asp("asp");
  Follow(asp, {{"1:3 ab", "new: a b, complete, 16 B"}});
  CHECK(asp.table().HighestStep() == 4);
  Follow(asp, {{"owner 1 2", "owned, dropped, 0 B"}});
  CHECK(asp.table().complete(3) == 0);
  CHECK(asp.table().HighestStep() == 0);
  CHECK_FALSE(asp.table().Last(1).has_value());
  Follow(asp, {{"1:3 ab", "new: a b, complete, 16 B"}});
  CHECK(asp.table().FindComplete(1, 1, 3) == nullptr);
  CHECK(asp.table().FindComplete(1, 2, 3) != nullptr);
}

TEST_CASE("A rank whose last push is an earlier owner's was left, until its present owner's first push is complete") {
  Scenario asp("asp");
  const PushTable& table = asp.table();
  Follow(asp, {{"0:0 ab", "new: a b, complete, 16 B"}, {"take 0: 0", "taken, 16 B"}, {"owner 0 2", "owned, 16 B"}});
  CHECK(table.left() == std::set<uint32_t>{0});
  Follow(asp, {{"record 0", "recorded, 0 B"}, {"0:1 a", "new: a, 16 B"}});
  CHECK(table.left() == std::set<uint32_t>{0});
  CHECK(table.Last(0)->incarnation == 1);
  Follow(asp, {{"0:1 b", "new: b, complete, 16 B"}});
  CHECK(table.left().empty());
  CHECK(table.Last(0)->incarnation == 2);
  CHECK(table.Last(0)->step == 1);
  Follow(asp, {{"owner 0 3", "owned, dropped, 0 B"}});
  CHECK(table.left() == std::set<uint32_t>{0});
  CHECK(table.Last(0)->incarnation == 1);
  CHECK(table.Last(0)->step == 0);
  // A push that was given up as it was applied does not count.
  Follow(asp, {{"0:1 ab", "new: a b, complete, 16 B"}, {"take 1: 0", "taken, 16 B"}});
  CHECK(table.left().empty());
  CHECK(table.HighestStep() == 2);
  Follow(asp, {{"release", "released, 0 B"}});
  CHECK(table.left() == std::set<uint32_t>{0});
  CHECK(table.HighestStep() == 1);
  CHECK(asp.table().TakeAnswered() == std::vector<uint32_t>{0, 0});
}

TEST_CASE("Of what is here that is refused which was computed on too old a version, or is of an earlier step") {
  Scenario asp(MakeMode({.name = "asp", .max_staleness = 0}, 2));
  Follow(asp, {{"0:0 a", "new: a, 16 B"},
               {"1:0 ab", "new: a b, complete, 32 B"},
               {"refuse", "none is stale, 32 B"},
               {"take 0: 1", "taken, 32 B"},
               {"refuse", "refused, dropped, 16 B"},
               {"0:0 b", "not needed, 16 B"}});
  CHECK(asp.table().TakeAnswered() == std::vector<uint32_t>{0});
  Follow(asp, {{"record 1", "recorded, 0 B"}, {"0:1 a version 1", "new: a, 16 B"}, {"refuse", "none is stale, 16 B"}});

  Scenario backup("backup");
  Follow(backup, {{"0:0 ab", "new: a b, complete, 16 B"},
                  {"1:0 a", "new: a, 32 B"},
                  {"refuse", "none is stale, 32 B"},
                  {"take 0: 0", "taken, 32 B"},
                  {"refuse", "refused, dropped, 16 B"},
                  {"refuse", "none is stale, 16 B"},
                  {"1:0 b", "not needed, 16 B"}});
}

TEST_CASE("All pushes of a step carry the same, but for empty ones, and a rank may push another in its own place") {
  Scenario mode(MakeMode({.name = "local_sgd", .local_sync = "gradients", .average_every = "2"}, 2));
  Follow(mode, {{"0:0 a", "new: a, 16 B"},
                {"1:0 a contribution 1", "rank 1, step 0: pushes a difference of weights, but rank 0 a gradient, 16 B"},
                {"0:0 a contribution 1", "new: a, dropped, 16 B"},
                {"1:0 a", "rank 1, step 0: pushes a gradient, but rank 0 a difference of weights, 16 B"},
                {"1:0 - samples 0", "new:, complete, 16 B"},
                {"owner 0 2", "owned, dropped, 0 B"},
                {"0:0 a", "new: a, 16 B"},
                {"owner 0 3", "owned, dropped, 0 B"},
                {"0:0 a contribution 1", "new: a, 16 B"}});
}

}  // namespace
}  // namespace ps
