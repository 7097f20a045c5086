#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares the decode kernels' main loops with the committed table.   roofline.sh SOURCE-DIR BUILD-DIR
set -euo pipefail
exec python3 "$1/scripts/sass_report.py" "$2"/cuda/decode_*.cu.o --decode --table "$1/cuda/roofline.txt"
