use super::*;
use crate::expert::{ExpertId, SliceKind};
use crate::gguf::{ExpertTensor, LayerExperts};
use crate::profile::{Goal, MeasuredMix, Mix, WidthsError, widths};

fn q2() -> GgmlType {
    GgmlType::from_name("q2_k").unwrap()
}

/// One layer of two experts, `[256, 256]` and `[96, 256]`: down's rows are no blocks of 256.
fn map() -> ExpertMap {
    let tensor = |kind: SliceKind, ne0: u64| ExpertTensor {
        kind,
        name: format!("blk.3.{}.weight", kind.tensor_stem()),
        dtype: GgmlType::Q8_0,
        ne0,
        ne1: 256,
        n_expert: 2,
        file: 0,
        offset: 0,
        slice_bytes: GgmlType::Q8_0.row_bytes(ne0).unwrap() * 256,
    };
    let tensors = vec![tensor(SliceKind::Up, 256), tensor(SliceKind::Down, 96)];
    ExpertMap { layers: vec![LayerExperts { layer: 3, n_expert: 2, tensors }] }
}

fn profile() -> Profile {
    let experts = vec![0.001, 0.003];
    let types = SliceTypes::lowered(&map().layers[0], q2());
    let layers = vec![LayerWidth { layer: 3, types, kl: 0.004, experts, measured: vec![1] }];
    let width = Width { dtype: q2(), kl: 0.003, perplexity_increase: 0.002, scale: 2.0, layers };
    Profile {
        format: FORMAT.to_owned(),
        version: VERSION,
        model: ModelId {
            file: "toy.gguf".to_owned(),
            architecture: "toy".to_owned(),
            n_layers: 1,
            n_experts: 2,
            n_expert_used: 1,
            header_sha256: "00".repeat(32),
        },
        text: TextId { file: "text.txt".to_owned(), tokens: 4096, context: 512, perplexity: 20.5 },
        thresholds: Some(ChosenThresholds {
            t1: 0.625,
            t2: 0.9,
            goal: "max loss 1%".to_owned(),
            shares: Shares { high: 0.67, low: 0.3, skip: 0.03 },
        }),
        mixes: vec![Mixes {
            text: "text.txt".to_owned(),
            text_sha256: "00".repeat(32),
            tokens: 2048,
            expert_cache: "25%".to_owned(),
            cache_share: 0.25,
            high: "q8_0".to_owned(),
            low: None,
            exact_bytes_per_token: 1e5,
            mixes: vec![MeasuredMix {
                mix: Mix { cache_bias: 0.2, ..Mix::EXACT },
                loss: 0.0075,
                error: 0.001,
                bytes_per_token: 4.5e4,
            }],
        }],
        widths: vec![width],
        bounded: vec![Bounded { max_loss: 0.02, lowered: 1, perplexity_increase: 0.0175, runs: vec![(1, 0.0175)] }],
        norms: vec![LayerNorms { layer: 0, norms: vec![1.5, 2.5] }],
    }
}

fn parse(text: &str) -> Result<Profile, ProfileError> {
    Profile::parse(text, Path::new("p.json"))
}

