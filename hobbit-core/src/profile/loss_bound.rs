//! The fastest mix whose measured loss is within a bound.
//!
//! Loss grows as the cache shrinks. Use the measurement taken at the largest cache that is not above ours; refuse
//! otherwise.

use std::path::PathBuf;

use super::mixes::{MeasuredMix, Mixes};
use super::{LossBoundError, Mix};
use crate::units::Percent;

/// Caches are whole slots: shares that differ by no more than this are the same.
const ROUNDING: f64 = 0.005;

#[derive(Clone, Debug, PartialEq)]
#[allow(unpredictable_function_pointer_comparisons, reason = "a program has one spelling")]
pub struct LossBound {
    /// Relative increase of perplexity; 0.01 is one percent.
    pub max_loss: f64,
    /// One table for each expert cache.
    pub measured: Vec<Mixes>,
    pub file: PathBuf,
    pub model: PathBuf,
    /// How the program spells a setting such as `cache_bias`.
    pub name: fn(&str) -> String,
}

#[derive(Clone, Debug)]
pub struct Here {
    /// Share of the experts that have slots when no low version has any, `0.0..=1.0`.
    pub cache_share: f64,
    /// Types of the experts, as [`Mixes::high`].
    pub high: String,
    pub low: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ChosenMix {
    /// [`Mix::EXACT`] if nothing is given up.
    pub mix: Mix,
    /// The choice and its measurement, for people.
    pub words: String,
}

impl LossBound {
    /// The mix with the fewest bytes that was measured within the bound.
    pub fn choose(&self, here: &Here) -> Result<ChosenMix, LossBoundError> {
        let of_these: Vec<&Mixes> = self.measured.iter().filter(|mixes| mixes.high == here.high).collect();
        let cache = format!("{}%", (100.0 * (here.cache_share + ROUNDING)).floor().max(1.0));
        if of_these.is_empty() {
            let mut types: Vec<&str> = self.measured.iter().map(|mixes| mixes.high.as_str()).collect();
            types.dedup();
            let reason =
                format!("measured a model whose experts are {}, here they are {}", types.join(", "), here.high);
            return Err(self.unmeasured(reason, cache));
        }
        let not_above = of_these.iter().filter(|mixes| mixes.cache_share <= here.cache_share + ROUNDING);
        let Some(nearest) = not_above.max_by(|a, b| a.cache_share.total_cmp(&b.cache_share)) else {
            let mut shares: Vec<f64> = of_these.iter().map(|mixes| mixes.cache_share).collect();
            shares.sort_by(f64::total_cmp);
            let shares: Vec<String> = shares.iter().map(|share| format!("{:.0}", Percent(*share))).collect();
            let known = of_these.iter().map(|mixes| mixes.expert_cache.clone());
            let caches: Vec<String> = std::iter::once(cache).chain(known).collect();
            let reason = format!(
                "was measured with {} of the experts in memory, and this cache holds {:.0}: more may be lost",
                shares.join(", "),
                Percent(here.cache_share)
            );
            return Err(self.unmeasured(reason, caches.join(",")));
        };
        let has_low = here.low.is_some() && nearest.low == here.low;
        let chosen = nearest.cheapest(self.max_loss, has_low);
        Ok(ChosenMix { mix: chosen.map_or(Mix::EXACT, |chosen| chosen.mix), words: self.words(nearest, chosen, here) })
    }

    /// The choice where everything is in memory.
    pub fn exact(&self) -> ChosenMix {
        let words = format!("max loss {}: everything is in memory, nothing is given up", Percent(self.max_loss));
        ChosenMix { mix: Mix::EXACT, words }
    }

    fn unmeasured(&self, reason: String, expert_caches: String) -> LossBoundError {
        let (file, model, max_loss) = (self.file.clone(), self.model.clone(), self.max_loss);
        LossBoundError { file, reason, model, max_loss, expert_caches }
    }

