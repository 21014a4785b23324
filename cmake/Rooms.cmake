# A room: a folder whose sources are a library of their own, and which says which other rooms it may include. What it
# includes beside those ends the build. A folder without this call may include any.
#
# ps_room(TARGET [USES ROOM...] [SOURCES FILE...]): for the folder of the CMakeLists.txt that calls it. USES names folders of the
# project, as `server/engine`; these are all that it may include of server/, worker/ and python/ beside itself. Libraries are
# linked as ever, with target_link_libraries.
function(ps_room target)
  cmake_parse_arguments(ARG "" "" "USES;SOURCES" ${ARGN})
  file(RELATIVE_PATH room ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  if(ARG_SOURCES)
    add_library(${target} STATIC ${ARG_SOURCES})
  else()
    add_library(${target} INTERFACE)
  endif()
  file(GLOB_RECURSE files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.h ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  set(stamp ${CMAKE_CURRENT_BINARY_DIR}/${target}.room)
  string(REPLACE ";" "," uses "${ARG_USES}")
  add_custom_command(OUTPUT ${stamp}
    COMMAND ${CMAKE_COMMAND} -DROOM=${room} -DUSES=${uses} -DROOT=${PROJECT_SOURCE_DIR} -DSTAMP=${stamp}
            -P ${PROJECT_SOURCE_DIR}/cmake/CheckRoom.cmake
    DEPENDS ${files} ${PROJECT_SOURCE_DIR}/cmake/CheckRoom.cmake
    COMMENT "Checking what ${room} includes"
    VERBATIM)
  add_custom_target(${target}_room DEPENDS ${stamp})
  add_dependencies(${target} ${target}_room)
endfunction()
