# SPDX-License-Identifier: Apache-2.0
# Builds kvcache_lab with a fault planted in the engine's session and asks that `run --quick` notices, and `recall`
# where the constructed model can: it knows which position answers, not angles.
#   cmake -D FAULT=rope|sinks|heads|slots|none -D CXX=... -D SOURCE=<root> -D BINARY=<build> -D LINK=<objects and libraries>
#         -P planted.cmake
# `none` compiles the copy unchanged and asks that nothing is noticed.
cmake_minimum_required(VERSION 3.24)
set(folder "${BINARY}/lab_planted/${FAULT}")
file(REMOVE_RECURSE "${folder}")
file(MAKE_DIRECTORY "${folder}")
# The faults lie in two files of the session.
if(FAULT STREQUAL "rope")
  set(file session_step.cpp)
else()
  set(file session_drop.cpp)
endif()
file(READ "${SOURCE}/examples/engine/${file}" text)

function(plant before after)
  string(FIND "${text}" "${before}" first)
  string(FIND "${text}" "${before}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "${file} no longer has the one line that the fault ${FAULT} is planted in: ${before}")
  endif()
  string(REPLACE "${before}" "${after}" text "${text}")
  set(text "${text}" PARENT_SCOPE)
endfunction()

if(FAULT STREQUAL "rope")
  # Behind a drop, positions are one too small.
  plant("      positions_.push_back(static_cast<int>(segment.position) + row)"
        "      positions_.push_back(static_cast<int>(segment.position) + row -
                           (static_cast<std::size_t>(s.position) > s.positions[0].size() ? 1 : 0))")
elseif(FAULT STREQUAL "sinks")
  # Sinks from the second token on.
  plant("  return kept;\n}"
        "  for (auto& list : kept)
    for (int i = 0; i < plan.sinks && list.back() > plan.sinks && list[plan.sinks] != plan.sinks; ++i) list[i] = i + 1;
  return kept;\n}")
elseif(FAULT STREQUAL "heads")
  # Two heads of a layer swap what they keep.
  plant("  return kept;\n}" "  for (std::size_t h = 0; h + 1 < kept.size(); h += 3) std::swap(kept[h], kept[h + 1]);\n  return kept;\n}")
elseif(FAULT STREQUAL "slots")
  # What is moved lies one slot behind what is kept.
  plant("lists.insert(lists.end(), list.begin(), list.end());\n"
        "lists.insert(lists.end(), list.begin(), list.end());
  for (std::size_t t = 0; t + 1 < lists.size(); ++t) lists[t] += lists[t] + 1 < lists[t + 1] ? 1 : 0;\n")
elseif(NOT FAULT STREQUAL "none")
  message(FATAL_ERROR "unknown fault: ${FAULT}")
endif()
file(WRITE "${folder}/${file}" "${text}")

string(REPLACE "|" ";" link "${LINK}")
execute_process(
  COMMAND "${CXX}" -std=c++20 -O1 -I "${SOURCE}/examples/engine" -I "${SOURCE}/include" "${folder}/${file}" ${link}
          -o "${folder}/lab"
  RESULT_VARIABLE failed
  ERROR_VARIABLE messages)
if(failed)
  message(FATAL_ERROR "the planted copy does not build: ${messages}")
endif()
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
