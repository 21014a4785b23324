// The real programs: what they print, and how they end.
#include "tests/integration/process.h"

#include <grpcpp/version_info.h>

namespace ps {
namespace {

TEST_CASE("Server and workers end by themselves with status 0, and rank 0 prints the result") {
  const TempFolder folder;
  for (const char* mode : {"bsp", "asp"}) {
    Process server("ps_server", {"--num_workers=2", std::string("--mode=") + mode}, folder.File("server"));
    const std::string address = server.Address();
    Process first("ps_worker", Worker(address, {"--rank=0", "--epochs=2"}), folder.File("first"));
    Process second("ps_worker", Worker(address, {"--rank=1", "--epochs=2"}), folder.File("second"));
    CHECK(first.Wait() == 0);
    CHECK(second.Wait() == 0);
    CHECK(server.Wait() == 0);
    CHECK(first.Output().find("weights hash: ") != std::string::npos);
    CHECK(second.Output().empty());
  }
}

TEST_CASE("Two workers learn a regression from a table, and rank 0 prints its loss but no accuracy") {
  const TempFolder folder;
  const std::string table = folder.File("plane.csv");
  std::ofstream out(table);
  for (double a = -1; a < 1; a += 0.25) {
    for (double b = -1; b < 1; b += 0.25) out << a << "," << b << "," << 2 * a - 3 * b + 0.5 << "\n";
  }
  out.close();
  Process server("ps_server", {"--num_workers=2", "--learning_rate=0.5"}, folder.File("server"));
  const std::string address = server.Address();
  const std::vector<std::string> flags = {"--server=" + address,    "--model=mlp:2,1",   "--loss=mse",
                                          "--dataset=csv:" + table, "--batch_size=full", "--steps=200"};
  Process first("ps_worker", flags, folder.File("first"));
  Process second("ps_worker", flags, folder.File("second"));
  CHECK(first.Wait() == 0);
  CHECK(second.Wait() == 0);
  CHECK(server.Wait() == 0);
  const std::string printed = first.Output() + second.Output();
  REQUIRE(printed.find("test loss: ") == 0);
  CHECK(std::stod(printed.substr(11)) < 1e-6);
  CHECK(printed.find("accuracy") == std::string::npos);
}

TEST_CASE("ps_ctl shows a running job, its servers' health and its weights hash") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=1"}, folder.File("server"));
  const std::string address = server.Address();
  Process worker("ps_worker", Worker(address, {"--steps=100000000"}), folder.File("worker"));
  REQUIRE(worker.WaitFor(".err", "rank 0 of 1"));
  Process hash("ps_ctl", {"--server=" + address, "weights_hash"}, folder.File("hash"));
  CHECK(hash.Wait() == 0);
  CHECK(hash.Output().find(" version ") == 32);
  Process status("ps_ctl", {"--server=" + address, "status"}, folder.File("status"));
  CHECK(status.Wait() == 0);
  CHECK(status.Output().find("job default: running") != std::string::npos);
  CHECK(status.Output().find("workers: 1 of 1") != std::string::npos);
  Process health("ps_ctl", {"--server=" + address, "health"}, folder.File("health"));
  CHECK(health.Wait() == 0);
  CHECK(health.Output() == "SERVING\n");
  worker.Signal(SIGINT);
  CHECK(worker.Wait() == 1);
  CHECK(server.Wait() == 1);
  CHECK(server.Errors().find("rank 0") != std::string::npos);
}

TEST_CASE("Bad usage ends with status 2 and names every problem") {
  std::string errors;
  CHECK(RunOnce("ps_server", {"--mode=fast", "--no_such_flag", "--num_workers=x"}, &errors) == 2);
  CHECK(errors.find("--no_such_flag: unknown flag") != std::string::npos);
  CHECK(errors.find("--num_workers=x") != std::string::npos);
  CHECK(RunOnce("ps_server", {"--mode=fast", "--learning_rate=-1"}, &errors) == 2);
  CHECK(errors.find("--mode=fast") != std::string::npos);
  CHECK(errors.find("--learning_rate=-1") != std::string::npos);
  CHECK(RunOnce("ps_worker", {"--model=mlp:7", "--loss=none", "--batch_size=0", "--normalize=l2"}, &errors) == 2);
  for (const char* flag : {"--model=mlp:7", "--loss=none", "--batch_size=0", "--normalize=l2"})
    CHECK(errors.find(flag) != std::string::npos);
  CHECK(RunOnce("ps_ctl", {"dance"}, &errors) == 2);
  CHECK(errors.find("there is no command 'dance'") != std::string::npos);
  CHECK(RunOnce("ps_ctl", {"status", "now"}, &errors) == 2);
  CHECK(errors.find("status: expected nothing after it, not 'now'") != std::string::npos);
  CHECK(RunOnce("ps_ctl", {"drain"}, &errors) == 2);
  CHECK(errors.find("drain: expected WORKER after it\n") != std::string::npos);
  CHECK(RunOnce("ps_ctl", {"--server=nowhere", "--timeout=-1s", "status"}, &errors) == 2);
  CHECK(errors.find("ps_ctl: --server=nowhere") == 0);
  CHECK(errors.find("\nps_ctl: --timeout=-1s: expected more than 0") != std::string::npos);
}

TEST_CASE("What cannot work ends with status 1 and one clear line") {
  std::string errors;
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=1"}, folder.File("server"));
  const std::string address = server.Address();
  CHECK(RunOnce("ps_server", {"--listen=" + address}, &errors) == 1);
  CHECK(errors.find("ps_server: --listen=" + address) != std::string::npos);
#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 65  // See common/grpc_log.h.
  CHECK(errors.find('\n') == errors.size() - 1);
#endif
  CHECK(RunOnce("ps_ctl", {"--server=127.0.0.1:1", "health"}, &errors) == 1);
  CHECK(errors == "ps_ctl: --server=127.0.0.1:1: connection refused\n");
  CHECK(RunOnce("ps_worker", {"--server=127.0.0.1:1", "--connect_timeout=300ms", "--dataset=synthetic"}, &errors) == 1);
  CHECK(errors.find("--server=127.0.0.1:1") != std::string::npos);
  CHECK(RunOnce("ps_worker", {"--server=" + address, "--dataset=idx:none,none"}, &errors) == 1);
  CHECK(errors.find("none") != std::string::npos);
  CHECK(RunOnce("ps_worker", {"--server=" + address, "--model=mlp:9,4", "--dataset=synthetic"}, &errors) == 1);
  CHECK(errors.find("--model: the network takes 9 inputs") != std::string::npos);
}

std::string WriteFile(const TempFolder& folder, const std::string& name, const std::string& bytes) {
  std::ofstream(folder.File(name), std::ios::binary) << bytes;
  return folder.File(name);
}

TEST_CASE("Data that is missing, cut short, corrupt or does not fit is refused by its name, before the job is joined") {
  const TempFolder folder;
  const std::string header("\0\0\x08\x03\0\0\0\x02\0\0\0\x02\0\0\0\x02", 16);  // Two images of 2 x 2 bytes.
  const std::string images = WriteFile(folder, "images", header + "abcdefgh");
  const std::string truncated = WriteFile(folder, "truncated", header + "abc");
  const std::string corrupt = WriteFile(folder, "corrupt", "no IDX file at all");
  const std::string label_header("\0\0\x08\x01\0\0\0\x02", 8);
  const std::string labels = WriteFile(folder, "labels", label_header + std::string("\0\x01", 2));
  const std::string far_labels = WriteFile(folder, "far", label_header + std::string("\0\x07", 2));
  const std::string table = WriteFile(folder, "table.csv", "1,2,0\n3,x,1\n");
  const std::string sparse = WriteFile(folder, "sparse.txt", "0 1:2\n1 2:\n");
  const auto refused = [&](const std::string& dataset, const std::string& model, const std::string& text) {
    CheckRefused("ps_worker", {"--server=127.0.0.1:1", "--dataset=" + dataset, "--model=mlp:" + model}, text);
  };
  refused("idx:" + folder.File("none") + "," + labels, "4,2", folder.File("none"));
  refused("idx:" + truncated + "," + labels, "4,2", truncated);
  refused("idx:" + corrupt + "," + labels, "4,2", corrupt);
  refused("idx:" + images + "," + corrupt, "4,2", corrupt);
  refused("idx:" + images + "," + labels, "9,2", "--model: the network takes 9 inputs");
  refused("idx:" + images + "," + far_labels, "4,2", "--model: the network has 2 outputs");
  refused("csv:" + table, "2,2", table + ": line 2");
  refused("libsvm:" + sparse, "2,2", sparse + ": line 2");
  const std::string whole = WriteFile(folder, "whole.csv", "1,2,3\n3,4,7\n");
  CheckRefused("ps_worker", {"--server=127.0.0.1:1", "--dataset=csv:" + whole, "--model=mlp:2,1", "--loss=mse"},
               "--model: the network has 1 outputs, but csv:" + whole +
                   " has labels from 0 to 7; to learn them as numbers, add ,task=regression");
  const std::string targets = WriteFile(folder, "targets.csv", "1,2,0.5\n3,4,1\n");
  refused("csv:" + targets, "2,1", "--loss: the targets of --dataset=csv:" + targets);
}

TEST_CASE("A data set's text that is wrong whatever the files hold is bad usage") {
  std::string errors;
  for (const std::string dataset : {"cifar", "synthetic:samples=many", "csv:t.csv,label=middle", "idx:images"}) {
    INFO(dataset);
    CHECK(RunOnce("ps_worker", {"--server=127.0.0.1:1", "--dataset=" + dataset}, &errors) == 2);
    CHECK(errors.find("ps_worker: --dataset=" + dataset) == 0);
    CHECK(errors.find('\n') == errors.size() - 1);
  }
}

TEST_CASE("A worker that does not match its job is refused by what differs, and the job is not harmed") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=1"}, folder.File("server"));
  const std::string address = server.Address();
  Process worker("ps_worker", Worker(address, {"--steps=100000000"}), folder.File("worker"));
  REQUIRE(server.WaitFor(".err", "the job is running"));
  CheckRefused("ps_worker", Worker(address, {"--steps=100000000"}), "--num_workers=1");
  CheckRefused("ps_worker", Worker(address, {"--steps=100000000", "--seed=2"}), "--seed=2 (the job has 1)");
  CheckRefused("ps_worker", Worker(address, {"--steps=100000000", "--rank=5"}), "--rank=5");
  CheckRefused("ps_worker", Worker(address, {"--steps=100000000", "--job=other"}), "--job=other");
  CheckRefused("ps_worker",
               {"--server=" + address, "--model=mlp:20,9,4", "--dataset=synthetic:samples=400,features=20,classes=4"},
               "--model: tensor 0");
  server.Signal(SIGTERM);
  CHECK(server.Wait() == 1);
  CHECK(worker.Wait() == 1);
}

