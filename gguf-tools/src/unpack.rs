//! `gguf-tools unpack`: an expert pack becomes a plain model again.

use std::path::PathBuf;

use hobbit_core::files::{self, Input, Kind, Output};
use hobbit_core::pack::{Pack, unpack};
use hobbit_core::units::Bytes;
use hobbit_programs::output::{say, tell};

use crate::bar::Bar;

/// Arguments of `unpack`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Pack
    file: PathBuf,
    /// Model to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace a file that is there already
    #[arg(long)]
    force: bool,
}

/// Writes the model.
///
/// # Errors
/// The pack is damaged or has no plain form, or the model cannot be written.
pub fn run(args: Args) -> anyhow::Result<()> {
    let output = Output { flag: "-o", path: &args.output, kind: Kind::Model };
    files::check(&[output], &[Input { flag: "the pack", path: &args.file }])?;
    let pack = Pack::open(&args.file)?;
    let mut bar = Bar::new()?;
    let written = unpack(&pack, &args.output, args.force, &mut |done, total| bar.show("unpacking", done, total));
    drop(bar);
    let bytes = written?;
    say(args.output.display())?;
    let whose = match pack.info.plain_sha256 {
        Some(digest) if digest == pack.info.source_sha256 => format!("bit for bit {}", pack.info.source_name),
        _ => {
            format!("{} with experts of {}", pack.info.source_name, pack.info.high.as_deref().unwrap_or("other types"))
        }
    };
    tell(format_args!("{}, {whose}", Bytes(bytes)));
    Ok(())
}
