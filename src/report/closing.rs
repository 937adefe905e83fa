//! The closing lines: speeds, hits, reads, and the reasons for them.

use std::fmt::Write as _;

use super::{Line, brief, detail, efficiency, roofline};
use hobbit::stats::{DeviceCounters, DeviceReport, PhaseStats, PrecisionReport, PrefetchReport, Stats};
use hobbit_core::units::{Bytes, Percent, Seconds};

/// The measurements of a run and how it ended.
pub struct Closing<'a> {
    pub stats: &'a Stats,
    pub precision: &'a PrecisionReport,
    pub devices: &'a [DeviceReport],
    /// Whether the model ended the text.
    pub is_eog: bool,
    /// `None` if sampling is not random.
    pub seed: Option<u32>,
    /// Whether the seed was drawn because none was given.
    pub is_seed_drawn: bool,
}

/// The closing lines: four brief ones at most, then details.
pub fn lines(run: &Closing) -> Vec<Line> {
    let stats = run.stats;
    let phases = [("prompt", &stats.prompt), ("decode", &stats.decode)];
    let mut lines = Vec::new();
    for (name, phase) in phases {
        if let (tokens @ 1.., Some(rate)) = (phase.tokens, phase.tokens_per_second()) {
            let (s, time) = (if tokens == 1 { "" } else { "s" }, Seconds(phase.seconds));
            lines.push(brief(format!("{name}: {tokens} token{s} in {time}, {rate:.2} tokens/s")));
        }
    }
    if let Some(last) = lines.last_mut() {
        if let Some(latency) = &stats.latency {
            let _ = write!(last.text, "; {latency}");
        }
        if run.is_eog {
            last.text += "; end of text";
        }
    }
    // A dense model has no hit rate.
    let mut counted = phases.into_iter().rev().filter(|(_, phase)| phase.hit_rate().is_some());
    lines.extend(counted.next().map(|(name, phase)| brief(experts(name, phase, run))));
    let drawn = if run.is_seed_drawn { " (drawn; repeat with -s)" } else { "" };
    let seed = run.seed.map(|seed| format!("seed {seed}{drawn}"));
    let peak = (stats.peak_rss_bytes > 0).then(|| format!("peak memory {}", Bytes(stats.peak_rss_bytes)));
    let last: Vec<String> = seed.into_iter().chain(peak).collect();
    if !last.is_empty() {
        lines.push(brief(last.join(", ")));
    }
    lines.extend(counted.next().map(|(name, phase)| detail(experts(name, phase, run))));
    lines.extend(phases.into_iter().filter_map(|(name, phase)| traffic(name, phase, run)).map(detail));
    lines.extend(bound(stats).map(detail));
    let upgrades = stats.total().upgrades;
    if upgrades > 0 {
        let experts = if upgrades == 1 { "expert" } else { "experts" };
        lines.push(detail(format!("{upgrades} {experts} upgraded from low to high precision")));
    }
    lines.extend(stats.prefetch.as_ref().map(|report| detail(prefetch(report))));
    if !stats.kernels.trials.is_empty() {
        lines.push(detail(stats.kernels.to_string()));
    }
    lines.extend(run.devices.iter().zip(&stats.devices).filter_map(|(report, done)| device(report, done)).map(detail));
    lines
}

