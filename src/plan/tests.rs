//! Plans as tables, and what must hold for any of them.

use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// 32 layers of 32 experts of 4 MiB: 4 GiB of experts, 512 MiB for a token of 4.
fn input() -> PlanInput {
    PlanInput {
        budget: Budget::Bytes(2048 * MIB),
        limits: MemoryLimits::default(),
        expert_cache: ExpertCache::Auto,
        fixed: FixedCosts { weights: 412 * MIB, kv: 96 * MIB, compute: 301 * MIB, runtime: 60 * MIB },
        margin: Some(40 * MIB),
        pools: vec![PoolSpec { n_expert: vec![32; 32], slice_strides: vec![MIB, MIB, 2 * MIB] }],
        n_expert_used: 4,
        staging: StagingWish::default(),
    }
}

fn plan(change: impl FnOnce(&mut PlanInput)) -> Result<MemoryPlan, PlanError> {
    let mut input = input();
    change(&mut input);
    MemoryPlan::new(&input)
}

#[test]
fn experts_get_what_the_rest_leaves() {
    let plan = plan(|_| ()).unwrap();
    // 2048 - 869 - 40 = 1139 MiB of room; 8 staging slices of each kind are 32 MiB.
    assert_eq!((plan.n_slots, plan.n_experts), (276, 1024));
    assert_eq!(plan.pools[0].staging_slices, 8);
    assert_eq!(plan.staging, 32 * MIB);
    assert_eq!(plan.unused(), 3 * MIB);
    assert_eq!(plan.warning, None);
    assert_eq!(
        plan.to_string(),
        "memory budget  2.00 GiB  --mem-budget\n  \
           weights       412 MiB\n  \
           KV cache       96 MiB\n  \
           compute       301 MiB\n  \
           runtime        60 MiB\n  \
           margin         40 MiB  kept free\n  \
           expert cache 1.08 GiB  276 of 1024 experts (26 %)\n  \
           staging        32 MiB  8 slices of each kind\n  \
           unused        3.0 MiB"
    );
}

#[test]
fn staging_is_a_tenth_at_most_but_one_at_least() {
    let staging_at = |room_mib: u64| {
        let plan = plan(|input| input.budget = Budget::Bytes((869 + 40 + room_mib) * MIB)).unwrap();
        (plan.pools[0].staging_slices, plan.n_slots)
    };
    assert_eq!(staging_at(4), (1, 0));
    assert_eq!(staging_at(79), (1, 18));
    assert_eq!(staging_at(80), (2, 18));
    assert_eq!(staging_at(320), (8, 72));
    assert_eq!(staging_at(4095), (8, 1015));
    assert_eq!(staging_at(4096), (0, 1024));
}

#[test]
fn everything_fits() {
    let plan = plan(|input| input.budget = Budget::Bytes(16384 * MIB)).unwrap();
    assert!(plan.is_fully_resident());
    assert_eq!((plan.staging, plan.unused()), (0, (16384 - 869 - 40 - 4096) * MIB));
    assert!(plan.to_string().contains("not needed: every expert has a slot"));
}

/// Almost all of the experts and staging do not fit where all of them do.
#[test]
fn all_experts_may_be_less_than_almost_all() {
    let almost = plan(|input| {
        input.budget = Budget::Bytes((869 + 40 + 4096) * MIB);
        input.expert_cache = ExpertCache::Bytes(4094 * MIB);
    });
    let plan = almost.unwrap();
    assert_eq!((plan.is_fully_resident(), plan.staging, plan.unused()), (true, 0, 0));
}

#[test]
fn a_dense_model_needs_no_cache() {
    let plan = plan(|input| input.pools.clear()).unwrap();
    assert_eq!((plan.n_slots, plan.expert_cache, plan.staging, plan.warning.is_none()), (0, 0, 0, true));
    assert!(!plan.to_string().contains("expert"));
}

#[test]
fn below_the_minimum_the_error_names_it() {
    let minimum = (869 + 40 + 4) * MIB;
    let error = plan(|input| input.budget = Budget::Bytes(minimum - 1)).unwrap_err();
    assert_eq!(error, PlanError::TooSmall { budget: minimum - 1, origin: BudgetSource::Given, minimum });
    assert_eq!(
        error.to_string(),
        "a memory budget of 913 MiB (--mem-budget) is too small: this model needs at least 913 MiB, with no expert \
         cached; give --mem-budget 913MiB, or make the context smaller (-c)"
    );
    assert_eq!(plan(|input| input.budget = Budget::Bytes(minimum)).unwrap().n_slots, 0);
    assert!(plan(|input| input.budget = Budget::Bytes(0)).is_err());
}

