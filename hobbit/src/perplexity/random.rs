//! The tasks that `llama-perplexity` picks when not all are wanted: its generator, its seed, its two ways to draw.

use rand_mt::Mt;

const SEED: u32 = 1;

/// `n` of `n_tasks` numbers without repetition, as for HellaSwag: each drawn with `std::uniform_int_distribution` (GNU)
/// from those that are left.
pub fn drawn_evenly(n_tasks: usize, n: usize) -> Vec<usize> {
    let mut random = Mt::new(SEED);
    let mut left: Vec<usize> = (0..n_tasks).collect();
    (0..n.min(n_tasks)).map(|_| left.remove(below(&mut random, left.len()))).collect()
}

/// `n` of `n_tasks` numbers without repetition, as for Winogrande and multiple choice: each drawn by scaling a word in
/// single precision; the last number takes the place of the one that was drawn.
pub fn drawn_by_scaling(n_tasks: usize, n: usize) -> Vec<usize> {
    let mut random = Mt::new(SEED);
    let mut left: Vec<usize> = (0..n_tasks).collect();
    let scale = 1.0 / (1.0 + u32::MAX as f32);
    (0..n.min(n_tasks))
        .map(|_| {
            let drawn = (scale * random.next_u32() as f32 * left.len() as f32) as usize;
            // The largest words round up to 1.
            left.swap_remove(drawn.min(left.len() - 1))
        })
        .collect()
}

/// A number below `n`, each as probable: Lemire's method, as libstdc++ has it since GCC 11.
pub(super) fn below(random: &mut Mt, n: usize) -> usize {
    let n = u32::try_from(n).unwrap_or(u32::MAX);
    let mut product = u64::from(random.next_u32()) * u64::from(n);
    if (product as u32) < n {
        let threshold = n.wrapping_neg() % n;
        while (product as u32) < threshold {
            product = u64::from(random.next_u32()) * u64::from(n);
        }
    }
    (product >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_standard_librarys() {
        // The C++ standard names the 10000th word for the default seed.
        let mut random = Mt::new(5489);
        assert_eq!((0..10000).map(|_| random.next_u32()).last(), Some(4_123_659_995));
    }

    #[test]
    fn tasks_are_those_that_a_cpp_program_draws() {
        assert_eq!(drawn_evenly(20, 8), [8, 19, 13, 17, 0, 2, 6, 18]);
        assert_eq!(drawn_by_scaling(20, 8), [8, 18, 12, 15, 0, 1, 4, 17]);
    }

    #[test]
    fn numbers_are_drawn_once() {
        for draw in [drawn_evenly, drawn_by_scaling] {
            for (n_tasks, n) in [(0, 3), (1, 1), (10, 3), (10, 10), (10, 99)] {
                let mut drawn = draw(n_tasks, n);
                assert_eq!(drawn.len(), n.min(n_tasks));
                drawn.sort_unstable();
                drawn.dedup();
                assert_eq!(drawn.len(), n.min(n_tasks));
                assert!(drawn.iter().all(|&i| i < n_tasks));
            }
        }
    }
}
