//! What rows say: means with errors, and how an arm does against the smaller quant of as many bytes.

use hobbit::perplexity::estimate::{Estimate, Sums, percentile};
use hobbit::stats::PhaseStats;
use serde::Serialize;

use super::measure::Measured;
use super::variant::Ready;

/// Standard errors beyond which a loss is no chance.
pub const ERRORS_MAX: f64 = 5.0;
/// Share of tokens below the divergence that stands for the worst.
const WORST: f32 = 0.999;

/// An arm on a text with a share of cache.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub text: String,
    /// Of the exact model's expert bytes; every arm gets these bytes.
    pub cache_percent: f64,
    pub arm: String,
    /// As typed.
    pub flags: String,
    /// The exact model, or a smaller quant of all its experts.
    pub is_control: bool,
    /// Of a control: all its experts fit in the cache.
    pub fits: Option<bool>,
    /// See [`super::arm::Arm::is_promised`].
    #[serde(skip)]
    pub is_promised: bool,
    pub perplexity: f64,
    /// Perplexity beyond the exact model's, as a share of it, paired by token.
    pub cost: Estimate,
    /// Mean Kullback-Leibler divergence from the exact model, nats a token.
    pub kl: Estimate,
    /// That of the worst token in a thousand.
    pub kl_999: Estimate,
    /// Share of tokens with the exact model's favourite.
    pub same_top: Estimate,
    /// Questions about the text; `None` where none were asked.
    pub task: Option<Task>,
    /// Bytes of experts read per token.
    pub bytes_per_token: f64,
    pub hit_rate: Option<f64>,
    /// Milliseconds of a token: median and 99th percentile. `None` where rows ran side by side.
    pub token_ms: Option<TokenTime>,
    pub stats: PhaseStats,
    /// What the judge says.
    pub loss: Loss,
    /// For an arm that is no control: what a smaller quant of all experts would reach at equal bytes.
    pub control: Option<Control>,
}

/// Which of four texts goes on from here?
#[derive(Clone, Debug, Serialize)]
pub struct Task {
    pub questions: usize,
    /// Share of right answers.
    pub score: Estimate,
    /// That, minus the exact model's, paired by question.
    pub change: Estimate,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct TokenTime {
    pub p50: f32,
    pub p99: f32,
}

/// A smaller quant of all experts that does not exist: between its two neighbours, by bytes per token.
#[derive(Clone, Debug, Serialize)]
pub struct Control {
    pub perplexity: f64,
    pub kl: f64,
    /// The neighbours, the one of fewer bytes first; one only where there is nothing beyond it.
    pub between: Vec<String>,
}

/// What is to be said of an arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Every prediction is the exact model's.
    None,
    /// Predictions are others, perplexity is not known to be worse.
    Within,
    /// Perplexity is worse by more than [`ERRORS_MAX`] standard errors.
    Beyond,
}

impl Row {
    /// Sums up what was measured.
    pub fn new(text: &str, cache_percent: f64, cache_bytes: u64, ready: &Ready, measured: Measured) -> Self {
        let Measured { nll, difference, kl, same_top, answers, mut token_ms, stats } = measured;
        let ratio = mean(difference).exp();
        token_ms.sort_by(f32::total_cmp);
        let mut row = Self {
            text: text.to_owned(),
            cache_percent,
            arm: ready.arm.name.clone(),
            flags: ready.arm.flags.clone(),
            is_control: ready.control_bytes.is_some(),
            fits: ready.control_bytes.map(|bytes| bytes <= cache_bytes),
            is_promised: ready.arm.is_promised(),
            perplexity: mean(nll).value.exp(),
            cost: Estimate { value: ratio.value - 1.0, ..ratio },
            kl_999: worst(kl.iter().map(|&kl| kl as f32).collect()),
            kl: mean(kl),
            same_top: Estimate::share(same_top.iter().filter(|same| **same).count(), same_top.len()),
            task: Task::new(&answers),
            bytes_per_token: stats.bytes_read as f64 / stats.tokens.max(1) as f64,
            hit_rate: stats.hit_rate(),
            token_ms: (!token_ms.is_empty())
                .then(|| TokenTime { p50: percentile(&token_ms, 0.5), p99: percentile(&token_ms, 0.99) }),
            stats,
            loss: Loss::None,
            control: None,
        };
        row.loss = row.judged();
        row
    }

