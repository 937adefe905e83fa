//! `hobbit-perplexity`: how well a model predicts a text, compatible with llama.cpp's `llama-perplexity`.

fn main() -> std::process::ExitCode {
    hobbit_programs::perplexity_main()
}