/// Hits and misses of a phase.
fn experts(name: &str, phase: &PhaseStats, run: &Closing) -> String {
    let hit_rate = Percent(phase.hit_rate().unwrap_or(0.0));
    let per_token = Bytes(phase.bytes_read / phase.tokens.max(1));
    let (waited, time) = (Seconds(phase.io_wait_seconds), Seconds(phase.seconds));
    let mut line =
        format!("experts in {name}: hit rate {hit_rate}, {per_token} read per token, waited {waited} of {time}");
    if let Some(shares) = phase.used.shares().filter(|_| run.precision.is_dynamic()) {
        let _ = write!(line, "; computed {shares}");
    }
    let rerouted = (phase.used.total() > 0).then(|| phase.rerouted.uses as f64 / phase.used.total() as f64);
    if let (Some(share), true) = (rerouted, run.precision.routing.is_some()) {
        let _ = write!(line, "; {} of uses went to experts in memory", Percent(share));
        if phase.rerouted.refused > 0 {
            let refused = phase.rerouted.refused;
            let _ = write!(line, " ({refused} choices were not understood and left alone)");
        }
    }
    if let (Some(changed), "decode") = (run.stats.virtual_experts, name) {
        let (n, period) = (changed.replacements, changed.period_tokens);
        let _ = write!(line, "; {n} experts changed meanwhile, one of a layer in {period} tokens");
        if changed.failed > 0 {
            let _ = write!(line, " ({} could not be read)", changed.failed);
        }
    }
    for (device, counters) in run.devices.iter().zip(&run.stats.devices) {
        if let Some(rate) = counters.hit_rate() {
            let _ = write!(line, "; {}: hit rate {}", device.name, Percent(rate));
        }
    }
    line
}

/// The counts behind [`experts`].
fn traffic(name: &str, phase: &PhaseStats, run: &Closing) -> Option<String> {
    phase.hit_rate()?;
    let (hits, misses, read) = (phase.hits, phase.misses, Bytes(phase.bytes_read));
    let mut line = format!("{name}: {hits} hits, {misses} misses, {read} read");
    if let Some(rate) = phase.read_bandwidth() {
        let _ = write!(line, " at {}/s", Bytes(rate as u64));
    }
    if run.precision.is_dynamic() {
        let _ = write!(line, "; where no high version was resident: {}", phase.missed);
    }
    Some(line)
}

/// How close decoding came to its bounds.
fn bound(stats: &Stats) -> Option<String> {
    stats.decode.hit_rate()?;
    let reached = stats.decode.tokens_per_second()?;
    let Some(roofline) = roofline(stats) else { return Some("decode: not bound by I/O".to_owned()) };
    let share = Percent(reached / roofline);
    let mut line = format!("decode: {share:.0} of the I/O roofline of {roofline:.2} tokens/s");
    if let Some(share) = efficiency(stats) {
        let _ = write!(line, ", {:.0} of the speed with reading and computing at once", Percent(share));
    }
    Some(line)
}

fn prefetch(report: &PrefetchReport) -> String {
    let counters = &report.counters;
    let percent = |part: u64| (100 * part).checked_div(counters.issued).unwrap_or(0);
    let mut line = format!(
        "prefetch: {} experts read ahead ({} % in time, {} % late, {} % not used)",
        counters.issued,
        percent(counters.useful),
        percent(counters.late),
        percent(counters.wasted)
    );
    for recall in &report.recall {
        let _ = write!(line, ", {} predicted {} ahead", Percent(recall.recall.unwrap_or(0.0)), recall.distance);
    }
    let word = if report.governor.is_on { "on" } else { "off" };
    let _ = write!(line, "; {word}: {}", report.governor.reason);
    line
}

