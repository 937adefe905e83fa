//! One page that needs nothing else.

use std::fmt::Write;

use super::figures;
use super::group::Study;
use super::number::{UNKNOWN, bytes, digits};
use super::read::Entry;
use super::table::Table;
use super::{plots, tables};
use crate::cli::svg::escape;
use crate::measure::host::Host;

const STYLE: &str = include_str!("page.css");

/// Everything that the records say, as HTML.
pub fn page(entries: &[Entry]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>\n\
         <title>hobbit-bench report</title>\n<style>{STYLE}</style></head>\n<body>\n<h1>hobbit, measured</h1>\n"
    );
    hosts(&mut page, entries);
    let tables: Vec<Table> = tables::names().iter().filter_map(|name| tables::by_name(name, entries)).collect();
    let shown = || tables.iter().filter(|table| !table.rows.is_empty());
    page.push_str("<nav>");
    for table in shown() {
        let _ = write!(page, "<a href='#{}'>{}</a> ", table.name, escape(table.title));
    }
    page.push_str("<a href='#records'>All records</a></nav>\n");
    for table in shown() {
        let _ = write!(
            page,
            "<section id='{}'>\n<h2>{}</h2>\n{}<p class='note'>{}Made from {}.</p>\n",
            table.name,
            escape(table.title),
            table.html(),
            escape(&table.remarks()),
            escape(&table.files.join(", ")),
        );
        let figures = plots::of(table.name, entries);
        if !figures.is_empty() {
            page.push_str("<div class='figures'>\n");
            for figure in figures {
                let _ = write!(page, "<figure><figcaption>{}</figcaption>\n{}", escape(&figure.title), figure.svg);
                if !figure.note.is_empty() {
                    let _ = writeln!(page, "<p class='note'>{}</p>", escape(figure.note));
                }
                page.push_str("</figure>\n");
            }
            page.push_str("</div>\n");
        }
        page.push_str("</section>\n");
    }
    let _ = write!(
        page,
        "<section id='records'>\n<h2>All records</h2>\n<details><summary>{} records of {} files</summary>\n{}</details>\n\
         <p class='note'>Every figure above is computed from these records by hobbit-bench report {}.</p>\n</section>\n</body>\n</html>\n",
        entries.len(),
        distinct(entries.iter().map(|entry| entry.file.clone())).len(),
        records(entries).html(),
        escape(env!("CARGO_PKG_VERSION")),
    );
    page
}

fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut known, value| {
        if !known.contains(&value) {
            known.push(value);
        }
        known
    })
}

/// The machines, and what ran on them.
fn hosts(page: &mut String, entries: &[Entry]) {
    let hosts: Vec<&Host> = distinct(entries.iter().map(|entry| &entry.record.more.hobbit_host));
    // The same machine with another commit is the same machine.
    for cpu in distinct(hosts.iter().map(|host| (&host.machine, &host.cpu, &host.kernel, &host.disk))) {
        let same: Vec<&&Host> =
            hosts.iter().filter(|host| (&host.machine, &host.cpu, &host.kernel, &host.disk) == cpu).collect();
        let Some(host) = same.first() else { continue };
        if host.cpu.is_empty() && host.machine.is_empty() {
            continue;
        }
        let unknown = |text: &str| if text.is_empty() { UNKNOWN.to_owned() } else { escape(text) };
        let read_ahead = host.disk.read_ahead_kib.map_or(UNKNOWN.into(), |kib| bytes(kib as f64 * 1024.0));
        let commits: Vec<String> = distinct(same.iter().map(|host| host.commit.chars().take(12).collect::<String>()));
        let versions = distinct(same.iter().map(|host| (&host.hobbit, &host.llama_cpp_sys)));
        let versions: Vec<String> =
            versions.iter().map(|(hobbit, bindings)| format!("hobbit {hobbit}, llama-cpp-sys-2 {bindings}")).collect();
        let _ = writeln!(
            page,
            "<dl><dt>Machine</dt><dd>{}, {} cores, {} of memory</dd><dt>Kernel</dt><dd>{}</dd>\
             <dt>Disk</dt><dd>{}, read-ahead {read_ahead}, scheduler {}</dd><dt>Code</dt><dd>{}; commit {}</dd></dl>",
            unknown(&host.cpu),
            host.cores,
            bytes(host.ram_bytes as f64),
            unknown(&host.kernel),
            unknown(&host.disk.kind),
            unknown(host.disk.scheduler.as_deref().unwrap_or_default()),
            escape(&versions.join("; ")),
            unknown(&commits.join(", ")),
        );
    }
    let engines = entries.iter().map(|entry| &entry.record);
    let engines = distinct(engines.map(|record| (&record.hobbit_engine, &record.hobbit_engine_version)));
    let engines: Vec<String> = engines.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let mut times: Vec<&str> = entries.iter().map(|entry| entry.record.test_time.as_str()).collect();
    times.retain(|time| !time.is_empty());
    times.sort_unstable();
    let when = match (times.first(), times.last()) {
        (Some(first), Some(last)) => format!("{first} to {last}"),
        _ => UNKNOWN.into(),
    };
    let _ = writeln!(
        page,
        "<dl><dt>Engines</dt><dd>{}</dd><dt>Measured</dt><dd>{}</dd></dl>",
        escape(&engines.join(", ")),
        escape(&when)
    );
}

/// Everything, so that a reader finds what a figure was computed from.
fn records(entries: &[Entry]) -> Table {
    let heading = ["file", "study", "variant", "engine", "model", "limit", "test", "began", "t/s", "outcome"];
    let row = |entry: &Entry| {
        let record = &entry.record;
        let studies = [record.hobbit_label.as_str()];
        let alone = Study::of(std::slice::from_ref(entry), &studies);
        let test = alone.cases.first().map_or(String::new(), |case| case.test.to_string());
        let cells = [
            entry.file.clone(),
            record.hobbit_label.clone(),
            record.hobbit_variant.clone(),
            record.hobbit_engine.clone(),
            figures::model(record, entries),
            record.hobbit_limit.map_or("none".into(), |limit| bytes(limit as f64)),
            test,
            record.test_time.clone(),
            digits(record.avg_ts),
            record.hobbit_outcome.clone(),
        ];
        cells.map(Into::into).to_vec()
    };
    Table {
        heading: heading.map(str::to_owned).to_vec(),
        // Nothing is left out here but the file.
        n_words: 2,
        rows: entries.iter().map(row).collect(),
        ..Table::default()
    }
}
