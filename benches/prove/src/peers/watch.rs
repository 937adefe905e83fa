//! A program and what it starts, looked at from outside.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hobbit_programs::bench::record::Moment;
use hobbit_programs::bench::start;
use hobbit_programs::measure::process::Footprint;

/// Between two looks at a program.
const LOOK: Duration = Duration::from_millis(100);

/// Looks at all processes of a process group, and ends them when their time is over.
pub struct Watch {
    is_over: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: thread::JoinHandle<(Vec<Moment>, bool)>,
}

impl Watch {
    /// Begins to look.
    pub fn start(group: u32, started: Instant, timeout: Duration) -> Self {
        let (is_over, peak) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (end, most) = (Arc::clone(&is_over), Arc::clone(&peak));
        let thread = thread::spawn(move || {
            let (mut series, mut timed_out) = (Vec::new(), false);
            while !end.load(Ordering::Acquire) {
                let now: Vec<Footprint> = members(group).iter().filter_map(|process| Footprint::of(process)).collect();
                let sum = |part: fn(&Footprint) -> u64| now.iter().map(part).sum::<u64>();
                // One alone tells its own peak.
                let peak = if let [one] = &now[..] { one.peak_rss } else { sum(|one| one.rss) };
                most.fetch_max(peak, Ordering::Relaxed);
                if !now.is_empty() {
                    series.push(Moment {
                        t_ns: started.elapsed().as_nanos() as u64,
                        rss: sum(|one| one.rss),
                        anon: sum(|one| one.anon),
                        heap: None,
                        fds: now.iter().map(|one| one.fds).sum(),
                        threads: now.iter().map(|one| one.threads).sum(),
                        tokens: 0,
                    });
                }
                if !timed_out && started.elapsed() > timeout {
                    timed_out = true;
                    start::kill_group(group);
                }
                thread::park_timeout(LOOK);
            }
            (series, timed_out)
        });
        Self { is_over, peak, thread }
    }

    /// What was seen, the largest resident set, and whether its time was over.
    pub fn stop(self) -> (Vec<Moment>, u64, bool) {
        self.is_over.store(true, Ordering::Release);
        self.thread.thread().unpark();
        let (series, timed_out) = self.thread.join().unwrap_or_default();
        (series, self.peak.load(Ordering::Relaxed), timed_out)
    }
}

/// Processes of a process group, by number.
fn members(group: u32) -> Vec<String> {
    let group = group.to_string();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().into_string().ok());
    numbers
        .filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
        .filter(|number| {
            let stat = std::fs::read_to_string(Path::new("/proc").join(number).join("stat")).unwrap_or_default();
            // The name, which comes second, may contain blanks and brackets.
            let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
            rest.split(' ').nth(2) == Some(&group)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_in_its_group() {
        // SAFETY: no preconditions.
        let group = unsafe { libc::getpgrp() };
        assert!(members(group as u32).contains(&std::process::id().to_string()));
    }
}
