#include "common/http/page_files.h"

#include <zlib.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/http/embedded_files.h"

namespace ps {
namespace {

constexpr int kGzipWindow = 16 + MAX_WBITS;  // https://zlib.net/manual.html, inflateInit2: a gzip header is expected.

std::string TypeOfFile(std::string_view name) {
  const std::string_view ending = name.substr(name.rfind('.') + 1);
  for (const auto& [known, type] : {std::pair("html", "text/html; charset=utf-8"),
                                    {"css", "text/css; charset=utf-8"},
                                    {"js", "text/javascript; charset=utf-8"},
                                    {"svg", "image/svg+xml"}}) {
    if (ending == known) return type;
  }
  return "application/octet-stream";
}

std::string Inflated(const EmbeddedFile& file) {
  std::string text(file.bytes, '\0');
  z_stream stream = {};
  stream.next_in = const_cast<unsigned char*>(file.gzip.data());  // It is not written to.
  stream.avail_in = static_cast<unsigned>(file.gzip.size());
  stream.next_out = reinterpret_cast<unsigned char*>(text.data());
  stream.avail_out = static_cast<unsigned>(text.size());
  Check(inflateInit2(&stream, kGzipWindow) == Z_OK, "zlib begins");
  const int ended = inflate(&stream, Z_FINISH);
  inflateEnd(&stream);
  Check(ended == Z_STREAM_END && stream.avail_out == 0, "what the build compressed is whole");
  return text;
}

}  // namespace

HttpResponse PageFile(const HttpRequest& request) {
  const std::string_view name = request.path == "/"
                                    ? std::string_view("index.html")
                                    : std::string_view(request.path).substr(request.path.empty() ? 0 : 1);
  const auto files = PageFiles();
  const auto found =
      std::find_if(files.begin(), files.end(), [&](const EmbeddedFile& each) { return name == each.name; });
  if (found == files.end()) return TextResponse(404, "there is nothing here; the page is at /");
  HttpResponse response{.type = TypeOfFile(name), .gzipped = request.takes_gzip};
  response.etag = absl::StrCat("\"", found->hash, request.takes_gzip ? "-gzip\"" : "\"");
  response.body = std::make_shared<const std::string>(
      request.takes_gzip ? std::string(reinterpret_cast<const char*>(found->gzip.data()), found->gzip.size())
                         : Inflated(*found));
  return response;
}

}  // namespace ps
