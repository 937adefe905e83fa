//! `hobbit-sim`: what other policies, predictors and budgets would have done with a recorded run.

fn main() -> std::process::ExitCode {
    hobbit_programs::sim_main()
}
