//! What is compared: a name, and a line of flags as a user types them.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use hobbit::files::capped;
use hobbit::gguf::GgmlType;
use hobbit::options::PrecisionMode;
use hobbit::plan::{Budget, ExpertCache};
use hobbit::units::parse_percent;
use hobbit::{ModelOptions, PrecisionOptions, SessionOptions};
use hobbit_programs::flags::{self, ExpertArgs};

/// The arms that are compared by default.
pub const BUILT_IN: &str = include_str!("arms/default.txt");
/// Smaller quants of everything: what every arm has to be better than.
const CONTROLS: [&str; 5] = ["q6_k", "q5_k", "q4_k", "q3_k", "q2_k"];

/// One way to run a model.
#[derive(Clone, Debug)]
pub struct Arm {
    pub name: String,
    /// As typed.
    pub flags: String,
    pub file: FileArgs,
    pub options: ModelOptions,
    /// No flag of hobbit's was given.
    is_usual: bool,
}

/// What is made of the model's file before it is run: the bench's own flags, which stand among hobbit's.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct FileArgs {
    /// All experts requantised to this type, everything else as it is
    #[arg(long, value_name = "TYPE", value_parser = dtype, conflicts_with_all = ["nested", "expert_wise"])]
    pub experts: Option<GgmlType>,
    /// A nested pack: low versions are the high ones' own upper bits
    #[arg(long, conflicts_with_all = ["expert_wise", "low"])]
    pub nested: bool,
    /// A pack whose experts have each their own width, so that predicted perplexity rises by so much: gguf-tools
    /// profile on the first text, then gguf-tools pack --max-loss
    #[arg(long, value_name = "N%", value_parser = percent, conflicts_with = "low")]
    pub expert_wise: Option<f64>,
}

#[derive(clap::Args)]
struct Line {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    experts: ExpertArgs,
}

impl Arm {
    /// Reads `NAME: FLAGS`.
    ///
    /// # Errors
    /// No name, flags that hobbit-cli would refuse, and those that the bench has the say in.
    pub fn new(typed: &str) -> Result<Self> {
        let Some((name, flags)) = typed.split_once(':') else {
            bail!("arm '{typed}': found no colon, expected NAME: FLAGS, as in 'low: --low q2_k'");
        };
        let (name, flags) = (name.trim(), flags.trim());
        ensure!(!name.is_empty(), "arm '{typed}': found no name before the colon, expected NAME: FLAGS");
        Self::read(name, flags).with_context(|| format!("arm '{name}'"))
    }

    fn read(name: &str, flags: &str) -> Result<Self> {
        // What flags leave to the model, the bundled one decides until there is another.
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo.gguf"));
        let (file, options) = meaning(flags, model)?;
        let (_, usual) = meaning("", model)?;
        let taken = [
            ("--mem-budget", options.budget != Budget::default()),
            ("--expert-cache", options.expert_cache != ExpertCache::default()),
            ("--trace", options.trace.is_some()),
            ("--cache-state", options.cache_state.is_some()),
            ("--routes", options.routes.is_some()),
            ("a device", options.device != usual.device || !matches!(options.n_gpu_layers, -1 | 0)),
        ];
        if let Some((flag, _)) = taken.into_iter().find(|(_, is_given)| *is_given) {
            bail!("{flag} is not an arm's to choose: all get the cache that --cache says, on the CPU; leave it away");
        }
        let is_usual = options == usual;
        Ok(Self { name: name.to_owned(), flags: flags.to_owned(), file, options, is_usual })
    }

    /// All experts, as in the model.
    pub fn exact() -> Self {
        Self::new("exact:").expect("no flag is wrong")
    }

    /// What its flags say to the engine of this model.
    ///
    /// # Errors
    /// A model that cannot be read, where flags leave something to it.
    pub fn options_for(&self, model: &Path) -> Result<ModelOptions> {
        Ok(meaning(&self.flags, model)?.1)
    }

    /// The exact model, or one of which only the experts' type differs.
    pub fn is_control(&self) -> bool {
        self.is_usual && self.file == FileArgs { experts: self.file.experts, ..FileArgs::default() }
    }

    /// Low-precision versions beside the model's own, at default thresholds: what the documentation promises a bound
    /// for.
    pub fn is_promised(&self) -> bool {
        let PrecisionOptions { mode, t1, t2, .. } = self.options.precision;
        let has_low = self.options.low.is_some() || self.file.nested;
        let is_usual = mode != Some(PrecisionMode::Exact) && (t1, t2) == (None, None);
        has_low && is_usual && self.file.experts.is_none()
    }
}

/// What a line of flags says of a model's file, and to the engine.
fn meaning(flags: &str, model: &Path) -> Result<(FileArgs, ModelOptions)> {
    let Line { file, experts } = flags::parse(flags::words(flags)?)?;
    Ok((file, flags::model_options(experts, model, SessionOptions::default())?))
}

/// Reads a file of arms, one a line; `#` begins a comment line. `origin` names it in errors.
///
/// # Errors
/// The first line that is no arm.
pub fn read_all(text: &str, origin: &str) -> Result<Vec<Arm>> {
    let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line.trim()));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    lines.map(|(number, line)| Arm::new(line).with_context(|| format!("{origin}:{number}"))).collect()
}

/// Reads the arms of a file.
///
/// # Errors
/// A file that cannot be read or holds something else.
pub fn read_file(path: &Path) -> Result<Vec<Arm>> {
    /// Larger ones are no list of arms.
    const BYTES_MAX: u64 = 1 << 20;
    let path_shown = path.display().to_string();
    let text = capped::read_text(path, BYTES_MAX).with_context(|| path_shown.clone())?;
    read_all(&text, &path_shown)
}

/// What is measured: `given`, and before them, unless they are among them, the exact model and every control whose
/// experts are smaller than `own`, the type of the model's.
///
/// # Errors
/// Two arms of one name.
pub fn with_controls(given: &[Arm], own: GgmlType, ne0: u64) -> Result<Vec<Arm>> {
    let size = |dtype: GgmlType| hobbit::pack::fitting(dtype, ne0).row_bytes(ne0);
    let smaller =
        CONTROLS.into_iter().filter(|name| GgmlType::from_name(name).is_some_and(|dtype| size(dtype) < size(own)));
    let controls = smaller.map(|name| Arm::new(&format!("uniform {name}: --experts {name}")));
    let mut all: Vec<Arm> = std::iter::once(Ok(Arm::exact())).chain(controls).collect::<Result<_>>()?;
    all.retain(|control| !given.iter().any(|arm| arm.is_control() && arm.file == control.file));
    all.extend_from_slice(given);
    for (i, arm) in all.iter().enumerate() {
        ensure!(all[..i].iter().all(|other| other.name != arm.name), "two arms are named '{}'; rename one", arm.name);
    }
    Ok(all)
}

fn dtype(name: &str) -> Result<GgmlType, String> {
    GgmlType::from_name(name).ok_or_else(|| "expected a type such as q4_k".to_owned())
}

fn percent(text: &str) -> Result<f64, String> {
    parse_percent(text, 100.0).ok_or_else(|| "expected a number from 0% to 100%".to_owned())
}
