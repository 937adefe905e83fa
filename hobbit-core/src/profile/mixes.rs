//! Mixes: settings that give up a little quality for fewer reads, each with its measured loss.
//!
//! [`search_mixes`] raises one setting at a time on one part of a text, then measures the best mixes again on a part
//! that was held out. The table ([`Mixes`]) holds the second measurements; [`super::LossBound`] picks from it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::Digest;

use crate::route::Thresholds;

/// Settings that give up quality.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mix {
    /// λ of the cache-aware choice.
    pub cache_bias: f32,
    /// Number of a token's best experts that always stay.
    pub keep_top: u32,
    /// α of SMoE's substitution.
    pub substitute: f32,
    /// Leave out a missing expert below this multiple of the uniform share.
    pub drop: f32,
    /// Highest unimportance of a missing expert that comes in high precision; 1 for all.
    pub t1: f32,
    /// Highest unimportance of a missing expert that comes at all; 1 for all.
    pub t2: f32,
}

impl Mix {
    pub const EXACT: Self = Self { cache_bias: 0.0, keep_top: 1, substitute: 0.0, drop: 0.0, t1: 1.0, t2: 1.0 };

    pub fn uses_low(&self) -> bool {
        self.t1 < 1.0
    }

    pub fn is_low_alone(&self) -> bool {
        self.uses_low() && *self == Self::EXACT.with(self.thresholds())
    }

    pub fn thresholds(&self) -> Thresholds {
        Thresholds { t1: self.t1, t2: self.t2 }
    }

    fn with(self, Thresholds { t1, t2 }: Thresholds) -> Self {
        Self { t1, t2, ..self }
    }

    /// The settings that differ from exact; `name` spells a setting such as `cache_bias`.
    pub fn words(&self, name: fn(&str) -> String) -> String {
        let Self { cache_bias, keep_top, substitute, drop, t1, t2 } = *self;
        let (is_rerouted, is_lowered) = (cache_bias > 0.0 || substitute > 0.0, t1 < 1.0 || t2 < 1.0);
        let mut parts = Vec::new();
        parts.extend((cache_bias > 0.0).then(|| format!("{} {cache_bias}", name("cache_bias"))));
        parts.extend((substitute > 0.0).then(|| format!("{} {substitute}", name("substitute"))));
        parts.extend(is_rerouted.then(|| format!("{} {keep_top}", name("keep_top"))));
        parts.extend((drop > 0.0).then(|| format!("{} {drop}", name("drop"))));
        parts.extend(is_lowered.then(|| format!("{} {t1} {} {t2}", name("t1"), name("t2"))));
        if parts.is_empty() { "exact".to_owned() } else { parts.join(" ") }
    }
}

/// Effect of a mix on a text, token by token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredMix {
    pub mix: Mix,
    /// Relative increase of perplexity; 0.01 is one percent.
    pub loss: f64,
    /// Its standard error, from differences token by token.
    pub error: f64,
    pub bytes_per_token: f64,
}

impl MeasuredMix {
    /// From the mean and standard error of the differences of negative log-likelihoods, in nats.
    pub fn new(mix: Mix, mean: f64, error: f64, bytes_per_token: f64) -> Self {
        Self { mix, loss: mean.exp_m1(), error: error * mean.exp(), bytes_per_token }
    }

    /// The loss that a bound is compared with: one standard error above the measurement.
    pub fn upper(&self) -> f64 {
        self.loss + self.error
    }
}

/// Mixes that were measured at one cache size, ascending by bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mixes {
    pub text: String,
    /// SHA-256 of the text, hexadecimal.
    pub text_sha256: String,
    /// Tokens of the part that was held out.
    pub tokens: u64,
    /// Expert cache as given to `gguf-tools profile`.
    pub expert_cache: String,
    /// Share of the experts that have slots when no low version has any, `0.0..=1.0`.
    pub cache_share: f64,
    /// Types of the experts, as a session reports them: `q8_0`.
    pub high: String,
    /// Types of the low versions, if mixes use them.
    pub low: Option<String>,
    /// Expert bytes read per token when nothing is given up.
    pub exact_bytes_per_token: f64,
    /// Measurements on the part that was held out.
    pub mixes: Vec<MeasuredMix>,
}

