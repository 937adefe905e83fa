//! Tables inside a Markdown file, between markers.

use thiserror::Error;

const BEGIN: &str = "<!-- hobbit-prove ";
const CLOSE: &str = " -->";

/// Why a file cannot be filled in.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum MarkerError {
    /// A marker names no table.
    #[error("line {line}: there is no table '{name}'; expected one of {known}")]
    Unknown {
        /// Counted from 1.
        line: usize,
        /// What was found.
        name: String,
        /// The tables.
        known: String,
    },
    /// The end of a table is missing.
    #[error(
        "line {line}: '<!-- hobbit-prove {name} -->' has no end; put '<!-- /hobbit-prove {name} -->' where the table ends"
    )]
    NoEnd {
        /// Of the begin, counted from 1.
        line: usize,
        /// The table.
        name: String,
    },
    /// A begin that does not end on its line.
    #[error("line {line}: the marker is not closed; expected '<!-- hobbit-prove NAME -->'")]
    NotClosed {
        /// Counted from 1.
        line: usize,
    },
    /// No record belongs to a table that the file wants.
    #[error("line {line}: no record belongs to table '{name}'; name its files too")]
    NoRecords {
        /// Counted from 1.
        line: usize,
        /// The table.
        name: String,
    },
    /// Nothing to fill in.
    #[error(
        "no marker; put '<!-- hobbit-prove NAME -->' and '<!-- /hobbit-prove NAME -->' where a table belongs, NAME one of {known}"
    )]
    None {
        /// The tables.
        known: String,
    },
}

/// `text` with every table in its place. `known` names the tables; `table` makes one, `None` where no record belongs to it.
///
/// # Errors
/// [`MarkerError`]
pub fn fill(text: &str, known: &[&str], table: impl Fn(&str) -> Option<String>) -> Result<String, MarkerError> {
    let known_names = || known.join(", ");
    let mut filled = String::new();
    let mut rest = text;
    let mut any = false;
    while let Some(at) = begin(rest) {
        any = true;
        let line = 1 + text[..text.len() - rest.len() + at].matches('\n').count();
        let after = &rest[at + BEGIN.len()..];
        let first_line = after.split('\n').next().unwrap_or_default();
        let name = first_line.split_once(CLOSE).ok_or(MarkerError::NotClosed { line })?.0;
        if !known.contains(&name) {
            return Err(MarkerError::Unknown { line, name: name.into(), known: known_names() });
        }
        let body = &after[name.len() + CLOSE.len()..];
        let end_marker = format!("<!-- /hobbit-prove {name}{CLOSE}");
        // An end beyond the next begin is another table's.
        let within = &body[..begin(body).unwrap_or(body.len())];
        let end = within.find(&end_marker).ok_or_else(|| MarkerError::NoEnd { line, name: name.into() })?;
        let content = table(name).ok_or_else(|| MarkerError::NoRecords { line, name: name.into() })?;
        filled.push_str(&rest[..at + BEGIN.len() + name.len() + CLOSE.len()]);
        filled.push('\n');
        filled.push_str(content.trim_end());
        filled.push('\n');
        filled.push_str(&end_marker);
        rest = &body[end + end_marker.len()..];
    }
    filled.push_str(rest);
    if any { Ok(filled) } else { Err(MarkerError::None { known: known_names() }) }
}

/// Where the first marker begins that has its line to itself: one within a sentence is only talked about.
fn begin(text: &str) -> Option<usize> {
    let mut found = text.match_indices(BEGIN).map(|(at, _)| at);
    found.find(|&at| text[..at].rsplit('\n').next().is_none_or(|before| before.trim().is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 2] = ["peers", "curve"];

    fn filled(text: &str) -> Result<String, MarkerError> {
        fill(text, &KNOWN, |name| Some(format!("| {name} |\n")))
    }

    #[test]
    fn what_stands_between_markers_is_replaced_and_nothing_else() {
        let text = "a\n<!-- hobbit-prove peers -->\nold\nold\n<!-- /hobbit-prove peers -->\nb <!-- other --> `<!-- hobbit-prove NAME -->`\n\
                    <!-- hobbit-prove curve --><!-- /hobbit-prove curve -->";
        let expected = "a\n<!-- hobbit-prove peers -->\n| peers |\n<!-- /hobbit-prove peers -->\nb <!-- other --> `<!-- hobbit-prove NAME -->`\n\
                        <!-- hobbit-prove curve -->\n| curve |\n<!-- /hobbit-prove curve -->";
        assert_eq!(filled(text).unwrap(), expected);
        assert_eq!(filled(expected).unwrap(), expected, "a second time changes nothing");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let message = |text: &str| filled(text).unwrap_err().to_string();
        let unknown = message("\n<!-- hobbit-prove speed -->\n<!-- /hobbit-prove speed -->");
        assert!(
            unknown.contains("line 2") && unknown.contains("'speed'") && unknown.contains("peers, curve"),
            "{unknown}"
        );
        let endless = message("<!-- hobbit-prove peers -->\n<!-- hobbit-prove curve -->\n<!-- /hobbit-prove peers -->");
        assert!(endless.contains("line 1") && endless.contains("<!-- /hobbit-prove peers -->"), "{endless}");
        assert!(message("<!-- hobbit-prove peers\n-->").contains("not closed"));
        assert!(message("words").contains("no marker"));
        let none = fill("<!-- hobbit-prove peers --><!-- /hobbit-prove peers -->", &KNOWN, |_| None);
        assert_eq!(none, Err(MarkerError::NoRecords { line: 1, name: "peers".into() }));
    }
}
