//! Flags of cache-aware routing.

use std::time::Duration;

use clap::Args;

use super::PrecisionArgs;
use crate::switch::Switch;
use hobbit::options::{PrecisionMode, RoutingOptions, VirtualExperts, VirtualUpdate};
use hobbit_core::units::parse_percent;

#[derive(Args, Debug)]
#[command(next_help_heading = "Routing that knows what is in memory (hobbit's own; results are approximate)")]
pub struct RoutingArgs {
    /// In decoding, prefer experts in memory by N times the range of the token's router scores: 0.1 to 0.3
    /// reads far less at little cost, 0 is off
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = strength, env = "HOBBIT_ARG_CACHE_BIAS")]
    pub cache_bias: f32,
    /// Accept a --cache-bias above 0.3, where text stays fluent and becomes wrong
    #[arg(long, value_name = Switch::NAME, default_value = "off", env = "HOBBIT_ARG_CACHE_BIAS_ANY")]
    pub cache_bias_any: Switch,
    /// Always use a token's best N experts, in memory or not
    #[arg(long, value_name = "N", default_value_t = RoutingOptions::KEEP_TOP, value_parser = clap::value_parser!(u32).range(..=1024), env = "HOBBIT_ARG_KEEP_TOP")]
    pub keep_top: u32,
    /// A missing expert whose score is less than N above the best that was not chosen gives way to one in memory whose score is
    /// less than N below it, both as shares of that score (SMoE's alpha; the paper has 0.25 to 0.35, auto takes 0.3)
    #[arg(long, value_name = "N|auto|off", default_value = "off", value_parser = alpha, env = "HOBBIT_ARG_SUBSTITUTE")]
    pub substitute: f32,
    /// At most N experts of a token are substituted (default: any number)
    #[arg(long, value_name = "N", env = "HOBBIT_ARG_SUBSTITUTE_MAX")]
    pub substitute_max: Option<u32>,
    /// In decoding, leave out a missing expert that has less than N times the uniform share of the token's weight; 0 is off
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = strength, env = "HOBBIT_ARG_DROP")]
    pub drop: f32,
    /// In decoding, use experts in memory only, and load others in the background (SwapMoE): auto, or a plan of
    /// gguf-tools plan
    #[arg(long, value_name = "off|auto|PLAN.json", default_value = "off", env = "HOBBIT_ARG_VIRTUAL_EXPERTS")]
    pub virtual_experts: VirtualWord,
    /// One of a layer's experts may change in N tokens; auto: as often as does not slow tokens by more than 2 %
    #[arg(long, value_name = "auto|N", default_value = "auto", env = "HOBBIT_ARG_VIRTUAL_UPDATE")]
    pub virtual_update: VirtualUpdate,
    /// Give up at most N percent of perplexity for the fewest bytes: the cheapest mix of --cache-bias, --substitute, --drop and low
    /// precision whose measured loss, with one standard error, stays below, as 'gguf-tools profile --max-loss' found it with no more
    /// of the experts in memory, and wrote it beside the model (MODEL.profile.json) or 'gguf-tools pack' into the pack
    #[arg(long, value_name = "N%", value_parser = percent, env = "HOBBIT_ARG_MAX_LOSS")]
    pub max_loss: Option<f64>,
    /// A token shall take no more than N milliseconds while it decodes: --cache-bias is then the least, up to what is given or 0.3,
    /// that suffices, as measured in trials while it runs; or, where --substitute is given and no --cache-bias, SMoE's alpha up to that.
    /// If none does, the most is taken, and what can be reached is told. Not with --deterministic
    #[arg(long, value_name = "N", value_parser = milliseconds, env = "HOBBIT_ARG_TARGET_LATENCY")]
    pub target_latency: Option<Duration>,
    /// Apply this to prompts too; its effect on the context stays
    #[arg(long, value_name = Switch::NAME, default_value = "off", env = "HOBBIT_ARG_ROUTE_PROMPTS")]
    pub route_prompts: Switch,
}

/// [`VirtualExperts`] as typed.
#[derive(Clone, Debug)]
pub struct VirtualWord(VirtualExperts);

impl std::str::FromStr for VirtualWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("expected off, auto or the name of a plan".to_owned()),
            text => Ok(Self(text.parse().unwrap_or_default())),
        }
    }
}

