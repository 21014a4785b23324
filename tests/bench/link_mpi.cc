#include "tests/bench/link_mpi.h"

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace ps {
namespace {

// A host name of its own, too: Open MPI's daemons would share a folder that is named after it.
std::string Named(const LabHosts& hosts, uint32_t host, const std::string& quote) {
  return absl::StrCat("ip netns exec ", hosts.Name(host), " unshare --uts sh -c ", quote, "hostname ", hosts.Name(host),
                      "; ");
}

}  // namespace

const std::vector<MpiAlgorithm>& MpiAlgorithms() {
  static const auto* const algorithms = new std::vector<MpiAlgorithm>{
      {"its own choice", 0}, {"recursive doubling", 3}, {"ring", 4}, {"segmented ring", 5}, {"Rabenseifner", 6}};
  return *algorithms;
}

absl::StatusOr<MpiPlace> PlaceOnHosts(const LabHosts& hosts, uint32_t ranks) {
  // In place of ssh: an address, and a command for the shell there.
  const std::string agent = hosts.Folder() + "/agent";
  std::ofstream script(agent);
  script << "#!/bin/sh\naddress=$1\nshift\ncase $address in\n";
  std::string addresses;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    absl::StrAppend(&addresses, rank > 0 ? "," : "", LabHosts::Address(rank));
    script << LabHosts::Address(rank) << ") exec " << Named(hosts, rank, "\"") << "$*\" ;;\n";
  }
  script << "esac\nexit 1\n";
  script.close();
  std::error_code error;
  std::filesystem::permissions(agent, std::filesystem::perms::owner_all, error);
  if (!script || error) return absl::InternalError(absl::StrCat(agent, ": cannot be written (is the disk full?)"));
  MpiPlace place;
  place.before = absl::StrCat(Named(hosts, 0, "'"), "exec \"$0\" \"$@\"'");
  place.options = absl::StrCat("--host ", addresses, " --bind-to none --mca plm rsh --mca plm_rsh_agent ", agent,
                               " --mca orte_leave_session_attached 1 --mca orte_tmpdir_base ", hosts.Folder(),
                               " --mca oob_tcp_if_include ", LabHosts::Subnet(),
                               " --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include ", LabHosts::Subnet(),
                               " --mca mpi_yield_when_idle 1");  // There are more ranks than processors.
  return place;
}

MpiPlace With(const MpiAlgorithm& algorithm, MpiPlace place) {
  if (algorithm.number > 0) {
    absl::StrAppend(&place.options, " --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm ",
                    algorithm.number);
  }
  return place;
}

}  // namespace ps
