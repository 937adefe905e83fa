//! The cheapest choices within a bound: steps along each item's lower convex hull of loss over bytes, in the order of
//! loss per byte.

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Choice {
    pub(super) bytes: u64,
    pub(super) loss: f64,
}

pub(super) struct Walked {
    /// Position of each item's choice.
    pub(super) chosen: Vec<usize>,
    /// Sum over the items.
    pub(super) bytes: u64,
    /// Sum over the items.
    pub(super) loss: f64,
}

/// Starts with each item's first choice, which is the largest and loses least, and takes steps to smaller ones while
/// `goes_on` returns true. `goes_on` receives the bytes before and the loss after each step. The choices of fewer steps
/// are always a prefix of more.
pub(super) fn walk(items: &[Vec<Choice>], goes_on: impl Fn(u64, f64) -> bool) -> Walked {
    struct Step {
        item: usize,
        /// Position in the item's own steps.
        at: usize,
        to: usize,
        slope: f64,
    }
    let mut steps = Vec::new();
    for (item, choices) in items.iter().enumerate() {
        let mut steepest = 0.0f64;
        for (at, pair) in hull(choices).windows(2).enumerate() {
            let (from, to) = (choices[pair[0]], choices[pair[1]]);
            // Rounding must not change the order of an item's steps.
            steepest = steepest.max((to.loss - from.loss) / (from.bytes - to.bytes) as f64);
            steps.push(Step { item, at, to: pair[1], slope: steepest });
        }
    }
    // Items with equal slopes take turns.
    steps.sort_by(|a, b| a.slope.total_cmp(&b.slope).then(a.at.cmp(&b.at)));

    let bytes = items.iter().map(|choices| choices[0].bytes).sum();
    let loss = items.iter().map(|choices| choices[0].loss).sum();
    let mut walked = Walked { chosen: vec![0; items.len()], bytes, loss };
    for Step { item, to, .. } in steps {
        let (from, next) = (items[item][walked.chosen[item]], items[item][to]);
        let loss = walked.loss + (next.loss - from.loss);
        if !goes_on(walked.bytes, loss) {
            break;
        }
        walked.chosen[item] = to;
        walked.bytes -= from.bytes - next.bytes;
        walked.loss = loss;
    }
    walked
}

/// Positions of the choices on the hull, by falling bytes, the first choice first.
pub(super) fn hull(choices: &[Choice]) -> Vec<usize> {
    let mut order: Vec<usize> = (1..choices.len()).filter(|&i| choices[i].bytes < choices[0].bytes).collect();
    order.sort_by(|&i, &j| {
        choices[j].bytes.cmp(&choices[i].bytes).then(choices[i].loss.total_cmp(&choices[j].loss)).then(i.cmp(&j))
    });
    order.dedup_by_key(|i| choices[*i].bytes);
    order.insert(0, 0);
    let points: Vec<(f64, f64)> = order.iter().map(|&i| (-(choices[i].bytes as f64), choices[i].loss)).collect();
    lower_hull(&points).into_iter().map(|at| order[at]).collect()
}

/// Positions of the points on the lower convex hull, those on a straight line included. `x` must rise and all values
/// must be finite.
pub(super) fn lower_hull(points: &[(f64, f64)]) -> Vec<usize> {
    let slope = |from: usize, to: usize| (points[to].1 - points[from].1) / (points[to].0 - points[from].0);
    let mut hull: Vec<usize> = Vec::new();
    for next in 0..points.len() {
        while let [.., before, last] = hull[..] {
            let earlier = slope(before, last);
            if slope(last, next) >= earlier - 1e-9 * earlier.abs() {
                break;
            }
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

/// Height of the hull of `points` at `x`; beyond the ends it is the end's, and 0 without points.
pub(super) fn height(points: &[(f64, f64)], x: f64) -> f64 {
    let hull = lower_hull(points);
    let after = hull.partition_point(|&at| points[at].0 < x);
    match (after.checked_sub(1).map(|before| points[hull[before]]), hull.get(after).map(|&at| points[at])) {
        (Some((x0, y0)), Some((x1, y1))) => y0 + (y1 - y0) * (x - x0) / (x1 - x0),
        (None, Some((_, y))) | (Some((_, y)), None) => y,
        (None, None) => 0.0,
    }
}
