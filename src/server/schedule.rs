//! How wide a piece of a prompt may be while others wait for their next token, and how it is divided. Pure: it learns from what it is
//! told.

/// Widths that are told apart: 1, 2, 4, … tokens.
const WIDTHS: usize = 16;

/// The part of a measurement that the newest one makes.
const NEWEST: f64 = 0.5;

/// Waiting for reads of a piece twice as wide: the most of what there is to read is wanted by few tokens already.
const WIDER_READS: f64 = 1.25;

/// The first width of which anything is learned.
const FIRST: usize = ATTENTION_ROWS;

/// Pieces are planned to take this much less than they may: no two take as long.
const MARGIN: f64 = 1.25;

/// After a piece that took longer than foretold, all are expected to take as much longer. What each that comes in time takes off from
/// that, as a part of what is above the margin.
const CALM: f64 = 0.25;

/// What a slow piece adds to the mean of its width at the most: if it was the disk's doing, that width is soon to be tried again.
const DRIFT: f64 = 1.05;

/// What pieces of prompts and steps of decoding took.
#[derive(Clone, Debug)]
pub struct Pace {
    /// No stream is to wait longer for its next token, in seconds.
    limit: f64,
    /// A step of all that generate, in seconds.
    step: Option<f64>,
    /// Pieces of `2^i` to `2^(i+1) - 1` tokens.
    pieces: [Option<Piece>; WIDTHS],
    /// What a piece of any width may take, as a multiple of what such pieces took in the mean: a disk that was slow for one is
    /// expected to be slow for the next, whatever their widths, until pieces come in time again.
    slowness: f64,
}

/// What pieces of about a width took in the mean.
#[derive(Clone, Copy, Debug)]
struct Piece {
    n_tokens: f64,
    seconds: f64,
    /// How many of these seconds they waited for reads.
    waited: f64,
}

impl Piece {
    /// Seconds that a piece of `width` takes, by these: of a wider one products take as much longer as it is wider, reads do not.
    fn seconds_at(&self, width: usize) -> f64 {
        let wider = (width as f64 / self.n_tokens.max(1.0)).max(1.0);
        (self.seconds - self.waited) * wider + self.waited * WIDER_READS.powf(wider.log2())
    }
}

impl Pace {
    pub fn new(limit: f64) -> Self {
        Self { limit, step: None, pieces: [None; WIDTHS], slowness: MARGIN }
    }

    /// All that generate have their next token. A step that took long counts at once, one that did not by and by.
    pub fn stepped(&mut self, seconds: f64) {
        self.step = Some(blend(self.step, seconds).max(seconds));
    }

    /// A piece of so many tokens was evaluated, which waited so long for reads.
    pub fn evaluated(&mut self, n_tokens: usize, seconds: f64, waited: f64) {
        if n_tokens == 0 {
            return;
        }
        if let Some(expected) = self.expected(n_tokens).filter(|expected| *expected > 0.0) {
            let calmer = self.slowness - CALM * (self.slowness - MARGIN);
            self.slowness = calmer.max(seconds / expected);
        }
        let now = Piece { n_tokens: n_tokens as f64, seconds, waited: waited.clamp(0.0, seconds) };
        let own = &mut self.pieces[bucket(n_tokens)];
        *own = Some(own.map_or(now, |before| {
            // What is too slow by far changes its measure by little.
            let part = (DRIFT * before.seconds / now.seconds).min(1.0);
            Piece {
                n_tokens: blend(Some(before.n_tokens), now.n_tokens),
                seconds: blend(Some(before.seconds), now.seconds * part),
                waited: blend(Some(before.waited), now.waited * part),
            }
        }));
    }

