#!/usr/bin/env bash
# Compares synchronous and asynchronous training on this machine: one job under several modes and conditions, with
# several seeds, and a report of what each gains and costs.
#
#   deploy/compare.sh [--no-build] [--FLAG=VALUE …]    deploy/compare.sh --help lists the flags
#   deploy/compare.sh report OUTPUT                    writes the report of a comparison anew
#
# On a fresh Debian 12: as root or with sudo, for the packages, unless --no-build says that all is there. Exit status: 0
# all runs are made, also where some diverged or did not learn; 1 one failed or timed out, or nothing could be run; 2
# wrong flags; 130 interrupted (143 by SIGTERM). The same command goes on, and makes what failed again.
exec bash "$(dirname "${BASH_SOURCE[0]}")/experiments.sh" compare "$@"
