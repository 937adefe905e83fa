//! What was typed after `hobbit-prove report`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;

use super::tables;

/// Tables and plots of raw results
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ReportArgs {
    /// What hobbit-bench wrote with -o json or -o jsonl, or directories of it
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Write one page with all tables and plots; it needs no other file and no network
    #[arg(short, long, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
    /// Put tables between the markers '<!-- hobbit-prove NAME -->' and '<!-- /hobbit-prove NAME -->' of a Markdown file
    #[arg(long, value_name = "FILE.md")]
    pub readme: Option<PathBuf>,
    /// Only look whether the --readme file is what the records make it; fail if it is not
    #[arg(long, requires = "readme")]
    pub check: bool,
    /// Print one table as Markdown
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(tables::names()))]
    pub table: Option<String>,
}
