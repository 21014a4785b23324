// The flags that the workers of a job have in common: a worker tells the chief its own, and one that joins later takes
// them from there, so that whoever takes a lost worker's place needs no more than the server's address.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "common/flag_parser.h"
#include "ps/client.h"

namespace ps {

// Of the flags that were given, those that another worker of the job would need, as far as they can be told: by name.
std::map<std::string, std::string> GivenJobFlags(const CommandLine& line);

// Takes from the job those of them that were not given, as if they had been. If none was given it waits for the server
// as a join does; else a server that is not there yet is no error: then this worker is among the first, and has been
// told all. Logs what it takes. Errors are of FlagsOfJob; FAILED_PRECONDITION if this program does not know a flag, or
// not such a value.
absl::Status TakeJobFlags(const ClientOptions& options, CommandLine& line);

}  // namespace ps
