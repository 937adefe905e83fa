//! From flags to a measurement: reads files, finds the model and the text.

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::args::{LowArgs, MeasureArgs, TextArgs};
use crate::resolve::{
    Surroundings, Verbosity, check_outputs, experts, given_files, read, text, utf8, verbosity, without_newline,
};
use crate::{demo, resolve};
use hobbit::options::{ModelOptions, SessionOptions};
use hobbit_core::files::{Kind, OutputError};

/// The kind of measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Perplexity over disjoint chunks; their log-probabilities are kept in a base file.
    Perplexity(Option<PathBuf>),
    /// Perplexity over windows with this stride.
    Strided(usize),
    /// Divergence from a base file.
    Divergence(PathBuf),
}

/// A text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// The text's source.
    pub name: PathBuf,
    pub bytes: Vec<u8>,
}

impl Text {
    pub fn as_str(&self) -> Result<&str> {
        utf8(&self.bytes, &self.name)
    }
}

/// Settings of a run, complete and checked.
#[derive(Debug)]
pub struct HiArgs {
    pub model: PathBuf,
    /// Whether it is the bundled one.
    pub is_demo: bool,
    pub model_options: ModelOptions,
    /// `n_ctx` is the length of a chunk.
    pub session_options: SessionOptions,
    pub measure: Measure,
    /// `None` only for a comparison.
    pub text: Option<Text>,
    /// `None` for all.
    pub n_chunk_max: Option<usize>,
    /// A line for each chunk.
    pub in_lines: bool,
    pub verbosity: Verbosity,
    pub log_file: Option<PathBuf>,
    pub perf: bool,
    pub json: Option<PathBuf>,
    /// Files read for these settings, with their flags.
    pub read: Vec<(&'static str, PathBuf)>,
}

impl HiArgs {
    /// Checks that no output overwrites an input or a file of another kind.
    pub fn check_outputs(&self) -> Result<(), OutputError> {
        const BASE: &str = "--kl-divergence-base";
        let mut read = self.read.clone();
        let base = match &self.measure {
            Measure::Perplexity(base) => base.clone(),
            Measure::Divergence(base) => {
                read.push((BASE, base.clone()));
                None
            }
            Measure::Strided(_) => None,
        };
        let written =
            [("--log-file", &self.log_file, Kind::Log), ("--json", &self.json, Kind::Json), (BASE, &base, Kind::Base)];
        check_outputs(&self.model_options, &self.model, &written, &read)
    }

