//! Divides reads among copies of a file on several disks, so that each part goes to the copy that will answer first: a
//! decision from bytes that wait and from measured times. It knows no clock; seconds come from the caller.

/// Bytes of the largest part of a divided read; the smallest has half as many. Smaller ones cost more CPU time than they
/// save.
const PART_BYTES: u64 = 512 << 10;

/// Measurements lose half of their weight after this many bytes.
const HALF_BYTES: f64 = (64 << 20) as f64;
/// Before the first measurement a copy counts as if it had read this many bytes in this many seconds.
const PRIOR: (f64, f64) = ((1 << 20) as f64, 1e-3);
/// Measured seconds halve after this many bytes from other copies: so a slow copy is tried again.
const FORGOTTEN_BYTES: f64 = (4u64 << 30) as f64;

/// Copies of a file, by their place.
#[derive(Debug)]
pub(super) struct Dispatch(Vec<Copy>);

/// The queue and the speed of a copy.
#[derive(Clone, Debug, Default)]
struct Copy {
    /// Bytes that are asked for and not answered yet.
    queued: u64,
    /// Bytes measured, and their seconds; both fade.
    measured: (f64, f64),
    /// Time of the last answer, in seconds.
    answered: f64,
    /// Bytes asked for so far.
    given: u64,
    is_left_out: bool,
}

impl Copy {
    fn seconds_per_byte(&self) -> f64 {
        (self.measured.1 + PRIOR.1) / (self.measured.0 + PRIOR.0)
    }

    /// Seconds until `more` bytes behind all others are read.
    fn seconds_until(&self, more: u64) -> f64 {
        (self.queued + more) as f64 * self.seconds_per_byte()
    }
}

impl Dispatch {
    pub fn new(n_copies: usize) -> Self {
        Self(vec![Copy::default(); n_copies])
    }

    /// Bytes of a read that each copy is asked for, by place; copies for which `has` is false get none. A read that is
    /// not `divisible` goes to one.
    pub fn divide(&mut self, bytes: u64, divisible: bool, has: impl Fn(usize) -> bool) -> Vec<u64> {
        let mut parts = vec![0; self.0.len()];
        let part = if divisible { bytes.div_ceil(bytes.div_ceil(PART_BYTES).max(1)) } else { bytes };
        let mut left = bytes;
        let is_usable = |place: usize, copy: &Copy| !copy.is_left_out && has(place);
        while left > 0 {
            let next = part.min(left);
            let usable = self.0.iter().enumerate().filter(|(place, copy)| is_usable(*place, copy));
            let ends = usable.map(|(place, copy)| (copy.seconds_until(parts[place] + next), copy.given, place));
            let first = ends.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let Some((_, _, place)) = first else { break };
            parts[place] += next;
            left -= next;
        }
        for (place, (copy, part)) in self.0.iter_mut().zip(&parts).enumerate() {
            copy.queued += part;
            copy.given += part;
            if *part == 0 && bytes > 0 && is_usable(place, copy) {
                copy.measured.1 *= half_after(bytes, FORGOTTEN_BYTES);
            }
        }
        parts
    }

    /// Adds bytes to a copy's queue, whatever the others have.
    pub fn add(&mut self, place: usize, bytes: u64) {
        self.0[place].queued += bytes;
        self.0[place].given += bytes;
    }

    /// Notes the answer for a part of `bytes` that was asked for at `asked` and came at `now`, in seconds.
    pub fn answered(&mut self, place: usize, bytes: u64, asked: f64, now: f64) {
        let copy = &mut self.0[place];
        copy.queued = copy.queued.saturating_sub(bytes);
        // Until the answer before it, the disk was busy with that.
        let seconds = (now - asked.max(copy.answered)).max(0.0);
        copy.answered = copy.answered.max(now);
        let kept = half_after(bytes, HALF_BYTES);
        copy.measured = (copy.measured.0 * kept + bytes as f64, copy.measured.1 * kept + seconds);
    }

    /// Asks a copy for nothing any more. Returns false if that was so.
    pub fn leave_out(&mut self, place: usize) -> bool {
        !std::mem::replace(&mut self.0[place].is_left_out, true)
    }

    /// Measured bytes per second; `None` before the first answer.
    pub fn speed(&self, place: usize) -> Option<f64> {
        let (bytes, seconds) = self.0[place].measured;
        (seconds > 0.0).then(|| bytes / seconds)
    }
}

