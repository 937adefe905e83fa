//! Which program and which flags suit a model on a machine: from facts to lines, without reading anything.

use hobbit_core::units::{Bytes, Percent};
use serde::Serialize;

/// Facts about a model and a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Name of the model's file.
    pub file: String,
    pub kind: Kind,
    /// Bytes of all weights.
    pub bytes: u64,
    /// Memory that the process may take; `None` if the system does not say.
    pub room: Option<u64>,
    /// Memory that is free for the process, whatever was asked for.
    pub available: Option<u64>,
    /// Memory that was asked for, and the context.
    pub asked: Option<u64>,
    pub ctx: Option<u32>,
    pub fit: Fit,
    /// `ulimit -v`, if there is one.
    pub address_space: Option<u64>,
    /// Why direct I/O does not work, if it does not.
    pub no_direct: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    Dense,
    Experts,
    /// hobbit's own format.
    Pack,
}

/// How much of the model has room.
#[derive(Clone, Debug, PartialEq)]
pub enum Fit {
    /// All of it, in memory.
    Memory,
    /// All of it, on devices.
    Device,
    /// Some experts.
    Part(Share),
    /// Not even the rest, with the remedy.
    Nothing(String),
    /// No forecast, and why.
    Unknown(String),
}

/// The experts that have room, and what that brings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// In memory and on devices, 0..=1.
    pub experts: f64,
    /// Bytes that devices may hold; `None` without a usable one.
    pub on_device: Option<u64>,
    /// Fewer experts than one token uses.
    pub below_token: bool,
    /// Reads take longer than products.
    pub reads_limit: bool,
}

/// The program to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    Hobbit,
    LlamaCpp,
    /// Both run it, and which is faster was not measured.
    Either,
    Neither,
}

/// A flag, or a step before the command, with its reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reasoned {
    pub what: String,
    pub why: String,
}

impl Facts {
    /// Bytes of the model that neither memory nor devices have room for; 0 if the room is not known.
    fn missing(&self) -> u64 {
        let on_device = if let Fit::Part(share) = &self.fit { share.on_device } else { None };
        let room = self.room.map(|room| room.saturating_add(on_device.unwrap_or(0)));
        room.map_or(0, |room| self.bytes.saturating_sub(room))
    }

    /// The free memory, if less was asked for and it would hold the model with a tenth beside it.
    fn roomier(&self) -> Option<u64> {
        let enough = self.bytes.saturating_add(self.bytes / 10);
        self.available.filter(|&free| self.asked.is_some_and(|asked| asked < free) && enough < free)
    }
}

fn because(what: impl Into<String>, why: impl Into<String>) -> Reasoned {
    Reasoned { what: what.into(), why: why.into() }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    pub program: Program,
    pub why: String,
    /// The command to use, if there is one.
    pub command: Option<String>,
    /// Every flag of the command, with its reason.
    pub flags: Vec<Reasoned>,
    /// Steps before the command.
    pub before: Vec<Reasoned>,
    /// Flags and steps that make it faster. Each reason says whether results stay exact.
    pub faster: Vec<Reasoned>,
    /// Behaviour of llama.cpp with the model, without hobbit.
    pub llama_cpp: String,
}

/// Chooses the program and its flags.
pub fn choose(facts: &Facts) -> Choice {
    let (program, why) = program(facts);
    let name = match program {
        Program::Hobbit | Program::Either => Some("hobbit-cli"),
        Program::LlamaCpp => Some("llama-cli"),
        Program::Neither => None,
    };
    let flags = if name.is_some() { flags(facts, program) } else { Vec::new() };
    let words = flags.iter().map(|flag| flag.what.as_str());
    let command = name.map(|name| std::iter::once(name).chain(words).collect::<Vec<_>>().join(" "));
    let runs_hobbit = matches!(program, Program::Hobbit | Program::Either);
    Choice {
        program,
        why,
        command,
        before: if runs_hobbit { before(facts) } else { Vec::new() },
        faster: if runs_hobbit { faster(facts) } else { Vec::new() },
        flags,
        llama_cpp: llama_cpp(facts),
    }
}

