// Declarations of the Windows API that ggml uses and mingw-w64 before version 11 lacks (Debian 12 has version 10).
// build.cmake includes this before every source if the compiler does not know them.
#pragma once

#define THREAD_POWER_THROTTLING_CURRENT_VERSION 1
#define THREAD_POWER_THROTTLING_EXECUTION_SPEED 0x1

typedef struct _THREAD_POWER_THROTTLING_STATE {
    unsigned long Version;
    unsigned long ControlMask;
    unsigned long StateMask;
} THREAD_POWER_THROTTLING_STATE;
