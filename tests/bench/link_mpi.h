// MPI ranks on the hosts of a laboratory, one each.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/lab_hosts.h"
#include "tests/bench/mpi_baseline.h"

namespace ps {

struct MpiAlgorithm {
  std::string name;
  int number = 0;  // Of Open MPI's coll_tuned_allreduce_algorithm; 0: its own choice.
};

// Of MPI_Allreduce, whose first is Open MPI's own choice.
const std::vector<MpiAlgorithm>& MpiAlgorithms();

class LinkMpi {
 public:
  // Ranks run on hosts 0, 1 …, which outlive this.
  static absl::StatusOr<LinkMpi> Make(const LabHosts& hosts, uint32_t ranks);
  LinkMpi(LinkMpi&& other) noexcept : dir_(std::move(other.dir_)), place_(std::move(other.place_)) {
    other.dir_.clear();
  }
  LinkMpi& operator=(LinkMpi&&) = delete;
  ~LinkMpi();

  MpiPlace Place(const MpiAlgorithm& algorithm) const;

 private:
  LinkMpi() = default;
  std::filesystem::path dir_;  // Of Open MPI's sockets, and of the program that it starts ranks with.
  MpiPlace place_;
};

}  // namespace ps