fn half_after(bytes: u64, half: f64) -> f64 {
    0.5f64.powf(bytes as f64 / half)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Disks of given speeds that read one part after the other, and the dispatch in front of them.
    struct Disks {
        dispatch: Dispatch,
        /// Bytes per second.
        speeds: Vec<f64>,
        /// When each disk will be idle.
        idle_at: Vec<f64>,
        bytes: Vec<u64>,
    }

    impl Disks {
        fn new(speeds: &[f64]) -> Self {
            let n = speeds.len();
            Self { dispatch: Dispatch::new(n), speeds: speeds.to_vec(), idle_at: vec![0.0; n], bytes: vec![0; n] }
        }

        /// Asks for `reads` of `bytes` each at `now`, and returns the time at which all have been answered.
        fn read(&mut self, reads: usize, bytes: u64, now: f64, has: impl Fn(usize) -> bool) -> f64 {
            let mut answers = Vec::new();
            for _ in 0..reads {
                let parts = self.dispatch.divide(bytes, true, &has);
                assert_eq!(parts.iter().sum::<u64>(), bytes);
                for (place, part) in parts.into_iter().enumerate().filter(|(_, part)| *part > 0) {
                    let end = self.idle_at[place].max(now) + part as f64 / self.speeds[place];
                    self.idle_at[place] = end;
                    self.bytes[place] += part;
                    answers.push((end, place, part));
                }
            }
            answers.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (end, place, part) in &answers {
                self.dispatch.answered(*place, *part, now, *end);
            }
            answers.last().map_or(now, |last| last.0)
        }

        /// `n` steps of three reads, each after the one before; the mean bytes per second.
        fn steps(&mut self, n: usize, bytes: u64, has: impl Fn(usize) -> bool) -> f64 {
            let began = self.idle_at.iter().copied().fold(0.0, f64::max);
            let end = (0..n).fold(began, |now, _| self.read(3, bytes, now, &has));
            (n as u64 * 3 * bytes) as f64 / (end - began)
        }
    }

    #[test]
    fn two_equal_disks_read_nearly_twice_as_fast() {
        for bytes in [MIB - 100_000, 2 * MIB, 33 * MIB] {
            let rate = Disks::new(&[3e8, 3e8]).steps(200, bytes, |_| true);
            assert!(rate > 1.7 * 3e8, "{bytes}: {rate:e}");
        }
    }

    #[test]
    fn parts_follow_the_speeds_whatever_the_place() {
        for speeds in [[4e8, 1e8], [1e8, 4e8]] {
            let mut disks = Disks::new(&speeds);
            let rate = disks.steps(300, 8 * MIB, |_| true);
            let shares = [0, 1].map(|place| disks.bytes[place] as f64 / (300 * 3 * 8 * MIB) as f64);
            assert!(rate > 4.5e8, "{speeds:?}: {rate:e}");
            for (share, speed) in shares.iter().zip(speeds) {
                assert!((share - speed / 5e8).abs() < 0.05, "{speeds:?}: {shares:?}");
            }
            for place in [0, 1] {
                let found = disks.dispatch.speed(place).unwrap();
                assert!((found / speeds[place] - 1.0).abs() < 0.05, "{speeds:?}: {found:e}");
            }
        }
    }

    #[test]
    fn a_slow_disk_gets_few_bytes_until_it_is_fast_again() {
        let mut disks = Disks::new(&[1e9, 1e7]);
        let alone = Disks::new(&[1e9]).steps(1000, MIB, |_| true);
        let rate = disks.steps(1000, MIB, |_| true);
        assert!(disks.bytes[1] > 0 && disks.bytes[1] * 50 < disks.bytes[0], "{:?}", disks.bytes);
        assert!(rate > 0.8 * alone, "{rate:e} of {alone:e}");
        disks.speeds[1] = 1e9;
        disks.steps(500, 32 * MIB, |_| true);
        disks.bytes = vec![0; 2];
        disks.steps(500, MIB, |_| true);
        assert!(disks.bytes[1] * 5 > disks.bytes[0] * 4, "{:?}", disks.bytes);
    }

    #[test]
    fn copies_without_the_bytes_get_none() {
        let mut dispatch = Dispatch::new(3);
        assert_eq!(dispatch.divide(3 * PART_BYTES, true, |place| place == 1), [0, 3 * PART_BYTES, 0]);
        // The queue of the second counts.
        assert_eq!(dispatch.divide(2 * PART_BYTES, true, |_| true), [PART_BYTES, 0, PART_BYTES]);
        assert_eq!(dispatch.divide(7, true, |_| false), [0, 0, 0]);
        assert_eq!(dispatch.divide(0, true, |_| true), [0, 0, 0]);
        assert!(dispatch.leave_out(2) && !dispatch.leave_out(2));
        assert_eq!(dispatch.divide(PART_BYTES, true, |place| place != 0), [0, PART_BYTES, 0]);
        dispatch.answered(1, 4 * PART_BYTES, 0.0, 0.004);
        assert_eq!(
            dispatch.divide(9 * PART_BYTES, false, |place| place < 2).iter().filter(|part| **part > 0).count(),
            1
        );
    }
}