fn device(device: &DeviceReport, done: &DeviceCounters) -> Option<String> {
    done.hit_rate()?;
    let (name, hits, misses) = (&device.name, done.hits, done.misses);
    let mut line = format!("{name}: {hits} hits, {misses} misses, {} copied there", Bytes(done.uploaded_bytes));
    if let Some(percent) = (100 * done.ahead_used).checked_div(done.ahead) {
        let _ = write!(line, "; {} experts copied ahead ({percent} % used)", done.ahead);
    }
    if done.helper_experts > 0 {
        let _ = write!(line, "; {} on the CPU in {}", done.helper_experts, Seconds(done.helper_seconds));
    }
    if done.cache_shrunk > 0 {
        let _ = write!(line, "; out of memory, {} slots are left", device.slots);
    }
    Some(line)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::start::tests::exact;
    use super::*;
    use hobbit::options::PrecisionMode;
    use hobbit::stats::PrecisionCounts;

    const MIB: u64 = 1 << 20;

    pub fn stats() -> Stats {
        let decode = PhaseStats {
            tokens: 20,
            seconds: 0.2,
            hits: 75,
            misses: 25,
            used: PrecisionCounts { high: 134, low: 60, skipped: 6 },
            missed: PrecisionCounts { high: 10, low: 12, skipped: 3 },
            rerouted: Default::default(),
            upgrades: 2,
            slices_loaded: 75,
            bytes_read: 1 << 30,
            io_busy_seconds: 0.1,
            io_wait_seconds: 0.05,
        };
        Stats { decode, peak_rss_bytes: 3 << 29, ..Stats::default() }
    }

    fn closing<'a>(stats: &'a Stats, precision: &'a PrecisionReport) -> Closing<'a> {
        Closing { stats, precision, devices: &[], is_eog: false, seed: Some(7), is_seed_drawn: false }
    }

    fn texts(run: &Closing, is_brief: bool) -> Vec<String> {
        lines(run).into_iter().filter(|line| line.is_brief == is_brief).map(|line| line.text).collect()
    }

    #[test]
    fn four_lines_at_the_end() {
        let mut stats = stats();
        stats.prompt = PhaseStats { tokens: 10, seconds: 0.05, ..PhaseStats::default() };
        stats.decode.bytes_read = 20 * MIB;
        let precision = exact();
        assert_eq!(
            texts(&closing(&stats, &precision), true),
            [
                "prompt: 10 tokens in 0.05 s, 200.00 tokens/s",
                "decode: 20 tokens in 0.20 s, 100.00 tokens/s",
                "experts in decode: hit rate 75.0 %, 1.00 MiB read per token, waited 0.05 s of 0.20 s",
                "seed 7, peak memory 1.50 GiB",
            ]
        );
        let dynamic = PrecisionReport { mode: PrecisionMode::Dynamic, ..exact() };
        let run = Closing { is_eog: true, is_seed_drawn: true, ..closing(&stats, &dynamic) };
        let lines = texts(&run, true);
        assert!(lines[1].ends_with("; end of text") && lines[3].starts_with("seed 7 (drawn; repeat with -s), "));
        assert!(lines[2].ends_with("; computed 67.0 % high, 30.0 % low, 3.0 % skipped"), "{}", lines[2]);
    }

    #[test]
    fn details() {
        let (stats, precision) = (stats(), exact());
        let counts = "decode: 75 hits, 25 misses, 1.00 GiB read at 10.00 GiB/s";
        let bound =
            "decode: 50 % of the I/O roofline of 200.00 tokens/s, 75 % of the speed with reading and computing at once";
        let upgrades = "2 experts upgraded from low to high precision";
        assert_eq!(texts(&closing(&stats, &precision), false), [counts, bound, upgrades]);
        let dynamic = PrecisionReport { mode: PrecisionMode::Dynamic, ..exact() };
        let missed = format!("{counts}; where no high version was resident: 10 high, 12 low, 3 skipped");
        assert_eq!(texts(&closing(&stats, &dynamic), false)[0], missed);
        let both = Stats { prompt: stats.decode, ..stats };
        let lines_of_both = texts(&closing(&both, &precision), false);
        assert!(lines_of_both[0].starts_with("experts in prompt: hit rate 75.0 %"), "{lines_of_both:?}");
        let none = Stats::default();
        let run = closing(&none, &precision);
        assert_eq!(lines(&run), [brief("seed 7")], "a dense model, and no tokens");
        assert!(lines(&Closing { seed: None, ..run }).is_empty(), "greedy");
    }

    #[test]
    fn devices() {
        let counters = DeviceCounters {
            hits: 30,
            misses: 10,
            uploads: 30,
            uploaded_bytes: 40 * MIB,
            ahead: 8,
            ahead_used: 6,
            helper_experts: 5,
            helper_seconds: 0.5,
            cache_shrunk: 1,
        };
        let report = DeviceReport { name: "CUDA0".into(), slots: 8, ..DeviceReport::default() };
        assert_eq!(
            device(&report, &counters).unwrap(),
            "CUDA0: 30 hits, 10 misses, 40.00 MiB copied there; 8 experts copied ahead (75 % used); 5 on the CPU in \
             0.50 s; out of memory, 8 slots are left"
        );
        assert_eq!(device(&report, &DeviceCounters::default()), None);
    }
}
