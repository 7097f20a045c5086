#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Plants one fault in a copy and requires that the gate stops it, for the right reason; the same gate passes on the
# copy without the fault.   planted.sh SOURCE-DIR BUILD-DIR FAULT
set -euo pipefail
[ $# = 3 ] || { echo "usage: planted.sh SOURCE-DIR BUILD-DIR FAULT" >&2; exit 2; }
source=$1 build=$2 fault=$3
scripts=$source/scripts
work=$build/planted/$fault
rm -rf "$work"
mkdir -p "$work"

passes() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; echo "the copy without a fault was refused: $*"; exit 1; }; }
stops() {  # stops REGEX COMMAND...
  local regex=$1; shift
  if "$@" >"$work/log" 2>&1; then cat "$work/log"; echo "the fault passed: $*"; exit 1; fi
  grep -qE -e "$regex" "$work/log" || { cat "$work/log"; echo "stopped, but not because of '$regex': $*"; exit 1; }
}
# tree: a new copy of what the source checks read.
tree() { rm -rf "$work/tree"; mkdir -p "$work/tree"; cp -a "$source/include" "$source/.clang-format" "$work/tree/"; }
header() {  # header NAME LINE...: adds include/kvcache/NAME with these lines
  local file=$work/tree/include/kvcache/$1; shift
  mkdir -p "$(dirname "$file")"
  printf '%s\n' "// SPDX-License-Identifier: Apache-2.0" "#pragma once" "$@" >"$file"
}
program() {  # program FAULT [CMAKE-ARGS]: configures, builds and runs planted/FAULT.cpp through ctest
  local name=$1 dir=$work/$1; shift
  rm -rf "$dir"
  cmake -G Ninja -S "$source/tests/gates/planted" -B "$dir" -DFAULT="$name" "$@" || return 1
  cmake --build "$dir" || return 1
  (cd "$dir" && ctest --output-on-failure --no-tests=error)
}
fake_tree() {  # fake_tree NAME LINE...: a build tree whose ctest file holds these lines
  local dir=$work/$1; shift
  mkdir -p "$dir"
  printf '%s\n' "$@" >"$dir/CTestTestfile.cmake"
}