TEST_CASE("Workers match if they read the same samples, wherever the files are") {
  const TempFolder folder;
  const std::string train = "1,20,0\n3,40,1\n5,10,0\n7,90,1\n";
  const std::string test = "2,30,1\n";
  const std::string here = WriteFile(folder, "here.csv", train) + "," + WriteFile(folder, "here-test.csv", test);
  const std::string there = WriteFile(folder, "there.csv", train) + "," + WriteFile(folder, "there-test.csv", test);
  Process server("ps_server", {"--num_workers=2"}, folder.File("server"));
  const std::string address = server.Address();
  const auto reads = [&](const std::string& files) {
    return std::vector<std::string>{"--server=" + address, "--model=mlp:2,2", "--batch_size=2",
                                    "--dataset=csv:" + files};
  };
  Process first("ps_worker", reads(here), folder.File("first"));
  REQUIRE(server.WaitFor(".err", "joined (1 of 2)"));
  for (const auto& [file, other] :
       {std::pair("here.csv", "1,20,0\n3,40,1\n5,10,0\n7,91,1\n"), std::pair("here-test.csv", "2,30,0\n")}) {
    const std::string before = std::string(file) == "here.csv" ? train : test;
    WriteFile(folder, file, other);
    CheckRefused("ps_worker", reads(here), "the worker's experiment differs from the job's: --dataset=");
    WriteFile(folder, file, before);
  }
  std::vector<std::string> unscaled = reads(there);
  unscaled.emplace_back("--normalize=none");
  CheckRefused("ps_worker", unscaled, "differs from the job's: --normalize=none (the job has standard)");
  Process second("ps_worker", reads(there), folder.File("second"));
  CHECK(first.Wait() == 0);
  CHECK(second.Wait() == 0);
  CHECK(server.Wait() == 0);
}

