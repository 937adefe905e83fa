//! Plots for pages that need nothing else: lines as SVG, bars and maps as HTML.
//!
//! No crate for plots: those that write SVG set colours and sizes of text themselves, and guess how wide words are. Here the
//! browser lays text out, the page's style sheet colours it, in the dark too, and every mark has a title for a pointer that
//! rests on it.

use std::fmt::Write;

/// For the style sheet of a page with plots.
pub const STYLE: &str = "\
svg{display:block;width:100%;max-width:640px;height:auto;font:12px system-ui,sans-serif}svg text{fill:currentColor}\
.grid{stroke:#8885}.x{text-anchor:middle}.y{text-anchor:end}.key,.bars,.map{max-width:640px;font-size:12px}\
.key{display:flex;flex-wrap:wrap;gap:0 1.2rem;margin:.2rem 0}\
.key i{display:inline-block;width:20px;margin-right:6px;vertical-align:middle}\
.bar{display:flex;margin-bottom:6px}.bar i{height:14px}.ends{display:flex;justify-content:space-between}\
.map{display:grid;margin-bottom:.4rem}.map b{font-size:9px;text-align:right;padding-right:6px}.map i{height:12px}";

/// Paul Tol's qualitative colours, which the colour-blind can tell apart.
const COLOURS: [&str; 10] =
    ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#ee8866", "#44bb99", "currentColor"];

/// Of what is plotted, in a plot of 560 x 300: left, top, right, bottom.
const AREA: [f64; 4] = [60.0, 12.0, 546.0, 256.0];
/// Lines of at most so many points show each.
const MARKED_MAX: usize = 24;

const NOTHING: &str = "<p>Nothing to plot.</p>\n";

/// One line of a plot. What is not finite is left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Line {
    /// In the key.
    pub name: String,
    /// x, y
    pub points: Vec<[f64; 2]>,
    /// x, least y and largest y of points that stand for several runs.
    pub spreads: Vec<[f64; 3]>,
    /// A bound, not a measurement: dashed, in the colour of text.
    pub bound: bool,
}

/// Lines over axes that begin at 0; what is above `y_max` is cut off. Labels say what x and y are, with their units.
pub fn plot(x_label: &str, y_label: &str, lines: &[Line], y_max: f64) -> String {
    let tops = lines.iter().flat_map(|line| finite(&line.spreads)).map(|[x, _, most]| [x, most]);
    let all: Vec<_> = lines.iter().flat_map(|line| finite(&line.points)).chain(tops).collect();
    if all.is_empty() {
        return NOTHING.into();
    }
    let most = |axis: usize| all.iter().map(|point| point[axis]).fold(0.0, f64::max);
    let x_top = if most(0) > 0.0 { most(0) } else { 1.0 };
    let y_step = step(most(1).min(y_max));
    let y_top = (most(1).min(y_max) / y_step - 1e-9).ceil().max(1.0) * y_step;
    let [left, top, right, bottom] = AREA;
    let x_at = |x: f64| left + x / x_top * (right - left);
    let y_at = |y: f64| bottom - y / y_top * (bottom - top);
    let mut svg = "<svg viewBox='0 0 560 300' role='img'>\n".to_owned();
    for y in ticks(y_step, y_top) {
        let (at, y) = (y_at(y), number(y));
        let _ = write!(svg, "<path class='grid' d='M{left} {at:.1}H{right}'/>");
        let _ = writeln!(svg, "<text class='y' x='{left}' dx='-6' y='{at:.1}' dy='4'>{y}</text>");
    }
    for x in ticks(step(x_top), x_top) {
        let _ = writeln!(svg, "<text class='x' x='{:.1}' y='272'>{}</text>", x_at(x), number(x));
    }
    let _ = writeln!(svg, "<text class='x' x='303' y='292'>{}</text>", escape(x_label));
    let _ = writeln!(svg, "<text class='x' transform='translate(14 134) rotate(-90)'>{}</text>", escape(y_label));
    // A picture of its own cuts off what is beyond its edges: the area, with room for marks on them.
    svg.push_str("<svg x='56' y='8' width='494' height='252' viewBox='56 8 494 252'>\n");
    let mut key = Vec::new();
    // Colours go to measurements in their order.
    let mut colours =
        COLOURS.into_iter().map(|colour| (colour, "solid")).chain(COLOURS.map(|colour| (colour, "dashed")));
    for line in lines {
        let (colour, style) = if line.bound { ("currentColor", "dashed") } else { colours.next().unwrap_or_default() };
        let dashes = if style == "dashed" { " stroke-dasharray='6 4'" } else { "" };
        let stroke = format!("stroke='{colour}' stroke-width='1.8' fill='none'{dashes}");
        let name = escape(&line.name);
        let path: Vec<_> = finite(&line.points).map(|[x, y]| format!("{:.1},{:.1}", x_at(x), y_at(y))).collect();
        let _ = writeln!(svg, "<polyline points='{}' {stroke}><title>{name}</title></polyline>", path.join(" "));
        for [x, least, most] in finite(&line.spreads) {
            let _ = writeln!(svg, "<path d='M{:.1} {:.1}V{:.1}' {stroke}/>", x_at(x), y_at(least), y_at(most));
        }
        for [x, y] in finite(&line.points).filter(|_| path.len() <= MARKED_MAX && !line.bound) {
            let _ = write!(svg, "<circle cx='{:.1}' cy='{:.1}' r='2.6' {stroke}>", x_at(x), y_at(y));
            let _ = writeln!(svg, "<title>{name}: {}, {}</title></circle>", number(x), number(y));
        }
        key.push((line.name.as_str(), format!("border-top:2px {style} {colour}")));
    }
    format!("{svg}</svg></svg>\n{}", self::key(&key))
}

