//! One page that needs nothing else.

use std::fmt::Write;

use super::figures;
use super::number::{bytes, digits};
use super::read::{Entry, files};
use super::table::Table;
use super::{plots, tables, versions};
use hobbit_programs::bench::case::Test;
use hobbit_programs::plot::{self, escape};

const STYLE: &str = include_str!("page.css");

/// Words and signs of all tables and plots.
const READING: &str = "\
<section id='reading'>\n<h2>How to read this</h2>\n<dl>
<dt>Tests</dt><dd>pp128: a prompt of 128 tokens, computed together; tg32: 32 tokens, one after the other; pp16+tg32: both in one test; \
@ d512: behind 512 tokens that are in the context already</dd>
<dt>Limit</dt><dd>memory of the process, page cache included: a control group of its own; none: the whole machine</dd>
<dt>Figures</dt><dd>t/s: tokens per second, more is better; s and ms: less is better; 2.00x: twice as fast as the other in the same row; \
-: not measured, or nothing to measure</dd>
<dt>Plots</dt><dd>what is across and what is up stands below each; circles are measured, upright strokes go from the least to the most of \
several runs, dashed lines are bounds and no measurements</dd>\n</dl>\n</section>\n";

/// Everything that the records say, as HTML.
pub fn page(entries: &[Entry]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>\n\
         <title>hobbit-prove report</title>\n<style>{STYLE}{}</style></head>\n<body>\n<h1>hobbit, measured</h1>\n",
        plot::STYLE
    );
    versions::write(&mut page, entries);
    page.push_str(READING);
    let tables = tables::names().into_iter().filter_map(|name| tables::by_name(name, entries));
    let tables: Vec<Table> = tables.filter(|table| !table.rows.is_empty()).collect();
    page.push_str("<nav>");
    for table in &tables {
        let _ = write!(page, "<a href='#{}'>{}</a> ", table.name, escape(table.title));
    }
    page.push_str("<a href='#records'>All records</a></nav>\n");
    for table in &tables {
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
                let (title, note) = (escape(&figure.title), escape(&figure.note));
                let _ = write!(page, "<figure><figcaption>{title}</figcaption>\n{}", figure.html);
                let _ = writeln!(page, "<p class='note'>{note}</p>\n</figure>");
            }
            page.push_str("</div>\n");
        }
        page.push_str("</section>\n");
    }
    let _ = write!(
        page,
        "<section id='records'>\n<h2>All records</h2>\n<details><summary>{} records of {} files</summary>\n{}</details>\n\
         <p class='note'>Every figure above is computed from these records by hobbit-prove report {}.</p>\n</section>\n</body>\n</html>\n",
        entries.len(),
        files(entries).len(),
        records(entries).html(),
        escape(env!("CARGO_PKG_VERSION")),
    );
    page
}

/// Everything, so that a reader finds what a figure was computed from.
fn records(entries: &[Entry]) -> Table {
    let heading = ["file", "study", "variant", "engine", "model", "limit", "test", "began", "t/s", "outcome"];
    let row = |entry: &Entry| {
        let record = &entry.record;
        let (n_prompt, n_gen, n_depth) = (record.n_prompt, record.n_gen, record.n_depth);
        let cells = [
            entry.file.clone(),
            record.hobbit_label.clone(),
            record.hobbit_variant.clone(),
            record.hobbit_engine.clone(),
            figures::model(record, entries),
            record.hobbit_limit.map_or("none".into(), |limit| bytes(limit as f64)),
            Test { n_prompt, n_gen, n_depth }.name(),
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