    /// # Errors
    /// No text, files that cannot be read, a comparison without a base.
    pub fn new(low: LowArgs, around: &dyn Surroundings) -> Result<Self> {
        let (model, is_demo) = resolve::model(&low.model, around)?;
        let measure = measure(&low.measure)?;
        let mut inputs = given_files([("-f", &low.text.file), ("-bf", &low.text.binary_file)]);
        let mut given = given_text(&low.text, around)?;
        if given.is_none() && !matches!(measure, Measure::Divergence(_)) {
            if !is_demo {
                bail!("no text: give a file with -f (or -bf), or a text with -p");
            }
            let name = model.with_file_name(demo::TEXT);
            inputs.push(("-f", name.clone()));
            given = Some(Text { bytes: without_newline(read(&name, around)?), name });
        }
        let session = resolve::session(&low.context, &low.rope, true);
        let experts = experts(low.experts, &model, session.clone())?;
        Ok(Self {
            model,
            is_demo,
            model_options: ModelOptions {
                // Measure hobbit's expert handling, even if the model fits.
                passthrough: false,
                ..resolve::of_model(&low.model, experts)
            },
            // Whole batches are scored.
            session_options: SessionOptions { n_outputs_max: 0, ..session },
            measure,
            text: given,
            n_chunk_max: usize::try_from(low.measure.chunks).ok(),
            in_lines: low.measure.ppl_output_type == 1,
            verbosity: verbosity(&low.output.closing, &low.output.log),
            log_file: low.output.log.log_file,
            perf: low.output.closing.perf.0,
            json: low.output.json,
            read: inputs,
        })
    }
}

fn measure(args: &MeasureArgs) -> Result<Measure> {
    if args.chunks == 0 {
        bail!("--chunks 0 leaves nothing to evaluate; give at least 1, or -1 for all");
    }
    Ok(if args.kl_divergence.0 {
        match args.kl_divergence_base.clone() {
            Some(base) => Measure::Divergence(base),
            None => bail!(
                "you must provide a name of a file containing the log probabilities of the base model: \
                 --kl-divergence-base FNAME"
            ),
        }
    } else if args.ppl_stride > 0 {
        if args.kl_divergence_base.is_some() {
            bail!("--kl-divergence-base keeps disjoint chunks; leave --ppl-stride out");
        }
        Measure::Strided(args.ppl_stride as usize)
    } else {
        Measure::Perplexity(args.kl_divergence_base.clone())
    })
}

fn given_text(args: &TextArgs, around: &dyn Surroundings) -> Result<Option<Text>> {
    let escape = args.escape.0;
    let escaped = |bytes: Vec<u8>, name: PathBuf, flag: &str| {
        let bytes = match escape {
            true => text(utf8(&bytes, &name)?, true, flag)?.into_bytes(),
            false => bytes,
        };
        Ok(Some(Text { name, bytes }))
    };
    match (&args.prompt, &args.file, &args.binary_file) {
        (Some(typed), ..) => escaped(typed.clone().into_bytes(), "-p".into(), "-p"),
        (_, Some(path), _) => escaped(without_newline(read(path, around)?), path.clone(), "-f"),
        (.., Some(path)) => Ok(Some(Text { bytes: read(path, around)?, name: path.clone() })),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::parse;
    use super::*;
    use hobbit::options::DeviceChoice;
    use hobbit_core::cache::Allocation;
    use hobbit_core::plan::ExpertCache;
    use std::ffi::OsString;
    use std::io;
    use std::path::Path;

    struct Fake;

    impl Surroundings for Fake {
        fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
            match path.to_str() {
                Some("text") => Ok(b"a\\n\n\n".to_vec()),
                Some("models/demo-heldout-prose.txt") => Ok(b"prose\n".to_vec()),
                _ => Err(io::ErrorKind::NotFound.into()),
            }
        }
        fn demo_model(&self) -> Result<PathBuf, String> {
            Ok("models/demo.gguf".into())
        }
        fn grammar_of_schema(&self, _: &str) -> Result<String> {
            bail!("no grammars here")
        }
        fn shows_colour(&self) -> bool {
            false
        }
    }

    fn resolved(words: &[&str]) -> Result<HiArgs> {
        HiArgs::new(parse(words.iter().map(OsString::from)).unwrap().0, &Fake)
    }

    fn bytes(words: &[&str]) -> Vec<u8> {
        resolved(words).unwrap().text.unwrap().bytes
    }

    #[test]
    fn texts() {
        assert_eq!(bytes(&[]), b"prose");
        assert_eq!(bytes(&["-f", "text"]), b"a\\n\n");
        assert_eq!(bytes(&["-bf", "text"]), b"a\\n\n\n");
        assert_eq!(bytes(&["-f", "text", "-e"]), b"a\n\n");
        assert_eq!(bytes(&["-p", "x"]), b"x");
    }

    #[test]
    fn what_is_missing_is_told() {
        for (words, part) in [
            (&["-m", "a.gguf"][..], "no text: give a file with -f"),
            (&["-f", "none"], "none: cannot read this file"),
            (&["--kl-divergence"], "--kl-divergence-base FNAME"),
            (&["--chunks", "0"], "--chunks 0"),
            (&["--ppl-stride", "8", "--save-all-logits", "x"], "leave --ppl-stride out"),
        ] {
            let error = resolved(words).unwrap_err().to_string();
            assert!(error.contains(part), "{words:?}: {error}");
        }
    }

    #[test]
    fn devices_and_caching() {
        let options =
            resolved(&["-dev", "none", "-ts", "3,1", "-ngl", "7", "--device-cache", "0"]).unwrap().model_options;
        assert_eq!((options.n_gpu_layers, &options.device.devices), (7, &DeviceChoice::None));
        assert_eq!((options.device.tensor_split, options.device.cache), (vec![3.0, 1.0], ExpertCache::Bytes(0)));
        let options = resolved(&["--profile", "a.json", "--slots", "by-penalty"]).unwrap().model_options;
        assert_eq!((options.profile, options.caching.slots), (Some("a.json".into()), Allocation::ByPenalty));
    }

    #[test]
    fn measures() {
        let measure = |words: &[&str]| resolved(&[words, &["-f", "text"]].concat()).unwrap().measure;
        assert_eq!(measure(&[]), Measure::Perplexity(None));
        assert_eq!(measure(&["--save-all-logits", "x"]), Measure::Perplexity(Some("x".into())));
        assert_eq!(measure(&["--ppl-stride", "8"]), Measure::Strided(8));
        let compared = resolved(&["--kl-divergence", "--kl-divergence-base", "b"]).unwrap();
        assert_eq!((compared.measure, compared.text), (Measure::Divergence("b".into()), None));
    }
}
