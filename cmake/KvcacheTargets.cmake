# SPDX-License-Identifier: Apache-2.0
# Functions that every folder uses to define its targets, so that warnings, output folder and test environment
# are decided in one place.
include_guard(GLOBAL)

# kvcache_target_defaults(<target>): what holds for every compiled target of this repository.
function(kvcache_target_defaults target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF
               C_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               C_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON)
  # A project that merely includes kvcache may use a compiler we have not seen; new warnings must not stop it.
  if(PROJECT_IS_TOP_LEVEL)
    target_compile_options(${target} PRIVATE -Wall -Wextra -Werror)
    # g++ 12 takes "text" + std::to_string(n) for a copy that overlaps (GCC bug 105651).
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      target_compile_options(${target} PRIVATE -Wno-restrict)
    endif()
  endif()
endfunction()

# Executable in <build>/bin with the defaults above.
function(kvcache_executable name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "${name}: SOURCES is needed and '${arg_UNPARSED_ARGUMENTS}' is not understood")
  endif()
  add_executable(${name} ${arg_SOURCES})
  kvcache_target_defaults(${name})
  target_link_libraries(${name} PRIVATE kvcache::kvcache ${arg_LIBRARIES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${kvcache_BINARY_DIR}/bin")
endfunction()

# kvcache_add_program(<name> SOURCES <file>... [LIBRARIES <target>...]): a program a person runs.
# Programs under examples/ are listed for the gate that asks whether a test runs each of them.
function(kvcache_add_program name)
  kvcache_executable(${name} ${ARGN})
  cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR BASE_DIRECTORY "${kvcache_SOURCE_DIR}" OUTPUT_VARIABLE folder)
  if(folder MATCHES "^examples(/|$)")
    set_property(GLOBAL APPEND PROPERTY KVCACHE_EXAMPLE_PROGRAMS "$<TARGET_FILE:${name}>")
  endif()
endfunction()

# kvcache_run_example(<program> [NAME <suffix>] [ARGS <word>...] [LABELS <label>...] [TIMEOUT <seconds>])
# A ctest entry that runs an example program and expects exit code 0.
function(kvcache_run_example program)
  cmake_parse_arguments(arg "" "NAME;TIMEOUT" "ARGS;LABELS" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${program}: '${arg_UNPARSED_ARGUMENTS}' is not understood")
  endif()
  kvcache_test_wanted(wanted example ${arg_LABELS})
  if(KVCACHE_BUILD_TESTS AND wanted)
    set(name example.${program})
    if(arg_NAME)
      string(APPEND name .${arg_NAME})
    endif()
    kvcache_register_test(
      ${name} COMMAND $<TARGET_FILE:${program}> ${arg_ARGS} LABELS example ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
  endif()
endfunction()

# Sets <out> to ON if a test with these labels belongs to this build tree (KVCACHE_TEST_ONLY, KVCACHE_TEST_EXCEPT).
function(kvcache_test_wanted out)
  set(wanted ON)
  if(KVCACHE_TEST_ONLY)
    set(wanted OFF)
  endif()
  foreach(label IN LISTS ARGN)
    if(label IN_LIST KVCACHE_TEST_ONLY)
      set(wanted ON)
    endif()
  endforeach()
  foreach(label IN LISTS ARGN)
    if(label IN_LIST KVCACHE_TEST_EXCEPT)
      set(wanted OFF)
    endif()
  endforeach()
  set(${out} ${wanted} PARENT_SCOPE)
endfunction()

# kvcache_register_test(<name> COMMAND <word>... [LABELS <label>...] [TIMEOUT <seconds>] [RUN_SERIAL])
# One ctest entry with the environment every test gets.
function(kvcache_register_test name)
  cmake_parse_arguments(arg "RUN_SERIAL" "TIMEOUT" "COMMAND;LABELS" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_COMMAND)
    message(FATAL_ERROR "${name}: COMMAND is needed and '${arg_UNPARSED_ARGUMENTS}' is not understood")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  set(full "${KVCACHE_TEST_PREFIX}${name}")
  add_test(NAME "${full}" COMMAND ${KVCACHE_TEST_LAUNCHER} ${arg_COMMAND} WORKING_DIRECTORY "${kvcache_BINARY_DIR}")
  # COST: ctest starts the longest first, so that none of them runs alone at the end.
  # allocator_may_return_null: that an allocation fails is a value here, also under a sanitizer.
  set_tests_properties(
    "${full}"
    PROPERTIES LABELS "${arg_LABELS}"
               TIMEOUT ${arg_TIMEOUT}
               COST ${arg_TIMEOUT}
               RUN_SERIAL "${arg_RUN_SERIAL}"
               ENVIRONMENT
               "KVCACHE_MODEL=${KVCACHE_MODEL};KVCACHE_TEST_EFFORT=${KVCACHE_TEST_EFFORT};\
ASAN_OPTIONS=detect_stack_use_after_return=1:allocator_may_return_null=1;UBSAN_OPTIONS=print_stacktrace=1;\
TSAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1")
endfunction()

# kvcache_add_test(<name> SOURCES <file>... [LIBRARIES <target>...] [LABELS <label>...] [TIMEOUT <seconds>]
#                  [SPLIT <tag>...] [RUN_SERIAL])
# A Catch2 program (its main comes from tests/support) and one ctest entry that runs it. Each tag in SPLIT makes
# one more entry, `<name>.<tag>`, which runs the cases tagged [tag] and carries the label <tag>; the first
# entry then leaves them out. Labels with a meaning to the gates:
#   threads  starts threads: also run under ThreadSanitizer
#   model    needs the real model and takes long: left out of the sanitizer builds
#   sample   needs the real model, short: part of every build
function(kvcache_add_test name)
  cmake_parse_arguments(arg "RUN_SERIAL" "TIMEOUT" "SOURCES;LIBRARIES;LABELS;SPLIT" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${name}: '${arg_UNPARSED_ARGUMENTS}' is not understood")
  endif()
  set(serial "")
  if(arg_RUN_SERIAL)
    set(serial RUN_SERIAL)
  endif()

  set(first_filter "")
  foreach(tag IN LISTS arg_SPLIT)
    string(APPEND first_filter "~[${tag}]")
  endforeach()
  kvcache_test_wanted(any ${arg_LABELS})
  set(first_wanted ${any})
  foreach(tag IN LISTS arg_SPLIT)
    kvcache_test_wanted(split_wanted ${arg_LABELS} ${tag})
    set(wanted_${tag} ${split_wanted})
    if(split_wanted)
      set(any ON)
    endif()
  endforeach()
  if(NOT any)
    return()
  endif()

  kvcache_executable(${name} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES} kvcache_catch_main)
  # -w NoTests: an entry that selects no case is an error, not a success.
  if(first_wanted)
    kvcache_register_test(
      ${name} COMMAND $<TARGET_FILE:${name}> ${first_filter} -w NoTests
      LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT} ${serial})
  endif()
  foreach(tag IN LISTS arg_SPLIT)
    if(wanted_${tag})
      kvcache_register_test(
        ${name}.${tag} COMMAND $<TARGET_FILE:${name}> "[${tag}]" -w NoTests
        LABELS ${arg_LABELS} ${tag} TIMEOUT ${arg_TIMEOUT} ${serial})
    endif()
  endforeach()
endfunction()

# kvcache_add_bench(<name> SOURCES <file>... [LIBRARIES <target>...]): a Google Benchmark program. A ctest entry
# runs it briefly, so that a benchmark that no longer works is noticed. Include path: bench/. The target
# `benchmarks` builds all of them.
function(kvcache_add_bench name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES" ${ARGN})
  kvcache_executable(${name} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES} benchmark::benchmark_main)
  target_include_directories(${name} PRIVATE "${kvcache_SOURCE_DIR}/bench")
  if(NOT TARGET benchmarks)
    add_custom_target(benchmarks)
  endif()
  add_dependencies(benchmarks ${name})
  if(KVCACHE_BUILD_TESTS)
    kvcache_test_wanted(wanted bench)
    if(wanted)
      kvcache_register_test(
        bench.${name} COMMAND ${CMAKE_COMMAND} -E env KVCACHE_BENCH_QUICK=1 $<TARGET_FILE:${name}>
        --benchmark_min_time=0.01 LABELS bench TIMEOUT 300)
      # A benchmark that gives up still exits with 0.
      set_tests_properties("${KVCACHE_TEST_PREFIX}bench.${name}" PROPERTIES FAIL_REGULAR_EXPRESSION "ERROR OCCURRED")
    endif()
  endif()
endfunction()

# Includes every folder below the current one that has a CMakeLists.txt, in alphabetical order.
function(kvcache_add_subfolders)
  cmake_parse_arguments(arg "" "" "EXCEPT" ${ARGN})
  file(GLOB lists CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*/CMakeLists.txt")
  foreach(list IN LISTS lists)
    cmake_path(GET list PARENT_PATH folder)
    cmake_path(GET folder FILENAME leaf)
    if(NOT leaf IN_LIST arg_EXCEPT)
      add_subdirectory(${leaf})
    endif()
  endforeach()
endfunction()
