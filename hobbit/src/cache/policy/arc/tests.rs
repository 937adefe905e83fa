//! ARC's lists, step by step.

use super::*;
use crate::cache::policy::Policy;
use crate::cache::policy::scripts::{aged, at, high, insert, miss, token, victim_for, victim_of};

/// T1, T2, B1, B2 by expert, and p.
fn lists(arc: &mut Arc) -> ([Vec<u16>; 4], usize) {
    let Lists { t1, t2, b1, b2, target } = arc.of(high(0)).0.clone();
    ([t1, t2, b1, b2].map(|list| list.iter().map(|version| version.expert.index).collect()), target)
}

#[test]
fn recency_and_frequency_adapt_to_what_is_missed() {
    let (mut arc, mut residents) = (aged(Arc::default()), Vec::new());
    (0..4).for_each(|index| assert_eq!(miss(&mut arc, index, &mut residents, 4), None));
    token(&mut arc, 1, &[0, 1]);
    assert_eq!(lists(&mut arc), ([vec![2, 3], vec![0, 1], vec![], vec![]], 0));
    assert_eq!(miss(&mut arc, 4, &mut residents, 4), Some(2), "T1 is above its target of 0");
    assert_eq!(miss(&mut arc, 5, &mut residents, 4), Some(3));
    assert_eq!(lists(&mut arc), ([vec![4, 5], vec![0, 1], vec![2, 3], vec![]], 0));

    assert_eq!(miss(&mut arc, 2, &mut residents, 4), Some(4), "missed too early: T1 may have 1, it has 2");
    assert_eq!(lists(&mut arc), ([vec![5], vec![0, 1, 2], vec![3, 4], vec![]], 1));
    assert_eq!(miss(&mut arc, 3, &mut residents, 4), Some(0), "T1 may have 2");
    assert_eq!(lists(&mut arc), ([vec![5], vec![1, 2, 3], vec![4], vec![0]], 2));
    assert_eq!(miss(&mut arc, 0, &mut residents, 4), Some(5), "frequent and missed: T1 may have 1, and B2 takes it");
    assert_eq!(lists(&mut arc), ([vec![], vec![1, 2, 3, 0], vec![4, 5], vec![]], 1));
    assert_eq!(miss(&mut arc, 6, &mut residents, 4), Some(1), "T1 is below its target");
    assert_eq!(lists(&mut arc), ([vec![6], vec![2, 3, 0], vec![4, 5], vec![1]], 1));
}

#[test]
fn a_scan_is_forgotten() {
    let (mut arc, mut residents) = (aged(Arc::default()), Vec::new());
    for index in 0..60 {
        miss(&mut arc, index, &mut residents, 3);
    }
    assert_eq!(lists(&mut arc), ([vec![57, 58, 59], vec![], vec![], vec![]], 0), "T1 is the share: no ghosts");
}

#[test]
fn a_prefetch_is_not_a_use() {
    let mut arc = aged(Arc::default());
    insert(&mut arc, &[0, 1]);
    token(&mut arc, 0, &[0]);
    assert_eq!(lists(&mut arc).0[..2], [vec![1, 0], vec![]]);
    token(&mut arc, 1, &[0]);
    assert_eq!(lists(&mut arc).0[..2], [vec![1], vec![0]]);
    arc.on_remove(high(0), at(1));
    assert_eq!(lists(&mut arc).0, [vec![1], vec![], vec![], vec![]], "who was sent away is no ghost");
}

#[test]
fn who_may_leave_goes_even_if_the_list_is_not_due() {
    let mut arc = aged(Arc::default());
    insert(&mut arc, &[0, 1, 2]);
    (0..2).for_each(|time| token(&mut arc, time, &[0]));
    assert_eq!(victim_of(&mut arc, &[0]), 0, "1 and 2 are pinned");
    insert(&mut arc, &[99]);
    assert_eq!(victim_for(&mut arc, 98, &[2, 99]), 2);
    assert_eq!(victim_for(&mut arc, 97, &[55]), 55, "unknown residents are taken in slot order");
}