fn finite<const N: usize>(points: &[[f64; N]]) -> impl Iterator<Item = [f64; N]> {
    points.iter().copied().filter(|point| point.iter().all(|value| value.is_finite()))
}

/// Names, each behind a piece of its line or bar in a style.
fn key(names: &[(&str, String)]) -> String {
    let one = |(name, style): &(&str, String)| format!("<span><i style='{style}'></i>{}</span>", escape(name));
    format!("<p class='key'>{}</p>\n", names.iter().map(one).collect::<String>())
}

/// One bar.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bar {
    /// Above it.
    pub name: String,
    /// As many as there are parts; what is not a positive number takes no room.
    pub values: Vec<f64>,
    /// Behind its name.
    pub note: String,
}

/// Bars that lie, from 0 on. `parts` names what each bar consists of; with a single part there is no key.
pub fn bars(x_label: &str, parts: &[&str], bars: &[Bar]) -> String {
    if bars.is_empty() || parts.is_empty() {
        return NOTHING.into();
    }
    let is_seen = |value: &f64| *value > 0.0 && value.is_finite();
    let sum = |bar: &Bar| bar.values.iter().copied().filter(is_seen).sum::<f64>();
    let most = bars.iter().map(sum).fold(0.0, f64::max);
    let mut html = "<div class='bars'>\n".to_owned();
    for Bar { name, values, note } in bars {
        let gap = if note.is_empty() { "" } else { ": " };
        let _ = write!(html, "<div>{}{gap}{}</div><div class='bar'>", escape(name), escape(note));
        for ((value, part), colour) in values.iter().zip(parts).zip(COLOURS).filter(|((value, _), _)| is_seen(value)) {
            let (width, title) = (100.0 * value / most, format!("{}: {}", escape(part), number(*value)));
            let _ = write!(html, "<i style='width:{width:.2}%;background:{colour}' title='{title}'></i>");
        }
        html.push_str("</div>\n");
    }
    let (x_label, most) = (escape(x_label), number(most));
    let _ = writeln!(html, "<div class='ends'><span>0</span><span>{x_label}</span><span>{most}</span></div></div>");
    if parts.len() > 1 {
        let styles = COLOURS.map(|colour| format!("background:{colour};height:9px"));
        html.push_str(&key(&parts.iter().copied().zip(styles).collect::<Vec<_>>()));
    }
    html
}

/// A map of named `rows`, each of cells from 0 to 1; darker is more. Columns are counted from 0; under it a key from 0 to 1
/// says what a cell means.
pub fn heat_map(y_label: &str, x_label: &str, cell_label: &str, rows: &[(String, Vec<f64>)]) -> String {
    let n_columns = rows.iter().map(|(_, cells)| cells.len()).max().unwrap_or(0).max(1);
    let mut html = format!("<div class='map' style='grid-template-columns:auto repeat({n_columns},minmax(0,24px))'>\n");
    for (name, cells) in rows {
        let name = escape(name);
        let _ = write!(html, "<b style='grid-column:1'>{name}</b>");
        for (column, value) in cells.iter().enumerate() {
            html.push_str(&cell(*value, "", &format!("{name}, {column}: {}", number(*value))));
        }
        html.push('\n');
    }
    let columns = step(n_columns as f64).max(1.0).ceil() as usize;
    for first in (0..n_columns).step_by(columns) {
        let span = columns.min(n_columns - first);
        let _ = write!(html, "<small style='grid-column:{}/span {span}'>{first}</small>", first + 2);
    }
    let shades: String = (0..=10u8).map(|n| cell(f64::from(n) / 10.0, ";height:12px;margin:0", "")).collect();
    let [down, across, meaning] = [y_label, x_label, cell_label].map(escape);
    let labels = format!("<span>down: {down}</span><span>across: {across}</span>");
    format!("{html}</div>\n<p class='key'>{labels}<span>0 {shades} 1: {meaning}</span></p>\n")
}

