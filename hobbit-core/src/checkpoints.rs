//! Checkpoints of a sequence: copies of the state that cannot be rewound (recurrent layers, what a sliding window
//! forgets), each after a number of tokens. Where to take them, and which to keep. Pure.
//!
//! A prompt that shares only a beginning with the tokens of a sequence continues at the last checkpoint within it. So
//! they are taken where prompts of a conversation part: before its last message, before the header of the answer
//! (templates rewrite what follows), and before the last tokens of the prompt.

use std::sync::Arc;

use crate::options::Token;

/// The state of a sequence after its first `n_tokens` tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub n_tokens: usize,
    /// Whether a message of a conversation begins or ends there.
    pub is_boundary: bool,
    /// The bytes, in llama.cpp's format.
    pub state: Arc<Vec<u8>>,
}

/// Checkpoints of one sequence, in the order of their tokens. Copies share the bytes.
#[derive(Clone, Debug, Default)]
pub struct Checkpoints {
    all: Vec<Checkpoint>,
    /// Tokens of the checkpoint that was taken last.
    newest: usize,
}

impl Checkpoints {
    pub fn all(&self) -> &[Checkpoint] {
        &self.all
    }

    /// The last checkpoint within the first `n` tokens.
    pub fn last_within(&self, n: usize) -> Option<&Checkpoint> {
        self.all.iter().rev().find(|checkpoint| checkpoint.n_tokens <= n)
    }

    /// Whether a checkpoint is due after `n` tokens, at a distance of `every` tokens.
    pub fn is_due(&self, n: usize, every: usize) -> bool {
        n >= self.last_within(n).map_or(0, |checkpoint| checkpoint.n_tokens) + every.max(1)
    }

    /// Drops checkpoints after more than `n` tokens.
    pub fn truncate(&mut self, n: usize) {
        self.all.retain(|checkpoint| checkpoint.n_tokens <= n);
    }

    /// Adds a checkpoint, for which [`make_room`] has made room.
    pub fn insert(&mut self, new: Checkpoint) {
        let at = self.all.partition_point(|checkpoint| checkpoint.n_tokens < new.n_tokens);
        self.newest = new.n_tokens;
        self.all.insert(at, new);
    }

    fn bytes(&self) -> usize {
        self.all.iter().map(|checkpoint| checkpoint.state.len()).sum()
    }

    /// Tokens to evaluate again if this checkpoint is missing.
    fn loss(&self, at: usize) -> usize {
        self.all[at].n_tokens - at.checked_sub(1).map_or(0, |before| self.all[before].n_tokens)
    }

    /// Whether the checkpoint is the newest or the last boundary, which the next prompt of a conversation needs.
    fn is_needed(&self, at: usize) -> bool {
        let last_boundary = self.all.iter().rposition(|checkpoint| checkpoint.is_boundary);
        self.all[at].n_tokens == self.newest || last_boundary == Some(at)
    }

    /// The least useful checkpoint and its rank: smaller ranks are dropped first.
    fn least_useful(&self) -> Option<((bool, usize), usize)> {
        (0..self.all.len()).map(|at| ((self.is_needed(at), self.loss(at)), at)).min()
    }
}

/// Makes room for a checkpoint of `bytes` bytes after `n_tokens` tokens of sequence `of`: a sequence keeps at most
/// `n_max`, all sequences together at most `bytes_max`. Drops the least useful checkpoints: first the closest to the
/// one before them, last the newest and the last boundary of a sequence. Returns false if there is no room.
pub fn make_room(
    all: &mut [Checkpoints],
    of: usize,
    n_tokens: usize,
    bytes: usize,
    (n_max, bytes_max): (usize, usize),
) -> bool {
    let Some(bytes_left) = bytes_max.checked_sub(bytes).filter(|_| n_max > 0) else { return false };
    all[of].newest = n_tokens;
    all[of].all.retain(|checkpoint| checkpoint.n_tokens != n_tokens);
    while all[of].all.len() >= n_max {
        let (_, at) = all[of].least_useful().expect("it has some");
        all[of].all.remove(at);
    }
    while all.iter().map(Checkpoints::bytes).sum::<usize>() > bytes_left {
        let least =
            all.iter().enumerate().filter_map(|(sequence, checkpoints)| Some((checkpoints.least_useful()?, sequence)));
        let ((_, at), sequence) = least.min().expect("bytes are in use");
        all[sequence].all.remove(at);
    }
    true
}

