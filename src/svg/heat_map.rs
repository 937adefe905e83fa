//! A map of shades.

use std::fmt::Write;

use super::{escape, number, step};

/// Of a heat map: left, top, bottom.
const MAP_MARGINS: [f64; 3] = [64.0, 4.0, 60.0];

/// A map of `rows`, each of cells from 0 to 1; darker is more. `row_names` stand on the left, cells are counted from 0; under
/// it a legend from 0 to 1 says what a cell means.
pub fn heat_map(y_label: &str, x_label: &str, cell_label: &str, row_names: &[String], rows: &[Vec<f64>]) -> String {
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let (cell_width, cell_height) = ((560.0 / n_columns as f64).min(24.0), 12.0);
    let [left, top, bottom] = MAP_MARGINS;
    let (map_width, map_height) = (cell_width * n_columns as f64, cell_height * rows.len() as f64);
    // Room for the legend, however few columns there are.
    let (width, height) = (left + map_width.max(400.0), top + map_height + bottom);
    let mut svg = format!("<svg viewBox='0 0 {width:.0} {height:.0}' role='img' style='max-width:{width:.0}px'>\n");
    for (row, (name, cells)) in row_names.iter().zip(rows).enumerate() {
        let y = top + cell_height * row as f64;
        let name = escape(name);
        let _ = writeln!(svg, "<text class='y' x='{}' y='{:.1}' font-size='9'>{name}</text>", left - 6.0, y + 9.0);
        for (column, value) in cells.iter().enumerate() {
            let x = left + cell_width * column as f64;
            svg.push_str(&cell(
                (x, y),
                (cell_width, cell_height),
                *value,
                &format!("{name}, {column}: {}", number(*value)),
            ));
        }
        svg.push('\n');
    }
    let x_step = step(n_columns as f64).max(1.0).ceil() as usize;
    for column in (0..n_columns).step_by(x_step) {
        let x = left + cell_width * (column as f64 + 0.5);
        let _ = writeln!(svg, "<text class='x' x='{x:.1}' y='{:.1}'>{column}</text>", top + map_height + 14.0);
    }
    let middle = (left + map_width / 2.0, top + map_height / 2.0);
    let _ = writeln!(
        svg,
        "<text class='x' x='{:.1}' y='{:.1}'>{}</text>",
        middle.0,
        top + map_height + 28.0,
        escape(x_label)
    );
    let y_label = escape(y_label);
    let _ = writeln!(svg, "<text class='x' transform='translate(14 {:.1}) rotate(-90)'>{y_label}</text>", middle.1);
    let y = height - 16.0;
    for n in 0..=10u8 {
        svg.push_str(&cell((left + 12.0 * f64::from(n), y), (12.0, 12.0), f64::from(n) / 10.0, ""));
    }
    let _ = writeln!(
        svg,
        "<text class='y' x='{}' y='{:.1}'>0</text><text class='legend' x='{}' y='{:.1}'>1: {}</text>",
        left - 6.0,
        y + 10.0,
        left + 138.0,
        y + 10.0,
        escape(cell_label)
    );
    svg.push_str("</svg>\n");
    svg
}

/// One cell of a heat map; `title` is shown by a pointer that rests on it.
fn cell((x, y): (f64, f64), (width, height): (f64, f64), value: f64, title: &str) -> String {
    let shade = 255.0 * (1.0 - value.clamp(0.0, 1.0).sqrt());
    let green = 64.0 + 0.75 * shade;
    let title = if title.is_empty() { String::new() } else { format!("<title>{title}</title>") };
    format!(
        "<rect x='{x:.1}' y='{y:.1}' width='{width:.2}' height='{height}' fill='rgb({shade:.0},{green:.0},255)'>{title}</rect>"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_drawn_and_the_legend_says_what_it_means() {
        let map =
            heat_map("layer", "<expert>", "most", &["0".into(), "1".into()], &[vec![0.0, 1.0], vec![0.5, f64::NAN]]);
        assert_eq!(map.matches("<rect").count(), 4 + 11, "cells and the legend's");
        assert!(map.contains("&lt;expert&gt;") && map.contains("1: most") && map.contains(">layer</text>"));
    }
}
