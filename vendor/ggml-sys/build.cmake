# Compiles llama.cpp in less time. Leaves out files that hobbit's programs do not link: its command line, downloads, the
# HTTP library, and speech generation. Compiles the many small files that share large headers as one (CMake's unity
# build, as llama.cpp does for its models). Compiles what runs once for a request, not for each token, for size: a third
# of the time and of the code. Backends are looked for beside the programs only, not where they were built.
#
# Reaches CMake as CMAKE_PROJECT_llama.cpp_INCLUDE: .cargo/config.toml sets it, and llama-cpp-sys-2 passes on variables
# that begin with CMAKE_. Without it, everything is compiled, and the programs behave the same.

include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)

set(hobbit_directory "${CMAKE_CURRENT_LIST_DIR}")

function(hobbit_leave_out target)
    get_target_property(sources ${target} SOURCES)
    list(REMOVE_ITEM sources ${ARGN})
    set_property(TARGET ${target} PROPERTY SOURCES ${sources})
endfunction()

# Each pattern's files become one.
function(hobbit_unite target)
    get_target_property(directory ${target} SOURCE_DIR)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    foreach (pattern ${ARGN})
        file(GLOB sources "${directory}/${pattern}")
        string(MAKE_C_IDENTIFIER ${pattern} group)
        set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${group})
    endforeach()
endfunction()

# Optimises for size, except the sources that match the patterns.
function(hobbit_optimise_for_size target)
    if (MSVC)
        return()
    endif()
    get_target_property(directory ${target} SOURCE_DIR)
    target_compile_options(${target} PRIVATE -Os)
    foreach (pattern ${ARGN})
        file(GLOB sources "${directory}/${pattern}")
        set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -O3)
    endforeach()
endfunction()

function(hobbit_adjust)
    if (TARGET llama-common AND TARGET cpp-httplib)
        hobbit_leave_out(llama-common arg.cpp console.cpp debug.cpp download.cpp hf-cache.cpp imatrix-loader.cpp
            preset.cpp subproc.cpp)
        foreach (property LINK_LIBRARIES INTERFACE_LINK_LIBRARIES)
            get_target_property(libraries llama-common ${property})
            list(FILTER libraries EXCLUDE REGEX cpp-httplib)
            set_property(TARGET llama-common PROPERTY ${property} "${libraries}")
        endforeach()
        set_property(TARGET cpp-httplib PROPERTY EXCLUDE_FROM_ALL TRUE)
        hobbit_unite(llama-common "chat*.cpp" "parsers/*.cpp")
        hobbit_optimise_for_size(llama-common "ngram*.cpp" peg-parser.cpp sampling.cpp speculative.cpp)
    endif()
    if (TARGET mtmd)
        hobbit_leave_out(mtmd mtmd-helper-gen.cpp)
        hobbit_unite(mtmd "models/*.cpp")
        hobbit_optimise_for_size(mtmd mtmd-audio.cpp mtmd-helper.cpp mtmd-image.cpp)
    endif()
    if (WIN32)
        # shim/windows.cpp has these.
        get_target_property(directory llama SOURCE_DIR)
        set_source_files_properties("${directory}/llama-mmap.cpp" TARGET_DIRECTORY llama PROPERTIES
            COMPILE_DEFINITIONS "ReadFile=hobbit_read_file;SetFilePointerEx=hobbit_set_file_pointer")
    endif()
    if (MINGW)
        # ggml's archives have no prefix on Windows, and llama-cpp-sys-2 links those that have one.
        foreach (library ggml ggml-base ggml-cpu)
            if (TARGET ${library} AND NOT BUILD_SHARED_LIBS)
                set_target_properties(${library} PROPERTIES PREFIX lib)
            endif()
        endforeach()
    endif()
    if (TARGET ggml-cpu-armv9.2_1)
        # GCC before 14 knows no SME. What it makes for processors with SME does not use it.
        check_cxx_compiler_flag(-march=armv9.2-a+sme HOBBIT_SME)
        if (NOT HOBBIT_SME)
            foreach (variant ggml-cpu-armv9.2_1 ggml-cpu-armv9.2_2)
                get_target_property(options ${variant} COMPILE_OPTIONS)
                string(REPLACE armv9.2-a armv8.6-a options "${options}")
                string(REPLACE +sme "" options "${options}")
                set_property(TARGET ${variant} PROPERTY COMPILE_OPTIONS "${options}")
            endforeach()
        endif()
    endif()
    if (GGML_BACKEND_DIR)
        foreach (property COMPILE_DEFINITIONS INTERFACE_COMPILE_DEFINITIONS)
            get_target_property(definitions ggml ${property})
            list(FILTER definitions EXCLUDE REGEX GGML_BACKEND_DIR)
            set_property(TARGET ggml PROPERTY ${property} "${definitions}")
        endforeach()
    endif()
endfunction()

# The linker leaves out functions that nothing calls.
if (NOT MSVC)
    add_compile_options(-ffunction-sections -fdata-sections)
endif()

if (MINGW)
    set(CMAKE_REQUIRED_DEFINITIONS -D_WIN32_WINNT=0x0A00)
    check_cxx_source_compiles("#include <windows.h>
        int main() { THREAD_POWER_THROTTLING_STATE state; return sizeof state == 0; }" HOBBIT_THREAD_THROTTLING)
    unset(CMAKE_REQUIRED_DEFINITIONS)
    if (NOT HOBBIT_THREAD_THROTTLING)
        add_compile_options(-include "${hobbit_directory}/windows/mingw.h")
    endif()
endif()

# At the end, when all targets are known.
if (NOT CMAKE_VERSION VERSION_LESS 3.19)
    cmake_language(DEFER CALL hobbit_adjust)
endif()
