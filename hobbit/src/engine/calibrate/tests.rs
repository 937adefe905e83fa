use super::*;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo.gguf");

#[test]
fn this_machines_cpu_is_measured_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("calibration.json");
    let [cpu] = chosen(&DeviceChoice::None).unwrap()[..] else { panic!("one CPU device was expected") };
    let subject =
        Subject { threads: 2, element_types: element_types_of(DEMO.as_ref()).unwrap(), file: Some(DEMO.into()) };
    let measured = calibrate(cpu, &subject, Some(&cache));
    assert_eq!((measured.notes.as_slice(), measured.from_cache), ([].as_slice(), false));
    let figures = &measured.calibration;
    assert_eq!((figures.machine.device.as_str(), figures.machine.threads), ("CPU", 2));
    let single = [figures.upload_pageable_bytes_per_s, figures.upload_latency_s, figures.file_bytes_per_s];
    let all: Vec<f64> = single
        .into_iter()
        .map(|figure| figure.expect("a CPU, memory and a file can be measured"))
        .chain(figures.cpu_expert_seconds_per_byte.values().copied())
        .collect();
    assert!(all.len() > single.len() && all.iter().all(|figure| *figure > 0.0 && figure.is_finite()), "{figures:?}");
    let types: Vec<&str> = subject.element_types.iter().map(|dtype| dtype.name()).collect();
    assert!(types.iter().all(|name| figures.cpu_expert_seconds_per_byte.contains_key(*name)), "{types:?}");

    let again = calibrate(cpu, &subject, Some(&cache));
    assert_eq!(again, Calibrated { from_cache: true, ..measured });
}

#[test]
fn a_device_or_a_model_that_is_not_there_is_named() {
    let options = DeviceOptions { devices: DeviceChoice::Named(vec!["CUDA9".into()]), ..DeviceOptions::default() };
    let error = calibrate_report(&options, None).unwrap_err().to_string();
    assert!(error.contains("'CUDA9'") && error.contains("CPU"), "{error}");
    let error = calibrate_report(&DeviceOptions::default(), Some("/no/such.gguf".as_ref())).unwrap_err().to_string();
    assert!(error.contains("/no/such.gguf"), "{error}");
    assert_eq!(chosen(&DeviceChoice::Named(vec!["CPU".into()])).unwrap().len(), 1);
}
