# Adds an adapter's program to the build of the tool that it runs (cmake -DCMAKE_PROJECT_INCLUDE=this file), whose libraries then
# bring all that they need to be linked with.
#
# PEER_PROGRAM: its source. PEER_LIBRARIES: targets of the tool. PEER_INCLUDES: directories. PEER_VERSION: what the program tells.
if(CMAKE_CURRENT_SOURCE_DIR STREQUAL CMAKE_SOURCE_DIR AND NOT PEER_IS_ADDED)
    set(PEER_IS_ADDED TRUE)
    # What is deferred is evaluated then.
    set(PEER_ALL_INCLUDES "${CMAKE_CURRENT_LIST_DIR}" ${PEER_INCLUDES})
    cmake_language(DEFER CALL add_executable peer-generate "${PEER_PROGRAM}")
    cmake_language(DEFER CALL target_compile_features peer-generate PRIVATE cxx_std_17)
    cmake_language(DEFER CALL target_compile_definitions peer-generate PRIVATE "PEER_VERSION=\"${PEER_VERSION}\"")
    cmake_language(DEFER CALL target_include_directories peer-generate PRIVATE ${PEER_ALL_INCLUDES})
    cmake_language(DEFER CALL set_target_properties peer-generate PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
    cmake_language(DEFER CALL target_link_libraries peer-generate PRIVATE ${PEER_LIBRARIES})
endif()
