//! Flags of images and sound.

use std::path::PathBuf;

use clap::Args;
use hobbit::options::{ProjectorOptions, SessionOptions};

#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Images and sound")]
pub struct MediaArgs {
    /// Projector of the model: the encoder of images or sound. It runs on the CPU, and its memory counts in --mem-budget
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
