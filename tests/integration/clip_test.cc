// Clipping with real programs: one server and three.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/clipping.h"
#include "tests/integration/cluster.h"
#include "tests/integration/process.h"

namespace ps::clip_test {
namespace {

// The weights' hash that the lead prints at the end of a job of two workers.
std::string HashOf(std::vector<std::string> flags, uint32_t shards) {
  const TempFolder folder;
  flags.push_back("--num_workers=2");
  const ServerProcesses servers(folder, shards, flags);
  std::vector<std::unique_ptr<Process>> workers;
  for (const std::string rank : {"0", "1"}) {
    workers.push_back(std::make_unique<Process>("ps_worker", Worker(servers.chief(), {"--rank=" + rank, "--epochs=3"}),
                                                folder.File("worker-" + rank)));
  }
  for (const auto& worker : workers) CHECK(worker->Wait() == 0);
  servers.ExpectEnd();
  const std::string output = workers[0]->Output();
  const size_t hash = output.find("weights hash: ");
  REQUIRE(hash != std::string::npos);
  return output.substr(hash);
}

TEST_CASE("bsp that clips ends with the same weights on one server and on three", "[unsanitized]") {
  const std::vector<std::vector<std::string>> clips = {
      {"--clip_norm=0.5"},
      {"--clip_tensor_norm=0.3"},
      {"--clip_value=0.01", "--clip_tensor_norm=0.3", "--clip_norm=0.4"}};
  const std::string plain = HashOf({"--optimizer=momentum"}, 1);
  for (std::vector<std::string> flags : clips) {
    CAPTURE(flags);
    flags.insert(flags.end(), {"--optimizer=momentum", "--weight_decay=0.01"});
    const std::string one = HashOf(flags, 1);
    CHECK(HashOf(flags, 3) == one);
    CHECK(one != plain);
  }
}

TEST_CASE("lamb ends with the same weights on one server and on three, with clipping and without", "[unsanitized]") {
  const std::vector<std::string> plain = {"--optimizer=lamb", "--learning_rate=0.01", "--weight_decay=0.01"};
  std::vector<std::string> clipped = plain;
  clipped.push_back("--clip_norm=0.5");
  const std::string one = HashOf(plain, 1);
  CHECK(HashOf(plain, 3) == one);
  const std::string clipped_one = HashOf(clipped, 1);
  CHECK(HashOf(clipped, 3) == clipped_one);
  CHECK(clipped_one != one);
}

// A worker that takes part is killed in the midst of it, another takes its rank, and is killed as well. The other
// workers are held meanwhile, so that they do not end before. What becomes of a norm that is open is in
// norm_loss_test.cc.
TEST_CASE("asp and ssp that clip over three servers go on when a worker is killed, and when it is replaced") {
  for (const std::vector<std::string>& mode :
       std::vector<std::vector<std::string>>{{"--mode=asp"}, {"--mode=ssp", "--staleness=1000"}}) {
    CAPTURE(mode);
    const TempFolder folder;
    std::vector<std::string> flags = {"--num_workers=3", "--clip_norm=0.5", "--lease=60s", "--reconnect_grace=100ms"};
    flags.insert(flags.end(), mode.begin(), mode.end());
    const ServerProcesses servers(folder, 3, flags);
    const auto work = [&](const std::string& rank, const std::string& name) {
      return std::make_unique<Process>(
          "ps_worker",
          Worker(servers.chief(), {"--rank=" + rank, "--epochs=60", "--experiment_step_time=5ms",
                                   "--metrics_file=" + folder.File(name + ".jsonl")}),
          folder.File(name));
    };
    // Once all servers have applied a push of its.
    const auto await_step = [](const Process& worker) { REQUIRE(worker.WaitFor(".jsonl", "\"event\":\"step\"")); };
    const auto kill_worker = [](Process& worker) {
      worker.Signal(SIGKILL);
      CHECK(worker.Wait() == 128 + SIGKILL);
    };
    const auto first = work("0", "worker-0");
    const auto third = work("2", "worker-2");
    const auto signal_others = [&](int signal) {
      for (Process* other : {first.get(), third.get()}) other->Signal(signal);
    };
    {
      const auto second = work("1", "worker-1");
      for (const Process* worker : {first.get(), second.get(), third.get()}) await_step(*worker);
      signal_others(SIGSTOP);
      kill_worker(*second);
    }
    REQUIRE(servers[0].WaitFor(".err", "was lost"));
    const auto again = work("1", "worker-1-again");
    await_step(*again);
    signal_others(SIGCONT);
    kill_worker(*again);
    for (Process* worker : {first.get(), third.get()}) CHECK(worker->Wait() == 0);
    servers.ExpectEnd();
  }
}

TEST_CASE("ps_ctl set takes effect at one version while three servers clip in asp") {
  const TempFolder folder;
  const ServerProcesses servers(folder, 3, {"--num_workers=2", "--mode=asp", "--clip_norm=0.5"});
  std::vector<std::unique_ptr<Process>> workers;
  for (const std::string rank : {"0", "1"}) {
    workers.push_back(std::make_unique<Process>(
        "ps_worker", Worker(servers.chief(), {"--rank=" + rank, "--steps=100000000"}), folder.File("worker-" + rank)));
  }
  REQUIRE(workers[1]->WaitFor(".err", "step "));
  for (const std::string rate : {"0.05", "0.02"}) {
    Process ctl("ps_ctl", {"--server=" + servers.chief(), "set", "learning_rate=" + rate}, folder.File("ctl"));
    CHECK(ctl.Wait() == 0);
    // One version of all shards: in one order they have applied the same pushes.
    CHECK(ctl.Output().find("learning_rate=" + rate + " from version ") == 0);
    CHECK(ctl.Output().find("shard") == std::string::npos);
  }
}

TEST_CASE("Limits of clipping that cannot be, or that servers do not share, are refused by name") {
  std::string errors;
  CHECK(RunOnce("ps_server", {"--clip_norm=0", "--clip_value=-1", "--clip_tensor_norm=nan"}, &errors) == 2);
  CHECK(errors.find("--clip_norm=0: expected a number above 0") != std::string::npos);
  CHECK(errors.find("--clip_value=-1: expected a number above 0") != std::string::npos);
  CHECK(errors.find("--clip_tensor_norm=nan: expected a number above 0") != std::string::npos);
  CHECK(RunOnce("ps_server", {"--mode=asp", "--delay_compensation=0.1", "--clip_norm=1", "--num_shards=2"}, &errors) ==
        2);
  CHECK(errors.find("--delay_compensation=0.1: with --clip_norm or --clip_tensor_norm it needs --num_shards=1") !=
        std::string::npos);
  for (const std::string mode : {"asp", "ssp"}) {
    CHECK(RunOnce("ps_server", {"--mode=" + mode, "--optimizer=lamb", "--num_shards=2"}, &errors) == 2);
    CHECK(errors.find("--optimizer=lamb: in --mode=" + mode + " it needs --num_shards=1") != std::string::npos);
  }
  const TempFolder folder;
  Process chief("ps_server", {"--clip_norm=1", "--num_shards=2"}, folder.File("chief"));
  CheckRefused("ps_server", {"--num_shards=2", "--shard=1", "--chief=" + chief.Address()},
               "--clip_norm=none (the chief has 1)");
}

}  // namespace
}  // namespace ps::clip_test
