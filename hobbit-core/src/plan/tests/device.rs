//! A device's plan as tables, and what must hold for any of them.

use proptest::prelude::*;

use super::{any_cache, any_low_share, pool, pool_spec};
use crate::expert::Precision::High;
use crate::plan::{
    DevicePlan, DevicePlanInput, ExpertCache, LowShare, PlanError, StagingWish, device_headroom, divide_wanted,
};
use crate::units::MIB;

/// A device of 10000 MiB with 16 layers of 32 experts of 4 MiB on it: 2 GiB of experts.
fn input() -> DevicePlanInput {
    DevicePlanInput {
        name: "CUDA0".to_owned(),
        free: 2200 * MIB,
        total: 10_000 * MIB,
        headroom_percent: 10.0,
        wanted: ExpertCache::Auto,
        pools: vec![pool(High, &[32; 16], 4 * MIB, 2 * MIB)],
        n_expert_used: 4,
        scratch: 200 * MIB,
        staging: StagingWish::default(),
        low_share: LowShare::Auto,
    }
}

fn plan(change: impl FnOnce(&mut DevicePlanInput)) -> Result<DevicePlan, PlanError> {
    let mut input = input();
    change(&mut input);
    DevicePlan::new(&input)
}

#[test]
fn experts_get_what_headroom_and_scratch_leave() {
    let plan = plan(|_| ()).unwrap();
    // 2200 - 1000 - 200 = 1000 MiB of room; 24 staging slots are 48 MiB.
    assert_eq!((plan.headroom, plan.scratch), (1000 * MIB, 200 * MIB));
    assert_eq!((plan.staging_slots, plan.staging()), (24, 48 * MIB));
    assert_eq!((plan.pools[0].n_slots, plan.cache), (238, 952 * MIB));
    assert!(!plan.is_fully_resident);
}

