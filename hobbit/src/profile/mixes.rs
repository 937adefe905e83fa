//! The cheapest ways to give up a little: experts in memory for missing ones, experts left out, and low precision, together.
//!
//! Each strength is raised alone until it loses too much, then a step back is tried; what is best alone is combined. All of that on
//! one part of a text. What is worth it is measured once more on the part that was held out: chosen is by that.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::Digest;

use crate::route::Thresholds;

/// What is given up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mix {
    /// λ of the cache-aware choice.
    pub cache_bias: f32,
    /// A token's best so many experts stay.
    pub keep_top: u32,
    /// α of SMoE's substitution.
    pub substitute: f32,
    /// A missing expert below so many times the uniform share is left out.
    pub drop: f32,
    /// Highest unimportance of a missing expert that comes in high precision; 1 for all.
    pub t1: f32,
    /// Highest unimportance of one that comes at all; 1 for all.
    pub t2: f32,
}

impl Mix {
    /// Nothing is.
    pub const EXACT: Self = Self { cache_bias: 0.0, keep_top: 1, substitute: 0.0, drop: 0.0, t1: 1.0, t2: 1.0 };

    /// Whether low versions are wanted.
    pub fn uses_low(&self) -> bool {
        self.t1 < 1.0
    }

    /// In words.
    pub fn words(&self) -> String {
        let Self { cache_bias, keep_top, substitute, drop, t1, t2 } = *self;
        let mut parts = Vec::new();
        parts.extend((cache_bias > 0.0).then(|| format!("--cache-bias {cache_bias}")));
        parts.extend((substitute > 0.0).then(|| format!("--substitute {substitute}")));
        parts.extend((cache_bias > 0.0 || substitute > 0.0).then(|| format!("--keep-top {keep_top}")));
        parts.extend((drop > 0.0).then(|| format!("--drop {drop}")));
        parts.extend((t1 < 1.0 || t2 < 1.0).then(|| format!("--t1 {t1} --t2 {t2}")));
        if parts.is_empty() { "exact".to_owned() } else { parts.join(" ") }
    }

    fn with(self, other: Self) -> Self {
        Self {
            cache_bias: self.cache_bias.max(other.cache_bias),
            substitute: self.substitute.max(other.substitute),
            drop: self.drop.max(other.drop),
            t1: self.t1.min(other.t1),
            t2: self.t2.min(other.t2),
            keep_top: self.keep_top,
        }
    }

    /// With less of everything that has a strength.
    fn weaker(self) -> Self {
        let less = |strength: f32| (strength * 20.0 * 2.0 / 3.0).round() / 20.0;
        Self { cache_bias: less(self.cache_bias), substitute: less(self.substitute), drop: less(self.drop), ..self }
    }
}

/// What a mix did to a text that was judged token by token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredMix {
    /// Which.
    pub mix: Mix,
    /// Relative increase of perplexity; 0.01 is one percent.
    pub loss: f64,
    /// Its standard error: of differences, token by token.
    pub error: f64,
    /// Expert bytes read per token.
    pub bytes_per_token: f64,
}

impl MeasuredMix {
    /// Of the differences of negative log-likelihoods, token by token, in nats: their mean and its standard error.
    pub fn new(mix: Mix, mean: f64, error: f64, bytes_per_token: f64) -> Self {
        Self { mix, loss: mean.exp_m1(), error: error * mean.exp(), bytes_per_token }
    }

    /// The loss that is not exceeded but by bad luck: one standard error above.
    pub fn upper(&self) -> f64 {
        self.loss + self.error
    }
}

/// What was measured of a model, ascending by bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mixes {
    /// Text, for people.
    pub text: String,
    /// SHA-256 of it, hexadecimal.
    pub text_sha256: String,
    /// Tokens that were held out, and judged.
    pub tokens: u64,
    /// Expert cache, as given.
    pub expert_cache: String,
    /// Share of the experts that had slots where no low version had any, `0.0..=1.0`.
    pub cache_share: f64,
    /// Types of the experts, as a session reports them: `q8_0`.
    pub high: String,
    /// The same of the low versions, if mixes have them.
    pub low: Option<String>,
    /// Expert bytes read per token with nothing given up.
    pub exact_bytes_per_token: f64,
    /// On what was held out.
    pub mixes: Vec<MeasuredMix>,
}

