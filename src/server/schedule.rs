//! How wide a piece of a prompt may be while others wait for their next token, and how it is divided. Pure: it learns from what it is
//! told.

/// Widths that are told apart: 1, 2, 4, … tokens.
const WIDTHS: usize = 16;

/// The part of a measurement that the newest one makes.
const NEWEST: f64 = 0.5;

/// The first width of which anything is learned.
const FIRST: usize = 8;

/// What pieces of prompts and steps of decoding took.
#[derive(Clone, Debug)]
pub struct Pace {
    /// No stream is to wait longer for its next token, in seconds.
    limit: f64,
    /// A step of all that generate, in seconds.
    step: Option<f64>,
    /// Pieces of `2^i` to `2^(i+1) - 1` tokens: tokens and seconds.
    pieces: [Option<(f64, f64)>; WIDTHS],
}

impl Pace {
    pub fn new(limit: f64) -> Self {
        Self { limit, step: None, pieces: [None; WIDTHS] }
    }

    /// All that generate have their next token.
    pub fn stepped(&mut self, seconds: f64) {
        self.step = Some(blend(self.step, seconds));
    }

    /// A piece of so many tokens was evaluated.
    pub fn evaluated(&mut self, n_tokens: usize, seconds: f64) {
        if n_tokens > 0 {
            let own = &mut self.pieces[bucket(n_tokens)];
            let (width, took) = own.unzip();
            *own = Some((blend(width, n_tokens as f64), blend(took, seconds)));
        }
    }

    /// Tokens of prompts to evaluate now, at most `widest`: as many as are expected to keep the limit while others generate, and the
    /// least there is where none are.
    pub fn width(&self, widest: usize, others_generate: bool) -> usize {
        if !others_generate {
            return widest;
        }
        let left = self.limit - self.step.unwrap_or(0.0);
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

    /// Seconds that a piece of so many tokens takes, as far as that is known: of wider ones than any before, in proportion.
    fn expected(&self, width: usize) -> Option<f64> {
        let at = bucket(width);
        if let Some((_, seconds)) = self.pieces[at] {
            return Some(seconds);
        }
        let below = self.pieces[..at].iter().flatten().next_back();
        if let Some((known, seconds)) = below {
            return Some(seconds * width as f64 / known.max(1.0));
        }
        // Narrower than any before: not more than those.
        self.pieces[at..].iter().flatten().next().map(|(_, seconds)| *seconds)
    }
}

fn bucket(n_tokens: usize) -> usize {
    (n_tokens.max(1).ilog2() as usize).min(WIDTHS - 1)
}

fn blend(before: Option<f64>, now: f64) -> f64 {
    before.map_or(now, |before| before + NEWEST * (now - before))
}

/// Divides `width` among prompts that lack so many tokens: none gets more than it lacks, what one leaves goes to the others, and the
/// first get what cannot be divided. A prompt of which one token would be left gets that too, as far as `most` tokens together reach:
/// alone it would pass for a generated one.
pub fn divide(width: usize, most: usize, lacking: &[usize]) -> Vec<usize> {
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
            pace.evaluated(width, 0.2 + 0.005 * width as f64);
        }
        assert!(widths.is_sorted(), "{widths:?}");
        assert_eq!(widths.last(), Some(&64), "{widths:?}");
    }

    #[test]
    fn what_takes_too_long_gets_narrower_and_goes_on() {
        let mut pace = Pace::new(0.1);
        for _ in 0..20 {
            let width = pace.width(512, true);
            pace.evaluated(width, 5.0);
        }
        assert_eq!(pace.width(512, true), 1);
    }

    #[test]
    fn shares_are_fair() {
        assert_eq!(divide(512, 2048, &[1000]), [512]);
        assert_eq!(divide(512, 2048, &[513]), [513]);
        assert_eq!(divide(512, 512, &[513]), [512]);
        assert_eq!(divide(10, 64, &[100, 2, 100]), [4, 2, 4]);
        assert_eq!(divide(1, 64, &[5, 5]), [1, 0]);
        assert_eq!(divide(4, 64, &[]), []);
        assert_eq!(divide(8, 64, &[3, 0]), [3, 0]);
    }
}
