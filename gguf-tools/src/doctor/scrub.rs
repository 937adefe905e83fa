//! Messages without directories: a page that is pasted in public names no user.

use std::path::PathBuf;

/// Replaces paths by the names of their files.
#[derive(Debug, Default)]
pub struct Scrub(Vec<(String, String)>);

const SEPARATORS: [char; 2] = ['/', '\\'];

/// Replaces a directory in messages.
const DIRECTORY: &str = "DIRECTORY";

impl Scrub {
    /// Knows these files and directories as given and absolute: names with spaces could not be guessed.
    pub fn of(files: impl IntoIterator<Item = PathBuf>, directories: impl IntoIterator<Item = PathBuf>) -> Self {
        let mut known = Vec::new();
        let forms = |path: &PathBuf| {
            let forms = [Some(path.clone()), std::path::absolute(path).ok(), path.canonicalize().ok()];
            forms.into_iter().flatten()
        };
        for form in files.into_iter().flat_map(|path| forms(&path).collect::<Vec<_>>()) {
            known.push((form.display().to_string(), crate::shared::file_name(&form)));
            known.extend(form.parent().map(|parent| (parent.display().to_string(), DIRECTORY.to_owned())));
        }
        for form in directories.into_iter().flat_map(|path| forms(&path).collect::<Vec<_>>()) {
            known.push((form.display().to_string(), DIRECTORY.to_owned()));
        }
        // As JSON has them.
        let escaped = known
            .iter()
            .filter(|(path, _)| path.contains('\\'))
            .map(|(path, name)| (path.replace('\\', r"\\"), name.clone()));
        known.extend(escaped.collect::<Vec<_>>());
        // A file before the directory that it begins with.
        known.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        known.retain(|(path, _)| path.len() > 1 && path.contains(SEPARATORS));
        Self(known)
    }

    /// The text with the names of files alone.
    pub fn text(&self, text: &str) -> String {
        let text = self.0.iter().fold(text.to_owned(), |text, (path, name)| text.replace(path, name));
        let mut out = String::new();
        let (mut rest, mut before) = (text.as_str(), ' ');
        while let Some(letter) = rest.chars().next() {
            let is_start = before.is_whitespace() || "'\"`(=:".contains(before);
            let len = if is_start { path_len(rest) } else { 0 };
            if len > 1 {
                let (path, more) = rest.split_at(len);
                let name = path.trim_end_matches(SEPARATORS).rsplit(SEPARATORS).next();
                out.push_str(name.unwrap_or_default());
                (before, rest) = ('x', more);
            } else {
                out.push(letter);
                (before, rest) = (letter, &rest[letter.len_utf8()..]);
            }
        }
        out
    }
}

/// Length of the absolute path that the text begins with: `/…`, `C:\…` or `\\server\…`; 0 if there is none.
fn path_len(text: &str) -> usize {
    let verbatim = if text.starts_with(r"\\?\") { 4 } else { 0 };
    let drive = match text.as_bytes()[verbatim..] {
        [letter, b':', b'/' | b'\\', ..] if letter.is_ascii_alphabetic() => 2,
        _ => 0,
    };
    if verbatim + drive == 0 && !text.starts_with('/') && !text.starts_with(r"\\") {
        return 0;
    }
    let begin = verbatim + drive;
    let end = text[begin..].find(|letter: char| letter.is_whitespace() || "'\"`():;,".contains(letter));
    end.map_or(text.len(), |end| begin + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_files_stay() {
        let scrub = Scrub::of(
            ["/home/jo doe/models/m.gguf".into(), "../jane/n.gguf".into()],
            ["/home/jo doe".into(), "/".into()],
        );
        for (text, expected) in [
            (
                "the file system of /home/jo doe/models/m.gguf refuses O_DIRECT",
                "the file system of m.gguf refuses O_DIRECT",
            ),
            ("cannot write /home/jo doe/models/x", "cannot write DIRECTORY/x"),
            ("no space in /home/jo doe", "no space in DIRECTORY"),
            ("../jane/n.gguf: truncated", "n.gguf: truncated"),
            ("'/tmp/jane/a.so': no (/usr/lib/b.so)", "'a.so': no (b.so)"),
            (r"cannot open C:\Users\jo\m.gguf: (D:/models/jane/n.gguf)", "cannot open m.gguf: (n.gguf)"),
            (r"\\?\C:\Users\jo\m.gguf: no; '\\host\jo\x'; '\n'", r"m.gguf: no; 'x'; '\n'"),
            ("1/2 of 3 GB/s, and / alone", "1/2 of 3 GB/s, and / alone"),
        ] {
            assert_eq!(scrub.text(text), expected);
        }
    }
}
