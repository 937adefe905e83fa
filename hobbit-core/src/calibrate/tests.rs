use std::fs;

use super::*;

/// Records the requests, and answers with one figure or an error.
#[derive(Default)]
struct Fake {
    asked: Vec<String>,
    granted: Duration,
    broken: bool,
    figure: f64,
}

impl Fake {
    fn new() -> Self {
        Self { figure: 2e9, ..Self::default() }
    }

    fn answer(&mut self, what: &str, budget: Duration) -> Result<f64, String> {
        self.asked.push(what.to_owned());
        self.granted += budget;
        if self.broken { Err("no such thing".to_owned()) } else { Ok(self.figure) }
    }
}

impl Measure for Fake {
    fn upload(&mut self, budget: Duration) -> Result<Upload, String> {
        let figure = self.answer("upload", budget)?;
        Ok(Upload { pinned_bytes_per_s: Some(4.0 * figure), pageable_bytes_per_s: figure, latency_s: 1e-5 })
    }

    fn file_bytes_per_s(&mut self, budget: Duration) -> Result<f64, String> {
        self.answer("file", budget)
    }

    fn cpu_seconds_per_byte(&mut self, element_type: &str, budget: Duration) -> Result<f64, String> {
        self.answer(element_type, budget).map(f64::recip)
    }
}

fn wanted(types: &[&str]) -> Wanted {
    Wanted {
        machine: Machine {
            device: "CUDA0".into(),
            device_description: "A card".into(),
            driver: "CUDA 1".into(),
            cpu: "A CPU".into(),
            threads: 8,
        },
        element_types: types.iter().map(|&name| name.to_owned()).collect(),
        disk: Some(7),
        now_unix_s: 1_000_000_000,
    }
}

#[test]
fn figures_are_measured_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deep/down/calibration.json");
    // More digits than JSON returns.
    let mut first = Fake { figure: 532_690_134.169_351_64, ..Fake::new() };
    let measured = Calibration::load_or_measure(Some(&path), &wanted(&["q4_K", "q8_0", "q4_K"]), &mut first);
    assert_eq!(first.asked, ["upload", "file", "q4_K", "q8_0"]);
    assert_eq!((measured.notes.as_slice(), measured.from_cache), ([].as_slice(), false));

    let mut second = Fake::new();
    let loaded = Calibration::load_or_measure(Some(&path), &wanted(&["q8_0"]), &mut second);
    assert_eq!(second.asked, [""; 0]);
    assert_eq!(loaded, Calibrated { from_cache: true, ..measured.clone() });

    // Only what is missing: another type, another disk.
    let mut third = Fake::new();
    let more = Wanted { disk: Some(8), ..wanted(&["q4_K", "f16"]) };
    let more = Calibration::load_or_measure(Some(&path), &more, &mut third);
    assert_eq!(third.asked, ["file", "f16"]);
    assert_eq!(more.calibration.cpu_expert_seconds_per_byte.len(), 3);
    assert_eq!(more.calibration.file_disk, Some(8));
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no partial file is left");
}

#[test]
fn another_machine_another_version_or_a_month_later_is_measured_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("calibration.json");
    let base = wanted(&["q4_K"]);
    let machine = |change: fn(&mut Machine)| {
        let mut wanted = base.clone();
        change(&mut wanted.machine);
        wanted
    };
    let all = ["upload", "file", "q4_K"];
    for wanted in [
        base.clone(),
        machine(|machine| machine.device = "CUDA1".into()),
        machine(|machine| machine.driver = "CUDA 2".into()),
        machine(|machine| machine.cpu = "Another".into()),
        machine(|machine| machine.threads = 4),
    ] {
        let mut fake = Fake::new();
        Calibration::load_or_measure(Some(&path), &wanted, &mut fake);
        assert_eq!(fake.asked, all, "{wanted:?}");
    }
    // All are kept.
    let mut fake = Fake::new();
    assert!(Calibration::load_or_measure(Some(&path), &base, &mut fake).from_cache);
    for (seconds, asked) in [(Calibration::AGE_MAX_S, 0), (Calibration::AGE_MAX_S + 1, 3), (0, 3)] {
        let mut fake = Fake::new();
        let later = Wanted { now_unix_s: base.now_unix_s + seconds, ..base.clone() };
        let later = if seconds == 0 { Wanted { now_unix_s: 1, ..base.clone() } } else { later };
        Calibration::load_or_measure(Some(&path), &later, &mut fake);
        assert_eq!(fake.asked.len(), asked, "after {seconds} s");
    }
    Calibration::load_or_measure(Some(&path), &base, &mut Fake::new());
    let text = fs::read_to_string(&path).unwrap().replace(env!("CARGO_PKG_VERSION"), "0.0.1-old");
    fs::write(&path, text).unwrap();
    let mut fake = Fake::new();
    assert_eq!(Calibration::load_or_measure(Some(&path), &base, &mut fake).notes, [""; 0]);
    assert_eq!(fake.asked, all);
}

