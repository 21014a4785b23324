// A server's store of checkpoints whose disk waits: what it is asked for it does when the test says so, and not
// whenever its thread is scheduled. So an order of events is played again in the same way.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <string>

#include "server/checkpoint/checkpoint_store.h"
#include "tests/catch.h"

namespace ps {

// What the store calls back runs on its thread while Work waits for it.
class HeldDisk {
 public:
  HeldDisk(const std::string& folder, uint32_t shard, uint32_t num_shards) {
    absl::StatusOr<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open(folder, shard, num_shards);
    REQUIRE(store.ok());
    store_ = *std::move(store);
    Hold();
  }
  // What it was asked for, and has not done, may be lost.
  ~HeldDisk() { gate_->open.set_value(); }
  HeldDisk(const HeldDisk&) = delete;
  HeldDisk& operator=(const HeldDisk&) = delete;

  CheckpointStore* store() { return store_.get(); }

  // Does what it was asked for until now.
  void Work() {
    const std::shared_ptr<Gate> before = gate_;
    Hold();
    before->open.set_value();
    gate_->reached.get_future().wait();
  }

 private:
  struct Gate {
    std::promise<void> reached;
    std::promise<void> open;
  };

  // Reading nothing is the task in whose callback the store's thread waits.
  void Hold() {
    gate_ = std::make_shared<Gate>();
    store_->Read({}, {}, [gate = gate_](const auto&) {
      gate->reached.set_value();
      gate->open.get_future().wait();
    });
  }

  std::unique_ptr<CheckpointStore> store_;
  std::shared_ptr<Gate> gate_;
};

}  // namespace ps
