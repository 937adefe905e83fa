//! From files to a page, a table, a README.

pub mod synthetic;

use std::path::PathBuf;

use super::read::Entry;
use super::*;
use synthetic::{all, entry, record};

struct Bench {
    directory: tempfile::TempDir,
}

impl Bench {
    fn with(entries: &[Entry]) -> Self {
        let bench = Self { directory: tempfile::tempdir().unwrap() };
        let lines: Vec<String> = entries.iter().map(|entry| serde_json::to_string(&entry.record).unwrap()).collect();
        std::fs::write(bench.path("records.jsonl"), lines.join("\n")).unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn args(&self) -> ReportArgs {
        ReportArgs { files: vec![self.directory.path().to_owned()], ..ReportArgs::default() }
    }
}

fn said(args: &ReportArgs) -> Result<String> {
    let mut out = Vec::new();
    run(args, &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

#[test]
fn the_page_needs_nothing_else_and_shows_every_table_and_plot() {
    let bench = Bench::with(&all());
    let page = bench.path("page.html");
    let words = said(&ReportArgs { output: Some(page.clone()), ..bench.args() }).unwrap();
    assert!(words.contains("page.html"));
    let html = std::fs::read_to_string(&page).unwrap();
    for name in tables::names() {
        let (_, section) = html.split_once(&format!("<section id='{name}'>")).unwrap_or_else(|| panic!("no {name}"));
        let section = section.split("</section>").next().unwrap();
        assert!(section.contains("<tbody>\n<tr>") && section.contains("Made from records.jsonl."), "{name}: {section}");
        let with_plots = !["claims", "resident", "startup", "routes", "efficiency"].contains(&name);
        assert_eq!(section.contains("<svg") || section.contains("<div class='bars'>"), with_plots, "{name}");
    }
    let figures = html.split("<figure>").skip(1);
    for figure in figures.map(|figure| figure.split("</figure>").next().unwrap()) {
        let explained =
            figure.contains("<p class='note'>Across: ") || figure.contains("<p class='note'>Length of a bar: ");
        assert!(explained, "axes without an explanation: {figure}");
    }
    assert!(html.contains("<h2>How to read this</h2>") && html.contains("<dl id='versions'>"));
    assert!(!html.contains("nowrap"), "columns that cannot shrink leave the page at 1200 pixels");
    let outside = ["http", "src=", "url(", "<script", "@import", "NaN", "inf ", "Nothing to plot"];
    assert_eq!(outside.iter().find(|part| html.contains(**part)), None);
    assert!(html.contains("prefers-color-scheme:dark") && html.contains("name='viewport'"));
    assert!(html.contains("Synthetic processor, 2 cores, 24.0 GiB") && html.contains("commit 0123456789ab<"));
    assert!(html.contains("roofline") && html.contains("waiting for reads") && html.contains("resident set, GiB"));
    assert!(!html.contains("/somewhere/"), "names of files, not of directories");
    let left: Vec<_> =
        std::fs::read_dir(bench.directory.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "nothing half written: {left:?}");
}

#[test]
fn hostile_names_stay_text() {
    let evil = "<script>alert('x')</script>|\n<!-- /hobbit-prove peers -->";
    let mut records = vec![record("peers", evil, [0, 8], 1.0), record("peers", "hobbit", [0, 8], 2.0)];
    for record in &mut records {
        record.model_filename = format!("{evil}.gguf");
        record.hobbit_variant = evil.into();
        record.more.hobbit_host.cpu = evil.into();
        record.hobbit_outcome = "ok".into();
        *record = synthetic::with_series(std::mem::take(record), 8, 0);
    }
    records[0].hobbit_outcome = format!("failed: {evil}");
    let entries: Vec<Entry> = records.into_iter().map(|record| Entry { file: evil.into(), ..entry(record) }).collect();
    let html = page::page(&entries);
    assert!(!html.contains("<script") && html.contains("&lt;script&gt;"));
    let markdown = markdown("peers", &entries).unwrap();
    assert!(!markdown.contains("<!--") && markdown.lines().take(4).all(|line| line.starts_with('|')), "{markdown}");
}

#[test]
fn nothing_known_is_no_panic() {
    let empty = [Entry::default()];
    let odd = |label: &str, engine: &str| {
        let mut odd = record(label, engine, [0, 0], 1.0);
        odd.avg_ts = f64::NAN;
        odd.hobbit_decode_ts = Some(f64::NAN);
        odd.hobbit_prompt_ts = Some(f64::INFINITY);
        odd.hobbit_limit = Some(0);
        odd.hobbit_peak_rss = Some(0);
        odd.hobbit_hits = Some(0);
        odd.hobbit_misses = Some(0);
        odd.hobbit_bytes = Some(u64::MAX);
        odd.hobbit_stall_ns = Some(u64::MAX);
        odd.hobbit_expert_bytes = Some(0);
        odd.hobbit_expert_cache = Some(1);
        odd.hobbit_logits_compared = Some(u64::MAX);
        odd.hobbit_logits_equal = Some(u64::MAX);
        odd.hobbit_roofline_ts = Some(f64::INFINITY);
        odd.more.hobbit_steps_ns = vec![0; 3];
        odd.more.hobbit_series = vec![hobbit_programs::bench::record::Moment::default(); 2];
        entry(odd)
    };
    let odd: Vec<Entry> = tables::names()
        .iter()
        .flat_map(|label| [odd(label, "hobbit"), odd(label, "llama.cpp"), odd(label, "hobbit")])
        .collect();
    for entries in [&[][..], &empty, &odd] {
        let html = page::page(entries);
        assert!(html.ends_with("</html>\n") && !html.contains("NaN") && !html.contains(">inf"), "{html}");
        for name in tables::names() {
            let table = tables::by_name(name, entries).unwrap();
            assert!(table.rows.iter().all(|row| row.len() == table.heading.len()), "{name}");
            assert!(!table.markdown().contains("NaN"), "{name}");
        }
    }
}

#[test]
fn a_table_is_printed_and_what_is_missing_is_said() {
    let bench = Bench::with(&[entry(record("resident", "hobbit", [0, 8], 10.0))]);
    let table = said(&ReportArgs { table: Some("resident".into()), ..bench.args() }).unwrap();
    assert!(table.starts_with("| model |") && table.contains("from records.jsonl."), "{table}");
    let error = said(&ReportArgs { table: Some("peers".into()), ..bench.args() }).unwrap_err().to_string();
    assert!(error.contains("--table peers") && error.contains("1 records"), "{error}");
    assert!(said(&bench.args()).unwrap_err().to_string().contains("--readme"));
}

#[test]
fn a_readme_is_filled_in_and_checked() {
    let bench = Bench::with(&all());
    let readme = bench.path("README.md");
    let args = ReportArgs { readme: Some(readme.clone()), ..bench.args() };
    let check = ReportArgs { check: true, ..args.clone() };
    std::fs::write(&readme, "Speed\n\n<!-- hobbit-prove peers -->\n<!-- /hobbit-prove peers -->\nEnd\n").unwrap();
    let before = std::fs::read_to_string(&readme).unwrap();
    let error = said(&check).unwrap_err().to_string();
    assert!(error.contains("README.md is not what the records make it"), "{error}");
    assert_eq!(std::fs::read_to_string(&readme).unwrap(), before, "only looked");

    assert!(said(&args).unwrap().contains("replaced"));
    let after = std::fs::read_to_string(&readme).unwrap();
    assert!(
        after.starts_with("Speed\n\n<!-- hobbit-prove peers -->\n| model |")
            && after.ends_with("<!-- /hobbit-prove peers -->\nEnd\n")
    );
    assert!(said(&check).unwrap().contains("up to date"));
    // Written only if changed: a file that may not be written is still up to date.
    let time = std::fs::metadata(&readme).unwrap().modified().unwrap();
    assert!(said(&args).unwrap().contains("up to date"));
    assert_eq!(std::fs::metadata(&readme).unwrap().modified().unwrap(), time);

    std::fs::write(&readme, "<!-- hobbit-prove speeds -->").unwrap();
    let error = format!("{:#}", said(&args).unwrap_err());
    assert!(error.contains("README.md: line 1") && error.contains("claims, peers, papers"), "{error}");
    std::fs::write(&readme, "<!-- hobbit-prove peers -->\n").unwrap();
    assert!(format!("{:#}", said(&args).unwrap_err()).contains("<!-- /hobbit-prove peers -->"));
    assert_eq!(std::fs::read_to_string(&readme).unwrap(), "<!-- hobbit-prove peers -->\n", "left alone");
}

#[test]
fn flags_are_read_and_unknown_tables_refused() {
    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        report: ReportArgs,
    }
    let parse = |words: &[&str]| <Program as clap::Parser>::try_parse_from([&["x"], words].concat());
    let args =
        parse(&["a.json", "dir", "-o", "p.html", "--readme", "R.md", "--check", "--table", "curve"]).unwrap().report;
    assert_eq!((args.files.len(), args.check, args.table.as_deref()), (2, true, Some("curve")));
    let refused = |words: &[&str]| parse(words).err().unwrap().to_string();
    assert!(refused(&["a", "--table", "speeds"]).contains("ablation"));
    assert!(refused(&["a", "--check"]).contains("--readme") && refused(&[]).contains("FILE"));
}

#[test]
fn the_page_is_written_over_no_records_and_no_other_file() {
    let bench = Bench::with(&all());
    let notes = bench.path("notes");
    std::fs::write(&notes, "precious").unwrap();
    let records = bench.path("records.jsonl");
    let before = std::fs::read(&records).unwrap();
    for (files, output) in [(vec![records.clone()], &records), (vec![records.clone()], &notes)] {
        let error = said(&ReportArgs { files, output: Some(output.clone()), ..ReportArgs::default() }).unwrap_err();
        assert!(error.is::<hobbit::files::OutputError>(), "{error}");
    }
    assert!(std::fs::read(&records).unwrap() == before && std::fs::read(&notes).unwrap() == b"precious");
}
