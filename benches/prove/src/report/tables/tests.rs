use super::super::tests::synthetic::{GIB, MIB, entry, record, with_cache, with_series, with_whole};
use super::*;
use hobbit_programs::bench::record::{Record, Tried};

/// The cells of a table made from records.
fn cells(name: &str, records: Vec<Record>) -> Vec<Vec<String>> {
    let entries: Vec<Entry> = records.into_iter().map(entry).collect();
    let table = by_name(name, &entries).unwrap();
    assert!(table.rows.iter().all(|row| row.len() == table.heading.len()), "{name}: as wide as its heading");
    table.rows.into_iter().map(|row| row.into_iter().map(|cell| cell.text).collect()).collect()
}

#[test]
fn peers_has_a_row_for_everyone() {
    let own = Record {
        hobbit_logits_compared: Some(9),
        hobbit_logits_equal: Some(8),
        ..record("peers", "hobbit", [16, 8], 6.0)
    };
    let peer =
        Record { hobbit_text_equal: Some(3), hobbit_text_chars: Some(7), ..record("peers", "peer", [16, 8], 2.0) };
    let dead = |engine: &str, outcome: &str| Record {
        hobbit_outcome: outcome.into(),
        hobbit_decode_ts: None,
        hobbit_prompt_ts: None,
        hobbit_peak_rss: None,
        hobbit_cgroup_peak: None,
        ..record("peers", engine, [16, 8], 1.0)
    };
    let again = Record { hobbit_decode_ts: Some(8.0), hobbit_peak_rss: Some(3 * GIB / 2), ..own.clone() };
    let rows = cells(
        "peers",
        vec![
            own,
            record("peers", "llama.cpp", [16, 8], 0.5),
            peer,
            dead("a", "killed"),
            dead("b", "failed: no"),
            again,
        ],
    );
    assert_eq!(rows.len(), 5);
    let row = |at: usize| rows[at][3..].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(rows[0][..3], ["synthetic", "2.00 GiB", "pp16+tg8"]);
    assert_eq!(
        row(0),
        [
            "hobbit",
            "36.0 (36.0..36.0)",
            "7.00 (6.00..8.00)",
            "3.50x",
            "1.50 of 2.00 GiB (75.0 %)",
            "2.00 GiB",
            "bit-identical logits 16 of 18",
            "ok"
        ]
    );
    assert_eq!(row(1)[3], "0.0714x", "to the best other, which is hobbit");
    assert_eq!(row(2)[6], "3 of 7 characters");
    assert_eq!(row(3), ["a", "-", "-", "-", "-", "-", "-", "killed"]);
    assert_eq!(row(4)[7], "failed: no");
}

#[test]
fn papers_puts_workloads_side_by_side() {
    let mut records = Vec::new();
    for test in [[128, 32], [16, 32]] {
        records.push(record("papers", "hobbit", test, 8.0));
        if test[0] == 16 {
            let stock = record("papers", "llama.cpp", test, 2.0);
            records.push(Record { hobbit_variant: "another".into(), ..stock });
        }
    }
    let dead = Record { hobbit_outcome: "killed".into(), ..record("papers", "llama.cpp", [128, 32], 1.0) };
    records.push(dead);
    let rows = cells("papers", records.clone());
    let of = |at: usize| rows[at][2..].iter().map(String::as_str).collect::<Vec<_>>();
    // 16 and 128 tokens at 48 t/s; llama.cpp at 12.
    assert_eq!(of(0), ["prefill, s", "hobbit", "0.333", "2.67"]);
    assert_eq!(of(1)[2..], ["1.33", "killed"]);
    assert_eq!(of(2), ["prefill, s", "hobbit, ratio", "4.00x", "-"]);
    assert_eq!(of(3), ["decode, t/s", "hobbit", "8.00", "8.00"]);
    assert_eq!(of(5)[2..], ["4.00x", "-"]);
    assert_eq!(rows.len(), 6, "one llama.cpp, whatever its variant");
    let table = by_name("papers", &records.into_iter().map(entry).collect::<Vec<_>>()).unwrap();
    assert_eq!(table.heading[4..], ["[16, 32]", "[128, 32]"]);
}