#[test]
fn a_profile_survives_writing_and_reading() {
    let json = profile().to_json();
    assert_eq!(parse(&json).unwrap(), profile());
    for part in [r#""type": "q2_K""#, r#""ffn_up_exps": "q2_K""#, r#""ffn_down_exps": "iq4_nl""#, r#""t1": 0.625"#] {
        assert!(json.contains(part), "{json}");
    }
    // Fields that earlier programs wrote.
    let older = json.replacen('{', r#"{"prefill": {"prefill_low": 0.25},"#, 1);
    assert_eq!(parse(&older).unwrap(), profile());
}

#[test]
fn other_versions_and_files_are_refused() {
    let json = profile().to_json();
    let message = |text: &str| parse(text).unwrap_err().to_string();
    assert!(message("").starts_with("p.json: "));
    assert!(message("{}").contains("missing field `format`"));
    assert!(message(&json.replace(FORMAT, "other")).contains("format is 'other'"));
    assert!(message(&json.replace("\"version\": 1", "\"version\": 2")).contains("version 2 of the format, expected 1"));
    assert!(message(&json.replace("q2_K\"", "q9\"")).contains("unknown type 'q9'"));
    assert!(message(&json.replace("ffn_up_exps", "ffn_sideways")).contains("unknown slice 'ffn_sideways'"));
    for (own, other, reason) in [
        ("\"calibration\": 2.0", "\"calibration\": -2.0", "a sensitivity is -2"),
        ("1.5,", "1e39,", "the norm of an expert is inf"),
        ("\"t1\": 0.625", "\"t1\": 0.95", "the thresholds are 0.95 and 0.9"),
    ] {
        assert!(message(&json.replace(own, other)).contains(reason), "{reason}");
    }
    assert!(norms_of_json(r#"[{"layer": 0, "norms": [1e39]}]"#).is_err());
}

#[test]
fn widths_come_with_the_types_of_every_slice() {
    let chosen = widths(&profile(), &map(), Goal::MaxLoss(0.0021)).unwrap();
    let id = ExpertId { layer: 3, index: 0 };
    assert_eq!(chosen.types.keys().collect::<Vec<_>>(), [&id], "the more robust one");
    let types = chosen.types[&id];
    assert_eq!(types.get(SliceKind::Up), Some(q2()));
    assert_eq!(types.get(SliceKind::Down).map(GgmlType::name), Some("iq4_nl"));
    assert_eq!(types.get(SliceKind::Gate), None);
    assert!((chosen.loss - 0.002f64.exp_m1()).abs() < 1e-12);
    // Slices at block borders: 69632 + 26112 as they are, 21504 + 13824 lowered.
    assert_eq!(chosen.record_bytes, (69632 + 28672) + (24576 + 16384));
    assert_eq!(chosen.counts, [(q2(), 1)].into());
}

/// EdgeMoE (section III-B): bounds by uniform widths first, then the most robust experts at the lower one.
#[test]
fn bounds_leave_two_neighbouring_widths() {
    let width = |name: &str, loss: f64| {
        let dtype = GgmlType::from_name(name).unwrap();
        let types = SliceTypes::lowered(&map().layers[0], dtype);
        let (experts, measured) = (vec![loss, 3.0 * loss], Vec::new());
        let layers = vec![LayerWidth { layer: 3, types, kl: 4.0 * loss, experts, measured }];
        Width { dtype, kl: 4.0 * loss, perplexity_increase: (4.0 * loss).exp_m1(), scale: 1.0, layers }
    };
    let widths_of = |goal| {
        let profile =
            Profile { widths: vec![width("q6_k", 0.001), width("q4_k", 0.002), width("q2_k", 0.01)], ..profile() };
        let chosen = widths(&profile, &map(), goal).unwrap();
        let names = (0..2).map(|index| {
            let types = chosen.types.get(&ExpertId { layer: 3, index })?;
            Some(types.get(SliceKind::Up)?.name().to_owned())
        });
        names.map(|name| name.unwrap_or_else(|| "own".to_owned())).collect::<Vec<_>>()
    };
    // Every expert at q4_K loses 0.8 %, at q2_K 4.1 %.
    assert_eq!(widths_of(Goal::Bounded(0.02)), ["q2_K", "q4_K"]);
    assert_eq!(widths_of(Goal::Bounded(0.008)), ["q4_K", "q6_K"], "the logarithm of 0.8 % is below 0.008");
    assert_eq!(widths_of(Goal::Bounded(0.002)), ["q6_K", "own"]);
    assert_eq!(widths_of(Goal::Bounded(0.0)), ["own", "own"]);
    assert_eq!(widths_of(Goal::Bounded(1.0)), ["q2_K", "q2_K"]);
}

#[test]
fn another_models_layers_and_empty_profiles_are_refused() {
    let mut other = map();
    other.layers[0].n_expert = 3;
    other.layers[0].tensors.iter_mut().for_each(|tensor| tensor.n_expert = 3);
    let refused = widths(&profile(), &other, Goal::MaxLoss(0.1)).unwrap_err();
    assert_eq!(refused, WidthsError::Layer { layer: 3, found: 2, expected: 3 });
    other.layers[0].layer = 4;
    assert!(matches!(widths(&profile(), &other, Goal::MaxLoss(0.1)), Err(WidthsError::Layer { layer: 4, .. })));
    let empty = Profile { widths: Vec::new(), ..profile() };
    assert_eq!(widths(&empty, &map(), Goal::MaxLoss(0.1)), Err(WidthsError::NoWidths));
}
