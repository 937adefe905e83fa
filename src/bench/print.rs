//! Records in llama-bench's formats.

use std::io::{self, Write};

use serde_json::Value;

use super::args::Format;
use super::case::Test;
use super::record::{FIRST_LIST, Record};
use hobbit_core::units::MIB;

/// Prints records as they come.
pub struct Printer<'a> {
    out: Box<dyn Write + 'a>,
    format: Format,
    columns: Vec<Column>,
    n_printed: usize,
    /// Reasons of failures, printed below the table.
    failures: Vec<String>,
}

/// A column of the table for people: its name, its width (negative: to the left) and its value.
type Column = (&'static str, i32, fn(&Record) -> String);

/// Columns to show because their values vary.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shown {
    pub limit: bool,
    pub engine: bool,
    pub flags: bool,
    pub batch: bool,
    pub kv_types: bool,
    pub flash_attn: bool,
    pub gpu_layers: bool,
    pub drafts: bool,
    /// Columns that explain a speed (--verbose).
    pub details: bool,
}

impl<'a> Printer<'a> {
    /// Prints the beginning, before the first record.
    pub fn new(out: Box<dyn Write + 'a>, format: Format, shown: Shown) -> io::Result<Self> {
        let mut printer = Self { out, format, columns: columns(shown), n_printed: 0, failures: Vec::new() };
        match format {
            Format::None | Format::Jsonl => (),
            Format::Csv => {
                let names = cells(&Record::default())?.into_iter().map(|(name, _)| name);
                writeln!(printer.out, "{}", names.collect::<Vec<_>>().join(","))?;
            }
            Format::Json => printer.out.write_all(b"[\n")?,
            Format::Md => {
                let heads = printer.columns.iter().map(|(name, width, _)| padded(name, *width));
                writeln!(printer.out, "| {} |", heads.collect::<Vec<_>>().join(" | "))?;
                let rules = printer.columns.iter().map(|(_, width, _)| {
                    let dashes = "-".repeat(width.unsigned_abs() as usize - 1);
                    if *width > 0 { format!("{dashes}:") } else { format!("{dashes}-") }
                });
                writeln!(printer.out, "| {} |", rules.collect::<Vec<_>>().join(" | "))?;
            }
        }
        printer.out.flush()?;
        Ok(printer)
    }

    pub fn print(&mut self, record: &Record) -> io::Result<()> {
        match self.format {
            Format::None => (),
            Format::Csv => {
                let quoted = |(_, cell): (String, String)| format!("\"{}\"", cell.replace('"', "\"\""));
                writeln!(self.out, "{}", cells(record)?.into_iter().map(quoted).collect::<Vec<_>>().join(","))?;
            }
            Format::Json => {
                let comma = if self.n_printed > 0 { ",\n" } else { "" };
                let text = serde_json::to_string_pretty(record)?.replace('\n', "\n  ");
                write!(self.out, "{comma}  {text}")?;
            }
            Format::Jsonl => writeln!(self.out, "{}", serde_json::to_string(record)?)?,
            Format::Md => {
                let cells = self.columns.iter().map(|(_, width, value)| padded(&value(record), *width));
                writeln!(self.out, "| {} |", cells.collect::<Vec<_>>().join(" | "))?;
                let reason = record.hobbit_outcome.split_once(": ").map(|(_, reason)| reason.to_owned());
                self.failures.extend(reason.filter(|reason| !self.failures.contains(reason)));
            }
        }
        self.n_printed += 1;
        self.out.flush()
    }

    /// Prints the end, after the last record.
    pub fn finish(&mut self, build: i32) -> io::Result<()> {
        match self.format {
            Format::Json => self.out.write_all(b"\n]\n")?,
            Format::Md => {
                self.failures.iter().try_for_each(|reason| writeln!(self.out, "\nfailed: {reason}"))?;
                writeln!(self.out, "\nbuild: hobbit {}, llama.cpp b{build}", env!("HOBBIT_VERSION"))?;
            }
            _ => (),
        }
        self.out.flush()
    }
}

/// A record's columns and their values in llama-bench's notation: 1 for yes, nothing for what is unknown.
fn cells(record: &Record) -> serde_json::Result<Vec<(String, String)>> {
    let fields: serde_json::Map<String, Value> = serde_json::from_value(serde_json::to_value(record)?)?;
    let cell = |value| match value {
        Value::Null => String::new(),
        Value::Bool(yes) => u8::from(yes).to_string(),
        Value::String(text) => text,
        Value::Number(number) if number.is_f64() => format!("{:.6}", number.as_f64().unwrap_or(f64::NAN)),
        other => other.to_string(),
    };
    let columns = fields.into_iter().take_while(|(name, _)| name != FIRST_LIST);
    Ok(columns.map(|(name, value)| (name, cell(value))).collect())
}

