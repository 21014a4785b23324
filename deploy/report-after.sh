#!/bin/sh
# Runs a command. If it succeeds, prints the table of the run whose metrics are in FOLDER, and saves it there as report.md.
#
#   report-after FOLDER COMMAND...
#
# SIGTERM and SIGINT go to the command. Exit status: the command's.
folder=$1
shift
"$@" &
pid=$!
trap 'kill -TERM "$pid" 2>/dev/null' TERM INT
wait "$pid"
status=$?
# `wait` also returns when a signal was passed on, while the command is still running.
while kill -0 "$pid" 2>/dev/null; do
  wait "$pid"
  status=$?
done
if [ "$status" -eq 0 ]; then ps_ctl report "$folder" | tee "$folder/report.md"; fi
exit "$status"
