//! `--max-loss`: of what was measured of a model, what a session takes.
//!
//! The less is in memory the more is lost. So a session goes by what was measured with the most experts in memory that are not more
//! than its own, and by nothing where all of it was measured with more. Pure.

use std::path::PathBuf;

use super::mixes::{MeasuredMix, Mixes, RUNS_MAX, beside};
use super::{Mix, PromiseError};
use crate::units::Percent;

/// Caches are whole slots: shares that differ by no more than this are the same.
const ROUNDING: f64 = 0.005;

/// A loss that is not to be exceeded, and what is known of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Promise {
    /// Relative increase of perplexity; 0.01 is one percent.
    pub max_loss: f64,
    /// What was measured of the model, by expert cache.
    pub measured: Vec<Mixes>,
    /// The file that says so.
    pub file: PathBuf,
    /// The model.
    pub model: PathBuf,
}

/// What a session has in memory.
#[derive(Clone, Debug)]
pub struct Here {
    /// Share of the experts that have slots where no low version has any, `0.0..=1.0`.
    pub cache_share: f64,
    /// Types of the experts, as [`Mixes::high`].
    pub high: String,
    /// Types of the low versions that it may use, if there are any.
    pub low: Option<String>,
}

/// How a promise is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// What is given up; [`Mix::EXACT`] for nothing.
    pub mix: Mix,
    /// What was chosen and by what, for people.
    pub words: String,
}

impl Promise {
    /// The cheapest that was measured to keep it.
    ///
    /// # Errors
    /// Nothing was measured of these experts, or with no more of them in memory; each with the command that does.
    pub fn keep(&self, here: &Here) -> Result<Kept, PromiseError> {
        let Self { max_loss, measured, file, .. } = self;
        let asked = format!("{}%", in_percent(*max_loss));
        let of_these: Vec<&Mixes> = measured.iter().filter(|own| own.high == here.high).collect();
        let percents = |measured: &[&Mixes]| {
            let mut shares: Vec<f64> = measured.iter().map(|own| own.cache_share).collect();
            shares.sort_by(f64::total_cmp);
            shares.iter().map(|share| format!("{:.0}", Percent(*share))).collect::<Vec<_>>().join(", ")
        };
        let cache = |share: f64| format!("{}%", (100.0 * (share + ROUNDING)).floor().max(1.0));
        if of_these.is_empty() {
            let mut types: Vec<&str> = measured.iter().map(|own| own.high.as_str()).collect();
            types.dedup();
            return Err(PromiseError::OtherExperts {
                max_loss: asked,
                file: file.clone(),
                measured: types.join(", "),
                here: here.high.clone(),
                make: self.make(&cache(here.cache_share)),
            });
        }
        let may_be_had = |own: &&&Mixes| own.cache_share <= here.cache_share + ROUNDING;
        let nearest = of_these.iter().filter(may_be_had).max_by(|a, b| a.cache_share.total_cmp(&b.cache_share));
        let Some(nearest) = nearest else {
            let known = of_these.iter().map(|own| own.expert_cache.clone());
            let caches: Vec<String> = std::iter::once(cache(here.cache_share)).chain(known).collect();
            return Err(PromiseError::SmallerCache {
                max_loss: asked,
                file: file.clone(),
                measured: percents(&of_these),
                here: format!("{:.0}", Percent(here.cache_share)),
                make: self.make(&caches.join(",")),
            });
        };
        let has_low = here.low.is_some() && nearest.low == here.low;
        let chosen = nearest.cheapest(*max_loss, has_low);
        Ok(Kept { mix: chosen.map_or(Mix::EXACT, |own| own.mix), words: self.words(nearest, chosen, here) })
    }

    /// Where everything is in memory.
    pub fn of_no_use(&self) -> Kept {
        let words = format!("max loss {}: everything is in memory, nothing is given up", Percent(self.max_loss));
        Kept { mix: Mix::EXACT, words }
    }

    /// The command that measures with these expert caches, and what it takes.
    pub fn make(&self, caches: &str) -> String {
        format!(
            "make one with: gguf-tools profile {} --text FILE --max-loss {}% --no-widths --expert-cache {caches} -o {} (for each cache some \
             {} runs over half of the text, token by token: with its 4096 tokens as long as generating {} takes here)",
            self.model.display(),
            in_percent(self.max_loss),
            beside(&self.model).display(),
            RUNS_MAX + 2,
            (RUNS_MAX + 2) * 2048,
        )
    }

    /// What was chosen, and by what.
    fn words(&self, by: &Mixes, chosen: Option<&MeasuredMix>, here: &Here) -> String {
        let max_loss = Percent(self.max_loss);
        let share = format!("{:.0}", Percent(by.cache_share));
        let own = format!("{:.0}", Percent(here.cache_share));
        let own = if own == share { String::new() } else { format!(" (here {own})") };
        let Some(MeasuredMix { mix, loss, error, bytes_per_token }) = chosen else {
            return format!(
                "max loss {max_loss}: nothing that was measured with {share} of the experts in memory{own} stays below, nothing is \
                 given up"
            );
        };
        format!(
            "max loss {max_loss}: {} was measured at {:+.2} +- {:.2} on {}, reading {:.0} of exact's bytes with {share} of the experts \
             in memory{own}",
            mix.words(),
            Percent(*loss),
            Percent(*error),
            by.text,
            Percent(bytes_per_token / by.exact_bytes_per_token.max(1.0)),
        )
    }
}

