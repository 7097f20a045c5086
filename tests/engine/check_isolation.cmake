# SPDX-License-Identifier: Apache-2.0
# Fails if an object file shares inline code with others: a weak symbol outside its own Eigen namespace could be
# picked by the linker for callers that run on machines without the object's instruction set.
#   cmake -D NM=nm -D OBJECT=file.o -P check_isolation.cmake
execute_process(COMMAND ${NM} -C --defined-only ${OBJECT} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
if(failed OR symbols STREQUAL "")
  message(FATAL_ERROR "cannot list the symbols of ${OBJECT}")
endif()
string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
foreach(symbol IN LISTS weak)
  # The personality reference is data that every copy agrees on; Eigen_<target> is the object's own.
  if(NOT symbol MATCHES "DW\\.ref\\.__gxx_personality_v0" AND NOT symbol MATCHES "Eigen_[a-z0-9]+::")
    message(FATAL_ERROR "${OBJECT} shares this symbol with other files: ${symbol}")
  endif()
endforeach()
