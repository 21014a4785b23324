#include "tests/bench/lab_hosts.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int kLaboratories = 64;
constexpr char kNet[] = "10.89.0";  // The bridge is in a namespace of its own, so that laboratories may share it.
constexpr char kInterface[] = "eth0";
// Two of the largest packets (64 KB; their segmentation is left to the card, as on a real one). Links have more where a
// timer that is 1 ms late would lose some of their rate.
constexpr int kLeastBurstBytes = 128 << 10;
constexpr char kQueue[] = "16mb";

// What a command has printed. INTERNAL, with that, if it failed. Words have nothing that a shell would take. A signal
// from the terminal does not end it halfway.
absl::StatusOr<std::string> RunCommand(const std::string& words) {
  std::FILE* out = popen(absl::StrCat("trap '' INT TERM; ", words, " 2>&1 </dev/null").c_str(), "r");
  if (out == nullptr) return absl::InternalError(absl::StrCat(words, ": cannot be started"));
  std::string printed;
  std::array<char, 4096> part;
  for (size_t read = 0; (read = std::fread(part.data(), 1, part.size(), out)) > 0;) printed.append(part.data(), read);
  if (pclose(out) == 0) return printed;
  return absl::InternalError(absl::StrCat(words, ": ", absl::StripAsciiWhitespace(printed)));
}

absl::Status RunAll(const std::vector<std::string>& commands) {
  for (const std::string& command : commands) PS_RETURN_IF_ERROR(RunCommand(command).status());
  return absl::OkStatus();
}

std::vector<std::string> NamespacesWith(const std::string& prefix) {
  std::vector<std::string> found;
  const absl::StatusOr<std::string> listed = RunCommand("ip netns list");
  if (!listed.ok()) return found;
  for (const auto line : absl::StrSplit(*listed, '\n')) {
    const std::string text(line.data(), line.size());
    const std::string name = text.substr(0, text.find(' '));
    if (name.starts_with(prefix + "-")) found.push_back(name);
  }
  return found;
}

// Whether there was any.
bool KillAll(const std::string& name) {
  const absl::StatusOr<std::string> pids = RunCommand("ip netns pids " + name);
  bool any = false;
  for (const auto line : absl::StrSplit(pids.ok() ? *pids : "", '\n')) {
    pid_t pid = 0;
    if (!absl::SimpleAtoi(line, &pid)) continue;
    any = true;
    kill(pid, SIGKILL);
  }
  return any;
}

void RemoveNamespaces(const std::string& prefix) {
  constexpr int kTries = 20;  // One that was about to be started may come when others are gone.
  for (const std::string& name : NamespacesWith(prefix)) {
    for (int i = 0; i < kTries && KillAll(name); ++i) {
    }
    (void)RunCommand("ip netns delete " + name);
  }
}

}  // namespace

absl::Status LabHosts::Build() {
  if (geteuid() != 0) return absl::NotFoundError("network namespaces need root");
  for (const char* program : {"ip", "tc"}) {
    if (!RunCommand(absl::StrCat(program, " -V")).ok()) {
      return absl::NotFoundError(absl::StrCat(program, " (package iproute2) not found"));
    }
  }
  const MutexLock lock(mutex_);
  if (removed_) return absl::CancelledError("the hosts are to go");
  PS_RETURN_IF_ERROR(Claim());
  // What a container does not allow.
  if (const absl::Status status = RunCommand("ip netns add " + Switch()).status(); !status.ok()) {
    return absl::NotFoundError("this machine has no network namespaces: " + Message(status));
  }
  return AddAll();
}

// Names are the same each time, so that what a killed process has left is found.
absl::Status LabHosts::Claim() {
  for (int number = 0; number < kLaboratories; ++number) {
    prefix_ = absl::StrCat("psb", number);
    const std::string path =
        absl::StrCat("/run/ps-bench-", prefix_, ".lock");  // Where namespaces have their names, too.
    FileDescriptor claim(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    if (!claim.valid()) return absl::InternalError(absl::StrCat(path, ": ", strerror(errno)));
    if (flock(claim.get(), LOCK_EX | LOCK_NB) != 0) continue;
    claim_ = std::move(claim);
    RemoveNamespaces(prefix_);
    std::error_code error;
    std::filesystem::remove_all(Folder(), error);
    if (mkdir(Folder().c_str(), 0700) == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(Folder(), ": cannot be made: ", strerror(errno)));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(kLaboratories, " times ps_bench link run already (/run/ps-bench-*.lock)"));
}

std::string LabHosts::Name(uint32_t host) const { return absl::StrCat(prefix_, "-h", host); }
std::string LabHosts::Address(uint32_t host) { return absl::StrCat(kNet, ".", host + 1); }
std::string LabHosts::Subnet() { return absl::StrCat(kNet, ".0/24"); }

absl::Status LabHosts::AddAll() const {
  PS_RETURN_IF_ERROR(
      RunAll({"ip -n " + Switch() + " link add br0 type bridge", "ip -n " + Switch() + " link set br0 up"}));
  for (uint32_t host = 0; host < count_; ++host) PS_RETURN_IF_ERROR(AddHost(host));
  return absl::OkStatus();
}

absl::Status LabHosts::AddHost(uint32_t host) const {
  const std::string name = Name(host);
  const std::string port = absl::StrCat("p", host);
  PS_RETURN_IF_ERROR(RunAll({
      "ip netns add " + name,
      absl::StrCat("ip -n ", Switch(), " link add ", port, " type veth peer name ", kInterface, " netns ", name),
      absl::StrCat("ip -n ", Switch(), " link set ", port, " master br0 up"),
      absl::StrCat("ip -n ", name, " address add ", Address(host), "/24 dev ", kInterface),
      absl::StrCat("ip -n ", name, " link set lo up"),
      absl::StrCat("ip -n ", name, " link set ", kInterface, " up"),
      // Said in the route, since a kernel may not let a namespace set it. BBR's speed scatters on such links.
      absl::StrCat("ip -n ", name, " route replace ", Subnet(), " dev ", kInterface, " proto kernel scope link src ",
                   Address(host), " congctl cubic"),
  }));
  PS_RETURN_IF_ERROR(Limit(name, kInterface));
  return Limit(Switch(), port);
}

// What the device sends.
absl::Status LabHosts::Limit(const std::string& name, const std::string& device) const {
  const int burst = std::max(kLeastBurstBytes, mbit_per_s_ * 125);
  return RunCommand(absl::StrCat("tc -n ", name, " qdisc add dev ", device, " root tbf rate ", mbit_per_s_,
                                 "mbit burst ", burst, " limit ", kQueue))
      .status();
}

std::vector<uint64_t> LabHosts::Carried() const {
  std::vector<uint64_t> bytes;
  std::vector<std::string> names = {Switch()};
  for (uint32_t host = 0; host < count_; ++host) names.push_back(Name(host));
  for (const std::string& name : names) {
    const absl::StatusOr<std::string> said = RunCommand("tc -n " + name + " -s -j qdisc show");
    const auto parsed = nlohmann::json::parse(said.ok() ? *said : "[]", nullptr, false);
    for (const auto& each : parsed) {
      if (each.value("kind", "") == "tbf") bytes.push_back(each.value("bytes", uint64_t{0}));
    }
  }
  return bytes;
}

void LabHosts::Remove() {
  const MutexLock lock(mutex_);
  removed_ = true;
  if (!claim_.valid()) return;
  RemoveNamespaces(prefix_);
  std::error_code error;
  std::filesystem::remove_all(Folder(), error);
  claim_.Close();
}

}  // namespace ps
