//! What is compared with what.

use hobbit::PrecisionOptions;
use hobbit::gguf::GgmlType;
use hobbit::options::{LowShare, PrecisionMode};
use serde::{Serialize, Serializer};

/// Thresholds of the sweep: HOBBIT's, and around them.
const THRESHOLDS: [(f32, f32); 11] = [
    (0.5, 0.8),
    (0.5, 0.9),
    (0.6, 0.8),
    (0.6, 0.9),
    (0.6, 1.0),
    (0.7, 0.9),
    (0.7, 0.95),
    (0.8, 0.9),
    (0.8, 0.95),
    (0.8, 1.0),
    (0.9, 0.95),
];
/// Percent of the expert cache.
const LOW_SHARES: [f64; 6] = [0.0, 5.0, 10.0, 15.0, 25.0, 40.0];
/// Share of a layer's active experts.
const PREFILL_LOW: [f32; 4] = [0.0, 0.1, 0.25, 0.5];

/// Type of the experts; `None`: as in the model.
pub type Quant = Option<GgmlType>;

/// What a row stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Every expert, as in the model.
    Exact,
    /// Missing experts of little weight in low precision.
    Dynamic,
    /// The same experts left out.
    ColdDrop,
    /// Every expert, of a smaller type.
    Uniform,
}

/// One run over one text.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    pub kind: Kind,
    pub label: String,
    /// Of the exact model's expert bytes; every row gets these bytes.
    pub cache_percent: f64,
    #[serde(serialize_with = "name")]
    pub high: Quant,
    #[serde(serialize_with = "name")]
    pub low: Quant,
    /// Low versions are the high ones' own bits: a nested pack.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub nested: bool,
    pub t1: f32,
    pub t2: f32,
    pub renormalise: bool,
    pub low_share: LowShare,
    /// Windows are evaluated in one batch, in which this share comes in low precision; `None`: token by token.
    pub prefill_low: Option<f32>,
}

fn name<S: Serializer>(quant: &Quant, to: S) -> Result<S::Ok, S::Error> {
    quant.map(|dtype| dtype.to_string()).serialize(to)
}

/// The high and the low type, `None` for the high one's own bits in a nested pack. A high type that is the model's own is its
/// own bytes.
pub type Pair = (GgmlType, Quant);

/// How a nested pack's low versions are typed.
const NESTED: &str = "nested";

/// A pair that was typed as `q8_0+q2_k`, or `q8_0+nested`.
pub fn pair(text: &str) -> Result<Pair, String> {
    let dtype = |word| GgmlType::from_name(word).ok_or_else(|| format!("'{word}': expected a type such as q4_k"));
    let (high, low) = text.split_once('+').ok_or_else(|| format!("'{text}': expected HIGH+LOW, as in q8_0+q2_k"))?;
    match (dtype(high)?, low) {
        (GgmlType::Q8_0, NESTED) => Ok((GgmlType::Q8_0, None)),
        (other, NESTED) => Err(format!("'{text}': found {other}, expected q8_0: other types have no planes")),
        (high, low) => Ok((high, Some(dtype(low)?))),
    }
}

impl Case {
    /// Every expert, as in the model.
    pub fn exact(cache_percent: f64) -> Self {
        Self {
            kind: Kind::Exact,
            label: "exact".to_owned(),
            cache_percent,
            high: None,
            low: None,
            nested: false,
            t1: PrecisionOptions::T1,
            t2: PrecisionOptions::T2,
            renormalise: false,
            low_share: LowShare::Auto,
            prefill_low: None,
        }
    }

    /// As the engine is told.
    pub fn precision(&self) -> PrecisionOptions {
        let is_dynamic = matches!(self.kind, Kind::Dynamic | Kind::ColdDrop);
        PrecisionOptions {
            mode: Some(if is_dynamic { PrecisionMode::Dynamic } else { PrecisionMode::Exact }),
            t1: Some(self.t1),
            t2: Some(self.t2),
            renormalise: self.renormalise,
            prefill_low: Some(self.prefill_low.unwrap_or(0.0)),
            upgrade: true,
            deterministic: true,
        }
    }
}

/// The rows of a sweep, or without one those of the quality table. `own` is the type of the model's experts.
pub fn cases(sweep: Option<&str>, pairs: &[Pair], own: GgmlType, cache_percent: f64) -> Vec<Case> {
    let exact = Case::exact(cache_percent);
    let dynamic = |&(high, low): &Pair| Case {
        kind: Kind::Dynamic,
        label: format!("{high}+{}", low.map_or(NESTED, GgmlType::name)),
        high: (high != own).then_some(high),
        low,
        nested: low.is_none(),
        ..exact.clone()
    };
    let first = dynamic(&pairs[0]);
    let cold_drop = [("cold-drop", false), ("cold-drop, renormalised", true)].map(|(label, renormalise)| {
        let label = label.to_owned();
        Case { kind: Kind::ColdDrop, label, t2: PrecisionOptions::T1, renormalise, ..exact.clone() }
    });
    // The same model at smaller sizes.
    let uniform = ["q6_k", "q5_k", "q4_k", "q3_k", "q2_k"].into_iter().filter_map(GgmlType::from_name);
    let uniform = uniform.map(|dtype| {
        let label = format!("uniform {dtype}");
        Case { kind: Kind::Uniform, label, high: Some(dtype), ..exact.clone() }
    });
    match sweep {
        // The part of the cache that low versions get.
        Some("low-share") => {
            let case = |percent| {
                let label = format!("{}, low share {percent}%", first.label);
                Case { label, low_share: LowShare::Percent(percent), ..first.clone() }
            };
            LOW_SHARES.into_iter().map(case).collect()
        }
        // T1 and T2, among uniformly smaller quants.
        Some("thresholds") => {
            let case = |(t1, t2)| Case { label: format!("{}, T {t1} {t2}", first.label), t1, t2, ..first.clone() };
            std::iter::once(exact.clone()).chain(THRESHOLDS.map(case)).chain(uniform).collect()
        }
        // With and without scaling up what is left when an expert is skipped.
        Some(_) => {
            let both = |(t1, t2)| {
                [("", false), (", renormalised", true)].map(|(suffix, renormalise)| {
                    let label = format!("{}, T {t1} {t2}{suffix}", first.label);
                    Case { label, t1, t2, renormalise, ..first.clone() }
                })
            };
            [(0.6, 0.9), (0.6, 0.8), (0.7, 0.7), (0.5, 0.5)].into_iter().flat_map(both).chain(cold_drop).collect()
        }
        None => {
            // Whole windows in one batch, with more and more of the least popular experts in low precision.
            let prompts = pairs.iter().map(dynamic).flat_map(|case| {
                PREFILL_LOW.map(|share| {
                    let label = format!("{}, {:.0}% low", case.label, 100.0 * share);
                    Case { label, prefill_low: Some(share), ..case.clone() }
                })
            });
            let table = std::iter::once(exact.clone()).chain(pairs.iter().map(dynamic)).chain(cold_drop).chain(uniform);
            table.chain([Case { prefill_low: Some(0.0), ..exact.clone() }]).chain(prompts).collect()
        }
    }
}
