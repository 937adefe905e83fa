//! Flags of the model: its location, and additions such as adapters and the projector of images and sound.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::argv::{PAIR, REPACK, Switch, repack};
use crate::hub::{Given, Source, TokenArgs};
use hobbit::options::{AdapterOptions, KvOverride, ProjectorOptions, Repack, ScaledFile, SessionOptions};

#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model to run; of a split model, any part. Without it the bundled demo model runs
    #[arg(short, long, value_name = "FNAME", group = "named_model", env = "LLAMA_ARG_MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Look for invalid values in the weights while loading
    #[arg(long)]
    pub check_tensors: Switch,
    /// Rearrange weights for the CPU: all where the whole model fits and llama.cpp runs it by itself, and where half of
    /// the experts have slots and are of MXFP4, Q4_0 or IQ4_NL (auto); always all (on); all but experts, which decodes
    /// Q4_K faster without AVX-512 (ordinary); or never (off). It changes the last bits of some types' results
    #[arg(long, value_name = REPACK, value_parser = repack, default_value = "auto", env = "LLAMA_ARG_REPACK")]
    pub repack: Repack,
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
    #[arg(long, value_name = "USER/REPO[:QUANT]", group = "named_model", env = "LLAMA_ARG_HF_REPO")]
    pub hf_repo: Option<String>,
    /// File of that repository, instead of a quant; of a split model, any part
    #[arg(long, value_name = "FILE", env = "LLAMA_ARG_HF_FILE")]
    pub hf_file: Option<String>,
    #[command(flatten)]
    pub token: TokenArgs,
    /// Model at this URL, fetched if it is not here yet
    #[arg(long, value_name = "URL", group = "named_model", env = "LLAMA_ARG_MODEL_URL")]
    pub model_url: Option<String>,
    /// Contact no server: use only files that were fetched earlier
    #[arg(long, env = "LLAMA_ARG_OFFLINE")]
    pub offline: Switch,
}

impl SourceArgs {
    /// The model to fetch, if any.
    pub fn source(&self) -> Result<Option<Source>, String> {
        match (&self.hf_repo, &self.hf_file) {
            (Some(repo), file) => {
                Source::repo(repo, file.as_deref()).map(Some).map_err(|error| format!("-hf: {error}"))
            }
            (None, Some(_)) => Err("-hff: the repository of this file is missing: give -hf USER/REPO".to_owned()),
            (None, None) => Ok(self.model_url.clone().map(Source::Url)),
        }
    }

    /// The places that these flags give.
    pub fn given(&self) -> Given {
        Given { token: self.token.hf_token.clone(), offline: self.offline.0 }
    }
}

/// Removes the variables that do not count: empty ones, and those of another model than the one that `words`, in
/// clap's spelling, name.
pub fn without_idle_variables(command: Command, words: &[OsString]) -> Command {
    let is_typed = |flag: &[u8]| words.iter().any(|word| word.as_encoded_bytes().starts_with(flag));
    let overridden: &[&str] = match is_typed(b"--hf-repo=") {
        true => &["model", "model_url", "models_dir"],
        false if [&b"--model="[..], b"--model-url=", b"--models-dir="].into_iter().any(is_typed) => {
            &["model", "hf_repo", "hf_file", "model_url", "models_dir"]
        }
        false => &[],
    };
    command.mut_args(|arg| {
        let is_empty = arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
        if is_empty || overridden.contains(&arg.get_id().as_str()) { arg.env(None::<&str>) } else { arg }
    })
}

/// Checks the source of the model, if the command has such flags.
pub fn check(matches: &ArgMatches) -> Result<(), String> {
    SourceArgs::from_arg_matches(matches).map_or(Ok(()), |args| args.source().map(drop))
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

#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Images and sound")]
pub struct MediaArgs {
    /// Projector of the model: the encoder of images or sound. It runs on the CPU; its memory counts in --mem-budget
    #[arg(long, value_name = "FILE", env = "LLAMA_ARG_MMPROJ")]
    pub mmproj: Option<PathBuf>,
    /// Minimum tokens of an image, for encoders of any resolution (default: the projector's)
    #[arg(long, value_name = "N", requires = "mmproj", env = "LLAMA_ARG_IMAGE_MIN_TOKENS")]
    pub image_min_tokens: Option<u16>,
    /// Maximum tokens of an image, likewise
    #[arg(long, value_name = "N", requires = "mmproj", env = "LLAMA_ARG_IMAGE_MAX_TOKENS")]
    pub image_max_tokens: Option<u16>,
}

impl MediaArgs {
    /// The projector in the engine's form, for a session with these options.
    pub fn options(&self, session: &SessionOptions) -> Option<ProjectorOptions> {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get() as i32);
        let threads = session.threads_batch.or(session.threads).filter(|n| *n > 0);
        Some(ProjectorOptions {
            path: self.mmproj.clone()?,
            image_min_tokens: self.image_min_tokens.unwrap_or(0).into(),
            image_max_tokens: self.image_max_tokens.unwrap_or(0).into(),
            threads: threads.unwrap_or_else(cores),
        })
    }
}

#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Images and sound")]
pub struct AttachedArgs {
    /// Images of the prompt or first message (PNG, JPEG, GIF, BMP), in order of its places <__media__>; those without a
    /// place come first
    #[arg(long, value_name = "FILE,...", value_delimiter = ',', requires = "mmproj")]
    pub image: Vec<PathBuf>,
    /// Sounds (WAV, MP3, FLAC), likewise, after the images
    #[arg(long, value_name = "FILE,...", value_delimiter = ',', requires = "mmproj")]
    pub audio: Vec<PathBuf>,
}
