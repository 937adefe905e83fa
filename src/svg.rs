//! Plots as SVG text, for pages that need nothing else. Colours of text are the page's.
//!
//! No crate for plots: those that write SVG set colours and sizes of text themselves. Here the page's style sheet does, in the
//! dark too, every mark has a title for a pointer that rests on it, and all of it is a few hundred lines.

mod bars;
mod heat_map;
mod plot;

use std::fmt::Write;

pub use bars::{Bar, bars};
pub use heat_map::heat_map;
pub use plot::{Line, Plot, plot};

/// Paul Tol's qualitative colours, which the colour-blind can tell apart.
const COLOURS: [&str; 10] =
    ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#ee8866", "#44bb99", "currentColor"];

/// What a character takes at most of the legend, on average.
const CHARACTER: f64 = 6.6;
const KEY: f64 = 26.0;

/// Names below a plot.
#[derive(Default)]
struct Legend {
    svg: String,
    height: f64,
}

/// Names in as many columns as fit `width`, from `top` downwards, each behind a piece of its line; `stroke` gives its attributes.
fn legend(names: &[&str], width: f64, top: f64, stroke: &dyn Fn(usize) -> String) -> Legend {
    let room = width - 28.0;
    let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let column = KEY + 12.0 + CHARACTER * longest as f64;
    let n_columns = ((room / column) as usize).clamp(1, names.len().max(1));
    let n_rows = names.len().div_ceil(n_columns);
    let characters_max = ((room - KEY) / CHARACTER) as usize;
    let mut svg = String::new();
    for (at, name) in names.iter().enumerate() {
        let x = 14.0 + room / n_columns as f64 * (at / n_rows) as f64;
        let y = top + 10.0 + 17.0 * (at % n_rows) as f64;
        let _ = writeln!(
            svg,
            "<line class='key' x1='{x:.1}' x2='{:.1}' y1='{y:.1}' y2='{y:.1}' {}/><text x='{:.1}' y='{:.1}'>{}</text>",
            x + KEY - 6.0,
            stroke(at),
            x + KEY,
            y + 4.0,
            escape(&shortened(name, characters_max)),
        );
    }
    Legend { svg, height: 17.0 * n_rows as f64 + 4.0 }
}

/// At most so many characters of a text.
fn shortened(text: &str, n_max: usize) -> String {
    match text.chars().count() > n_max {
        true => text.chars().take(n_max.saturating_sub(1)).chain(['…']).collect(),
        false => text.to_owned(),
    }
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
    fn names_of_a_legend_do_not_overlap() {
        let narrow = legend(&["a", "b", "c"], 560.0, 300.0, &|_| String::new());
        assert_eq!((narrow.height, narrow.svg.matches("y1='310.0'").count()), (21.0, 3), "beside each other");
        let long = "x".repeat(60);
        let wide = legend(&[&long, "b", "c"], 560.0, 300.0, &|_| String::new());
        assert_eq!((wide.height, wide.svg.matches("y1='310.0'").count()), (55.0, 1), "below each other");
        assert_eq!(shortened("äöü", 2), "ä…");
    }
}
