// Whether a browser may be shown a page under the name by which it asks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ps {

// Whether the value of a Host header names an address ("10.0.0.1:8080", "[::1]"), localhost, or one of these names,
// whatever the port. A page of a stranger's site can make its visitor's browser ask a server in the visitor's network
// (DNS rebinding), but only under the name of that site, which so is refused.
bool IsOwnHost(std::string_view host, const std::vector<std::string>& names);

}  // namespace ps
