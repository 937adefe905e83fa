//! The bench's command line.

use std::path::PathBuf;

use clap::Parser;

const EXAMPLES: &str = "\
Examples:
  cargo bench --bench quality
      The bundled models, all their held-out texts, the built-in arms.
  cargo bench --bench quality -- --windows 4 --cache 25
      A quick look: four windows of each text, a quarter of the experts in memory.
  cargo bench --bench quality -- --jobs 1
      One row after the other: with the times of tokens.
  cargo bench --bench quality -- --arms benches/quality/arms/thresholds.txt
      Other arms. A file has one a line, NAME: FLAGS; prompts.txt there is for --whole-windows.
  cargo bench --bench quality -- --model mixtral.gguf --text wiki.txt --arm 'low: --low q2_k --t1 0.5'
      A model and an arm of one's own. The exact model and its smaller quants are always compared with.";

/// What dynamic precision, packs and smaller quants cost in quality, at equal memory.
///
/// Raw numbers and tables go to benches/results/<machine>/quality-<model>*;
/// of a part (--windows) to target/quality/. The exit code is 0 whatever was found, 1 where something could not be
/// measured.
#[derive(Debug, Parser)]
#[command(name = "quality", override_usage = "cargo bench --bench quality -- [OPTIONS]", max_term_width = 110, after_help = EXAMPLES)]
pub struct Args {
    /// Model whose experts are the exact ones; may be repeated [default: models/demo.gguf and, if it is there,
    /// models/fine.gguf]
    #[arg(long = "model", value_name = "FILE")]
    pub models: Vec<PathBuf>,
    /// Text to read; may be repeated [default: <model>-heldout-*.txt beside the model]
    #[arg(long = "text", value_name = "FILE")]
    pub texts: Vec<PathBuf>,
    /// Expert cache, percent of the exact model's expert bytes
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "25,50")]
    pub cache: Vec<f64>,
    /// Arms to compare, one a line: NAME: FLAGS, as hobbit-cli takes them [default: the built-in ones,
    /// benches/quality/arms/default.txt]
    #[arg(long, value_name = "FILE")]
    pub arms: Option<PathBuf>,
    /// An arm more, or without --arms in place of the built-in ones; may be repeated
    #[arg(long = "arm", value_name = "NAME: FLAGS", allow_hyphen_values = true)]
    pub more_arms: Vec<String>,
    /// Windows of 512 tokens of each text, for a quick look [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub windows: Option<usize>,
    /// Questions about each text: which of four texts goes on from here [default: 500, with --windows 16 for each]
    #[arg(long, value_name = "N")]
    pub questions: Option<usize>,
    /// Read each window in one batch, as a prompt, where --prefill-low counts; no questions
    #[arg(long)]
    pub whole_windows: bool,
    /// Rows measured side by side; with more than 1, times of tokens are left out [default: cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub jobs: Option<u16>,
    /// Threads of each row
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=512))]
    pub threads: i32,
    /// Where results go
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    pub bench: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number above 0".to_owned())
}
