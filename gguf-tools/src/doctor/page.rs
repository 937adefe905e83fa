//! The page as text.

use std::fmt::{self, Write as _};

use hobbit::DeviceKind;
use hobbit_core::plan::BudgetSource;
use hobbit_core::units::{Bytes, Percent, ShortBytes};

use super::choice::Program;
use super::disk::{Disk, Reads};
use super::exact::Comparison;
use super::host::{Memory, Processor, Ulimits};
use super::{Advised, Device, Part, Report};
use crate::inspect::forecast::{self, Short, rate};

const GROUP: &str = BudgetSource::GROUP;
/// Columns of the page, and of its labels.
const WIDTH: usize = 110;
const LABEL: usize = 12;

/// Prints a labelled text.
fn row(f: &mut fmt::Formatter<'_>, label: &str, text: &str) -> fmt::Result {
    writeln!(f, "{label:<LABEL$}{text}")
}

/// Wraps the long lines of a page. They continue below their text.
pub fn wrapped(page: &str) -> String {
    let mut out = String::new();
    for text in page.lines() {
        let indent = text_column(text).unwrap_or(LABEL);
        let (mut columns, mut is_empty) = (0, true);
        for word in text.split(' ') {
            let width = word.chars().count();
            if !is_empty && columns >= indent && columns + 1 + width > WIDTH {
                out.truncate(out.trim_end_matches(' ').len());
                let _ = write!(out, "\n{:indent$}", "");
                (columns, is_empty) = (indent, true);
            }
            if !is_empty {
                out.push(' ');
                columns += 1;
            }
            out.push_str(word);
            columns += width;
            is_empty = false;
        }
        out.truncate(out.trim_end_matches(' ').len());
        out.push('\n');
    }
    out
}

/// The column of a line's text, behind a label or none and several spaces.
fn text_column(line: &str) -> Option<usize> {
    let label = line.find("  ")?;
    let gap = line[label..].find(|letter| letter != ' ')?;
    Some(line[..label].chars().count() + gap)
}

/// A part in words, or why it is missing.
fn words<T>(part: &Part<T>, known: impl Fn(&T) -> String) -> String {
    match part {
        Part::Known(value) => known(value),
        Part::Unknown { not_measured } => format!("not measured: {not_measured}"),
    }
}

fn size(part: &Part<u64>) -> String {
    words(part, |bytes| Bytes(*bytes).to_string())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(model) = &self.model {
            row(f, "model", &format!("{}, {}", model.file, Bytes(model.tensor_bytes)))?;
            choice(f, model)?;
            writeln!(f)?;
        }
        row(f, "hobbit", &format!("{}, {}", self.hobbit, self.system))?;
        row(f, "llama.cpp", &format!("{}; backends {}", self.llama_cpp, self.backends.join(", ")))?;
        if let Some(others) = &self.other_backends {
            let others = others.join(", ");
            row(f, "", &format!("hobbit-cli has the backends {others}: build gguf-tools with the same features"))?;
        }
        processor(f, &self.processor)?;
        memory(f, &self.memory)?;
        match &self.disk {
            Part::Known(found) => disk(f, found)?,
            unknown => row(f, "disk", &words(unknown, |_| String::new()))?,
        }
        match &self.devices {
            Part::Known(all) if all.is_empty() => {
                row(f, "devices", "none that this build can use (a GPU needs a build with cuda or vulkan)")?
            }
            Part::Known(all) => all.iter().try_for_each(|found| device(f, found))?,
            unknown => row(f, "devices", &words(unknown, |_| String::new()))?,
        }
        for found in &self.exactness {
            let text = format!("{}: {}", found.on, words(&found.outcome, comparison));
            row(f, "exactness", &text)?;
        }
        if self.exactness.iter().any(|found| found.outcome.known().is_some()) {
            row(
                f,
                "",
                "(a self-test: hobbit with a quarter of the demo model's experts in memory, and plain llama.cpp)",
            )?;
        }
        match &self.model {
            Some(model) => {
                writeln!(f)?;
                forecast(f, model)?;
            }
            None => {
                row(f, "next", "gguf-tools doctor MODEL.gguf: what fits, how fast it will be, and the command to use")?
            }
        }
        writeln!(f, "\nmeasured in {:.0} s", self.seconds)
    }
}