#[test]
fn a_damaged_or_foreign_file_is_ignored_with_a_note_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("calibration.json");
    let base = wanted(&["q4_K"]);
    Calibration::load_or_measure(Some(&path), &base, &mut Fake::new());
    let good = fs::read_to_string(&path).unwrap();
    for (bytes, why) in [
        (String::new(), "damaged"),
        (good[..good.len() / 2].to_owned(), "damaged"),
        ("[1, 2]".to_owned(), "damaged"),
        (good.replace("hobbit-calibration", "another"), "\"another\" version 1"),
        (good.replace("\"version\": 1", "\"version\": 2"), "version 2"),
        (good.replace("8000000000.0", "-1.0"), "not a positive number"),
        (" ".repeat(300 << 10), "longer than"),
    ] {
        assert_ne!(bytes, good);
        fs::write(&path, &bytes).unwrap();
        let mut fake = Fake::new();
        let found = Calibration::load_or_measure(Some(&path), &base, &mut fake);
        assert!(found.notes.len() == 1 && found.notes[0].contains(why), "{:?}", found.notes);
        assert!(found.notes[0].contains("calibration.json"));
        assert_eq!(fake.asked, ["upload", "file", "q4_K"]);
        assert_eq!(fs::read_to_string(&path).unwrap(), good);
    }
}

#[test]
fn a_place_that_cannot_be_read_or_written_costs_a_note_only() {
    let dir = tempfile::tempdir().unwrap();
    let found = Calibration::load_or_measure(Some(dir.path()), &wanted(&[]), &mut Fake::new());
    assert!(found.notes[0].contains("not a regular file") && found.notes[1].contains("not kept"), "{:?}", found.notes);
    assert!(found.calibration.upload_bytes_per_s.is_some());

    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let found = Calibration::load_or_measure(Some(&file.join("calibration.json")), &wanted(&[]), &mut Fake::new());
    assert!(found.notes.last().unwrap().contains("not kept"), "{:?}", found.notes);

    let found = Calibration::load_or_measure(None, &wanted(&[]), &mut Fake::new());
    assert_eq!((found.notes.len(), found.from_cache), (0, false));
}

#[test]
fn failed_measurements_are_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("calibration.json");
    let nan = Fake { figure: f64::NAN, ..Fake::default() };
    let broken = Fake { broken: true, ..Fake::new() };
    for mut fake in [nan, broken] {
        let found = Calibration::load_or_measure(Some(&path), &wanted(&["q4_K"]), &mut fake);
        assert_eq!((found.notes.len(), fake.asked.len()), (3, 3), "{:?}", found.notes);
        assert!(found.notes[0].starts_with("cannot measure copies to CUDA0: "), "{:?}", found.notes);
        assert!(found.calibration.upload_pageable_bytes_per_s.is_none());
        assert!(found.calibration.cpu_expert_seconds_per_byte.is_empty());
        assert!(!path.exists(), "there is nothing to keep");
    }
}

#[test]
fn all_figures_together_are_granted_a_second() {
    let names: Vec<String> = (0..20).map(|i| format!("type{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for n in [0, 1, 3, 8, 20] {
        let mut fake = Fake::new();
        Calibration::load_or_measure(None, &wanted(&names[..n]), &mut fake);
        assert_eq!(fake.asked.len(), 2 + n.min(Calibration::ELEMENT_TYPES_MAX));
        assert!(fake.granted <= Calibration::BUDGET, "{:?}", fake.granted);
        assert!(fake.granted >= 3 * Calibration::BUDGET / 11);
    }
}

#[test]
fn the_file_forgets_the_oldest_machines() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("calibration.json");
    for threads in 0..40 {
        let mut wanted = wanted(&["q4_K"]);
        wanted.machine.threads = threads;
        Calibration::load_or_measure(Some(&path), &wanted, &mut Fake::new());
    }
    let kept: Vec<u32> = read(&path).unwrap().iter().map(|kept| kept.machine.threads).collect();
    assert_eq!(kept, (8..40).rev().collect::<Vec<_>>());
}

#[test]
fn it_is_shown_in_short_aligned_lines() {
    let shown = Calibration::load_or_measure(None, &wanted(&["q4_K"]), &mut Fake::new()).calibration.to_string();
    let expected = "CUDA0: A card
  upload, pinned              8.00 GB/s
  upload, pageable            2.00 GB/s
  file reads                  2.00 GB/s
  upload latency              10.0 µs
  CPU experts, q4_K           2.00 GB/s, 8 threads";
    assert_eq!(shown, expected);
}

#[test]
fn figures_seed_the_balance() {
    use crate::load::balance::Costs;

    let measured = Calibration::load_or_measure(None, &wanted(&["q4_K"]), &mut Fake::new()).calibration;
    let costs = Costs::seeded(&measured, "q4_K", true);
    assert_eq!((costs.link.get(), costs.cpu.get()), (Some(8e9_f64.recip()), Some(2e9_f64.recip())));
    assert_eq!(costs.link_latency, 1e-5);
    assert_eq!(Costs::seeded(&measured, "f16", false), Costs::seeded(&measured, "q4_K", false));
    assert_eq!(Costs::seeded(&measured, "q4_K", false).link.get(), Some(2e9_f64.recip()));
    assert_eq!(Costs::seeded(&Calibration::default(), "q4_K", true), Costs::default());
}
