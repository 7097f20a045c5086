# SPDX-License-Identifier: Apache-2.0
# Faults for the example engine's session, each planted in a copy of one file.
#   include(planted_fault.cmake)
#   build_with_fault(<program>)   compiles the copy and links it into <program>
# Read from the command line: FAULT=rope|sinks|heads|slots|none, CXX, SOURCE=<root>, LINK=<objects and libraries, |>.
# `none` compiles a copy without a fault.
set(planted_rope_file session_step.cpp)
set(planted_sinks_file session_drop.cpp)
set(planted_heads_file session_drop.cpp)
set(planted_slots_file session_drop.cpp)
set(planted_none_file session_drop.cpp)
# Behind a drop, positions are one too small.
set(planted_rope_before "      positions_.push_back(static_cast<int>(segment.position) + row)")
set(planted_rope_after "      positions_.push_back(static_cast<int>(segment.position) + row -
                           (s.position > s.mean_held() ? 1 : 0))")
# Sinks from the second token on.
set(planted_sinks_before "  return kept;\n}")
set(planted_sinks_after "  for (auto& list : kept)
    for (int i = 0; i < plan.sinks && list.back() > plan.sinks && list[plan.sinks] != plan.sinks; ++i) list[i] = i + 1;
  return kept;\n}")
# Two heads of a layer swap what they keep.
set(planted_heads_before "  return kept;\n}")
set(planted_heads_after "  for (std::size_t h = 0; h + 1 < kept.size(); h += 3) std::swap(kept[h], kept[h + 1]);
  return kept;\n}")
# What is moved lies one slot behind what is kept.
set(planted_slots_before "lists.insert(lists.end(), list.begin(), list.end());\n")
set(planted_slots_after "lists.insert(lists.end(), list.begin(), list.end());
  for (std::size_t t = 0; t + 1 < lists.size(); ++t) lists[t] += lists[t] + 1 < lists[t + 1] ? 1 : 0;\n")

if(NOT DEFINED planted_${FAULT}_file)
  message(FATAL_ERROR "unknown fault: ${FAULT}")
endif()

function(build_with_fault program)
  set(file ${planted_${FAULT}_file})
  file(READ "${SOURCE}/examples/engine/${file}" text)
  if(NOT FAULT STREQUAL "none")
    set(before "${planted_${FAULT}_before}")
    string(FIND "${text}" "${before}" first)
    string(FIND "${text}" "${before}" last REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL last)
      message(FATAL_ERROR "${file} no longer has the one place that the fault ${FAULT} is planted in: ${before}")
    endif()
    string(REPLACE "${before}" "${planted_${FAULT}_after}" text "${text}")
  endif()
  file(WRITE "${program}.${file}" "${text}")
  string(REPLACE "|" ";" link "${LINK}")
  execute_process(
    COMMAND "${CXX}" -std=c++20 -O1 -I "${SOURCE}/examples/engine" -I "${SOURCE}/include" "${program}.${file}" ${link}
            -o "${program}"
    RESULT_VARIABLE failed
    ERROR_VARIABLE messages)
  if(failed)
    message(FATAL_ERROR "the planted copy does not build: ${messages}")
  endif()
endfunction()
