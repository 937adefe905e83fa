//! A table, as Markdown and as HTML. Crates for tables draw them for terminals: none leaves out what repeats, escapes for both
//! formats, and keeps numbers and units together.

use std::fmt::Write;

use super::number::SPREAD;
use hobbit_programs::plot::escape;

/// What stands in one place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cell {
    /// Plain text: each format escapes it itself.
    pub text: String,
    /// Whether it stands out.
    pub bold: bool,
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: text.into(), bold: false }
    }
}

/// Text that stands out.
pub fn bold(text: String) -> Cell {
    Cell { text, bold: true }
}

/// Rows under a heading.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// As in `--table` and in markers.
    pub name: &'static str,
    /// What it shows.
    pub title: &'static str,
    /// How to read it.
    pub note: &'static str,
    /// On how many threads, up to the space behind.
    pub threads: String,
    /// Of each column.
    pub heading: Vec<String>,
    /// So many columns hold words and not numbers; what repeats in them from row to row is left blank.
    pub n_words: usize,
    /// Each as long as the heading.
    pub rows: Vec<Vec<Cell>>,
    /// The files it was made of.
    pub files: Vec<String>,
}

impl Table {
    /// Rows with what repeats left out.
    fn sparse(&self) -> impl Iterator<Item = Vec<Cell>> {
        let blank = |at: usize| {
            let row = &self.rows[at];
            let before = at.checked_sub(1).map(|before| &self.rows[before]);
            let same = before.map_or(0, |before| row.iter().zip(before).take_while(|(a, b)| a == b).count());
            // A row that says nothing else keeps its last word.
            same.min(self.n_words.saturating_sub(1))
        };
        (0..self.rows.len()).map(move |at| {
            let cells = self.rows[at].iter().enumerate();
            cells.map(|(column, cell)| if column < blank(at) { Cell::default() } else { cell.clone() }).collect()
        })
    }

    /// How to read it, up to the space behind; what parentheses hold is said where there are any.
    pub fn remarks(&self) -> String {
        let has_spread = self.rows.iter().flatten().any(|cell| cell.text.contains(SPREAD));
        let spread = if has_spread { "Several runs: the median (least to most). " } else { "" };
        let gap = if self.note.is_empty() { "" } else { " " };
        format!("{}{gap}{spread}{}", self.note, self.threads)
    }

    /// As GitHub's Markdown, with its source below.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        let mut line = |cells: &mut dyn Iterator<Item = String>| {
            text.push('|');
            for cell in cells {
                let _ = write!(text, " {cell} |");
            }
            text.push('\n');
        };
        line(&mut self.heading.iter().map(|name| in_markdown(name)));
        line(&mut (0..self.heading.len()).map(|column| if column < self.n_words { "---" } else { "---:" }.to_owned()));
        for row in self.sparse() {
            line(&mut row.iter().map(|cell| match (in_markdown(&cell.text), cell.bold) {
                (text, true) if !text.is_empty() => format!("**{text}**"),
                (text, _) => text,
            }));
        }
        let files: Vec<String> = self.files.iter().map(|file| in_markdown(file)).collect();
        let note = in_markdown(&self.remarks());
        let _ = write!(text, "\n{note}Made by `hobbit-prove report` from {}.\n", files.join(", "));
        text
    }

    /// As an HTML table.
    pub fn html(&self) -> String {
        let class = |column: usize| if column < self.n_words { " class='words'" } else { "" };
        let mut text = "<div class='wide'><table>\n<thead><tr>".to_owned();
        for (column, name) in self.heading.iter().enumerate() {
            let _ = write!(text, "<th{}>{}</th>", class(column), escape(name));
        }
        text.push_str("</tr></thead>\n<tbody>\n");
        for row in self.sparse() {
            text.push_str("<tr>");
            for (column, cell) in row.iter().enumerate() {
                let inner = with_units(escape(&cell.text));
                let inner = if cell.bold { format!("<b>{inner}</b>") } else { inner };
                let _ = write!(text, "<td{}>{inner}</td>", class(column));
            }
            text.push_str("</tr>\n");
        }
        text.push_str("</tbody></table></div>\n");
        text
    }
}

/// Numbers that keep their units on their line: cells may break anywhere else.
fn with_units(text: String) -> String {
    [" %", " KiB", " MiB", " GiB"].iter().fold(text, |text, unit| text.replace(unit, &unit.replace(' ', "&nbsp;")))
}

/// Text inside a cell of Markdown: on one line, and nothing that is markup.
fn in_markdown(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        match letter {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '\\' | '|' | '`' | '*' | '[' | ']' | '~' | '$' => escaped.extend(['\\', letter]),
            '_' if escaped.is_empty() || escaped.ends_with(' ') => escaped.push_str("\\_"),
            letter if letter.is_control() => escaped.push(' '),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[[&str; 3]]) -> Table {
        Table {
            heading: ["model", "engine", "t/s"].map(str::to_owned).to_vec(),
            n_words: 2,
            rows: rows.iter().map(|row| row.map(Cell::from).to_vec()).collect(),
            note: "Higher is better.",
            files: vec!["a.jsonl".into(), "b|.json".into()],
            ..Table::default()
        }
    }

    #[test]
    fn markdown_and_html_say_the_same() {
        let mut table = table(&[["m", "hobbit", "9.43"], ["m", "llama.cpp", "0.271"]]);
        table.rows[0][2].bold = true;
        let markdown = "| model | engine | t/s |\n| --- | --- | ---: |\n| m | hobbit | **9.43** |\n|  | llama.cpp | 0.271 |\n\n\
                        Higher is better. Made by `hobbit-prove report` from a.jsonl, b\\|.json.\n";
        assert_eq!(table.markdown(), markdown);
        let html = table.html();
        assert!(html.contains("<td class='words'>m</td><td class='words'>hobbit</td><td><b>9.43</b></td>"), "{html}");
        assert_eq!(html.matches(">m<").count(), 1);
        table.rows[0][2] = "1.12 of 1.25 GiB (89.3 %)".into();
        assert!(table.html().contains("<td>1.12 of 1.25&nbsp;GiB (89.3&nbsp;%)</td>"), "{}", table.html());
    }

    #[test]
    fn names_cannot_leave_their_cell() {
        let evil = "a|b\n<!-- /hobbit-prove peers --> **x** [y](z) `c` \\ _d_ q8_0";
        let table = table(&[[evil, "</td><script>", "'\""]]);
        let markdown = table.markdown();
        assert_eq!(markdown.lines().count(), 5, "{markdown}");
        assert!(
            markdown.contains(r"| a\|b &lt;!-- /hobbit-prove peers --&gt; \*\*x\*\* \[y\](z) \`c\` \\ \_d_ q8_0 |"),
            "{markdown}"
        );
        assert!(table.html().contains("&lt;/td&gt;&lt;script&gt;") && table.html().contains("&#39;&quot;"));
    }

    #[test]
    fn repeated_rows_keep_a_word_and_no_rows_are_no_trouble() {
        assert!(table(&[["m", "e", "1"], ["m", "e", "1"]]).markdown().contains("|  | e | 1 |"));
        assert!(table(&[]).html().contains("<tbody>\n</tbody>") && table(&[]).markdown().lines().count() == 4);
    }
}
