// The files of the page (page/), and Chart.js, compiled into the program.
#pragma once

#include "common/http/http_message.h"

namespace ps {

// The file of this path; "/" is index.html. 404 if there is none.
HttpResponse PageFile(const HttpRequest& request);

}  // namespace ps
