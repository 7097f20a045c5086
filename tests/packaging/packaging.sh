#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One packaging check per call.   packaging.sh SOURCE-DIR BUILD-DIR CHECK
# Work files are below BUILD-DIR/packaging; `install` fills the prefixes that the other checks use.
set -euo pipefail
[ $# = 3 ] || { echo "usage: packaging.sh SOURCE-DIR BUILD-DIR CHECK" >&2; exit 2; }
source=$1 build=$2 check=$3
here=$source/tests/packaging
work=$build/packaging
static=$work/static shared=$work/shared
export CMAKE_GENERATOR=Ninja CMAKE_BUILD_TYPE=Release
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_C_COMPILER_LAUNCHER=ccache; fi
mkdir -p "$work"

fresh() { rm -rf "${work:?}/$1"; mkdir -p "$work/$1"; }
configure() {  # configure FOLDER SOURCE [ARGS]: a new build folder each time, so that nothing is remembered
  local folder=$1 from=$2; shift 2
  fresh "$folder"
  cmake -S "$from" -B "$work/$folder" "$@" >"$work/$folder/configure.log" 2>&1 || { cat "$work/$folder/configure.log"; return 1; }
}
must_use() {  # must_use FOLDER DIR: the kvcache found lies below DIR, not somewhere on this machine
  grep -qE "^kvcache_DIR:[A-Z]+=$2" "$work/$1/CMakeCache.txt" \
    || { echo "found the wrong kvcache: $(grep ^kvcache_DIR "$work/$1/CMakeCache.txt")"; exit 1; }
}
refuses() {  # refuses REGEX FOLDER SOURCE [ARGS]: configuring fails and says why
  local regex=$1; shift
  if configure "$@" >"$work/refuses-$1.log" 2>&1; then echo "$1: was accepted"; exit 1; fi
  tr '\n' ' ' <"$work/refuses-$1.log" | tr -s ' ' >"$work/refuses-$1.flat"
  grep -qE "$regex" "$work/refuses-$1.flat" || { cat "$work/refuses-$1.log"; echo "$1: no message like '$regex'"; exit 1; }
}
consumer() {  # consumer FOLDER [ARGS]: the example project configures, builds and runs
  local folder=$1; shift
  configure "$folder" "$source/examples/consumer" "$@"
  cmake --build "$work/$folder"
  "$work/$folder/consumer"
}

case $check in
  install)
    for kind in static shared; do
      flag=OFF; if [ $kind = shared ]; then flag=ON; fi
      fresh $kind
      configure build-$kind "$source" -DBUILD_SHARED_LIBS=$flag -DCMAKE_INSTALL_PREFIX="$work/$kind" \
        -DKVCACHE_BUILD_TESTS=OFF -DKVCACHE_BUILD_EXAMPLES=OFF -DKVCACHE_BUILD_BENCH=OFF -DKVCACHE_BUILD_CLI=$flag \
        -DKVCACHE_WITH_CUDA=OFF
      cmake --build "$work/build-$kind" -j "${KVCACHE_JOBS:-2}"
      cmake --install "$work/build-$kind"
      for f in lib/cmake/kvcache/kvcacheConfig.cmake lib/cmake/kvcache/kvcacheCpuTargets.cmake lib/pkgconfig/kvcache.pc \
        lib/pkgconfig/kvcache-cpu.pc share/doc/kvcache/LICENSE include/kvcache/core/config.hpp; do
        find "$work/$kind" -path "*${f#lib}" | grep -q . || { echo "$kind: $f was not installed"; exit 1; }
      done
      # Every public header is installed, and nothing of the build machine is written into the package.
      diff <(cd "$source/include" && find . -name '*.hpp' -o -name '*.h' | sort) \
        <(cd "$work/$kind/include" && find . -type f | sort)
      if grep -rlE "$source|$build" "$work/$kind" --include='*.cmake' --include='*.pc'; then
        echo "$kind: the files above name the build machine's folders"; exit 1
      fi
    done
    # The command comes with the installation that was built with it, and with no other.
    "$shared/bin/kvcache" --version
    if [ -e "$static/bin/kvcache" ]; then echo "static: the command was installed"; exit 1; fi
    test -n "$(find "$shared" -name 'libkvcache_cpu.so.*')" || { echo "no versioned shared library"; exit 1; }
    so=$(find "$shared" -name 'libkvcache_cpu.so')
    readelf -d "$so" | grep -qE 'SONAME.*libkvcache_cpu\.so\.[0-9]+\]' || { echo "SONAME lacks a version"; exit 1; }
    ;;
  find_package)
    for kind in static shared; do
      consumer find-$kind -DCMAKE_PREFIX_PATH="$work/$kind"
      must_use find-$kind "$work/$kind"
    done
    ;;
  build_tree)
    consumer build-tree -Dkvcache_DIR="$build"
    must_use build-tree "$build"
    ;;
  relocated)
    fresh moved
    for kind in static shared; do
      cp -a "$work/$kind" "$work/moved/$kind"
      consumer find-moved -DCMAKE_PREFIX_PATH="$work/moved/$kind"
      must_use find-moved "$work/moved/$kind"
    done
    ;;
  pkg_config)
    fresh moved-pc
    for kind in static shared; do
      cp -a "$work/$kind" "$work/moved-pc/$kind"
      dir=$(dirname "$(find "$work/moved-pc/$kind" -name kvcache.pc)")
      export PKG_CONFIG_PATH=$dir
      pkg-config --exact-version=0.1.0 kvcache
      # shellcheck disable=SC2046
      "${CXX:-g++}" $(pkg-config --cflags kvcache) "$source/examples/consumer/main.cpp" -o "$work/moved-pc/headers-$kind" \
        $(pkg-config --libs kvcache)
      "$work/moved-pc/headers-$kind"
      # shellcheck disable=SC2046
      "${CC:-gcc}" -std=c99 -Wall -Wextra -Werror -I"$work/moved-pc/$kind/include" "$here/c_consumer.c" -o "$work/moved-pc/c-$kind" \
        $(pkg-config --libs kvcache-cpu)
      LD_LIBRARY_PATH=$(dirname "$dir") "$work/moved-pc/c-$kind"
    done
    ;;
  add_subdirectory)
    configure sub "$here/subdirectory" -DKVCACHE_SOURCE="$source"
    cmake --build "$work/sub" -j "${KVCACHE_JOBS:-2}" --target consumer
    "$work/sub/consumer"
    ;;
  no_exceptions)
    for kind in static shared; do
      configure no-exceptions-$kind "$here/no_exceptions" -DCMAKE_PREFIX_PATH="$work/$kind"
      must_use no-exceptions-$kind "$work/$kind"
      cmake --build "$work/no-exceptions-$kind"
      "$work/no-exceptions-$kind/no_exceptions"
    done
    ;;
  exported_symbols)
    "$source/scripts/check_symbols.sh" "$(find "$shared" -name 'libkvcache_cpu.so')"
    ;;
  versions)
    common=("$here/find_only" -DCMAKE_PREFIX_PATH="$static" -DCOMPONENTS=headers)
    for good in "" 0.1 0.1.0; do configure find "${common[@]}" -DVERSION=$good; done
    for bad in 0.0 0.2 0.1.1 1.0; do refuses 'compatible with requested version' find "${common[@]}" -DVERSION=$bad; done
    ;;
  components)
    common=("$here/find_only" -DCMAKE_PREFIX_PATH="$static")
    configure find "${common[@]}" "-DCOMPONENTS=headers;cpu"
    configure find "${common[@]}"
    refuses "component 'cuda9' does not exist; kvcache has: headers, cpu, cuda" find "${common[@]}" "-DCOMPONENTS=headers;cuda9"
    configure find "${common[@]}" -DCOMPONENTS=cuda9 -DQUIET_LOOK=ON
    grep -q 'kvcache_FOUND=0' "$work/find/configure.log" || { cat "$work/find/configure.log"; exit 1; }
    # An installation without the compiled part, and so without what attends.
    refuses "KVCACHE_BUILD_TESTS is ON but KVCACHE_BUILD_CPU is OFF, which it needs" refused-headers "$source" \
      -DKVCACHE_BUILD_CPU=OFF -DKVCACHE_BUILD_TESTS=ON
    configure build-headers "$source" -DKVCACHE_BUILD_CPU=OFF -DKVCACHE_WITH_CUDA=OFF -DCMAKE_INSTALL_PREFIX="$work/headers" \
      -DKVCACHE_BUILD_CLI=OFF
    fresh headers
    cmake --install "$work/build-headers" >/dev/null
    refuses "component 'cuda' was not built into this installation" find "$here/find_only" \
      -DCMAKE_PREFIX_PATH="$static" -DCOMPONENTS=cuda
    consumer find-headers -DCMAKE_PREFIX_PATH="$work/headers"
    refuses "component 'cpu' was not built into this installation" find "$here/find_only" \
      -DCMAKE_PREFIX_PATH="$work/headers" -DCOMPONENTS=cpu
    ;;
  cuda)
    for kind in static shared; do
      flag=OFF; if [ $kind = shared ]; then flag=ON; fi
      fresh cuda-$kind
      configure build-cuda-$kind "$source" -DBUILD_SHARED_LIBS=$flag -DCMAKE_INSTALL_PREFIX="$work/cuda-$kind" \
        -DKVCACHE_BUILD_TESTS=OFF -DKVCACHE_BUILD_EXAMPLES=OFF -DKVCACHE_BUILD_BENCH=OFF -DKVCACHE_BUILD_CLI=OFF \
        -DKVCACHE_CUDA_DIMS=64 -DKVCACHE_CUDA_ARCHITECTURES=90
      cmake --build "$work/build-cuda-$kind" -j "${KVCACHE_JOBS:-2}"
      cmake --install "$work/build-cuda-$kind" >/dev/null
      configure use-cuda-$kind "$here/cuda" -DCMAKE_PREFIX_PATH="$work/cuda-$kind"
      must_use use-cuda-$kind "$work/cuda-$kind"
      cmake --build "$work/use-cuda-$kind"
      "$work/use-cuda-$kind/consumer"
    done
    "$source/scripts/check_symbols.sh" "$(find "$work/cuda-shared" -name 'libkvcache_cuda.so')"
    ;;
  *) echo "unknown check '$check'" >&2; exit 2 ;;
esac
echo "packaging $check: ok"
