//! Remedies in terms of flags. The library knows no command line: its errors carry facts, and programs add advice
//! when they print an error ([`super::exit::in_words`]). Advice uses only spellings that all programs share.

use std::error::Error;
use std::path::Path;

#[cfg(feature = "rpc")]
use hobbit::engine::RpcError;
#[cfg(feature = "engine")]
use hobbit::engine::{LowError, NoShift};
#[cfg(feature = "engine")]
use hobbit::{ChatError, DeviceError, EvalError, OpenError};
use hobbit_core::gguf::RecodeError;
#[cfg(feature = "engine")]
use hobbit_core::gguf::adapter::AdapterError;
use hobbit_core::options::Idle;
use hobbit_core::pack::imatrix::ImatrixError;
use hobbit_core::pack::{PackError, PartialError, UnpackError, WriteError};
use hobbit_core::perplexity::base::BaseError;
use hobbit_core::plan::{BelowTokenCycle, BudgetSource, Holds, PlanError};
use hobbit_core::predict::PathTableError;
#[cfg(feature = "engine")]
use hobbit_core::profile::VirtualPlanError;
use hobbit_core::profile::{ProfileError, RUNS_MAX, WidthsError, beside, in_percent};
use hobbit_core::sim::SimError;
use hobbit_core::store::StoreError;
use hobbit_core::trace::TraceError;
use hobbit_core::units::{KIB, MIB, ShortBytes};

const RECORD: &str = "record one with hobbit-cli --trace FILE";
const FORCE: &str = "give another name, or --force to replace it";
const OTHER_IMATRIX: &str = "give --imatrix one that fits";
const LESS_MEMORY: &str = "give a smaller --mem-budget or --expert-cache";
const LESS_ON_THE_DEVICE: &str =
    "put fewer layers there (-ngl), give a smaller -c or -ub, or --device-cache 0 to compute experts on the CPU";

/// The flag of a setting of `hobbit::ModelOptions` that names a file.
pub fn flag(setting: &'static str) -> &'static str {
    match setting {
        "model" => "-m",
        "low" => "--low",
        "mirror" => "--mirror",
        "trace" => "--trace",
        "cache_state" => "--cache-state",
        "path_table" => "--path-table",
        "lora" => "--lora",
        "control_vectors" => "--control-vector",
        other => other,
    }
}

/// The flag of a setting, by its name in the library.
pub fn spelled(setting: &str) -> String {
    match setting {
        "n_gpu_layers" => "-ngl".to_owned(),
        _ => format!("--{}", setting.replace('_', "-")),
    }
}

/// Options that are set and cannot act, in flags.
pub fn idle_flags(idle: &[Idle]) -> impl Iterator<Item = String> {
    idle.iter().map(move |Idle { setting, reason }| {
        // "(see low)" names a setting.
        let reason = match reason.split_once(" (see ").map(|(why, see)| (why, see.trim_end_matches(')'))) {
            Some((why, see)) => format!("{why} (see {})", spelled(see)),
            None => (*reason).to_owned(),
        };
        format!("{} has no effect: {reason}", spelled(setting))
    })
}

/// The remedy for an error: that of the first cause that has one.
pub fn advice(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(of_cause)
}

fn of_cause(error: &(dyn Error + 'static)) -> Option<String> {
    macro_rules! of {
        ($($advise:expr),+ $(,)?) => {
            $(if let Some(error) = error.downcast_ref() {
                return $advise(error).map(String::from);
            })+
        };
    }
    of!(
        plan,
        store,
        simulation,
        pack,
        profile,
        writing,
        |error: &BaseError| match error {
            BaseError::CutOff { complete, .. } => Some(format!("--chunks {complete} uses those")),
            BaseError::NotABase { .. } =>
                Some("make one with --kl-divergence-base FNAME and without --kl-divergence".to_owned()),
            _ => None,
        },
        |error: &UnpackError| match error {
            UnpackError::Output(PartialError::Exists { .. }) => Some(FORCE),
            UnpackError::Pack(error) => pack(error),
            UnpackError::Digest { .. } => Some("the pack is damaged, `gguf-tools verify` says where"),
            _ => None,
        },
        |error: &WidthsError| match error {
            WidthsError::NoWidths => Some("make one with gguf-tools profile --widths q2_k,q3_k,q4_k"),
            WidthsError::TargetSize { .. } => Some("give a larger --target-size, or profile narrower --widths"),
            WidthsError::Layer { .. } => None,
        },
        |error: &ImatrixError| matches!(error, ImatrixError::Shape { .. }).then_some(OTHER_IMATRIX),
        |error: &TraceError| matches!(error, TraceError::Magic { .. }).then_some(RECORD),
    );
    #[cfg(feature = "engine")]
    of!(opening, evaluating, chat, device, low);
    #[cfg(feature = "rpc")]
    of!(|error: &RpcError| match error {
        RpcError::UnknownDevice { .. } => Some("give one of these with --device"),
        RpcError::Listen { .. } =>
            Some("is another server there? Choose another --port, or an address of this machine for --host"),
        RpcError::Failed(_) => Some("try other devices with --device"),
        _ => None,
    });
    None
}

fn store(error: &StoreError) -> Option<&'static str> {
    match error {
        StoreError::TooManyReads { .. } => Some("give a smaller -ub"),
        StoreError::Memory { .. } => Some(LESS_MEMORY),
        _ => None,
    }
}

fn simulation(error: &SimError) -> Option<&'static str> {
    match error {
        SimError::Trace(TraceError::Magic { .. }) | SimError::NoBatches { .. } => Some(RECORD),
        SimError::NoLow { .. } => Some("give --low-bytes N%"),
        SimError::NoScores { .. } => Some(
            "record one with hobbit-cli --trace, without --routes, or leave out --cache-bias, --substitute and \
             --virtual-experts",
        ),
        SimError::Unknown { what: "policy", .. } => Some("give --policy"),
        SimError::Unknown { .. } => Some("give --predictor"),
        _ => None,
    }
}

