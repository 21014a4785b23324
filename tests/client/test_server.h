// A gRPC server of a test, on a free port.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include "tests/catch.h"

namespace ps {

// Serves from its construction to its end, at which open calls are cancelled. The services must outlive it.
class TestServer {
 public:
  // Port 0 picks one.
  explicit TestServer(const std::vector<grpc::Service*>& services, int port = 0) {
    grpc::ServerBuilder builder;
    int bound = 0;
    builder.AddListeningPort("127.0.0.1:" + std::to_string(port), grpc::InsecureServerCredentials(), &bound);
    for (grpc::Service* service : services) builder.RegisterService(service);
    server_ = builder.BuildAndStart();
    REQUIRE(server_ != nullptr);
    port_ = bound;
    address_ = "127.0.0.1:" + std::to_string(bound);
  }
  explicit TestServer(grpc::Service& service) : TestServer({&service}) {}
  ~TestServer() { server_->Shutdown(std::chrono::system_clock::now()); }
  TestServer(const TestServer&) = delete;
  TestServer& operator=(const TestServer&) = delete;

  const std::string& address() const { return address_; }
  int port() const { return port_; }

 private:
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  int port_ = 0;
};

}  // namespace ps
