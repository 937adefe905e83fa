//! `hobbit-rpc`: this machine's devices for other hobbits, compatible with llama.cpp's `ggml-rpc-server`.

fn main() -> std::process::ExitCode {
    hobbit_programs::rpc_main()
}
