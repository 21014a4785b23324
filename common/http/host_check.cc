#include "common/http/host_check.h"

#include <arpa/inet.h>
#include <algorithm>

#include "absl/strings/ascii.h"

namespace ps {
namespace {

// A host's name without its port, in lower case, and without the dot that may end it; empty: it is none.
std::string NameWithoutPort(std::string_view host) {
  const size_t bracket = host.find(']');
  const size_t colon = host.find(':', bracket == std::string_view::npos ? 0 : bracket);
  std::string name(host.substr(0, colon));
  if (colon != std::string_view::npos) {
    const std::string_view port = host.substr(colon + 1);
    if (port.size() > 5 || port.find_first_not_of("0123456789") != std::string_view::npos) return "";
  }
  absl::AsciiStrToLower(&name);
  if (!name.empty() && name.back() == '.') name.pop_back();
  return name;
}

}  // namespace

bool IsOwnHost(std::string_view host, const std::vector<std::string>& names) {
  const std::string name = NameWithoutPort(host);
  if (name.empty()) return false;
  unsigned char address[sizeof(in6_addr)];
  if (name.size() > 2 && name.front() == '[' && name.back() == ']') {
    return inet_pton(AF_INET6, name.substr(1, name.size() - 2).c_str(), address) == 1;
  }
  if (name == "localhost" || inet_pton(AF_INET, name.c_str(), address) == 1) return true;
  return std::any_of(names.begin(), names.end(), [&](const std::string& own) { return NameWithoutPort(own) == name; });
}

}  // namespace ps
