//! The model, and what arms make of it: requantised, packed, with low versions beside it.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use hobbit::engine::Ggml;
use hobbit::gguf::{GgmlType, Gguf};
use hobbit::options::LowSource;
use hobbit::pack::{self, PackKind, PackSpec};
use hobbit::plan::Budget;
use hobbit::{Model, ModelOptions};

use super::arm::{Arm, FileArgs};
use super::requantise::requantise_experts;

/// A model that is measured.
pub struct Subject {
    pub path: PathBuf,
    /// Names it in tables.
    pub name: String,
    /// Type of the first expert tensor.
    pub own: GgmlType,
    /// Elements of its rows.
    pub ne0: u64,
    pub expert_bytes: u64,
    pub file_bytes: u64,
}

impl Subject {
    /// Looks at a model.
    ///
    /// # Errors
    /// A file that is no model, or one without experts.
    pub fn new(path: &Path) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        let map = gguf.experts()?;
        let Some(first) = map.layers.first().and_then(|layer| layer.tensors.first()) else {
            bail!("{}: found no experts, expected a Mixture-of-Experts model; give another --model", path.display());
        };
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (own, ne0, expert_bytes) = (first.dtype, first.ne0, map.bytes());
        Ok(Self { path: path.to_owned(), name, own, ne0, expert_bytes, file_bytes: gguf.file_bytes() })
    }

    /// The model as it is, with everything in memory that there is room for: it knows tokens.
    ///
    /// # Errors
    /// A model that cannot be opened.
    pub fn open(&self) -> Result<Model> {
        Ok(Model::open(&self.path, &ModelOptions { stand_aside: false, ..ModelOptions::default() }, |_| true)?)
    }

    /// The bytes of cache that a share of the experts is.
    pub fn cache_bytes(&self, percent: f64) -> u64 {
        (self.expert_bytes as f64 * percent / 100.0) as u64
    }

    /// A budget in bytes that never limits: the expert cache does.
    pub fn ample_budget(&self) -> Budget {
        /// For buffers and the system's own.
        const ROOM: u64 = 16 << 30;
        Budget::Bytes(ROOM + 2 * self.file_bytes)
    }
}

/// What an arm is measured with, whatever the share of the cache.
#[derive(Clone, Debug)]
pub struct Ready {
    pub arm: Arm,
    /// The file to run.
    pub path: PathBuf,
    /// As the arm says; low versions are files by now.
    pub options: ModelOptions,
    /// Of a control, bytes of all its experts: the smaller quant that fits is one of which these fit in the cache.
    pub control_bytes: Option<u64>,
}

/// Makes the files that arms need, each once.
pub struct Workshop<'a> {
    pub subject: &'a Subject,
    /// Where they go.
    pub dir: &'a Path,
    pub threads: usize,
    /// What each expert's width is measured on, and how many tokens of it.
    pub profiled: (&'a Path, usize),
}

impl Workshop<'_> {
    /// Everything that the arm needs.
    ///
    /// # Errors
    /// Types that cannot be made of the model, a full disk.
    pub fn ready(&self, arm: &Arm) -> Result<Ready> {
        let make = || -> Result<Ready> {
            let path = self.file(&arm.file)?;
            let mut options = ModelOptions { stand_aside: false, ..arm.options_for(&path)? };
            if let Some(LowSource::Quantise { types, .. }) = &options.low {
                options.low = Some(LowSource::File(self.low(types, &path)?));
            }
            let control_bytes = if arm.is_control() { Some(Gguf::open(&path)?.experts()?.bytes()) } else { None };
            Ok(Ready { arm: arm.clone(), path, options, control_bytes })
        };
        make().with_context(|| format!("arm '{}'", arm.name))
    }

    fn file(&self, file: &FileArgs) -> Result<PathBuf> {
        match file {
            FileArgs { experts: Some(dtype), .. } => self.requantised(*dtype),
            FileArgs { nested: true, .. } => self.nested(),
            FileArgs { expert_wise: Some(percent), .. } => self.expert_wise(*percent),
            _ => Ok(self.subject.path.clone()),
        }
    }

    fn requantised(&self, dtype: GgmlType) -> Result<PathBuf> {
        if dtype == self.subject.own {
            return Ok(self.subject.path.clone());
        }
        let path = self.dir.join(format!("{dtype}.gguf"));
        if !path.exists() {
            requantise_experts(&self.subject.path, dtype, &path, self.threads)?;
        }
        Ok(path)
    }

    /// As `--low TYPES` makes it beside a model, but here. Of a requantised model the low versions are made of the
    /// original, as quants that are published are.
    fn low(&self, types: &str, high: &Path) -> Result<PathBuf> {
        if high != self.subject.path {
            let dtype = GgmlType::from_name(types);
            return self
                .requantised(dtype.with_context(|| format!("--low {types}: expected one type beside --experts"))?);
        }
        Ok(hobbit::engine::quantise_low(high, types, Some(self.dir), &mut |_| true)?)
    }

    fn nested(&self) -> Result<PathBuf> {
        let path = self.dir.join("nested.gguf");
        if !path.exists() {
            let source = Gguf::open(&self.subject.path)?;
            let spec = PackSpec { nested: true, threads: self.threads, ..PackSpec::new(PackKind::Full) };
            pack::write(&source, &path, &spec, &Ggml, &mut |_| ControlFlow::Continue(()))?;
        }
        Ok(path)
    }

    /// As a user makes it.
    fn expert_wise(&self, percent: f64) -> Result<PathBuf> {
        let (text, n_tokens) = self.profiled;
        let profile = self.dir.join("profile.json");
        let path = self.dir.join(format!("expert-wise-{percent}.gguf"));
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        if !profile.exists() {
            let (tokens, threads) = (n_tokens.to_string(), self.threads.to_string());
            let mut args =
                vec!["profile".into(), self.subject.path.clone().into_os_string(), "--text".into(), text.into()];
            args.extend(words(&["--tokens", &tokens, "--threads", &threads, "-o"]));
            args.push(profile.clone().into_os_string());
            gguf_tools(&args)?;
        }
        if !path.exists() {
            let mut args = vec![
                "pack".into(),
                self.subject.path.clone().into_os_string(),
                "-o".into(),
                path.clone().into_os_string(),
            ];
            args.extend([OsString::from("--profile"), profile.into_os_string()]);
            args.extend(words(&["--max-loss", &format!("{percent}%")]));
            gguf_tools(&args)?;
        }
        Ok(path)
    }
}

/// Runs the tool that is built of the same sources.
fn gguf_tools(args: &[OsString]) -> Result<()> {
    let built = Command::new(env!("CARGO"))
        .args(["build", "--release", "--quiet", "-p", "gguf-tools", "--bin", "gguf-tools"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .context("cargo, which builds gguf-tools")?;
    ensure!(built.success(), "cargo build -p gguf-tools: {built}");
    // A bench lies in `deps`, beside which programs are.
    let own = std::env::current_exe()?;
    let tool = own.parent().and_then(Path::parent).context("the directory of programs")?.join("gguf-tools");
    let said =
        Command::new(&tool).args(args).stdin(Stdio::null()).output().with_context(|| tool.display().to_string())?;
    let shown = args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ");
    ensure!(said.status.success(), "gguf-tools {shown}: {}", String::from_utf8_lossy(&said.stderr).trim());
    Ok(())
}
