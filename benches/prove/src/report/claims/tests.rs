use super::super::tests::synthetic::{GIB, MIB, all, entry, record, with_series, with_whole};
use super::*;

/// What was found by the check of that name, or else by the only one of the promise that contains `words`; whether it holds.
fn judged(records: Vec<Record>, words: &str) -> (String, String) {
    let entries: Vec<Entry> = records.into_iter().map(entry).collect();
    let checks = || ALL.iter().flat_map(|promise| promise.checks.iter().map(move |check| (promise, check)));
    let named = checks().find(|(_, (name, _))| *name == words);
    let only = checks().find(|(promise, (name, _))| name.is_empty() && promise.text.contains(words));
    let (_, (_, judge)) = named.or(only).unwrap();
    match judge(&entries) {
        None => (String::new(), "not measured".into()),
        Some(Finding { found, kept }) => (found, if kept { "yes" } else { "no" }.into()),
    }
}

#[test]
fn everything_holds_in_the_synthetic_set_but_what_does_not() {
    let rows = table(&all()).rows;
    let kept: Vec<&str> = rows.iter().map(|row| row[2].text.as_str()).collect();
    assert_eq!(kept, ["yes"; 8]);
    assert!(rows.iter().all(|row| row[3].text.is_empty()), "what is kept costs nothing");
    assert!(table(&[]).rows.is_empty());
    let nothing = table(&[entry(record("", "hobbit", [0, 8], 1.0))]);
    assert_eq!(nothing.rows.iter().filter(|row| row[2].text == "not measured" && row[2].bold).count(), 7);
}

#[test]
fn what_is_not_kept_says_what_that_costs() {
    let slower = vec![record("peers", "hobbit", [0, 8], 1.0), record("peers", "swift", [0, 8], 2.0)];
    let table = table(&slower.into_iter().map(entry).collect::<Vec<_>>());
    assert_eq!((table.rows[0][2].text.as_str(), table.rows[0][2].bold), ("no", true), "it stands out");
    assert_eq!(table.rows[0][3].text, ALL[0].cost);
    assert!(ALL.iter().all(|promise| !promise.cost.is_empty() && !promise.checks.is_empty()));
    assert_eq!(table.rows[1][1].text, "median no records; mean no records");
}

#[test]
fn the_closest_peer_is_named_and_may_win() {
    let peers = |speed: f64| {
        vec![
            record("peers", "hobbit", [0, 8], 10.0),
            record("peers", "llama.cpp", [0, 8], 0.5),
            record("peers", "swift", [0, 8], speed),
            Record {
                hobbit_outcome: "killed".into(),
                hobbit_decode_ts: None,
                ..record("peers", "greedy", [0, 8], 99.0)
            },
        ]
    };
    let (found, kept) = judged(peers(4.0), "every other engine");
    assert_eq!(kept, "yes");
    assert_eq!(
        found,
        "to the best other: 2.50x (swift, synthetic in 2.00 GiB, tg8); no speed somewhere (failed or killed): greedy"
    );
    assert_eq!(judged(peers(10.5), "every other engine").1, "no");
    let mut killed = peers(4.0);
    killed[0].hobbit_outcome = "killed".into();
    let (found, kept) = judged(killed, "every other engine");
    assert!(kept == "no" && found.contains("hobbit has no speed") && found.contains("killed"), "{found}");
    // Other limits are other races.
    let elsewhere = Record { hobbit_limit: Some(GIB), ..record("peers", "swift", [0, 8], 99.0) };
    assert_eq!(judged(vec![record("peers", "hobbit", [0, 8], 1.0), elsewhere], "every other engine").1, "not measured");
}

