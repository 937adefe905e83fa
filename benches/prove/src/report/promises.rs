//! What hobbit promises: a table of rows. [`claims`](super::claims) judges them.

use super::figures::{Measure, first_token_s, mean_ms, median_ms, prefill_s, whole_s};
use super::group::{CONTENDED, FITS};

/// A promise, what it is judged by, and what a user has to bear where it is not kept.
pub struct Promise {
    /// What is promised.
    pub text: &'static str,
    /// All of them must hold.
    pub checks: &'static [Check],
    /// Told where it is not kept.
    pub cost: &'static str,
}

/// A part of a promise.
pub struct Check {
    /// Before what was found, where a promise has several.
    pub name: &'static str,
    /// How it is judged.
    pub rule: Rule,
}

/// How records are judged; shares are of llama.cpp's figure in the same place.
pub enum Rule {
    /// Every other engine decodes more slowly.
    Fastest { study: &'static str },
    /// The figure's share stays below this everywhere.
    Against { study: &'static str, figure: Measure, below: f64 },
    /// The same of commands in as much memory as the model's bytes, in more, or without a limit.
    WhereItFits { study: &'static str, figure: Measure, below: f64 },
    /// Under a limit, a time is shorter.
    Sooner { study: &'static str, figure: Measure },
    /// Beside busy processes at least this part of its speed; `figure` is a time.
    BesideOthers { study: &'static str, figure: Measure, at_least: f64 },
    /// With each budget at least this part of the best speed that any smaller one reached.
    NoDip { study: &'static str, at_least: f64 },
    /// Largest resident sets are within budgets, or limits where the budget is not known.
    WithinBudget,
    /// Of long runs: the end differs from what was after a tenth of the tokens by this share at most.
    Flat { series: Series, within: f64 },
    /// Of long runs: the last tenth of the tokens is slower than the first by this share at most.
    Steady { slower_by: f64 },
    /// Every logit has the same bits.
    Identical,
}

/// What is looked at over time.
#[derive(Clone, Copy)]
pub enum Series {
    /// Bytes of the resident set.
    Rss,
    /// Bytes that malloc has handed out.
    Heap,
    /// Open files.
    Files,
}

impl Rule {
    /// Slower than llama.cpp by less than this share.
    pub const fn slower_by(study: &'static str, figure: Measure, share: f64) -> Self {
        Self::Against { study, figure, below: 1.0 + share }
    }
}

const fn check(name: &'static str, rule: Rule) -> Check {
    Check { name, rule }
}

/// All of them.
pub static ALL: [Promise; 8] = [
    Promise {
        text: "decodes faster than every other engine in the same memory",
        checks: &[check("", Rule::Fastest { study: "peers" })],
        cost: "where the ratio is below 1x, that part of the best other engine's speed: give more memory (a model that fits is left \
               to llama.cpp), or take that engine there",
    },
    Promise {
        text: "overhead with everything in memory below 2 % of the median token and of the mean",
        checks: &[
            // A median hides what is rare and long, a mean what is usual: both count.
            check("median", Rule::slower_by("resident", median_ms, 0.02)),
            check("mean", Rule::slower_by("resident", mean_ms, 0.02)),
        ],
        cost: "so much slower tokens if you have hobbit keep the experts of a model that fits (--expert-cache 100%)",
    },
    Promise {
        text: "where the model fits, the whole command within 2 % of llama.cpp's; with more memory never slower by 5 %",
        checks: &[
            check("whole command", Rule::WhereItFits { study: FITS, figure: whole_s, below: 1.02 }),
            check("dip", Rule::NoDip { study: FITS, at_least: 0.95 }),
        ],
        cost: "so much more time for a short command on a model that fits, or with the memory that is named",
    },
    Promise {
        text: "beside busy processes not slower than llama.cpp by 2 %",
        checks: &[
            check("prompt", Rule::BesideOthers { study: CONTENDED, figure: prefill_s, at_least: 0.98 }),
            check("decode", Rule::BesideOthers { study: CONTENDED, figure: mean_ms, at_least: 0.98 }),
        ],
        cost: "where the ratio is below 1x, that part of llama.cpp's speed while other programs compute",
    },
    Promise {
        text: "first token before llama.cpp's under the limit",
        checks: &[check("", Rule::Sooner { study: "startup", figure: first_token_s })],
        cost: "a longer wait for the first word",
    },
    Promise {
        text: "peak RSS within the budget in every run",
        checks: &[check("", Rule::WithinBudget)],
        cost: "leave head-room above --mem-budget: a control group of that size would end the run",
    },
    Promise {
        text: "logits bit-identical to llama.cpp's in exact precision",
        checks: &[check("", Rule::Identical)],
        cost: "at a near tie another word than llama.cpp's",
    },
    Promise {
        text: "2,000 tokens: RSS and heap within 2 %, no more open files, last tenth not 5 % slower than the first",
        checks: &[
            check("RSS", Rule::Flat { series: Series::Rss, within: 0.02 }),
            check("heap", Rule::Flat { series: Series::Heap, within: 0.02 }),
            check("open files", Rule::Flat { series: Series::Files, within: 0.0 }),
            check("speed", Rule::Steady { slower_by: 0.05 }),
        ],
        cost: "so much of the speed, or so much memory, at the end of a long answer (under pressure: beside a program that keeps \
               taking memory)",
    },
];
