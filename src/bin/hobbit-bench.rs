//! `hobbit-bench`: measures hobbit as llama.cpp's `llama-bench` measures llama.cpp, and both under the same limit.

fn main() -> std::process::ExitCode {
    hobbit_programs::bench_main()
}