#[test]
fn overhead_and_startup_go_by_the_worst_model() {
    let pair = |label: &str, model: &str, ratio: f64| -> Vec<Record> {
        let of = |engine: &str, ns: f64| Record {
            model_filename: model.into(),
            hobbit_decode_median_ns: Some(ns as u64),
            hobbit_first_token_ns: Some(ns as u64),
            ..record(label, engine, [1, 8], 1e9 / ns)
        };
        vec![of("hobbit", 1e8 * ratio), of("llama.cpp", 1e8)]
    };
    let both = |label, ratio| [pair(label, "a", 0.95), pair(label, "b", ratio)].concat();
    assert_eq!(judged(both("resident", 1.019), "median"), ("+1.90 % (b in 2.00 GiB, pp1+tg8)".into(), "yes".into()));
    assert_eq!(judged(both("resident", 1.021), "median").1, "no");
    assert_eq!(judged(both("startup", 0.99), "first token").1, "yes");
    assert_eq!(
        judged(both("startup", 1.01), "first token"),
        ("0.990x as fast (b in 2.00 GiB, pp1+tg8)".into(), "no".into())
    );
    // A few long tokens, which the median does not see.
    let mut uneven = both("resident", 1.0);
    uneven[2].hobbit_decode_ts = uneven[3].hobbit_decode_ts.map(|speed| speed / 1.05);
    assert_eq!(judged(uneven.clone(), "median").0, "+0.00 % (b in 2.00 GiB, pp1+tg8)");
    assert_eq!(judged(uneven, "mean"), ("+5.00 % (b in 2.00 GiB, pp1+tg8)".into(), "no".into()));
    let mut failed = both("resident", 1.0);
    failed[0].hobbit_outcome = "failed: x".into();
    assert_eq!(judged(failed, "mean").1, "no", "no figure is no success");
}

/// hobbit's and llama.cpp's whole command at budgets in percent of the model's 5 GiB.
fn commands(of: &[(u64, f64, f64)]) -> Vec<Record> {
    let at = |percent: u64, engine: &str, seconds: f64| Record {
        hobbit_limit: Some(5 * GIB * percent / 100),
        ..with_whole(record("fits", engine, [12, 32], 32.0 / seconds), seconds)
    };
    of.iter().flat_map(|&(percent, own, stock)| [at(percent, "hobbit", own), at(percent, "llama.cpp", stock)]).collect()
}

#[test]
fn the_whole_command_counts_where_the_model_fits() {
    let words = "whole command";
    let (found, kept) = judged(commands(&[(50, 9.0, 3.0), (100, 3.0, 3.0), (130, 3.03, 3.0)]), words);
    assert_eq!((found.as_str(), kept.as_str()), ("+1.00 % (synthetic in 6.50 GiB, pp12+tg32)", "yes"));
    assert_eq!(judged(commands(&[(100, 5.0, 3.3)]), words).1, "no");
    assert_eq!(judged(commands(&[(50, 9.0, 3.0)]), words).1, "not measured");
    let mut killed = commands(&[(100, 3.0, 3.0)]);
    killed[0].hobbit_outcome = "killed".into();
    assert_eq!(judged(killed, words).1, "no");
}

#[test]
fn more_memory_is_never_slower() {
    let words = "dip";
    let rising = [(30, 9.0, 30.0), (90, 5.0, 9.0), (100, 5.1, 3.0), (130, 3.0, 3.0)];
    let (found, kept) = judged(commands(&rising), words);
    assert_eq!(kept, "yes", "{found}");
    assert!(found.starts_with("-1.96 % to the best with less (the whole command of synthetic in 5.00 GiB"), "{found}");
    assert_eq!(judged(commands(&[(30, 9.0, 30.0), (90, 4.0, 9.0), (100, 5.0, 3.0)]), words).1, "no");
    let mut killed = commands(&rising);
    killed[6].hobbit_outcome = "killed".into();
    let (found, kept) = judged(killed, words);
    assert!(kept == "no" && found.contains("killed: synthetic in 6.50 GiB"), "{found}");
    let mut starved = commands(&rising);
    starved[0].hobbit_outcome = "killed".into();
    assert_eq!(judged(starved, words).1, "yes", "too little memory is no dip");
}

#[test]
fn beside_busy_processes_llama_cpp_is_the_measure() {
    let words = "prompt";
    let of = |busy: u32, own: f64, stock: f64| {
        [("hobbit", own), ("llama.cpp", stock)]
            .map(|(engine, speed)| Record { hobbit_busy: Some(busy), ..record("contended", engine, [16, 8], speed) })
    };
    let (found, kept) = judged([of(0, 1.0, 9.0), of(1, 9.0, 5.0)].concat(), words);
    assert_eq!((found.as_str(), kept.as_str()), ("1.80x as fast (synthetic in 2.00 GiB, pp16+tg8, beside 1)", "yes"));
    assert_eq!(judged([of(0, 9.0, 9.0), of(1, 4.8, 5.0)].concat(), words).1, "no");
    assert_eq!(judged(of(0, 9.0, 9.0).to_vec(), words).1, "not measured", "nobody was busy");
}

