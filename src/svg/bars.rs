//! Bars that lie, of parts that add up.

use std::fmt::Write;

use super::{COLOURS, escape, legend, number, shortened, step};

const WIDTH: f64 = 560.0;
/// On both sides of the bars.
const SIDE: f64 = 14.0;
const TOP: f64 = 4.0;
const BAR: f64 = 14.0;
const LINE: f64 = 16.0;
/// Characters that fit the width.
const CHARACTERS_MAX: usize = 84;

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

/// Bars over one axis that begins at 0. `parts` names what each bar consists of; with a single part there is no legend.
pub fn bars(x_label: &str, parts: &[&str], bars: &[Bar]) -> String {
    let sum = |bar: &Bar| bar.values.iter().copied().filter(|value| *value > 0.0 && value.is_finite()).sum::<f64>();
    let most = bars.iter().map(sum).fold(0.0, f64::max);
    if bars.is_empty() || parts.is_empty() {
        return "<p>Nothing to plot.</p>\n".into();
    }
    let x_step = step(most);
    let x_top = if most > 0.0 { (most / x_step - 1e-9).ceil() * x_step } else { 1.0 };
    let row = LINE + BAR + 8.0;
    let foot = TOP + row * bars.len() as f64;
    let height = foot + 40.0;
    let legend = match parts.len() {
        1 => super::Legend::default(),
        _ => legend(parts, WIDTH, height, &|at| format!("stroke='{}' stroke-width='9'", COLOURS[at % COLOURS.len()])),
    };
    let x_at = |x: f64| SIDE + x / x_top * (WIDTH - 2.0 * SIDE);
    let mut svg = format!("<svg viewBox='0 0 {WIDTH} {:.0}' role='img'>\n", height + legend.height);
    let mut n = 0.0;
    while n * x_step <= x_top * 1.0001 {
        let x = n * x_step;
        let _ = writeln!(
            svg,
            "<line class='grid' x1='{at:.1}' x2='{at:.1}' y1='{TOP}' y2='{foot:.1}'/><text class='x' x='{at:.1}' y='{:.1}'>{}</text>",
            foot + 14.0,
            number(x),
            at = x_at(x),
        );
        n += 1.0;
    }
    let _ = writeln!(svg, "<text class='x' x='{:.1}' y='{:.1}'>{}</text>", WIDTH / 2.0, foot + 32.0, escape(x_label));
    for (bar, at) in bars.iter().zip(0u32..) {
        let y = TOP + row * f64::from(at);
        let words = if bar.note.is_empty() { bar.name.clone() } else { format!("{}: {}", bar.name, bar.note) };
        let _ = writeln!(
            svg,
            "<text class='bar' x='{SIDE}' y='{:.1}'>{}<title>{}</title></text>",
            y + LINE - 4.0,
            escape(&shortened(&words, CHARACTERS_MAX)),
            escape(&words)
        );
        let mut from = 0.0;
        for ((value, part), colour) in bar.values.iter().zip(parts).zip(COLOURS.iter().cycle()) {
            if !(*value > 0.0 && value.is_finite()) {
                continue;
            }
            let _ = writeln!(
                svg,
                "<rect x='{:.1}' y='{:.1}' width='{:.1}' height='{BAR}' fill='{colour}'><title>{}: {}</title></rect>",
                x_at(from),
                y + LINE,
                x_at(from + value) - x_at(from),
                escape(part),
                number(*value)
            );
            from += value;
        }
    }
    svg.push_str(&legend.svg);
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_and_names_cannot_break_out() {
        let bar = |name: &str, values: &[f64]| Bar { name: name.into(), values: values.to_vec(), note: "75 %".into() };
        let svg =
            bars("ms per token", &["waiting", "computing"], &[bar("<b>", &[1.0, 3.0]), bar("c", &[f64::NAN, -1.0])]);
        assert_eq!(svg.matches("<rect").count(), 2, "no bar of what is no number");
        assert_eq!(svg.matches("class='key'").count(), 2);
        assert!(svg.contains("&lt;b&gt;: 75 %") && !svg.contains("NaN") && svg.contains("ms per token"));
        // 1 and 3 of an axis of 4, 532 wide.
        assert!(svg.contains("width='133.0'") && svg.contains("width='399.0'"), "{svg}");
        assert_eq!(bars("x", &["one"], &[bar("a", &[0.0])]).matches("class='key'").count(), 0);
        assert!(bars("x", &["one"], &[]).contains("Nothing"));
    }
}
