//! Lines over axes.

use std::fmt::Write;

use super::{COLOURS, escape, legend, number, step};

const WIDTH: f64 = 560.0;
/// Without the legend, which stands below.
const HEIGHT: f64 = 300.0;
/// Left, right, top, bottom of the plotted area.
const MARGINS: [f64; 4] = [60.0, 14.0, 12.0, 44.0];
/// Lines of at most so many points show each.
const MARKED_MAX: usize = 24;

/// One line of a plot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Line {
    /// In the legend.
    pub name: String,
    /// (x, y); what is not finite is left out.
    pub points: Vec<(f64, f64)>,
    /// (x, least y, largest y) of points that stand for several runs.
    pub spreads: Vec<(f64, f64, f64)>,
    /// A bound, not a measurement: dashed, in the colour of text.
    pub bound: bool,
}

/// Lines and what their axes say; the y axis begins at 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plot {
    /// What x is, with its unit.
    pub x_label: String,
    /// What y is, with its unit.
    pub y_label: String,
    /// In the order of the legend.
    pub lines: Vec<Line>,
    /// Where the y axis ends at the latest; lines are cut there.
    pub y_max: Option<f64>,
    /// Whether the x axis begins at 0.
    pub from_zero: bool,
}

/// A plot of lines with nothing special.
pub fn plot(x_label: &str, y_label: &str, lines: Vec<Line>) -> String {
    Plot { x_label: x_label.into(), y_label: y_label.into(), lines, ..Plot::default() }.draw()
}

/// From numbers to places.
struct Scale {
    x_min: f64,
    x_span: f64,
    y_top: f64,
}

impl Scale {
    fn x(&self, x: f64) -> f64 {
        MARGINS[0] + (x - self.x_min) / self.x_span * (WIDTH - MARGINS[0] - MARGINS[1])
    }

    fn y(&self, y: f64) -> f64 {
        HEIGHT - MARGINS[3] - y / self.y_top * (HEIGHT - MARGINS[2] - MARGINS[3])
    }
}

impl Plot {
    /// As SVG; words where there is no point.
    pub fn draw(&self) -> String {
        let of_lines = self.lines.iter().flat_map(|line| finite(&line.points));
        let of_spreads = self.lines.iter().flat_map(|line| line.spreads.iter().map(|&(x, _, top)| (x, top)));
        let points: Vec<_> = of_lines.chain(of_spreads.filter(|(x, y)| x.is_finite() && y.is_finite())).collect();
        if points.is_empty() {
            return "<p>Nothing to plot.</p>\n".into();
        }
        let first = if self.from_zero { 0.0 } else { f64::INFINITY };
        let x_min = points.iter().map(|p| p.0).fold(first, f64::min);
        let x_max = points.iter().map(|p| p.0).fold(f64::NEG_INFINITY, f64::max);
        let y_max = points.iter().map(|p| p.1).fold(0.0, f64::max);
        let y_max = self.y_max.filter(|most| *most > 0.0).map_or(y_max, |most| y_max.min(most));
        let y_step = step(y_max);
        let y_top = if y_max > 0.0 { (y_max / y_step - 1e-9).ceil() * y_step } else { 1.0 };
        let scale = Scale { x_min, x_span: if x_max > x_min { x_max - x_min } else { 1.0 }, y_top };
        let names: Vec<&str> = self.lines.iter().map(|line| line.name.as_str()).collect();
        let legend = legend(&names, WIDTH, HEIGHT, &|at| self.stroke(at));
        let mut svg = format!("<svg viewBox='0 0 {WIDTH} {:.0}' role='img'>\n", HEIGHT + legend.height);
        self.axes(&mut svg, &scale, x_max, y_step);
        for at in 0..self.lines.len() {
            self.line(&mut svg, &scale, at);
        }
        svg.push_str(&legend.svg);
        svg.push_str("</svg>\n");
        svg
    }

    fn axes(&self, svg: &mut String, scale: &Scale, x_max: f64, y_step: f64) {
        let [left, right, top, bottom] = MARGINS;
        let mut n = 0.0;
        while n * y_step <= scale.y_top * 1.0001 {
            let y = n * y_step;
            let _ = writeln!(
                svg,
                "<line class='grid' x1='{left}' x2='{}' y1='{at:.1}' y2='{at:.1}'/><text class='y' x='{}' y='{:.1}'>{}</text>",
                WIDTH - right,
                left - 6.0,
                scale.y(y) + 4.0,
                number(y),
                at = scale.y(y),
            );
            n += 1.0;
        }
        let x_step = step(scale.x_span);
        let mut x = (scale.x_min / x_step).ceil() * x_step;
        while x <= x_max + x_step * 1e-6 {
            let at = scale.x(x);
            let _ = writeln!(svg, "<text class='x' x='{at:.1}' y='{}'>{}</text>", HEIGHT - bottom + 16.0, number(x));
            x += x_step;
        }
        let _ = writeln!(
            svg,
            "<text class='x' x='{:.1}' y='{}'>{}</text>",
            (left + WIDTH - right) / 2.0,
            HEIGHT - 8.0,
            escape(&self.x_label)
        );
        let _ = writeln!(
            svg,
            "<text class='x' transform='translate(14 {:.1}) rotate(-90)'>{}</text>",
            (HEIGHT - bottom + top) / 2.0,
            escape(&self.y_label)
        );
    }

