// Preloaded into a program, moves its wall clock: what the program reads is what the kernel says, and the nanoseconds
// that the first eight bytes of the file of PS_WALL_CLOCK hold. Whoever changes them makes the clock jump. The steady
// clock stays as it is.
//
// A wait until a time of the wall clock jumps with it, as in the kernel. Abseil waits in that way (futex with
// FUTEX_CLOCK_REALTIME), and with it gRPC. libfaketime moves the clock under them and not the wait, so that a program
// whose clock goes back finds each of its waits over at once. The C library's own waits of that kind
// (pthread_cond_timedwait, sem_timedwait) are not moved; none of the programs uses them.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kLookAgain = kSecond / 100;  // A wait sees a jump after so long.

constinit const std::atomic<int64_t> unmoved{0};
constinit const std::atomic<int64_t>* moved_by = &unmoved;  // Changed before main only.

// A function of the C library. Static variables would do, but their initialisation may call `syscall` itself.
template <typename Function>
class Real {
 public:
  constexpr explicit Real(const char* name) : name_(name) {}

  template <typename... Arguments>
  auto operator()(Arguments... arguments) {
    Function* function = function_.load(std::memory_order_relaxed);
    if (function == nullptr) {
      function = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name_));
      function_.store(function, std::memory_order_relaxed);
    }
    return function(arguments...);
  }

 private:
  const char* const name_;
  std::atomic<Function*> function_{nullptr};
};

constinit Real<int(clockid_t, timespec*)> real_clock_gettime("clock_gettime");
constinit Real<long(long, ...)> real_syscall("syscall");

int64_t MovedBy() { return moved_by->load(std::memory_order_relaxed); }

timespec FromNanoseconds(int64_t time) { return {time / kSecond, time % kSecond}; }

int64_t KernelNow() {
  timespec now{};
  real_clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

timespec Now() { return FromNanoseconds(KernelNow() + MovedBy()); }

__attribute__((constructor)) void Map() {
  const char* const path = std::getenv("PS_WALL_CLOCK");
  const int file = path != nullptr ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void* const memory = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) moved_by = static_cast<const std::atomic<int64_t>*>(memory);
  close(file);
}

// FUTEX_WAIT_BITSET until a time of the moved clock.
long WaitUntil(long word, long operation, long value, const timespec& end, long mask) {
  const int64_t until = end.tv_sec * kSecond + end.tv_nsec;
  while (true) {
    const int64_t look = std::clamp<int64_t>(until - MovedBy(), 0, KernelNow() + kLookAgain);
    const timespec next = FromNanoseconds(look);
    const long result = real_syscall(SYS_futex, word, operation, value, &next, nullptr, mask);
    if (result != -1 || errno != ETIMEDOUT) return result;
    if (KernelNow() + MovedBy() < until) continue;
    errno = ETIMEDOUT;
    return -1;
  }
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE) return real_clock_gettime(clock, time);
  *time = Now();
  return 0;
}

int gettimeofday(timeval* time, void*) noexcept {
  const timespec now = Now();
  *time = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* out) noexcept {
  const time_t seconds = Now().tv_sec;
  if (out != nullptr) *out = seconds;
  return seconds;
}

long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  const auto [word, operation, value, end, unused, mask] = arguments;
  constexpr long kUntil = FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME;
  if (number == SYS_futex && (operation & ~FUTEX_PRIVATE_FLAG) == kUntil && end != 0) {
    return WaitUntil(word, operation, value, *std::bit_cast<const timespec*>(end), mask);
  }
  return real_syscall(number, word, operation, value, end, unused, mask);
}

}  // extern "C"