#[test]
fn the_margin_follows_the_budget() {
    let margin = |mib, limits: Option<u64>| {
        let change = |input: &mut PlanInput| {
            input.margin = None;
            input.budget = if limits.is_some() { Budget::Auto } else { Budget::Bytes(mib * MIB) };
            input.limits.mem_available = limits;
        };
        plan(change).unwrap().margin
    };
    assert_eq!(margin(1000, None), 32 * MIB);
    assert_eq!(margin(5000, None), 100 * MIB);
    assert_eq!(margin(0, Some(1000 * MIB)), 64 * MIB);
    assert_eq!(margin(0, Some(5000 * MIB)), 250 * MIB);
}

#[test]
fn auto_asks_the_system() {
    assert_eq!(plan(|input| input.budget = Budget::Auto), Err(PlanError::NoLimitKnown));
    let cgroup = CgroupMemory { path: "/sys/fs/cgroup/a".into(), limit: 1800 * MIB, used: 300 * MIB };
    let limits = MemoryLimits { mem_available: Some(8192 * MIB), cgroup: Some(cgroup), own: 200 * MIB };
    let plan = plan(|input| (input.budget, input.limits) = (Budget::Auto, limits)).unwrap();
    assert_eq!((plan.budget, plan.budget_source), (1700 * MIB, BudgetSource::Cgroup));
}

#[test]
fn the_expert_cache_can_be_given() {
    let with = |cache: &str| plan(|input| input.expert_cache = cache.parse().unwrap());
    assert_eq!(with("600M").unwrap().n_slots, 150);
    assert_eq!(with("600M").unwrap().pools[0].staging_slices, 8);
    assert_eq!(with("0").unwrap().n_slots, 0);
    assert_eq!(with("25%").unwrap().n_slots, 256);
    let error = with("1200M").unwrap_err();
    let ExpertCacheTooLarge { asked, fits, minimum, .. } = error.clone() else { panic!("{error}") };
    assert_eq!((asked, fits, minimum), (1200 * MIB, 1135 * MIB, (869 + 40 + 1204) * MIB));
    assert_eq!(
        error.to_string(),
        "an expert cache of 1.17 GiB does not fit into a memory budget of 2.00 GiB; give --expert-cache 1135MiB or \
         less, or --mem-budget 2113MiB"
    );
    assert_eq!(with("1135MiB").unwrap().pools[0].staging_slices, 1);
    // 32 MiB beside the cache are 8 staging slices of each kind.
    assert_eq!(with("1107MiB").unwrap().pools[0].staging_slices, 8);
    assert_eq!(with(&(1107 * MIB + 1).to_string()).unwrap().pools[0].staging_slices, 7);
    let all = plan(|input| {
        input.budget = Budget::Bytes(8192 * MIB);
        input.expert_cache = ExpertCache::Bytes(u64::MAX);
    });
    assert!(all.unwrap().is_fully_resident());
}

use PlanError::ExpertCacheTooLarge;

#[test]
fn below_one_tokens_cycle_the_plan_says_what_to_give() {
    let small = plan(|input| input.budget = Budget::Bytes(1300 * MIB)).unwrap();
    let warning = small.warning.unwrap();
    // 128 experts are 512 MiB; a tenth of 569 MiB of room would be staging.
    assert_eq!((warning.n_slots, warning.n_cycle, warning.mem_budget), (89, 128, Some((869 + 40 + 569) * MIB)));
    assert_eq!(
        warning.to_string(),
        "the expert cache holds 89 experts, but one token uses 128: most of them will be read again for every token; \
         for one token's experts give --mem-budget 1478MiB"
    );
    let small = plan(|input| input.expert_cache = ExpertCache::Percent(5.0)).unwrap();
    assert!(small.warning.unwrap().to_string().ends_with("give --expert-cache 512MiB"));
    let small = plan(|input| {
        input.budget = Budget::Bytes(1000 * MIB);
        input.expert_cache = ExpertCache::Bytes(0);
    });
    let advice = small.unwrap().warning.unwrap().to_string();
    assert!(advice.ends_with("give --mem-budget 1425MiB --expert-cache 512MiB"), "{advice}");
}