case $fault in
  format)
    tree; passes "$scripts/check_format.sh" "$work/tree"
    header core/planted.hpp 'int   badly( int  laid_out ) ;'
    stops 'planted.hpp.*clang-format' "$scripts/check_format.sh" "$work/tree" ;;
  spdx)
    tree; passes "$scripts/check_spdx.sh" "$work/tree"
    echo '#!/bin/sh' >"$work/tree/tool.sh"
    stops 'tool.sh: no .SPDX' "$scripts/check_spdx.sh" "$work/tree" ;;
  layers)
    check=("$scripts/check_layers.py" --root "$work/tree")
    tree; passes "${check[@]}"
    tree; header blocks/planted.hpp; header core/planted.hpp '#include "kvcache/blocks/planted.hpp"'
    stops 'core/planted.hpp:3: upward include' "${check[@]}"
    tree; header prefix/planted.hpp; header blocks/planted.hpp '#include "kvcache/prefix/planted.hpp"'
    stops 'blocks/planted.hpp:3: sideways include' "${check[@]}"
    for name in iostream string functional regex ranges thread; do
      tree; header core/planted.hpp "#include <$name>"; stops "public headers do without <$name>" "${check[@]}"
    done
    tree; header attend/planted.hpp '#include <Eigen/Core>'; stops 'Eigen/Core> belongs in interop' "${check[@]}"
    tree; header core/planted.hpp '#include <dlpack/dlpack.h>'; stops 'belongs in interop' "${check[@]}"
    tree; header attend/planted.hpp '#include <cuda_runtime.h>'; stops 'belongs in cuda' "${check[@]}"
    tree; header attend/planted.hpp '#include <hwy/highway.h>'; stops 'hwy/highway.h> belongs in' "${check[@]}"
    tree; header core/planted.hpp '#include "units.hpp"'; stops 'relative includes hide' "${check[@]}"
    tree; header core/planted.hpp '#include "kvcache/core/nowhere.hpp"'; stops 'does not exist' "${check[@]}"
    tree; header kvcache.h '#include "kvcache/core/units.hpp"'; stops 'kvcache.h stands alone' "${check[@]}"
    tree; header core/planted.hpp '#include "kvcache/kvcache.h"'; stops 'core/planted.hpp:3: upward' "${check[@]}"
    tree; header misc/planted.hpp; stops "folder 'misc' has no layer" "${check[@]}"
    tree; header core/p1.hpp '#include "kvcache/core/p2.hpp"'; header core/p2.hpp '#include "kvcache/core/p1.hpp"'
    stops 'include cycle' "${check[@]}" ;;
  header_size)
    tree; passes "$scripts/check_header_size.sh" "$work/tree"
    mapfile -t lines < <(yes '//' | head -n 399)
    header core/planted.hpp "${lines[@]}"
    stops 'planted.hpp: 401 lines' "$scripts/check_header_size.sh" "$work/tree" ;;
  headers_gcc | headers_clang)
    check=("$scripts/check_headers.sh" g++ gcc "$work/tree")
    if [ $fault = headers_clang ]; then check=("$scripts/check_headers.sh" clang++ clang "$work/tree"); fi
    # A small tree: the real headers are compiled by the gate itself.
    small() { rm -rf "$work/tree"; header core/good.hpp '#include <cstdint>' 'inline int32_t good = 0;'; }
    small; passes "${check[@]}"
    small; header core/planted.hpp 'inline std::int32_t x = 0;'; stops 'planted.hpp: .* c\+\+20' "${check[@]}"
    small; header core/planted.hpp 'static int unused() { return 0; }'; stops 'unused' "${check[@]}"
    small; header core/planted.hpp 'inline void f() { throw 1; }'; stops 'fno-exceptions -fno-rtti' "${check[@]}"
    small; header planted.h 'namespace n {}'; stops 'planted.h: .* c99' "${check[@]}"
    rm -rf "$work/tree"; mkdir -p "$work/tree/include/kvcache"; stops 'no headers' "${check[@]}" ;;
  warnings)
    passes program no_fault; stops 'unused variable' program warning
    clang=(-DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang)
    passes program no_fault "${clang[@]}"; stops 'unused variable' program warning "${clang[@]}" ;;
  asan)
    # The compiler of the asan preset.
    flags=(-DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=Debug "-DKVCACHE_SANITIZE=address;undefined")
    passes program no_fault "${flags[@]}"
    stops 'heap-use-after-free' program use_after_free "${flags[@]}"
    stops 'detected memory leaks' program leak "${flags[@]}"
    stops 'signed integer overflow' program overflow "${flags[@]}" ;;
  tsan)
    flags=(-DCMAKE_BUILD_TYPE=Debug -DKVCACHE_SANITIZE=thread)
    passes program no_fault "${flags[@]}"; stops 'data race' program race "${flags[@]}" ;;
  example)
    passes program no_fault; stops '1 tests? failed out of 1' program failing_example ;;
  bench)
    passes program no_fault_bench -DKIND=bench; stops '1 tests? failed out of 1' program failing_bench -DKIND=bench ;;
  no_exceptions)
    # The consumer of packaging.no_exceptions, against a package with a header that throws.
    cp -a "$build/packaging/static" "$work/prefix"
    consumer() {
      rm -rf "$work/consumer"
      cmake -G Ninja -S "$source/tests/packaging/no_exceptions" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$work/prefix" \
        && cmake --build "$work/consumer"
    }
    passes consumer
    printf '#pragma once\ninline void planted() { throw 1; }\n' >"$work/prefix/include/kvcache/core/planted.hpp"
    stops 'exception' consumer ;;
  find_package)
    # A header that was not installed.
    cp -a "$build/packaging/static" "$work/prefix"
    consumer() {
      rm -rf "$work/consumer"
      cmake -G Ninja -S "$source/examples/consumer" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$work/prefix" \
        && cmake --build "$work/consumer"
    }
    passes consumer
    rm "$work/prefix/include/kvcache/core/units.hpp"
    stops 'units.hpp' consumer ;;
  add_subdirectory)
    mkdir -p "$work/copy/examples"
    cp -a "$source/CMakeLists.txt" "$source/cmake" "$source/include" "$source/LICENSE" "$source/NOTICE" "$work/copy/"
    cp -a "$source/src" "$source/cuda" "$work/copy/"
    vendoring() { cmake -G Ninja -S "$source/tests/packaging/subdirectory" -B "$work/$1" -DKVCACHE_SOURCE="$work/copy"; }
    mkdir -p "$work/copy/examples/consumer"; cp "$source/examples/consumer/main.cpp" "$work/copy/examples/consumer/"
    passes vendoring good
    echo 'set(CMAKE_CXX_FLAGS "-g" PARENT_SCOPE)' >>"$work/copy/CMakeLists.txt"
    stops 'kvcache changed CMAKE_CXX_FLAGS' vendoring bad ;;
  symbols)
    g++ -shared -fPIC -fvisibility=hidden "$source/tests/gates/planted/foreign_symbol.cpp" -o "$work/bad.so"
    stops 'helper_that_leaks' "$scripts/check_symbols.sh" "$work/bad.so"
    g++ -shared -fPIC -fvisibility=hidden -Dhelper_that_leaks=kvc_helper \
      -Wl,--version-script="$source/cmake/kvcache_cpu.map" -Wl,--defsym=kvc_two=kvc_right \
      "$source/tests/gates/planted/foreign_symbol.cpp" -o "$work/good.so"
    passes "$scripts/check_symbols.sh" "$work/good.so" ;;
  cuda)
    passes "$scripts/cuda_resources.py" "$build"
    sed 's/^\(decode f16 128 narrow  *90  *\)[0-9]*/\199/' "$source/cuda/resources.txt" >"$work/resources.txt"
    stops 'decode f16 128 narrow sm_90: .*the table says .99,' "$scripts/cuda_resources.py" "$build" --table "$work/resources.txt"
    sed 's/^decode f16 64 wide .*//' "$source/cuda/resources.txt" >"$work/resources.txt"
    stops 'decode f16 64 wide sm_90: not in resources.txt' "$scripts/cuda_resources.py" "$build" --table "$work/resources.txt"
    sed 's/^\(decode f16 128 wide  *90  *\)[0-9.]*/\10.0100/' "$source/cuda/roofline.txt" >"$work/roofline.txt"
    stops 'decode f16 128 wide sm_90: .*the table says' "$scripts/sass_report.py" "$build/cuda/decode_f16_d128.cu.o" \
      --decode --table "$work/roofline.txt"
    cmake -G Ninja -S "$source" -B "$work/bare" -DKVCACHE_NVCC:FILEPATH= -DKVCACHE_REQUIRE_NVCC=ON >"$work/log"
    stops 'nvcc was not found' ctest --test-dir "$work/bare" -R '^cuda.nvcc$' --output-on-failure ;;
  sources)
    mkdir -p "$work/root/src"
    echo 'int f();' >"$work/root/src/used.cpp"
    fake_tree build 'add_test(example.runs "/bin/true")'
    echo "/bin/true" >"$work/build/example_programs.txt"
    printf '[{"directory":"%s","file":"%s","command":"c++"}]' "$work" "$work/root/src/used.cpp" >"$work/build/compile_commands.json"
    check=("$scripts/check_sources.py" "$work/build" --root "$work/root")
    passes "${check[@]}"
    echo "/x/bin/never_run" >>"$work/build/example_programs.txt"
    stops 'never_run: an example program that no test runs' "${check[@]}"
    echo "/bin/true" >"$work/build/example_programs.txt"
    echo 'int g();' >"$work/root/src/forgotten.cpp"
    stops 'src/forgotten.cpp: no target compiles it' "${check[@]}" ;;
  snippets)
    mkdir -p "$work/root/docs"
    printf '// [a]\nint x;\n// [a]\n' >"$work/root/code.cpp"
    page() { printf '<!-- snippet: code.cpp#%s -->\n```cpp\n%s\n```\n' "$1" "$2" >"$work/root/README.md"; }
    check=("$scripts/check_snippets.py" --root "$work/root")
    page a 'int x;'; passes "${check[@]}"
    page a 'int y;'; stops 'block differs' "${check[@]}"
    page b 'int x;'; stops 'needs exactly two marks' "${check[@]}" ;;
  docs)
    check=("$scripts/check_docs.py" --root "$work/tree")
    # A small tree: the real headers are read by the gate itself.
    page() {  # page LINE...: one good header and one with these lines, the first of them line 5
      rm -rf "$work/tree"
      header core/good.hpp '// Good.' '' '/// Cases.' 'enum { A = 1 };' '/// Anything.' 'template <class T>' 'concept any = true;'
      header core/planted.hpp '// Planted.' '' "$@"
    }
    page '/// One.' 'class one {' '  int hidden;' '};' 'namespace detail { int hidden(); }'; passes "${check[@]}"
    for name in 'int planted();' 'struct planted {};' 'enum class planted { a };' 'enum { planted };' 'using planted = int;' \
      '#define PLANTED 1' 'inline int planted = 0;' 'template <class T> concept planted = true;' \
      'extern "C" { int planted(); }'; do
      page "$name"; stops 'core/planted.hpp:5: .*not documented' "${check[@]}"
    done
    page '/// One.' 'struct one {' '  int planted;' '};'; stops 'planted.hpp:7: .*struct one is not documented' "${check[@]}"
    page '/// One.' 'class one {' ' public:' '  int planted() const;' '};'
    stops 'planted.hpp:8: .*class one is not documented' "${check[@]}"
    page '/// See @nonsense.' 'int planted();'; stops 'unknown command .@nonsense' "${check[@]}"
    page; printf '# One two\n[a](#one-two) [b](docs)\n' >"$work/tree/README.md"; mkdir "$work/tree/docs"; passes "${check[@]}"
    page; printf '# One\n[a](docs/none.md)\n' >"$work/tree/README.md"
    stops 'README.md:2: links to docs/none.md, which' "${check[@]}"
    page; printf '# One\n[a](#two)\n' >"$work/tree/README.md"; stops 'README.md:2: .*heading that does not exist' "${check[@]}"
    page; stops 'doxygen-missing is not installed' "${check[@]}" --doxygen doxygen-missing
    rm -rf "$work/tree/include"; stops 'no headers' "${check[@]}" ;;
  gdb)
    mkdir -p "$work/root/share/gdb" "$work/root/tests"
    cp -a "$source/include" "$work/root/"; cp -a "$source/tests/gdb" "$work/root/tests/"
    cp "$source/share/gdb/kvcache.py" "$work/root/share/gdb/"
    check=(bash "$source/tests/gdb/printers.sh" "$work/root" "$work/run" g++)
    passes "${check[@]}"
    # A printer that shows a wrong length, and a layout that the printers do not know.
    sed -i "s/accepted {int(s\['accepted'\])}/accepted {int(s['held'])}/" "$work/root/share/gdb/kvcache.py"
    stops 'differs from expected.txt' "${check[@]}"
    cp "$source/share/gdb/kvcache.py" "$work/root/share/gdb/"
    sed -i 's/\btop_\b/pile_/g' "$work/root/include/kvcache/cache/sequences.hpp"
    stops 'this layout is not known' "${check[@]}"
    stops 'gdb-missing is not installed' env KVCACHE_GDB=gdb-missing "${check[@]}" ;;
  ctest)
    run=("$scripts/run_ctest.sh" "$work/collect")
    fake_tree good 'add_test(good "true")'
    fake_tree bad 'add_test(bad "false")'
    fake_tree empty ''
    fake_tree missing 'add_test(missing "/nowhere/program")'
    fake_tree skipped 'add_test(skipped "sh" "-c" "exit 77")' 'set_tests_properties(skipped PROPERTIES SKIP_RETURN_CODE 77)'
    fake_tree disabled 'add_test(disabled "true")' 'set_tests_properties(disabled PROPERTIES DISABLED ON)'
    passes "${run[@]}" "$work/good"
    [ "$(tail -n 1 "$work/log")" = "100% tests passed, 0 tests failed out of 1" ] || { cat "$work/log"; exit 1; }
    stops '50% tests passed, 1 tests failed out of 2' "${run[@]}" "$work/good" "$work/bad"
    stops 'registers no test' "${run[@]}" "$work/good" "$work/empty"
    stops 'tests failed out of 2' "${run[@]}" "$work/good" "$work/missing"
    stops 'left tests out' "${run[@]}" "$work/good" "$work/skipped"
    stops 'left tests out' "${run[@]}" "$work/good" "$work/disabled" ;;
  no_case)
    # A test entry whose filter selects nothing would pass for ever.
    passes "$build/bin/support_test" "~[no_such_tag]" -w NoTests
    stops 'No test' "$build/bin/support_test" "[no_such_tag]" -w NoTests ;;
  model)
    check() { bash -c '. "$1/scripts/common.sh"; model_is_right "$2"' - "$source" "$1"; }
    : >"$work/short.gguf"; stops '0 bytes, expected 98362432' check "$work/short.gguf"
    truncate -s 98362432 "$work/zeros.gguf"; stops 'wrong SHA-256' check "$work/zeros.gguf"
    rm "$work/zeros.gguf"
    passes check "$KVCACHE_MODEL" ;;
  *) echo "unknown fault '$fault'" >&2; exit 2 ;;
esac
echo "planted $fault: stopped"
