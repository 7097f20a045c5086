# SPDX-License-Identifier: Apache-2.0
# Builds a test of this folder with a fault planted in the engine's session, and asks that the test fails.
#   cmake -D FAULT=... -D NAME=<test> -D CASES=<names> -D CXX=... -D SOURCE=<root> -D BINARY=<build> -D LINK=...
#         -P planted.cmake
# `none` compiles the copy unchanged and asks that the test passes.
cmake_minimum_required(VERSION 3.24)
include("${SOURCE}/tests/support/planted_fault.cmake")
set(folder "${BINARY}/retain_planted/${NAME}.${FAULT}")
file(REMOVE_RECURSE "${folder}")
file(MAKE_DIRECTORY "${folder}")
build_with_fault("${folder}/test")
execute_process(COMMAND "${folder}/test" "${CASES}" -w NoTests RESULT_VARIABLE code OUTPUT_VARIABLE out)
if(FAULT STREQUAL "none")
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "without a fault the test ended with ${code}: ${out}")
  endif()
elseif(NOT code MATCHES "^[0-9]+$" OR code EQUAL 0 OR NOT out MATCHES "test cases: .* failed")
  message(FATAL_ERROR "${NAME} did not notice the fault ${FAULT}: code ${code}, ${out}")
endif()
