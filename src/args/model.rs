//! Flags of the model: its location, and additions such as adapters.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, FromArgMatches};

use crate::argv::{PAIR, Switch, Tri};
use crate::hub::{Given, Source, Token};
use hobbit::options::{AdapterOptions, KvOverride, ScaledFile};

#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model to run; of a split model, any part. Without it the bundled demo model runs
    #[arg(short, long, value_name = "FNAME", env = "LLAMA_ARG_MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Look for invalid values in the weights while loading
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub check_tensors: Switch,
    /// Rearrange weights for the CPU: where the whole model fits and llama.cpp runs it by itself, and where half of the
    /// experts have slots and are of MXFP4, Q4_0 or IQ4_NL (auto), always (on), or never; it changes the last bits of
    /// some types' results
    #[arg(long, value_name = Tri::NAME, default_value = "auto", env = "LLAMA_ARG_REPACK")]
    pub repack: Tri,
    /// Replace metadata of the file, e.g. llama.expert_used_count=int:2; comma-separated or repeated
    #[arg(long, value_name = "KEY=TYPE:VALUE", value_delimiter = ',')]
    pub override_kv: Vec<KvOverride>,
    #[command(flatten)]
    pub adapters: AdapterArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct SourceArgs {
    /// Model of a repository on the Hub, fetched if it is not here yet. Without QUANT it is Q4_K_M, else Q8_0, else the
    /// first
    #[arg(long, value_name = "USER/REPO[:QUANT]", env = "LLAMA_ARG_HF_REPO")]
    pub hf_repo: Option<String>,
    /// File of that repository, instead of a quant; of a split model, any part
    #[arg(long, value_name = "FILE", env = "LLAMA_ARG_HF_FILE")]
    pub hf_file: Option<String>,
    /// Token for private and gated repositories (default: the one that `hf auth login` keeps)
    #[arg(long, value_name = "TOKEN", env = "HF_TOKEN", value_parser = Token::typed)]
    pub hf_token: Option<Token>,
    /// Model at this URL, fetched if it is not here yet
    #[arg(long, value_name = "URL", env = "LLAMA_ARG_MODEL_URL")]
    pub model_url: Option<String>,
    /// Contact no server: use only files that were fetched earlier
    #[arg(long, value_name = Switch::NAME, default_value = "off", env = "LLAMA_ARG_OFFLINE")]
    pub offline: Switch,
}

/// Flags that name a model: their ids, and how they are typed.
const NAMES: [(&str, &str); 3] = [("model", "-m"), ("hf_repo", "-hf"), ("model_url", "-mu")];

impl SourceArgs {
    /// The model to fetch, if any.
    pub fn source(&self) -> Result<Option<Source>, String> {
        // An empty variable counts as unset.
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let (repo, file, url) = (given(&self.hf_repo), given(&self.hf_file), given(&self.model_url));
        match (repo, url) {
            (Some(repo), _) => Source::repo(&repo, file.as_deref()).map(Some).map_err(|error| format!("-hf: {error}")),
            (None, _) if file.is_some() => {
                Err("-hff: the repository of this file is missing: give -hf USER/REPO".to_owned())
            }
            (None, url) => Ok(url.map(Source::Url)),
        }
    }

    /// The places that these flags give.
    pub fn given(&self) -> Given {
        Given { token: self.hf_token.clone(), offline: self.offline.0 }
    }
}

/// Whether any flag or variable names a model.
pub fn is_named(matches: &ArgMatches) -> bool {
    sources(matches).iter().any(Option::is_some)
}

fn sources(matches: &ArgMatches) -> [Option<ValueSource>; 3] {
    let is_known = |id: &str| matches.try_contains_id(id).is_ok();
    let is_empty = |id: &str| matches!(matches.try_get_one::<String>(id), Ok(Some(text)) if text.is_empty());
    NAMES.map(|(id, _)| if is_known(id) && !is_empty(id) { matches.value_source(id) } else { None })
}

