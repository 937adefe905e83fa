//! All runs of one contestant together.

use super::child::{Counts, Phase};
use super::contestant::Contestant;
use super::roofline::Roofline;
use super::runs::Finished;

/// Sums over runs.
#[derive(Clone, Debug, Default)]
pub struct Total {
    pub runs: usize,
    pub prompt: Rate,
    pub decode: Rate,
    decode_seconds: Vec<f64>,
    roofline_shares: Vec<f64>,
    pub peak_rss_bytes: u64,
    /// hobbit's counts while decoding.
    pub experts: Option<Experts>,
}

/// What decoding did with experts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Experts {
    pub bytes_read: u64,
    pub hits: u64,
    pub misses: u64,
    pub used: Counts,
    pub upgrades: u64,
}

impl Total {
    pub fn of(contestant: Contestant, finished: &[Finished]) -> Self {
        let mut total = Self::default();
        let runs = finished.iter().filter_map(|finished| Some((finished, finished.run.as_ref()?)));
        for (finished, run) in runs.filter(|(_, run)| run.contestant == contestant) {
            total.runs += 1;
            total.prompt.add(&run.prompt);
            total.decode.add(&run.decode);
            total.decode_seconds.extend(&run.decode.step_seconds);
            total.roofline_shares.extend(Roofline::of(finished).map(Roofline::share));
            total.peak_rss_bytes = total.peak_rss_bytes.max(run.peak_rss_bytes);
            if let Some(traffic) = run.decode.experts {
                let experts = total.experts.get_or_insert_default();
                experts.bytes_read += traffic.bytes_read;
                experts.hits += traffic.hits;
                experts.misses += traffic.misses;
                experts.used.high += traffic.used.high;
                experts.used.low += traffic.used.low;
                experts.used.skipped += traffic.used.skipped;
                experts.upgrades += traffic.upgrades;
            }
        }
        total.decode_seconds.sort_by(f64::total_cmp);
        total
    }

    /// Seconds of the median token.
    pub fn decode_median(&self) -> f64 {
        self.decode_seconds.get(self.decode_seconds.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// Mean over runs, of what the disk allows.
    pub fn roofline_share(&self) -> Option<f64> {
        let n = self.roofline_shares.len();
        (n > 0).then(|| self.roofline_shares.iter().sum::<f64>() / n as f64)
    }
}

/// Tokens over time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rate {
    pub tokens: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, phase: &Phase) {
        self.tokens += phase.tokens as f64;
        self.seconds += phase.seconds;
    }

    /// Tokens per second.
    pub fn speed(self) -> f64 {
        self.tokens / self.seconds
    }
}
