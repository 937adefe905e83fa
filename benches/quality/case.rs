//! What is compared with what.

use std::str::FromStr;

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

/// High and low, `q8_0+q2_k`. A high type that is the model's own is its own bytes.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub high: GgmlType,
    pub low: GgmlType,
}

impl FromStr for Pair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let dtype = |word| GgmlType::from_name(word).ok_or_else(|| format!("'{word}': expected a type such as q4_k"));
        let (high, low) =
            text.split_once('+').ok_or_else(|| format!("'{text}': expected HIGH+LOW, as in q8_0+q2_k"))?;
        Ok(Self { high: dtype(high)?, low: dtype(low)? })
    }
}

impl Case {
    fn new(kind: Kind, label: String, cache_percent: f64) -> Self {
        Self {
            kind,
            label,
            cache_percent,
            high: None,
            low: None,
            t1: PrecisionOptions::T1,
            t2: PrecisionOptions::T2,
            renormalise: false,
            low_share: LowShare::Auto,
            prefill_low: None,
        }
    }

    pub fn exact(cache_percent: f64) -> Self {
        Self::new(Kind::Exact, "exact".to_owned(), cache_percent)
    }

    fn dynamic(pair: Pair, own: GgmlType, cache_percent: f64) -> Self {
        let label = format!("{}+{}", pair.high, pair.low);
        let high = (pair.high != own).then_some(pair.high);
        Self { high, low: Some(pair.low), ..Self::new(Kind::Dynamic, label, cache_percent) }
    }

    fn cold_drop(t1: f32, renormalise: bool, cache_percent: f64) -> Self {
        let label = if renormalise { "cold-drop, renormalised" } else { "cold-drop" };
        Self { t1, t2: t1, renormalise, ..Self::new(Kind::ColdDrop, label.to_owned(), cache_percent) }
    }

    fn uniform(dtype: GgmlType, cache_percent: f64) -> Self {
        Self { high: Some(dtype), ..Self::new(Kind::Uniform, format!("uniform {dtype}"), cache_percent) }
    }

    /// As the engine is told.
    pub fn precision(&self) -> PrecisionOptions {
        let is_dynamic = matches!(self.kind, Kind::Dynamic | Kind::ColdDrop);
        PrecisionOptions {
            mode: Some(if is_dynamic { PrecisionMode::Dynamic } else { PrecisionMode::Exact }),
            t1: Some(self.t1),
            t2: Some(self.t2),
            renormalise: self.renormalise,
            prefill_low: self.prefill_low.unwrap_or(0.0),
            upgrade: true,
            deterministic: true,
        }
    }
}

/// The rows of the quality table. `own` is the type of the model's experts.
pub fn table(pairs: &[Pair], own: GgmlType, cache_percent: f64) -> Vec<Case> {
    let mut cases = vec![Case::exact(cache_percent)];
    cases.extend(pairs.iter().map(|&pair| Case::dynamic(pair, own, cache_percent)));
    cases.extend([false, true].map(|renormalise| Case::cold_drop(PrecisionOptions::T1, renormalise, cache_percent)));
    cases.extend(uniform(cache_percent));
    cases
}

/// The same model at smaller sizes.
pub fn uniform(cache_percent: f64) -> impl Iterator<Item = Case> {
    let types = ["q6_k", "q5_k", "q4_k", "q3_k", "q2_k"].into_iter().filter_map(GgmlType::from_name);
    types.map(move |dtype| Case::uniform(dtype, cache_percent))
}

/// Whole windows in one batch, with more and more of the least popular experts in low precision.
pub fn prompt(pairs: &[Pair], own: GgmlType, cache_percent: f64) -> Vec<Case> {
    let exact = Case { prefill_low: Some(0.0), ..Case::exact(cache_percent) };
    let case = |pair, share: f32| {
        let case = Case::dynamic(pair, own, cache_percent);
        Case { label: format!("{}, {:.0}% low", case.label, 100.0 * share), prefill_low: Some(share), ..case }
    };
    let dynamic = pairs.iter().flat_map(|&pair| PREFILL_LOW.map(|share| case(pair, share)));
    std::iter::once(exact).chain(dynamic).collect()
}

/// The part of the cache that low versions get.
pub fn low_shares(pair: Pair, own: GgmlType, cache_percent: f64) -> Vec<Case> {
    let case = |percent| {
        let case = Case::dynamic(pair, own, cache_percent);
        let label = format!("{}, low share {percent}%", case.label);
        Case { label, low_share: LowShare::Percent(percent), ..case }
    };
    LOW_SHARES.into_iter().map(case).collect()
}

/// T1 and T2, among uniformly smaller quants.
pub fn thresholds(pair: Pair, own: GgmlType, cache_percent: f64) -> Vec<Case> {
    let case = |(t1, t2)| {
        let case = Case::dynamic(pair, own, cache_percent);
        Case { label: format!("{}, T {t1} {t2}", case.label), t1, t2, ..case }
    };
    let mut cases = vec![Case::exact(cache_percent)];
    cases.extend(THRESHOLDS.map(case));
    cases.extend(uniform(cache_percent));
    cases
}

/// With and without scaling up what is left when an expert is skipped.
pub fn renormalise(pair: Pair, own: GgmlType, cache_percent: f64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (t1, t2) in [(0.6, 0.9), (0.6, 0.8), (0.7, 0.7), (0.5, 0.5)] {
        for renormalise in [false, true] {
            let case = Case::dynamic(pair, own, cache_percent);
            let suffix = if renormalise { ", renormalised" } else { "" };
            cases.push(Case { label: format!("{}, T {t1} {t2}{suffix}", case.label), t1, t2, renormalise, ..case });
        }
    }
    cases.extend([false, true].map(|renormalise| Case::cold_drop(PrecisionOptions::T1, renormalise, cache_percent)));
    cases
}