fn profile(error: &ProfileError) -> Option<&'static str> {
    match error {
        ProfileError::Malformed { .. } => Some("make it again with gguf-tools profile"),
        ProfileError::Key { .. } => Some("make the pack again with gguf-tools pack"),
        ProfileError::PathTable { error: PathTableError::NotATable { .. }, .. } => {
            Some("make one with `gguf-tools profile`")
        }
        ProfileError::OtherModel { .. } => Some("make a profile of this model with gguf-tools profile"),
        _ => None,
    }
}

fn pack(error: &PackError) -> Option<&'static str> {
    match error {
        PackError::NotAPack { .. } => Some("make one with `gguf-tools pack`"),
        PackError::LowOnly { .. } => Some("give it with --low, beside that model"),
        _ => None,
    }
}

fn writing(error: &WriteError) -> Option<String> {
    let advice = match error {
        WriteError::NotSmaller { fits: Some(types), .. } => return Some(format!("give --low {types}")),
        WriteError::NotSmaller { .. } => "give --low a smaller type, or leave it out",
        WriteError::NoPlanes { .. } => "pack a q8_0 model, or add --high q8_0",
        WriteError::PlanesLow { .. } => "give one of the two, --bit-planes or --low",
        WriteError::PlanesLowOnly { .. } => "leave out --bit-planes or --only-low",
        WriteError::Scale { .. } => "leave out --bit-planes",
        WriteError::NothingLow { .. } => "give --low, for example --low q2_k",
        WriteError::PackAlready { .. } => "unpack it first: `gguf-tools unpack`",
        WriteError::Recode { error: RecodeError::ImportanceMissing { .. }, .. } => {
            "give one with --imatrix, or choose a type like q2_k"
        }
        WriteError::Imatrix(ImatrixError::Shape { .. }) => OTHER_IMATRIX,
        WriteError::SourceChanged { .. } => "--force starts over",
        WriteError::Output(PartialError::Exists { .. }) => FORCE,
        WriteError::ReadBack(error) => pack(error)?,
        _ => return None,
    };
    Some(advice.to_owned())
}

/// The command that measures a model's mixes within a loss, with these expert caches, and its cost.
pub fn measure_mixes(model: &Path, max_loss: f64, expert_caches: &str) -> String {
    format!(
        "make one with: gguf-tools profile {} --text FILE --max-loss {}% --no-widths --expert-cache {expert_caches} -o \
         {} (for each cache some {} runs over half of the text, token by token: with its 4096 tokens as long as \
         generating {} takes here)",
        model.display(),
        in_percent(max_loss),
        beside(model).display(),
        RUNS_MAX + 2,
        (RUNS_MAX + 2) * 2048,
    )
}