impl Mixes {
    /// The mix with the fewest bytes within the bound; `None` if no mix is within it, or none saves anything.
    pub fn cheapest(&self, max_loss: f64, has_low: bool) -> Option<&MeasuredMix> {
        let fits = |measured: &&MeasuredMix| measured.upper() <= max_loss && (has_low || !measured.mix.uses_low());
        let cheapest = self.mixes.iter().filter(fits).min_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token))?;
        (cheapest.bytes_per_token < self.exact_bytes_per_token).then_some(cheapest)
    }

    /// Checks that the numbers make sense; the error says what was found and what was expected.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { cache_share, exact_bytes_per_token, .. } = self;
        if !(0.0..=1.0).contains(cache_share) || !(0.0..=f64::MAX).contains(exact_bytes_per_token) {
            return Err(format!(
                "mixes were measured with {cache_share} of the experts in memory and {exact_bytes_per_token} bytes a \
                 token, \
                 expected a share from 0 to 1, and bytes from 0 on"
            ));
        }
        for MeasuredMix { mix, loss, error, bytes_per_token } in &self.mixes {
            let words = mix.words(str::to_owned);
            let is_strength =
                [mix.cache_bias, mix.substitute, mix.drop].iter().all(|strength| (0.0..=100.0).contains(strength));
            if !is_strength || Thresholds::new(mix.t1, mix.t2).is_err() {
                return Err(format!("a mix is '{words}', expected strengths from 0 on, and T1 at most T2 from 0 to 1"));
            }
            if ![loss, error, bytes_per_token].iter().all(|number| number.is_finite()) || *error < 0.0 {
                return Err(format!("the mix '{words}' was measured as {loss} +- {error}, expected numbers"));
            }
        }
        Ok(())
    }
}

pub fn mixes_to_json(mixes: &[Mixes]) -> String {
    serde_json::to_string(mixes).expect("names and numbers can always be written")
}

pub fn mixes_of_json(text: &str) -> Result<Vec<Mixes>, String> {
    let mixes: Vec<Mixes> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    mixes.iter().try_for_each(Mixes::check)?;
    Ok(mixes)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Mixes are searched on this part.
    Search,
    /// Mixes are judged on this part.
    HeldOut,
}

/// Most runs over a part of the text.
pub const RUNS_MAX: usize = 35;
/// Least loss that a saving is compared with: smaller ones are noise.
const LOSS_MIN: f64 = 1e-4;
/// Most mixes that are measured again.
const HELD_OUT_MAX: usize = 6;
type Setting = fn(&mut Mix) -> &mut f32;
/// Settings that need no low versions, with their strengths.
const AXES: [(&[f32], Setting); 3] = [
    (&[0.05, 0.1, 0.2, 0.3], |mix| &mut mix.cache_bias),
    (&[0.2, 0.4, 0.6], |mix| &mut mix.substitute),
    (&[0.4, 0.8], |mix| &mut mix.drop),
];

/// Searches mixes within `max_loss`: from exact on, the setting that saves most bytes for its loss is raised by one
/// strength, as long as the loss allows. `lows` are thresholds for a model with low versions, ascending in what they
/// give up; empty without low versions. Each mix on the way is combined with the strongest of them that the loss
/// allows. `exact_bytes` are read per token when nothing is given up. `measure` runs a part of the text; mixes with
/// low versions are measured last.
pub fn search_mixes<E>(
    lows: &[Thresholds],
    max_loss: f64,
    exact_bytes: f64,
    mut measure: impl FnMut(Mix, Part) -> Result<MeasuredMix, E>,
) -> Result<Vec<MeasuredMix>, E> {
    let mut found: Vec<MeasuredMix> = Vec::new();
    let mut way = vec![Mix::EXACT];
    let mut last: Option<MeasuredMix> = None;
    let mut steps = [0; AXES.len()];
    let mut is_open = [true; AXES.len()];
    let mut runs_left = RUNS_MAX - HELD_OUT_MAX - lows.len();
    loop {
        let mix = way[way.len() - 1];
        let mut best: Option<(f64, usize, MeasuredMix)> = None;
        for (axis, (strengths, setting)) in AXES.iter().enumerate() {
            let Some(strength) = strengths.get(steps[axis]).filter(|_| is_open[axis]) else { continue };
            // Each mix on the way needs a run beside low versions.
            if runs_left < way.len() + 2 {
                is_open[axis] = false;
                continue;
            }
            runs_left -= 1;
            let mut next = mix;
            *setting(&mut next) = *strength;
            let measured = measure(next, Part::Search)?;
            found.push(measured);
            // A setting that loses too much here loses too much beside stronger ones as well.
            is_open[axis] = measured.upper() <= max_loss;
            let (bytes, loss) = last.map_or((exact_bytes, 0.0), |last| (last.bytes_per_token, last.loss));
            let worth = (bytes - measured.bytes_per_token) / (measured.loss - loss).max(LOSS_MIN);
            if is_open[axis] && worth > best.as_ref().map_or(0.0, |(worth, ..)| *worth) {
                best = Some((worth, axis, measured));
            }
        }
        let Some((_, axis, measured)) = best else { break };
        steps[axis] += 1;
        way.push(measured.mix);
        last = Some(measured);
    }
    let mut strongest = lows.len();
    for mix in way {
        while let Some(low) = strongest.checked_sub(1).map(|at| lows[at]) {
            let measured = measure(mix.with(low), Part::Search)?;
            found.push(measured);
            if measured.upper() <= max_loss {
                break;
            }
            strongest -= 1;
        }
    }
    // The mean decides here: packs take their thresholds from the mix that uses low versions alone.
    let low = found.iter().find(|measured| measured.mix.is_low_alone() && measured.loss <= max_loss).copied();
    found.retain(|measured| measured.upper() <= max_loss);
    let mut wanted = frontier(found);
    wanted.truncate(HELD_OUT_MAX - 1);
    wanted.extend(low.filter(|low| wanted.iter().all(|measured| measured.mix != low.mix)));
    wanted.sort_by_key(|measured| measured.mix.uses_low());
    let judged = wanted.into_iter().map(|measured| measure(measured.mix, Part::HeldOut));
    let mut judged = judged.collect::<Result<Vec<_>, E>>()?;
    judged.sort_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token));
    Ok(judged)
}

