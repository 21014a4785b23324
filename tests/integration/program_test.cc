// The real programs: what they refuse before they join, what they say last, and that nobody who does not read what they
// write can hold them.
#include <sys/stat.h>
#include <unistd.h>

#include "common/safetensors.h"
#include "tests/integration/process.h"
#include "tests/read_safetensors.h"

namespace ps {
namespace {

// A pipe that is full and that nobody reads.
class FullPipe {
 public:
  FullPipe() {
    REQUIRE(pipe2(ends_, O_CLOEXEC | O_NONBLOCK) == 0);
    const std::string block(4096, '.');
    while (write(ends_[1], block.data(), block.size()) > 0) continue;
    REQUIRE(fcntl(ends_[1], F_SETFL, 0) == 0);  // Blocking, as programs find it.
  }
  ~FullPipe() {
    close(ends_[0]);
    close(ends_[1]);
  }
  FullPipe(const FullPipe&) = delete;
  FullPipe& operator=(const FullPipe&) = delete;
  int end() const { return ends_[1]; }

 private:
  int ends_[2] = {};
};

// The weights of mlp:20,8,4, all of them this number.
void WriteWeights(const std::string& path, float value) {
  const std::vector<float> values(160, value);
  const std::span<const float> all(values);
  REQUIRE(WriteSafetensors(path, {{{"layer0.weight", {8, 20}}, all},
                                  {{"layer0.bias", {8}}, all.first(8)},
                                  {{"layer1.weight", {4, 8}}, all.first(32)},
                                  {{"layer1.bias", {4}}, all.first(4)}})
              .ok());
}

TEST_CASE("Files that cannot be read or written are refused by their flag before the job is joined") {
  const TempFolder folder;
  const auto refused = [&](const std::string& flag, const std::string& text) {
    CheckRefused("ps_worker", Worker("127.0.0.1:1", {flag}), text);
  };
  refused("--save_weights=/dev/null",
          "--save_weights=/dev/null: cannot be written: it exists and is not a regular file");
  const std::string nowhere = folder.File("no/file");
  refused("--save_weights=" + nowhere, "--save_weights=" + nowhere + ": cannot be written: No such file or directory");
  refused("--metrics_file=" + nowhere, "--metrics_file=" + nowhere + ": the file cannot be written: No such file");
  refused("--init_weights=" + nowhere, "--init_weights: " + nowhere + ": the file cannot be opened");
  WriteWeights(folder.File("other"), 1);
  CheckRefused("ps_worker",
               {"--server=127.0.0.1:1", "--model=mlp:20,9,4", "--dataset=synthetic:samples=400,features=20,classes=4",
                "--init_weights=" + folder.File("other")},
               "the model's tensor layer0.weight");
}

TEST_CASE("Workers with other initial weights than the job's are refused, wherever their files are") {
  const TempFolder folder;
  WriteWeights(folder.File("a"), 0.5F);
  WriteWeights(folder.File("b"), 0.25F);
  std::filesystem::copy_file(folder.File("a"), folder.File("same"));
  Process server("ps_server", {"--num_workers=2"}, folder.File("server"));
  const std::string address = server.Address();
  Process first("ps_worker", Worker(address, {"--steps=3", "--init_weights=" + folder.File("a")}),
                folder.File("first"));
  REQUIRE(server.WaitFor(".err", "joined (1 of 2)"));
  CheckRefused("ps_worker", Worker(address, {"--steps=3", "--init_weights=" + folder.File("b")}),
               "--init_weights=values ");
  CheckRefused("ps_worker", Worker(address, {"--steps=3"}), "--init=he (the job has unused)");
  CheckRefused("ps_worker",
               Worker(address, {"--steps=3", "--activation=tanh", "--init_weights=" + folder.File("same")}),
               "--activation=tanh (the job has relu)");
  Process second("ps_worker", Worker(address, {"--steps=3", "--init_weights=" + folder.File("same")}),
                 folder.File("second"));
  CHECK(first.Wait() == 0);
  CHECK(second.Wait() == 0);
  CHECK(server.Wait() == 0);
}

TEST_CASE("A worker that fails before it trains leaves with its reason") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=2"}, folder.File("server"));
  const std::string address = server.Address();
  CheckRefused("ps_worker", Worker(address, {"--steps=3", "--start_timeout=300ms"}), "");
  CHECK(server.WaitFor(".err", "rank 0"));
  CHECK(server.WaitFor(".err", "left: "));
  CHECK(server.Errors().find("without leaving") == std::string::npos);
  server.Signal(SIGTERM);
  CHECK(server.Wait() == 1);
}

TEST_CASE("A start that is refused leaves the metrics of what runs, and of what ran before, as they are") {
  const TempFolder folder;
  const std::string server_file = folder.File("server.jsonl");
  const std::string worker_file = folder.File("worker.jsonl");
  const std::string old_file = folder.File("old.jsonl");
  std::ofstream(old_file) << "of the last run\n";
  Process server("ps_server", {"--num_workers=1", "--metrics_file=" + server_file}, folder.File("server"));
  const std::string address = server.Address();
  Process worker("ps_worker", Worker(address, {"--steps=100000000", "--metrics_file=" + worker_file}),
                 folder.File("worker"));
  REQUIRE(server.WaitFor(".err", "the job is running"));
  const std::string taken = ": another running process is writing this file";
  CheckRefused("ps_server", {"--metrics_file=" + server_file}, "--metrics_file=" + server_file + taken);
  CheckRefused("ps_worker", Worker(address, {"--metrics_file=" + worker_file}),
               "--metrics_file=" + worker_file + taken);
  CheckRefused("ps_server", {"--listen=" + address, "--metrics_file=" + old_file}, "--listen=" + address);
  CheckRefused("ps_worker", Worker(address, {"--steps=100000000", "--metrics_file=" + old_file}), "--num_workers=1");
  CheckRefused("ps_server", {"--shard=1", "--num_shards=2", "--chief=" + address, "--metrics_file=" + old_file},
               "--num_shards=2 (the chief has 1)");
  CHECK(ReadFile(old_file) == "of the last run\n");
  CHECK(ReadFile(server_file).find(R"({"event":"start")") == 0);
  CHECK(ReadFile(worker_file).find(R"({"event":"start")") == 0);
  server.Signal(SIGTERM);
  CHECK(server.Wait() == 1);
  CHECK(worker.Wait() == 1);
}

TEST_CASE("A server whose stderr or metrics pipe is not read still detects a lost worker, and ends on SIGTERM") {
  const TempFolder folder;
  const FullPipe full;
  const std::string fifo = folder.File("fifo");
  REQUIRE(mkfifo(fifo.c_str(), 0666) == 0);
  const int held = open(fifo.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  const std::string block(4096, '.');
  while (write(held, block.data(), block.size()) > 0) continue;
  const bool of_metrics = GENERATE(false, true);
  const auto start = [&](const std::string& name) {
    std::vector<std::string> flags = {"--num_workers=2", "--lease=1s"};
    if (of_metrics) flags.push_back("--metrics_file=" + fifo);
    return std::make_unique<Process>("ps_server", flags, folder.File(name), of_metrics ? -1 : full.end());
  };
  {
    const auto server = start("lease");
    const std::string address = server->Address();
    Process first("ps_worker",
                  Worker(address, {"--rank=0", "--steps=100000000", "--metrics_file=" + folder.File("first.jsonl")}),
                  folder.File("first"));
    Process second("ps_worker", Worker(address, {"--rank=1", "--steps=100000000"}), folder.File("second"));
    REQUIRE(first.WaitFor(".jsonl", R"("event":"step")"));
    second.Signal(SIGKILL);
    const TimePoint lost = Now();
    CHECK(first.Wait() == 1);
    CHECK(first.Errors().find("rank 1") != std::string::npos);
    CHECK(server->Wait() == 1);
    CHECK(Now() - lost < std::chrono::minutes(2));
  }
  {
    const auto server = start("signal");
    const std::string address = server->Address();
    Process worker("ps_worker", Worker(address, {"--steps=3"}), folder.File("worker"));
    REQUIRE(worker.WaitFor(".err", "rank 0 of 2"));
    const TimePoint asked = Now();
    server->Signal(SIGTERM);
    CHECK(server->Wait() == 1);
    CHECK(Now() - asked < std::chrono::minutes(2));
    CHECK(worker.Wait() == 1);
  }
  close(held);
}

TEST_CASE("A second signal ends a program at once, even if its stderr is not read") {
  const TempFolder folder;
  const FullPipe full;
  Process server("ps_server", {"--num_workers=2", "--lease=1h"}, folder.File("server"), full.end());
  const std::string address = server.Address();
  Process worker("ps_worker", Worker(address, {"--steps=3"}), folder.File("worker"));
  REQUIRE(worker.WaitFor(".err", "rank 0 of 2"));
  const TimePoint asked = Now();
  server.Signal(SIGTERM);
  server.Signal(SIGINT);
  CHECK(server.Wait() == 1);
  CHECK(Now() - asked < std::chrono::minutes(2));
}

TEST_CASE("Flags without effect, without a unit or with bytes that are no text are refused with status 2") {
  std::string errors;
  const auto refused = [&](const std::string& program, const std::vector<std::string>& flags, const std::string& text) {
    INFO(text);
    CHECK(RunOnce(program, flags, &errors) == 2);
    CHECK(errors.find(program + ": " + text) == 0);
    CHECK(errors.find('\n') == errors.size() - 1);
  };
  refused("ps_server", {"--momentum=0.5"}, "--momentum=0.5: has no effect: --optimizer=sgd has no momentum");
  refused("ps_server", {"--optimizer=adam", "--alpha=0.9"},
          "--alpha=0.9: has no effect: --optimizer=adam has no alpha");
  refused("ps_server", {"--optimizer=adamw", "--beta2=1"}, "--beta2=1: expected 0 or more, below 1");
  refused("ps_server", {"--optimizer=adagrad", "--eps=0"}, "--eps=0: expected a number above 0");
  refused(
      "ps_server", {"--optimizer=adams"},
      "--optimizer=adams: expected sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, lamb, from_worker or local");
  refused("ps_worker", {"--param_groups=*.scale:weight_decay=0"},
          "--param_groups: *.scale: no tensor of the model has such a name; it has layer0.weight, layer0.bias,");
  refused("ps_worker", {"--param_groups=*:weight_decay=-1"}, "--param_groups: *:weight_decay=-1: expected a factor");
  refused("ps_server", {"--num_shards=0"}, "--num_shards=0: expected 1 to 1024");
  refused("ps_worker", {"--epochs=1e300"}, "--epochs=1e+300: expected more than 0, at most 1e+09");
  refused("ps_server", {"--lease=5"}, "--lease=5: a unit is missing, for example 5s");
  refused("ps_server", {"--job=a\xff"}, "--job: invalid UTF-8 at \\xff");
  refused("ps_server", {"--listen=unix:/tmp/\xff"}, "--listen: invalid UTF-8 at \\xff");
  refused("ps_worker", {"--name=a\nb"}, "--name: a control character at \\nb");
  refused("ps_server", {"--compress=topk:0.01", "--noerror_feedback"},
          "--error_feedback=false: has no effect: with --compress=topk:0.01 there always is");
  refused("ps_worker", {"--steps=5", "--epochs=2"}, "--epochs=2: has no effect: --steps=5 is the budget");
  refused("ps_worker", {"--init=he", "--init_weights=w"}, "--init=he: has no effect: --init_weights gives");
  refused("ps_worker", {"--device=cuda:1", "--threads=2"}, "--threads=2: has no effect: --device=cuda:1 computes on");
  refused("ps_worker", {"--dataset=synthetic", "--data_dir=/d"},
          "--data_dir=/d: has no effect: --dataset=synthetic has");
  refused("ps_worker", {"--model=mlp:3,2", "--activation=tanh"}, "--activation=tanh: has no effect: --model has no");
}

TEST_CASE("Paths that are not valid UTF-8 work, or are refused by name") {
  const TempFolder folder;
  const std::string odd = folder.File("odd-\xff");
  Process server("ps_server", {"--num_workers=1", "--metrics_file=" + odd + ".jsonl"}, folder.File("server"));
  std::ofstream(odd + ".csv") << "0.1,0.2,0\n0.3,0.1,1\n";
  Process worker("ps_worker",
                 {"--server=" + server.Address(), "--model=mlp:2,2", "--dataset=csv:" + odd + ".csv",
                  "--save_weights=" + odd, "--metrics_file=" + odd + "-worker.jsonl", "--batch_size=2", "--steps=2"},
                 folder.File("worker"));
  CHECK(worker.Wait() == 0);
  CHECK(server.Wait() == 0);
  CHECK(ReadSafetensors(odd).ok());
}

TEST_CASE("Results that cannot be printed are an error, not lost in silence") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=1"}, folder.File("server"));
  std::vector<std::string> command = Worker(server.Address(), {"--steps=3"});
  std::string line = "exec " PS_BIN_DIR "/ps_worker";
  for (const std::string& argument : command) line += " '" + argument + "'";
  const std::string errors = folder.File("errors");
  const int status = std::system((line + " >/dev/full 2>" + errors).c_str());  // NOLINT: the shell redirects.
  CHECK(WEXITSTATUS(status) == 1);
  CHECK(ReadFile(errors).find("ps_worker: stdout: what was printed could not be written") != std::string::npos);
  CHECK(server.Wait() == 0);
}

TEST_CASE("A shard that is stopped ends the job with that reason, on all sides") {
  const TempFolder folder;
  Process chief("ps_server", {"--num_workers=1", "--num_shards=2"}, folder.File("chief"));
  const std::string address = chief.Address();
  Process shard("ps_server", {"--num_workers=1", "--num_shards=2", "--shard=1", "--chief=" + address},
                folder.File("shard"));
  Process worker("ps_worker", Worker(address, {"--steps=100000000"}), folder.File("worker"));
  REQUIRE(chief.WaitFor(".err", "the job is running"));
  shard.Signal(SIGTERM);
  for (Process* process : {&chief, &shard, &worker}) {
    INFO(process->Errors());
    CHECK(process->Wait() == 1);
    CHECK(process->Errors().find("server 1 was stopped (SIGTERM)") != std::string::npos);
  }
}

TEST_CASE("Files that would be waited for, or destroyed, are refused before joining") {
  const TempFolder folder;
  const std::string fifo = folder.File("fifo");
  REQUIRE(mkfifo(fifo.c_str(), 0666) == 0);
  CheckRefused("ps_worker", Worker("127.0.0.1:1", {"--init_weights=" + fifo}), fifo + ": not a regular file");
  std::string errors;
  const std::string both = folder.File("both");
  CHECK(RunOnce("ps_worker", Worker("127.0.0.1:1", {"--save_weights=" + both, "--metrics_file=" + both}), &errors) ==
        2);
  CHECK(errors.find("--save_weights=" + both + ": is also the --metrics_file") != std::string::npos);
}

TEST_CASE("A worker that names a shard, not the chief, is told so") {
  const TempFolder folder;
  Process chief("ps_server", {"--num_shards=2"}, folder.File("chief"));
  Process shard("ps_server", {"--num_shards=2", "--shard=1", "--chief=" + chief.Address()}, folder.File("shard"));
  CheckRefused("ps_worker", Worker(shard.Address(), {}), "name the address of server 0");
}

}  // namespace
}  // namespace ps
