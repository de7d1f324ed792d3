# moepool for C and C++ programs: find_package(moepool CONFIG) gives the target moepool::moepool.
#
#     cmake -S . -B build -Dmoepool_DIR="$(python3 -c 'import moepool, os; print(os.path.dirname(moepool.__file__))')/cmake"
get_filename_component(_moepool_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

if(NOT EXISTS "${_moepool_root}/lib/libmoepool.so" OR NOT EXISTS "${_moepool_root}/include/moepool.h")
  set(moepool_FOUND FALSE)
  set(moepool_NOT_FOUND_MESSAGE "moepool is not built: ${_moepool_root}/lib/libmoepool.so or its header is missing")
  return()
endif()

if(NOT TARGET moepool::moepool)
  add_library(moepool::moepool SHARED IMPORTED)
  set_target_properties(moepool::moepool PROPERTIES
    IMPORTED_LOCATION "${_moepool_root}/lib/libmoepool.so"
    IMPORTED_SONAME "libmoepool.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_moepool_root}/include")
endif()
unset(_moepool_root)
