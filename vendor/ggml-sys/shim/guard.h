// What guarded calls share: failed assertions as exceptions, messages into buffers.
#pragma once

#include <cstddef>
#include <cstdio>
#include <exception>

#include "hobbit.h"

// While one lives, a failed assertion on its thread is thrown as an exception.
struct throwing_guard {
    const bool before;
    throwing_guard();
    ~throwing_guard();
    throwing_guard(const throwing_guard &) = delete;
    throwing_guard & operator=(const throwing_guard &) = delete;
};

// Within a guarded call: a graph may be computed from here on. `announces`: a backend of ours is notified before each.
void may_compute(bool announces);

inline void put_error(char * error, size_t capacity, const char * message) {
    if (capacity > 0) {
        snprintf(error, capacity, "%s", message);
    }
}

// The result of `call`, in which a failed assertion throws; `failed` and a message in `error` if anything is thrown.
template <typename T, typename F> T guarded(char * error, size_t capacity, T failed, F && call) {
    try {
        throwing_guard guard;
        return call();
    } catch (const std::exception & e) {
        put_error(error, capacity, e.what());
    } catch (...) {
        put_error(error, capacity, "an exception without a message");
    }
    return failed;
}