/// Checks that at most one model is named: a typed flag overrides the environment.
pub fn settle(matches: &mut ArgMatches) -> Result<(), String> {
    keep_one(matches)?;
    match SourceArgs::from_arg_matches(matches) {
        Ok(args) => args.source().map(drop),
        Err(_) => Ok(()), // a command that has no such flags
    }
}

fn keep_one(matches: &mut ArgMatches) -> Result<(), String> {
    let found = sources(matches);
    for source in [ValueSource::CommandLine, ValueSource::EnvVariable] {
        let named: Vec<usize> = (0..NAMES.len()).filter(|&i| found[i] == Some(source)).collect();
        let &[one, ref others @ ..] = &named[..] else { continue };
        if let Some(&other) = others.first() {
            let how = if source == ValueSource::EnvVariable { " (by the environment)" } else { "" };
            return Err(format!("{} and {} both name a model{how}; give one of them", NAMES[one].1, NAMES[other].1));
        }
        for (i, (id, _)) in NAMES.iter().enumerate().filter(|(i, _)| *i != one && found[*i].is_some()) {
            let _ = if i == 0 {
                matches.remove_one::<PathBuf>(id).is_some()
            } else {
                matches.remove_one::<String>(id).is_some()
            };
        }
        // A file belongs to a repository: ignore the file of another model's repository.
        let is_repo = NAMES[one].0 == "hf_repo";
        let is_typed = |id: &str| {
            matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine)
        };
        if !is_repo && !is_typed("hf_file") && matches.try_contains_id("hf_file").is_ok() {
            let _ = matches.remove_one::<String>("hf_file");
        }
        return Ok(());
    }
    Ok(())
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct AdapterArgs {
    /// LoRA adapter, applied to ordinary weights; comma-separated or repeated. One of experts needs memory for the
    /// whole model
    #[arg(long, value_name = "FNAME", value_delimiter = ',')]
    pub lora: Vec<PathBuf>,
    /// LoRA adapter and its scale; these count after those of --lora
    #[arg(long, value_name = "FNAME:SCALE", value_delimiter = ',')]
    pub lora_scaled: Vec<ScaledFile>,
    /// Control vector, added to the output of layers; comma-separated or repeated
    #[arg(long, value_name = "FNAME", value_delimiter = ',')]
    pub control_vector: Vec<PathBuf>,
    /// Control vector and its scale
    #[arg(long, value_name = "FNAME:SCALE", value_delimiter = ',')]
    pub control_vector_scaled: Vec<ScaledFile>,
    /// First and last layer that control vectors change (default: all)
    #[arg(long, value_name = PAIR, value_parser = layers)]
    pub control_vector_layer_range: Option<(u32, u32)>,
}

impl AdapterArgs {
    /// The adapters in the engine's form.
    pub fn options(&self) -> AdapterOptions {
        let all = |whole: &[PathBuf], scaled: &[ScaledFile]| {
            whole.iter().map(ScaledFile::whole).chain(scaled.iter().cloned()).collect()
        };
        AdapterOptions {
            lora: all(&self.lora, &self.lora_scaled),
            control_vectors: all(&self.control_vector, &self.control_vector_scaled),
            control_layers: self.control_vector_layer_range,
        }
    }
}

/// `START,END`; values not above 0 mean the first or the last layer, as in llama.cpp.
fn layers(text: &str) -> Result<(u32, u32), String> {
    let (start, end) = text.split_once(',').ok_or("expected two numbers")?;
    let layer = |text: &str, all: u32| match text.trim().parse::<i32>() {
        Ok(n) => Ok(u32::try_from(n).ok().filter(|n| *n > 0).unwrap_or(all)),
        Err(_) => Err(format!("'{text}' is no number of a layer")),
    };
    let (first, last) = (layer(start, 1)?, layer(end, i32::MAX as u32)?);
    if first > last { Err(format!("layer {first} is behind layer {last}")) } else { Ok((first, last)) }
}
