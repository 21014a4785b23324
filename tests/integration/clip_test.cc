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

// The weights' hash that the lead prints at the end of a job of two workers, and its servers' exit.
std::string HashOf(const std::vector<std::string>& flags, uint32_t shards) {
  const TempFolder folder;
  std::vector<std::unique_ptr<Process>> servers;
  std::string chief;
  for (uint32_t shard = 0; shard < shards; ++shard) {
    std::vector<std::string> arguments = {"--num_workers=2", "--num_shards=" + std::to_string(shards)};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    if (shard > 0) arguments.insert(arguments.end(), {"--shard=" + std::to_string(shard), "--chief=" + chief});
    servers.push_back(
        std::make_unique<Process>("ps_server", arguments, folder.File("server-" + std::to_string(shard))));
    if (shard == 0) chief = servers[0]->Address();
  }
  std::vector<std::unique_ptr<Process>> workers;
  for (const std::string rank : {"0", "1"}) {
    workers.push_back(std::make_unique<Process>("ps_worker", Worker(chief, {"--rank=" + rank, "--epochs=3"}),
                                                folder.File("worker-" + rank)));
  }
  for (const auto& worker : workers) CHECK(worker->Wait() == 0);
  for (const auto& server : servers) CHECK(server->Wait() == 0);
  const std::string output = workers[0]->Output();
  const size_t hash = output.find("weights hash: ");
  REQUIRE(hash != std::string::npos);
  return output.substr(hash);
}

TEST_CASE("bsp that clips ends with the same weights on one server and on three") {
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

TEST_CASE("lamb ends with the same weights on one server and on three, with clipping and without") {
  const std::vector<std::string> plain = {"--optimizer=lamb", "--learning_rate=0.01", "--weight_decay=0.01"};
  std::vector<std::string> clipped = plain;
  clipped.push_back("--clip_norm=0.5");
  const std::string one = HashOf(plain, 1);
  CHECK(HashOf(plain, 3) == one);
  const std::string clipped_one = HashOf(clipped, 1);
  CHECK(HashOf(clipped, 3) == clipped_one);
  CHECK(clipped_one != one);
}

// One is killed in the midst of it, another takes its rank, and is killed as well. The other workers are held until the
// rank is taken, so that they do not end before.
TEST_CASE("asp and ssp that clip over three servers go on when a worker is killed, and when it is replaced") {
  for (const std::string mode : {"asp", "ssp"}) {
    CAPTURE(mode);
    const TempFolder folder;
    std::vector<std::unique_ptr<Process>> servers;
    std::string chief;
    for (uint32_t shard = 0; shard < 3; ++shard) {
      const std::string number = std::to_string(shard);
      std::vector<std::string> arguments = {"--num_workers=3", "--num_shards=3", "--mode=" + mode,
                                            "--clip_norm=0.5", "--lease=60s",    "--reconnect_grace=100ms"};
      if (shard > 0) arguments.insert(arguments.end(), {"--shard=" + number, "--chief=" + chief});
      servers.push_back(std::make_unique<Process>("ps_server", arguments, folder.File("server-" + number)));
      if (shard == 0) chief = servers[0]->Address();
    }
    const auto work = [&](const std::string& rank, const std::string& name) {
      return std::make_unique<Process>("ps_worker", Worker(chief, {"--rank=" + rank, "--epochs=60"}),
                                       folder.File(name));
    };
    const auto first = work("0", "worker-0");
    const auto third = work("2", "worker-2");
    const auto signal_others = [&](int signal) {
      for (Process* other : {first.get(), third.get()}) other->Signal(signal);
    };
    const auto kill_worker = [](Process& worker) {
      worker.Signal(SIGKILL);
      CHECK(worker.Wait() == 128 + SIGKILL);
    };
    {
      const auto second = work("1", "worker-1");
      REQUIRE(servers[0]->WaitFor(".err", "the job is running"));
      signal_others(SIGSTOP);
      kill_worker(*second);
    }
    REQUIRE(servers[0]->WaitFor(".err", "was lost"));
    const auto again = work("1", "worker-1-again");
    CHECK(servers[0]->WaitFor(".err", "incarnation 2"));
    signal_others(SIGCONT);
    kill_worker(*again);
    for (Process* worker : {first.get(), third.get()}) CHECK(worker->Wait() == 0);
    for (const auto& server : servers) CHECK(server->Wait() == 0);
  }
}

TEST_CASE("ps_ctl set takes effect at one version while three servers clip in asp") {
  const TempFolder folder;
  std::vector<std::unique_ptr<Process>> servers;
  std::string chief;
  for (uint32_t shard = 0; shard < 3; ++shard) {
    const std::string number = std::to_string(shard);
    std::vector<std::string> arguments = {"--num_workers=2", "--num_shards=3", "--mode=asp", "--clip_norm=0.5"};
    if (shard > 0) arguments.insert(arguments.end(), {"--shard=" + number, "--chief=" + chief});
    servers.push_back(std::make_unique<Process>("ps_server", arguments, folder.File("server-" + number)));
    if (shard == 0) chief = servers[0]->Address();
  }
  std::vector<std::unique_ptr<Process>> workers;
  for (const std::string rank : {"0", "1"}) {
    workers.push_back(std::make_unique<Process>("ps_worker", Worker(chief, {"--rank=" + rank, "--steps=100000000"}),
                                                folder.File("worker-" + rank)));
  }
  REQUIRE(workers[1]->WaitFor(".err", "step "));
  for (const std::string rate : {"0.05", "0.02"}) {
    Process ctl("ps_ctl", {"--server=" + chief, "set", "learning_rate=" + rate}, folder.File("ctl"));
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