/// A place in a prompt where its evaluation pauses for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub at: usize,
    pub is_boundary: bool,
}

/// Tokens of a prompt after its last checkpoint. A single one would count as generated.
pub(crate) const LAST_TOKENS: usize = 2;

/// Minimum tokens since another checkpoint that make one before a message, or after an answer, worth its bytes.
pub const MESSAGE_TOKENS_MIN: usize = 16;

/// The cuts of a prompt, in order; its first `n_known` tokens are not evaluated. Templates write headers of messages
/// with control tokens. Control tokens around an image, whose placeholders are negative, are a part of its message.
/// Cuts depend on the tokens alone, so equal prompts are evaluated in equal pieces.
pub fn cuts(prompt: &[Token], n_known: usize, is_control: impl Fn(Token) -> bool) -> Vec<Cut> {
    let Some(last) = prompt.len().checked_sub(LAST_TOKENS).filter(|last| *last > n_known) else { return Vec::new() };
    let is_placeholder = |at: usize| prompt.get(at).is_some_and(|token| *token < 0);
    let is_header = |at: &usize| {
        is_control(prompt[*at]) && !is_placeholder(at + 1) && !at.checked_sub(1).is_some_and(is_placeholder)
    };
    let controls: Vec<usize> = (n_known..=last).filter(is_header).collect();
    // The header of the answer begins with the last control token, the last message with the one before the last text.
    let header = controls.last().copied().unwrap_or(last);
    let texts = controls.windows(2).rev().find(|pair| pair[1] - pair[0] > 2);
    let message = texts.map(|pair| pair[0]).filter(|at| *at >= n_known + MESSAGE_TOKENS_MIN);
    let boundaries = message.into_iter().chain(Some(header).filter(|_| !controls.is_empty()));
    let mut cuts: Vec<Cut> = boundaries.filter(|at| *at > n_known).map(|at| Cut { at, is_boundary: true }).collect();
    if cuts.last().is_none_or(|cut| cut.at < last) {
        cuts.push(Cut { at: last, is_boundary: false });
    }
    cuts.dedup_by_key(|cut| cut.at);
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(n_tokens: usize, is_boundary: bool) -> Checkpoint {
        Checkpoint { n_tokens, is_boundary, state: Arc::new(vec![0; 10]) }
    }

    fn add(all: &mut [Checkpoints], of: usize, new: Checkpoint, n_max: usize, bytes_max: usize) -> bool {
        let has_room = make_room(all, of, new.n_tokens, new.state.len(), (n_max, bytes_max));
        if has_room {
            all[of].insert(new);
        }
        has_room
    }

    fn kept(own: &Checkpoints) -> Vec<usize> {
        own.all().iter().map(|own| own.n_tokens).collect()
    }

    /// Adds one after each of these numbers of tokens.
    fn filled(n_tokens: &[usize], n_max: usize) -> Checkpoints {
        let mut all = [Checkpoints::default()];
        n_tokens.iter().for_each(|n| assert!(add(&mut all, 0, checkpoint(*n, false), n_max, 1000)));
        let [own] = all;
        own
    }

    #[test]
    fn the_closest_to_another_makes_room() {
        assert_eq!(kept(&filled(&[100, 200, 210, 400], 3)), [100, 200, 400]);
        assert_eq!(kept(&filled(&[100, 200, 300, 302], 3)), [200, 300, 302]);
        // The newest stays, however close it is.
        assert_eq!(kept(&filled(&[100, 200, 300, 102], 4)), [100, 102, 200, 300]);
        assert_eq!(kept(&filled(&[100, 200, 300, 102, 400], 4)), [100, 200, 300, 400]);
        assert_eq!(kept(&filled(&[5, 5, 5], 3)), [5]);
    }

    #[test]
    fn the_last_boundary_stays() {
        let mut all = [Checkpoints::default()];
        for (n, is_boundary) in [(100, true), (200, false), (205, true), (300, false), (400, false)] {
            add(&mut all, 0, checkpoint(n, is_boundary), 3, 1000);
        }
        assert_eq!(kept(&all[0]), [200, 205, 400]);
    }

    #[test]
    fn sequences_share_the_bytes() {
        let mut all = [Checkpoints::default(), Checkpoints::default()];
        for n in [100, 200, 300] {
            assert!(add(&mut all, 0, checkpoint(n, false), 32, 45));
        }
        assert!(add(&mut all, 1, checkpoint(7, false), 32, 45));
        assert_eq!((kept(&all[0]), kept(&all[1])), (vec![100, 200, 300], vec![7]));
        assert!(add(&mut all, 1, checkpoint(50, false), 32, 45));
        assert_eq!((kept(&all[0]), kept(&all[1])), (vec![100, 200, 300], vec![50]));
        assert!(!add(&mut all, 1, checkpoint(60, false), 32, 9), "larger than all memory");
        assert!(!add(&mut all, 1, checkpoint(60, false), 0, 1000));
        let last = Checkpoint { state: Arc::new(vec![0; 45]), ..checkpoint(60, false) };
        assert!(add(&mut all, 1, last, 32, 45));
        assert_eq!((kept(&all[0]), kept(&all[1])), (vec![], vec![60]));
    }

    #[test]
    fn a_sequence_goes_back_to_the_last_one_within() {
        let mut own = filled(&[100, 200], 8);
        assert_eq!(own.last_within(199).map(|own| own.n_tokens), Some(100));
        assert_eq!(own.last_within(200).map(|own| own.n_tokens), Some(200));
        assert_eq!(own.last_within(99), None);
        assert!(own.is_due(300, 100) && !own.is_due(299, 100) && !own.is_due(200, 0) && own.is_due(201, 0));
        own.truncate(150);
        assert_eq!(kept(&own), [100]);
    }

    /// `<` and `>` are control tokens.
    fn cuts_of(text: &str, n_known: usize) -> Vec<(usize, bool)> {
        let prompt: Vec<Token> = text.bytes().map(Token::from).collect();
        let is_control = |token| [b'<', b'>'].map(Token::from).contains(&token);
        cuts(&prompt, n_known, is_control).into_iter().map(|cut| (cut.at, cut.is_boundary)).collect()
    }

    #[test]
    fn prompts_are_cut_where_conversations_part() {
        // Before the last message, before the header of the answer, before the last tokens.
        let chat = "<s: You are brief.>.<u: Hello>.<a:.";
        assert_eq!(cuts_of(chat, 0), [(20, true), (31, true), (33, false)]);
        assert_eq!(cuts_of(chat, 15), [(31, true), (33, false)]);
        assert_eq!(cuts_of(chat, 31), [(33, false)]);
        assert_eq!(cuts_of(chat, 33), []);
        // A short system prompt is read again.
        assert_eq!(cuts_of("<s: Hi>.<u: Hello>.<a", 0), [(19, true)]);
        assert_eq!(cuts_of("no template at all", 0), [(16, false)]);
        assert_eq!(cuts_of("ab", 0), []);
        assert_eq!(cuts_of("", 0), []);
        assert_eq!(cuts_of("<ab", 0), [(1, false)]);
    }

    #[test]
    fn an_image_is_a_part_of_its_message() {
        let text = "<s: You are brief.>.<u:<#####>what?>.<a:.";
        let prompt: Vec<Token> = text.bytes().map(|byte| if byte == b'#' { -7 } else { byte.into() }).collect();
        let is_control = |token| [b'<', b'>'].map(Token::from).contains(&token);
        let found = cuts(&prompt, 0, is_control);
        let at: Vec<usize> = found.iter().map(|cut| cut.at).collect();
        assert_eq!(at, [20, text.len() - 4, text.len() - 2]);
    }
}
