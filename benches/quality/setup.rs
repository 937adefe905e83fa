//! Everything that can be wrong is looked at here, before anything is measured.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::args::Args;
use super::arm::{self, Arm};
use super::text::{Extent, Text};
use super::variant::Subject;

/// Bundled models, as far as they are there.
const BUNDLED: [&str; 2] = ["demo", "fine"];

/// A model with what is compared on which texts.
pub struct Study {
    pub subject: Subject,
    pub arms: Vec<Arm>,
    pub texts: Vec<Text>,
    /// The first text's file: what is profiled.
    pub first_text: PathBuf,
}

/// Looks at everything that was given.
///
/// # Errors
/// The first thing that cannot be measured, by its name.
pub fn studies(args: &Args) -> Result<Vec<Study>> {
    if let Some(wrong) = args.cache.iter().find(|percent| !(0.0..=100.0).contains(*percent)) {
        anyhow::bail!("--cache {wrong}: expected percent, 0 to 100");
    }
    let arms = arms(args)?;
    let models = if args.models.is_empty() { bundled()? } else { args.models.clone() };
    let studies: Vec<Study> = models.iter().map(|path| study(args, path, &arms)).collect::<Result<_>>()?;
    for (i, study) in studies.iter().enumerate() {
        let is_twice = studies[..i].iter().any(|other| other.subject.name == study.subject.name);
        ensure!(
            !is_twice,
            "two models are named '{}', their results would be one; give one at a time",
            study.subject.name
        );
    }
    Ok(studies)
}

fn arms(args: &Args) -> Result<Vec<Arm>> {
    let mut arms = match &args.arms {
        Some(path) => arm::read_file(path)?,
        None if args.more_arms.is_empty() => arm::read_all(arm::BUILT_IN, "arms/default.txt")?,
        None => Vec::new(),
    };
    for typed in &args.more_arms {
        arms.push(Arm::new(typed).context("--arm")?);
    }
    Ok(arms)
}

fn bundled() -> Result<Vec<PathBuf>> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let found: Vec<PathBuf> =
        BUNDLED.iter().map(|name| models.join(format!("{name}.gguf"))).filter(|path| path.exists()).collect();
    ensure!(!found.is_empty(), "{}: found no bundled model; give --model FILE", models.display());
    Ok(found)
}

fn study(args: &Args, path: &Path, arms: &[Arm]) -> Result<Study> {
    let subject = Subject::new(path)?;
    let arms = arm::with_controls(arms, subject.own, subject.ne0)?;
    let prefix = format!("{}-heldout-", subject.name);
    let files = if args.texts.is_empty() { held_out(path, &prefix)? } else { args.texts.clone() };
    let model = subject.open()?;
    let extent = Extent { windows: args.windows, questions: args.questions };
    let text = |file: &PathBuf| {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        Text::new(file, stem.trim_start_matches(&prefix).to_owned(), &model, extent)
    };
    let texts: Vec<Text> = files.iter().map(text).collect::<Result<_>>()?;
    for (i, text) in texts.iter().enumerate() {
        let is_twice = texts[..i].iter().any(|other| other.name == text.name);
        ensure!(!is_twice, "--text: two texts are named '{}'; rename one", text.name);
    }
    Ok(Study { subject, arms, texts, first_text: files[0].clone() })
}

/// The texts beside a model that are named after it.
fn held_out(model: &Path, prefix: &str) -> Result<Vec<PathBuf>> {
    let dir = model.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = std::fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_text = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(prefix) && name.ends_with(".txt")
    };
    let mut files: Vec<PathBuf> = paths.filter(is_text).collect();
    files.sort();
    ensure!(!files.is_empty(), "{}: found no {prefix}*.txt beside it; give --text FILE", model.display());
    Ok(files)
}
