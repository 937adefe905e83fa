//! How many prompt tokens to evaluate while other requests wait for their next token, and how to divide them among
//! prompts. Pure: it learns from measurements that the caller passes in.

/// Width classes: 1, 2, 4, … tokens.
const WIDTHS: usize = 16;

/// Weight of the newest measurement in a running mean.
const NEWEST: f64 = 0.5;

/// Growth of read time when the width doubles: few tokens already need most of the experts.
const WIDER_READS: f64 = 1.25;

/// Smallest width that is measured.
const FIRST: usize = ATTENTION_ROWS;

/// Safety factor on expected times, because measurements vary.
const MARGIN: f64 = 1.25;

/// After a piece that takes longer than expected, all widths are expected to be slower by that factor. Each piece on
/// time reduces the excess over `MARGIN` by this fraction.
const CALM: f64 = 0.25;

/// Caps a slow piece at this multiple of its width's mean, so that the width is tried again soon if the disk was
/// slow.
const DRIFT: f64 = 1.05;

/// Measured times of prompt pieces and of decoding steps.
#[derive(Clone, Debug)]
pub struct Pace {
    /// Longest wait of a stream for its next token, in seconds.
    limit: f64,
    /// Time of one decoding step of all generating slots, in seconds.
    step: Option<f64>,
    /// The piece at `i` is the mean of widths `2^i` to `2^(i+1) - 1`.
    pieces: [Option<Piece>; WIDTHS],
    /// Factor on expected times, for all widths: a disk that was slow for one piece is expected to be slow for the
    /// next, until pieces are on time again.
    slowness: f64,
}

/// Mean measurements of one width class.
#[derive(Clone, Copy, Debug)]
struct Piece {
    n_tokens: f64,
    seconds: f64,
    /// The part of `seconds` spent waiting for reads.
    waited: f64,
}

impl Piece {
    /// Expected seconds for a piece of `width`: compute grows in proportion to the width, reads grow more slowly.
    fn seconds_at(&self, width: usize) -> f64 {
        let wider = (width as f64 / self.n_tokens.max(1.0)).max(1.0);
        (self.seconds - self.waited) * wider + self.waited * WIDER_READS.powf(wider.log2())
    }
}

impl Pace {
    pub fn new(limit: f64) -> Self {
        Self { limit, step: None, pieces: [None; WIDTHS], slowness: MARGIN }
    }

    /// Records a decoding step of all generating slots. A longer time counts at once, a shorter one gradually.
    pub fn stepped(&mut self, seconds: f64) {
        self.step = Some(blend(self.step, seconds).max(seconds));
    }

    /// Records a piece of `n_tokens` that took `seconds`, `waited` of them for reads.
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
            // An outlier changes the mean by little.
            let part = (DRIFT * before.seconds / now.seconds).min(1.0);
            Piece {
                n_tokens: blend(Some(before.n_tokens), now.n_tokens),
                seconds: blend(Some(before.seconds), now.seconds * part),
                waited: blend(Some(before.waited), now.waited * part),
            }
        }));
    }

    /// Number of prompt tokens to evaluate now: `widest` if no other slot generates, else the widest piece expected
    /// to keep the limit. If none is, the narrowest known width, but at most `FIRST`.
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

    /// Expected seconds of a piece, if known: at most as long as a wider piece, and scaled from a narrower one by
    /// [`Piece::seconds_at`].
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

/// From this many rows on, llama.cpp's fused attention on the CPU sums in another order (`GGML_FA_TILE_Q`): results
/// differ by more than their last bits.
pub const ATTENTION_ROWS: usize = 64;

/// Which prompts are evaluated first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Prompts that lack fewer than [`ATTENTION_ROWS`] tokens.
    Short,
    Long,
}

/// Divides `width` among prompts that lack these numbers of tokens, oldest first.
///
/// Every token is computed on the same side of [`ATTENTION_ROWS`] as it would be alone, so that a text does not
/// depend on other requests. Short prompts go together and whole as long as their sum stays below [`ATTENTION_ROWS`];
/// every piece of a long prompt, the last one included, is at least that wide. The sum stays within `width`, except
/// that the first prompt may end with a piece of up to twice [`ATTENTION_ROWS`]; it never exceeds `most`.
///
/// Where `width` is below [`ATTENTION_ROWS`], the lacking tokens are divided evenly; a prompt that would keep one
/// token back gets that token too, because alone it would count as a generated one.
pub fn divide(width: usize, most: usize, turn: Turn, lacking: &[usize]) -> Vec<usize> {
    let is_short = |n: usize| (1..ATTENTION_ROWS).contains(&n);
    let has_short = lacking.iter().any(|n| is_short(*n));
    let has_long = lacking.iter().any(|n| *n >= ATTENTION_ROWS);
    if has_short && (turn == Turn::Short || !has_long) {
        let mut left = width.min(ATTENTION_ROWS - 1);
        let oldest = lacking.iter().copied().find(|n| is_short(*n)).unwrap_or(0);
        // Later, shorter prompts must not starve the oldest.
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
            // Keep the last piece wide enough, and the one before it too.
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

/// Whole prompts that satisfy `is_wanted`, as many as fit.
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

/// No prompt gets more than it lacks, unused shares go to the others, and the first prompts get the remainder.
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
        // A piece measured without generation bounds the time of narrower ones.
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
