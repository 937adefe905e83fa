//! What is measured: two synthetic shapes with their limits and targets, or a model file of the user's.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use gguf_tools::synth::{Spec, write};
use hobbit::gguf::Gguf;
use serde::Serialize;

const GIB: f64 = (1u64 << 30) as f64;

/// What hobbit is meant to reach.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Targets {
    /// Decode speed, times llama.cpp's.
    pub decode_ratio: f64,
    /// Prompt speed, times llama.cpp's.
    pub prompt_ratio: f64,
    /// Decode speed, of what the disk allows.
    pub roofline_share: f64,
    /// Decode time beyond llama.cpp's when everything is resident, of llama.cpp's.
    pub resident_overhead: f64,
}

/// A model to be, and what is expected of it.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Names the result.
    pub name: String,
    /// Memory of each process, in bytes.
    pub limit: Option<u64>,
    /// None for a model of which nothing is promised.
    pub targets: Option<Targets>,
    file: Option<PathBuf>,
}

/// A model that exists.
pub struct ModelFile {
    path: PathBuf,
    is_generated: bool,
}

impl Subject {
    /// One of [`gguf_tools::synth::PRESETS`]; `file` holds it already.
    pub fn preset(name: &str, file: Option<PathBuf>) -> Self {
        let (limit_gib, decode_ratio) = if name == "mixtral-bench" { (2.5, 5.0) } else { (1.8, 12.0) };
        let targets = Targets { decode_ratio, prompt_ratio: 1.0, roofline_share: 0.8, resident_overhead: 0.03 };
        Self { name: name.to_owned(), limit: Some((limit_gib * GIB) as u64), targets: Some(targets), file }
    }

    /// A model file of the user's.
    pub fn file(path: &Path) -> Result<Self> {
        let stem = path.file_stem().context("--model: expected a file")?;
        let name = super::host::sanitised(&stem.to_string_lossy());
        Ok(Self { name, limit: None, targets: None, file: Some(path.to_owned()) })
    }

    /// The model, generated into `dir` unless it is there.
    pub fn model(&self, dir: &Path) -> Result<ModelFile> {
        if let Some(path) = &self.file {
            return Ok(ModelFile { path: path.clone(), is_generated: false });
        }
        let path = dir.join(format!("{}.gguf", self.name));
        let spec = Spec::preset(&self.name)?;
        if path.exists() {
            let found = Gguf::open(&path)?;
            let is_ours = found.architecture() == spec.arch && found.experts()?.layers.len() == spec.layers as usize;
            anyhow::ensure!(is_ours, "{} is another model: delete it, or give another --dir", path.display());
            return Ok(ModelFile { path, is_generated: false });
        }
        std::fs::create_dir_all(dir).with_context(|| format!("--dir {}", dir.display()))?;
        eprintln!("{}: generating the model", self.name);
        write(&path, &spec)?; // checks the room on the disk first
        Ok(ModelFile { path, is_generated: true })
    }
}

impl ModelFile {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes what [`Subject::model`] has made, and nothing that was there before.
    pub fn delete_if_generated(&self) -> Result<()> {
        if self.is_generated {
            std::fs::remove_file(&self.path).with_context(|| self.path.display().to_string())?;
        }
        Ok(())
    }
}
