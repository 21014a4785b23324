#include "server/page/process_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"

namespace ps {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

MetricFamily OneValue(const char* name, MetricType type, const char* help, double value) {
  MetricFamily family{.name = name, .help = help, .type = type};
  prometheus::ClientMetric& metric = family.metric.emplace_back();
  (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  return family;
}

// 0: it is none.
double Number(const std::string& text) {
  double value = 0;
  return absl::SimpleAtod(text, &value) ? value : 0;
}

double BootUnixSeconds() {
  std::ifstream stat("/proc/stat");
  for (std::string line; std::getline(stat, line);) {
    if (line.starts_with("btime ")) return Number(line.substr(6));
  }
  return 0;
}

size_t OpenDescriptors() {
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  size_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count < 3 ? 0 : count - 3;  // ".", ".." and the folder itself.
}

}  // namespace

std::vector<MetricFamily> ProcessFamilies() {
  std::vector<MetricFamily> families;
  const auto gauge = [&](const char* name, const char* help, double value) {
    families.push_back(OneValue(name, MetricType::Gauge, help, value));
  };
  // https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html: what comes after the name, which may have spaces,
  // begins with field 3.
  std::ifstream file("/proc/self/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::istringstream fields(text.substr(std::min(text.rfind(')') + 2, text.size())));
  std::vector<std::string> values((std::istream_iterator<std::string>(fields)), std::istream_iterator<std::string>());
  const auto field = [&](size_t number) { return Number(values[number - 3]); };
  if (values.size() >= 22) {
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    families.push_back(OneValue("process_cpu_seconds_total", MetricType::Counter,
                                "Total user and system CPU time spent in seconds.", (field(14) + field(15)) / ticks));
    gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds.",
          BootUnixSeconds() + field(22) / ticks);
    gauge("process_threads", "Number of threads.", field(20));
    gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", field(23));
    gauge("process_resident_memory_bytes", "Resident memory size in bytes.",
          field(24) * static_cast<double>(sysconf(_SC_PAGESIZE)));
  }
  gauge("process_open_fds", "Number of open file descriptors.", static_cast<double>(OpenDescriptors()));
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    gauge("process_max_fds", "Maximum number of open file descriptors.", static_cast<double>(limit.rlim_cur));
  }
  return families;
}

}  // namespace ps
