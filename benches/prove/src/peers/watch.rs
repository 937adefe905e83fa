//! A program and what it starts, looked at from outside.

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use hobbit_programs::bench::record::Moment;
use hobbit_programs::bench::start;
use hobbit_programs::measure::process::Footprint;

/// Between two looks at a program.
const LOOK: Duration = Duration::from_millis(100);

/// What was seen of a process group.
#[derive(Default)]
pub struct Seen {
    pub series: Vec<Moment>,
    /// Of the resident set.
    pub peak: u64,
    /// Whether its time was over.
    pub timed_out: bool,
}

/// Looks at all processes of a process group, and ends them when their time is over.
pub struct Watch {
    end: mpsc::Sender<()>,
    thread: thread::JoinHandle<Seen>,
}

impl Watch {
    /// Begins to look.
    pub fn start(group: u32, started: Instant, timeout: Duration) -> Self {
        let (end, is_over) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut seen = Seen::default();
            loop {
                let now: Vec<Footprint> = members(group).iter().filter_map(|process| Footprint::of(process)).collect();
                let sum = |part: fn(&Footprint) -> u64| now.iter().map(part).sum::<u64>();
                // One alone tells its own peak.
                let peak = if let [one] = &now[..] { one.peak_rss } else { sum(|one| one.rss) };
                seen.peak = seen.peak.max(peak);
                if !now.is_empty() {
                    seen.series.push(Moment {
                        t_ns: started.elapsed().as_nanos() as u64,
                        rss: sum(|one| one.rss),
                        anon: sum(|one| one.anon),
                        heap: None,
                        fds: now.iter().map(|one| one.fds).sum(),
                        threads: now.iter().map(|one| one.threads).sum(),
                        tokens: 0,
                    });
                }
                if !seen.timed_out && started.elapsed() > timeout {
                    seen.timed_out = true;
                    start::kill_group(group);
                }
                if is_over.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout) {
                    return seen;
                }
            }
        });
        Self { end, thread }
    }

    /// What was seen.
    pub fn stop(self) -> Seen {
        drop(self.end);
        self.thread.join().unwrap_or_default()
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
