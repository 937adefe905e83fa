//! Flags of dynamic precision: the source of low-precision experts, and when they are used.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

use super::probability;
use crate::argv::Switch;
use hobbit::options::{KernelChoice, LowShare, LowSource, PrecisionMode, PrecisionOptions};
use hobbit_core::pack::TypeChoice;

#[derive(Args, Debug)]
#[command(next_help_heading = "Dynamic precision (hobbit's own)")]
pub struct PrecisionArgs {
    /// Low-precision experts: a GGUF of the same model in a smaller quant, or types to make one with, once, such as
    /// q2_k or q2_k,down=q3_k; auto makes q4_0 of floats and q2_k of others,
    /// or q2_0 where rows are no whole blocks of that (gpt-oss). A pack brings its own
    #[arg(long, value_name = "FILE.gguf|TYPES|auto", env = "HOBBIT_ARG_LOW",
          value_parser = OsStringValueParser::new().try_map(|text| low_source(text, Path::is_file)))]
    pub low: Option<Low>,
    /// Directory of the file that --low TYPES makes (default: beside the model)
    #[arg(long, value_name = "DIR", env = "HOBBIT_ARG_LOW_DIR")]
    pub low_dir: Option<PathBuf>,
    /// The part of the expert cache that holds low-precision experts: 'auto', or a share such as 25%
    #[arg(long, value_name = "N%|auto", default_value = "auto", env = "HOBBIT_ARG_LOW_SHARE")]
    pub low_share: LowShare,
    /// exact: as llama.cpp, bit by bit. dynamic: a missing expert of little weight comes in low precision or is
    /// skipped (default: dynamic where there are low-precision experts)
    #[arg(long, value_name = "exact|dynamic", env = "HOBBIT_ARG_PRECISION")]
    pub precision: Option<PrecisionMode>,
    /// Kernels that multiply the experts' rows in prompts, where one is faster than llama.cpp's: identical takes those
    /// that give the same bits, fastest also others, whose last bits differ (f16, bf16, iq4_nl)
    #[arg(long, value_name = "identical|fastest", default_value = "identical", env = "HOBBIT_ARG_KERNELS")]
    pub kernels: KernelChoice,
    /// A missing expert comes in high precision if the token's router weights above its own sum to at most N, 0 to 1;
    /// with 1 always (default: the pack's, or 0.6)
    #[arg(long, value_name = "N", value_parser = probability, env = "HOBBIT_ARG_T1")]
    pub t1: Option<f32>,
    /// Otherwise it comes in low precision if they sum to at most N, and beyond that it is skipped; with 1 never
    /// (default: the pack's, or 0.9)
    #[arg(long, value_name = "N", value_parser = probability, env = "HOBBIT_ARG_T2")]
    pub t2: Option<f32>,
    /// Read the N % least-wanted experts of a layer in low precision while reading a prompt (default: 25%; none with
    /// --t1 1). With T1 below 1 a token's top expert stays high. Example: --t1 1 --prefill-low 25% lowers in prompts
    /// only
    #[arg(long, value_name = "N%", value_parser = share, env = "HOBBIT_ARG_PREFILL_LOW")]
    pub prefill_low: Option<f32>,
    /// When an expert is skipped, scale the weights of the others up
    #[arg(long, env = "HOBBIT_ARG_RENORMALISE")]
    pub renormalise: Switch,
    /// Replace often used low-precision experts by high-precision ones while nothing else is read
    #[arg(long, default_value = "on", env = "HOBBIT_ARG_UPGRADE")]
    pub upgrade: Switch,
    /// Make results independent of the speed of reads: same seed, budget and prompt give the same text
    #[arg(long, env = "HOBBIT_ARG_DETERMINISTIC")]
    pub deterministic: Switch,
}

/// The source of low-precision experts, as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Low {
    /// Chosen for the model: [`TypeChoice::below`], or a pack's own.
    Auto,
    /// As given.
    Given(LowSource),
}