impl Mixes {
    /// The cheapest whose loss stays below, but by bad luck; `None` where nothing that was measured does, or saves anything.
    pub fn cheapest(&self, max_loss: f64, has_low: bool) -> Option<&MeasuredMix> {
        let fits = |own: &&MeasuredMix| own.upper() <= max_loss && (has_low || !own.mix.uses_low());
        let cheapest = self.mixes.iter().filter(fits).min_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token))?;
        (cheapest.bytes_per_token < self.exact_bytes_per_token).then_some(cheapest)
    }

    /// That its numbers make sense. Words: what was found, what was expected.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { cache_share, exact_bytes_per_token, .. } = self;
        if !(0.0..=1.0).contains(cache_share) || !(0.0..=f64::MAX).contains(exact_bytes_per_token) {
            return Err(format!(
                "mixes were measured with {cache_share} of the experts in memory and {exact_bytes_per_token} bytes a token, expected \
                 a share from 0 to 1, and bytes from 0 on"
            ));
        }
        for own in &self.mixes {
            let Mix { cache_bias, substitute, drop, t1, t2, .. } = own.mix;
            let is_strength = [cache_bias, substitute, drop].iter().all(|strength| (0.0..=100.0).contains(strength));
            if !is_strength || Thresholds::new(t1, t2).is_err() {
                return Err(format!(
                    "a mix is '{}', expected strengths from 0 on, and T1 at most T2 from 0 to 1",
                    own.mix.words()
                ));
            }
            if ![own.loss, own.error, own.bytes_per_token].iter().all(|number| number.is_finite()) || own.error < 0.0 {
                return Err(format!(
                    "the mix '{}' was measured as {} +- {}, no numbers",
                    own.mix.words(),
                    own.loss,
                    own.error
                ));
            }
        }
        Ok(())
    }
}

/// As a pack carries them.
pub fn mixes_to_json(mixes: &[Mixes]) -> String {
    serde_json::to_string(mixes).expect("names and numbers can always be written")
}

/// What [`mixes_to_json`] wrote.
///
/// # Errors
/// What is wrong with it, in words.
pub fn mixes_of_json(text: &str) -> Result<Vec<Mixes>, String> {
    let mixes: Vec<Mixes> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    mixes.iter().try_for_each(Mixes::check)?;
    Ok(mixes)
}

/// Which part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// By which mixes are chosen for [`Part::HeldOut`].
    Search,
    /// By which they are judged.
    HeldOut,
}

/// At most so many runs over a part of the text.
pub const RUNS_MAX: usize = 35;

/// Mixes that are worth it, judged on what was held out. `lows`: thresholds to be tried, of a model with low versions; empty without.
/// `measure` runs a part of the text; mixes with low versions are asked for after the others.
///
/// # Errors
/// Whatever `measure` answers.
pub fn search_mixes<E>(
    lows: &[Thresholds],
    max_loss: f64,
    mut measure: impl FnMut(Mix, Part) -> Result<MeasuredMix, E>,
) -> Result<Vec<MeasuredMix>, E> {
    const HELD_OUT_MAX: usize = 6;
    let exact = Mix::EXACT;
    let mut found: Vec<MeasuredMix> = Vec::new();
    type Axis = (&'static [f32], fn(f32) -> Mix);
    let axes: [Axis; 3] = [
        (&[0.1, 0.2, 0.3], |cache_bias| Mix { cache_bias, ..Mix::EXACT }),
        (&[0.2, 0.4, 0.6], |substitute| Mix { substitute, ..Mix::EXACT }),
        (&[0.4, 0.8], |drop| Mix { drop, ..Mix::EXACT }),
    ];
    let mut best: Vec<Mix> = Vec::new();
    for (strengths, mix) in axes {
        let mut try_one = |strength: f32| -> Result<bool, E> {
            let measured = measure(mix(strength), Part::Search)?;
            found.push(measured);
            Ok(measured.upper() <= max_loss)
        };
        let mut kept = 0.0;
        for &strength in strengths {
            if !try_one(strength)? {
                // Half a step back.
                let between = ((kept + strength) * 10.0).round() / 20.0;
                kept = if try_one(between)? { between } else { kept };
                break;
            }
            kept = strength;
        }
        best.extend((kept > 0.0).then(|| mix(kept)));
    }
    let without_low = best.clone();
    let mut tried = |mix: Mix, found: &mut Vec<MeasuredMix>| -> Result<bool, E> {
        if let Some(known) = found.iter().find(|known| known.mix == mix) {
            return Ok(known.upper() <= max_loss);
        }
        found.push(measure(mix, Part::Search)?);
        Ok(found[found.len() - 1].upper() <= max_loss)
    };
    for mix in combined(&without_low) {
        if !tried(mix, &mut found)? {
            tried(mix.weaker(), &mut found)?;
        }
    }
    let mut low = None;
    for &Thresholds { t1, t2 } in lows.iter().filter(|thresholds| thresholds.t1 < 1.0) {
        let mix = Mix { t1, t2, ..exact };
        if tried(mix, &mut found)? && low.is_none() {
            low = Some(mix);
        }
    }
    if let Some(low) = low {
        let bytes = |mix: &Mix, found: &[MeasuredMix]| {
            found.iter().find(|known| known.mix == *mix).map_or(f64::MAX, |known| known.bytes_per_token)
        };
        // The cheapest few of what was found without, with low precision on the rest.
        let mut cheap: Vec<Mix> =
            found.iter().filter(|own| own.upper() <= max_loss && !own.mix.uses_low()).map(|own| own.mix).collect();
        cheap.sort_by(|a, b| bytes(a, &found).total_cmp(&bytes(b, &found)));
        for mix in cheap.into_iter().take(4) {
            if !tried(mix.with(low), &mut found)? {
                tried(mix.weaker().with(low), &mut found)?;
            }
        }
    }
    let mut wanted = frontier(&found);
    wanted.retain(|own| own.loss <= 2.0 * max_loss);
    wanted.truncate(HELD_OUT_MAX);
    wanted.sort_by_key(|own| own.mix.uses_low());
    let mut judged = Vec::new();
    for own in wanted {
        judged.push(measure(own.mix, Part::HeldOut)?);
    }
    judged.sort_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token));
    Ok(judged)
}