    fn words(&self, by: &Mixes, chosen: Option<&MeasuredMix>, here: &Here) -> String {
        let max_loss = Percent(self.max_loss);
        let [mut with, own] = [by.cache_share, here.cache_share].map(|share| format!("{:.0}", Percent(share)));
        with += " of the experts in memory";
        if !with.starts_with(&own) {
            with += &format!(" (here {own})");
        }
        let Some(MeasuredMix { mix, loss, error, bytes_per_token }) = chosen else {
            return format!(
                "max loss {max_loss}: no mix that was measured with {with} stays below, nothing is given up"
            );
        };
        format!(
            "max loss {max_loss}: {} was measured at {:+.2} +- {:.2} on {}, reading {:.0} of exact's bytes with {with}",
            mix.words(self.name),
            Percent(*loss),
            Percent(*error),
            by.text,
            Percent(bytes_per_token / by.exact_bytes_per_token.max(1.0)),
        )
    }
}

/// A share in percent without needless digits: `0.5`.
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

    fn bound(max_loss: f64) -> LossBound {
        let quarter = [(0.2, 0.6, 0.009, 300.0), (0.2, 1.0, 0.006, 450.0), (0.1, 1.0, 0.002, 700.0)];
        let half = [(0.3, 0.6, 0.009, 200.0), (0.3, 1.0, 0.004, 300.0)];
        let measured = vec![mixes(0.25, &quarter), mixes(0.5, &half)];
        let file = "m.profile.json".into();
        LossBound { max_loss, measured, file, model: "m.gguf".into(), name: str::to_owned }
    }

    fn here(cache_share: f64, low: Option<&str>) -> Here {
        Here { cache_share, high: "q8_0".into(), low: low.map(str::to_owned) }
    }

    #[test]
    fn the_cheapest_within_the_bound_is_taken_and_named() {
        let of = |max_loss, low| bound(max_loss).choose(&here(0.25, low)).unwrap();
        let low = of(0.01, Some("q2_K"));
        assert_eq!((low.mix.cache_bias, low.mix.t1, low.mix.t2), (0.2, 0.6, 1.0));
        let high = of(0.01, None);
        assert_eq!((high.mix.cache_bias, high.mix.t1), (0.2, 1.0));
        assert_eq!(
            high.words,
            "max loss 1.0 %: cache_bias 0.2 keep_top 1 was measured at +0.60 % +- 0.10 % on prose.txt, reading \
             45 % of exact's bytes with 25 % of the experts in memory"
        );
        assert_eq!(of(0.01, Some("q3_K")).mix, high.mix, "others than those that were measured");
        assert_eq!(of(0.005, Some("q2_K")).mix.cache_bias, 0.1, "with its standard error");
        let none = of(0.002, Some("q2_K"));
        assert_eq!(none.mix, Mix::EXACT);
        assert!(none.words.ends_with("with 25 % of the experts in memory stays below, nothing is given up"));
        assert!(bound(0.01).exact().words.contains("everything is in memory"));
    }

    #[test]
    fn never_from_a_larger_cache() {
        let bias = |share| bound(0.01).choose(&here(share, None)).map(|chosen| chosen.mix.cache_bias);
        for (share, expected) in [(0.25, 0.2), (0.246, 0.2), (0.43, 0.2), (0.494, 0.2), (0.496, 0.3), (0.9, 0.3)] {
            assert_eq!(bias(share), Ok(expected), "{share}");
        }
        let words = bound(0.01).choose(&here(0.43, None)).unwrap().words;
        assert!(words.ends_with("with 25 % of the experts in memory (here 43 %)"), "{words}");
        let refused = bias(0.18).unwrap_err();
        let expected = "m.profile.json: was measured with 25 %, 50 % of the experts in memory, and this cache holds \
                        18 %: more may be lost";
        assert_eq!((refused.to_string().as_str(), refused.expert_caches.as_str()), (expected, "18%,25%,50%"));
    }

    #[test]
    fn other_experts_have_other_losses() {
        let other = Here { high: "q4_K".into(), ..here(0.3, None) };
        let refused = bound(0.01).choose(&other).unwrap_err();
        assert!(refused.reason.contains("whose experts are q8_0, here they are q4_K"), "{refused}");
        assert_eq!(refused.expert_caches, "30%");
        let mut both = bound(0.01);
        both.measured.push(Mixes { high: "q4_K".into(), ..mixes(0.2, &[(0.05, 1.0, 0.001, 800.0)]) });
        assert_eq!(both.choose(&other).unwrap().mix.cache_bias, 0.05);
    }
}
