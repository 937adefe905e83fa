// What guarded calls share: failed assertions as exceptions, messages into buffers.
#pragma once

#include <cstddef>
#include <cstdio>

// Called with text that the caller of the callback owns.
extern "C" typedef void (*hobbit_text_callback)(void * context, const char * text, size_t len);

// While one lives, a failed assertion on its thread is thrown as an exception.
struct throwing_guard {
    const bool before;
    throwing_guard();
    ~throwing_guard();
    throwing_guard(const throwing_guard &) = delete;
    throwing_guard & operator=(const throwing_guard &) = delete;
};

inline void put_error(char * error, size_t capacity, const char * message) {
    if (capacity > 0) {
        snprintf(error, capacity, "%s", message);
    }
}
