// What Prometheus' own clients say of their process: process_cpu_seconds_total and so on.
#pragma once

#include <vector>

#include <prometheus/metric_family.h>

namespace ps {

// From /proc; what it does not tell is left out.
std::vector<prometheus::MetricFamily> ProcessFamilies();

}  // namespace ps