fn plan(error: &PlanError) -> Option<String> {
    let unavailable = |minimum: u64, available: Option<u64>| available.filter(|available| minimum > *available);
    Some(match *error {
        PlanError::TooSmall { budget: budget @ ..KIB, origin: BudgetSource::Given, .. } => {
            format!("a number alone counts bytes: give --mem-budget {budget}GiB for gibibytes")
        }
        PlanError::TooSmall { minimum, available, holds: Holds::Dense, .. } => {
            let budget = match unavailable(minimum, available) {
                Some(available) => format!("{} are available here: ", ShortBytes(available)),
                None => format!("give --mem-budget {}, or ", mib_up(minimum + MIB)),
            };
            format!("{budget}take a smaller quant, because only experts can stay on disk, or a smaller context (-c)")
        }
        PlanError::TooSmall { minimum, available, .. } => match unavailable(minimum, available) {
            Some(available) => format!(
                "{} are available here: make the context smaller (-c), or run it where there is more memory",
                ShortBytes(available)
            ),
            // The process's own memory differs from run to run, by less than a MiB.
            None => format!("give --mem-budget {}, or make the context smaller (-c)", mib_up(minimum + MIB)),
        },
        PlanError::AboveLimit { available, .. } => {
            let less = if available < MIB { String::new() } else { format!(" or at most {}MiB", available / MIB) };
            format!(
                "give --mem-budget auto{less}, or --overcommit if you know of more (swap, a limit that will be raised)"
            )
        }
        PlanError::ExpertCacheTooLarge { fits, minimum, available, .. } => {
            let budget = match unavailable(minimum, available) {
                Some(available) => format!(" ({} are available here)", ShortBytes(available)),
                None => format!(", or --mem-budget {}", mib_up(minimum)),
            };
            format!("give --expert-cache {}MiB or less{budget}", fits / MIB)
        }
        PlanError::DeviceTooSmall { .. } => LESS_ON_THE_DEVICE.to_owned(),
        PlanError::DeviceCacheTooLarge { .. } => "give a smaller --device-cache or --device-headroom".to_owned(),
        PlanError::NoLimitKnown => "give --mem-budget, for example --mem-budget 4GiB".to_owned(),
    })
}

/// Advice on flags that keep the experts of one token in memory.
pub fn for_one_token(warning: &BelowTokenCycle) -> String {
    let given = [("--mem-budget", warning.mem_budget), ("--expert-cache", warning.expert_cache)];
    let flags = given.into_iter().filter_map(|(flag, bytes)| Some(format!("{flag} {}", mib_up(bytes?))));
    format!("for one token's experts give {}", flags.collect::<Vec<_>>().join(" "))
}

/// Rounded up, because it is a lower limit.
fn mib_up(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(MIB))
}

#[cfg(feature = "engine")]
fn opening(error: &OpenError) -> Option<String> {
    use OpenError as E;
    let advice = match error {
        E::Plan(error) => return plan(error),
        E::LossBound(error) => return Some(measure_mixes(&error.model, error.max_loss, &error.expert_caches)),
        E::VirtualPlan(VirtualPlanError::TooLarge { needed, given, .. }) => {
            return Some(format!(
                "give --expert-cache {needed}MiB, leave it out, or make a plan with gguf-tools plan --budget {given}MiB"
            ));
        }
        E::VirtualPlan(VirtualPlanError::Unusable { .. }) => "make one with gguf-tools plan",
        E::PathTable(error) => return profile(error).map(str::to_owned),
        E::Store(error) => return store(error).map(str::to_owned),
        E::Pack(error) => return pack(error).map(str::to_owned),
        E::PackWrite(error) => return writing(error),
        E::Device(error) => return device(error).map(str::to_owned),
        E::Low(error) => return low(error).map(str::to_owned),
        E::WarmUp(error) => return evaluating(error).map(str::to_owned),
        E::Adapter(AdapterError::OfExperts { .. }) => "or give a --mem-budget in which the whole model fits",
        E::NoPathTable { .. } => "make one with gguf-tools profile --path-table FILE and give it with --path-table",
        E::Load { reason, .. } => refused_model(reason),
        E::Overridden { reason, .. } if !reason.contains("alloc") => {
            "give values with which the model can be computed, or leave --override-kv out"
        }
        E::Overridden { reason, .. } => refused_model(reason),
        E::Context { reason, .. } => return refused_context(reason).map(str::to_owned),
        E::OutOfMemory { .. } => LESS_MEMORY,
        E::DeviceMemory { .. } => LESS_ON_THE_DEVICE,
        E::Routing(_) => {
            "leave out --cache-bias, --substitute and --virtual-experts (--low and --drop work), or --routes if it is \
             there"
        }
        _ => return None,
    };
    Some(advice.to_owned())
}

/// Why a context cannot be shifted, and the way out if there is one.
#[cfg(feature = "engine")]
pub fn no_shift(reason: NoShift) -> String {
    let way_out = if reason == NoShift::Window { " (--swa-full keeps all of them)" } else { "" };
    format!("this model's context cannot be shifted: {reason}{way_out}")
}