/// The mixes that lose less than every cheaper one, ascending by bytes.
fn frontier(mut found: Vec<MeasuredMix>) -> Vec<MeasuredMix> {
    found.sort_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token).then(a.loss.total_cmp(&b.loss)));
    let mut least = f64::INFINITY;
    found.retain(|measured| {
        let is_better = measured.loss < least;
        least = least.min(measured.loss);
        is_better
    });
    found
}

pub fn text_sha256(text: &[u8]) -> String {
    crate::pack::Sha256(sha2::Sha256::digest(text).into()).to_string()
}

/// Default place of a model's profile: `model.profile.json` beside `model.gguf`.
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
        let found = search_mixes(lows, max_loss, 1e6, |mix, part| {
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
    fn settings_are_combined_and_judged_on_the_part_that_was_held_out() {
        let lows = [0.8, 0.6, 0.1].map(|t1| Thresholds { t1, t2: 1.0 });
        let (found, asked) = searched(&lows, 0.01);
        assert!(asked.len() <= RUNS_MAX, "{} runs", asked.len());
        let held_out = asked.iter().filter(|(_, part)| *part == Part::HeldOut).count();
        assert!((1..=6).contains(&held_out) && found.len() == held_out);
        assert!(found.is_sorted_by(|a, b| a.bytes_per_token <= b.bytes_per_token));
        let switches = asked.windows(2).filter(|pair| pair[0].0.uses_low() && !pair[1].0.uses_low()).count();
        assert!(switches <= 1, "low versions once for each part");
        let alone: Vec<f32> = found.iter().filter(|own| own.mix.is_low_alone()).map(|own| own.mix.t1).collect();
        assert_eq!(alone, [0.1], "the strongest thresholds alone are judged");
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
    fn runs_are_bounded_and_low_versions_are_used_only_if_there_are_any() {
        let (found, asked) = searched(&[], 0.02);
        assert!(!found.is_empty() && asked.iter().all(|(mix, _)| !mix.uses_low()));
        let (none, asked) = searched(&[], -1.0);
        assert!(none.is_empty() && asked.len() == 3, "one step of each setting: {asked:?}");
        let (all, asked) = searched(&[0.9, 0.8, 0.7, 0.6].map(|t1| Thresholds { t1, t2: 1.0 }), 10.0);
        assert!(!all.is_empty() && (20..=RUNS_MAX).contains(&asked.len()), "{} runs", asked.len());
        assert_eq!(search_mixes(&[], 0.1, 1e6, |_, _| Err("disk")), Err("disk"));
    }

    #[test]
    fn senseless_measurements_are_refused() {
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
    fn mixes_survive_a_pack() {
        let all = vec![mixes(vec![machine(Mix { cache_bias: 0.2, ..Mix::EXACT })]), mixes(Vec::new())];
        assert_eq!(mixes_of_json(&mixes_to_json(&all)), Ok(all.clone()));
        assert!(["", "{}", "[1]", "[{\"text\": \"a\"}]"].iter().all(|bad| mixes_of_json(bad).is_err()));
        let hostile = mixes_to_json(&all).replacen("0.25", "-3.0", 1);
        assert!(mixes_of_json(&hostile).unwrap_err().contains("-3"));
    }

    #[test]
    fn settings_that_are_set_are_named() {
        assert_eq!(Mix::EXACT.words(str::to_owned), "exact");
        let all = Mix { cache_bias: 0.2, substitute: 0.3, drop: 0.5, t1: 0.6, t2: 0.9, keep_top: 1 };
        let words = all.words(|setting| format!("--{setting}"));
        assert_eq!(words, "--cache_bias 0.2 --substitute 0.3 --keep_top 1 --drop 0.5 --t1 0.6 --t2 0.9");
        assert_eq!(beside(Path::new("models/a.b.gguf")), Path::new("models/a.b.profile.json"));
    }
}
