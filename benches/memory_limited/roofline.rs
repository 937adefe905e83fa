//! Decode speed against what the disk allows.

use super::runs::Finished;
use hobbit_programs::measure::disk::RandomReads;

/// Of one run. Whoever runs, the disk was measured with reads of the plain model's slices: the smaller ones of a low file
/// are slower to read than that, the longer ones of a pack faster.
#[derive(Clone, Copy, Debug)]
pub struct Roofline {
    pub bytes_per_second: f64,
    pub bytes_per_token: f64,
    pub speed: f64,
}

impl Roofline {
    /// None where nothing was read or measured.
    pub fn of(finished: &Finished) -> Option<Self> {
        let run = finished.run.as_ref()?;
        let best = best(&finished.disk)?;
        let bytes = run.decode.experts?.bytes_read;
        (bytes > 0).then(|| Self {
            bytes_per_second: best.bytes_per_second,
            bytes_per_token: bytes as f64 / run.decode.tokens as f64,
            speed: run.decode.speed(),
        })
    }

    /// Tokens per second if only reading took time.
    pub fn limit(self) -> f64 {
        self.bytes_per_second / self.bytes_per_token
    }

    pub fn share(self) -> f64 {
        self.speed / self.limit()
    }
}

fn best(disk: &[RandomReads]) -> Option<&RandomReads> {
    disk.iter().max_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second))
}
