// The stream that a member keeps open to the chief: it breaks when the member dies, so the chief notices at once, and
// on it the chief sends every change at once (proto/ps/v1/ps.proto, Chief.Watch).
#pragma once

#include <memory>

#include "ps/v1/ps.grpc.pb.h"
#include "worker/client/chief_callbacks.h"
#include "worker/client/timer.h"

namespace ps {

// Thread-safe, but Start and Stop are its owner's.
class ChiefWatch {
 public:
  // Stub and timer must outlive it.
  ChiefWatch(v1::Chief::Stub& chief, Timer& timer, v1::Identity id, ChiefCallbacks callbacks);
  ~ChiefWatch() { Stop(); }

  void Start();
  // Cancels the stream and waits for its end, which gRPC brings at once.
  void Stop();
  // The stream that is open now has received a state.
  bool open() const;

 private:
  class Stream;
  struct State;
  static void Open(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace ps
