// A request of HTTP and its answer, as far as this project's pages need them: values.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ps {

struct HttpRequest {
  std::string path;                          // Decoded, without the query: "/api/v1/series".
  std::map<std::string, std::string> query;  // Decoded. Of a name that comes twice, the last value.
  std::string etag;                          // If-None-Match; empty: the client has nothing yet.
  bool takes_gzip = false;
};

struct HttpResponse {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  // Shared, so that what never changes is not copied for each client. Null: there is none.
  std::shared_ptr<const std::string> body;
  // Set: the client may keep the body, and asks each time whether it is still the same. Empty: it keeps nothing.
  std::string etag = {};
  bool gzipped = false;                                           // The body is.
  std::vector<std::pair<std::string, std::string>> headers = {};  // Others.
};

// An answer in plain text; the line end is added.
inline HttpResponse TextResponse(int status, const std::string& text) {
  return {.status = status, .body = std::make_shared<const std::string>(text + "\n")};
}

}  // namespace ps
