//! Reverse prompts: texts that end a generation, independent of token boundaries.

/// Finds the first of several texts in a stream, and holds back text that may become part of one.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The end of the stream that may still become a stop text; always a proper prefix of one.
    held: String,
}

impl StopMatcher {
    /// Matches any of `stops`; empty texts are ignored.
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Adds the next piece; returns the text outside stop texts, and the completed stop text. The rest of the piece
    /// after it is dropped, and the matcher starts over.
    pub fn push(&mut self, piece: &str) -> (String, Option<String>) {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        let earliest = self
            .stops
            .iter()
            .filter_map(|stop| text.find(stop.as_str()).map(|start| (start, stop)))
            .min_by_key(|&(start, stop)| (start + stop.len(), start));
        if let Some((start, stop)) = earliest {
            text.truncate(start);
            return (text, Some(stop.clone()));
        }
        let kept = text.len() - self.undecided(&text);
        self.held = text.split_off(kept);
        (text, None)
    }

    /// The held-back text when the stream ends without a stop.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length in bytes of the longest suffix of `text` that begins a stop text.
    fn undecided(&self, text: &str) -> usize {
        self.stops
            .iter()
            .flat_map(|stop| stop.char_indices().map(|(end, _)| &stop[..end]))
            .filter(|start| text.ends_with(start))
            .map(str::len)
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(&stops.iter().map(|stop| stop.to_string()).collect::<Vec<_>>())
    }

    /// Emitted text and the stop, for a stream cut into `pieces`.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut matcher = matcher(stops);
        let mut out = String::new();
        for piece in pieces {
            let (text, stop) = matcher.push(piece);
            out.push_str(&text);
            if stop.is_some() {
                return (out, stop);
            }
        }
        out.push_str(&matcher.finish());
        (out, None)
    }

    #[test]
    fn every_cut_finds_the_stop() {
        let stream = "Bob: hi\nUser: rest";
        for first in 0..=stream.len() {
            for second in first..=stream.len() {
                let pieces = [&stream[..first], &stream[first..second], &stream[second..]];
                assert_eq!(run(&["User:"], &pieces), ("Bob: hi\n".into(), Some("User:".into())));
            }
        }
    }

    #[test]
    fn table() {
        let none = |text: &str| (text.to_owned(), None);
        let some = |text: &str, stop: &str| (text.to_owned(), Some(stop.to_owned()));
        for (stops, pieces, expected) in [
            (&[][..], &["abc"][..], none("abc")),
            (&[""], &["abc"], none("abc")),
            (&["x"], &["abc"], none("abc")),
            (&["aab"], &["a", "a", "a", "b"], some("a", "aab")),
            (&["User:"], &["Use", "less"], none("Useless")),
            (&["User:"], &["User"], none("User")),
            (&["bc", "abcd"], &["abcd"], some("a", "bc")),
            (&["abcd", "b"], &["abcd"], some("a", "b")),
            (&["é!"], &["caf", "é", "!"], some("caf", "é!")),
            (&["é!"], &["caf", "é", "?"], none("café?")),
        ] {
            assert_eq!(run(stops, pieces), expected, "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn only_what_may_become_a_stop_is_held_back() {
        let mut matcher = matcher(&["\nUser:"]);
        assert_eq!(matcher.push("one\n"), ("one".into(), None));
        assert_eq!(matcher.push("two"), ("\ntwo".into(), None));
        assert_eq!(matcher.finish(), "");
    }
}
