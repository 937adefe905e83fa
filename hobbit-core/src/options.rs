//! Options of models and sessions: plain data with the defaults of llama.cpp's `common_params`.

mod device;
mod idle;
mod precision;
mod preset;
mod routing;
mod sampling;
mod session;

pub use device::{
    AdapterOptions, CpuHelper, DeviceChoice, DeviceOptions, SCALE_MAX, ScaledFile, SplitMode, TensorOverride,
    UnifiedMemory,
};
pub use idle::{Idle, Parts};
pub use precision::{CachingOptions, KernelChoice, LowSource, PrecisionMode, PrecisionOptions, Prefetch};
pub use preset::{LowRules, Preset, PresetSettings, RoutingRules};
pub use routing::{Knob, RoutingOptions, VirtualExperts, VirtualUpdate, VirtualUpdateError};
pub use sampling::{
    DryOptions, GrammarKind, GrammarTrigger, MirostatOptions, ReasoningBudget, ReasoningFormat, SamplerKind,
    SamplingOptions, XtcOptions, sampler_order,
};
pub use session::{
    DraftOptions, DraftSource, FlashAttn, KvType, Pooling, ProjectorOptions, RopeOptions, RopeScaling, SessionOptions,
    SpeculationOptions,
};

use std::path::{Path, PathBuf};
use std::str::FromStr;

use smart_default::SmartDefault;

use crate::files::{self, Input, Kind, Output, OutputError};
use crate::gguf::shards_by_name;
use crate::profile::LossBound;
use crate::store::mirror;

#[doc(inline)]
pub use crate::cache::Allocation;
#[doc(inline)]
pub use crate::cache::policy::{PolicyKind, Weights};
#[doc(inline)]
pub use crate::named::UnknownName;
#[doc(inline)]
pub use crate::plan::{Budget, ExpertCache, LowShare};
#[doc(inline)]
pub use crate::predict::PredictorKind;
#[doc(inline)]
pub use crate::store::IoMode;

/// A token's id in the model's vocabulary.
pub type Token = i32;

/// Which weights are rearranged for the CPU, as llama.cpp does by default. Rearranged weights multiply faster, but
/// change the last bits of some types' results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repack {
    /// All if the model fits and llama.cpp runs it by itself; and if hobbit keeps experts on the CPU in one precision,
    /// of types that gain by it (MXFP4, Q4_0, IQ4_NL), with slots for at least half of them. Otherwise none.
    #[default]
    Auto,
    /// All, also wherever hobbit keeps experts on the CPU: each is rearranged on arrival, other weights while loading.
    On,
    /// Weights that are no experts; all if the model fits and llama.cpp runs it by itself.
    Ordinary,
    Off,
}

/// How a model is opened and how much memory it may take.
#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct ModelOptions {
    /// Memory that weights, KV cache, compute buffers and experts share.
    pub budget: Budget,
    /// Bytes of the budget reserved for the program, besides what it holds when the first session opens.
    pub reserved_bytes: u64,
    /// Bytes of the budget that experts must be able to give up for a while (`Model::lend`). Memory that a device uses,
    /// and a model that llama.cpp runs by itself, cannot shrink: they leave these bytes free.
    pub lent_bytes: u64,
    /// The budget may exceed the memory that the system reports as available.
    pub overcommit: bool,
    /// If the whole model fits the budget and no option says how to keep experts, llama.cpp runs alone, on the mapped
    /// file. `false`: hobbit always manages the experts.
    #[default(true)]
    pub passthrough: bool,
    /// Whether weights are repacked for the CPU.
    pub repack: Repack,
    /// Load the layers for multi-token prediction, experts included, and give each session a second context for them:
    /// [`DraftSource::DraftMtp`] needs both.
    pub mtp: bool,
    /// Session options to expect, as far as they are known: they decide what fits. A model that certainly does not fit
    /// with them is refused before it is loaded; the defaults count as unknown. A context of length 0 is the model's.
    pub expects: SessionOptions,
    /// Part of the budget that holds experts.
    pub expert_cache: ExpertCache,
    /// Where low-precision versions of experts come from; a pack brings its own.
    pub low: Option<LowSource>,
    /// Part of the expert cache for low-precision versions.
    pub low_share: LowShare,
    /// When a low-precision version may stand in.
    pub precision: PrecisionOptions,
    /// Routing changes that avoid experts that are not in memory.
    pub routing: RoutingOptions,
    /// A bound on the loss. It chooses [`ModelOptions::routing`], T1 and T2 from measurements of the model, once a
    /// session knows how many experts are in memory. Low versions are used only if the choice uses them.
    pub loss_bound: Option<LossBound>,
    /// Kernels for the experts' rows in batches. [`KernelChoice::Fastest`] counts as [`KernelChoice::Identical`] if
    /// [`ModelOptions::precision`] asks for [`PrecisionMode::Exact`] or for deterministic results.
    pub kernels: KernelChoice,
    pub caching: CachingOptions,
    /// The table of [`PredictorKind::PathTable`], as `gguf-tools profile` writes it.
    pub path_table: Option<PathBuf>,
    /// File for a trace of routing and reads: see `trace`. An earlier trace is replaced; a file of another kind is not.
    pub trace: Option<PathBuf>,
    /// Recorded routes to follow instead of the routers' choices.
    pub routes: Option<RouteOptions>,
    /// A file that keeps which experts are resident and what the policy has learned, from one run to the next. It is
    /// read before the first token and replaced when the model closes, that is, when the last clone of the model and
    /// the last session are dropped. A state of another model, a damaged one, one of another version, and a failed
    /// write are logged (`set_log`) and do not fail the run; a file of another kind is left unchanged. Results are the
    /// same with and without the file, except that dynamic precision depends on residency.
    pub cache_state: Option<PathBuf>,
    /// A directory for such a file that hobbit names after the model, without [`ModelOptions::cache_state`]. Its experts
    /// delay no token: free slots are filled with them first, in a pause or between tokens. So it is neither read nor
    /// written where none are filled ([`CachingOptions::fill`], [`PolicyKind::Learned`]), in deterministic and traced
    /// runs, or where all experts fit. The directory is made for the user alone. If it cannot be used the run goes on
    /// without a notice.
    pub cache_state_dir: Option<PathBuf>,
    pub io: IoMode,
    /// Copies of the model's files on other disks, to read experts from as well: a file, or a directory with files of
    /// the same names. They may end earlier than the model's, or be missing; one that differs from the model's is
    /// logged (`set_log`) and not used.
    pub mirrors: Vec<PathBuf>,
    /// Layers whose dense weights go to the device; -1 lets the engine choose, -2 means all.
    #[default(-1)]
    pub n_gpu_layers: i32,
    /// Which devices take those weights and the expert products.
    pub device: DeviceOptions,
    /// Look for NaN and infinities while loading.
    pub check_tensors: bool,
    /// Metadata values that replace the file's.
    pub kv_overrides: Vec<KvOverride>,
    pub adapters: AdapterOptions,
}