/// Two and more of them together.
fn combined(best: &[Mix]) -> Vec<Mix> {
    let sets = (1u32..1 << best.len()).filter(|set| set.count_ones() > 1);
    let of_set = |set: u32| {
        let chosen = best.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1).map(|(_, mix)| *mix);
        chosen.fold(Mix::EXACT, Mix::with)
    };
    sets.map(of_set).collect()
}

/// Those than which nothing is cheaper and loses less, ascending by bytes.
fn frontier(found: &[MeasuredMix]) -> Vec<MeasuredMix> {
    let mut all = found.to_vec();
    all.sort_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token).then(a.loss.total_cmp(&b.loss)));
    let mut least = f64::INFINITY;
    all.retain(|own| {
        let is_better = own.loss < least;
        least = least.min(own.loss);
        is_better
    });
    all
}

/// SHA-256 of a text's bytes, hexadecimal.
pub fn text_sha256(text: &[u8]) -> String {
    crate::pack::Sha256(sha2::Sha256::digest(text).into()).to_string()
}

/// Where the profile of a model is looked for that nobody names: `model.profile.json` beside `model.gguf`.
pub fn beside(model: &Path) -> PathBuf {
    model.with_extension("profile.json")
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// Every strength saves and costs; together they do so by turns.
    fn machine(mix: Mix) -> MeasuredMix {
        let Mix { cache_bias, substitute, drop, t1, .. } = mix;
        let [bias, alpha, left, low] = [cache_bias, substitute, drop, 1.0 - t1].map(f64::from);
        let bytes_per_token = 1e6 * (1.0 - 1.5 * bias) * (1.0 - 0.4 * alpha) * (1.0 - 0.2 * left) * (1.0 - 0.5 * low);
        let loss = 0.1 * bias * bias + 0.02 * alpha * alpha + 0.03 * left * left + 0.01 * low;
        MeasuredMix { mix, loss, error: 0.0005, bytes_per_token }
    }

    fn searched(lows: &[Thresholds], max_loss: f64) -> (Vec<MeasuredMix>, Vec<(Mix, Part)>) {
        let mut asked = Vec::new();
        let found = search_mixes(lows, max_loss, |mix, part| {
            asked.push((mix, part));
            Ok::<_, Infallible>(machine(mix))
        });
        (found.unwrap(), asked)
    }

    fn mixes(found: Vec<MeasuredMix>) -> Mixes {
        Mixes {
            text: "prose.txt".into(),
            text_sha256: "0".repeat(64),
            tokens: 1000,
            expert_cache: "25%".into(),
            cache_share: 0.25,
            high: "q8_0".into(),
            low: None,
            exact_bytes_per_token: 1e6,
            mixes: found,
        }
    }

    #[test]
    fn the_best_are_combined_and_judged_on_what_was_held_out() {
        let low = Thresholds { t1: 0.6, t2: 1.0 };
        let (found, asked) = searched(&[low], 0.01);
        assert!(asked.len() <= RUNS_MAX, "{} runs", asked.len());
        let held_out = asked.iter().filter(|(_, part)| *part == Part::HeldOut).count();
        assert!((1..=6).contains(&held_out) && found.len() == held_out);
        assert!(found.is_sorted_by(|a, b| a.bytes_per_token <= b.bytes_per_token));
        let switches = asked.windows(2).filter(|pair| pair[0].0.uses_low() && !pair[1].0.uses_low()).count();
        assert!(switches <= 1, "low versions once for each part");
        let mixes = mixes(found);
        let best = mixes.cheapest(0.01, true).unwrap();
        let alone = |mix: Mix| machine(mix).bytes_per_token;
        assert!(best.bytes_per_token < alone(Mix { cache_bias: 0.3, ..Mix::EXACT }), "{best:?}");
        assert!(best.upper() <= 0.01 && best.mix.uses_low() && best.mix.cache_bias > 0.0, "{best:?}");
        let without = mixes.cheapest(0.01, false);
        assert!(without.is_none_or(|own| !own.mix.uses_low() && own.bytes_per_token >= best.bytes_per_token));
        assert!(mixes.cheapest(0.0001, true).is_none(), "nothing is that good");
        assert_eq!(mixes.check(), Ok(()));
    }

    #[test]
    fn without_low_versions_none_are_asked_for() {
        let (found, asked) = searched(&[], 0.02);
        assert!(!found.is_empty() && asked.iter().all(|(mix, _)| !mix.uses_low()));
        let (none, asked) = searched(&[], -1.0);
        assert!(none.is_empty() && asked.len() == 6, "a step and half of it, three times: {asked:?}");
        assert_eq!(search_mixes(&[], 0.1, |_, _| Err("disk")), Err("disk"));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let of = |change: fn(&mut MeasuredMix)| {
            let mut own = machine(Mix { cache_bias: 0.2, ..Mix::EXACT });
            change(&mut own);
            mixes(vec![own]).check()
        };
        assert_eq!(of(|_| ()), Ok(()));
        for change in [
            (|own| own.mix.cache_bias = -1.0) as fn(&mut MeasuredMix),
            |own| own.mix.drop = f32::NAN,
            |own| own.mix.t1 = 1.5,
            |own| own.mix.t2 = 0.5,
            |own| own.loss = f64::NAN,
            |own| own.error = -0.1,
        ] {
            assert!(of(change).is_err());
        }
        for share in [-0.1, 1.1, f64::NAN] {
            assert!(Mixes { cache_share: share, ..mixes(Vec::new()) }.check().is_err());
        }
        assert!(Mixes { exact_bytes_per_token: f64::INFINITY, ..mixes(Vec::new()) }.check().is_err());
    }

    #[test]
    fn what_a_pack_carries_comes_back() {
        let all = vec![mixes(vec![machine(Mix { cache_bias: 0.2, ..Mix::EXACT })]), mixes(Vec::new())];
        assert_eq!(mixes_of_json(&mixes_to_json(&all)), Ok(all.clone()));
        assert!(["", "{}", "[1]", "[{\"text\": \"a\"}]"].iter().all(|bad| mixes_of_json(bad).is_err()));
        let hostile = mixes_to_json(&all).replacen("0.25", "-3.0", 1);
        assert!(mixes_of_json(&hostile).unwrap_err().contains("-3"));
    }

    #[test]
    fn words_are_the_flags() {
        assert_eq!(Mix::EXACT.words(), "exact");
        let all = Mix { cache_bias: 0.2, substitute: 0.3, drop: 0.5, t1: 0.6, t2: 0.9, keep_top: 1 };
        assert_eq!(all.words(), "--cache-bias 0.2 --substitute 0.3 --keep-top 1 --drop 0.5 --t1 0.6 --t2 0.9");
        assert_eq!(beside(Path::new("models/a.b.gguf")), Path::new("models/a.b.profile.json"));
    }
}
