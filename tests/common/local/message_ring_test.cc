#include "common/local/message_ring.h"

#include <sys/eventfd.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <random>
#include <thread>
#include <vector>

#include "common/files.h"
#include "common/local/shared_memory.h"
#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

constexpr size_t kCapacity = 256;

TimePoint InTime() { return Now() + std::chrono::seconds(20); }

// Memory of a ring, and both ends of it.
struct TestRing {
  alignas(64) uint8_t bytes[MessageRing::SizeFor(kCapacity)] = {};
  std::span<uint8_t> memory{bytes};
  MessageRing& header = *reinterpret_cast<MessageRing*>(bytes);
  MessageWriter writer{memory};
  MessageReader reader{memory};

  std::optional<std::string> Read() {
    const auto message = reader.Read();
    REQUIRE(message.ok());
    return *message;
  }
};

std::string RandomText(std::mt19937& random, size_t longest) {
  std::string text(random() % (longest + 1), ' ');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

TEST_CASE("Messages of all sizes come whole and in order, around the ring's end") {
  TestRing ring;
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::string> written;
    for (;;) {
      std::string text = RandomText(random, 60);
      const absl::Status status = ring.writer.Write(text);
      if (absl::IsResourceExhausted(status)) break;
      REQUIRE(status.ok());
      written.push_back(std::move(text));
    }
    REQUIRE(written.size() >= kCapacity / 68);
    for (const std::string& text : written) REQUIRE(ring.Read() == text);
    REQUIRE(ring.Read() == std::nullopt);
  }
}

TEST_CASE("A message that there is no room for changes nothing, and has room once others were read") {
  TestRing ring;
  const std::string largest(kCapacity - 4, 'x');
  REQUIRE(ring.writer.Write("a").ok());
  CHECK(Message(ring.writer.Write(largest)) ==
        "no room for a message of 252 bytes in a ring of 256 of which 8 are taken");
  CHECK(ring.Read() == "a");
  CHECK(ring.writer.Write(largest).ok());
  CHECK(absl::IsResourceExhausted(ring.writer.Write("")));
  CHECK(ring.Read() == largest);
  CHECK(absl::IsResourceExhausted(ring.writer.Write(largest + "y")));
  CHECK(absl::IsResourceExhausted(ring.writer.Write(std::string(5000, 'z'))));
  CHECK(ring.Read() == std::nullopt);
}

TEST_CASE("A writer that lies about what it wrote is found out, and nothing outside the ring is read") {
  for (const uint64_t written : {uint64_t{1}, uint64_t{4}, uint64_t{7}, kCapacity + uint64_t{8}, UINT64_MAX}) {
    TestRing ring;
    ring.header.written = written;
    CHECK(absl::IsInternal(ring.reader.Read().status()));
  }
  for (const uint32_t length : {uint32_t{5}, uint32_t{kCapacity}, UINT32_MAX - 3, UINT32_MAX}) {
    TestRing ring;
    std::memcpy(ring.bytes + sizeof(MessageRing), &length, sizeof(length));
    ring.header.written = 8;
    CHECK(absl::IsInternal(ring.reader.Read().status()));
  }
}

TEST_CASE("A reader that lies about what it read is found out, and nothing unread is overwritten") {
  for (const uint64_t read : {uint64_t{9}, UINT64_MAX - kCapacity}) {
    TestRing ring;
    REQUIRE(ring.writer.Write("a").ok());
    ring.header.read = read;
    CHECK(absl::IsInternal(ring.writer.Write("b")));
    ring.header.read = 0;
    CHECK(ring.Read() == "a");
  }
}

