// The optimizer's state of one version, cut into messages (PullStateReply): each is made when the one before it is on
// its way, so that no more than one is copied at a time.
//
// Not thread-safe: the call locks. It holds the state until its last message is made.
#pragma once

#include <cstddef>
#include <optional>

#include "ps/v1/ps.pb.h"
#include "server/engine/parameters.h"

namespace ps {

class StateMessages {
 public:
  explicit StateMessages(StatePin state);

  struct Message {
    v1::PullStateReply reply;
    bool last = false;
  };
  // Slices of weights in the order of the model: as many as fit in a message, one at least. One message comes also
  // where the shard has none, as it says the version. Nothing: the last one was made.
  std::optional<Message> Next();

 private:
  // Goes on to the first slice of a weight from here.
  void FindWeight();

  std::optional<StatePin> state_;
  size_t next_ = 0;  // The local index.
};

}  // namespace ps
