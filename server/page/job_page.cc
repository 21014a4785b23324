#include "server/page/job_page.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/endpoint.h"
#include "common/history/job_json.h"
#include "common/http/host_check.h"
#include "common/http/job_site.h"
#include "common/metrics.h"
#include "common/status.h"
#include "server/base/unix_time.h"
#include "server/page/metric_families.h"
#include "server/page/process_metrics.h"

namespace ps {
namespace {

// A server that says nothing for so long hangs, or is between two generations of its job.
constexpr std::chrono::seconds kMaxSilence(5);
// The page asks once a second, and later where the server is slow.
constexpr std::chrono::milliseconds kLooksAgain(3000);
constexpr std::chrono::milliseconds kLastLook(1500);
constexpr std::chrono::seconds kLookAtRuns(10);  // Which runs there are in a folder is looked up no more often.

bool HasEnded(const PageSnapshot& snapshot) {
  const v1::Phase phase = snapshot.job.has_value() ? snapshot.job->phase() : v1::PHASE_UNSPECIFIED;
  return phase == v1::PHASE_FINISHED || phase == v1::PHASE_FAILED || phase == v1::PHASE_SHUT_DOWN;
}

// An IPv6 address as endpoints have it, without brackets.
bool IsAddress(const std::string& host) { return host.find(':') != std::string::npos; }

bool IsAnyAddress(const std::string& host) { return host == "0.0.0.0" || host == "::"; }

// The host in --advertise; empty: there is none.
std::string AdvertisedHost(const ServerOptions& options) {
  const absl::StatusOr<Endpoint> advertised = ParseEndpoint("advertise", options.advertise);
  return advertised.ok() ? advertised->host : "";
}

// The names by which browsers and Prometheus may ask: the advertised one, and what the flag itself says.
std::vector<std::string> HostNames(const ServerOptions& options, const Endpoint& listen) {
  std::vector<std::string> names;
  if (const std::string advertised = AdvertisedHost(options); !advertised.empty()) names.push_back(advertised);
  const std::string own = IsAnyAddress(listen.host) ? HostName() : listen.host;
  if (names.empty() || names.front() != own) names.push_back(own);
  std::erase_if(names, [](const std::string& name) { return IsOwnHost(name, {}) || IsAddress(name); });
  return names;
}

// What a server that is not the chief can say of the job.
v1::StatusReply OwnPart(const PageFacts& facts, const PageSnapshot& snapshot) {
  v1::StatusReply status;
  status.set_job(facts.job);
  (*status.mutable_settings())["mode"] = facts.mode;
  (*status.mutable_settings())["optimizer"] = facts.optimizer;
  *status.add_shard_status() = snapshot.shard;
  status.mutable_progress()->set_unix_ms(snapshot.unix_ms);  // Ages are told by it.
  v1::ShardInfo& info = *status.add_shards();
  info.set_shard(facts.shard);
  info.set_address(snapshot.address);
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobPage>> JobPage::Start(const ServerOptions& options) {
  PS_ASSIGN_OR_RETURN(const Endpoint listen, ParseEndpoint("http_listen", options.http_listen));
  std::unique_ptr<JobPage> page(new JobPage({.job = options.job,
                                             .shard = options.shard,
                                             .chief = options.chief,
                                             .mode = CanonicalMode(options.mode.name),
                                             .optimizer = options.optimizer},
                                            options));
  PS_ASSIGN_OR_RETURN(page->server_, HttpServer::Start({.flag = "http_listen",
                                                        .endpoint = listen,
                                                        .host_names = HostNames(options, listen),
                                                        .handler = [self = page.get()](const HttpRequest& request) {
                                                          return self->Answer(request);
                                                        }}));
  Endpoint shown = page->server_->endpoint();
  if (IsAnyAddress(shown.host)) {
    const std::string advertised = AdvertisedHost(options);
    shown.host = advertised.empty() ? HostName() : advertised;
  }
  page->address_ = absl::StrCat("http://", shown.ToString());
  return page;
}

JobPage::JobPage(PageFacts facts, const ServerOptions& options)
    : facts_(std::move(facts)), history_(UnixMs()), earlier_runs_(options.http_runs, options.metrics_file) {}

JobPage::~JobPage() { server_.reset(); }

void JobPage::Observe(PageSnapshot snapshot) {
  {
    MutexLock lock(mutex_);
    const bool posted = handed_over_.has_value();
    job_ended_ = HasEnded(snapshot);
    handed_over_ = std::move(snapshot);
    if (posted) return;
  }
  if (server_->Post([this] { TakeSnapshot(); })) return;
  MutexLock lock(mutex_);
  handed_over_.reset();
}

void JobPage::AwaitLastLook(const std::stop_token& stop) {
  {
    MutexLock lock(mutex_);
    if (!job_ended_ || !asked_at_.has_value() || Now() - *asked_at_ > kLooksAgain) return;
  }
  // There may be several browsers, and nothing tells which of them asked: no event says that all have.
  const TimePoint deadline = Now() + kLastLook;
  Mutex mutex;
  CondVar stopped;
  const std::stop_callback on_stop(stop, [&] {
    MutexLock lock(mutex);
    stopped.NotifyAll();
  });
  MutexLock lock(mutex);
  while (!stop.stop_requested() && Now() < deadline) stopped.WaitUntil(mutex, deadline);
}

void JobPage::TakeSnapshot() {
  {
    MutexLock lock(mutex_);
    if (!handed_over_.has_value()) return;
    shown_ = std::exchange(handed_over_, std::nullopt);
  }
  shown_at_ = Now();
  if (shown_->job.has_value()) history_.Observe(*shown_->job, static_cast<double>(shown_->unix_ms) / 1000);
}

HttpResponse JobPage::Answer(const HttpRequest& request) {
  return AnswerFromJob(request, {.job = [this] { return JobJsonNow(); },
                                 .series = [this](const std::string& cursor,
                                                  const std::string& run) { return SeriesJsonNow(cursor, run); },
                                 .events = [this](uint64_t since) { return history_.EventsJson(since); },
                                 .metrics = [this] { return MetricsNow(); },
                                 .healthy = [this] { return Health(); }});
}

absl::Status JobPage::Health() const {
  if (!shown_.has_value()) return absl::UnavailableError("the server is starting");
  const std::chrono::nanoseconds silent = Now() - shown_at_;
  if (silent > kMaxSilence) return Unavailable("the server has said nothing for ", FormatSeconds(silent));
  return shown_->health;
}

absl::StatusOr<nlohmann::ordered_json> JobPage::JobJsonNow() {
  {
    MutexLock lock(mutex_);
    asked_at_ = Now();
  }
  if (!shown_.has_value()) return absl::UnavailableError("the server is starting");
  nlohmann::ordered_json json = JobJson(shown_->job.has_value() ? *shown_->job : OwnPart(facts_, *shown_));
  if (!shown_->job.has_value()) {
    json["headline"] = absl::StrCat("this is server ", facts_.shard, "; the job is shown by server 0, ", facts_.chief,
                                    ", at the address that its --http_listen says");
    json["chief"] = facts_.chief;
  }
  json["runs"] = RunNames();
  return json;
}

const std::vector<std::string>& JobPage::RunNames() {
  const TimePoint now = Now();
  if (now >= look_at_runs_at_) {
    run_names_ = earlier_runs_.Names();
    look_at_runs_at_ = now + kLookAtRuns;
  }
  return run_names_;
}

absl::StatusOr<nlohmann::ordered_json> JobPage::SeriesJsonNow(const std::string& cursor, const std::string& run) {
  if (run.empty()) return history_.SeriesJson(cursor);
  return earlier_runs_.SeriesJson(run, cursor, static_cast<double>(UnixMs()) / 1000);
}

std::string JobPage::MetricsNow() const {
  std::vector<prometheus::MetricFamily> families;
  if (shown_.has_value()) families = MetricFamilies(facts_, *shown_);
  std::vector<prometheus::MetricFamily> process = ProcessFamilies();
  families.insert(families.end(), std::make_move_iterator(process.begin()), std::make_move_iterator(process.end()));
  return MetricsText(families);
}

}  // namespace ps