fn program(facts: &Facts) -> (Program, String) {
    let say = |program, why: &str| (program, why.to_owned());
    match (facts.kind, &facts.fit) {
        (Kind::Pack, _) => say(Program::Hobbit, "an expert pack: llama.cpp does not read its experts"),
        (_, Fit::Nothing(why)) => say(Program::Neither, why),
        (Kind::Dense, Fit::Memory | Fit::Device) => {
            say(Program::LlamaCpp, "a dense model that fits: use llama.cpp, hobbit brings nothing")
        }
        (Kind::Dense, _) => say(
            Program::LlamaCpp,
            "a dense model has no experts that could stay in its file: use llama.cpp, and a smaller quant if it does \
             not fit",
        ),
        (_, Fit::Memory) => say(
            Program::LlamaCpp,
            "the whole model fits: use llama.cpp. hobbit-cli runs it by itself then, and only reads prompts faster",
        ),
        (_, Fit::Device) => say(
            Program::LlamaCpp,
            "the whole model fits on the device: use llama.cpp, which hobbit-cli runs by itself then",
        ),
        (_, Fit::Part(share)) if share.on_device.is_some() && facts.missing() == 0 => say(
            Program::Either,
            "memory and the device together hold the model: hobbit keeps experts in use on the device, llama.cpp fixed \
             layers (--n-cpu-moe). No GPU was measured: try both (hobbit-bench --baseline)",
        ),
        (_, Fit::Part(share)) if facts.missing() == 0 && share.experts > 0.999 => say(
            Program::Hobbit,
            "the model just fits: hobbit keeps all experts in memory, and the whole process within its budget",
        ),
        (_, Fit::Part(share)) => (
            Program::Hobbit,
            format!(
                "the model does not fit{}: hobbit keeps about {:.0} of its experts in memory{}, and reads the others \
                 when they are needed{}",
                facts.asked.map_or(String::new(), |asked| format!(" in the {} that you gave", Bytes(asked))),
                Percent(share.experts),
                share.on_device.map_or("", |_| " and on the device"),
                facts.roomier().map_or(String::new(), |bytes| {
                    format!(". It would fit in the {} that are free: leave the limit out", Bytes(bytes))
                })
            ),
        ),
        (_, Fit::Unknown(why)) => (Program::Hobbit, format!("not forecast ({why}); hobbit decides when it loads")),
    }
}

fn flags(facts: &Facts, program: Program) -> Vec<Reasoned> {
    let mut flags =
        vec![because(format!("-m {}", quoted(&facts.file)), "the model; hobbit chooses all else by itself")];
    if let Some(asked) = facts.asked.filter(|_| program != Program::LlamaCpp) {
        let why = "at most so much memory for the whole process, as you asked";
        flags.push(because(format!("--mem-budget {}MiB", asked >> 20), why));
    }
    if let Some(ctx) = facts.ctx {
        flags.push(because(format!("-c {ctx}"), "the context, as you asked"));
    }
    flags
}

fn before(facts: &Facts) -> Vec<Reasoned> {
    let mut before = Vec::new();
    if let Some(limit) = facts.address_space {
        let why = format!("{} of addresses are allowed, and hobbit reserves addresses for all experts", Bytes(limit));
        before.push(because("ulimit -v unlimited", why));
    }
    if let Some(why) = facts.no_direct.as_ref().filter(|why| why.contains("ulimit -l")) {
        before.push(because("ulimit -l unlimited", format!("direct reads: {why}")));
    }
    before
}