fn processor(f: &mut fmt::Formatter<'_>, found: &Processor) -> fmt::Result {
    let name = words(&found.name, Clone::clone);
    let cores = words(&found.cores, |cores| format!("{cores} cores"));
    let mut text = format!("{name}, {cores}, usable {}", found.usable);
    for limit in &found.limits {
        let _ = write!(text, "; {limit}");
    }
    if let Some(load) = found.load {
        let _ = write!(text, "; load {load:.1}");
    }
    row(f, "processor", &text)?;
    let used = if found.used.is_empty() { "none named".to_owned() } else { found.used.join(" ") };
    row(f, "kernels", &used)?;
    // Whether llama.cpp has AMX is decided by the C++ compiler, too.
    let (amx, left_out): (Vec<&str>, Vec<&str>) =
        found.left_out.iter().map(String::as_str).partition(|name| *name == "AMX_INT8");
    if !left_out.is_empty() {
        let how = match cfg!(windows) {
            true => "CPU=NAME contrib/windows.sh builds for it (znver5, sapphirerapids; x86-64-v4 for any with AVX512)",
            false => "build with -C target-cpu=native, the checkout's setting",
        };
        let left_out = left_out.join(" ");
        row(f, "", &format!("the processor also has {left_out}, which this build leaves out: {how}"))?;
    }
    if !amx.is_empty() {
        let how = "it takes target-cpu=native, and a C++ compiler that does not miscompile it (HOBBIT_AMX)";
        row(f, "", &format!("the processor's AMX is left out: {how}"))?;
    }
    Ok(())
}

fn memory(f: &mut fmt::Formatter<'_>, found: &Memory) -> fmt::Result {
    let mut text = format!("{} in all, {} available", size(&found.total), size(&found.available));
    if let Some(swap) = found.swap {
        let _ = write!(text, ", swap {}", Bytes(swap));
    }
    let _ = match found.cgroup {
        Some((limit, left)) => write!(text, "; {GROUP} {}, {} left", Bytes(limit), Bytes(left)),
        None => write!(text, "; no {GROUP} limits it"),
    };
    row(f, "memory", &text)?;
    let limit = |bytes: Option<u64>| bytes.map_or("unlimited".to_owned(), |bytes| Bytes(bytes).to_string());
    if let Some(Ulimits { address_space, locked }) = found.ulimits {
        let (space, locked) = (limit(address_space), limit(locked));
        row(f, "limits", &format!("address space {space} (ulimit -v), locked memory {locked} (ulimit -l)"))?;
    }
    let from = found.budget_from.as_ref().map_or(String::new(), |from| format!(", by {from}"));
    row(f, "budget", &format!("{}{from}: what hobbit takes without --mem-budget", size(&found.budget)))
}

fn disk(f: &mut fmt::Formatter<'_>, found: &Disk) -> fmt::Result {
    let place = words(&found.place, |place| {
        let mut text = place.file_system.clone();
        if let Some(device) = &place.device {
            let _ = write!(text, " on {device}");
        }
        match place.rotational {
            Some(true) => text.push_str(" (rotational, the system says)"),
            Some(false) => text.push_str(" (not rotational)"),
            None => {}
        }
        let _ = match place.read_ahead_kib {
            Some(kib) => write!(text, ", read-ahead {kib} KiB"),
            None if cfg!(target_os = "linux") => write!(text, ", read-ahead not known"),
            None => Ok(()),
        };
        text
    });
    let works = |part: &Part<bool>| match part {
        Part::Known(_) => "works".to_owned(),
        Part::Unknown { not_measured } => format!("does not work: {not_measured}"),
    };
    let direct = if cfg!(target_os = "linux") { "O_DIRECT" } else { "reading past the system's cache" };
    let mut text = format!("{}: {place}; {direct} {}", found.file, works(&found.direct));
    if cfg!(target_os = "linux") {
        let _ = write!(text, "; io_uring {}", works(&found.io_uring));
    }
    row(f, "disk", &text)?;
    if let Some(quirk) = found.place.known().and_then(|place| place.quirk) {
        row(f, "", quirk)?;
    }
    let what = if found.is_expert { ", a slice of an expert" } else { "" };
    row(f, "", &format!("random reads of {}{what}, by reads at a time:", ShortBytes(found.read_bytes)))?;
    for kind in ["direct", "buffered"] {
        let known = found.reads.iter().filter_map(Part::known).filter(|reads| reads.kind == kind);
        let figures: Vec<String> = known.map(speed).collect();
        if !figures.is_empty() {
            row(f, "", &format!("{kind:<8} {}", figures.join(", ")))?;
        }
    }
    let missing = found.reads.iter().filter(|reads| reads.known().is_none());
    missing.into_iter().try_for_each(|reads| row(f, "", &words(reads, |_| String::new())))
}