#[test]
fn curve_goes_by_share_with_llama_cpp_at_the_same_limit() {
    let at = |share: f64, limit: u64| {
        let own = with_cache(record("curve", "hobbit", [0, 10], 4.0 * share), share);
        Record { hobbit_limit: Some(limit * GIB), ..own }
    };
    let stock = Record { hobbit_limit: Some(2 * GIB), ..record("curve", "llama.cpp", [0, 10], 0.5) };
    let rows = cells("curve", vec![at(1.0, 5), at(0.25, 2), at(0.5, 3), stock]);
    let of = |at: usize| rows[at][3..].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(
        of(0),
        ["25.0 %", "2.00 GiB", "1.00", "0.500", "2.00x", "25.0 %", "576 MiB", "1.35", "74.1 %"],
        "a token of 256 experts of 3 MiB"
    );
    assert_eq!([of(1)[0], of(1)[3], of(1)[4]], ["50.0 %", "-", "-"], "no baseline at that limit");
    assert_eq!([of(2)[0], of(2)[5], of(2)[6]], ["100.0 %", "100.0 %", "0 B"]);
}

#[test]
fn ablation_keeps_the_order_of_measurement() {
    let variant = |name: &str, speed: f64| Record {
        hobbit_variant: name.into(),
        ..with_cache(record("ablation", "hobbit", [0, 10], speed), 0.5)
    };
    let stock = || Record { hobbit_variant: "z".into(), ..record("ablation", "llama.cpp", [0, 10], 1.0) };
    let dead = Record { hobbit_outcome: "killed".into(), ..variant("+dead", 1.0) };
    let rows = cells("ablation", vec![variant("z", 4.0), stock(), variant("+a", 6.0), dead, variant("z", 4.0)]);
    let short: Vec<[&str; 3]> = rows.iter().map(|row| [&*row[3], &*row[4], &*row[5]]).collect();
    assert_eq!(
        short,
        [
            ["z", "4.00 (4.00..4.00)", "1.00x"],
            ["+a", "6.00", "1.50x"],
            ["+dead", "killed", "-"],
            ["llama.cpp", "1.00", "0.250x"]
        ]
    );
    assert_eq!(rows[1][6..], ["384 MiB", "40.0 %", "50.0 %"]);
}

#[test]
fn sweeps_join_prompts_and_single_tokens() {
    let of = |engine: &str, test: [u32; 2], depth: u32, speed: f64| Record {
        n_depth: depth,
        ..record("context", engine, test, speed)
    };
    let rows = cells(
        "context",
        vec![
            of("hobbit", [0, 8], 512, 3.0),
            of("hobbit", [64, 0], 512, 3.0),
            of("hobbit", [0, 8], 0, 4.0),
            of("llama.cpp", [0, 8], 512, 1.5),
            of("llama.cpp", [64, 0], 512, 2.0),
            of("llama.cpp", [0, 8], 1024, 2.0),
        ],
    );
    let of_row = |at: usize| rows[at][4..].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(rows.len(), 3);
    assert_eq!(of_row(0), ["0", "-", "-", "-", "4.00", "-", "-"]);
    assert_eq!(of_row(1), ["512", "18.0", "12.0", "1.50x", "3.00", "1.50", "2.00x"]);
    assert_eq!(of_row(2), ["1024", "-", "-", "-", "-", "2.00", "-"], "llama.cpp alone");
    let model = |n: u32| Record {
        hobbit_n_expert: Some(n),
        model_filename: format!("m{n}.gguf"),
        ..record("experts", "hobbit", [0, 8], 1.0)
    };
    let rows = cells("experts", vec![model(64), model(8)]);
    assert_eq!([&rows[0][4], &rows[1][4]], ["8", "64"]);
}