impl ModelOptions {
    /// [`ModelOptions::kernels`] after the rule above.
    pub fn kernels_taken(&self) -> KernelChoice {
        if self.precision.demands_exactness() { KernelChoice::Identical } else { self.kernels }
    }
}

/// Recorded routes to follow: compute takes as long as a real model's, but the output means nothing. One session at a
/// time.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteOptions {
    /// A trace of a model with as many experts per layer and as many used per token. Its tokens are followed in order,
    /// and again from the first one in every new sequence and after the end.
    pub trace: PathBuf,
    /// Routers cannot predict recorded routes. Instead [`PredictorKind::StackedGate`] and [`PredictorKind::CrossLayer`]
    /// get this share of the later layers' experts right, `0.0..=1.0`, and wrong experts for the rest.
    pub recall: f64,
}

/// A metadata value that replaces the model file's: `KEY=TYPE:VALUE`.
#[derive(Clone, Debug, PartialEq)]
pub struct KvOverride {
    /// Metadata key, at most `KvOverride::KEY_BYTES_MAX` bytes.
    pub key: String,
    pub value: KvValue,
}

#[derive(Clone, Debug, PartialEq)]
pub enum KvValue {
    Int(i64),
    Float(f64),
    Bool(bool),
    /// `str:`, at most `KvOverride::KEY_BYTES_MAX` bytes.
    Str(String),
}

impl KvOverride {
    /// llama.cpp's limit on keys and on string values (`llama_model_kv_override`).
    pub(crate) const KEY_BYTES_MAX: usize = 127;
}

/// Why a metadata override cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{found}': {why} (expected KEY=TYPE:VALUE with TYPE one of int, float, bool, str)")]
pub struct KvOverrideError {
    found: String,
    why: &'static str,
}

impl FromStr for KvOverride {
    type Err = KvOverrideError;

    fn from_str(text: &str) -> Result<Self, KvOverrideError> {
        let fail = |why| KvOverrideError { found: text.to_owned(), why };
        let (key, rest) = text.split_once('=').ok_or_else(|| fail("no '='"))?;
        if key.is_empty() || key.len() > Self::KEY_BYTES_MAX {
            return Err(fail("the key must have 1 to 127 bytes"));
        }
        let (kind, value) = rest.split_once(':').ok_or_else(|| fail("no type"))?;
        let value = match kind {
            "int" => KvValue::Int(value.parse().map_err(|_| fail("not an integer"))?),
            "float" => KvValue::Float(value.parse().map_err(|_| fail("not a number"))?),
            "bool" => KvValue::Bool(value.parse().map_err(|_| fail("neither true nor false"))?),
            "str" if value.len() > Self::KEY_BYTES_MAX => return Err(fail("the string is longer than 127 bytes")),
            "str" => KvValue::Str(value.to_owned()),
            _ => return Err(fail("unknown type")),
        };
        Ok(Self { key: key.to_owned(), value })
    }
}