TEST_CASE("A reader that sleeps is woken by each message, and one that is not at its deadline") {
  TestRing ring;
  CHECK_FALSE(ring.reader.Wait(Now() + std::chrono::milliseconds(1)));
  constexpr int kMessages = 20000;
  std::thread writer([&] {
    for (int i = 0; i < kMessages; ++i) {
      while (!ring.writer.Write(std::to_string(i)).ok()) std::this_thread::yield();
    }
  });
  for (int next = 0; next < kMessages;) {
    if (const auto message = ring.Read(); message.has_value()) {
      REQUIRE(message == std::to_string(next));
      ++next;
    } else {
      REQUIRE(ring.reader.Wait(InTime()));
    }
  }
  writer.join();
}

TEST_CASE("A reader that sleeps in epoll is woken once for each sleep, and not while it is awake") {
  TestRing ring;
  const FileDescriptor event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  MessageWriter writer(ring.memory, event.get());
  const auto rung = [&] {  // How often, since the last time.
    eventfd_t times = 0;
    return eventfd_read(event.get(), &times) == 0 ? times : 0;
  };
  REQUIRE(writer.Write("awake").ok());
  CHECK(rung() == 0);
  for (int sleep = 0; sleep < 2; ++sleep) {
    ring.reader.SetSleeping(true);
    REQUIRE(writer.Write("first").ok());
    REQUIRE(writer.Write("second").ok());
    CHECK(rung() == 1);
  }
  ring.reader.SetSleeping(true);
  ring.reader.SetSleeping(false);
  REQUIRE(writer.Write("awake").ok());
  CHECK(rung() == 0);
}

TEST_CASE("Whoever has lost its processor to one that computes does not look for a while, and longer the next time") {
  Looking looking;
  const auto looks = [&] {  // Before it sleeps. Something comes then.
    int count = 0;
    while (looking.Again()) ++count;
    looking.End(/*came=*/true);
    return count;
  };
  const auto rests = [&] {
    int count = 0;
    while (count < 1000 && looks() < 100) ++count;
    return count;
  };
  // On a busy machine it may lose the processor by itself, and rest more.
  looking.GaveWay(std::chrono::milliseconds(3));
  CHECK(rests() >= 8);
  looking.GaveWay(std::chrono::milliseconds(3));
  looking.GaveWay(std::chrono::milliseconds(3));
  CHECK(rests() >= 16);
}

TEST_CASE("Another process is talked to, and after its death its last messages are there") {
  absl::StatusOr<SharedMemory> there =
      SharedMemory::Create("there", MessageRing::SizeFor(kCapacity), SharedMemory::Access::kReadWrite);
  absl::StatusOr<SharedMemory> back =
      SharedMemory::Create("back", MessageRing::SizeFor(kCapacity), SharedMemory::Access::kReadWrite);
  REQUIRE((there.ok() && back.ok()));
  const pid_t child = fork();
  if (child == 0) {  // Answers each message with itself twice, until it dies.
    MessageReader reader(there->bytes());
    MessageWriter writer(back->bytes());
    for (;;) {
      const auto message = reader.Read();
      if (!message.ok()) _exit(1);
      if (message->has_value() && **message == "die") raise(SIGKILL);
      if (message->has_value() ? !writer.Write(**message + **message).ok() : !reader.Wait(InTime())) _exit(2);
    }
  }
  MessageWriter writer(there->bytes());
  MessageReader reader(back->bytes());
  const auto await = [&]() -> std::string {
    for (;;) {
      const auto message = reader.Read();
      REQUIRE(message.ok());
      if (message->has_value()) return **message;
      REQUIRE(reader.Wait(InTime()));
    }
  };
  for (int i = 0; i < 1000; ++i) {
    REQUIRE(writer.Write(std::to_string(i)).ok());
    REQUIRE(await() == std::to_string(i) + std::to_string(i));
  }
  REQUIRE(writer.Write("last").ok());
  REQUIRE(writer.Write("die").ok());
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(await() == "lastlast");
  const auto after = reader.Read();
  REQUIRE(after.ok());
  CHECK(*after == std::nullopt);
}

}  // namespace
}  // namespace ps