    /// Tokens of prompts to evaluate now, at most `widest`: as many as are expected to keep the limit while others generate, and the
    /// least there is where none are.
    pub fn width(&self, widest: usize, others_generate: bool) -> usize {
        if !others_generate {
            return widest;
        }
        let left = (self.limit - self.step.unwrap_or(0.0)) / self.slowness;
        let mut width = 1;
        let mut best = FIRST.min(widest);
        let mut is_first = true;
        while width <= widest {
            match self.expected(width) {
                Some(seconds) if seconds <= left => (best, is_first) = (width, false),
                Some(_) if is_first => {
                    best = width.min(best);
                    break;
                }
                Some(_) => break,
                None => {}
            }
            width *= 2;
        }
        best.clamp(1, widest)
    }

    /// Seconds that a piece of so many tokens takes, as far as that is known: no longer than wider ones, and longer than narrower
    /// ones as [`Piece::seconds_at`] has it.
    fn expected(&self, width: usize) -> Option<f64> {
        let (narrower, wider) = self.pieces.split_at(bucket(width) + 1);
        let below = narrower.iter().flatten().next_back().map(|piece| piece.seconds_at(width));
        let above = wider.iter().flatten().next().map(|piece| piece.seconds);
        match (below, above) {
            (Some(below), Some(above)) if narrower.last().is_some_and(Option::is_none) => Some(below.min(above)),
            (below, above) => below.or(above),
        }
    }
}

fn bucket(n_tokens: usize) -> usize {
    (n_tokens.max(1).ilog2() as usize).min(WIDTHS - 1)
}

fn blend(before: Option<f64>, now: f64) -> f64 {
    before.map_or(now, |before| before + NEWEST * (now - before))
}

/// From so many rows on llama.cpp's fused attention on the CPU adds up in another way (`GGML_FA_TILE_Q`): results differ by more than
/// their last bits.
pub const ATTENTION_ROWS: usize = 64;

/// Which prompts go on first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Those that lack less than [`ATTENTION_ROWS`].
    Short,
    Long,
}

/// Divides `width` among prompts that lack so many tokens, the oldest first. Every token is computed among as many others as it would be
/// alone, on the same side of [`ATTENTION_ROWS`], so that a text does not depend on what else is asked for: short prompts go
/// together and whole as far as they stay below it, of long ones every piece, the last one too, is at least as wide. Together they
/// are not wider than `width`, save that the first may end with a piece of up to twice [`ATTENTION_ROWS`], and never than `most`.
/// Where `width` is below [`ATTENTION_ROWS`], what each lacks is divided evenly; a prompt of which one token would be left gets that
/// too: alone it would pass for a generated one.
pub fn divide(width: usize, most: usize, turn: Turn, lacking: &[usize]) -> Vec<usize> {
    let is_short = |n: usize| (1..ATTENTION_ROWS).contains(&n);
    let has_short = lacking.iter().any(|n| is_short(*n));
    let has_long = lacking.iter().any(|n| *n >= ATTENTION_ROWS);
    if has_short && (turn == Turn::Short || !has_long) {
        let mut left = width.min(ATTENTION_ROWS - 1);
        let oldest = lacking.iter().copied().find(|n| is_short(*n)).unwrap_or(0);
        // Later and shorter ones must not keep it waiting for ever.
        return if oldest > left { evenly(width, most, lacking) } else { take_whole(lacking, is_short, &mut left) };
    }
    if width < ATTENTION_ROWS || most < ATTENTION_ROWS {
        return evenly(width, most, lacking);
    }
    let n_long = lacking.iter().filter(|n| **n >= ATTENTION_ROWS).count();
    let each = width / n_long.clamp(1, width / ATTENTION_ROWS);
    let mut left = width;
    let mut is_first = true;
    let share = |&n: &usize| {
        if n < ATTENTION_ROWS || left < ATTENTION_ROWS {
            return 0;
        }
        let share = match n {
            _ if n <= each.min(left) => n,
            _ if n - each.min(left) >= ATTENTION_ROWS => each.min(left),
            // A last piece that is wide enough, and one before it that is.
            _ if n >= 2 * ATTENTION_ROWS => n - ATTENTION_ROWS,
            _ => n,
        };
        let is_taken = share <= if is_first { most } else { left };
        is_first = false;
        let share = if is_taken { share } else { 0 };
        left = left.saturating_sub(share);
        share
    };
    let shares: Vec<usize> = lacking.iter().map(share).collect();
    if shares.iter().all(|share| *share == 0) { evenly(width, most, lacking) } else { shares }
}