fn columns(shown: Shown) -> Vec<Column> {
    let mut columns: Vec<Column> = vec![
        ("model", -20, |record| record.model_type.replace('|', "/")),
        ("size", 10, |record| size(record.model_size)),
    ];
    let mut add = |is_shown: bool, name, width, value: fn(&Record) -> String| {
        if is_shown {
            columns.push((name, width, value));
        }
    };
    add(shown.details, "params", 10, |record| parameters(record.model_n_params));
    add(shown.details || shown.gpu_layers, "backend", -10, |record| record.backends.clone());
    add(shown.gpu_layers, "ngl", 3, |record| record.n_gpu_layers.to_string());
    add(true, "threads", 7, |record| record.n_threads.to_string());
    add(shown.batch, "n_batch", 7, |record| record.n_batch.to_string());
    add(shown.batch, "n_ubatch", 8, |record| match record.hobbit_ubatch_max {
        0 => record.n_ubatch.to_string(),
        _ => "auto".to_owned(),
    });
    add(shown.kv_types, "type_k", 6, |record| record.type_k.clone());
    add(shown.kv_types, "type_v", 6, |record| record.type_v.clone());
    add(shown.flash_attn, "fa", 3, |record| record.flash_attn.to_string());
    add(shown.engine, "engine", -9, |record| record.hobbit_engine.clone());
    add(shown.flags, "flags", -24, |record| record.hobbit_flags.replace('|', "/"));
    add(shown.limit, "limit", 9, |record| record.hobbit_limit.map(size).unwrap_or_default());
    add(true, "experts", 7, |record| {
        let share = record.hobbit_expert_cache.zip(record.hobbit_expert_bytes).filter(|(_, all)| *all > 0);
        // A model that fits has no expert cache: llama.cpp runs it.
        share.map_or_else(String::new, |(part, all)| match part {
            0 => "all".to_owned(),
            _ => format!("{:.0}%", (100.0 * part as f64 / all as f64).min(100.0)),
        })
    });
    add(true, "test", 10, |record| {
        Test { n_prompt: record.n_prompt, n_gen: record.n_gen, n_depth: record.n_depth }.name()
    });
    add(true, "t/s", 15, |record| match &record.hobbit_outcome[..] {
        "ok" => format!("{:.2} ± {:.2}", record.avg_ts, record.stddev_ts),
        other => other.split(':').next().unwrap_or_default().to_owned(),
    });
    add(shown.drafts, "drafts", 11, |record| {
        let drafts = record.hobbit_accepted.zip(record.hobbit_drafted);
        drafts.map(|(accepted, drafted)| format!("{accepted}/{drafted}")).unwrap_or_default()
    });
    add(true, "hits", 6, |record| {
        let hits = record.hobbit_hits.zip(record.hobbit_misses).filter(|(hits, misses)| hits + misses > 0);
        hits.map(|(hits, misses)| format!("{:.1}%", 100.0 * hits as f64 / (hits + misses) as f64)).unwrap_or_default()
    });
    add(true, "MiB/t", 7, |record| {
        let tokens = (u64::from(record.n_prompt) + u64::from(record.n_gen)) * record.more.samples_ns.len() as u64;
        let read = record.hobbit_bytes.or(record.hobbit_disk_bytes).filter(|_| tokens > 0);
        read.map(|bytes| format!("{:.1}", bytes as f64 / tokens as f64 / MIB as f64)).unwrap_or_default()
    });
    add(shown.details, "roofline", 8, |record| {
        record.hobbit_roofline_share.map(|share| format!("{:.0}%", 100.0 * share)).unwrap_or_default()
    });
    add(shown.details, "overlap", 8, |record| {
        record.hobbit_efficiency.map(|share| format!("{:.0}%", 100.0 * share)).unwrap_or_default()
    });
    add(true, "peak RSS", 9, |record| record.hobbit_peak_rss.map(size).unwrap_or_default());
    add(shown.engine, "logits", 9, |record| {
        let logits = record.hobbit_logits_equal.zip(record.hobbit_logits_compared);
        logits.map(|(equal, all)| format!("{equal}/{all}")).unwrap_or_default()
    });
    columns
}

