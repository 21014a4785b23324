#include "common/line_writer.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <deque>
#include <string_view>
#include <utility>

#include "common/sync.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kFlushAtEnd(1);
constexpr std::chrono::milliseconds kStopTime(500);  // For the thread to see that it is to end.
constexpr int kLookMs = 100;                         // How often a thread that waits looks for that.

struct Line {
  std::string text;
  uint64_t stands_for = 0;  // Dropped lines; 0: it is a line itself.
};

size_t BytesAtOnce(int file) {
  struct stat about = {};
  if (fstat(file, &about) == 0 && S_ISREG(about.st_mode)) return SSIZE_MAX;
  return PIPE_BUF;  // pipe(7): what is no longer than this fits when poll() says that the pipe can be written.
}

}  // namespace

struct LineWriter::State {
  State(int to, size_t max_bytes, DroppedLine line, RefusedFunction refused)
      : file(to),
        bytes_at_once(BytesAtOnce(to)),
        max_queued_bytes(max_bytes),
        dropped_line(std::move(line)),
        on_refused(std::move(refused)) {}
  ~State() { close(file); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void Run();
  // Writes the line, unless the system refuses or the writer ends.
  bool Put(std::string_view bytes);
  void Queue(std::string text, uint64_t stands_for) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    queued_bytes += text.size();
    lines.push_back({.text = std::move(text), .stands_for = stands_for});
  }
  void QueueDropped() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const uint64_t count = std::exchange(dropped, 0);
    Queue(dropped_line(count), count);
  }

  const int file;
  const size_t bytes_at_once;
  const size_t max_queued_bytes;
  const DroppedLine dropped_line;
  RefusedFunction on_refused;  // The thread's; null once it was called.
  std::atomic<bool> ending = false;
  bool torn = false;  // The thread's: the last line was refused after a part of it.

  Mutex mutex;
  CondVar changed;
  std::deque<Line> lines ABSL_GUARDED_BY(mutex);
  size_t queued_bytes ABSL_GUARDED_BY(mutex) = 0;  // With the line that is being written.
  uint64_t dropped ABSL_GUARDED_BY(mutex) = 0;     // Since the last line that says so.
  bool ended ABSL_GUARDED_BY(mutex) = false;       // The thread has nothing more to do.
};

void LineWriter::State::Run() {
  mutex.Lock();
  while (!ending) {
    if (lines.empty()) {
      changed.Wait(mutex);
      continue;
    }
    const Line line = std::move(lines.front());
    lines.pop_front();
    mutex.Unlock();
    const bool written = Put(line.text);
    mutex.Lock();
    queued_bytes -= line.text.size();
    if (!written) dropped += std::max<uint64_t>(line.stands_for, 1);
    if (written && !ending && lines.empty() && dropped > 0) QueueDropped();
    changed.NotifyAll();
  }
  ended = true;
  changed.NotifyAll();
  mutex.Unlock();
}

bool LineWriter::State::Put(std::string_view bytes) {
  const std::string after_torn = torn ? "\n" + std::string(bytes) : "";
  if (torn) bytes = after_torn;
  const size_t size = bytes.size();
  if (file < 0) return false;
  while (!bytes.empty()) {
    pollfd writable = {.fd = file, .events = POLLOUT, .revents = 0};
    const int ready = poll(&writable, 1, kLookMs);
    if (ending) return false;
    if (ready <= 0) continue;
    const ssize_t written = write(file, bytes.data(), std::min(bytes.size(), bytes_at_once));
    if (written < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (written < 0) {
      const int error = errno;
      torn = torn || bytes.size() < size;
      if (const RefusedFunction refused = std::exchange(on_refused, nullptr)) refused(error);
      return false;
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  torn = false;
  return true;
}

LineWriter::LineWriter(int file, size_t max_queued_bytes, DroppedLine dropped_line, RefusedFunction on_refused)
    : state_(std::make_shared<State>(file, max_queued_bytes, std::move(dropped_line), std::move(on_refused))) {
  // The thread inherits the mask. It blocks SIGPIPE, so that a write to a pipe without a reader is an error like
  // others.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([state = state_] { state->Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

LineWriter::~LineWriter() {
  (void)Flush(Now() + kFlushAtEnd);
  state_->ending = true;
  const TimePoint deadline = Now() + kStopTime;
  state_->mutex.Lock();
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

void LineWriter::Write(std::string line) {
  MutexLock lock(state_->mutex);
  // Once lines are dropped, half of the queue has to be written before others are taken: one gap, not a sieve.
  const size_t limit = state_->dropped > 0 ? state_->max_queued_bytes / 2 : state_->max_queued_bytes;
  if (state_->queued_bytes + line.size() > limit) {
    ++state_->dropped;
    return;
  }
  if (state_->dropped > 0) state_->QueueDropped();
  state_->Queue(std::move(line), 0);
  state_->changed.NotifyAll();
}

bool LineWriter::Flush(TimePoint deadline) {
  MutexLock lock(state_->mutex);
  while (state_->queued_bytes > 0) {
    if (!state_->changed.WaitUntil(state_->mutex, deadline)) return state_->queued_bytes == 0;
  }
  return true;
}

}  // namespace ps
