//! Columns of text, without borders or blanks at line ends, so that they can be cut and compared; crates for tables draw them.

use std::fmt::Write;

/// Rows of equal length under a heading; the first `n_left` columns to the left, numbers to the right.
pub fn table(heading: &[&str], rows: &[Vec<String>], n_left: usize) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([heading[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (column, cell) in cells.enumerate() {
            let (gap, width) = (if column == 0 { "" } else { "  " }, widths[column]);
            let _ = match column < n_left {
                true => write!(line, "{gap}{cell:<width$}"),
                false => write!(line, "{gap}{cell:>width$}"),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    line(&mut heading.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    text
}