/// Prompts of a kind, whole, as many as fit.
fn take_whole(lacking: &[usize], is_wanted: impl Fn(usize) -> bool, left: &mut usize) -> Vec<usize> {
    let take = |&n: &usize| match is_wanted(n) && n <= *left {
        true => {
            *left -= n;
            n
        }
        false => 0,
    };
    lacking.iter().map(take).collect()
}

/// None gets more than it lacks, what one leaves goes to the others, and the first get what cannot be divided.
fn evenly(width: usize, most: usize, lacking: &[usize]) -> Vec<usize> {
    let mut shares = vec![0; lacking.len()];
    let mut left = width.min(most);
    loop {
        let open: Vec<usize> = (0..lacking.len()).filter(|at| shares[*at] < lacking[*at]).collect();
        if open.is_empty() || left == 0 {
            break;
        }
        let each = (left / open.len()).max(1);
        for at in open {
            let more = each.min(lacking[at] - shares[at]).min(left);
            shares[at] += more;
            left -= more;
        }
    }
    let mut room = most.saturating_sub(shares.iter().sum());
    for (share, lacking) in shares.iter_mut().zip(lacking) {
        if room > 0 && *share > 0 && *share + 1 == *lacking {
            *share += 1;
            room -= 1;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alone_a_prompt_is_as_wide_as_can_be() {
        assert_eq!(Pace::new(1.0).width(512, false), 512);
        assert_eq!(Pace::new(1.0).width(512, true), FIRST);
        assert_eq!(Pace::new(1.0).width(4, true), 4);
        let mut pace = Pace::new(1.0);
        pace.evaluated(512, 8.0, 0.0);
        assert_eq!(pace.width(512, true), 1, "what took long alone is not tried");
    }

    #[test]
    fn widths_grow_as_far_as_the_limit_lets_them() {
        let mut pace = Pace::new(1.0);
        let mut widths = Vec::new();
        for _ in 0..8 {
            let width = pace.width(512, true);
            widths.push(width);
            pace.stepped(0.1);
            // 0.2 s, and 5 ms a token.
            pace.evaluated(width, 0.2 + 0.005 * width as f64, 0.0);
        }
        assert!(widths.is_sorted(), "{widths:?}");
        assert_eq!(widths.last(), Some(&64), "{widths:?}");
    }

    #[test]
    fn what_takes_too_long_gets_narrower_and_goes_on() {
        let mut pace = Pace::new(0.1);
        for _ in 0..20 {
            let width = pace.width(512, true);
            pace.evaluated(width, 5.0, 0.0);
        }
        assert_eq!(pace.width(512, true), 1);
    }

    #[test]
    fn a_slow_piece_narrows_the_next_ones_for_a_while() {
        let mut pace = Pace::new(1.0);
        let timely = |width: usize| 0.004 * width as f64;
        for _ in 0..12 {
            let width = pace.width(512, true);
            pace.evaluated(width, timely(width), 0.0);
        }
        assert_eq!(pace.width(512, true), 128, "0.51 s, and a margin");
        pace.evaluated(128, 3.0 * timely(128), 0.0);
        let narrow = pace.width(512, true);
        assert!(3.0 * timely(narrow) < 1.0, "as slow once more, {narrow} tokens keep the limit");
        let again = (1..30).find(|_| {
            let width = pace.width(512, true);
            pace.evaluated(width, timely(width), 0.0);
            width == 128
        });
        assert!(again.is_some(), "a width that was slow once is tried again");
    }

    #[test]
    fn what_waits_for_reads_takes_little_longer_when_it_is_wider() {
        let mut pace = Pace::new(1.0);
        pace.evaluated(64, 0.6, 0.0);
        assert_eq!(pace.width(512, true), 64, "twice as many products");
        let mut pace = Pace::new(1.0);
        pace.evaluated(64, 0.6, 0.5);
        assert_eq!(pace.width(512, true), 64, "0.83 s, and a margin");
        let mut pace = Pace::new(1.2);
        pace.evaluated(64, 0.6, 0.5);
        assert_eq!(pace.width(512, true), 128);
        // One that was evaluated while nobody generated says that narrower ones do not take longer.
        pace.evaluated(300, 0.8, 0.6);
        assert_eq!(pace.width(512, true), 256);
    }

    #[test]
    fn a_slow_step_leaves_less_to_the_next_piece() {
        let mut pace = Pace::new(1.0);
        (0..12).for_each(|_| pace.stepped(0.1));
        pace.evaluated(64, 0.3, 0.0);
        pace.evaluated(128, 0.6, 0.0);
        assert_eq!(pace.width(512, true), 128);
        pace.stepped(0.6);
        assert_eq!(pace.width(512, true), 64);
        (0..4).for_each(|_| pace.stepped(0.1));
        assert_eq!(pace.width(512, true), 128);
    }

    #[test]
    fn rows_stay_on_their_side() {
        let long = |width, most, lacking: &[usize]| divide(width, most, Turn::Long, lacking);
        assert_eq!(long(512, 512, &[1000]), [512]);
        assert_eq!(long(512, 512, &[520]), [456], "the last piece is wide enough");
        assert_eq!(long(64, 512, &[100]), [100]);
        assert_eq!(long(64, 512, &[150]), [64]);
        assert_eq!(long(512, 512, &[400, 400]), [256, 256]);
        assert_eq!(long(128, 512, &[400, 10, 400, 400]), [64, 0, 64, 0]);
        assert_eq!(long(128, 512, &[100, 100]), [100, 0], "together they are not wider than that");
        assert_eq!(divide(512, 512, Turn::Short, &[400, 10, 30, 40]), [0, 10, 30, 0]);
        assert_eq!(divide(512, 512, Turn::Short, &[400]), [400]);
        assert_eq!(long(512, 512, &[20]), [20]);
        assert_eq!(long(8, 512, &[400]), [8], "who may not be that wide goes on");
        assert_eq!(divide(8, 512, Turn::Short, &[20]), [8]);
        assert_eq!(divide(16, 512, Turn::Short, &[40, 10]), [8, 8], "the oldest goes on");
        assert_eq!(long(32, 32, &[100, 100]), [16, 16]);
    }

    #[test]
    fn no_prompt_waits_for_ever_and_none_is_exceeded() {
        for width in [1, 8, 64, 100, 512] {
            for most in [32, 64, 512] {
                let mut lacking = [700usize, 63, 64, 65, 1, 129];
                for step in 0.. {
                    assert!(step < 2000, "{width} {most} {lacking:?}");
                    let turn = if step % 2 == 0 { Turn::Short } else { Turn::Long };
                    let shares = divide(width.min(most), most, turn, &lacking);
                    let total: usize = shares.iter().sum();
                    assert!(total > 0 && total <= most, "{width} {most} {lacking:?} {shares:?}");
                    lacking.iter_mut().zip(shares).for_each(|(lacking, share)| *lacking -= share);
                    if lacking.iter().all(|n| *n == 0) {
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn shares_are_fair() {
        assert_eq!(evenly(512, 2048, &[1000]), [512]);
        assert_eq!(evenly(512, 2048, &[513]), [513]);
        assert_eq!(evenly(512, 512, &[513]), [512]);
        assert_eq!(evenly(10, 64, &[100, 2, 100]), [4, 2, 4]);
        assert_eq!(evenly(1, 64, &[5, 5]), [1, 0]);
        assert!(evenly(4, 64, &[]).is_empty());
        assert_eq!(evenly(8, 64, &[3, 0]), [3, 0]);
    }
}
