# Leaves AMX out of llama.cpp where the compiler miscompiles it (see probe.cpp). Reaches CMake as CMAKE_PROJECT_INCLUDE
# (.cargo/config.toml sets it, and llama-cpp-sys-2 passes on what begins with CMAKE_), so it runs after each project().
#
# The environment variable HOBBIT_AMX forces the answer: `on` (keep it), `off` (leave it out); otherwise `auto`. Cargo
# does not see that variable for llama-cpp-sys-2: after a change, `cargo clean --release -p llama-cpp-sys-2`.
# (ggml-sys's build script notices, and says so.)
#
# The answer stays in CMakeCache.txt, for that build script to report:
#   HOBBIT_AMX_ASKED    auto, on, off
#   HOBBIT_AMX_WANTED   whether any part of this build would have AMX
#   HOBBIT_AMX          kept, left-out, unknown-to-compiler
#   HOBBIT_AMX_COMPILER name and version

set(hobbit_amx_directory "${CMAKE_CURRENT_LIST_DIR}")

# Compiles probe.cpp into an archive; `compiled` says whether that went well, `has_mark` whether the mark is in it.
function(hobbit_amx_compile compiled has_mark)
    set(archive "${CMAKE_BINARY_DIR}/CMakeFiles/hobbit_amx_probe.a")
    # An archive needs no main. Release, because its flags come behind those given here.
    set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
    set(CMAKE_TRY_COMPILE_CONFIGURATION Release)
    unset(HOBBIT_AMX_COMPILED CACHE)
    # No debug information and no intermediate code: they would hold, or hide, the mark.
    try_compile(HOBBIT_AMX_COMPILED "${CMAKE_BINARY_DIR}/CMakeFiles/hobbit_amx" "${hobbit_amx_directory}/probe.cpp"
        COMPILE_DEFINITIONS ${ARGN} -O3 -g0 -fno-lto
        COPY_FILE "${archive}" COPY_FILE_ERROR copy_error)
    set(found FALSE)
    if (HOBBIT_AMX_COMPILED AND NOT copy_error)
        file(READ "${archive}" bytes HEX)
        if (bytes MATCHES "5d5c5b5a")
            set(found TRUE)
        endif()
        file(REMOVE "${archive}")
    endif()
    set(${compiled} ${HOBBIT_AMX_COMPILED} PARENT_SCOPE)
    set(${has_mark} ${found} PARENT_SCOPE)
    unset(HOBBIT_AMX_COMPILED CACHE)
endfunction()

# Whether AMX would be in this build: in any part of it, under any of the flags that ggml's lists know.
function(hobbit_amx_wanted result)
    set(flags)
    if (GGML_NATIVE)
        list(APPEND flags -march=native)
    endif()
    if (GGML_AMX_INT8)
        list(APPEND flags -mamx-int8)
    endif()
    hobbit_amx_compile(wanted unused -DHOBBIT_AMX_WANTED ${flags})
    if (wanted OR GGML_CPU_ALL_VARIANTS)
        set(${result} ON PARENT_SCOPE)
    else()
        set(${result} OFF PARENT_SCOPE)
    endif()
endfunction()

function(hobbit_amx_decide)
    set(asked auto)
    if (NOT "$ENV{HOBBIT_AMX}" STREQUAL "")
        set(asked "$ENV{HOBBIT_AMX}")
    endif()
    if (NOT asked MATCHES "^(auto|on|off)$")
        message(FATAL_ERROR "HOBBIT_AMX is '${asked}': expected auto, on or off")
    endif()

    hobbit_amx_compile(known control -DHOBBIT_AMX_CONTROL -mamx-tile)
    if (NOT known)
        set(answer unknown-to-compiler)
        set(wanted OFF)
    else()
        hobbit_amx_wanted(wanted)
        if (asked STREQUAL auto)
            hobbit_amx_compile(compiled kept -mamx-tile)
            # Where the control's mark is not found either, nothing is known, and speed is what can be done without.
            if (control AND kept)
                set(answer kept)
            else()
                set(answer left-out)
            endif()
        elseif (asked STREQUAL on)
            set(answer kept)
        else()
            set(answer left-out)
        endif()
    endif()

    set(HOBBIT_AMX_ASKED "${asked}" CACHE INTERNAL "")
    set(HOBBIT_AMX_WANTED "${wanted}" CACHE INTERNAL "")
    set(HOBBIT_AMX_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}" CACHE INTERNAL "")
    set(HOBBIT_AMX "${answer}" CACHE INTERNAL "")
    message(STATUS "hobbit: AMX ${answer} (asked: ${asked}; ${HOBBIT_AMX_COMPILER}; wanted by this build: ${wanted})")
endfunction()

# MSVC's flags are others, and ggml builds no AMX with it.
if (CMAKE_CXX_COMPILER_LOADED AND NOT MSVC)
    get_property(hobbit_amx_decided GLOBAL PROPERTY HOBBIT_AMX_DECIDED)
    if (NOT hobbit_amx_decided)
        hobbit_amx_decide()
        set_property(GLOBAL PROPERTY HOBBIT_AMX_DECIDED TRUE)
    endif()
    if (HOBBIT_AMX STREQUAL left-out)
        # At the end of the rule itself: ggml's variants get their -mamx-* behind every variable that holds flags.
        # Without __AMX_INT8__, ggml compiles none of its AMX code, in C as in C++.
        foreach (language C CXX)
            if (NOT "${CMAKE_${language}_COMPILE_OBJECT}" MATCHES "-mno-amx-tile")
                string(APPEND CMAKE_${language}_COMPILE_OBJECT " -mno-amx-tile -mno-amx-int8 -mno-amx-bf16")
            endif()
        endforeach()
    endif()
endif()
