# SPDX-License-Identifier: Apache-2.0
# Builds kvcache_lab with a fault planted in the engine's session and asks that `run --quick` notices, and `recall`
# where the constructed model can: it knows which position answers, not angles.
#   cmake -D FAULT=rope|sinks|heads|slots|none -D CXX=... -D SOURCE=<root> -D BINARY=<build> -D LINK=<objects and libraries>
#         -P planted.cmake
# `none` compiles the copy unchanged and asks that nothing is noticed.
cmake_minimum_required(VERSION 3.24)
include("${SOURCE}/tests/support/planted_fault.cmake")
set(folder "${BINARY}/lab_planted/${FAULT}")
file(REMOVE_RECURSE "${folder}")
file(MAKE_DIRECTORY "${folder}")
build_with_fault("${folder}/lab")
execute_process(
  COMMAND "${folder}/lab" run --quick --task kl --threads 2 --text-file "${SOURCE}/tests/data/text.txt" --out
          "${folder}/out" --json
  RESULT_VARIABLE code
  OUTPUT_VARIABLE out
  ERROR_VARIABLE messages)
if(FAULT STREQUAL "none")
  if(NOT code EQUAL 0 OR NOT messages MATCHES "figures are as known")
    message(FATAL_ERROR "without a fault the run ended with ${code}: ${out} ${messages}")
  endif()
elseif(NOT code EQUAL 1 OR NOT out MATCHES "figure_differs")
  message(FATAL_ERROR "the fault ${FAULT} was not noticed: code ${code}, ${messages}")
endif()

# Every token of a short text is asked for.
execute_process(
  COMMAND "${folder}/lab" recall --length 256 --asked 256 --policy streaming_llm:sinks=4,window=60,positions=text --policy
          h2o:heavy=32,recent=32 --json
  RESULT_VARIABLE code
  OUTPUT_VARIABLE out
  ERROR_VARIABLE messages)
if(FAULT MATCHES "^(none|rope|heads)$")
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "recall ended with ${code}: ${out} ${messages}")
  endif()
elseif(NOT code EQUAL 1 OR NOT out MATCHES "differs")
  message(FATAL_ERROR "recall did not notice the fault ${FAULT}: code ${code}, ${out} ${messages}")
endif()