#[test]
fn device_caches_of_a_given_size() {
    let wanted = |wanted| plan(|input| input.wanted = wanted);
    let slots = |found: ExpertCache| wanted(found).map(|plan| (plan.pools[0].n_slots, plan.staging_slots)).unwrap();
    assert_eq!(slots(ExpertCache::Percent(25.0)), (128, 24));
    assert_eq!(slots(ExpertCache::Bytes(40 * MIB)), (10, 24));
    // One wave: no expert stays, every slice passes through.
    assert_eq!(slots(ExpertCache::Bytes(1)), (0, 24));
    assert_eq!(slots(ExpertCache::Bytes(998 * MIB)), (249, 1));
    let error = wanted(ExpertCache::Percent(50.0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a device cache of 1.00 GiB does not fit on CUDA0: of the 2.15 GiB that are free there, experts can have \
         998MiB (head-room 1000 MiB)"
    );
    assert!(wanted(ExpertCache::Bytes(998 * MIB + 1)).is_err());
}

#[test]
fn nothing_is_always_possible() {
    for wanted in [ExpertCache::Bytes(0), ExpertCache::Percent(0.0)] {
        let plan = plan(|input| (input.wanted, input.free) = (wanted, 0)).unwrap();
        assert_eq!((plan.cache, plan.staging_slots, plan.is_fully_resident), (0, 0, false));
    }
    let dense = plan(|input| (input.pools, input.free) = (Vec::new(), 0)).unwrap();
    assert_eq!((dense.cache, dense.staging_slots, dense.is_fully_resident), (0, 0, true));
}

#[test]
fn less_than_a_wave_is_refused_with_the_remedies() {
    let error = plan(|input| input.free = 1201 * MIB).unwrap_err();
    let minimum = 1202 * MIB;
    let found = PlanError::DeviceTooSmall { device: "CUDA0".into(), free: 1201 * MIB, minimum, headroom: 1000 * MIB };
    assert_eq!(error, found);
    assert_eq!(
        error.to_string(),
        "not even one wave of experts fits on CUDA0: 1.17 GiB are free there, 1.17 GiB are needed (head-room 1000 MiB)"
    );
    assert!(plan(|input| input.free = minimum).is_ok());
    assert!(plan(|input| input.free = 5).is_err());
}

#[test]
fn headroom_is_of_the_whole_or_of_what_is_known() {
    let headroom = |total, percent| {
        let change = |input: &mut DevicePlanInput| (input.total, input.headroom_percent) = (total, percent);
        plan(change).unwrap().headroom
    };
    assert_eq!(headroom(0, 10.0), 220 * MIB);
    assert_eq!(headroom(10_000 * MIB, 0.0), 0);
    assert_eq!(headroom(2200 * MIB + 1, 1.0), 22 * MIB + 1);
}

#[test]
fn sizes_are_divided_by_the_experts_of_each_device() {
    let bytes = |wanted, parts: &[u64]| {
        let sizes = divide_wanted(ExpertCache::Bytes(wanted), parts).into_iter().map(|part| match part {
            ExpertCache::Bytes(bytes) => bytes,
            other => panic!("{other:?}"),
        });
        sizes.collect::<Vec<_>>()
    };
    assert_eq!(bytes(1000, &[3, 1]), [750, 250]);
    assert_eq!(bytes(100, &[1, 1, 1]), [33, 33, 34]);
    assert_eq!(bytes(100, &[5, 0, 5]), [50, 0, 50]);
    assert_eq!(bytes(0, &[5, 5]), [0, 0]);
    assert_eq!(bytes(1, &[5, 5]), [1, 1]);
    assert_eq!(bytes(u64::MAX, &[1 << 60, 1 << 60]), [u64::MAX / 2, u64::MAX / 2 + 1]);
    assert_eq!(bytes(7, &[0, 0]), [0, 0]);
    assert_eq!(divide_wanted(ExpertCache::Auto, &[1, 2]), [ExpertCache::Auto; 2]);
    assert_eq!(divide_wanted(ExpertCache::Percent(5.0), &[1]), [ExpertCache::Percent(5.0)]);
}

fn any_input() -> impl Strategy<Value = DevicePlanInput> {
    let memory = (0..2000 * MIB, 0..2000 * MIB, 0..=100u8, 0..300 * MIB);
    let staging = (1..5u32, 1..40u32).prop_map(|(min, wanted)| StagingWish { min, wanted });
    let pools = prop::collection::vec(pool_spec(1331), 0..5);
    (memory, any_cache(400 * MIB), any_low_share(), pools, 1..10u32, staging).prop_map(
        |((free, used, percent, scratch), wanted, low_share, pools, n_expert_used, staging)| DevicePlanInput {
            name: "D0".to_owned(),
            free,
            total: free + used,
            headroom_percent: percent.into(),
            wanted,
            pools,
            n_expert_used,
            scratch,
            staging,
            low_share,
        },
    )
}

fn check(input: &DevicePlanInput, more: u64) {
    match DevicePlan::new(input) {
        Ok(plan) => {
            let spent = plan.cache + plan.staging();
            assert!(spent == 0 || spent + plan.headroom + plan.scratch <= plan.free, "head-room is touched");
            assert_eq!(plan.cache, plan.pools.iter().map(|pool| pool.expert_cache).sum::<u64>());
            for (pool, spec) in plan.pools.iter().zip(&input.pools) {
                assert!(pool.n_slots <= pool.n_versions && pool.expert_stride == spec.expert_stride);
            }
            if let ExpertCache::Bytes(wanted) = input.wanted {
                assert!(plan.cache <= wanted || plan.is_fully_resident);
            }
            let is_elsewhere = matches!(input.wanted, ExpertCache::Bytes(0) | ExpertCache::Percent(0.0));
            if plan.is_fully_resident || is_elsewhere {
                assert_eq!(plan.staging_slots, 0)
            } else {
                assert!(plan.staging_slots >= input.staging.min)
            }
            // More free memory on the same device is never worse, except for one slot that staging takes.
            let larger = DevicePlanInput { free: input.free + more, ..input.clone() };
            if larger.free <= larger.total {
                let larger = DevicePlan::new(&larger).expect("more memory, and no plan");
                assert!(larger.is_fully_resident || !plan.is_fully_resident);
                assert!(larger.staging_slots >= plan.staging_slots || larger.is_fully_resident);
            }
        }
        Err(PlanError::DeviceTooSmall { minimum, free, .. }) => {
            assert!(minimum > free);
            let auto = DevicePlanInput { wanted: ExpertCache::Auto, total: 0, ..input.clone() };
            let at = |free, headroom_percent| {
                DevicePlan::new(&DevicePlanInput { free, headroom_percent, ..auto.clone() }).is_ok()
            };
            let bare = minimum - device_headroom(input.headroom_percent, input.free, input.total); // without head-room the minimum is tight
            assert!(at(bare, 0.0) && !at(bare - 1, 0.0));
        }
        Err(PlanError::DeviceCacheTooLarge { fits, asked, .. }) => {
            assert!(fits < asked);
            let at = |bytes| DevicePlan::new(&DevicePlanInput { wanted: ExpertCache::Bytes(bytes), ..input.clone() });
            assert!(at(fits).is_ok() && at(fits + 1).is_err());
        }
        Err(other) => panic!("{other}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        rng_seed: prop::test_runner::RngSeed::Fixed(21),
        failure_persistence: None,
        ..ProptestConfig::with_cases(2000)
    })]

    #[test]
    fn plans_keep_their_promises(input in any_input(), more in 0..500 * MIB) {
        check(&input, more);
    }
}
