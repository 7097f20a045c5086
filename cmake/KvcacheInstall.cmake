# SPDX-License-Identifier: Apache-2.0
# Install rules and exports. Each component has its own export set, so that an engine that wants only the headers
# never meets the compiled part's dependencies. The same config file serves the install and the build tree.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

set(kvcache_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvcache")
set(kvcache_pc_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

# <prefix>/<dir of .pc files> -> <prefix>, so that a moved prefix still works.
set(kvcache_pc_base "/kvcache-prefix")
cmake_path(RELATIVE_PATH kvcache_pc_base BASE_DIRECTORY "/kvcache-prefix/${kvcache_pc_dir}" OUTPUT_VARIABLE
           kvcache_pc_up)

# Headers.
set_target_properties(kvcache PROPERTIES EXPORT_NAME kvcache)
install(TARGETS kvcache EXPORT kvcacheTargets FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT kvcacheTargets NAMESPACE kvcache:: DESTINATION "${kvcache_cmake_dir}")
export(EXPORT kvcacheTargets NAMESPACE kvcache:: FILE "${kvcache_BINARY_DIR}/kvcacheTargets.cmake")
configure_file(cmake/kvcache.pc.in kvcache.pc @ONLY)
install(FILES "${kvcache_BINARY_DIR}/kvcache.pc" DESTINATION "${kvcache_pc_dir}")

# Compiled data plane.
set(KVCACHE_CPU_DEPENDENCIES "")
set(kvcache_version_arch ARCH_INDEPENDENT)
if(TARGET kvcache_cpu)
  set(kvcache_version_arch "")
  set_target_properties(kvcache_cpu PROPERTIES EXPORT_NAME cpu VERSION ${PROJECT_VERSION} SOVERSION
                                                                                  ${KVCACHE_SOVERSION})
  install(
    TARGETS kvcache_cpu
    EXPORT kvcacheCpuTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  install(EXPORT kvcacheCpuTargets NAMESPACE kvcache:: DESTINATION "${kvcache_cmake_dir}")
  export(EXPORT kvcacheCpuTargets NAMESPACE kvcache:: FILE "${kvcache_BINARY_DIR}/kvcacheCpuTargets.cmake")

  # A shared library carries its own dependencies; a static one hands them to whoever links it.
  set(KVCACHE_CPU_REQUIRES_PRIVATE "")
  get_target_property(kvcache_cpu_type kvcache_cpu TYPE)
  get_target_property(kvcache_cpu_links kvcache_cpu LINK_LIBRARIES)
  if(kvcache_cpu_type STREQUAL "STATIC_LIBRARY")
    if(kvcache_cpu_links MATCHES "hwy")
      string(APPEND KVCACHE_CPU_DEPENDENCIES "find_dependency(hwy)\n")
      string(APPEND KVCACHE_CPU_REQUIRES_PRIVATE "libhwy")
    endif()
    if(kvcache_cpu_links MATCHES "Threads::Threads")
      string(APPEND KVCACHE_CPU_DEPENDENCIES "find_dependency(Threads)\n")
    endif()
  endif()
  set(kvcache_pc_static "")
  if(kvcache_cpu_type STREQUAL "STATIC_LIBRARY")
    # Without a shared library there is no other way to link, so the private part is always needed.
    set(kvcache_pc_requires "kvcache = ${PROJECT_VERSION} ${KVCACHE_CPU_REQUIRES_PRIVATE}")
    set(kvcache_pc_libs " -lstdc++ -lm")
  else()
    set(kvcache_pc_requires "kvcache = ${PROJECT_VERSION}")
    set(kvcache_pc_libs "")
  endif()
  configure_file(cmake/kvcache-cpu.pc.in kvcache-cpu.pc @ONLY)
  install(FILES "${kvcache_BINARY_DIR}/kvcache-cpu.pc" DESTINATION "${kvcache_pc_dir}")
endif()

# CUDA data plane. A static library hands the CUDA runtime on to whoever links it.
if(TARGET kvcache_cuda)
  set(kvcache_version_arch "")
  set_target_properties(kvcache_cuda PROPERTIES EXPORT_NAME cuda)
  install(
    TARGETS kvcache_cuda
    EXPORT kvcacheCudaTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  install(EXPORT kvcacheCudaTargets NAMESPACE kvcache:: DESTINATION "${kvcache_cmake_dir}")
  export(EXPORT kvcacheCudaTargets NAMESPACE kvcache:: FILE "${kvcache_BINARY_DIR}/kvcacheCudaTargets.cmake")
  get_target_property(kvcache_cuda_type kvcache_cuda TYPE)
  set(KVCACHE_CUDA_DEPENDENCIES "")
  if(kvcache_cuda_type STREQUAL "STATIC_LIBRARY")
    set(KVCACHE_CUDA_DEPENDENCIES "find_dependency(CUDAToolkit)\n")
  endif()
endif()

configure_package_config_file(
  cmake/kvcacheConfig.cmake.in "${kvcache_BINARY_DIR}/kvcacheConfig.cmake"
  INSTALL_DESTINATION "${kvcache_cmake_dir}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
  "${kvcache_BINARY_DIR}/kvcacheConfigVersion.cmake" COMPATIBILITY SameMinorVersion ${kvcache_version_arch})
install(FILES "${kvcache_BINARY_DIR}/kvcacheConfig.cmake" "${kvcache_BINARY_DIR}/kvcacheConfigVersion.cmake"
        DESTINATION "${kvcache_cmake_dir}")
install(FILES LICENSE NOTICE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
# A header-only library has no file that gdb could auto-load printers for: they are loaded by `source`.
install(FILES share/gdb/kvcache.py DESTINATION "${CMAKE_INSTALL_DATADIR}/kvcache/gdb")
