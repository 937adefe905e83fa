//! The quality bench's judge can say no: whoever damages a model, or leaves out far too much of it, is found out, and
//! who changes nothing is not accused. What cannot be measured is refused before anything is.

#![allow(dead_code)] // The bench uses what is left.

#[path = "../../benches/quality/args.rs"]
mod args;
#[path = "../../benches/quality/arm.rs"]
mod arm;
#[path = "../../benches/quality/compare.rs"]
mod compare;
mod damage;
#[path = "../../benches/quality/measure.rs"]
mod measure;
mod refusals;
#[path = "../../benches/quality/requantise.rs"]
mod requantise;
#[path = "../../benches/quality/setup.rs"]
mod setup;
#[path = "../../benches/quality/text.rs"]
mod text;
#[path = "../../benches/quality/variant.rs"]
mod variant;

use std::path::{Path, PathBuf};

use arm::Arm;
use compare::{ERRORS_MAX, Loss, Row};
use hobbit::perplexity::estimate::Estimate;
use measure::Manner;
use text::{Extent, Text};
use variant::{Ready, Subject, Workshop};

const MANNER: Manner = Manner { whole_windows: false, threads: 1, alone: true };

fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(name)
}

#[test]
fn the_judge_says_no() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::new(&bundled("demo.gguf")).unwrap();
    let prose = bundled("demo-heldout-prose.txt");
    let extent = Extent { windows: Some(8), questions: Some(12) };
    let text = Text::new(&prose, "prose".into(), &subject.open().unwrap(), extent).unwrap();
    let workshop = Workshop { subject: &subject, dir: dir.path(), threads: 1, profiled: (&prose, 512) };
    let ready = |typed: &str| workshop.ready(&Arm::new(typed).unwrap()).unwrap();
    // The same flags on another file.
    let of_file = |file: &str, make: &dyn Fn(&Path)| {
        let path = dir.path().join(file);
        make(&path);
        Ready { path, ..ready("exact:") }
    };
    let reference = measure::reference(&subject, &ready("exact:"), &text, MANNER).unwrap();
    let row = |ready: &Ready, percent: f64| {
        let measured = measure::measure(&subject, ready, percent, &text, &reference, MANNER).unwrap();
        Row::new("prose", percent, subject.cache_bytes(percent), ready, measured)
    };

    // Equal arms: not one bit is another, however few experts are in memory.
    let equal = row(&ready("exact:"), 25.0);
    assert_eq!((equal.loss, equal.kl.value, equal.kl_999.value, equal.cost.value), (Loss::None, 0.0, 0.0, 0.0));
    let task = equal.task.as_ref().expect("questions were asked");
    assert_eq!((task.questions, task.change.value, task.change.uncertainty), (12, 0.0, 0.0));
    assert!(equal.bytes_per_token > 0.0 && equal.hit_rate.is_some_and(|rate| rate < 1.0) && equal.token_ms.is_some());
    // Nearly lossless: others, but no loss that could be told from chance.
    let smaller = row(&ready("uniform q6_k: --experts q6_k"), 25.0);
    assert!(smaller.loss == Loss::Within && smaller.kl.value > 0.0, "{smaller:?}");

    let bad = [
        ("two experts swapped", row(&of_file("swapped.gguf", &|to| damage::swap(&subject.path, to, 0, [0, 1])), 25.0)),
        ("a broken quant", row(&of_file("broken.gguf", &|to| damage::broken_quant(&subject.path, to, 2, 0)), 25.0)),
        ("nearly all dropped", row(&ready("drop: --precision dynamic --t1 0 --t2 0"), 5.0)),
    ];
    // Perplexity of so few tokens does not tell one silent expert of little use from chance; divergence does.
    let silent = row(&of_file("silent.gguf", &|to| damage::without_scales(&subject.path, to, 2, 0)), 25.0);
    let in_errors = |loss: Estimate| loss.value / loss.uncertainty;
    for (what, row) in bad.iter().chain([&("an expert without scales", silent.clone())]) {
        let errors = [row.cost, row.kl].map(in_errors);
        println!(
            "{what}: {:+.2} ± {:.2} %, in errors {errors:.1?}",
            100.0 * row.cost.value,
            100.0 * row.cost.uncertainty
        );
    }
    for (what, row) in &bad {
        assert_eq!(row.loss, Loss::Beyond, "{what}: {row:?}");
        assert!(row.same_top.value < 1.0 - ERRORS_MAX * row.same_top.uncertainty, "{what}: {:?}", row.same_top);
    }
    assert!(in_errors(silent.kl) > ERRORS_MAX && silent.kl.value > 2.0 * smaller.kl.value, "{silent:?}");
}
