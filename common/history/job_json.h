// A job's status as JSON, as the page, /api/v1/job and `ps_ctl status --json` show it, and in one line of words.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>
#include "ps/v1/ps.pb.h"

namespace ps {

// "gathering", "running", "finished", "failed", "shut down"; "unknown" for what this program does not know.
std::string PhaseName(v1::Phase phase);

// All that the chief says of the job. Seconds, bytes and Unix milliseconds, as the names say; what is not known is null
// or absent from its list, never a made-up number. `runs` is empty: whoever serves earlier runs fills it.
nlohmann::ordered_json JobJson(const v1::StatusReply& status);

// One entry of JobJson's "shards": of a server that is not the chief, its own. `now_unix_ms` is the clock by which the
// age of its checkpoint is told.
nlohmann::ordered_json ShardJson(const v1::ShardStatusReply& shard, const std::string& address, uint64_t now_unix_ms);

// "step 1,041, 12.3 steps/s, 4 min left; waiting 2.1 s for rank 3 on host-b, last heard from 0.4 s ago"; of a job that
// does not run, why.
std::string Headline(const v1::StatusReply& status);

// How long a step of a worker takes: the median, over the workers, of each one's mean so far; 0: none has told. (The
// time between versions, ProgressStatus.median_step_s, is another where ranks go on by themselves.)
double WorkerStepSeconds(const v1::StatusReply& status);

// JSON knows no number that is not finite: "NaN", "Infinity" and "-Infinity" are strings.
nlohmann::ordered_json JsonNumber(double value);
// As the shortest decimal number that is this float: 0.1, not 0.10000000149011612.
nlohmann::ordered_json JsonNumber(float value);

// One line, whatever bytes its strings have.
std::string JsonText(const nlohmann::ordered_json& json);

// Words that pages, logs of events and ps_ctl share.

// "1,041"
std::string Grouped(uint64_t number);
// "0.4 s", "12 s", "4 min", "2 h 5 min", "3 d 4 h".
std::string Spoken(double seconds);
// "12.3", "0.05", "1,234"
std::string SpokenRate(double rate);
// "rank 3 (w3 on host-b)"
std::string WorkerName(const v1::WorkerStatus& worker);
// "wait 1.5 s, forward 0.2 s": the largest first, without those that are less than a hundredth of all.
std::string DescribeTimes(const v1::StepTimes& times);

}  // namespace ps