#[test]
fn resident_and_startup_compare_with_llama_cpp() {
    let own = Record {
        hobbit_logits_compared: Some(5),
        hobbit_logits_equal: Some(5),
        ..record("resident", "hobbit", [0, 8], 40.0)
    };
    let rows = cells("resident", vec![own.clone(), record("resident", "llama.cpp", [0, 8], 50.0)]);
    assert_eq!(rows[0][4..], ["25.0", "20.0", "+25.00 %", "25.0", "20.0", "+25.00 %", "5 of 5"]);
    assert_eq!(cells("resident", vec![own])[0][5..8], ["-", "-", "25.0"], "no baseline");
    let start = |engine: &str, load: u64, first: Option<u64>| Record {
        hobbit_load_ns: Some(load),
        hobbit_first_token_ns: first,
        ..record("startup", engine, [1, 0], 1.0)
    };
    let rows = cells(
        "startup",
        vec![start("hobbit", 500_000_000, Some(1_000_000_000)), start("llama.cpp", 250_000_000, Some(4_000_000_000))],
    );
    assert_eq!(rows[0][4..], ["0.500", "0.250", "0.500x", "1.00", "4.00", "4.00x"]);
    assert_eq!(cells("startup", vec![start("hobbit", 1, None)])[0][7], "-");
}

#[test]
fn fits_goes_by_budget_and_shows_the_whole_command() {
    let at = |engine: &str, gib: u64, seconds: f64| Record {
        hobbit_limit: Some(gib * GIB),
        ..with_whole(record("fits", engine, [12, 32], 32.0 / seconds), seconds)
    };
    let rows = cells(
        "fits",
        vec![at("hobbit", 5, 4.0), at("llama.cpp", 5, 2.0), at("hobbit", 2, 8.0), at("llama.cpp", 2, 64.0)],
    );
    assert_eq!(rows[0][3..8], ["2.00 GiB", "40.0 %", "8.00", "64.0", "8.00x"], "the smaller first");
    assert_eq!(rows[1][3..8], ["5.00 GiB", "100.0 %", "4.00", "2.00", "0.500x"]);
    assert_eq!(rows[1][8..], ["48.0", "96.0", "0.500x", "8.00", "16.0", "0.500x"]);
    let dead = Record { hobbit_outcome: "killed".into(), hobbit_whole_ns: None, ..at("hobbit", 2, 8.0) };
    let rows = cells("fits", vec![dead]);
    assert_eq!(rows[0][3..], ["2.00 GiB", "40.0 %", "killed", "-", "-", "-", "-", "-", "-", "-", "-"], "said once");
}

#[test]
fn contended_compares_with_the_same_engine_alone() {
    let of = |engine: &str, busy: u32, test: [u32; 2], speed: f64| Record {
        hobbit_busy: Some(busy),
        ..record("contended", engine, test, speed)
    };
    let both = |engine, busy, speed| [of(engine, busy, [64, 0], speed), of(engine, busy, [0, 8], speed)];
    let records =
        [both("hobbit", 0, 10.0), both("hobbit", 1, 6.0), both("llama.cpp", 0, 12.0), both("llama.cpp", 1, 3.0)];
    let rows = cells("contended", records.concat());
    assert_eq!(rows[0][3..], ["hobbit", "1", "60.0", "36.0", "60.0 %", "10.0", "6.00", "60.0 %"]);
    assert_eq!(rows[1][3..], ["llama.cpp", "1", "72.0", "18.0", "25.0 %", "12.0", "3.00", "25.0 %"]);
    assert_eq!(rows.len(), 2);
    assert_eq!(cells("contended", both("hobbit", 1, 6.0).to_vec())[0][5..8], ["-", "36.0", "-"], "never alone");
}

#[test]
fn threads_are_said_and_how_they_were_chosen() {
    let of = |engine: &str, threads: i32, tried: &[Tried]| {
        let mut record = record("papers", engine, [16, 8], 1.0);
        record.n_threads = threads;
        record.more.hobbit_threads_tried = tried.to_vec();
        entry(record)
    };
    let said = |entries: &[Entry]| by_name("papers", entries).unwrap().remarks();
    let given = said(&[of("hobbit", 2, &[]), of("llama.cpp", 4, &[])]);
    assert!(given.ends_with("Threads: hobbit on 2 threads; llama.cpp on 4. "), "{given}");
    let tried = [Tried::new(2, 8, 9), Tried::new(4, 8, 3)];
    let chosen = said(&[of("hobbit", 2, &[]), of("llama.cpp", 4, &tried), of("llama.cpp", 2, &tried)]);
    assert!(chosen.contains("llama.cpp on 2 or 4, in each case as many as it was fastest with"), "{chosen}");
    assert!(!said(&[of("hobbit", 0, &[])]).contains("Threads"));
}

