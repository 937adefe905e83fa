//! What was measured with: machine, kernel, disk, hobbit's and llama.cpp's versions, and everybody else's.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::group::{Spread, distinct, grouped};
use super::number::{UNKNOWN, bytes};
use super::read::Entry;
use super::table::Table;
use hobbit_programs::bench::record::Record;
use hobbit_programs::measure::host::Host;
use hobbit_programs::plot::escape;

/// Text that is there.
fn known(texts: impl Iterator<Item = String>) -> String {
    let texts = distinct(texts.filter(|text| !text.trim().is_empty()));
    if texts.is_empty() { UNKNOWN.into() } else { texts.join(", ") }
}

/// Machines with what ran on them, and the engines.
pub fn write(page: &mut String, entries: &[Entry]) {
    let records = || entries.iter().map(|entry| &entry.record);
    page.push_str("<dl id='versions'>\n");
    let mut row = |name: &str, words: &str| {
        let _ = writeln!(page, "<dt>{name}</dt><dd>{}</dd>", escape(words));
    };
    let hosts = distinct(records().map(|record| &record.more.hobbit_host));
    // The same machine with another commit is the same machine.
    for ((name, ..), same) in
        grouped(hosts, |host| machine(host)).into_iter().filter(|((name, ..), _)| !name.is_empty())
    {
        let (host, same) = (same[0], || same.iter());
        row("Machine", &format!("{name}, {} cores, {} of memory", host.cores, bytes(host.ram_bytes as f64)));
        row("Instructions", &known(same().map(|host| instructions(&host.system_info))));
        row("Kernel", &known([host.kernel.clone(), host.os.clone()].into_iter()));
        row("Disk", &disk(host, entries));
        let commits = known(same().map(|host| short(&host.commit).to_owned()));
        row("hobbit", &format!("{}, commit {commits}", known(same().map(|host| host.hobbit.clone()))));
        row(
            "llama.cpp",
            &known(records().filter(|record| record.more.hobbit_host.machine == host.machine).map(llama_cpp)),
        );
    }
    let times = || records().map(|record| record.test_time.as_str()).filter(|time| !time.is_empty());
    if let (Some(first), Some(last)) = (times().min(), times().max()) {
        row("Measured", &format!("{first} to {last}"));
    }
    let _ = writeln!(page, "</dl>\n{}", engines(entries).html());
}

/// What makes a machine another one.
fn machine(host: &Host) -> (&str, &str, &str) {
    let name = if host.cpu.is_empty() { &host.machine } else { &host.cpu };
    (name, &host.kernel, &host.disk.kind)
}

fn short(commit: &str) -> &str {
    commit.get(..12).unwrap_or(commit)
}

/// Of llama.cpp's `AVX2 = 1 | FMA = 1 | ...` what is there.
fn instructions(system_info: &str) -> String {
    let there = system_info.split('|').filter_map(|part| part.trim().strip_suffix("= 1"));
    let names = there.map(|name| name.rsplit(':').next().unwrap_or(name).trim());
    names.collect::<Vec<_>>().join(" ")
}

fn llama_cpp(record: &Record) -> String {
    let build = format!("build b{}", record.build_number);
    match &record.more.hobbit_host.llama_cpp_sys[..] {
        // A record without a build says nothing new.
        _ if record.build_number <= 0 => String::new(),
        "" | "unknown" => build,
        version => format!("{build} (llama-cpp-sys-2 {version})"),
    }
}

fn disk(host: &Host, entries: &[Entry]) -> String {
    let mut words = vec![host.disk.kind.clone()];
    words.extend(host.disk.model.clone());
    words.extend(host.disk.read_ahead_kib.map(|kib| format!("read-ahead {}", bytes(kib as f64 * 1024.0))));
    words.extend(host.disk.scheduler.as_ref().map(|name| format!("scheduler {name}")));
    let here = entries.iter().map(|entry| &entry.record).filter(|record| record.hobbit_machine == host.machine);
    if let Some(speeds) = Spread::of(here.filter_map(|record| record.hobbit_bandwidth).filter(|speed| *speed > 0.0)) {
        words.push(format!("random reads of {} to {} a second", bytes(speeds.least), bytes(speeds.most)));
    }
    words.join(", ")
}

/// Every engine, with the versions and numbers of threads it had.
fn engines(entries: &[Entry]) -> Table {
    let records = || entries.iter().map(|entry| &entry.record);
    let names = distinct(records().map(|record| record.hobbit_engine.clone()).filter(|name| !name.is_empty()));
    let row = |name: String| {
        let own = || records().filter(|record| record.hobbit_engine == name);
        // Who never ran has told nothing.
        let version = match known(own().map(|record| record.hobbit_engine_version.clone())) {
            version if version == UNKNOWN => "not told: it never ran".to_owned(),
            version => version,
        };
        let threads: BTreeSet<i32> = own().map(|record| record.n_threads).filter(|n| *n > 0).collect();
        let threads = known(threads.iter().map(ToString::to_string));
        vec![name.clone().into(), version.into(), threads.into(), own().count().to_string().into()]
    };
    Table {
        heading: ["engine", "version", "threads", "records"].map(str::to_owned).to_vec(),
        n_words: 2,
        rows: names.into_iter().map(row).collect(),
        ..Table::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::synthetic::{entry, record};
    use super::*;

    #[test]
    fn versions_are_told_once_and_what_is_not_known_is_left_out() {
        let of = |engine: &str, version: &str, threads: i32| {
            let mut record = record("peers", engine, [0, 8], 1.0);
            record.hobbit_engine_version = version.into();
            (record.n_threads, record.build_number) = (threads, 12032);
            record.hobbit_bandwidth = (engine == "hobbit").then_some(2e9);
            record.more.hobbit_host.system_info = "CPU : SSE3 = 1 | AMX_INT8 = 0 | AVX2 = 1 | ".into();
            record.more.hobbit_host.os = "Some Linux 1".into();
            entry(record)
        };
        let mut page = String::new();
        write(
            &mut page,
            &[of("hobbit", "0.2.0", 2), of("llama.cpp", "b12032", 4), of("llama.cpp", "", 2), of("a", "", 2)],
        );
        for part in [
            "<dd>Synthetic processor, 2 cores, 24.0 GiB of memory</dd>",
            "<dd>SSE3 AVX2</dd>",
            "<dd>0.0, Some Linux 1</dd>",
            "<dd>none, read-ahead 128 KiB, scheduler none, random reads of 1.86 GiB to 1.86 GiB a second</dd>",
            "<dd>0.0.0, commit 0123456789ab</dd>",
            "<dd>build b12032 (llama-cpp-sys-2 0.0.0)</dd>",
            "<td class='words'>llama.cpp</td><td class='words'>b12032</td><td>2, 4</td><td>2</td>",
            "<td class='words'>a</td><td class='words'>not told: it never ran</td>",
        ] {
            assert!(page.contains(part), "{part} in {page}");
        }
        let mut empty = String::new();
        write(&mut empty, &[Entry::default()]);
        assert!(!empty.contains("<dt>"), "{empty}");
    }
}
