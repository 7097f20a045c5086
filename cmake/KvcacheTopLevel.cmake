# SPDX-License-Identifier: Apache-2.0
# Settings for a build of kvcache itself; never read when kvcache is part of another project.
include_guard(GLOBAL)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

find_program(KVCACHE_CCACHE ccache)
mark_as_advanced(KVCACHE_CCACHE)
if(KVCACHE_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${KVCACHE_CCACHE}")
  set(CMAKE_C_COMPILER_LAUNCHER "${KVCACHE_CCACHE}")
endif()

if(KVCACHE_SANITIZE)
  list(JOIN KVCACHE_SANITIZE "," kvcache_sanitize_list)
  add_compile_options(-fsanitize=${kvcache_sanitize_list} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${kvcache_sanitize_list})
endif()

# ThreadSanitizer of g++ 12 cannot place its shadow memory where the kernel randomises addresses by more than 28
# bits; there its programs run without randomisation.
set(KVCACHE_TEST_LAUNCHER "")
if("thread" IN_LIST KVCACHE_SANITIZE AND EXISTS /proc/sys/vm/mmap_rnd_bits)
  file(READ /proc/sys/vm/mmap_rnd_bits kvcache_random_bits)
  if(kvcache_random_bits GREATER 28)
    set(KVCACHE_TEST_LAUNCHER setarch --addr-no-randomize)
  endif()
endif()

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