#[test]
fn long_shows_the_begin_the_middle_and_the_end() {
    let mut chat = with_series(record("long", "hobbit", [0, 200], 10.0), 200, MIB);
    chat.more.hobbit_steps_ns = (0..200).map(|at| if at < 20 { 50_000_000 } else { 100_000_000 }).collect();
    chat.hobbit_variant = "chat".into();
    let dead = Record {
        hobbit_outcome: "killed".into(),
        hobbit_label: "pressure".into(),
        ..record("long", "hobbit", [0, 200], 1.0)
    };
    let rows = cells("long", vec![chat, dead]);
    assert_eq!(
        rows[0][2..],
        [
            "hobbit, chat",
            "200",
            "20.0",
            "10.0",
            "10.0",
            "1.10 GiB",
            "1.27 GiB",
            "1.27 of 2.00 GiB (63.7 %)",
            "64.0 MiB",
            "64.0 MiB",
            "17",
            "17"
        ]
    );
    assert_eq!(rows[1][3..6], ["0", "killed", "killed"]);
}

#[test]
fn every_table_is_known_by_its_name() {
    assert!(
        names().iter().all(|name| by_name(name, &[]).is_some_and(|table| table.name == *name && table.rows.is_empty()))
    );
    assert!(by_name("speed", &[]).is_none());
}

#[test]
fn routes_compares_with_everything_in_memory() {
    let whole =
        Record { hobbit_limit: None, hobbit_variant: "no limit".into(), ..record("routes", "hobbit", [28, 128], 20.0) };
    let mut own = Record { hobbit_variant: "repeated".into(), ..record("routes", "hobbit", [28, 128], 8.0) };
    // The first repetition is cold: 8 s, then 16 tokens a second.
    own.more.hobbit_decode_ns = vec![16_000_000_000, 8_000_000_000];
    own.more.hobbit_steps_ns = [vec![125_000_000; 128], vec![62_500_000; 126], vec![90_000_000; 2]].concat();
    let plain = record("routes", "hobbit", [28, 128], 9.0);
    let stock = record("routes", "llama.cpp", [28, 128], 3.0);
    let rows = cells("routes", vec![whole, own, plain, stock]);
    let row = |at: usize| rows[at][1..10].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(row(0), ["none", "no limit", "-", "20.0", "20.0", "100.0 %", "-", "-", "-"]);
    assert_eq!(row(1), ["2.00 GiB", "repeated", "-", "8.00", "16.0", "80.0 %", "-", "-", "90.0"]);
    assert_eq!(row(2), ["2.00 GiB", "", "-", "9.00", "9.00", "45.0 %", "3.00", "3.00x", "-"]);
}

#[test]
fn efficiency_puts_looking_ahead_beside() {
    let of = |variant: &str, disk: Option<u64>, share: f64, speed: f64| Record {
        hobbit_limit: None,
        hobbit_disk_limit: disk,
        hobbit_efficiency: Some(0.9),
        hobbit_variant: variant.into(),
        hobbit_flags: format!("--expert-cache={share} --predictor={variant}"),
        ..with_cache(record("efficiency", "hobbit", [16, 48], speed), share)
    };
    let slow = Some(500_000_000);
    let rows = cells(
        "efficiency",
        vec![
            of("none", None, 0.25, 8.0),
            of("none", slow, 0.25, 2.0),
            of("none", None, 0.5, 10.0),
            of("stacked-gate", None, 0.25, 9.0),
            of("stacked-gate", slow, 0.25, 1.0),
            of("none", None, 0.25, 10.0),
        ],
    );
    let row = |at: usize| [1, 2, 3, 4, 7, 8, 9].map(|i| rows[at][i].as_str());
    assert_eq!(rows.len(), 3);
    assert_eq!(row(0), ["25.0 %", "as it is", "9.00 (8.00..10.0)", "90.0 %", "9.00", "1.00x", "90.0 %"]);
    assert_eq!(row(1), ["25.0 %", "0.5 GB/s", "2.00", "90.0 %", "1.00", "0.500x", "90.0 %"]);
    assert_eq!(row(2), ["50.0 %", "as it is", "10.0", "90.0 %", "-", "-", "-"]);
}