fn padded(text: &str, width: i32) -> String {
    let room = (width.unsigned_abs() as usize).saturating_sub(text.chars().count());
    if width < 0 { format!("{text}{}", " ".repeat(room)) } else { format!("{}{text}", " ".repeat(room)) }
}

/// As llama-bench writes sizes.
fn size(bytes: u64) -> String {
    let mib = bytes as f64 / MIB as f64;
    if mib < 1024.0 { format!("{mib:.2} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}

fn parameters(n: u64) -> String {
    if n < 1_000_000_000 { format!("{:.2} M", n as f64 / 1e6) } else { format!("{:.2} B", n as f64 / 1e9) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(format: Format, records: &[Record]) -> String {
        let mut bytes = Vec::new();
        let shown = Shown { engine: true, limit: true, ..Shown::default() };
        let mut printer = Printer::new(Box::new(&mut bytes), format, shown).unwrap();
        records.iter().for_each(|record| printer.print(record).unwrap());
        printer.finish(7).unwrap();
        drop(printer);
        String::from_utf8(bytes).unwrap()
    }

    fn example() -> Record {
        let mut record = Record {
            model_type: "qwen3moe | \"x\"".into(),
            model_size: 3 << 29,
            n_prompt: 16,
            n_gen: 32,
            avg_ts: 1.5,
            no_kv_offload: true,
            hobbit_engine: "hobbit".into(),
            hobbit_limit: Some(1 << 20),
            hobbit_outcome: "ok".into(),
            ..Record::default()
        };
        record.more.samples_ns = vec![5];
        record.more.hobbit_target_latency = Some(serde_json::json!({ "target_seconds": 0.05, "trials": 2 }));
        record
    }

    #[test]
    fn json_has_llama_benchs_keys_in_their_order() {
        let text = printed(Format::Json, &[example(), example()]);
        let parsed: Vec<Record> = serde_json::from_str(&text).unwrap();
        assert_eq!(parsed, [example(), example()]);
        let at = |key: &str| text.find(&format!("\"{key}\"")).unwrap_or_else(|| panic!("{key}"));
        let keys = "build_commit build_number cpu_info gpu_info backends model_filename model_type model_size \
                    model_n_params n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers \
                    n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split tensor_buft_overrides \
                    load_mode lazy_mode embeddings no_op_offload no_host repack fit_target fit_min_ctx n_prompt n_gen \
                    n_depth test_time avg_ns stddev_ns avg_ts stddev_ts hobbit_engine samples_ns samples_ts";
        let places: Vec<usize> = keys.split_whitespace().map(at).collect();
        assert!(places.is_sorted(), "{places:?}");
        assert_eq!(printed(Format::Json, &[]), "[\n\n]\n");
        let lines = printed(Format::Jsonl, &[example(), example()]);
        assert!(
            lines.lines().count() == 2 && lines.lines().all(|line| serde_json::from_str(line).ok() == Some(example()))
        );
    }

    #[test]
    fn csv_quotes() {
        let csv = printed(Format::Csv, &[example()]);
        let (head, row) = csv.split_once('\n').unwrap();
        assert!(head.starts_with("build_commit,build_number,") && head.ends_with(",hobbit_outcome"), "{head}");
        assert_eq!(head.split(',').count(), row.trim_end().split("\",\"").count(), "{row}");
        assert!(row.contains("\"qwen3moe | \"\"x\"\"\"") && row.contains(",\"1.500000\",\"0.000000\","), "{row}");
        assert!(row.contains(",\"1\",\"0\",\"\",\"\","), "no_kv_offload and flash_attn: {row}");
    }

    #[test]
    fn a_table_for_people() {
        let text = printed(Format::Md, &[example(), Record { hobbit_outcome: "failed: a | b".into(), ..example() }]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].matches('|').count(), lines[2].matches('|').count(), "{text}");
        assert!(
            lines[1].contains("-: |") && lines[2].contains("pp16+tg32") && lines[2].contains("1.50 ± 0.00"),
            "{text}"
        );
        let build = concat!("\nbuild: hobbit ", env!("HOBBIT_VERSION"), ", llama.cpp b7\n");
        assert!(lines[3].contains(" failed |") && text.ends_with(&format!("\n\nfailed: a | b\n{build}")), "{text}");
        let mut plain = Vec::new();
        Printer::new(Box::new(&mut plain), Format::Md, Shown::default()).unwrap();
        assert!(String::from_utf8(plain).unwrap().lines().all(|line| line.chars().count() <= 120));
    }
}
