//! Options of routing: experts in memory that replace missing ones.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

use crate::profile::Mix;
use crate::route::Rerouting;

/// Quality that routing may give up to read fewer bytes. The default gives up nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, SmartDefault)]
#[serde(default)]
pub struct RoutingOptions {
    /// λ of the cache-aware choice, `0.0..`: an expert in memory gets a bonus of this share of the range of a token's
    /// scores; 0 is off.
    pub cache_bias: f32,
    /// Number of a token's best experts that are always used, resident or not.
    #[default(RoutingOptions::KEEP_TOP)]
    pub keep_top: u32,
    /// α of SMoE's substitution, `0.0..`; 0 is off.
    pub substitute: f32,
    /// Substitute nothing in layers whose routers are flat.
    pub spares_flat: bool,
    /// Maximum number of a token's experts that are substituted; `None` for any number.
    pub substitute_max: Option<u32>,
    /// Leave out a missing expert below this multiple of the uniform share of a token's weight, `0.0..`; 0 is off.
    pub drop: f32,
    /// Whether tokens use only experts in memory.
    pub virtual_experts: VirtualExperts,
    pub virtual_update: VirtualUpdate,
    /// Target time of a decoded token. One strength is then set to the lowest of [`RoutingOptions::ladder`] that meets
    /// it, as measured during decoding.
    pub target_latency: Option<Duration>,
    /// Choice for the loss bound, as text.
    pub loss_bound: Option<String>,
    /// Apply to prompts too. Their effect on the KV cache stays.
    pub prompts: bool,
}

/// The strength that a latency target sets. Displays as the option it sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Knob {
    #[default]
    CacheBias,
    Substitute,
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CacheBias => "cache bias",
            Self::Substitute => "substitutes within",
        })
    }
}

/// SwapMoE's virtual experts: while decoding, a token uses only experts in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VirtualExperts {
    /// Tokens wait for the experts they chose.
    #[default]
    Off,
    /// As many experts of each layer as fit in memory.
    Auto,
    /// The number of each layer in a plan of `gguf-tools plan`.
    Plan(PathBuf),
}

/// How often one of a layer's virtual experts may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VirtualUpdate {
    /// As often as possible without slowing tokens down by more than 2 %.
    #[default]
    Auto,
    /// Once per this many tokens, at least 1.
    Tokens(u32),
}

impl RoutingOptions {
    pub const KEEP_TOP: u32 = 1;
    /// SMoE's α; the paper has 0.25 to 0.35.
    pub const ALPHA: f32 = 0.3;
    /// λ above this needs a separate confirmation: the text stays fluent and becomes wrong.
    pub const CACHE_BIAS_MAX: f32 = 0.3;
    /// Number of strengths that a latency target chooses among.
    pub(crate) const STEPS: usize = 7;

    /// The strength that a latency target sets, and its choices, ascending from 0 in even steps. It sets α, up to the
    /// given one, if only α is given; otherwise λ, up to the given one or [`RoutingOptions::CACHE_BIAS_MAX`], and
    /// leaves α unchanged.
    pub fn ladder(&self) -> (Knob, [f32; Self::STEPS]) {
        let (knob, most) = match (self.cache_bias > 0.0, self.substitute > 0.0) {
            (true, _) => (Knob::CacheBias, self.cache_bias),
            (false, true) => (Knob::Substitute, self.substitute),
            (false, false) => (Knob::CacheBias, Self::CACHE_BIAS_MAX),
        };
        // Rounded for readability: 0.05, 0.1, ...
        let step = |at: usize| (f64::from(most) * at as f64 / (Self::STEPS - 1) as f64 * 1e4).round() / 1e4;
        (knob, std::array::from_fn(|at| if at + 1 == Self::STEPS { most } else { step(at) as f32 }))
    }