    /// Colours go to measurements in their order.
    fn stroke(&self, at: usize) -> String {
        if self.lines[at].bound {
            return "stroke='currentColor' stroke-width='1.4' stroke-dasharray='6 4'".into();
        }
        let nth = self.lines[..at].iter().filter(|line| !line.bound).count();
        let dashes = if nth >= COLOURS.len() { " stroke-dasharray='5 3'" } else { "" };
        format!("stroke='{}' stroke-width='1.8'{dashes}", COLOURS[nth % COLOURS.len()])
    }

    fn line(&self, svg: &mut String, scale: &Scale, at: usize) {
        let (line, stroke) = (&self.lines[at], self.stroke(at));
        let name = escape(&line.name);
        let points: Vec<_> = finite(&line.points).collect();
        for part in cut(&points, scale.y_top) {
            let path: Vec<String> = part.iter().map(|&(x, y)| format!("{:.1},{:.1}", scale.x(x), scale.y(y))).collect();
            let _ = writeln!(
                svg,
                "<polyline points='{}' fill='none' {stroke}><title>{name}</title></polyline>",
                path.join(" ")
            );
        }
        for &(x, least, most) in line.spreads.iter().filter(|(x, a, b)| x.is_finite() && a.is_finite() && b.is_finite())
        {
            let (at, from, to) = (scale.x(x), scale.y(least), scale.y(most.min(scale.y_top)));
            let _ =
                writeln!(svg, "<line class='spread' x1='{at:.1}' x2='{at:.1}' y1='{from:.1}' y2='{to:.1}' {stroke}/>");
        }
        if points.len() <= MARKED_MAX && !line.bound {
            for &(x, y) in points.iter().filter(|(_, y)| *y <= scale.y_top) {
                let (cx, cy) = (scale.x(x), scale.y(y));
                let title = format!("{name}: {}, {}", number(x), number(y));
                let _ = writeln!(
                    svg,
                    "<circle cx='{cx:.1}' cy='{cy:.1}' r='2.6' fill='none' {stroke}><title>{title}</title></circle>"
                );
            }
        }
    }
}

fn finite(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite())
}

/// The parts of a line that are not above `top`. A line without points stays one, for the legend's sake.
fn cut(points: &[(f64, f64)], top: f64) -> Vec<Vec<(f64, f64)>> {
    let mut parts = vec![Vec::new()];
    let mut before: Option<(f64, f64)> = None;
    for &(x, y) in points {
        if let Some((x0, y0)) = before
            && (y0 > top) != (y > top)
        {
            let crossing = (x0 + (x - x0) * (top - y0) / (y - y0), top);
            if y0 > top {
                parts.push(vec![crossing]);
            } else if let Some(part) = parts.last_mut() {
                part.push(crossing);
            }
        }
        if y <= top
            && let Some(part) = parts.last_mut()
        {
            part.push((x, y));
        }
        before = Some((x, y));
    }
    let first = parts.swap_remove(0);
    let mut rest = parts;
    if rest.is_empty() || !first.is_empty() {
        rest.insert(0, first);
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, points: &[(f64, f64)]) -> Line {
        Line { name: name.into(), points: points.to_vec(), ..Line::default() }
    }

    #[test]
    fn every_line_is_drawn_and_nothing_can_break_out_of_the_markup() {
        let lines = vec![line("a'b<script>", &[(0.0, 0.0), (1.0, 0.5)]), line("c", &[(0.5, f64::NAN)])];
        let svg = plot("slots <n>", "hits", lines);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a&#39;b&lt;script&gt;") && !svg.contains("<script"));
        assert!(svg.contains("slots &lt;n&gt;") && !svg.contains("NaN"));
        assert!(plot("x", "y", vec![]).contains("Nothing"));
        assert_eq!(svg.matches("class='key'").count(), 2, "a legend");
    }

    #[test]
    fn bounds_are_dashed_and_take_no_colour() {
        let bound = Line { bound: true, ..line("roofline", &[(0.0, 1.0), (1.0, 9.0)]) };
        let svg = plot("x", "y", vec![bound, line("hobbit", &[(0.0, 1.0)])]);
        assert!(svg.contains("stroke-dasharray='6 4'") && svg.contains(COLOURS[0]) && !svg.contains(COLOURS[1]));
        assert_eq!(svg.matches("<circle").count(), 1, "a single point is seen");
    }

    #[test]
    fn lines_are_cut_where_the_axis_ends() {
        let points = [(0.0, 1.0), (1.0, 3.0), (2.0, 1.0)];
        assert_eq!(cut(&points, 2.0), [vec![(0.0, 1.0), (0.5, 2.0)], vec![(1.5, 2.0), (2.0, 1.0)]]);
        assert_eq!(cut(&points, 3.0), [points.to_vec()]);
        assert_eq!(cut(&points[1..], 2.0), [vec![(1.5, 2.0), (2.0, 1.0)]]);
        assert_eq!(cut(&[], 1.0), [vec![]]);
        let steep = Plot { lines: vec![line("a", &[(0.0, 1.0), (1.0, 1000.0)])], y_max: Some(2.0), ..Plot::default() };
        assert!(!steep.draw().contains("1000"), "the axis ends at 2");
    }

    #[test]
    fn several_runs_show_their_spread() {
        let runs = Line { spreads: vec![(0.0, 1.0, 4.0), (1.0, f64::NAN, 2.0)], ..line("a", &[(0.0, 2.0)]) };
        let svg = plot("x", "y", vec![runs]);
        assert_eq!(svg.matches("class='spread'").count(), 1);
        assert!(svg.contains(">4</text>"), "the axis reaches the largest: {svg}");
    }
}
