//! A search by chance among configurations.

use rand_mt::Mt;
use smart_default::SmartDefault;

use super::{LayerCurve, NoRoom, bytes, hull};

/// How to search. The defaults are SwapMoE's (section 4).
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct GeneticOptions {
    /// Configurations that survive a generation.
    #[default(50)]
    pub population: usize,
    /// How likely a configuration has a child that differs in one layer.
    #[default(0.5)]
    pub mutation: f64,
    /// How likely a configuration has a child with another one.
    #[default(0.01)]
    pub crossover: f64,
    /// Generations.
    #[default(5000)]
    pub generations: u32,
    /// Equal seeds search alike.
    #[default(1)]
    pub seed: u32,
}

/// Numbers by chance.
struct Chance(Mt);

impl Chance {
    /// Below `n`, which is at least 1.
    fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.0.next_u32()) * u64::from(n)) >> 32) as u32
    }

    fn is(&mut self, likely: f64) -> bool {
        f64::from(self.0.next_u32()) < likely * f64::from(u32::MAX)
    }
}

/// Any configuration within `budget` bytes that uses most of it: of equal seeds the same.
///
/// # Errors
/// [`NoRoom`].
pub fn random_configuration(curves: &[LayerCurve], budget: u64, seed: u32) -> Result<Vec<u16>, NoRoom> {
    hull(curves, budget)?;
    Ok(random(curves, budget, &mut Chance(Mt::new(seed))))
}

fn random(curves: &[LayerCurve], budget: u64, chance: &mut Chance) -> Vec<u16> {
    let mut own: Vec<u16> = curves.iter().map(|curve| curve.least.min(curve.n_expert)).collect();
    // Some layers are favoured: otherwise chance would make all of them alike.
    let favour: Vec<u32> = curves.iter().map(|_| 1 + chance.below(8)).collect();
    let all: u32 = favour.iter().sum();
    for _ in 0..64 * curves.len() {
        let mut ball = chance.below(all.max(1));
        let at = favour.iter().position(|part| ball.checked_sub(*part).map(|left| ball = left).is_none());
        let Some(at) = at.filter(|at| own[*at] < curves[*at].n_expert) else { continue };
        own[at] += 1;
        if bytes(curves, &own) > budget {
            own[at] -= 1;
        }
    }
    own
}

/// The configuration within `budget` bytes that `loss` calls least, as far as chance finds it; that of [`hull()`] is among the
/// first ones.
///
/// # Errors
/// [`NoRoom`].
pub fn genetic(
    curves: &[LayerCurve],
    budget: u64,
    options: &GeneticOptions,
    loss: impl Fn(&[u16]) -> f64,
) -> Result<Vec<u16>, NoRoom> {
    let chance = &mut Chance(Mt::new(options.seed));
    let mut population: Vec<(f64, Vec<u16>)> =
        vec![hull(curves, budget)?].into_iter().map(|own| (loss(&own), own)).collect();
    while population.len() < options.population.max(1) {
        let own = random(curves, budget, chance);
        population.push((loss(&own), own));
    }
    for _ in 0..options.generations {
        let mut children = Vec::new();
        for at in 0..population.len() {
            if chance.is(options.mutation) && !curves.is_empty() {
                let mut child = population[at].1.clone();
                let layer = chance.below(curves.len() as u32) as usize;
                let (least, most) = (curves[layer].least.min(curves[layer].n_expert), curves[layer].n_expert);
                child[layer] = least + chance.below(u32::from(most - least) + 1) as u16;
                children.push(child);
            }
            if chance.is(options.crossover) {
                let other = chance.below(population.len() as u32) as usize;
                let averages = chance.is(0.5);
                let pairs = population[at].1.iter().zip(&population[other].1);
                children.push(pairs.map(|(a, b)| mixed(*a, *b, averages, chance)).collect());
            }
        }
        children.retain(|child| bytes(curves, child) <= budget && population.iter().all(|(_, own)| own != child));
        population.extend(children.into_iter().map(|child| (loss(&child), child)));
        population.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
        population.dedup_by(|a, b| a.1 == b.1);
        population.truncate(options.population.max(1));
    }
    population.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
    Ok(population.swap_remove(0).1)
}

/// One of two, or what lies between them.
fn mixed(a: u16, b: u16, averages: bool, chance: &mut Chance) -> u16 {
    match averages {
        true => a.midpoint(b),
        false if chance.is(0.5) => a,
        false => b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curves() -> Vec<LayerCurve> {
        let curve = |layer| LayerCurve { layer, n_expert: 16, least: 2, slot_bytes: 10, points: Vec::new() };
        (0..6).map(curve).collect()
    }

    #[test]
    fn it_finds_what_the_hull_cannot_see() {
        // Layer 3 matters, and 1 and 4 only together: no sum over layers.
        let loss = |own: &[u16]| {
            let missing = |at: usize| f64::from(16 - own[at]);
            3.0 * missing(3) + missing(1).max(missing(4)) + 0.01 * own.iter().map(|n| f64::from(16 - n)).sum::<f64>()
        };
        let (curves, budget) = (curves(), 6 * 8 * 10);
        let options = GeneticOptions { generations: 500, ..GeneticOptions::default() };
        let found = genetic(&curves, budget, &options, loss).unwrap();
        assert!(bytes(&curves, &found) <= budget);
        assert_eq!((found[3], &found), (16, &genetic(&curves, budget, &options, loss).unwrap()));
        assert!(found[1].abs_diff(found[4]) <= 1 && found[1] >= 8, "{found:?}");
        assert!(loss(&found) < loss(&hull(&curves, budget).unwrap()));
        assert!(genetic(&curves, 10, &options, loss).is_err());
        assert_eq!(genetic(&[], 0, &options, |_| 0.0), Ok(vec![]));
    }

    #[test]
    fn configurations_by_chance_differ_and_use_what_there_is() {
        let (curves, budget) = (curves(), 6 * 8 * 10);
        let all: Vec<Vec<u16>> = (0..50).map(|seed| random_configuration(&curves, budget, seed).unwrap()).collect();
        let mut different = all.clone();
        different.sort();
        different.dedup();
        assert!(different.len() > 45);
        let uses: Vec<u64> = all.iter().map(|own| bytes(&curves, own)).collect();
        assert!(uses.iter().all(|own| (budget - 10..=budget).contains(own)), "{uses:?}");
        assert!(all.iter().flatten().all(|n| (2..=16).contains(n)));
        assert!(random_configuration(&curves, 10, 0).is_err());
    }
}