fn speed(reads: &Reads) -> String {
    if reads.kind == "buffered" && reads.from_disk.is_some_and(|share| share < 0.5) {
        return format!("{}: already in memory", reads.depth);
    }
    let mut text = format!("{}: {}", reads.depth, rate(reads.bytes_per_second));
    if reads.kind == "buffered" {
        let _ = match reads.from_disk {
            Some(share) => write!(text, " ({:.0} from the disk)", Percent(share)),
            None => write!(text, " (the page cache's share is not known)"),
        };
    }
    text
}

fn device(f: &mut fmt::Formatter<'_>, found: &Device) -> fmt::Result {
    let info = &found.info;
    let kind = match info.kind {
        DeviceKind::Integrated => "integrated",
        DeviceKind::Accelerator => "helper of the CPU",
        DeviceKind::Gpu | DeviceKind::Cpu => "with memory of its own",
    };
    let unified = if info.unified { ", experts in place in host memory" } else { "" };
    let copies = words(&found.copies, |speed| {
        let pinned = speed.pinned.map_or("it pins none".to_owned(), rate);
        format!("copies from pinned memory {pinned}, from ordinary memory {}", rate(speed.pageable))
    });
    let memory = format!("{} of {} free", Bytes(info.free), Bytes(info.total));
    row(f, "device", &format!("{} {}: {kind}{unified}, {memory}; {copies}", info.name, info.description))
}

fn comparison(found: &Comparison) -> String {
    let Comparison { evaluations, broken, equal, same_token, kl_mean, kl_max } = found;
    if *broken > 0 {
        return format!("WRONG: the logits of {broken} of {evaluations} evaluations have no finite values");
    }
    if equal == evaluations {
        return format!("the results are llama.cpp's, bit for bit, in all {evaluations} evaluations");
    }
    format!(
        "equal bits in {equal} of {evaluations} evaluations, same most probable token in {same_token}; KL divergence \
         {kl_mean:.1e} (at most {kl_max:.1e})"
    )
}

fn forecast(f: &mut fmt::Formatter<'_>, found: &Advised) -> fmt::Result {
    match &found.forecast {
        Part::Known(report) => write!(f, "{}", Short(report)),
        Part::Unknown { not_measured } => row(f, "forecast", &format!("none: {not_measured}")),
    }
}

fn choice(f: &mut fmt::Formatter<'_>, found: &Advised) -> fmt::Result {
    let choice = &found.choice;
    let verdict = match choice.program {
        Program::Hobbit => "hobbit",
        Program::LlamaCpp => "llama.cpp",
        Program::Either => "hobbit or llama.cpp",
        Program::Neither => "none",
    };
    row(f, "program", &format!("{verdict}: {}", choice.why))?;
    for step in &choice.before {
        row(f, "before", &format!("{}    {}", step.what, step.why))?;
    }
    if let Some(command) = &choice.command {
        if let Some(speed) = found.forecast.known().and_then(forecast::Report::in_short) {
            row(f, "speed", &speed)?;
        }
        row(f, "command", command)?;
    }
    for flag in &choice.flags {
        row(f, "", &format!("{}: {}", flag.what, flag.why))?;
    }
    for flag in &choice.faster {
        row(f, "faster", &format!("{}: {}", flag.what, flag.why))?;
    }
    row(f, "llama.cpp", &format!("alone {}", choice.llama_cpp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_continue_below_their_text() {
        let words = ["word"; 30].join(" ");
        let text = wrapped(&format!("label       {words}\n\nlimited by     {words}\n"));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines[0].starts_with("label       word word") && lines[0].len() <= WIDTH, "{text}");
        assert!(lines[1].starts_with("            word") && lines[4].starts_with("               word"), "{text}");
        for same in ["label       direct   1: fast\n", "            (none)\n", "\n", "one line without a label\n"] {
            assert_eq!(wrapped(same), same);
        }
        let below = wrapped(&format!("            {words}\n"));
        assert!(below.lines().all(|line| line.starts_with("            word")), "{below}");
    }

    #[test]
    fn exactness_and_missing_parts_in_words() {
        let equal = Comparison { evaluations: 17, broken: 0, equal: 17, same_token: 17, kl_mean: 0.0, kl_max: 0.0 };
        assert!(comparison(&equal).ends_with("bit for bit, in all 17 evaluations"));
        let differs = comparison(&Comparison { equal: 3, same_token: 16, kl_mean: 2.5e-7, kl_max: 1e-6, ..equal });
        assert!(differs.contains("3 of 17") && differs.contains("2.5e-7 (at most 1.0e-6)"), "{differs}");
        assert!(comparison(&Comparison { broken: 2, ..equal }).starts_with("WRONG: the logits of 2 of 17"));
        assert_eq!(size(&Part::unknown("no /proc")), "not measured: no /proc");
        assert_eq!(size(&Part::Known(1 << 30)), "1.00 GiB");
    }
}
