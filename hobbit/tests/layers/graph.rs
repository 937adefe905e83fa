//! Circles in a graph.

use std::collections::{BTreeMap, BTreeSet};

/// The nodes that reach each other, where these are two or more: each such set once, ascending.
pub fn circles<'a, T: Ord + Clone + 'a>(edges: impl Iterator<Item = &'a (T, T)>) -> Vec<Vec<T>> {
    let mut next: BTreeMap<&T, Vec<&T>> = BTreeMap::new();
    for (from, to) in edges {
        next.entry(from).or_default().push(to);
    }
    let reach = |start: &'a T| {
        let mut seen: BTreeSet<&T> = BTreeSet::new();
        let mut left = vec![start];
        while let Some(node) = left.pop() {
            for &to in next.get(node).into_iter().flatten() {
                if seen.insert(to) {
                    left.push(to);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&T, BTreeSet<&T>> = next.keys().map(|&node| (node, reach(node))).collect();
    let mut done: BTreeSet<&T> = BTreeSet::new();
    let mut circles = Vec::new();
    for (&node, others) in &reached {
        let is_back = |other: &&&T| reached.get(**other).is_some_and(|back| back.contains(node));
        let circle: Vec<T> = others.iter().filter(is_back).map(|other| (*other).clone()).collect();
        if circle.len() > 1 && done.insert(node) {
            done.extend(others.iter().filter(is_back));
            circles.push(circle);
        }
    }
    circles
}

#[test]
fn nodes_that_reach_each_other() {
    let edges = [(1, 2), (2, 3), (3, 1), (3, 4), (5, 6), (6, 5), (7, 7)];
    assert_eq!(circles(edges.iter()), [vec![1, 2, 3], vec![5, 6]]);
    assert!(circles([(1, 2), (2, 3), (1, 3)].iter()).is_empty());
}
