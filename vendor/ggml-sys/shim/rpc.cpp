// ggml's RPC backend as it is, and a server that says when it listens and why it cannot. ggml_backend_rpc_start_server
// does neither: it prints to a buffered stdout and returns.

#include "ggml-rpc.cpp"

#include "hobbit.h"

#include <cerrno>
#include <cstdio>
#include <exception>

extern "C" {

int hobbit_rpc_serve(const char * host, int port, const char * cache_dir, int n_threads, size_t n_devices,
                     ggml_backend_dev_t * devices, hobbit_rpc_callback on_event, void * context, char * error,
                     size_t error_capacity) {
    try {
        std::vector<ggml_backend_ptr> owned;
        std::vector<ggml_backend_t> backends;
        for (size_t i = 0; i < n_devices; ++i) {
            ggml_backend_ptr backend(ggml_backend_dev_init(devices[i], nullptr));
            if (backend == nullptr) {
                snprintf(error, error_capacity, "cannot start device %s", ggml_backend_dev_name(devices[i]));
                return 0;
            }
            ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(devices[i]);
            auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
                ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
            if (set_n_threads != nullptr) {
                set_n_threads(backend.get(), n_threads);
            }
            backends.push_back(backend.get());
            owned.push_back(std::move(backend));
        }
        errno = 0;
        const socket_ptr server = rpc_transport_init() ? socket_t::create_server(host, port) : nullptr;
        if (server == nullptr) {
            const int code = errno;
            snprintf(error, error_capacity, "cannot listen on %s:%d", host, port);
            return code;
        }
        on_event(context, HOBBIT_RPC_LISTENING);
        while (true) {
            errno = 0;
            socket_ptr client = server->accept();
            if (client == nullptr) {
                if (errno == EINTR || errno == ECONNABORTED) {
                    continue;
                }
                const int code = errno;
                snprintf(error, error_capacity, "cannot accept a connection on %s:%d", host, port);
                return code;
            }
            on_event(context, HOBBIT_RPC_CONNECTED);
            try {
                rpc_serve_client(backends, cache_dir, client);
            } catch (const std::exception & e) {
                // A client that asks for too much loses its connection; the next one is served.
                GGML_LOG_ERROR("%s\n", e.what());
            }
            on_event(context, HOBBIT_RPC_DISCONNECTED);
        }
    } catch (const std::exception & e) {
        snprintf(error, error_capacity, "%s", e.what());
        return 0;
    }
}

} // extern "C"