TEST_CASE("Servers whose settings differ, or that are missing, are named") {
  const TempFolder folder;
  Process chief("ps_server", {"--num_workers=1", "--num_shards=3"}, folder.File("chief"));
  const std::string address = chief.Address();
  const auto shard = [&](const std::string& number, std::vector<std::string> more) {
    more.insert(more.end(), {"--num_shards=3", "--shard=" + number, "--chief=" + address});
    return more;
  };
  Process one("ps_server", shard("1", {}), folder.File("one"));
  REQUIRE(chief.WaitFor(".err", "shard 1 at "));
  CheckRefused("ps_server", shard("2", {"--learning_rate=0.7", "--mode=asp"}),
               "--learning_rate=0.7 (the chief has 0.1)");
  CheckRefused("ps_server", shard("1", {}), "--shard=1: already served");
  CheckRefused("ps_server", {"--num_shards=3", "--shard=2", "--chief=127.0.0.1:1", "--connect_timeout=300ms"},
               "--chief=127.0.0.1:1");
  // Shard 2 never comes: the worker says so while it waits, and in the end.
  CheckRefused("ps_worker", Worker(address, {"--connect_timeout=3s", "--start_timeout=3s"}),
               "waiting for shard 2 to register");
  chief.Signal(SIGTERM);
  CHECK(chief.Wait() == 1);
  CHECK(one.Wait() == 1);
}

