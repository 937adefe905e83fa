//! Models of the Hub: `pull`, `list` and `rm` work on the cache of `-hf`.

use std::io::{self, Write as _};
use std::time::SystemTime;

use anyhow::{Context, Error, Result, bail};
use hobbit_common::download;
use hobbit_common::exit::in_words;
use hobbit_common::hub::kept::{self, Kept};
use hobbit_common::hub::{Given, Places, Source, TokenArgs};
use hobbit_common::output::tell;
use hobbit_core::units::Bytes;
use indicatif::HumanDuration;
use serde_json::{Value, json};

use crate::inspect;
use crate::shared::JsonArgs;

/// Bytes of a file that have its header, with a large vocabulary.
const HEADER_BYTES: u64 = 24 << 20;

/// Arguments of `pull`.
#[derive(Debug, clap::Args)]
pub struct PullArgs {
    /// Repository, as for -hf; without QUANT it is Q4_K_M, else Q8_0, else the first
    #[arg(value_name = "USER/REPO[:QUANT]")]
    model: String,
    #[command(flatten)]
    token: TokenArgs,
}

/// Arguments of `list`.
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    #[command(flatten)]
    json: JsonArgs,
}

/// Arguments of `rm`.
#[derive(Debug, clap::Args)]
pub struct RmArgs {
    /// Model, as `list` names it
    #[arg(value_name = "USER/REPO:QUANT")]
    model: String,
}

/// Forecasts, downloads, and prints the file.
///
/// # Errors
/// The model cannot be fetched. Without a forecast it is fetched all the same.
pub fn pull(args: &PullArgs) -> Result<()> {
    let places = download::places(Given { token: args.token.hf_token.clone(), offline: false })?;
    let source = Source::repo(&args.model, None).map_err(Error::msg)?;
    if let Err(error) = forecast(&source, &places) {
        tell(format_args!("no forecast: {}", in_words(&error)));
    }
    let file = download::run(&source, &places, true)?;
    writeln!(io::stdout(), "{}", file.display())?;
    Ok(())
}

/// Prints the forecast of a model that is here, or by the beginning of its file.
fn forecast(source: &Source, places: &Places) -> Result<()> {
    let offline = Places { offline: true, ..places.clone() };
    if let Ok(file) = download::run(source, &offline, false) {
        return inspect::predict(file);
    }
    let mut file = tempfile::Builder::new().prefix("beginning-").suffix(".gguf").tempfile()?;
    file.write_all(&download::beginning(source, places, HEADER_BYTES)?)?;
    inspect::predict(file.path().to_owned())
}

/// Prints the models in the cache.
///
/// # Errors
/// There is no place for a cache, or standard output is closed.
pub fn list(args: &ListArgs) -> Result<()> {
    let found = kept::list(&download::places(Given::default())?);
    let mut out = io::stdout();
    if args.json.json {
        let seconds = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let of = |kept: &Kept| {
            let Kept { name, files, bytes, used } = kept;
            json!({"name": name, "files": files, "bytes": bytes, "used": seconds(*used)})
        };
        let all: Vec<Value> = found.iter().map(of).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
        return Ok(());
    }
    let width = found.iter().map(|kept| kept.name.len()).max().unwrap_or(0);
    for model in &found {
        let ago = HumanDuration(model.used.elapsed().unwrap_or_default());
        writeln!(out, "{:width$}  {:>10}  read {ago} ago", model.name, Bytes(model.bytes).to_string())?;
    }
    if found.is_empty() {
        tell("no downloaded models; gguf-tools pull USER/REPO downloads one");
    }
    Ok(())
}

/// Removes a model from the cache.
///
/// # Errors
/// There is no such model, or its files cannot be removed.
pub fn rm(args: &RmArgs) -> Result<()> {
    let places = download::places(Given::default())?;
    let found = kept::list(&places);
    let Some(model) = found.iter().find(|model| model.name == args.model) else {
        let names: Vec<&str> = found.iter().map(|kept| kept.name.as_str()).collect();
        let others = if names.is_empty() {
            "nothing is downloaded".to_owned()
        } else {
            format!("there are: {}", names.join(", "))
        };
        bail!("'{}' is not in {}; {others}", args.model, places.hub.display());
    };
    let kept = kept::remove(model, &places).with_context(|| format!("removing '{}'", model.name))?;
    writeln!(io::stdout(), "removed {} ({})", model.name, Bytes(model.bytes - kept.min(model.bytes)))?;
    if kept > 0 {
        tell(format_args!("{} stay on the disk: another snapshot in the cache uses the same files", Bytes(kept)));
    }
    Ok(())
}