#[test]
fn memory_goes_by_the_budget_and_a_killed_run_breaks_it() {
    let of = |peak: Option<u64>, budget: Option<u64>| Record {
        hobbit_peak_rss: peak,
        hobbit_budget: budget,
        ..record("peers", "hobbit", [0, 8], 1.0)
    };
    let words = "within the budget";
    assert_eq!(judged(vec![of(Some(2 * GIB), None)], words).1, "yes");
    assert_eq!(judged(vec![of(Some(2 * GIB), Some(2 * GIB - 1))], words).1, "no");
    let killed = Record { hobbit_outcome: "killed".into(), ..of(Some(GIB), None) };
    let (found, kept) = judged(vec![of(Some(GIB), None), killed, of(None, None)], words);
    assert_eq!(
        (found.as_str(), kept.as_str()),
        ("1 of 2; at most 50.0 % (synthetic in 2.00 GiB); 1 killed; 1 failed without a figure", "no")
    );
    let other = Record { hobbit_engine: "llama.cpp".into(), ..of(Some(9 * GIB), None) };
    let unlimited = Record { hobbit_limit: None, ..of(Some(9 * GIB), None) };
    assert_eq!(judged(vec![other, unlimited], words).1, "not measured");
}

#[test]
fn one_unequal_logit_is_one_too_many_unless_it_was_meant() {
    let of = |equal: u64, precision: &str| Record {
        hobbit_logits_compared: Some(100),
        hobbit_logits_equal: Some(equal),
        hobbit_precision: Some(precision.into()),
        ..record("resident", "hobbit", [0, 8], 1.0)
    };
    assert_eq!(
        judged(vec![of(100, "exact"), of(7, "dynamic")], "bit-identical"),
        ("100 of 100 evaluations".into(), "yes".into())
    );
    assert_eq!(
        judged(vec![of(100, "exact"), of(99, "exact")], "bit-identical"),
        ("199 of 200 evaluations".into(), "no".into())
    );
}

#[test]
fn long_runs_are_flat_or_not() {
    let long = |growth: u64| with_series(record("long", "hobbit", [0, 1000], 10.0), 1000, growth);
    // From the tenth of 1 GiB + 500 MiB on, 900 tokens.
    let (found, kept) = judged(vec![long(0), long(20_000)], "RSS");
    assert_eq!((found.as_str(), kept.as_str()), ("+17.2 MiB, +1.13 % (synthetic)", "yes"));
    assert_eq!(judged(vec![long(0), long(100_000)], "RSS").1, "no");
    let shrinking = |record: &mut Record| record.more.hobbit_series.last_mut().unwrap().rss = 500 * MIB;
    let mut shrunk = long(0);
    shrinking(&mut shrunk);
    assert!(judged(vec![shrunk], "RSS").0.starts_with("-1"));

    let mut slow = long(0);
    slow.more.hobbit_steps_ns[900..].iter_mut().for_each(|ns| *ns = *ns * 21 / 20);
    assert_eq!(judged(vec![slow.clone()], "speed").1, "yes");
    slow.more.hobbit_steps_ns[900..].iter_mut().for_each(|ns| *ns *= 2);
    let (found, kept) = judged(vec![long(0), slow], "speed");
    assert!(kept == "no" && found.contains("-52.3"), "{found}");

    let mut leaking = long(0);
    leaking.more.hobbit_series.last_mut().unwrap().fds += 1;
    assert_eq!(judged(vec![long(0), leaking], "open files"), ("17 to 18 (synthetic)".into(), "no".into()));
    let mut heap = long(0);
    heap.more.hobbit_series.last_mut().unwrap().heap = Some(70 * MIB);
    assert_eq!(judged(vec![heap], "heap").1, "no");
    let killed = Record { hobbit_outcome: "killed".into(), ..record("long", "hobbit", [0, 1000], 1.0) };
    assert_eq!(judged(vec![killed], "RSS"), ("killed: synthetic".into(), "no".into()));
}