impl RoutingArgs {
    /// Checks for contradictions, including those with the flags of `precision`.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self, precision: &PrecisionArgs) -> Result<(), String> {
        let options = self.options();
        let most = RoutingOptions::CACHE_BIAS_MAX;
        if self.cache_bias > most && !self.cache_bias_any.0 {
            return Err(format!(
                "'--cache-bias {}' is above {most}, beyond which text stays fluent and becomes wrong; give at most {most}, or \
                 --cache-bias-any too",
                self.cache_bias
            ));
        }
        if precision.precision == Some(PrecisionMode::Exact) && !options.is_off() {
            return Err(format!(
                "'{}' contradicts '--precision exact', which promises llama.cpp's results; drop one of them",
                self.spelled()
            ));
        }
        if let Some(target) = self.target_latency {
            let target = format!("'--target-latency {}'", target.as_secs_f64() * 1e3);
            let other = match () {
                () if precision.deterministic.0 => "--deterministic, for it goes by what tokens take",
                () if options.virtual_experts != VirtualExperts::Off => "--virtual-experts, where no token waits",
                () => "",
            };
            if !other.is_empty() {
                return Err(format!("{target} cannot be had with {other}; drop one of them"));
            }
        }
        if let Some(max_loss) = self.max_loss {
            let chosen = !options.is_off() || precision.t1.is_some() || precision.t2.is_some();
            let other = match () {
                () if precision.precision == Some(PrecisionMode::Exact) => "--precision exact, which gives up nothing",
                () if chosen => {
                    "--cache-bias, --substitute, --drop, --virtual-experts, --target-latency, --t1 and --t2, for it chooses these \
                     itself"
                }
                () => "",
            };
            if !other.is_empty() {
                let percent = hobbit_core::profile::in_percent(max_loss);
                return Err(format!("'--max-loss {percent}%' cannot be had with {other}; drop one of them"));
            }
        }
        if options.prompts
            && options.rerouting().is_off()
            && options.target_latency.is_none()
            && self.max_loss.is_none()
        {
            return Err(
                "'--route-prompts' is of no use without --cache-bias, --substitute or --virtual-experts".to_owned()
            );
        }
        Ok(())
    }

    /// The first flag that gives something up, as typed.
    fn spelled(&self) -> String {
        match () {
            () if self.cache_bias > 0.0 => format!("--cache-bias {}", self.cache_bias),
            () if self.target_latency.is_some() => "--target-latency".to_owned(),
            () if self.substitute > 0.0 => format!("--substitute {}", self.substitute),
            () if self.drop > 0.0 => format!("--drop {}", self.drop),
            () => "--virtual-experts".to_owned(),
        }
    }

    /// The routing options of the engine.
    pub fn options(&self) -> RoutingOptions {
        RoutingOptions {
            cache_bias: self.cache_bias,
            keep_top: self.keep_top,
            substitute: self.substitute,
            substitute_max: self.substitute_max,
            drop: self.drop,
            virtual_experts: self.virtual_experts.0.clone(),
            virtual_update: self.virtual_update,
            target_latency: self.target_latency,
            loss_bound: None,
            prompts: self.route_prompts.0,
        }
    }
}

/// SMoE's α.
fn alpha(text: &str) -> Result<f32, String> {
    match text {
        "off" => Ok(0.0),
        "auto" => Ok(RoutingOptions::ALPHA),
        text => strength(text).map_err(|_| "expected a number from 0, such as 0.3, auto or off".to_owned()),
    }
}

/// A strength: 0 or more.
fn strength(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(strength) if (0.0..=100.0).contains(&strength) => Ok(strength),
        _ => Err("expected a number from 0, such as 0.2".to_owned()),
    }
}

/// `1%` or `1`: a share.
fn percent(text: &str) -> Result<f64, String> {
    let percent = parse_percent(text, 1e4).ok_or_else(|| "expected a percentage from 0%, such as 1%".to_owned())?;
    Ok(percent / 100.0)
}

/// A time above 0, at most an hour.
fn milliseconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(ms) if ms > 0.0 && ms <= 3.6e6 => Ok(Duration::from_secs_f64(ms / 1e3)),
        _ => Err("expected milliseconds above 0, such as 50".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error message for a command line.
    fn said(words: &[&str]) -> String {
        let words = std::iter::once("hobbit-cli").chain(words.iter().copied());
        let matches = super::super::command().no_binary_name(false).try_get_matches_from(words).unwrap();
        let routing = <RoutingArgs as clap::FromArgMatches>::from_arg_matches(&matches).unwrap();
        let precision = <PrecisionArgs as clap::FromArgMatches>::from_arg_matches(&matches).unwrap();
        routing.check(&precision).err().unwrap_or_default()
    }

    #[test]
    fn alpha_has_words() {
        assert_eq!(["off", "auto", "0.25"].map(alpha), [Ok(0.0), Ok(0.3), Ok(0.25)]);
        assert!(["", "-1", "on", "nan"].iter().all(|bad| alpha(bad).is_err()));
    }

    #[test]
    fn a_latency_target_is_a_time_and_goes_with_what_it_may_change() {
        for (text, ms) in [("50", 50.0), ("0.5", 0.5), ("3600000", 3.6e6)] {
            assert_eq!(milliseconds(text).map(|time| time.as_secs_f64() * 1e3), Ok(ms));
        }
        assert!(["0", "-1", "nan", "inf", "1e9", "", "50ms"].iter().all(|bad| milliseconds(bad).is_err()));
        assert_eq!(said(&["--target-latency=50", "--substitute=0.3", "--route-prompts=on"]), "");
        assert_eq!(said(&["--target-latency=50", "--cache-bias=0.2"]), "");
        assert!(said(&["--target-latency=50", "--cache-bias=0.5"]).contains("above 0.3"));
        for (other, part) in [
            ("--deterministic=on", "cannot be had with --deterministic"),
            ("--virtual-experts=auto", "cannot be had with --virtual-experts"),
            ("--precision=exact", "'--target-latency' contradicts '--precision exact'"),
        ] {
            let error = said(&["--target-latency=50", other]);
            assert!(error.contains(part) && error.ends_with("drop one of them"), "{other}: {error}");
        }
        assert!(said(&["--route-prompts=on"]).contains("of no use"));
        assert_eq!(said(&["--max-loss=1%", "--route-prompts=on"]), "");
        for other in ["--t1=0.5", "--cache-bias=0.2", "--precision=exact", "--target-latency=50"] {
            let error = said(&["--max-loss=1%", other]);
            let flag = other.split('=').next().unwrap();
            assert!(error.starts_with("'--max-loss 1%' cannot be had with") && error.contains(flag), "{error}");
        }
    }
}
