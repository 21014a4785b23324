# What `cmake --install` puts where, so that find_package(ps) finds the client library.
include(CMakePackageConfigHelpers)
set(PS_PACKAGE_FOLDER ${CMAKE_INSTALL_LIBDIR}/cmake/ps)
foreach(part client link common local wire proto)
  set_target_properties(ps_${part} PROPERTIES EXPORT_NAME ${part})
endforeach()
install(TARGETS ps_client ps_link ps_common ps_local ps_wire ps_proto EXPORT psTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES common/include/ps/data_summary.h common/include/ps/schedule.h common/include/ps/tensor.h common/include/ps/wire_type.h worker/client/include/ps/client.h worker/client/include/ps/observer.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ps)
install(FILES proto/ps/v1/ps.proto proto/ps/v1/local.proto DESTINATION ${CMAKE_INSTALL_DATADIR}/ps/proto/ps/v1)
install(EXPORT psTargets NAMESPACE ps:: DESTINATION ${PS_PACKAGE_FOLDER})
configure_package_config_file(cmake/psConfig.cmake.in ${PROJECT_BINARY_DIR}/psConfig.cmake
                              INSTALL_DESTINATION ${PS_PACKAGE_FOLDER})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/psConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/psConfig.cmake ${PROJECT_BINARY_DIR}/psConfigVersion.cmake
        DESTINATION ${PS_PACKAGE_FOLDER})

# Man pages and what bash completes are made by the programs themselves, from the table that makes --help.
foreach(program ps_server ps_worker ps_ctl)
  foreach(form man bash)
    install(CODE "execute_process(COMMAND $<TARGET_FILE:${program}> --help=${form}
      OUTPUT_FILE ${PROJECT_BINARY_DIR}/${program}.${form} COMMAND_ERROR_IS_FATAL ANY)")
  endforeach()
  install(FILES ${PROJECT_BINARY_DIR}/${program}.man DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 RENAME ${program}.1)
  install(FILES ${PROJECT_BINARY_DIR}/${program}.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
          RENAME ${program})
endforeach()
