//! What is measured: two synthetic shapes with their limits and targets, or a model file of the user's.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use gguf_tools::synth::{Spec, write};
use hobbit::gguf::{GgmlType, Gguf};
use hobbit::pack::{self, Pack, PackKind, PackSpec};
use hobbit::{Ggml, check_low};
use serde::Serialize;

use crate::shared::requantise::requantise_experts;
use hobbit_programs::measure::host::sanitised;

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
    /// Decode speed in dynamic precision, times exact hobbit's.
    pub dynamic_ratio: f64,
    /// Decode speed in dynamic precision, times llama.cpp's.
    pub dynamic_stock_ratio: Option<f64>,
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
    /// The shapes of which something is promised.
    pub const PROMISED: [&str; 2] = ["qwen3moe-bench", "mixtral-bench"];

    /// One of [`gguf_tools::synth::PRESETS`]; `file` holds it already.
    pub fn preset(name: &str, file: Option<PathBuf>) -> Self {
        let (limit_gib, decode_ratio, dynamic_ratio, dynamic_stock_ratio) =
            if name == "mixtral-bench" { (2.5, 5.0, 1.5, Some(10.0)) } else { (1.8, 12.0, 1.2, None) };
        let (prompt_ratio, roofline_share, resident_overhead) = (1.0, 0.8, 0.03);
        let targets = Targets {
            decode_ratio,
            prompt_ratio,
            roofline_share,
            dynamic_ratio,
            dynamic_stock_ratio,
            resident_overhead,
        };
        let targets = Self::PROMISED.contains(&name).then_some(targets);
        Self { name: name.to_owned(), limit: Some((limit_gib * GIB) as u64), targets, file }
    }

    /// A model file of the user's.
    pub fn file(path: &Path) -> Result<Self> {
        let stem = path.file_stem().context("--model: expected a file")?;
        let name = sanitised(&stem.to_string_lossy());
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

    /// `model` with its experts in `dtype`: `file` where there is one, else made in `dir` unless it is there.
    pub fn low_model(&self, model: &ModelFile, file: Option<&Path>, dtype: GgmlType, dir: &Path) -> Result<ModelFile> {
        if let Some(file) = file {
            return Ok(ModelFile { path: file.to_owned(), is_generated: false });
        }
        let path = dir.join(format!("{}-{}.gguf", self.name, sanitised(dtype.name())));
        if path.exists() {
            let is_ours = check_low(&Gguf::open(model.path())?, &Gguf::open(&path)?);
            is_ours.context("delete it, or give another --dir")?;
            return Ok(ModelFile { path, is_generated: false });
        }
        std::fs::create_dir_all(dir).with_context(|| format!("--dir {}", dir.display()))?;
        eprintln!("{}: quantising the experts to {dtype}", self.name);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        requantise_experts(model.path(), dtype, &path, threads)?;
        Ok(ModelFile { path, is_generated: true })
    }

    /// A pack of the model with low versions of type `dtype`: `file`, or generated into `dir` unless it is there.
    pub fn pack(&self, model: &ModelFile, file: Option<&Path>, dtype: GgmlType, dir: &Path) -> Result<ModelFile> {
        if let Some(file) = file {
            return Ok(ModelFile { path: file.to_owned(), is_generated: false });
        }
        let path = dir.join(format!("{}-{}.pack.gguf", self.name, sanitised(dtype.name())));
        let source = Gguf::open(model.path())?;
        if path.exists() {
            let pack = Pack::open(&path)?;
            let is_ours =
                pack.has_header_of(&source) && pack.info.source_fingerprint == Some(pack::fingerprint(&source)?);
            anyhow::ensure!(is_ours, "{} is of another model: delete it, or give another --dir", path.display());
            return Ok(ModelFile { path, is_generated: false });
        }
        eprintln!("{}: packing, low versions in {dtype}", self.name);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let low = Some(dtype.name().parse().context("--low-type")?);
        let spec = PackSpec { low, threads, ..PackSpec::new(PackKind::Full) };
        pack::write(&source, &path, &spec, &Ggml::new(), &mut |_| ControlFlow::Continue(()))?;
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