fn faster(facts: &Facts) -> Vec<Reasoned> {
    let Fit::Part(share) = facts.fit else { return Vec::new() };
    let mut faster = Vec::new();
    if share.below_token {
        let why = "one token uses more experts than have room: other programs should give memory back, or a smaller \
                   quant helps most";
        faster.push(because("more memory", why));
    }
    if share.reads_limit {
        faster.push(because("--mirror PATH", "reads from a copy on a second disk as well; exact"));
        faster.push(because("--cache-bias 0.1", "prefers experts in memory; approximate (docs/ROUTING.md)"));
        if facts.kind != Kind::Pack {
            let why = "reads experts of little weight in low precision; approximate, and makes a file beside the model \
                       (docs/PRECISION.md)";
            faster.push(because("--low auto", why));
        }
    }
    faster
}

fn llama_cpp(facts: &Facts) -> String {
    let missing = facts.missing();
    match (facts.kind, &facts.fit) {
        (Kind::Pack, _) => "refuses the file; gguf-tools unpack makes a plain model of it".to_owned(),
        (_, Fit::Memory | Fit::Device) => "runs it: everything stays in memory".to_owned(),
        (_, Fit::Unknown(_)) if facts.room.is_none() => "maps the file; whether it fits is not known".to_owned(),
        (Kind::Dense, _) if missing > 0 => format!(
            "reads at least {} from the disk again for every token, because all weights are used",
            Bytes(missing)
        ),
        (_, Fit::Part(share)) if missing == 0 && share.on_device.is_some() => {
            "keeps layers on the device as far as they fit, and computes the other experts on the CPU".to_owned()
        }
        _ if missing > 0 => format!(
            "has no room for {}: it reads parts of them from the disk again and again (page faults), and the system \
             decides what stays in memory",
            Bytes(missing)
        ),
        _ => "maps the file, and has little room beside it".to_owned(),
    }
}