#[cfg(feature = "engine")]
fn evaluating(error: &EvalError) -> Option<&'static str> {
    Some(match error {
        EvalError::BatchTooLarge { .. } => "-b gives the size of a batch",
        EvalError::ContextFull { shift_helps: true, .. } => {
            "give a larger -c (or --context-shift, for text without end)"
        }
        EvalError::ContextFull { .. } => "give a larger -c",
        EvalError::NotFinite => "gguf-tools verify looks for damaged weights",
        EvalError::Decode(reason) if reason.contains("router weights were not found") => {
            "leave out --routes, --cache-bias, --substitute, --virtual-experts and --drop, and use --precision exact"
        }
        _ => return None,
    })
}

#[cfg(feature = "engine")]
fn chat(error: &ChatError) -> Option<&'static str> {
    match error {
        ChatError::Template(_) => Some("give another with --chat-template or use -no-cnv"),
        ChatError::Reply(_) => Some("--no-jinja or -no-cnv does not parse it"),
        _ => None,
    }
}

/// llama.cpp's message reveals only by its wording whether memory was refused: `unable to allocate %s buffer`.
#[cfg(feature = "engine")]
fn refused_model(reason: &str) -> &'static str {
    if reason.contains("unable to allocate") && !reason.contains("CPU") {
        "put fewer layers on the device (-ngl), or more of the model on another (-dev, -ts)"
    } else if reason.contains("alloc") {
        "free some memory, or raise the limit (ulimit -v unlimited)"
    } else if reason.contains("regular expression") || reason.contains("regex") {
        "--override-tensor takes PATTERN=BUFFER with a regular expression: a character like [ or ( needs a \\ before it"
    } else {
        "fetch or convert the model again, or update hobbit if the model is newer"
    }
}

#[cfg(feature = "engine")]
fn refused_context(reason: &str) -> Option<&'static str> {
    if reason.contains("flash_attn") {
        Some("give -fa on, or an unquantised -ctv")
    } else if reason.contains("alloc") || reason.contains("memory") || reason.is_empty() {
        Some("try a smaller -c, -b or -ub, or with a device a smaller -ngl, or -nkvo")
    } else if reason.contains("n_ctx") {
        Some("give a sensible context length with -c")
    } else {
        None
    }
}

#[cfg(feature = "engine")]
fn low(error: &LowError) -> Option<&'static str> {
    use LowError as E;
    Some(match error {
        E::OtherModel { .. } => "give --low a smaller quant of this model",
        E::NoExperts { .. } => "leave --low out",
        E::Mismatch { .. } => "give a smaller quant of the same model, or make one with --low q2_k",
        E::OfAnotherModel { .. } => {
            "make them again from this one, with gguf-tools pack --only-low --force or with --low TYPES, or give the \
             model that they belong to"
        }
        E::Types(_) => "--low takes them",
        E::OfPack { .. } => "leave --low out if the pack has its own, or make it again with gguf-tools pack --low",
        _ => return None,
    })
}

