// MPI ranks on the hosts of a laboratory, one each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/lab_hosts.h"
#include "tests/bench/mpi_baseline.h"

namespace ps {

struct MpiAlgorithm {
  std::string name;
  int number = 0;  // The number that Open MPI's coll_tuned_allreduce_algorithm gives it; 0: its own choice.
};

// The algorithms of MPI_Allreduce that are measured; the first is what Open MPI chooses by itself.
const std::vector<MpiAlgorithm>& MpiAlgorithms();

// Where ranks run on hosts 0 to ranks − 1; what Open MPI needs for it is written to the hosts' folder.
absl::StatusOr<MpiPlace> PlaceOnHosts(const LabHosts& hosts, uint32_t ranks);

// There, with the algorithm.
MpiPlace With(const MpiAlgorithm& algorithm, MpiPlace place);

}  // namespace ps
