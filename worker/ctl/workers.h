// ps_ctl workers: a table of the workers, those first who hold up the others.
#pragma once

#include <cstddef>
#include <string>

#include "ps/v1/ps.pb.h"

namespace ps {

// A line a worker, with a line above that says what the columns are; at most `max_workers`, and then how many more
// there are. A share is of the time that the worker has told. What it has not told is "–".
std::string WorkersTable(const v1::StatusReply& status, size_t max_workers);

}  // namespace ps
