//! `hobbit-sim show`: a trace as JSON lines.

use std::io::Write;

use anyhow::Result;

use super::args::ShowArgs;
use hobbit::trace::TraceReader;

pub fn run(args: &ShowArgs, out: &mut dyn Write) -> Result<()> {
    let mut reader = TraceReader::open(&args.file)?;
    let header = serde_json::json!({ "record": "header", "header": reader.header() });
    writeln!(out, "{header}")?;
    if args.header {
        return Ok(());
    }
    let mut out = std::io::BufWriter::new(out);
    for record in &mut reader {
        serde_json::to_writer(&mut out, &record?)?;
        out.write_all(b"\n")?;
    }
    out.flush()?;
    super::warn_of_cut(&args.file, reader.truncated());
    Ok(())
}
