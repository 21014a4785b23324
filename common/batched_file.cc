#include "common/batched_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include <spdlog/spdlog.h>
#include "common/status.h"
#include "common/sync.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kShownPathBytes = 300;
constexpr std::chrono::seconds kFlushBatches(1);
constexpr std::chrono::milliseconds kBatchStopTime(500);

}  // namespace

struct BatchedFile::State {
  State(Options with, int to) : options(std::move(with)), file(to) {}
  ~State() { close(file); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void Run();
  // Writes the batch, or takes back what was written of it: then it returns errno.
  int Put(std::string_view bytes);
  std::string Name() const { return options.flag + "=" + Printable(options.path, kShownPathBytes); }

  const Options options;
  const int file;
  off_t size = 0;             // The thread's, as the next: whole records are in so many bytes.
  bool told_refused = false;  // The log has it.

  Mutex mutex;
  CondVar changed;
  std::string queued ABSL_GUARDED_BY(mutex);
  uint64_t records ABSL_GUARDED_BY(mutex) = 0;      // So many are in it.
  uint64_t taken_bytes ABSL_GUARDED_BY(mutex) = 0;  // Queued until now, and so in the file unless it was refused.
  bool full ABSL_GUARDED_BY(mutex) = false;         // The file is.
  bool writing ABSL_GUARDED_BY(mutex) = false;
  bool flushing ABSL_GUARDED_BY(mutex) = false;
  bool ending ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;
  uint64_t dropped ABSL_GUARDED_BY(mutex) = 0;
  uint64_t told_dropped ABSL_GUARDED_BY(mutex) = 0;
};

int BatchedFile::State::Put(std::string_view bytes) {
  const auto all = static_cast<off_t>(bytes.size());
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      (void)!ftruncate(file, size);  // Where that fails too, readers find a record that is cut off.
      return error;
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  size += all;
  return 0;
}

void BatchedFile::State::Run() {
  mutex.Lock();
  TimePoint next = Now() + kEvery;
  while (true) {
    while (!ending && !flushing && Now() < next) changed.WaitUntil(mutex, next);
    next = Now() + kEvery;
    const bool last = ending;
    flushing = false;
    std::string batch = std::exchange(queued, {});
    const uint64_t count = std::exchange(records, 0);
    if (last) batch += options.at_end;
    writing = true;
    mutex.Unlock();
    const int error = batch.empty() ? 0 : Put(batch);
    if (error != 0 && !std::exchange(told_refused, true)) {
      spdlog::warn("{}: {}; what was to be written there is lost", Name(), std::strerror(error));
    }
    mutex.Lock();
    writing = false;
    if (error != 0) dropped += count;
    if (dropped > told_dropped && error == 0 && !full) {
      spdlog::warn("{}: the file could not be written fast enough; {} records are lost", Name(),
                   dropped - told_dropped);
    }
    told_dropped = dropped;
    changed.NotifyAll();
    if (last) break;
  }
  ended = true;
  changed.NotifyAll();
  mutex.Unlock();
}

absl::StatusOr<std::unique_ptr<BatchedFile>> BatchedFile::Open(const Options& options) {
  const auto wrong = [&](const std::string& why) {
    return InvalidArgument(options.flag, "=", Printable(options.path, kShownPathBytes), ": ", why);
  };
  const int file = open(options.path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0666);
  if (file < 0 && errno == ENXIO) return wrong("expected a file, not a pipe");
  if (file < 0) return wrong(std::string("the file cannot be written: ") + std::strerror(errno));
  auto state = std::make_shared<State>(options, file);
  struct stat about = {};
  if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode)) return wrong("expected a file, not a pipe or a device");
  if (flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return wrong("another running process is writing this file");
  }
  if (ftruncate(file, 0) != 0) return wrong(std::string("the file cannot be emptied: ") + std::strerror(errno));
  return std::unique_ptr<BatchedFile>(new BatchedFile(std::move(state)));
}

BatchedFile::BatchedFile(std::shared_ptr<State> state) : state_(std::move(state)) {
  // Signals are for other threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([shared = state_] {
    pthread_setname_np(pthread_self(), "ps-records");
    shared->Run();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

BatchedFile::~BatchedFile() {
  const TimePoint deadline = Now() + kFlushBatches + kBatchStopTime;
  state_->mutex.Lock();
  state_->ending = true;
  state_->changed.NotifyAll();
  while (!state_->ended && state_->changed.WaitUntil(state_->mutex, deadline)) continue;
  const bool ended = state_->ended;
  state_->mutex.Unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

bool BatchedFile::Append(std::string_view record) {
  State& state = *state_;
  MutexLock lock(state.mutex);
  if (state.full || state.queued.size() + record.size() > kMaxQueuedBytes) {
    ++state.dropped;
    return false;
  }
  const uint64_t limit = state.options.max_file_bytes;
  if (limit > 0 && state.taken_bytes + record.size() + state.options.at_end.size() > limit) {
    state.full = true;
    ++state.dropped;
    spdlog::warn("{}: the file has come to its limit of {} MiB; nothing more is written there", state.Name(),
                 limit >> 20);
    return false;
  }
  state.taken_bytes += record.size();
  state.queued += record;
  ++state.records;
  return true;
}

bool BatchedFile::Flush(TimePoint deadline) {
  MutexLock lock(state_->mutex);
  state_->flushing = true;
  state_->changed.NotifyAll();
  while (state_->records > 0 || state_->writing || state_->flushing) {
    if (!state_->changed.WaitUntil(state_->mutex, deadline)) return state_->records == 0 && !state_->writing;
  }
  return true;
}

uint64_t BatchedFile::dropped() const {
  MutexLock lock(state_->mutex);
  return state_->dropped;
}

}  // namespace ps
