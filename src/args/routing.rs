//! Flags of cache-aware routing.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};

use clap::Args;

use super::{PrecisionArgs, number, strength};
use crate::argv::Switch;
use hobbit::options::{ModelOptions, PrecisionMode, RoutingOptions, VirtualExperts, VirtualUpdate};
use hobbit_common::advice::{measure_mixes, spelled};
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{MIXES_KEY, Pack};
use hobbit_core::profile::{LossBound, Profile, ProfileError, beside, in_percent, mixes_of_json};
use hobbit_core::units::parse_percent;

#[derive(Args, Debug)]
#[command(next_help_heading = "Routing that knows what is in memory (hobbit's own; results are approximate)")]
pub struct RoutingArgs {
    /// In decoding, prefer experts in memory by N times the range of the token's router scores: 0.1 to 0.3
    /// reads far less at little cost, 0 is off
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = strength, env = "HOBBIT_ARG_CACHE_BIAS")]
    pub cache_bias: f32,
    /// Accept a --cache-bias above 0.3, where text stays fluent and becomes wrong
    #[arg(long, env = "HOBBIT_ARG_CACHE_BIAS_ANY")]
    pub cache_bias_any: Switch,
    /// Always use a token's best N experts, in memory or not
    #[arg(long, value_name = "N", default_value_t = RoutingOptions::KEEP_TOP, env = "HOBBIT_ARG_KEEP_TOP",
          value_parser = clap::value_parser!(u32).range(..=1024))]
    pub keep_top: u32,
    /// A missing expert whose score is less than N above the best that was not chosen gives way to one in memory whose
    /// score is less than N below it, both as shares of that score (SMoE's alpha; the paper has 0.25 to 0.35, auto
    /// takes 0.3, and nothing in layers whose routers are flat)
    #[arg(long, value_name = "N|auto|off", default_value = "off", value_parser = alpha, env = "HOBBIT_ARG_SUBSTITUTE")]
    pub substitute: Alpha,
    /// At most N experts of a token are substituted (default: any number)
    #[arg(long, value_name = "N", env = "HOBBIT_ARG_SUBSTITUTE_MAX")]
    pub substitute_max: Option<u32>,
    /// In decoding, leave out a missing expert that has less than N times the uniform share of the token's weight; 0 is
    /// off
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = strength, env = "HOBBIT_ARG_DROP")]
    pub drop: f32,
    /// In decoding, use experts in memory only, and load others in the background (SwapMoE): auto, or a plan of
    /// gguf-tools plan
    #[arg(long, value_name = "off|auto|PLAN.json", default_value = "off", value_parser = virtual_experts,
          env = "HOBBIT_ARG_VIRTUAL_EXPERTS")]
    pub virtual_experts: VirtualExperts,
    /// One of a layer's experts may change in N tokens; auto: as often as does not slow tokens by more than 2 %
    #[arg(long, value_name = "auto|N", default_value = "auto", env = "HOBBIT_ARG_VIRTUAL_UPDATE")]
    pub virtual_update: VirtualUpdate,
    /// Give up at most N percent of perplexity for the fewest bytes: the cheapest mix of --cache-bias, --substitute,
    /// --drop and low precision whose measured loss, with one standard error, stays below, as 'gguf-tools profile
    /// --max-loss' found it with no more of the experts in memory, and wrote it beside the model (MODEL.profile.json)
    /// or 'gguf-tools pack' into the pack
    #[arg(long, value_name = "N%", value_parser = percent, env = "HOBBIT_ARG_MAX_LOSS")]
    pub max_loss: Option<f64>,
    /// Aim at N milliseconds for a decoded token: --cache-bias is then the least, up to what is
    /// given or 0.3, that suffices, as measured in trials while it runs; or, where --substitute is given and no
    /// --cache-bias, SMoE's alpha up to that. If none does, the largest is used, and the reachable time is printed. Not
    /// with --deterministic
    #[arg(long, value_name = "N", value_parser = milliseconds, env = "HOBBIT_ARG_TARGET_LATENCY")]
    pub target_latency: Option<Duration>,
    /// Apply this to prompts too; its effect on the context stays
    #[arg(long, env = "HOBBIT_ARG_ROUTE_PROMPTS")]
    pub route_prompts: Switch,
}

