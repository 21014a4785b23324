#include "common/http/http_server.h"

#include <algorithm>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/common/http/http_client.h"

namespace ps {
namespace {

HttpResponse Echo(const HttpRequest& request) {
  std::string text = request.path;
  for (const auto& [name, value] : request.query) absl::StrAppend(&text, " ", name, "=", value);
  return TextResponse(request.path == "/missing" ? 404 : 200, text);
}

std::unique_ptr<HttpServer> StartServer(HttpServerOptions options) {
  options.endpoint = {.host = "127.0.0.1", .port = 0};
  if (options.handler == nullptr) options.handler = Echo;
  absl::StatusOr<std::unique_ptr<HttpServer>> server = HttpServer::Start(std::move(options));
  REQUIRE(server.ok());
  return *std::move(server);
}

TEST_CASE("A request is answered with what the handler makes of its path and query, and the connection stays") {
  const auto server = StartServer({});
  CHECK(server->endpoint().port > 0);
  HttpClient client(server->endpoint());
  for (int i = 0; i < 3; ++i) {
    const HttpReply reply = client.Get("/a%20b?x=1&y=%3C%26&z");
    CHECK(reply.status == 200);
    CHECK(reply.body == "/a b x=1 y=<& z=\n");
  }
  CHECK(client.Get("/missing").status == 404);
  CHECK(client.Get("/").status == 200);
}

TEST_CASE("Each answer says that scripts come from the server only, and that it is not kept") {
  const auto server = StartServer({});
  const HttpReply reply = HttpClient(server->endpoint()).Get("/");
  const std::string policy = reply.Header("Content-Security-Policy");
  CHECK(policy.find("default-src 'none'; script-src 'self'; style-src 'self'") == 0);
  CHECK(policy.find("unsafe") == std::string::npos);
  CHECK(reply.Header("X-Content-Type-Options") == "nosniff");
  CHECK(reply.Header("Referrer-Policy") == "no-referrer");
  CHECK(reply.Header("Cache-Control") == "no-store");
}

TEST_CASE("A body that is known to the client is not sent again") {
  const auto server = StartServer({.handler = [](const HttpRequest& request) {
    HttpResponse response = TextResponse(200, "text");
    response.etag = "\"1\"";
    response.gzipped = request.takes_gzip;
    return response;
  }});
  HttpClient client(server->endpoint());
  const HttpReply first = client.Get("/");
  CHECK(first.Header("ETag") == "\"1\"");
  CHECK(first.Header("Cache-Control") == "no-cache");
  CHECK(client.Get("/", "If-None-Match: \"1\"\r\n").status == 304);
  CHECK(client.Get("/", "If-None-Match: \"2\"\r\n").body == "text\n");
  CHECK(client.Get("/", "Accept-Encoding: br, gzip\r\n").Header("Content-Encoding") == "gzip");
  CHECK(client.Get("/", "Accept-Encoding: gzip;q=0, br\r\n").Header("Content-Encoding").empty());
  CHECK(client.Get("/", "Accept-Encoding: gzip;q=0.5\r\n").Header("Content-Encoding") == "gzip");
}

TEST_CASE("HEAD is answered like GET without the body, and all other methods are refused") {
  const auto server = StartServer({});
  HttpClient client(server->endpoint());
  REQUIRE(client.Send("HEAD /abc HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  const HttpReply head = client.Receive(/*head_only=*/true);
  CHECK(head.status == 200);
  CHECK(head.Header("Content-Length") == "5");
  CHECK(client.Get("/next").body == "/next\n");
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "GETS", "get"}) {
    CAPTURE(method);
    HttpClient other(server->endpoint());
    REQUIRE(other.Send(absl::StrCat(method, " / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")));
    const HttpReply reply = other.Receive();
    CHECK(reply.status == 405);
    CHECK(reply.Header("Allow") == "GET, HEAD");
  }
}

TEST_CASE("A request under a stranger's name is refused in one line that says which names are right") {
  const auto server = StartServer({.host_names = {"node7"}});
  const auto ask = [&](const std::string& hosts, const char* version = "HTTP/1.1") {
    HttpClient client(server->endpoint());
    REQUIRE(client.Send(absl::StrCat("GET / ", version, "\r\n", hosts, "\r\n")));
    return client.Receive();
  };
  CHECK(ask("Host: node7:80\r\n").status == 200);
  const HttpReply refused = ask("Host: evil.example\r\n");
  CHECK(refused.status == 421);
  CHECK(refused.body.find("evil.example") != std::string::npos);
  CHECK(refused.body.find("node7") != std::string::npos);
  CHECK(refused.body.find('\n') == refused.body.size() - 1);
  CHECK(ask("").status == 400);
  CHECK(ask("Host: localhost\r\nHost: evil.example\r\n").status == 400);
  CHECK(ask("", "HTTP/1.0").status == 200);  // No browser.
  CHECK(ask("Host: evil.example\r\n", "HTTP/1.0").status == 421);
}

TEST_CASE("A request that is too long, has a body or is no HTTP is refused, and others are answered") {
  const auto server = StartServer({});
  for (const size_t bytes : {size_t{7000}, size_t{9000}, size_t{15000}, size_t{40000}}) {
    CAPTURE(bytes);
    HttpClient client(server->endpoint());
    const HttpReply reply = client.Get("/", absl::StrCat("X-Long: ", std::string(bytes, 'x'), "\r\n"));
    CHECK(reply.status == (bytes < 8000 ? 200 : 431));
  }
  {
    HttpClient client(server->endpoint());
    const int status = client.Get("/" + std::string(40000, 'x')).status;
    CHECK((status == 414 || status == 431));
  }
  CHECK(HttpClient(server->endpoint()).Get("/", "Content-Length: 5\r\n").status == 413);
  CHECK(HttpClient(server->endpoint()).Get("/", "Transfer-Encoding: chunked\r\n").status == 413);
  HttpClient noise(server->endpoint());
  REQUIRE(noise.Send(std::string("\x16\x03\x01\x02\x00\x01\x00\r\n\r\n\r\n", 13)));
  CHECK(noise.Closes());
  CHECK(HttpClient(server->endpoint()).Get("/").status == 200);
}

TEST_CASE("200 idle connections keep nobody out: those that have waited longest are closed") {
  const auto server = StartServer({});
  std::vector<std::unique_ptr<HttpClient>> idle;
  for (int i = 0; i < 200; ++i) {
    idle.push_back(std::make_unique<HttpClient>(server->endpoint()));
    REQUIRE(idle.back()->connected());
    if (i % 2 == 0) REQUIRE(idle.back()->Send("GET / HT"));  // Half of them have begun, and do not go on.
  }
  HttpClient client(server->endpoint());
  CHECK(client.Get("/").status == 200);
  CHECK(idle.front()->Closes());
  CHECK(client.Get("/").status == 200);
  CHECK(idle.back()->open());
}

TEST_CASE("A connection that is used stays open while others are idle") {
  const auto server = StartServer({.max_connections = 4});
  HttpClient client(server->endpoint());
  std::vector<std::unique_ptr<HttpClient>> idle;
  for (int i = 0; i < 40; ++i) {
    CHECK(client.Get("/").status == 200);
    idle.push_back(std::make_unique<HttpClient>(server->endpoint()));
  }
}

TEST_CASE("Where all connections are being answered, the next one is told so") {
  const auto body = std::make_shared<const std::string>(64 << 20, 'x');
  int asked = 0;
  std::promise<void> both_asked;
  const auto server = StartServer({.handler =
                                       [&](const HttpRequest&) {
                                         if (++asked == 2) both_asked.set_value();
                                         return HttpResponse{.body = body};
                                       },
                                   .max_connections = 2});
  HttpClient first(server->endpoint());
  HttpClient second(server->endpoint());
  for (HttpClient* each : {&first, &second}) {  // They do not read what comes.
    REQUIRE(each->Send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  }
  both_asked.get_future().wait();
  const HttpReply third = HttpClient(server->endpoint()).Receive();
  CHECK(third.status == 503);
  CHECK(third.Header("Retry-After") == "1");
}

TEST_CASE("An idle connection is closed after its time") {
  const auto server = StartServer({.idle_s = 1});
  HttpClient idle(server->endpoint());
  HttpClient used(server->endpoint());
  REQUIRE(used.Get("/").status == 200);
  CHECK(idle.Closes());
  CHECK(used.Closes());
}

TEST_CASE("Tasks run on the handler's thread, in their order, and too many are dropped") {
  std::thread::id handler_thread;
  const auto server = StartServer({.handler = [&](const HttpRequest& request) {
    handler_thread = std::this_thread::get_id();
    return Echo(request);
  }});
  REQUIRE(HttpClient(server->endpoint()).Get("/").status == 200);
  std::promise<void> goes_on;
  std::promise<void> began;
  std::vector<int> order;
  std::thread::id task_thread;
  REQUIRE(server->Post([&] {
    task_thread = std::this_thread::get_id();
    began.set_value();
    goes_on.get_future().wait();
  }));
  began.get_future().wait();
  int taken = 0;
  while (taken < 10000 && server->Post([&order, taken] { order.push_back(taken); })) ++taken;
  CHECK(taken == 64);
  goes_on.set_value();
  std::promise<void> ended;
  while (!server->Post([&] { ended.set_value(); })) std::this_thread::yield();
  ended.get_future().wait();
  CHECK(task_thread == handler_thread);
  REQUIRE(order.size() == 64);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("A port that is taken is named in one line, with the flag") {
  const auto server = StartServer({});
  const auto second = HttpServer::Start({.endpoint = server->endpoint(), .handler = Echo});
  REQUIRE(!second.ok());
  CHECK(Message(second.status()) ==
        absl::StrCat("--http_listen=", server->endpoint().ToString(), ": the port is in use; port 0 picks a free one"));
}

TEST_CASE("The server ends while clients are connected, and a client that goes away ends nothing") {
  auto server = StartServer({});
  HttpClient client(server->endpoint());
  REQUIRE(client.Get("/").status == 200);
  { (void)HttpClient(server->endpoint()).Send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"); }
  CHECK(client.Get("/").status == 200);
  server.reset();
  CHECK(client.Closes());
}

}  // namespace
}  // namespace ps
