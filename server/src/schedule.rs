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

/// Seconds that others generate for each second of prompts, which take a fifth of the time that way. It holds while at
/// most a fifth of the busy slots wait for their prompts: 8 clients that always keep to it fall out of step, and make a
/// fifth fewer tokens together.
const STEPS_PER_PIECE: f64 = 4.0;

/// Measured times of prompt pieces and of decoding steps.
#[derive(Clone, Debug)]
pub struct Pace {
    /// Longest wait of a stream for its next token, in seconds.
    limit: f64,
    /// Time of one decoding step of all generating slots, in seconds.
    step: Option<f64>,
    /// The piece at `i` is the mean of widths `2^i` to `2^(i+1) - 1`.
    pieces: [Option<Piece>; WIDTHS],
    /// Few wait for their prompts.
    is_rationed: bool,
    /// Seconds of steps that are due before the next piece.
    owed: f64,
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
        Self { limit, step: None, pieces: [None; WIDTHS], is_rationed: false, owed: 0.0, slowness: MARGIN }
    }

    /// Records a decoding step of all generating slots. A longer time counts at once, a shorter one gradually.
    pub fn stepped(&mut self, seconds: f64) {
        self.step = Some(blend(self.step, seconds).max(seconds));
        self.owed = (self.owed - seconds).max(0.0);
    }

    /// Whether a piece may be evaluated now, while `n_generating` slots generate and the prompts of `n_waiting` wait.
    pub fn is_due(&mut self, n_waiting: usize, n_generating: usize) -> bool {
        self.is_rationed = n_waiting as f64 * STEPS_PER_PIECE <= n_generating as f64;
        !self.is_rationed || self.owed == 0.0
    }

    /// Records time that prompts took, in pieces of tokens or in an image.
    pub fn spent(&mut self, seconds: f64) {
        self.owed = if self.is_rationed { seconds * STEPS_PER_PIECE } else { 0.0 };
    }

    /// Records a piece of `n_tokens` that took `seconds`, `waited` of them for reads.
    pub fn evaluated(&mut self, n_tokens: usize, seconds: f64, waited: f64) {
        if n_tokens == 0 {
            return;
        }
        self.spent(seconds);
        if let Some(expected) = self.expected(n_tokens).filter(|expected| *expected > 0.0) {
            let calmer = self.slowness - CALM * (self.slowness - MARGIN);
            self.slowness = calmer.max(seconds / expected);
        }
        let now = Piece { n_tokens: n_tokens as f64, seconds, waited: waited.clamp(0.0, seconds) };
        let piece = &mut self.pieces[bucket(n_tokens)];
        *piece = Some(piece.map_or(now, |before| {
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
/// Where `width` is below [`ATTENTION_ROWS`], prompts are evaluated [in order](in_order).
pub fn divide(width: usize, most: usize, turn: Turn, lacking: &[usize]) -> Vec<usize> {
    let is_short = |n: usize| (1..ATTENTION_ROWS).contains(&n);
    let has_short = lacking.iter().any(|n| is_short(*n));
    let has_long = lacking.iter().any(|n| *n >= ATTENTION_ROWS);
    if has_short && (turn == Turn::Short || !has_long) {
        let left = width.min(ATTENTION_ROWS - 1);
        let oldest = lacking.iter().copied().find(|n| is_short(*n)).unwrap_or(0);
        // Later, shorter prompts must not starve the oldest.
        return if oldest > left { in_order(width, most, lacking) } else { take_whole(lacking, is_short, left) };
    }
    if width < ATTENTION_ROWS || most < ATTENTION_ROWS {
        return in_order(width, most, lacking);
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
    if shares.iter().all(|share| *share == 0) { in_order(width, most, lacking) } else { shares }
}

/// Whole prompts that satisfy `is_wanted`, as many as fit in `left`.
pub fn take_whole(lacking: &[usize], is_wanted: impl Fn(usize) -> bool, mut left: usize) -> Vec<usize> {
    let take = |&n: &usize| {
        let taken = if is_wanted(n) && n <= left { n } else { 0 };
        left -= taken;
        taken
    };
    lacking.iter().map(take).collect()
}

/// Divides `width` among prompts that lack these numbers of tokens, oldest first. Prompts that fit in an equal part of
/// it are evaluated whole, so that a long prompt does not hold up short ones; the oldest others get the rest. A prompt
/// that would keep one token back gets that token too, up to `most` in all: alone it would count as a generated one.
pub fn in_order(width: usize, most: usize, lacking: &[usize]) -> Vec<usize> {
    let mut left = width.min(most);
    let each = left / lacking.iter().filter(|n| **n > 0).count().max(1);
    let mut shares = take_whole(lacking, |n| n <= each, left);
    left -= shares.iter().sum::<usize>();
    for (share, lacking) in shares.iter_mut().zip(lacking).filter(|(_, lacking)| **lacking > each) {
        *share = left.min(*lacking);
        left -= *share;
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

    /// A pace with this limit, after pieces as (tokens, seconds, seconds of reads).
    fn after(limit: f64, pieces: &[(usize, f64, f64)]) -> Pace {
        let mut pace = Pace::new(limit);
        pieces.iter().for_each(|&(n, seconds, waited)| pace.evaluated(n, seconds, waited));
        pace
    }

    /// The widths of `n` pieces, each of which takes `seconds` at its width.
    fn run(pace: &mut Pace, n: usize, seconds: impl Fn(usize) -> f64) -> Vec<usize> {
        let mut piece = || {
            let width = pace.width(512, true);
            pace.evaluated(width, seconds(width), 0.0);
            width
        };
        (0..n).map(|_| piece()).collect()
    }

    #[test]
    fn widths_follow_measured_times() {
        assert_eq!(Pace::new(1.0).width(512, false), 512, "nothing else generates");
        assert_eq!(Pace::new(1.0).width(512, true), FIRST);
        assert_eq!(Pace::new(1.0).width(4, true), 4);
        for (limit, pieces, width) in [
            (1.0, &[(512, 8.0, 0.0)][..], 1),
            // Twice as many products.
            (1.0, &[(64, 0.6, 0.0)], 64),
            // 0.83 s, and a margin; reads grow slowly.
            (1.0, &[(64, 0.6, 0.5)], 64),
            (1.2, &[(64, 0.6, 0.5)], 128),
            // A piece measured without generation bounds the time of narrower ones.
            (1.2, &[(64, 0.6, 0.5), (300, 0.8, 0.6)], 256),
        ] {
            assert_eq!(after(limit, pieces).width(512, true), width, "{limit} {pieces:?}");
        }
        let mut pace = Pace::new(1.0);
        pace.stepped(0.1);
        let widths = run(&mut pace, 8, |width| 0.2 + 0.005 * width as f64);
        assert!(widths.is_sorted() && widths.ends_with(&[64]), "{widths:?}");
        assert!(run(&mut Pace::new(0.1), 20, |_| 5.0).ends_with(&[1]), "too slow at any width");
    }

    #[test]
    fn a_slow_piece_narrows_the_next_ones_for_a_while() {
        let mut pace = Pace::new(1.0);
        let timely = |width: usize| 0.004 * width as f64;
        run(&mut pace, 12, timely);
        assert_eq!(pace.width(512, true), 128, "0.51 s, and a margin");
        pace.evaluated(128, 3.0 * timely(128), 0.0);
        let narrow = pace.width(512, true);
        assert!(3.0 * timely(narrow) < 1.0, "as slow once more, {narrow} tokens keep the limit");
        assert!(run(&mut pace, 30, timely).contains(&128), "a width that was slow once is tried again");
    }

    #[test]
    fn few_prompts_take_a_fifth_of_the_time() {
        // The share of the time that pieces take which are evaluated as soon as they are due.
        let share = |n_waiting: usize, n_generating: usize, step: f64, piece: f64| {
            let (mut pace, mut of_steps, mut of_pieces) = (Pace::new(3.0), 0.0, 0.0);
            while of_steps + of_pieces < 500.0 {
                pace.stepped(step);
                of_steps += step;
                if pace.is_due(n_waiting, n_generating) {
                    pace.evaluated(64, piece, 0.0);
                    of_pieces += piece;
                }
            }
            of_pieces / (of_steps + of_pieces)
        };
        for (step, piece) in [(0.05, 0.7), (0.01, 0.1), (0.02, 1.0), (1.0, 0.3)] {
            for (n_waiting, n_generating) in [(1, 7), (1, 4), (2, 9)] {
                let share = share(n_waiting, n_generating, step, piece);
                assert!(share <= 0.205 && share > 0.1, "{n_waiting} {n_generating}: {share}");
            }
            let one_step_each = piece / (step + piece);
            assert!((share(2, 6, step, piece) - one_step_each).abs() < 0.01, "more than a fifth wait");
        }
        let mut pace = Pace::new(3.0);
        assert!(pace.is_due(7, 1));
        pace.evaluated(400, 1.0, 0.0);
        assert!(pace.is_due(1, 7), "the next one need not wait for what many took");
        pace.evaluated(64, 0.1, 0.0);
        assert!(!pace.is_due(1, 7) && pace.is_due(1, 0));
    }

    #[test]
    fn a_slow_step_leaves_less_to_the_next_piece() {
        let mut pace = after(1.0, &[(64, 0.3, 0.0), (128, 0.6, 0.0)]);
        for (seconds, n, width) in [(0.1, 12, 128), (0.6, 1, 64), (0.1, 4, 128)] {
            (0..n).for_each(|_| pace.stepped(seconds));
            assert_eq!(pace.width(512, true), width);
        }
    }

    #[test]
    fn rows_stay_on_their_side() {
        use Turn::{Long, Short};
        for (width, most, turn, lacking, expected) in [
            (512, 512, Long, &[1000][..], &[512][..]),
            // The last piece is wide enough.
            (512, 512, Long, &[520], &[456]),
            (64, 512, Long, &[100], &[100]),
            (64, 512, Long, &[150], &[64]),
            (512, 512, Long, &[400, 400], &[256, 256]),
            (128, 512, Long, &[400, 10, 400, 400], &[64, 0, 64, 0]),
            (128, 512, Long, &[100, 100], &[100, 0]),
            (512, 512, Short, &[400, 10, 30, 40], &[0, 10, 30, 0]),
            (512, 512, Short, &[400], &[400]),
            (512, 512, Long, &[20], &[20]),
            // Below 64 tokens a prompt still advances.
            (8, 512, Long, &[400], &[8]),
            (8, 512, Short, &[20], &[8]),
            // The oldest advances.
            (16, 512, Short, &[40, 10], &[16, 0]),
            (32, 32, Long, &[100, 100], &[32, 0]),
        ] {
            assert_eq!(divide(width, most, turn, lacking), expected, "{width} {most} {turn:?} {lacking:?}");
        }
    }

    #[test]
    fn every_prompt_advances_within_the_limit() {
        for (width, most) in [1, 8, 64, 100, 512].into_iter().flat_map(|width| [32, 64, 512].map(|most| (width, most)))
        {
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

    #[test]
    fn prompts_go_whole_and_in_order() {
        for (width, most, lacking, expected) in [
            (512, 2048, &[1000][..], &[512][..]),
            (512, 2048, &[513], &[513]),
            (512, 512, &[513], &[512]),
            (512, 512, &[60, 70, 65, 75], &[60, 70, 65, 75]),
            (512, 512, &[2000, 60, 2000, 70], &[382, 60, 0, 70]),
            (512, 512, &[68; 8], &[68, 68, 68, 68, 68, 68, 68, 36]),
            (10, 64, &[100, 2, 100], &[8, 2, 0]),
            (1, 64, &[5, 5], &[1, 0]),
            (4, 64, &[], &[]),
            (8, 64, &[3, 0], &[3, 0]),
        ] {
            assert_eq!(in_order(width, most, lacking), expected);
        }
    }
}