impl RoutingArgs {
    /// Checks for contradictions, including those with the flags of `precision`.
    pub fn check(&self, precision: &PrecisionArgs) -> Result<(), String> {
        let options = self.options();
        let most = RoutingOptions::CACHE_BIAS_MAX;
        if self.cache_bias > most && !self.cache_bias_any.0 {
            return Err(format!(
                "'--cache-bias {}' is above {most}, beyond which text stays fluent and becomes wrong; give at most \
                 {most}, or --cache-bias-any too",
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
            let flag = format!("--target-latency {}", target.as_secs_f64() * 1e3);
            if precision.deterministic.0 {
                return Err(excludes(&flag, "--deterministic, because it measures time"));
            }
            if options.virtual_experts != VirtualExperts::Off {
                return Err(excludes(&flag, "--virtual-experts, where no token waits"));
            }
        }
        if let Some(max_loss) = self.max_loss {
            let flag = format!("--max-loss {}%", in_percent(max_loss));
            if precision.precision == Some(PrecisionMode::Exact) {
                return Err(excludes(&flag, "--precision exact, which gives up nothing"));
            }
            if !options.is_off() || precision.t1.is_some() || precision.t2.is_some() {
                const CHOSEN: &str = "--cache-bias, --substitute, --drop, --virtual-experts, --target-latency, --t1 \
                                      and --t2, because it chooses these itself";
                return Err(excludes(&flag, CHOSEN));
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
        match self.options().strengths().into_iter().find(|(_, strength)| *strength > 0.0) {
            Some((name, strength)) => format!("--{} {strength}", name.replace('_', "-")),
            None if self.target_latency.is_some() => "--target-latency".to_owned(),
            None => "--virtual-experts".to_owned(),
        }
    }

    /// The routing options of the engine.
    pub fn options(&self) -> RoutingOptions {
        RoutingOptions {
            cache_bias: self.cache_bias,
            keep_top: self.keep_top,
            substitute: self.substitute.value,
            spares_flat: self.substitute.is_auto,
            substitute_max: self.substitute_max,
            drop: self.drop,
            virtual_experts: self.virtual_experts.clone(),
            virtual_update: self.virtual_update,
            target_latency: self.target_latency,
            loss_bound: None,
            prompts: self.route_prompts.0,
        }
    }
}

fn excludes(flag: &str, other: &str) -> String {
    format!("'{flag}' cannot be had with {other}; drop one of them")
}

/// Any other text is the name of a plan.
fn virtual_experts(text: &str) -> Result<VirtualExperts, String> {
    if text.is_empty() {
        return Err("expected off, auto or the name of a plan".to_owned());
    }
    Ok(text.parse().unwrap_or_default())
}

/// SMoE's α.
/// SMoE's alpha, and whether hobbit chose it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alpha {
    value: f32,
    is_auto: bool,
}

fn alpha(text: &str) -> Result<Alpha, String> {
    match text {
        "off" => Ok(Alpha { value: 0.0, is_auto: false }),
        "auto" => Ok(Alpha { value: RoutingOptions::ALPHA, is_auto: true }),
        text => match strength(text) {
            Ok(value) => Ok(Alpha { value, is_auto: false }),
            Err(_) => Err("expected a number from 0, such as 0.3, auto or off".to_owned()),
        },
    }
}

/// `1%` or `1`: a share.
fn percent(text: &str) -> Result<f64, String> {
    let percent = parse_percent(text, 1e4).ok_or_else(|| "expected a percentage from 0%, such as 1%".to_owned())?;
    Ok(percent / 100.0)
}

/// A time above 0, at most an hour.
fn milliseconds(text: &str) -> Result<Duration, String> {
    let ms = number(f64::MIN_POSITIVE..=3.6e6, "milliseconds above 0, such as 50")(text)?;
    Ok(Duration::from_secs_f64(ms / 1e3))
}

/// The options of `--max-loss`, a share. The measurements are those of the profile beside the model, else
/// those in the pack; the mix is chosen when a session opens.
pub fn bounded(options: ModelOptions, model: &Path, max_loss: f64) -> anyhow::Result<ModelOptions> {
    let path = beside(model);
    let flag = format!("--max-loss {}%", in_percent(max_loss));
    let mut bound =
        LossBound { max_loss, measured: Vec::new(), file: path.clone(), model: model.to_owned(), name: spelled };
    // A session with less memory names its own share.
    let make = measure_mixes(model, max_loss, "25%");
    let has_profile = path.exists();
    let gguf = if has_profile || model.exists() { Some(Gguf::open(model)?) } else { None };
    let pack = if gguf.as_ref().is_some_and(Pack::is_pack) { Some(Pack::open(model)?) } else { None };
    if let (Some(gguf), true) = (gguf, has_profile) {
        let profile = Profile::read(&path).with_context(|| flag.clone())?;
        let checked = match &pack {
            Some(pack) => profile.check_model(&pack.plain, &pack.experts),
            None => profile.check_model(&gguf, &gguf.experts()?),
        };
        checked.map_err(|error| anyhow!("{flag}: {error}; {make}"))?;
        bound.measured = profile.mixes;
    }
    if let (Some(mixes), true) = (pack.and_then(|pack| pack.info.mixes), bound.measured.is_empty()) {
        let unusable = |reason| ProfileError::Key { path: model.to_owned(), key: MIXES_KEY, reason };
        bound.measured = mixes_of_json(&mixes).map_err(unusable).with_context(|| flag.clone())?;
        bound.file = model.to_owned();
    }
    if bound.measured.is_empty() && has_profile {
        bail!("{flag}: {} has no mixes; {make}", path.display());
    }
    if bound.measured.is_empty() {
        bail!("{flag}: no measurements of this model: there is no profile {}; {make}", path.display());
    }
    Ok(ModelOptions { loss_bound: Some(bound), ..options })
}