TEST_CASE("A killed worker fails a bsp job by its rank long before its lease ends, and no process stays") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=2", "--lease=1h"}, folder.File("server"));
  const std::string address = server.Address();
  Process first("ps_worker", Worker(address, {"--rank=0", "--steps=100000000"}), folder.File("first"));
  Process second("ps_worker", Worker(address, {"--rank=1", "--steps=100000000"}), folder.File("second"));
  // It has trained for a while, so that its stream to the chief is open.
  REQUIRE(second.WaitFor(".err", "step "));
  second.Signal(SIGKILL);
  CHECK(second.Wait() == 128 + SIGKILL);
  CHECK(first.Wait() == 1);
  CHECK(first.Errors().find("rank 1") != std::string::npos);
  CHECK(server.Wait() == 1);
  CHECK(server.Errors().find("was lost: its connection broke") != std::string::npos);
}

TEST_CASE(
    "In asp a killed rank 0 is replaced as lead: another evaluates, prints and saves, and all end with status 0") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=3", "--mode=asp"}, folder.File("server"));
  const std::string address = server.Address();
  const auto worker = [&](const std::string& rank, const std::string& steps) {
    return Worker(address, {"--rank=" + rank, "--steps=5000", "--save_weights=" + folder.File(steps)});
  };
  Process first("ps_worker", worker("0", "w0"), folder.File("first"));
  Process second("ps_worker", worker("1", "w1"), folder.File("second"));
  Process third("ps_worker", worker("2", "w2"), folder.File("third"));
  REQUIRE(server.WaitFor(".err", "the job is running"));
  first.Signal(SIGKILL);
  CHECK(first.Wait() == 128 + SIGKILL);
  CHECK(second.Wait() == 0);
  CHECK(third.Wait() == 0);
  CHECK(server.Wait() == 0);
  CHECK(second.Output().find("test accuracy: ") != std::string::npos);
  CHECK(second.Output().find("weights hash: ") != std::string::npos);
  CHECK(std::ifstream(folder.File("w1")).good());
  CHECK(third.Output().empty());
}

TEST_CASE("A server that was stopped for longer than the lease goes on with its workers") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=2", "--lease=2s"}, folder.File("server"));
  const std::string address = server.Address();
  Process first("ps_worker", Worker(address, {"--rank=0", "--steps=4000"}), folder.File("first"));
  Process second("ps_worker", Worker(address, {"--rank=1", "--steps=4000"}), folder.File("second"));
  REQUIRE(server.WaitFor(".err", "the job is running"));
  server.Signal(SIGSTOP);
  {
    Mutex mutex;
    CondVar never;
    MutexLock lock(mutex);
    for (const TimePoint end = Now() + std::chrono::seconds(4); Now() < end;) never.WaitUntil(mutex, end);
  }
  server.Signal(SIGCONT);
  CHECK(first.Wait() == 0);
  CHECK(second.Wait() == 0);
  CHECK(server.Wait() == 0);
  CHECK(server.Errors().find("this server was suspended for") != std::string::npos);
}

