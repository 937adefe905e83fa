//! The figure: loss against bytes per token, all arms, and the smaller quants that they have to be better than.

use std::fmt::Write;

use hobbit_programs::plot::{self, Line, escape, plot};

use super::compare::{Row, frontier};

const NOTE: &str = "Across: MiB of experts read per token; up: mean Kullback-Leibler divergence from the exact model in \
                    millinats a token, with one standard error; lower and further left is better. The dashed line is the control: the \
                    smaller quants of all experts, joined; what lies above it is worse than just taking a smaller model. \
                    The exact model is its right end, at 0.";

/// A page with a plot for each text and share of cache.
pub fn page(model: &str, rows: &[Row]) -> String {
    let title = format!("Loss against bytes per token: {}", escape(model));
    let mut page = format!(
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>\n\
         <title>{title}</title>\n<style>:root{{color-scheme:light dark}}body{{font:15px system-ui,sans-serif;max-width:1320px;margin:1rem auto;padding:0 1rem}}\
         .figures{{display:flex;flex-wrap:wrap;gap:1rem}}figure{{margin:0;flex:1 1 560px}}{}</style></head>\n<body>\n<h1>{title}</h1>\n<p>{NOTE}</p>\n\
         <div class='figures'>\n",
        plot::STYLE
    );
    for (i, first) in rows.iter().enumerate() {
        if rows[..i].iter().any(|row| row.is_comparable(first)) {
            continue;
        }
        let panel: Vec<&Row> = rows.iter().filter(|row| row.is_comparable(first)).collect();
        let caption = format!("{}, expert cache {}%", first.text, first.cache_percent);
        let _ = writeln!(page, "<figure><figcaption>{}</figcaption>\n{}</figure>", escape(&caption), drawn(&panel));
    }
    page + "</div>\n</body></html>\n"
}

fn drawn(panel: &[&Row]) -> String {
    let controls: Vec<&Row> = panel.iter().copied().filter(|row| row.is_control).collect();
    let joined = frontier(controls).iter().map(|row| at(row)).collect();
    let control = Line { name: "smaller quants (control)".into(), points: joined, bound: true, ..Line::default() };
    let lines: Vec<Line> = std::iter::once(control).chain(panel.iter().map(|row| line(row))).collect();
    plot("MiB per token", "KL divergence, millinats", &lines, f64::INFINITY)
}

fn at(row: &Row) -> [f64; 2] {
    [row.bytes_per_token / f64::from(1 << 20), 1e3 * row.kl.value]
}

fn line(row: &Row) -> Line {
    let [x, y] = at(row);
    let error = 1e3 * row.kl.uncertainty;
    Line {
        name: row.arm.clone(),
        points: vec![[x, y]],
        spreads: vec![[x, (y - error).max(0.0), y + error]],
        ..Line::default()
    }
}
