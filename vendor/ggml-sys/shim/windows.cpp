// A model's bytes from a callback, on Windows.
//
// There llama.cpp takes the header from a FILE* and tensors from the handle under it, with ReadFile and
// SetFilePointerEx. build.cmake gives these two calls in llama-mmap.cpp the names below. For the handle of an open
// stream they go to the stream's owner, and for any other one to Windows. Without build.cmake, llama.cpp reads beyond
// the end of the stream's file, which has the header only, and does not load.

#include "hobbit.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <new>
#include <vector>

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <io.h>

struct hobbit_stream {
    FILE * file;
    HANDLE handle;
    int64_t position;
    int64_t length;
    hobbit_stream_read read;
    void * cookie;
};

static std::mutex streams_mutex;
static std::vector<hobbit_stream *> streams;

static hobbit_stream * stream_of(HANDLE handle) {
    std::lock_guard<std::mutex> lock(streams_mutex);
    auto found = std::find_if(streams.begin(), streams.end(), [=](hobbit_stream * s) { return s->handle == handle; });
    return found == streams.end() ? nullptr : *found;
}

extern "C" {

hobbit_stream * hobbit_stream_open(const uint16_t * header, uint64_t length, hobbit_stream_read read, void * cookie) {
    FILE * file = _wfopen(reinterpret_cast<const wchar_t *>(header), L"rb");
    if (!file) {
        return nullptr;
    }
    HANDLE handle = reinterpret_cast<HANDLE>(_get_osfhandle(_fileno(file)));
    auto * stream = new (std::nothrow) hobbit_stream{file, handle, 0, static_cast<int64_t>(length), read, cookie};
    if (!stream) {
        fclose(file);
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.push_back(stream);
    return stream;
}

void * hobbit_stream_file(hobbit_stream * stream) {
    return stream->file;
}

void hobbit_stream_close(hobbit_stream * stream) {
    {
        std::lock_guard<std::mutex> lock(streams_mutex);
        streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
    }
    fclose(stream->file);
    delete stream;
}

static BOOL WINAPI read_file(HANDLE handle, LPVOID buffer, DWORD bytes, LPDWORD read, LPOVERLAPPED overlapped) {
    hobbit_stream * stream = stream_of(handle);
    if (!stream) {
        return ReadFile(handle, buffer, bytes, read, overlapped);
    }
    if (stream->position < 0 || stream->position > stream->length) {
        SetLastError(ERROR_HANDLE_EOF);
        return FALSE;
    }
    const uint64_t rest = static_cast<uint64_t>(stream->length - stream->position);
    const uint32_t wanted = static_cast<uint32_t>(std::min<uint64_t>(bytes, rest));
    if (!stream->read(stream->cookie, static_cast<uint64_t>(stream->position), buffer, wanted)) {
        SetLastError(ERROR_READ_FAULT);
        return FALSE;
    }
    stream->position += wanted;
    *read = wanted;
    return TRUE;
}

static BOOL WINAPI set_file_pointer(HANDLE handle, LARGE_INTEGER offset, PLARGE_INTEGER position, DWORD from) {
    hobbit_stream * stream = stream_of(handle);
    if (!stream) {
        return SetFilePointerEx(handle, offset, position, from);
    }
    const int64_t base = from == FILE_BEGIN ? 0 : from == FILE_CURRENT ? stream->position : stream->length;
    stream->position = base + offset.QuadPart;
    if (position) {
        position->QuadPart = stream->position;
    }
    return TRUE;
}

// Where calls of imported functions with these names go.
decltype(&read_file) __imp_hobbit_read_file = read_file;
decltype(&set_file_pointer) __imp_hobbit_set_file_pointer = set_file_pointer;

} // extern "C"