/// Without needless digits: `0.5`.
pub fn in_percent(share: f64) -> f64 {
    (share * 1e6).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured at this share: strengths of λ with T1, what they lose, and bytes of 1000.
    fn mixes(cache_share: f64, rows: &[(f32, f32, f64, f64)]) -> Mixes {
        let one = |&(cache_bias, t1, loss, bytes_per_token): &(f32, f32, f64, f64)| MeasuredMix {
            mix: Mix { cache_bias, t1, ..Mix::EXACT },
            loss,
            error: 0.001,
            bytes_per_token,
        };
        Mixes {
            text: "prose.txt".into(),
            text_sha256: String::new(),
            tokens: 2048,
            expert_cache: format!("{}%", 100.0 * cache_share),
            cache_share,
            high: "q8_0".into(),
            low: Some("q2_K".into()),
            exact_bytes_per_token: 1000.0,
            mixes: rows.iter().map(one).collect(),
        }
    }

    fn promise(max_loss: f64) -> Promise {
        let quarter = [(0.2, 0.6, 0.009, 300.0), (0.2, 1.0, 0.006, 450.0), (0.1, 1.0, 0.002, 700.0)];
        let half = [(0.3, 0.6, 0.009, 200.0), (0.3, 1.0, 0.004, 300.0)];
        let measured = vec![mixes(0.25, &quarter), mixes(0.5, &half)];
        Promise { max_loss, measured, file: "m.profile.json".into(), model: "m.gguf".into() }
    }

    fn here(cache_share: f64, low: Option<&str>) -> Here {
        Here { cache_share, high: "q8_0".into(), low: low.map(str::to_owned) }
    }

    #[test]
    fn the_cheapest_that_keeps_it_is_taken_and_named() {
        let of = |max_loss, low| promise(max_loss).keep(&here(0.25, low)).unwrap();
        let low = of(0.01, Some("q2_K"));
        assert_eq!((low.mix.cache_bias, low.mix.t1, low.mix.t2), (0.2, 0.6, 1.0));
        let high = of(0.01, None);
        assert_eq!((high.mix.cache_bias, high.mix.t1), (0.2, 1.0));
        assert_eq!(
            high.words,
            "max loss 1.0 %: --cache-bias 0.2 --keep-top 1 was measured at +0.60 % +- 0.10 % on prose.txt, reading 45 % of \
             exact's bytes with 25 % of the experts in memory"
        );
        assert_eq!(of(0.01, Some("q3_K")).mix, high.mix, "others than those that were measured");
        assert_eq!(of(0.005, Some("q2_K")).mix.cache_bias, 0.1, "with its standard error");
        let none = of(0.002, Some("q2_K"));
        assert_eq!(none.mix, Mix::EXACT);
        assert!(none.words.ends_with("with 25 % of the experts in memory stays below, nothing is given up"));
        assert!(promise(0.01).of_no_use().words.contains("everything is in memory"));
    }

    #[test]
    fn never_from_a_larger_cache() {
        let bias = |share| promise(0.01).keep(&here(share, None)).map(|kept| kept.mix.cache_bias);
        for (share, expected) in [(0.25, 0.2), (0.246, 0.2), (0.43, 0.2), (0.494, 0.2), (0.496, 0.3), (0.9, 0.3)] {
            assert_eq!(bias(share), Ok(expected), "{share}");
        }
        let words = promise(0.01).keep(&here(0.43, None)).unwrap().words;
        assert!(words.ends_with("with 25 % of the experts in memory (here 43 %)"), "{words}");
        let refused = bias(0.18).unwrap_err().to_string();
        for part in [
            "--max-loss 1%: m.profile.json has measured with 25 %, 50 % of the experts in memory, and here are 18 %",
            "gguf-tools profile m.gguf --text FILE --max-loss 1% --no-widths --expert-cache 18%,25%,50% -o m.profile.json",
            "37 runs",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
    }

    #[test]
    fn other_experts_have_other_losses() {
        let other = Here { high: "q4_K".into(), ..here(0.3, None) };
        let refused = promise(0.01).keep(&other).unwrap_err().to_string();
        assert!(refused.contains("whose experts are q8_0, here they are q4_K; make one with"), "{refused}");
        assert!(refused.contains("--expert-cache 30%"), "{refused}");
        let mut both = promise(0.01);
        both.measured.push(Mixes { high: "q4_K".into(), ..mixes(0.2, &[(0.05, 1.0, 0.001, 800.0)]) });
        assert_eq!(both.keep(&other).unwrap().mix.cache_bias, 0.05);
    }
}
