#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs nvcc and keeps what ptxas says about registers and memory beside the object.   compile.sh LOG NVCC ARGS...
log=$1; shift
"$@" -Xptxas=-v >"$log" 2>&1 || { code=$?; grep -vE '^$|Compiling entry|Function properties|bytes (gmem|stack frame)|Used [0-9]+ registers|Compile time' "$log" >&2; rm -f "$log"; exit $code; }