impl ModelOptions {
    /// The predictor in effect without devices: the given one, else [`PredictorKind::StackedGate`] where
    /// [`Prefetch::Auto`] tries it. That depends on the speed of reads, so not in traced and deterministic runs; not
    /// beside the trials of a target latency, and not on recorded routes, which routers cannot predict.
    pub fn predictor(&self) -> PredictorKind {
        let is_tried = self.caching.prefetch == Prefetch::Auto
            && self.trace.is_none()
            && self.routes.is_none()
            && self.routing.target_latency.is_none()
            && !self.precision.deterministic;
        self.caching.predictor.unwrap_or(if is_tried { PredictorKind::StackedGate } else { PredictorKind::None })
    }

    /// Checks that a run of `model` with these options overwrites no other data; `more` are the files that the program
    /// itself writes and reads. Errors use `name` to name the option of a file, such as `trace`. See [`files::check`].
    pub fn check_outputs_with(
        &self,
        model: &Path,
        more: (&[Output<'_>], &[Input<'_>]),
        name: impl Fn(&'static str) -> &'static str,
    ) -> Result<(), OutputError> {
        let shards = shards_by_name(model);
        let low_shards = match &self.low {
            Some(LowSource::File(path)) => shards_by_name(path),
            _ => Vec::new(),
        };
        let written = [("trace", &self.trace, Kind::Trace), ("cache_state", &self.cache_state, Kind::CacheState)];
        let written = written
            .into_iter()
            .filter_map(|(setting, path, kind)| Some(Output { flag: name(setting), path: path.as_deref()?, kind }));
        let outputs: Vec<Output<'_>> = written.chain(more.0.iter().copied()).collect();
        let mut inputs: Vec<Input<'_>> = shards.iter().map(|path| Input { flag: name("model"), path }).collect();
        inputs.extend(low_shards.iter().map(|path| Input { flag: name("low"), path }));
        let names = || shards.iter().chain(&low_shards).map(PathBuf::as_path);
        let copies: Vec<PathBuf> = self.mirrors.iter().flat_map(|path| mirror::candidates(path, names())).collect();
        inputs.extend(copies.iter().map(|path| Input { flag: name("mirror"), path }));
        let table = self.path_table.as_deref().map(|path| ("path_table", path));
        let read = table.into_iter().chain(self.adapters.files());
        inputs.extend(read.map(|(setting, path)| Input { flag: name(setting), path }));
        inputs.extend_from_slice(more.1);
        files::check(&outputs, &inputs)
    }

    /// As [`ModelOptions::check_outputs_with`], for a program that writes no files itself.
    pub fn check_outputs(&self, model: &Path) -> Result<(), OutputError> {
        self.check_outputs_with(model, (&[], &[]), |setting| setting)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_stacked_gate_is_tried_where_no_option_forbids_it() {
        let caching = |predictor, prefetch| CachingOptions { predictor, prefetch, ..CachingOptions::default() };
        let of = |caching| ModelOptions { caching, ..ModelOptions::default() };
        assert_eq!(of(caching(None, Prefetch::Auto)).predictor(), PredictorKind::StackedGate);
        for prefetch in [Prefetch::On, Prefetch::All, Prefetch::Off] {
            assert_eq!(of(caching(None, prefetch)).predictor(), PredictorKind::None, "{prefetch}");
        }
        let given = Some(PredictorKind::CrossLayer);
        let base = of(caching(None, Prefetch::Auto));
        let others = [
            ModelOptions { trace: Some("a.trace".into()), ..base.clone() },
            ModelOptions { routes: Some(RouteOptions { trace: "a.trace".into(), recall: 0.8 }), ..base.clone() },
            ModelOptions {
                routing: RoutingOptions { target_latency: Some(Duration::from_millis(80)), ..base.routing.clone() },
                ..base.clone()
            },
            ModelOptions { precision: PrecisionOptions { deterministic: true, ..base.precision }, ..base },
        ];
        for options in others {
            assert_eq!(options.predictor(), PredictorKind::None);
            let options = ModelOptions { caching: caching(given, Prefetch::Auto), ..options };
            assert_eq!(Some(options.predictor()), given);
        }
    }

    #[test]
    fn overrides() {
        let parse = |text: &str| text.parse::<KvOverride>();
        assert_eq!(
            parse("llama.expert_used_count=int:4"),
            Ok(KvOverride { key: "llama.expert_used_count".into(), value: KvValue::Int(4) })
        );
        assert_eq!(parse("a=bool:true").unwrap().value, KvValue::Bool(true));
        assert_eq!(parse("a=float:0.5").unwrap().value, KvValue::Float(0.5));
        assert_eq!(parse("a=str:x=y:z").unwrap().value, KvValue::Str("x=y:z".into()));
        for bad in ["", "a", "=int:1", "a=int", "a=int:x", "a=bool:1", "a=u8:1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse(&format!("{}=int:1", "k".repeat(128))).is_err());
    }
}