#[cfg(feature = "engine")]
fn device(error: &DeviceError) -> Option<&'static str> {
    use DeviceError as E;
    Some(match error {
        E::Unknown { .. } => "--list-devices shows the names that --device takes",
        E::NotOffloadable { .. } => "give --device none for the CPU alone",
        E::NotUnified { .. } => "without --unified on, experts are copied to it",
        E::Twice { .. } => "name each device once in --device",
        E::MainOutOfRange { .. } => "--main-gpu takes the place of a device in --device",
        E::NoBufferType { .. } => "--override-tensor takes PATTERN=BUFFER",
        E::NoRpc => "without it, leave --rpc out",
        E::Endpoint { .. } => "--rpc takes no other form",
        E::Unreachable { .. } => {
            "start a server there (hobbit-rpc -H HOST -p PORT, or llama.cpp's ggml-rpc-server), or leave --rpc out"
        }
        E::NoRemoteDevices { .. } => "start it with some, or leave it out of --rpc",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: PlanError = PlanError::TooSmall {
        budget: 300 * MIB,
        origin: BudgetSource::Given,
        minimum: 911 * MIB - 1,
        available: None,
        holds: Holds::NoExpert,
    };

    fn advised(error: PlanError) -> String {
        advice(&anyhow::Error::new(error).context("opening a model")).unwrap()
    }

    #[test]
    fn budgets_are_advised_rounded_up() {
        assert_eq!(advised(SMALL), "give --mem-budget 912MiB, or make the context smaller (-c)");
        let PlanError::TooSmall { origin, minimum, available, holds, .. } = SMALL else { unreachable!() };
        let bytes = advised(PlanError::TooSmall { budget: 8, origin, minimum, available, holds });
        assert_eq!(bytes, "a number alone counts bytes: give --mem-budget 8GiB for gibibytes");
        let dense = |available| {
            advised(PlanError::TooSmall { budget: 300 * MIB, origin, minimum, available, holds: Holds::Dense })
        };
        let quant = "take a smaller quant, because only experts can stay on disk, or a smaller context (-c)";
        assert_eq!(dense(None), format!("give --mem-budget 912MiB, or {quant}"));
        assert_eq!(dense(Some(300 * MIB)), format!("300 MiB are available here: {quant}"));
        let large = |available| PlanError::ExpertCacheTooLarge {
            asked: 1200 * MIB,
            fits: 1138 * MIB - 1,
            budget: 2048 * MIB,
            minimum: 2111 * MIB,
            available,
        };
        assert_eq!(advised(large(None)), "give --expert-cache 1137MiB or less, or --mem-budget 2111MiB");
        assert_eq!(
            advised(large(Some(2000 * MIB))),
            "give --expert-cache 1137MiB or less (1.95 GiB are available here)"
        );
        let flags = |mem_budget, expert_cache| {
            for_one_token(&BelowTokenCycle { n_slots: 88, n_cycle: 128, mem_budget, expert_cache })
        };
        assert_eq!(flags(Some(1478 * MIB), None), "for one token's experts give --mem-budget 1478MiB");
        let both = flags(Some(1423 * MIB), Some(512 * MIB));
        assert_eq!(both, "for one token's experts give --mem-budget 1423MiB --expert-cache 512MiB");
    }

    #[test]
    fn memory_that_is_not_there_is_not_advised() {
        let PlanError::TooSmall { budget, origin, minimum, holds, .. } = SMALL else { unreachable!() };
        let small = advised(PlanError::TooSmall { budget, origin, minimum, available: Some(300 * MIB), holds });
        assert!(small.starts_with("300 MiB are available here: make the context smaller (-c)"), "{small}");
        assert!(!small.contains("--mem-budget"), "{small}");
        let above = |available| PlanError::AboveLimit { budget, takes: budget, available, origin };
        assert!(advised(above(100 * MIB)).starts_with("give --mem-budget auto or at most 100MiB, or --overcommit"));
        assert!(advised(above(1)).starts_with("give --mem-budget auto, or --overcommit"));
    }

    #[cfg(feature = "engine")]
    #[test]
    fn errors_of_the_engine_have_remedies() {
        let opening = |error: OpenError| advice(&anyhow::Error::new(error));
        let evaluating = |error: EvalError| advice(&anyhow::Error::new(error));
        assert_eq!(opening(SMALL.into()), Some(advised(SMALL)));
        let full = |shift_helps| evaluating(EvalError::ContextFull { n_ctx: 8, shift_helps }).unwrap();
        assert!(full(true).contains("larger -c (or --context-shift"));
        assert!(full(false).ends_with("larger -c"));
        assert!(no_shift(NoShift::Window).ends_with("than the context (--swa-full keeps all of them)"));
        assert_eq!(evaluating(EvalError::Interrupted), None);
        let path = || std::path::PathBuf::from("a.gguf");
        let plan = VirtualPlanError::Unusable { file: "plan.json".to_owned(), reason: String::new() };
        assert_eq!(opening(plan.into()).as_deref(), Some("make one with gguf-tools plan"));
        let table = PathTableError::NotATable { found: Vec::new(), expected: [0; 4] };
        let table = ProfileError::PathTable { path: path(), error: table };
        assert_eq!(opening(table.into()).as_deref(), Some("make one with `gguf-tools profile`"));
        let load = |reason: &str| opening(OpenError::Load { path: path(), reason: reason.to_owned() }).unwrap();
        assert!(load("wrong number of tensors").starts_with("fetch or convert the model again"));
        assert!(load("Unexpected character within '[...]' in regular expression").contains("--override-tensor"));
        let keys = || vec!["llama.expert_used_count".to_owned()];
        let overridden =
            |reason: &str| opening(OpenError::Overridden { path: path(), keys: keys(), reason: reason.to_owned() });
        assert!(overridden("GGML_ASSERT(n_expert_used > 0) failed").unwrap().ends_with("leave --override-kv out"));
        assert!(overridden("failed to allocate CPU buffer").unwrap().contains("free some memory"));
    }
}
