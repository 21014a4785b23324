// A client of a shard that hands what it gets to functions.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "server/shard/waiters.h"

namespace ps {

class TestClient final : public ShardClient {
 public:
  using OnAnswerFunction = std::function<void(absl::StatusOr<ShardAnswer>)>;
  using OnBuiltFunction = std::function<void(BuiltSlices)>;

  TestClient(OnAnswerFunction on_answer, OnBuiltFunction on_built)
      : on_answer_(std::move(on_answer)), on_built_(std::move(on_built)) {}

  void OnAnswer(absl::StatusOr<ShardAnswer> answer) override {
    if (on_answer_) on_answer_(std::move(answer));
  }
  void OnBuilt(BuiltSlices built) override {
    if (on_built_) on_built_(std::move(built));
  }

 private:
  const OnAnswerFunction on_answer_;
  const OnBuiltFunction on_built_;
};

inline std::shared_ptr<ShardClient> ClientOf(TestClient::OnAnswerFunction on_answer,
                                             TestClient::OnBuiltFunction on_built = {}) {
  return std::make_shared<TestClient>(std::move(on_answer), std::move(on_built));
}

}  // namespace ps
