//! The user's input lines: joining lines, and recognising commands.

/// Joins lines into one input. A line that ends in a backslash continues; in multi-line mode it is the last one
/// instead.
#[derive(Debug)]
pub struct Joiner {
    multiline: bool,
    text: String,
}

impl Joiner {
    /// An empty input.
    pub fn new(multiline: bool) -> Self {
        Self { multiline, text: String::new() }
    }

    /// Adds a line without its line end; returns the input once it is complete.
    pub fn push(&mut self, line: &str) -> Option<String> {
        let (line, marked) = line.strip_suffix('\\').map_or((line, false), |line| (line, true));
        self.text.push_str(line);
        if marked == self.multiline {
            return Some(std::mem::take(&mut self.text));
        }
        self.text.push('\n');
        None
    }

    /// Whether lines wait for more.
    pub fn has_text(&self) -> bool {
        !self.text.is_empty()
    }

    /// The unfinished input at the end of input; `None` if there is none.
    pub fn finish(self) -> Option<String> {
        let text = self.text.strip_suffix('\n').unwrap_or(&self.text);
        (!self.text.is_empty()).then(|| text.to_owned())
    }
}

/// A parsed input.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    /// A message to the model.
    Message(String),
    /// `/exit`
    Exit,
    /// `/clear`
    Clear,
    /// `/regen`
    Regenerate,
    /// `/forget N`: the number of turns.
    Forget(usize),
    /// `/system TEXT`; nothing shows the current one.
    System(String),
    /// `/save FILE`
    Save(String),
    /// `/load FILE`
    Load(String),
    /// `/read FILE`
    Read(String),
    /// `/image FILE` and `/audio FILE`
    Attach(String),
    /// `/help`
    Help,
    /// Any other word after a slash.
    Unknown(String),
}

/// Explains the commands.
pub const COMMANDS: &str = "  Ctrl-C       stop the answer; clear a line that was begun; end when there is neither
  /exit        end
  /clear       forget the conversation
  /forget N    forget its N oldest turns (1 without a number), which makes room in the context
  /regen       answer again: each time with the next seed
  /system TEXT replace the system prompt; without TEXT, show it
  /save FILE   save the conversation as JSON; /load FILE continues it
  /read FILE   add a text file to the next message
  /image FILE  add an image to the next message (/audio FILE: a sound); needs --mmproj
  /help        this list
  //...        a message that begins with a slash";

impl Input {
    /// Text without a leading slash is a message; of two leading slashes, the first is removed.
    pub fn of(text: String) -> Self {
        let trimmed = text.trim();
        if !trimmed.starts_with('/') {
            return Self::Message(text);
        }
        if trimmed.starts_with("//") {
            return Self::Message(text.replacen('/', "", 1));
        }
        let (command, rest) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
        match (command, rest.trim()) {
            ("/exit" | "/quit", "") => Self::Exit,
            ("/clear", "") => Self::Clear,
            ("/regen", "") => Self::Regenerate,
            ("/help", "") => Self::Help,
            ("/forget", "") => Self::Forget(1),
            ("/forget", number) => match number.parse() {
                Ok(n) if n > 0 => Self::Forget(n),
                _ => Self::Unknown(trimmed.to_owned()),
            },
            ("/system", text) => Self::System(text.to_owned()),
            ("/save", file) if !file.is_empty() => Self::Save(file.to_owned()),
            ("/load", file) if !file.is_empty() => Self::Load(file.to_owned()),
            ("/read", file) if !file.is_empty() => Self::Read(file.to_owned()),
            ("/image" | "/audio", file) if !file.is_empty() => Self::Attach(file.to_owned()),
            _ => Self::Unknown(trimmed.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined() {
        for (multiline, lines, expected) in [
            (false, &["one"][..], &[Some("one")][..]),
            (false, &["one\\", "two"], &[None, Some("one\ntwo")]),
            (false, &["one\\", ""], &[None, Some("one\n")]),
            (true, &["one", "two\\", "three\\"], &[None, Some("one\ntwo"), Some("three")]),
        ] {
            let mut joiner = Joiner::new(multiline);
            let found: Vec<Option<String>> = lines.iter().map(|line| joiner.push(line)).collect();
            assert_eq!(found.iter().map(Option::as_deref).collect::<Vec<_>>(), expected, "{lines:?}");
        }
        let mut joiner = Joiner::new(true);
        joiner.push("one");
        assert_eq!((joiner.finish(), Joiner::new(false).finish()), (Some("one".into()), None));
    }

    #[test]
    fn commands() {
        for (text, input) in [
            ("/exit", Input::Exit),
            (" /quit \n", Input::Exit),
            ("/clear", Input::Clear),
            ("/regen", Input::Regenerate),
            ("/help", Input::Help),
            ("/read a b.txt", Input::Read("a b.txt".into())),
            ("/read", Input::Unknown("/read".into())),
            ("/system  Be brief. ", Input::System("Be brief.".into())),
            ("/system", Input::System(String::new())),
            ("/save a b.json", Input::Save("a b.json".into())),
            ("/load a.json", Input::Load("a.json".into())),
            ("/save", Input::Unknown("/save".into())),
            ("/image a b.png", Input::Attach("a b.png".into())),
            ("/audio a.wav", Input::Attach("a.wav".into())),
            ("/image", Input::Unknown("/image".into())),
            ("/forget", Input::Forget(1)),
            ("/forget 3", Input::Forget(3)),
            ("/forget 0", Input::Unknown("/forget 0".into())),
            ("/forget it", Input::Unknown("/forget it".into())),
            ("/bogus", Input::Unknown("/bogus".into())),
            ("/etc/passwd", Input::Unknown("/etc/passwd".into())),
            ("/exit now", Input::Unknown("/exit now".into())),
            ("//exit", Input::Message("/exit".into())),
            (" // two", Input::Message(" / two".into())),
            ("and/or", Input::Message("and/or".into())),
            ("", Input::Message("".into())),
        ] {
            assert_eq!(Input::of(text.into()), input, "{text}");
        }
    }
}
