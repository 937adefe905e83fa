//! `hobbit-cli`: text completion and conversation, compatible with llama.cpp's `llama-cli` and `llama-completion`.

fn main() -> std::process::ExitCode {
    hobbit_programs::main()
}