impl Low {
    /// The word for [`Low::Auto`].
    pub const AUTO: &str = "auto";
}

impl PrecisionArgs {
    /// Checks for contradictions. `is_typed` tells by id whether a flag was on the command line: values from the
    /// environment are defaults for many runs, and yield silently to a flag that makes them useless.
    pub fn check(&self, is_typed: impl Fn(&str) -> bool) -> Result<(), String> {
        match (self.precision, self.t1, self.t2) {
            (Some(PrecisionMode::Exact), t1, t2) => {
                let given = [("t1", "--t1", t1), ("t2", "--t2", t2)];
                let typed = given.into_iter().find(|(id, ..)| is_typed(id));
                if let Some((_, flag, Some(value))) = typed {
                    return Err(format!(
                        "'{flag} {value}' contradicts '--precision exact', which takes every expert in high precision; \
                         drop one of them"
                    ));
                }
            }
            (_, Some(t1), Some(t2)) if t1 > t2 => {
                return Err(format!(
                    "'--t1 {t1}' is above '--t2 {t2}': missing experts come in high precision up to T1 and in low \
                     precision from there to T2; give --t1 at most --t2"
                ));
            }
            _ => (),
        }
        if self.kernels == KernelChoice::Fastest && is_typed("kernels") && self.options().demands_exactness() {
            let other = if self.deterministic.0 { "--deterministic" } else { "--precision exact" };
            return Err(format!(
                "'--kernels fastest' contradicts '{other}': which kernels are the fastest is found by timing, and \
                 some round otherwise than llama.cpp's; drop one of them"
            ));
        }
        let found = match &self.low {
            Some(Low::Auto | Low::Given(LowSource::Quantise { .. })) => return Ok(()),
            Some(Low::Given(LowSource::File(path))) => format!("--low names the file {}", path.display()),
            None => "there is no --low".to_owned(),
        };
        if !is_typed("low_dir") {
            return Ok(());
        }
        Err(format!(
            "'--low-dir' is where the file of '--low TYPES' goes, but {found}; drop --low-dir or give e.g. --low q2_k"
        ))
    }

    /// The source of this model's low-precision experts.
    pub fn source(&self, model: &Path) -> Result<Option<LowSource>> {
        Ok(match self.low.clone() {
            Some(Low::Auto) if self.precision == Some(PrecisionMode::Exact) => None,
            Some(Low::Auto) => super::preset::low_of(model, self.low_dir.as_deref())?,
            Some(Low::Given(LowSource::Quantise { types, .. })) => {
                Some(LowSource::Quantise { types, directory: self.low_dir.clone() })
            }
            Some(Low::Given(file)) => Some(file),
            None => None,
        })
    }

    /// The precision options of the engine.
    pub fn options(&self) -> PrecisionOptions {
        PrecisionOptions {
            mode: self.precision,
            t1: self.t1,
            t2: self.t2,
            renormalise: self.renormalise.0,
            prefill_low: self.prefill_low,
            upgrade: self.upgrade.0,
            deterministic: self.deterministic.0,
        }
    }
}

/// A file if there is one or the name ends like one, otherwise types, in lower case.
fn low_source(text: OsString, is_file: impl Fn(&Path) -> bool) -> Result<Low, String> {
    let path = Path::new(&text);
    if is_file(path) || path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
        return Ok(Low::Given(LowSource::File(text.into())));
    }
    let types = text.to_string_lossy().to_ascii_lowercase();
    if types == Low::AUTO {
        return Ok(Low::Auto);
    }
    match types.parse::<TypeChoice>() {
        Ok(_) => Ok(Low::Given(LowSource::Quantise { types, directory: None })),
        Err(why) => {
            Err(format!("there is no such file, and these are no types such as q2_k or q2_k,down=q3_k either: {why}"))
        }
    }
}

/// `25%` or `25`, as a share.
fn share(text: &str) -> Result<f32, String> {
    super::percent(text).map(|percent| percent as f32 / 100.0)
}