#[test]
fn pools_get_the_same_fraction() {
    let plan = plan(|input| {
        input.pools = vec![
            PoolSpec { n_expert: vec![64; 10], slice_strides: vec![MIB, MIB, MIB] },
            PoolSpec { n_expert: vec![64; 2], slice_strides: vec![MIB, MIB, 2 * MIB] },
        ];
    })
    .unwrap();
    // 1139 MiB of room; staging 8 * (3 + 4) MiB; 1083 of 2432 MiB are 44.5 %.
    let slots: Vec<u32> = plan.pools.iter().map(|pool| pool.n_slots).collect();
    assert_eq!(slots, [285, 57]);
    assert_eq!(plan.unused(), 0);
}

#[test]
fn a_plan_is_written_as_json() {
    let json = serde_json::to_value(plan(|_| ()).unwrap()).unwrap();
    assert_eq!(json["fixed"]["weights"], 412 * MIB);
    assert_eq!(json["budget_source"], "Given");
    assert_eq!(json["pools"][0]["n_slots"], 276);
}

fn pool_spec() -> impl Strategy<Value = PoolSpec> {
    let strides = prop::collection::vec((1..600u64).prop_map(|pages| pages * 4096), 1..4);
    (prop::collection::vec(1..80u16, 1..8), strides)
        .prop_map(|(n_expert, slice_strides)| PoolSpec { n_expert, slice_strides })
}

fn any_input() -> impl Strategy<Value = PlanInput> {
    let cache = prop_oneof![
        Just(ExpertCache::Auto),
        (0..200 * MIB).prop_map(ExpertCache::Bytes),
        (0..=100u8).prop_map(|percent| ExpertCache::Percent(percent.into())),
    ];
    let pools = prop::collection::vec(pool_spec(), 0..4);
    let margin = prop_oneof![Just(None), (0..9 * MIB).prop_map(Some)];
    (0..2000 * MIB, cache, 0..300 * MIB, margin, pools, 1..10u32, 1..20u32).prop_map(
        |(budget, expert_cache, weights, margin, pools, n_expert_used, wanted)| PlanInput {
            budget: Budget::Bytes(budget),
            limits: MemoryLimits::default(),
            expert_cache,
            fixed: FixedCosts { weights, ..FixedCosts::default() },
            margin,
            pools,
            n_expert_used,
            staging: StagingWish { min: 1, wanted },
        },
    )
}

fn plan_at(input: &PlanInput, budget: u64) -> Result<MemoryPlan, PlanError> {
    MemoryPlan::new(&PlanInput { budget: Budget::Bytes(budget), ..input.clone() })
}

/// Everything a plan promises: it stays within the budget, and the numbers it advises are enough, the minima tight.
fn check(input: &PlanInput) {
    match MemoryPlan::new(input) {
        Ok(plan) => {
            let spent = plan.fixed.total() + plan.margin + plan.expert_cache + plan.staging;
            assert_eq!(spent + plan.unused(), plan.budget);
            for (pool, spec) in plan.pools.iter().zip(&input.pools) {
                assert!(pool.n_slots <= pool.n_experts);
                assert_eq!(pool.expert_cache, spec.expert_stride() * u64::from(pool.n_slots));
                assert!(plan.is_fully_resident() || pool.staging_slices >= input.staging.min);
            }
            if let Some(warning) = plan.warning {
                let advised = PlanInput {
                    budget: warning.mem_budget.map_or(input.budget, Budget::Bytes),
                    expert_cache: warning.expert_cache.map_or(input.expert_cache, ExpertCache::Bytes),
                    ..input.clone()
                };
                let plan = MemoryPlan::new(&advised).expect("advice that works");
                assert_eq!(plan.warning, None, "{advised:?}");
            }
        }
        Err(PlanError::TooSmall { minimum, .. }) => {
            let auto = PlanInput { expert_cache: ExpertCache::Auto, ..input.clone() };
            assert!(plan_at(&auto, minimum).is_ok());
            assert!(minimum == 0 || plan_at(&auto, minimum - 1).is_err());
        }
        Err(PlanError::ExpertCacheTooLarge { fits, minimum, .. }) => {
            assert!(plan_at(input, minimum).is_ok());
            assert!(plan_at(input, minimum - 1).is_err());
            let fitting = PlanInput { expert_cache: ExpertCache::Bytes(fits), ..input.clone() };
            assert!(MemoryPlan::new(&fitting).is_ok());
        }
        Err(PlanError::NoLimitKnown) => panic!("the budget was given"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        rng_seed: prop::test_runner::RngSeed::Fixed(20),
        failure_persistence: None,
        ..ProptestConfig::with_cases(2000)
    })]

    #[test]
    fn plans_keep_their_promises(input in any_input()) {
        check(&input);
    }
}