    /// The same text, the same cache.
    pub fn is_comparable(&self, other: &Row) -> bool {
        self.text == other.text && self.cache_percent == other.cache_percent
    }

    fn judged(&self) -> Loss {
        // Predictions that are no numbers are no predictions.
        if !self.cost.value.is_finite() || !self.kl.value.is_finite() {
            return Loss::Beyond;
        }
        if self.kl.value == 0.0 && self.cost.value == 0.0 && self.same_top.value == 1.0 {
            Loss::None
        } else if self.cost.value > ERRORS_MAX * self.cost.uncertainty
            && self.kl.value > ERRORS_MAX * self.kl.uncertainty
        {
            Loss::Beyond
        } else {
            Loss::Within
        }
    }
}

impl Task {
    /// Of answers, each with the exact model's.
    fn new(answers: &[(bool, bool)]) -> Option<Self> {
        let n_right = answers.iter().filter(|(is_right, _)| *is_right).count();
        let change = answers.iter().map(|&(own, exact)| f64::from(u8::from(own)) - f64::from(u8::from(exact)));
        let questions = answers.len();
        (questions > 0).then(|| Self { questions, score: Estimate::share(n_right, questions), change: mean(change) })
    }
}

/// Mean and standard error.
fn mean(values: impl IntoIterator<Item = f64>) -> Estimate {
    let mut sums = Sums::default();
    values.into_iter().for_each(|value| sums.add(value));
    sums.estimate()
}

/// The divergence that one token in a thousand is beyond. How many are beyond it varies as a binomial does: the error
/// is half of the distance between the values at one standard deviation more and fewer.
fn worst(mut kls: Vec<f32>) -> Estimate {
    kls.sort_by(f32::total_cmp);
    let deviation = (WORST * (1.0 - WORST) / kls.len().max(1) as f32).sqrt();
    let at = |share: f32| f64::from(percentile(&kls, share));
    Estimate { value: at(WORST), uncertainty: 0.5 * (at(WORST + deviation) - at(WORST - deviation)) }
}

/// Finds each arm's control.
pub fn compare(rows: &mut [Row]) {
    for i in 0..rows.len() {
        let row = &rows[i];
        let all: Vec<&Row> = rows.iter().filter(|other| row.is_comparable(other) && other.is_control).collect();
        if !row.is_control {
            rows[i].control = interpolate(row.bytes_per_token, all);
        }
    }
}

/// The controls that are worth their bytes, ascending. One that is no better than another of fewer bytes (once
/// everything is resident, smaller ones gain nothing) is not.
fn frontier(mut controls: Vec<&Row>) -> Vec<&Row> {
    controls.sort_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token).then(a.kl.value.total_cmp(&b.kl.value)));
    let mut frontier: Vec<&Row> = Vec::new();
    for row in controls {
        if frontier.last().is_none_or(|last| row.kl.value < last.kl.value) {
            frontier.push(row);
        }
    }
    frontier
}

/// Linear between the nearest controls of fewer and of more bytes.
fn interpolate(bytes: f64, controls: Vec<&Row>) -> Option<Control> {
    let frontier = frontier(controls);
    let beyond = frontier.partition_point(|row| row.bytes_per_token <= bytes);
    let alone = |row: &Row| Control { perplexity: row.perplexity, kl: row.kl.value, between: vec![row.arm.clone()] };
    let (Some(&less), Some(&more)) = (beyond.checked_sub(1).and_then(|i| frontier.get(i)), frontier.get(beyond)) else {
        return if beyond == 0 { frontier.first() } else { frontier.last() }.map(|row| alone(row));
    };
    let part = (bytes - less.bytes_per_token) / (more.bytes_per_token - less.bytes_per_token);
    let mix = |less: f64, more: f64| less + part * (more - less);
    Some(Control {
        perplexity: mix(less.perplexity, more.perplexity),
        kl: mix(less.kl.value, more.kl.value),
        between: vec![less.arm.clone(), more.arm.clone()],
    })
}