TEST_CASE("A server that cannot be reached is named at once, with what is wrong") {
  const TempFolder folder;
  Process refused("ps_worker", Worker("127.0.0.1:1", {"--connect_timeout=1h"}), folder.File("refused"));
  CHECK(refused.WaitFor(".err", "--server=127.0.0.1:1: connection refused; retrying"));
  Process unknown("ps_worker", Worker("no-such-host.invalid:1", {"--connect_timeout=1h"}), folder.File("unknown"));
  CHECK(unknown.WaitFor(".err", "--server=no-such-host.invalid:1: unknown host name; retrying"));
  Process shard("ps_server", {"--num_shards=2", "--shard=1", "--chief=127.0.0.1:1", "--connect_timeout=1h"},
                folder.File("shard"));
  CHECK(shard.WaitFor(".err", "--chief=127.0.0.1:1: connection refused; retrying"));
  std::string errors;
  CHECK(RunOnce("ps_ctl", {"--server=unix:" + folder.File("none"), "--timeout=300ms", "status"}, &errors) == 1);
  CHECK(errors.find("no such socket") != std::string::npos);
}

TEST_CASE("A worker that waits for others leaves at once on SIGTERM, and its rank is free again") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=2"}, folder.File("server"));
  const std::string address = server.Address();
  Process worker("ps_worker", Worker(address, {"--steps=3"}), folder.File("worker"));
  REQUIRE(server.WaitFor(".err", "joined (1 of 2)"));
  worker.Signal(SIGTERM);
  CHECK(worker.Wait() == 0);
  CHECK(worker.Errors().find("SIGTERM: leaving the job") != std::string::npos);
  Process first("ps_worker", Worker(address, {"--steps=3"}), folder.File("first"));
  Process second("ps_worker", Worker(address, {"--steps=3"}), folder.File("second"));
  CHECK(first.Wait() == 0);
  CHECK(second.Wait() == 0);
  CHECK(server.Wait() == 0);
}

TEST_CASE("A worker stopped before its join is answered cancels the join") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=1", "--num_shards=2"}, folder.File("server"));  // Shard 1 never comes.
  const std::string address = server.Address();
  Process worker("ps_worker", Worker(address, {"--steps=3"}), folder.File("worker"));
  REQUIRE(server.WaitFor(".err", "joined (1 of 1)"));
  worker.Signal(SIGTERM);
  CHECK(worker.Wait() == 0);
  CHECK(server.WaitFor(".err", "left: joining: stopped"));
  Process status("ps_ctl", {"--server=" + address, "status"}, folder.File("status"));
  CHECK(status.Wait() == 0);
  CHECK(status.Output().find("workers: 0 of 1") != std::string::npos);
  server.Signal(SIGTERM);
  CHECK(server.Wait() == 1);
}

TEST_CASE("A shard that is connecting to its chief ends at once on SIGTERM") {
  const TempFolder folder;
  Process shard("ps_server", {"--num_shards=2", "--shard=1", "--chief=127.0.0.1:1", "--connect_timeout=1h"},
                folder.File("shard"));
  REQUIRE(shard.WaitFor(".err", "connecting to the chief"));
  shard.Signal(SIGTERM);
  CHECK(shard.Wait() == 1);
  CHECK(shard.Errors().find("--chief=127.0.0.1:1: stopped") != std::string::npos);
}

TEST_CASE("A server that dies before the job runs is given up after connect_timeout, not start_timeout") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=2"}, folder.File("server"));
  Process worker("ps_worker", Worker(server.Address(), {"--connect_timeout=1s", "--start_timeout=1h"}),
                 folder.File("worker"));
  REQUIRE(worker.WaitFor(".err", "rank 0 of 2"));
  server.Signal(SIGKILL);
  CHECK(server.Wait() == 128 + SIGKILL);
  CHECK(worker.Wait() == 1);
  CHECK(worker.Errors().find("not reachable") != std::string::npos);
}

TEST_CASE("SIGTERM ends a server in order: its worker is told") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=1"}, folder.File("server"));
  Process worker("ps_worker", Worker(server.Address(), {"--steps=100000000"}), folder.File("worker"));
  REQUIRE(server.WaitFor(".err", "the job is running"));
  server.Signal(SIGTERM);
  CHECK(server.Wait() == 1);
  CHECK(worker.Wait() == 1);
  CHECK(worker.Errors().find("server 0 was stopped (SIGTERM)") != std::string::npos);
}

}  // namespace
}  // namespace ps
