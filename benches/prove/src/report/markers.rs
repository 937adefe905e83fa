//! Tables inside a Markdown file, between markers.

use anyhow::{Context, Result, bail, ensure};

const BEGIN: &str = "<!-- hobbit-prove ";
const CLOSE: &str = " -->";

/// `text` with every table in its place. `known` names the tables; `table` makes one, `None` where no record belongs to it.
///
/// # Errors
/// A marker that names no table, does not end or has no end, a table without records, or no marker at all.
pub fn fill(text: &str, known: &[&str], table: impl Fn(&str) -> Option<String>) -> Result<String> {
    let all = known.join(", ");
    let mut filled = String::new();
    let mut rest = text;
    let mut any = false;
    while let Some(at) = begin(rest) {
        any = true;
        let line = 1 + text[..text.len() - rest.len() + at].matches('\n').count();
        let after = &rest[at + BEGIN.len()..];
        let first_line = after.split('\n').next().unwrap_or_default();
        let Some((name, _)) = first_line.split_once(CLOSE) else {
            bail!("line {line}: the marker is not closed; expected '<!-- hobbit-prove NAME -->'");
        };
        ensure!(known.contains(&name), "line {line}: there is no table '{name}'; expected one of {all}");
        let body = &after[name.len() + CLOSE.len()..];
        let end_marker = format!("<!-- /hobbit-prove {name}{CLOSE}");
        // An end beyond the next begin is another table's.
        let within = &body[..begin(body).unwrap_or(body.len())];
        let end = within.find(&end_marker).with_context(|| {
            format!("line {line}: '<!-- hobbit-prove {name} -->' has no end; put '{end_marker}' where the table ends")
        })?;
        let content = table(name)
            .with_context(|| format!("line {line}: no record belongs to table '{name}'; name its files too"))?;
        let marker = &rest[..at + BEGIN.len() + name.len() + CLOSE.len()];
        filled.extend([marker, "\n", content.trim_end(), "\n", &end_marker]);
        rest = &body[end + end_marker.len()..];
    }
    filled.push_str(rest);
    ensure!(
        any,
        "no marker; put '<!-- hobbit-prove NAME -->' and '<!-- /hobbit-prove NAME -->' where a table belongs, NAME one of {all}"
    );
    Ok(filled)
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

    fn filled(text: &str) -> Result<String> {
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
        let error = none.unwrap_err().to_string();
        assert_eq!(error, "line 1: no record belongs to table 'peers'; name its files too");
    }
}
