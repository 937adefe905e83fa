//! `hobbit-server`: an HTTP server compatible with llama.cpp's `llama-server` and OpenAI's interface.

fn main() -> std::process::ExitCode {
    hobbit_server::main()
}
