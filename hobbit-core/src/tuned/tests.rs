//! Tuned policies survive writing and reading, and damage is refused.

use super::*;
use serde_json::{Value, json};

fn layer(layer: u16, n_expert: u16) -> LayerPenalty {
    let slots: Vec<u32> = vec![0, 1, u32::from(n_expert)];
    LayerPenalty { layer, n_expert, slots, penalty: vec![2.0, 1.0, 0.25] }
}

fn tuned() -> TunedPolicy {
    TunedPolicy {
        format: TUNED_FORMAT.into(),
        version: TUNED_VERSION,
        policy: "hobbit".into(),
        weights: [0.5, 0.25, 0.125, 0.125],
        t1: Some(0.5),
        t2: Some(0.75),
        shares: None,
        tuned_on: TunedOn {
            traces: vec!["a.trace".into()],
            model: "toy.gguf".into(),
            architecture: "toymoe".into(),
            tokens: 10,
            budget: "recorded".into(),
        },
        penalty: 3.0,
        penalty_lru: 4.0,
        replays: 50,
        layers: vec![layer(1, 8), layer(3, 4)],
    }
}

fn changed(change: impl FnOnce(&mut Value)) -> Result<TunedPolicy, String> {
    let mut value = json!(tuned());
    change(&mut value);
    TunedPolicy::parse(&value.to_string(), "a.json").map_err(|error| error.to_string())
}

#[test]
fn what_is_written_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.json");
    std::fs::write(&path, tuned().to_json()).unwrap();
    let read = TunedPolicy::read(&path).unwrap();
    assert_eq!(read, tuned());
    assert_eq!(read.hobbit_weights(), Some(Weights { lru: 0.5, lfu: 0.25, lhu: 0.125, fld: 0.125 }));
    assert_eq!((read.thresholds(), read.has_penalties()), (Some((0.5, 0.75)), true));
    assert_eq!(TunedPolicy { policy: "lfu".into(), ..tuned() }.hobbit_weights(), None, "they are another policy's");
    let error = TunedPolicy::read(&dir.path().join("none")).unwrap_err().to_string();
    assert!(error.contains("none: cannot read this tuned policy") && error.contains("hobbit-sim calibrate"), "{error}");
}

#[test]
fn damage_is_reported_with_file_and_remedy() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 14] = [
        (|value| value["format"] = json!("hobbit-profile"), "format is 'hobbit-profile', expected 'hobbit-policy'"),
        (|value| value["version"] = json!(1), "version 1 of the format, expected 2"),
        (|value| drop(value.as_object_mut().unwrap().remove("layers")), "missing field `layers`"),
        (|value| value["weights"] = json!([0.5, 0.5]), "invalid length 2"),
        (|value| value["weights"] = json!([0.5, -0.5, 0.0, 0.0]), "weights are [0.5, -0.5, 0.0, 0.0], expected four"),
        (|value| value["t1"] = json!(0.9), "t1 is Some(0.9) and t2 Some(0.75), expected"),
        (|value| value["t2"] = json!(null), "t2 None, expected"),
        (|value| value["t2"] = json!(7), "t2 Some(7.0), expected"),
        (|value| value["layers"][1]["layer"] = json!(1), "layer 1 follows layer 1, expected ascending"),
        (
            |value| value["layers"][0]["slots"] = json!([0, 1, 7]),
            "layer 1's numbers of slots are not ascending from 0 to 8",
        ),
        (|value| value["layers"][0]["slots"] = json!([0, 9, 8]), "not ascending"),
        (|value| value["layers"][0]["slots"] = json!([0, 8]), "penalties for 3 numbers of slots, expected 2"),
        (|value| value["layers"][0]["penalty"][1] = json!(-1), "a penalty of layer 1 is -1, expected"),
        (|value| value["layers"][0]["slots"] = json!([]), "penalties for 3 numbers of slots, expected 0"),
    ];
    for (change, part) in cases {
        let error = changed(change).unwrap_err();
        assert!(error.starts_with("a.json: ") && error.contains(part), "{error}, expected {part}");
        assert!(error.contains("hobbit-sim calibrate"), "{error}");
    }
    let text = tuned().to_json();
    for cut in [0, 1, text.len() / 2, text.len() - 3] {
        let error = TunedPolicy::parse(&text[..cut], "a.json").unwrap_err().to_string();
        assert!(error.starts_with("a.json: EOF"), "{error}");
    }
}

#[test]
fn another_model_is_refused() {
    let check = |architecture: &str, layers: &[(u16, u16)]| {
        let checked = tuned().check_model(architecture, layers, "a.json", Path::new("m.gguf"));
        checked.map_err(|error| error.to_string())
    };
    assert_eq!(check("toymoe", &[(1, 8), (3, 4)]), Ok(()));
    for (architecture, layers, part) in [
        ("llama", &[(1, 8), (3, 4)][..], "general.architecture is toymoe, expected llama"),
        ("toymoe", &[(1, 8)], "number of layers with experts is 2, expected 1"),
        ("toymoe", &[(1, 8), (3, 8)], "number of experts is 12, expected 16"),
        ("toymoe", &[(1, 8), (2, 4)], "a layer is layer 3 of 4 experts, expected layer 2 of 4 experts"),
        ("toymoe", &[(1, 4), (3, 8)], "a layer is layer 1 of 8 experts, expected layer 1 of 4 experts"),
    ] {
        let error = check(architecture, layers).unwrap_err();
        assert!(error.starts_with("a.json: this policy was tuned on toy.gguf, not on m.gguf: "), "{error}");
        assert!(error.contains(part) && error.ends_with("hobbit-sim calibrate"), "{error}");
    }
}

#[test]
fn between_measured_numbers_of_slots_is_a_straight_line() {
    let layer = layer(1, 8);
    let at = |n| layer.at(n).unwrap();
    assert_eq!([-1.0, 0.0, 0.5, 1.0, 4.5, 8.0, 99.0].map(at), [2.0, 2.0, 1.5, 1.0, 0.625, 0.25, 0.25]);
    assert_eq!(LayerPenalty::default().at(1.0), None);
    let none = TunedPolicy { layers: vec![LayerPenalty { layer: 1, n_expert: 8, ..Default::default() }], ..tuned() };
    assert_eq!((none.has_penalties(), none.penalty_of(1)), (false, None));
    assert_eq!((tuned().penalty_of(3), tuned().penalty_of(2)), (Some(&tuned().layers[1]), None));
}
