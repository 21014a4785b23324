#!/bin/sh
# Runs the command (ccache and a compiler) once the file that it writes (-o) is gone. Else ccache takes the old precompiled
# header for a part of what is compiled, and may answer with it though a header in it has changed since.
previous=
for argument; do
  if [ "$previous" = -o ]; then rm -f "$argument"; fi
  previous=$argument
done
exec "$@"
