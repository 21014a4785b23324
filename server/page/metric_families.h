// The metrics of a server, in Prometheus' terms. Their names are stable; those that begin with ps_debug_ are not.
//
// A counter holds since this generation of the job began on this server, as the snapshot does; Prometheus knows that a
// counter begins anew by its getting smaller. Only the label `rank` grows with the job: it is at the chief only, in no
// histogram, and gone when the rank has left.
#pragma once

#include <string>
#include <vector>

#include <prometheus/metric_family.h>
#include "server/page/page_snapshot.h"

namespace ps {

// Pure. Families without a metric are left out.
std::vector<prometheus::MetricFamily> MetricFamilies(const PageFacts& facts, const PageSnapshot& snapshot);

// In Prometheus' text format, which all of its versions read.
std::string MetricsText(const std::vector<prometheus::MetricFamily>& families);

}  // namespace ps