/// A word for a shell; names of files on Windows have no quotation marks.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.+=,:@".contains(letter);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false if cfg!(windows) => format!("\"{word}\""),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::units::GIB;

    const SHARE: Share = Share { experts: 0.25, on_device: None, below_token: false, reads_limit: true };

    fn facts(kind: Kind, fit: Fit) -> Facts {
        Facts {
            file: "model.gguf".to_owned(),
            kind,
            bytes: 20 * GIB,
            room: Some(if fit == Fit::Memory { 32 * GIB } else { 8 * GIB }),
            available: None,
            asked: None,
            ctx: None,
            fit,
            address_space: None,
            no_direct: None,
        }
    }

    fn names(reasoned: &[Reasoned]) -> Vec<&str> {
        reasoned.iter().map(|reasoned| &*reasoned.what).collect()
    }

    #[test]
    fn llama_cpp_is_named_where_hobbit_brings_nothing() {
        for (kind, fit) in [(Kind::Dense, Fit::Memory), (Kind::Experts, Fit::Memory), (Kind::Experts, Fit::Device)] {
            let choice = choose(&facts(kind, fit.clone()));
            assert_eq!(choice.program, Program::LlamaCpp, "{kind:?} {fit:?}");
            assert!(choice.why.contains("use llama.cpp"), "{}", choice.why);
            assert_eq!(choice.command.as_deref(), Some("llama-cli -m model.gguf"));
            assert!(choice.faster.is_empty() && choice.before.is_empty());
        }
        let large = choose(&facts(Kind::Dense, Fit::Part(SHARE)));
        assert!(
            large.why.contains("smaller quant") && large.llama_cpp.contains("12.00 GiB from the disk again"),
            "{large:?}"
        );
    }

    #[test]
    fn a_model_that_does_not_fit_is_hobbits() {
        let choice = choose(&facts(Kind::Experts, Fit::Part(SHARE)));
        assert_eq!((choice.program, choice.command.as_deref()), (Program::Hobbit, Some("hobbit-cli -m model.gguf")));
        assert!(choice.why.contains("25 %") && choice.llama_cpp.contains("no room for 12.00 GiB"), "{choice:?}");
        let asked = |available| Facts { asked: Some(8 * GIB), available, ..facts(Kind::Experts, Fit::Part(SHARE)) };
        let why = |available| choose(&asked(available)).why;
        assert!(why(Some(23 * GIB)).ends_with("fit in the 23.00 GiB that are free: leave the limit out"));
        assert!(!why(Some(21 * GIB)).contains("free") && !why(None).contains("free"));
        assert_eq!(names(&choice.faster), ["--mirror PATH", "--cache-bias 0.1", "--low auto"]);
        let computes = Share { reads_limit: false, ..SHARE };
        assert!(choose(&facts(Kind::Experts, Fit::Part(computes))).faster.is_empty());
        let tiny = Share { below_token: true, ..computes };
        assert_eq!(names(&choose(&facts(Kind::Experts, Fit::Part(tiny))).faster), ["more memory"]);
    }

    #[test]
    fn every_flag_of_the_command_has_a_reason() {
        let asked = Facts {
            file: "my model.gguf".to_owned(),
            asked: Some(8 * GIB),
            ctx: Some(8192),
            address_space: Some(4 * GIB),
            no_direct: Some("io_uring may lock no more memory (raise RLIMIT_MEMLOCK: ulimit -l)".to_owned()),
            ..facts(Kind::Experts, Fit::Part(SHARE))
        };
        let choice = choose(&asked);
        let model = format!("-m {}", if cfg!(windows) { "\"my model.gguf\"" } else { "'my model.gguf'" });
        assert_eq!(choice.command.unwrap(), format!("hobbit-cli {model} --mem-budget 8192MiB -c 8192"));
        assert_eq!(names(&choice.flags), [&*model, "--mem-budget 8192MiB", "-c 8192"]);
        assert!(choice.flags.iter().all(|flag| !flag.why.is_empty()));
        assert_eq!(names(&choice.before), ["ulimit -v unlimited", "ulimit -l unlimited"]);
        assert_eq!(quoted("it's"), if cfg!(windows) { "\"it's\"" } else { r"'it'\''s'" });
    }

    #[test]
    fn devices_packs_and_models_without_room() {
        let share = Share { on_device: Some(GIB), ..SHARE };
        let beside = Facts { room: Some(32 * GIB), ..facts(Kind::Experts, Fit::Part(share)) };
        let either = choose(&beside);
        assert!(either.program == Program::Either && either.why.contains("hobbit-bench --baseline"), "{either:?}");
        let lacks = choose(&facts(Kind::Experts, Fit::Part(share)));
        assert!(lacks.program == Program::Hobbit && lacks.why.contains("in memory and on the device"), "{lacks:?}");
        assert!(lacks.llama_cpp.contains("no room for 11.00 GiB"), "{lacks:?}");
        // 8 GiB of memory and 24 GiB of a device hold 20 GiB.
        let card = Share { on_device: Some(24 * GIB), experts: 1.0, reads_limit: false, ..SHARE };
        let together = choose(&facts(Kind::Experts, Fit::Part(card)));
        assert!(together.program == Program::Either && together.llama_cpp.contains("computes"), "{together:?}");
        let tight = Facts { room: Some(20 * GIB), ..facts(Kind::Experts, Fit::Part(Share { experts: 1.0, ..SHARE })) };
        assert!(choose(&tight).why.starts_with("the model just fits"), "{:?}", choose(&tight));

        let pack = choose(&facts(Kind::Pack, Fit::Unknown("an expert pack".to_owned())));
        assert!(pack.program == Program::Hobbit && pack.llama_cpp.contains("unpack"), "{pack:?}");
        let none = choose(&facts(Kind::Experts, Fit::Nothing("needs 9 GiB".to_owned())));
        assert_eq!((none.program, none.command, &*none.why), (Program::Neither, None, "needs 9 GiB"));
        let unknown = Facts { room: None, ..facts(Kind::Experts, Fit::Unknown("no memory is known".to_owned())) };
        assert!(choose(&unknown).llama_cpp.contains("not known"));
    }
}