    /// Strengths of the approximations, 0 for off, by the names of these options.
    pub fn strengths(&self) -> [(&'static str, f32); 3] {
        [("cache_bias", self.cache_bias), ("substitute", self.substitute), ("drop", self.drop)]
    }

    /// Whether every token uses its routers' choices.
    pub fn is_off(&self) -> bool {
        self.rerouting().is_off() && self.drop <= 0.0 && self.target_latency.is_none()
    }

    /// The options with the settings of a mix.
    #[must_use]
    pub fn with(self, mix: Mix) -> Self {
        let Mix { cache_bias, keep_top, substitute, drop, .. } = mix;
        Self { cache_bias, keep_top, substitute, drop, ..self }
    }

    /// Description of the quality given up; `None` for nothing.
    pub fn words(&self) -> Option<String> {
        let Self { cache_bias, keep_top, substitute, drop, .. } = *self;
        let mut parts = Vec::new();
        match &self.virtual_experts {
            VirtualExperts::Off => {}
            VirtualExperts::Auto => parts.push("only experts in memory".to_owned()),
            VirtualExperts::Plan(path) => parts.push(format!("only experts in memory, by {}", path.display())),
        }
        let (knob, ladder) = self.ladder();
        let timed = self.target_latency.map(|target| {
            let (most, ms) = (ladder[Self::STEPS - 1], target.as_secs_f64() * 1e3);
            (knob, format!("{knob} up to {most}, aiming at {ms} ms a token"))
        });
        match &timed {
            Some((Knob::CacheBias, words)) => parts.push(words.clone()),
            _ => parts.extend((cache_bias > 0.0).then(|| format!("cache bias {cache_bias}"))),
        }
        let flat = if self.spares_flat { " (none in layers with flat routers)" } else { "" };
        let most = self.substitute_max.map_or_else(String::new, |max| format!(" (at most {max})")) + flat;
        match &timed {
            Some((Knob::Substitute, words)) => parts.push(format!("{words}{most}")),
            _ => parts.extend((substitute > 0.0).then(|| format!("substitutes within {substitute}{most}"))),
        }
        if (cache_bias > 0.0 || substitute > 0.0 || self.target_latency.is_some()) && keep_top > 0 {
            let experts = if keep_top == 1 { "expert".to_owned() } else { format!("{keep_top} experts") };
            parts.push(format!("a token's best {experts} always used"));
        }
        if drop > 0.0 {
            parts.push(format!("missing below {drop} left out"));
        }
        if self.prompts && !parts.is_empty() {
            parts.push("prompts too".to_owned());
        }
        let bound = self.loss_bound.as_ref().map_or_else(String::new, |bound| format!(" ({bound})"));
        (!parts.is_empty()).then(|| parts.join(", ") + &bound)
    }

    /// Rules for a token's choice; with a latency target, the mildest.
    pub fn rerouting(&self) -> Rerouting {
        let timed = self.target_latency.map(|_| self.ladder().0);
        Rerouting {
            bias: if timed == Some(Knob::CacheBias) { 0.0 } else { self.cache_bias },
            keep_top: self.keep_top as usize,
            substitute: if timed == Some(Knob::Substitute) { 0.0 } else { self.substitute },
            substitute_max: self.substitute_max.map(|max| max as usize),
            only_present: self.virtual_experts != VirtualExperts::Off,
            spares_flat: self.spares_flat,
        }
    }
}

impl FromStr for VirtualExperts {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "off" => Self::Off,
            "auto" => Self::Auto,
            path => Self::Plan(path.into()),
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is neither 'auto' nor a number of tokens from 1")]
pub struct VirtualUpdateError(String);

impl FromStr for VirtualUpdate {
    type Err = VirtualUpdateError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            (_, Ok(tokens @ 1..)) => Ok(Self::Tokens(tokens)),
            _ => Err(VirtualUpdateError(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let parse = |text: &str| text.parse::<VirtualUpdate>();
        assert_eq!([parse("auto"), parse("16")], [Ok(VirtualUpdate::Auto), Ok(VirtualUpdate::Tokens(16))]);
        assert!(["0", "-1", "", "1.5", "Auto"].iter().all(|bad| parse(bad).is_err()));
        assert_eq!("plan.json".parse(), Ok(VirtualExperts::Plan("plan.json".into())));
        assert_eq!(["off", "auto"].map(|word| word.parse()), [Ok(VirtualExperts::Off), Ok(VirtualExperts::Auto)]);
    }

    #[test]
    fn the_given_up_quality_is_described() {
        assert_eq!(RoutingOptions::default().words(), None);
        let all = RoutingOptions {
            cache_bias: 0.2,
            substitute: 0.3,
            substitute_max: Some(2),
            drop: 0.5,
            prompts: true,
            ..Default::default()
        };
        let words = "cache bias 0.2, substitutes within 0.3 (at most 2), a token's best expert always used, missing \
                     below 0.5 left out, prompts too";
        assert_eq!(all.words().as_deref(), Some(words));
        let timed = RoutingOptions { target_latency: Some(Duration::from_millis(40)), ..Default::default() };
        let words = timed.words().unwrap();
        assert!(words == "cache bias up to 0.3, aiming at 40 ms a token, a token's best expert always used", "{words}");
        let alpha = RoutingOptions { substitute: 0.6, substitute_max: Some(2), ..timed.clone() };
        let words =
            "substitutes within up to 0.6, aiming at 40 ms a token (at most 2), a token's best expert always used";
        assert_eq!(alpha.words().as_deref(), Some(words));
        let both = RoutingOptions { cache_bias: 0.1, substitute: 0.3, ..timed };
        let words =
            "cache bias up to 0.1, aiming at 40 ms a token, substitutes within 0.3, a token's best expert always used";
        assert_eq!(both.words().as_deref(), Some(words));
        let virtual_experts = RoutingOptions { virtual_experts: VirtualExperts::Auto, ..Default::default() };
        assert_eq!(virtual_experts.words().as_deref(), Some("only experts in memory"));
    }

    #[test]
    fn a_latency_target_sets_what_was_given_as_the_most() {
        let of = |cache_bias, substitute| {
            let target_latency = Some(Duration::from_millis(40));
            let options = RoutingOptions { cache_bias, substitute, target_latency, ..Default::default() };
            let Rerouting { bias, substitute, .. } = options.rerouting();
            (options.ladder(), [bias, substitute])
        };
        let usual = [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3];
        assert_eq!(of(0.0, 0.0), ((Knob::CacheBias, usual), [0.0, 0.0]));
        assert_eq!(of(0.3, 0.2), ((Knob::CacheBias, usual), [0.0, 0.2]));
        assert_eq!(of(0.0, 0.3), ((Knob::Substitute, usual), [0.0, 0.0]));
        let (_, ladder) = of(0.0, 0.35).0;
        assert!(ladder.is_sorted() && ladder[0] == 0.0 && ladder[6] == 0.35 && ladder[1] == 0.0583, "{ladder:?}");
    }

    #[test]
    fn nothing_is_given_up_unless_asked_for() {
        assert!(RoutingOptions::default().is_off());
        for on in [
            RoutingOptions { cache_bias: 0.1, ..Default::default() },
            RoutingOptions { substitute: 0.1, ..Default::default() },
            RoutingOptions { drop: 0.1, ..Default::default() },
            RoutingOptions { virtual_experts: VirtualExperts::Auto, ..Default::default() },
            RoutingOptions { target_latency: Some(Duration::from_millis(40)), ..Default::default() },
        ] {
            assert!(!on.is_off(), "{on:?}");
        }
    }
}
