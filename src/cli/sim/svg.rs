//! Line plots and heat maps as SVG text.

use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 320.0;
/// Left, right, top, bottom of the plotted area.
const MARGINS: [f64; 4] = [64.0, 150.0, 16.0, 44.0];
/// Paul Tol's qualitative colours, which the colour-blind can tell apart.
const COLOURS: [&str; 10] =
    ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#ee8866", "#44bb99", "#000000"];

/// One line of a plot.
pub struct Line {
    pub name: String,
    /// (x, y); what is not finite is left out.
    pub points: Vec<(f64, f64)>,
}

/// A plot of lines with its axes; the y axis begins at 0.
pub fn plot(x_label: &str, y_label: &str, lines: &[Line]) -> String {
    let points = || lines.iter().flat_map(|line| &line.points).filter(|(x, y)| x.is_finite() && y.is_finite());
    let x_min = points().map(|p| p.0).fold(f64::INFINITY, f64::min);
    let x_max = points().map(|p| p.0).fold(f64::NEG_INFINITY, f64::max);
    let y_max = points().map(|p| p.1).fold(0.0, f64::max);
    if points().next().is_none() {
        return "<p>Nothing to plot.</p>\n".into();
    }
    let x_span = if x_max > x_min { x_max - x_min } else { 1.0 };
    let y_step = step(y_max);
    let y_top = if y_max > 0.0 { (y_max / y_step).ceil() * y_step } else { 1.0 };
    let [left, right, top, bottom] = MARGINS;
    let x_at = |x: f64| left + (x - x_min) / x_span * (WIDTH - left - right);
    let y_at = |y: f64| HEIGHT - bottom - y / y_top * (HEIGHT - top - bottom);
    let mut svg = format!("<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>\n");
    let mut y = 0.0;
    while y <= y_top * 1.0001 {
        let _ = writeln!(
            svg,
            "<line class='grid' x1='{left}' x2='{}' y1='{at:.1}' y2='{at:.1}'/><text class='y' x='{}' y='{:.1}'>{}</text>",
            WIDTH - right,
            left - 6.0,
            y_at(y) + 4.0,
            number(y),
            at = y_at(y),
        );
        y += y_step;
    }
    let x_step = step(x_span);
    let mut x = (x_min / x_step).ceil() * x_step;
    while x <= x_max + x_step * 1e-6 {
        let _ = writeln!(svg, "<text class='x' x='{:.1}' y='{}'>{}</text>", x_at(x), HEIGHT - bottom + 16.0, number(x));
        x += x_step;
    }
    let _ = writeln!(
        svg,
        "<text class='x' x='{:.1}' y='{}'>{}</text>",
        (left + WIDTH - right) / 2.0,
        HEIGHT - 8.0,
        escape(x_label)
    );
    let _ = writeln!(
        svg,
        "<text class='x' transform='translate(14 {:.1}) rotate(-90)'>{}</text>",
        (HEIGHT - bottom + top) / 2.0,
        escape(y_label)
    );
    for (line, at) in lines.iter().zip(0usize..) {
        let colour = COLOURS[at % COLOURS.len()];
        let dashes = if at >= COLOURS.len() { " stroke-dasharray='5 3'" } else { "" };
        let path: String = line
            .points
            .iter()
            .filter(|(x, y)| x.is_finite() && y.is_finite())
            .map(|&(x, y)| format!("{:.1},{:.1} ", x_at(x), y_at(y)))
            .collect();
        let key = top + 6.0 + 14.0 * at as f64;
        let _ = writeln!(
            svg,
            "<polyline points='{}' fill='none' stroke='{colour}' stroke-width='1.6'{dashes}><title>{name}</title></polyline>\
             <line class='key' x1='{}' x2='{}' y1='{key:.1}' y2='{key:.1}' stroke='{colour}' stroke-width='1.6'{dashes}/>\
             <text x='{}' y='{:.1}'>{name}</text>",
            path.trim_end(),
            WIDTH - right + 8.0,
            WIDTH - right + 24.0,
            WIDTH - right + 28.0,
            key + 4.0,
            name = escape(&line.name),
        );
    }
    svg.push_str("</svg>\n");
    svg
}

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

/// Text inside markup.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&#39;").replace('"', "&quot;")
}

/// A round step that divides a span into some five parts.
fn step(span: f64) -> f64 {
    if span <= 0.0 || !span.is_finite() {
        return 1.0;
    }
    let rough = span / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|factor| factor * power >= rough * 0.999);
    factor.unwrap_or(10.0) * power
}

fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() || text == "-0" { "0".into() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        for (span, expected) in
            [(1.0, 0.2), (100.0, 20.0), (0.9, 0.2), (7.0, 2.0), (12.0, 2.5), (40.0, 10.0), (0.0, 1.0)]
        {
            assert!((step(span) - expected).abs() < 1e-9, "{span}: {}", step(span));
        }
        assert_eq!([number(0.25), number(0.0), number(20.0)], ["0.25", "0", "20"]);
    }

    #[test]
    fn every_line_is_drawn_and_nothing_can_break_out_of_the_markup() {
        let line = |name: &str, points: &[(f64, f64)]| Line { name: name.into(), points: points.to_vec() };
        let svg =
            plot("slots <n>", "hits", &[line("a'b<script>", &[(0.0, 0.0), (1.0, 0.5)]), line("c", &[(0.5, f64::NAN)])]);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a&#39;b&lt;script&gt;") && !svg.contains("<script"));
        assert!(svg.contains("slots &lt;n&gt;") && !svg.contains("NaN"));
        assert!(plot("x", "y", &[]).contains("Nothing"));
        assert_eq!(svg.matches("class='key'").count(), 2, "a legend");
        let map =
            heat_map("layer", "<expert>", "most", &["0".into(), "1".into()], &[vec![0.0, 1.0], vec![0.5, f64::NAN]]);
        assert_eq!(map.matches("<rect").count(), 4 + 11, "cells and the legend's");
        assert!(map.contains("&lt;expert&gt;") && map.contains("1: most") && map.contains(">layer</text>"));
    }
}
