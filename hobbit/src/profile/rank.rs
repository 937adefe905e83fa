//! How well one order agrees with another.

/// Spearman's rank correlation of two equally long lists, `-1.0..=1.0`; equal values share their mean rank. `None` for
/// fewer than two pairs, or where all values of a list are equal.
pub fn spearman(a: &[f64], b: &[f64]) -> Option<f64> {
    if a.len() != b.len() || a.len() < 2 {
        return None;
    }
    let (a, b) = (ranks(a), ranks(b));
    let mean = (a.len() as f64 - 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    let correlation = product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt();
    correlation.is_finite().then_some(correlation)
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&i, &j| values[i].total_cmp(&values[j]));
    let mut ranks = vec![0.0; values.len()];
    let mut next = 0;
    for run in order.chunk_by(|&i, &j| values[i] == values[j]) {
        let rank = next as f64 + (run.len() as f64 - 1.0) / 2.0;
        run.iter().for_each(|&i| ranks[i] = rank);
        next += run.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_counts_and_nothing_else() {
        assert_eq!(spearman(&[1.0, 2.0, 3.0], &[10.0, 11.0, 1e9]), Some(1.0));
        assert_eq!(spearman(&[1.0, 2.0, 3.0], &[5.0, 4.0, -1.0]), Some(-1.0));
        // Textbook: d = (0, 1, 1, 0, 0), rho = 1 - 6 * 2 / (5 * 24).
        let rho = spearman(&[1.0, 2.0, 3.0, 4.0, 5.0], &[1.0, 3.0, 2.0, 4.0, 5.0]).unwrap();
        assert!((rho - 0.9).abs() < 1e-12);
        let tied = spearman(&[1.0, 1.0, 2.0], &[3.0, 3.0, 4.0]).unwrap();
        assert!((tied - 1.0).abs() < 1e-12);
    }

    #[test]
    fn nothing_to_compare() {
        assert_eq!(spearman(&[1.0], &[1.0]), None);
        assert_eq!(spearman(&[1.0, 1.0], &[1.0, 2.0]), None);
        assert_eq!(spearman(&[1.0, 2.0], &[1.0]), None);
    }
}