/// One cell of a heat map; `title` is shown by a pointer that rests on it.
fn cell(value: f64, style: &str, title: &str) -> String {
    let shade = 255.0 * (1.0 - value.clamp(0.0, 1.0).sqrt());
    let green = 64.0 + 0.75 * shade;
    format!("<i style='background:rgb({shade:.0},{green:.0},255){style}' title='{title}'></i>")
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

fn ticks(step: f64, top: f64) -> impl Iterator<Item = f64> {
    (0u32..).map(move |n| f64::from(n) * step).take_while(move |at| *at <= top * 1.0001)
}

fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() || text == "-0" { "0".into() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, points: &[[f64; 2]]) -> Line {
        Line { name: name.into(), points: points.to_vec(), ..Line::default() }
    }

    fn plot(lines: &[Line]) -> String {
        super::plot("slots <n>", "hits", lines, f64::INFINITY)
    }

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
        let svg = plot(&[line("a'b<script>", &[[0.0, 0.0], [1.0, 0.5]]), line("c", &[[0.5, f64::NAN]])]);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a&#39;b&lt;script&gt;") && !svg.contains("<script"));
        assert!(svg.contains("slots &lt;n&gt;") && !svg.contains("NaN"));
        assert!(plot(&[]).contains("Nothing") && plot(&[line("c", &[[0.5, f64::NAN]])]).contains("Nothing"));
        assert_eq!(svg.matches("<span><i").count(), 2, "a key");
    }

    #[test]
    fn bounds_are_dashed_and_take_no_colour() {
        let bound = Line { bound: true, ..line("roofline", &[[0.0, 1.0], [1.0, 9.0]]) };
        let svg = plot(&[bound, line("hobbit", &[[0.0, 1.0]])]);
        assert!(svg.contains("stroke-dasharray='6 4'") && svg.contains(COLOURS[0]) && !svg.contains(COLOURS[1]));
        assert_eq!(svg.matches("<circle").count(), 1, "a single point is seen");
    }

    #[test]
    fn lines_are_cut_where_the_axis_ends() {
        let steep = super::plot("x", "y", &[line("a", &[[0.0, 1.0], [1.0, 1000.0]])], 2.0);
        let (axes, within) = steep.split_once("<svg x='56' y='8' width='494' height='252'").unwrap();
        assert!(axes.contains(">2</text>") && !axes.contains("1000"), "the axis ends at 2");
        // The second point is far above the inner picture, which shows nothing outside of itself.
        assert!(within.contains("points='60.0,134.0 546.0,-121744.0'"), "{within}");
    }

    #[test]
    fn several_runs_show_their_spread() {
        let runs = Line { spreads: vec![[0.0, 1.0, 4.0], [1.0, f64::NAN, 2.0]], ..line("a", &[[0.0, 2.0]]) };
        let svg = plot(&[runs]);
        assert_eq!(svg.matches("V").count(), 1);
        assert!(svg.contains(">4</text>"), "the axis reaches the largest: {svg}");
    }

    #[test]
    fn parts_add_up_and_names_cannot_break_out() {
        let bar = |name: &str, values: &[f64]| Bar { name: name.into(), values: values.to_vec(), note: "75 %".into() };
        let html =
            bars("ms per token", &["waiting", "computing"], &[bar("<b>", &[1.0, 3.0]), bar("c", &[f64::NAN, -1.0])]);
        assert_eq!(html.matches("title=").count(), 2, "no bar of what is no number");
        assert_eq!(html.matches("<span><i").count(), 2, "a key");
        assert!(html.contains("&lt;b&gt;: 75 %") && !html.contains("NaN") && html.contains("ms per token"));
        assert!(html.contains("width:25.00%") && html.contains("width:75.00%"), "{html}");
        assert_eq!(bars("x", &["one"], &[bar("a", &[0.0])]).matches("class='key'").count(), 0);
        assert!(bars("x", &["one"], &[]).contains("Nothing"));
    }

    #[test]
    fn every_cell_is_drawn_and_the_key_says_what_it_means() {
        let map =
            heat_map("layer", "<expert>", "most", &[("0".into(), vec![0.0, 1.0]), ("1".into(), vec![0.5, f64::NAN])]);
        assert_eq!(map.matches("<i ").count(), 4 + 11, "cells and the key's");
        assert!(map.contains("&lt;expert&gt;") && map.contains("1: most") && map.contains("down: layer"));
    }
}
