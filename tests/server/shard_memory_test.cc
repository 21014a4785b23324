// Where and when the memory of a large model is written: not under a shard's lock, or nobody would be answered for
// seconds.
#include <atomic>
#include <fstream>
#include <thread>

#include <unistd.h>

#include "server/engine/float_buffer.h"
#include "tests/server/test_shard.h"

namespace ps::shard_memory_test {
namespace {

constexpr int64_t kElements = 32 << 20;
constexpr uint64_t kBytes = kElements * sizeof(float);

// Memory that this process has written or read.
uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t pages = 0;
  uint64_t resident = 0;
  statm >> pages >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

TEST_CASE("The first buffers of a ring are written as it is made, and further ones only by who has picked them") {
  for (const bool shared : {false, true}) {
    CAPTURE(shared);
    const uint64_t before = ResidentBytes();
    BufferRing ring(kElements, {0.0F}, /*max_sets=*/2, shared);
    const uint64_t made = ResidentBytes();
    CHECK(made - before > kBytes - kBytes / 8);
    const std::shared_ptr<HeldBuffers> first = ring.current();
    first->holds = 1;
    REQUIRE(ring.Pick(/*in_place=*/true));
    CHECK(ring.next() != first);
    CHECK(ResidentBytes() - made < kBytes / 4);
    first->holds = 0;
  }
}

TEST_CASE("While a shard allocates the memory of a model, others are answered") {
  // Somebody was answered after a good part of it was written, and before the shard had it.
  std::atomic<bool> answered = false;
  for (int attempt = 0; attempt < 10 && !answered; ++attempt) {
    const std::unique_ptr<MetricsWriter> metrics = *MetricsWriter::Open("", "shard");
    ShardOptions options = TestShard::With({}, "asp");
    options.optimizer = "adam";  // Its state is twice as much as the weights.
    Shard shard(
        options, [](const v1::ShardReport& /*report*/) {}, metrics.get());
    const uint64_t before = ResidentBytes();
    std::atomic<bool> made = false;
    std::thread asking([&] {
      while (!made && !answered) {
        const bool writes = ResidentBytes() > before + kBytes / 2;
        if (shard.Status(Now()).slices() == 0 && writes) answered = true;
      }
    });
    v1::ChiefUpdate update;
    *update.mutable_view() = TestShard::View(1, v1::PHASE_GATHERING, {{"w", {kElements}}});
    shard.OnChiefUpdate(update);
    made = true;
    asking.join();
    CHECK(shard.Status(Now()).slices() > 0);
  }
  CHECK(answered);
}

TEST_CASE(
    "There is room for two versions of each worker where workers read their own, within a quarter of the memory") {
  const Layout model = {{"w", {1024}}};
  const auto versions = [&](const std::string& mode, uint32_t workers, uint64_t memory_bytes, size_t given = 0) {
    ShardOptions options = TestShard::With({}, mode);
    options.max_workers = workers;
    options.max_versions = given;
    options.memory_bytes = memory_bytes;
    const auto memory = MakeShardMemory(options, TestShard::View(1, v1::PHASE_GATHERING, model), [] {});
    REQUIRE(memory.ok());
    return (*memory).parameters->max_versions();
  };
  constexpr uint64_t kPlenty = uint64_t{1} << 40;
  CHECK(versions("asp", 1, kPlenty) == 4);
  CHECK(versions("asp", 5, kPlenty) == 12);
  CHECK(versions("ssp", 100, kPlenty) == 60);
  CHECK(versions("asp", 100, 4 * 4096 * 20) == 20);
  CHECK(versions("asp", 100, 0) == 4);
  CHECK(versions("bsp", 100, kPlenty) == 4);
  CHECK(versions("asp", 5, kPlenty, 3) == 3);
}

}  // namespace
}  // namespace ps::shard_memory_test
