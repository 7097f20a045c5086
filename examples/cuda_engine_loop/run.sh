#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the program: exit code 0 on a machine with a GPU; without one it has to say so and exit with 1.   run.sh PROGRAM
set -uo pipefail
text=$("$1" 2>&1)
code=$?
echo "$text"
if [ -e /dev/nvidiactl ]; then exit $code; fi
[ $code = 1 ] && grep -q '^no GPU: ' <<<"$text"
