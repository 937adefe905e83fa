//! `hobbit-prove report`: tables and plots of raw records, nothing typed by hand.
//!
//! [`read`] turns files into records, [`group`] puts those of one case together, [`figures`] takes figures out of them, [`number`]
//! shows these. [`tables`] and [`claims`] make a [`table`] each, [`plots`] what there is to see; [`page`] is all of it with
//! [`versions`] of everything, and [`markers`] put tables into a Markdown file.

mod claims;
mod figures;
mod group;
mod markers;
mod number;
mod page;
mod plots;
mod read;
mod table;
mod tables;
#[cfg(test)]
mod tests;
mod versions;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::builder::PossibleValuesParser;

use read::Entry;

use hobbit::files::{self, Input, Kind, Output};
use hobbit_programs::output::write_whole;

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

/// Does what `args` ask for; `out` gets the table of `--table`, and a line about each file written.
///
/// # Errors
/// What cannot be read or written, a marker that is wrong, a table without records; with `--check` a file that is out of date.
pub fn run(args: &ReportArgs, out: &mut dyn Write) -> Result<()> {
    if args.output.is_none() && args.readme.is_none() && args.table.is_none() {
        bail!("nothing to make; expected --output FILE.html, --readme FILE.md or --table NAME");
    }
    let records: Vec<_> = args.files.iter().map(|path| Input { flag: "records", path }).collect();
    let page = args.output.as_deref().map(|path| Output { flag: "--output", path, kind: Kind::Page });
    files::check(page.as_slice(), &records)?;
    let entries = read::read(&args.files)?;
    // What can fail comes before what is printed.
    let mut said = Vec::new();
    if let Some(path) = &args.readme {
        fill(path, args.check, &entries, &mut said)?;
    }
    let table = |name: &String| {
        let lacking = || format!("--table {name}: none of the {} records belongs to it", entries.len());
        markdown(name, &entries).with_context(lacking)
    };
    let table = args.table.as_ref().map(table).transpose()?;
    if let Some(path) = &args.output {
        write_whole(path, page::page(&entries))?;
        writeln!(said, "written to {}", path.display())?;
    }
    out.write_all(table.unwrap_or_default().as_bytes())?;
    out.write_all(&said)?;
    Ok(())
}

/// A table that has rows.
fn markdown(name: &str, entries: &[Entry]) -> Option<String> {
    let table = tables::by_name(name, entries)?;
    (!table.rows.is_empty()).then(|| table.markdown())
}

fn fill(path: &Path, check: bool, entries: &[Entry], out: &mut dyn Write) -> Result<()> {
    let name = || path.display().to_string();
    let before = std::fs::read_to_string(path).with_context(|| format!("{}: cannot read this file", name()))?;
    let filled = markers::fill(&before, &tables::names(), |table| markdown(table, entries)).with_context(name)?;
    match (filled == before, check) {
        (true, _) => writeln!(out, "{} is up to date", name())?,
        (false, true) => bail!("{} is not what the records make it; run this command without --check", name()),
        (false, false) => {
            write_whole(path, &filled)?;
            writeln!(out, "tables of {} replaced", name())?;
        }
    }
    Ok(())
}
