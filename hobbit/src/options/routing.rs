//! Where a token may go in place of experts that are not in memory.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

use crate::profile::Mix;
use crate::route::Rerouting;

/// What routing may give up for fewer bytes. The default gives up nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, SmartDefault)]
#[serde(default)]
pub struct RoutingOptions {
    /// λ of the cache-aware choice: so much of the range of a token's scores, `0.0..`, an expert in memory is ahead of one that is
    /// not; 0 is off.
    pub cache_bias: f32,
    /// A token's best so many experts are used whatever is in memory.
    #[default(RoutingOptions::KEEP_TOP)]
    pub keep_top: u32,
    /// α of SMoE's substitution, `0.0..`; 0 is off.
    pub substitute: f32,
    /// At most so many experts of a token are substituted; `None` for any number.
    pub substitute_max: Option<u32>,
    /// A missing expert with less than so many times the uniform share of a token's weight is left out, `0.0..`; 0 is off.
    pub drop: f32,
    /// Whether tokens wait for experts at all.
    pub virtual_experts: VirtualExperts,
    /// How often the resident set changes then.
    pub virtual_update: VirtualUpdate,
    /// What a token may take while it decodes: [`RoutingOptions::cache_bias`] is then the least of [`RoutingOptions::LADDER`] that
    /// suffices, as measured while tokens decode, and whatever is set does not count.
    pub target_latency: Option<Duration>,
    /// What was promised, and is kept by all of this, in words: for people.
    pub promise: Option<String>,
    /// Prompts as well. What they leave in the KV cache stays there.
    pub prompts: bool,
}

/// SwapMoE's virtual experts: while it decodes, a token uses only what is in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VirtualExperts {
    /// Tokens wait for what they chose.
    #[default]
    Off,
    /// As many experts of each layer as the memory holds.
    Auto,
    /// As many of each layer as a plan of `gguf-tools plan` says.
    Plan(PathBuf),
}

/// How often one of a layer's virtual experts may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VirtualUpdate {
    /// As often as does not slow tokens down by more than 2 %.
    #[default]
    Auto,
    /// Once in so many tokens, at least 1.
    Tokens(u32),
}

impl RoutingOptions {
    /// [`RoutingOptions::keep_top`] unless something else is asked for.
    pub const KEEP_TOP: u32 = 1;
    /// λ above this has its own word to be confirmed by: beyond it text stays fluent and becomes wrong.
    pub const CACHE_BIAS_MAX: f32 = 0.3;
    /// What a latency target may choose among, ascending.
    pub const LADDER: [f32; 7] = [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, Self::CACHE_BIAS_MAX];

    /// Whether every token is computed with the experts that its routers chose.
    pub fn is_off(&self) -> bool {
        self.rerouting().is_off() && self.drop <= 0.0 && self.target_latency.is_none()
    }

    /// As a profile's mix says.
    #[must_use]
    pub fn with(self, mix: Mix) -> Self {
        let Mix { cache_bias, keep_top, substitute, drop, .. } = mix;
        Self { cache_bias, keep_top, substitute, drop, ..self }
    }

    /// What is given up, in words; `None` for nothing.
    pub fn words(&self) -> Option<String> {
        let Self {
            cache_bias,
            keep_top,
            substitute,
            substitute_max,
            drop,
            virtual_experts,
            target_latency,
            promise,
            prompts,
            ..
        } = self;
        let mut parts = Vec::new();
        match virtual_experts {
            VirtualExperts::Off => {}
            VirtualExperts::Auto => parts.push("only experts in memory".to_owned()),
            VirtualExperts::Plan(path) => parts.push(format!("only experts in memory, by {}", path.display())),
        }
        if let Some(target) = target_latency {
            let most = Self::CACHE_BIAS_MAX;
            parts.push(format!("cache bias up to {most}, as {} ms a token need", target.as_secs_f64() * 1e3));
        } else if *cache_bias > 0.0 {
            parts.push(format!("cache bias {cache_bias}"));
        }
        if *substitute > 0.0 {
            let most = substitute_max.map_or_else(String::new, |max| format!(" (at most {max})"));
            parts.push(format!("substitutes within {substitute}{most}"));
        }
        if (*cache_bias > 0.0 || *substitute > 0.0 || target_latency.is_some()) && *keep_top > 0 {
            parts.push(format!("the best {keep_top} kept"));
        }
        if *drop > 0.0 {
            parts.push(format!("missing below {drop} left out"));
        }
        if *prompts && !parts.is_empty() {
            parts.push("prompts too".to_owned());
        }
        let promise = promise.as_ref().map_or_else(String::new, |promise| format!(" ({promise})"));
        (!parts.is_empty()).then(|| parts.join(", ") + &promise)
    }

    /// The rules for a token's choice.
    pub fn rerouting(&self) -> Rerouting {
        Rerouting {
            bias: if self.target_latency.is_some() { 0.0 } else { self.cache_bias },
            keep_top: self.keep_top as usize,
            substitute: self.substitute,
            substitute_max: self.substitute_max.map(|max| max as usize),
            only_present: self.virtual_experts != VirtualExperts::Off,
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

/// Why an update period was not understood.
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
    fn what_is_given_up_is_said() {
        assert_eq!(RoutingOptions::default().words(), None);
        let all = RoutingOptions {
            cache_bias: 0.2,
            substitute: 0.3,
            substitute_max: Some(2),
            drop: 0.5,
            prompts: true,
            ..Default::default()
        };
        let words = "cache bias 0.2, substitutes within 0.3 (at most 2), the best 1 kept, missing below 0.5 left out, prompts too";
        assert_eq!(all.words().as_deref(), Some(words));
        let timed = RoutingOptions { target_latency: Some(Duration::from_millis(40)), ..Default::default() };
        let words = timed.words().unwrap();
        assert!(words == "cache bias up to 0.3, as 40 ms a token need, the best 1 kept", "{words}");
        let virtual_experts = RoutingOptions { virtual_experts: VirtualExperts::Auto, ..Default::default() };
        assert_eq!(virtual_experts.words().as_deref(), Some("only experts in memory"));
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
