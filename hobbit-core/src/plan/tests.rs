//! Plans as tables, and properties of every plan.

mod device;
mod setup;

use super::pools::LOW_SHARE_AUTO_PERCENT;
use super::*;
use Precision::{High, Low};
use proptest::prelude::*;

fn pool(precision: Precision, n_versions: &[u16], expert_stride: u64, slice_stride_max: u64) -> PoolSpec {
    PoolSpec { precision, n_versions: n_versions.to_vec(), expert_stride, slice_stride_max }
}

/// 32 layers of 32 experts of 4 MiB: 4 GiB of experts, 512 MiB for a token of 4.
fn input() -> PlanInput {
    PlanInput {
        budget: Budget::Bytes(2048 * MIB),
        limits: MemoryLimits::default(),
        overcommit: false,
        expert_cache: ExpertCache::Auto,
        fixed: FixedCosts { weights: 412 * MIB, kv: 96 * MIB, compute: 301 * MIB, runtime: 60 * MIB, prediction: 0 },
        prompt_only: 0,
        margin: Some(40 * MIB),
        low_share: LowShare::Auto,
        pools: vec![pool(High, &[32; 32], 4 * MIB, 2 * MIB)],
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
    // 2048 - 869 - 40 = 1139 MiB of room; 24 staging slots are 48 MiB.
    assert_eq!((plan.n_slots, plan.n_experts), (272, 1024));
    assert_eq!((plan.n_low_slots, plan.low_cache), (0, 0));
    assert_eq!((plan.staging_slots, plan.staging_slot_bytes, plan.staging), (24, 2 * MIB, 48 * MIB));
    assert_eq!(plan.unused(), 3 * MIB);
    assert_eq!(plan.warning, None);
    assert_eq!(
        plan.to_string(),
        "memory budget  2.00 GiB  as given\n  \
           weights       412 MiB\n  \
           KV cache       96 MiB\n  \
           compute       301 MiB\n  \
           runtime        60 MiB\n  \
           margin         40 MiB  kept free\n  \
           expert cache 1.06 GiB  272 of 1024 experts (26 %)\n  \
           staging        48 MiB  24 slices of 2.0 MiB\n  \
           unused        3.0 MiB"
    );
}

#[test]
fn decoding_has_the_memory_that_only_prompts_need() {
    let of = |change: fn(&mut PlanInput)| {
        plan(|input| {
            input.prompt_only = 281 * MIB;
            change(input);
        })
        .unwrap()
    };
    let plan = of(|_| ());
    let decode = plan.decode.as_ref().unwrap();
    // The unused 3 MiB are enough for one more.
    assert_eq!((plan.n_slots, decode.n_slots, decode.compute), (272, 272 + 71, 20 * MIB));
    assert!(plan.to_string().contains("\n  at decoding  1.34 GiB  343 of 1024 experts (33 %), "), "{plan}");
    assert_eq!(of(|input| input.expert_cache = ExpertCache::Percent(20.0)).decode, None, "as many as were asked for");
    assert_eq!(of(|input| input.budget = Budget::Bytes(8192 * MIB)).decode, None, "everything fits");
    assert_eq!(of(|input| input.prompt_only = 0).decode, None);
    assert_eq!(of(|input| input.budget = Budget::Bytes(4900 * MIB)).decode.unwrap().n_slots, 1024);

    // A short prompt leaves experts most of it.
    let (all, free) = (plan.fixed.compute, |n_tokens, logits| plan.free_compute(n_tokens, 512, logits));
    assert_eq!((free(64, 0), free(64, 5 * MIB)), (all - all / 8 - 20 * MIB, all - all / 8 - 25 * MIB));
    assert_eq!((free(512, 0), free(u32::MAX, u64::MAX)), (0, 0));
    assert_eq!(of(|input| input.prompt_only = 0).free_compute(64, 512, 0), 0);
}

#[test]
fn a_buffer_for_few_tokens_has_nothing_that_only_prompts_need() {
    let costs = |mib: u64| FixedCosts { compute: mib * MIB, ..FixedCosts::default() };
    assert_eq!(costs(320).prompt_only(512), (320 - 10 * 5 / 4 - 4) * MIB - MIB / 2);
    for (compute, n_ubatch) in [(320, 16), (320, 1), (320, 0), (4, 512), (0, 512)] {
        assert_eq!(costs(compute).prompt_only(n_ubatch), 0, "{compute} MiB, {n_ubatch} tokens");
    }
    assert_eq!(FixedCosts { compute: u64::MAX, ..costs(0) }.prompt_only(1), 0);
}

#[test]
fn staging_is_a_tenth_at_most_but_one_at_least() {
    let staging_at = |room_mib: u64| {
        let plan = plan(|input| input.budget = Budget::Bytes((869 + 40 + room_mib) * MIB)).unwrap();
        (plan.staging_slots, plan.n_slots)
    };
    assert_eq!(staging_at(2), (1, 0));
    assert_eq!(staging_at(39), (1, 9));
    assert_eq!(staging_at(40), (2, 9));
    assert_eq!(staging_at(480), (24, 108));
    assert_eq!(staging_at(4095), (24, 1011));
    assert_eq!(staging_at(4096), (0, 1024));
}

/// All experts fit without staging where almost all of them with staging do not.
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
    assert_eq!(margin(5000, None), 50 * MIB);
    assert_eq!(margin(0, Some(1000 * MIB)), 64 * MIB);
    assert_eq!(margin(0, Some(5000 * MIB)), 250 * MIB);
}

/// Plan on a machine, or in a control group, with this many MiB left.
fn with_only(mib: u64, change: impl FnOnce(&mut PlanInput)) -> Result<MemoryPlan, PlanError> {
    plan(|input| {
        input.limits.mem_available = Some(1 << 50);
        input.limits.cgroup = Some(CgroupMemory { path: "/sys/fs/cgroup/a".into(), limit: mib * MIB, used: 0 });
        change(input);
    })
}

#[test]
fn a_budget_beyond_what_there_is_is_refused_where_it_would_be_used() {
    let error = with_only(1024, |input| input.budget = Budget::Bytes(2048 * MIB)).unwrap_err();
    let PlanError::AboveLimit { budget, takes, available, origin } = error.clone() else { panic!("{error}") };
    assert_eq!((budget, available, origin), (2048 * MIB, 1024 * MIB, BudgetSource::Cgroup));
    assert!(takes > available && takes <= budget, "{takes}");
    let text = error.to_string();
    assert!(text.contains(&format!("1.00 GiB are available (limit of the {})", BudgetSource::GROUP)), "{text}");
    let known_better = with_only(1024, |input| (input.budget, input.overcommit) = (Budget::Bytes(2048 * MIB), true));
    assert_eq!(known_better.unwrap().n_slots, 272);
}

#[test]
fn a_budget_beyond_what_there_is_is_cut_where_it_is_not_used() {
    let plan = with_only(8192, |input| input.budget = Budget::Bytes(64 << 30)).unwrap();
    let found = (plan.budget, plan.budget_source, plan.asked);
    assert_eq!(found, (8192 * MIB, BudgetSource::Cgroup, Some(64 << 30)));
    assert_eq!(with_only(8192, |input| input.budget = Budget::Bytes(8192 * MIB)).unwrap().asked, None);
}

#[test]
fn a_refusal_tells_what_is_available() {
    let too_small = with_only(300, |input| input.budget = Budget::Bytes(300 * MIB)).unwrap_err();
    assert!(matches!(too_small, PlanError::TooSmall { available: Some(bytes), .. } if bytes == 300 * MIB));
    assert!(too_small.to_string().ends_with(" MiB, with no expert cached"), "{too_small}");
    let dense = with_only(300, |input| (input.budget, input.pools) = (Budget::Bytes(300 * MIB), Vec::new()));
    let dense = dense.unwrap_err().to_string();
    assert!(dense.contains("this model has no experts that could stay in its file, and needs at least"), "{dense}");
    assert!(!dense.contains("expert cached"), "{dense}");
    let cache = |input: &mut PlanInput| {
        input.budget = Budget::Bytes(1500 * MIB);
        input.expert_cache = ExpertCache::Percent(50.0);
    };
    let too_large = with_only(2000, cache).unwrap_err();
    assert!(matches!(too_large, ExpertCacheTooLarge { available: Some(bytes), .. } if bytes == 2000 * MIB));
}

/// A found budget has a larger margin than a given one, except where nothing would run with it.
#[test]
fn a_budget_that_is_advised_is_not_refused_where_it_is_found() {
    let run = |mib: u64| with_only(mib, |input| (input.budget, input.margin) = (Budget::Auto, None));
    let error = run(869 + 2 + 31).unwrap_err();
    let PlanError::TooSmall { minimum, .. } = error else { panic!("{error}") };
    let plan = run(minimum >> 20).unwrap();
    assert_eq!((plan.budget_source, plan.margin), (BudgetSource::Cgroup, 32 * MIB));
    assert_eq!(run(2000).unwrap().margin, 48 * MIB);
}

#[test]
fn certain_excess_is_refused_before_loading() {
    let check = |budget, expert_cache| {
        let fixed = FixedCosts { weights: 50 * MIB, ..FixedCosts::default() };
        let cgroup = CgroupMemory { path: "/sys/fs/cgroup/a".into(), limit: 300 * MIB, used: 0 };
        let limits = MemoryLimits { mem_available: Some(1 << 40), cgroup: Some(cgroup), own: 0 };
        let input = PlanInput { budget: Budget::Bytes(budget), limits, expert_cache, fixed, ..input() };
        MemoryPlan::check(&input, fixed)
    };
    assert!(
        matches!(check(8 << 30, ExpertCache::Auto), Err(PlanError::AboveLimit { takes, .. }) if takes == 4146 * MIB)
    );
    assert!(check(8 << 30, ExpertCache::Bytes(400 * MIB)).is_err() && check(301 * MIB, ExpertCache::Auto).is_err());
    assert_eq!(check(300 * MIB, ExpertCache::Auto), Ok(()));
    assert_eq!(check(8 << 30, ExpertCache::Percent(5.0)), Ok(()));
}

/// Lower bounds decide, and the message names what is expected: the budget that it advises is enough.
#[test]
fn budgets_below_the_lower_bound_are_refused_before_loading() {
    let least = FixedCosts { weights: 5000 * MIB, ..FixedCosts::default() };
    let expected = FixedCosts { kv: 100 * MIB, ..least };
    let check = |budget, available: Option<u64>| {
        let limits = MemoryLimits { mem_available: available.map(|mib| mib * MIB), ..MemoryLimits::default() };
        MemoryPlan::check(&PlanInput { budget, limits, fixed: least, ..input() }, expected)
    };
    let given = |mib: u64| Budget::Bytes(mib * MIB);
    let minimum = |checked: Result<(), PlanError>| match checked {
        Err(PlanError::TooSmall { minimum, .. }) => Some(minimum),
        _ => None,
    };
    // 40 MiB stay free, and 2 are one slice.
    assert_eq!(minimum(check(given(1200), None)), Some((5000 + 100 + 40 + 2) * MIB));
    assert_eq!(minimum(check(Budget::Auto, Some(1200))), Some((5000 + 100 + 40 + 2) * MIB));
    assert_eq!(check(given(5042), None), Ok(()));
    assert!(check(given(5041), None).is_err());
    let beyond = check(given(8192), Some(1200));
    assert!(matches!(beyond, Err(PlanError::AboveLimit { available, .. }) if available == 1200 * MIB), "{beyond:?}");
    let overcommitted = PlanInput {
        budget: given(8192),
        limits: MemoryLimits { mem_available: Some(MIB), ..MemoryLimits::default() },
        overcommit: true,
        fixed: least,
        ..input()
    };
    assert_eq!(MemoryPlan::check(&overcommitted, expected), Ok(()));
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
    assert_eq!(with("600M").unwrap().staging_slots, 24);
    assert_eq!(with("0").unwrap().n_slots, 0);
    assert_eq!(with("25%").unwrap().n_slots, 256);
    let error = with("1200M").unwrap_err();
    let ExpertCacheTooLarge { asked, fits, minimum, .. } = error.clone() else { panic!("{error}") };
    assert_eq!((asked, fits, minimum), (1200 * MIB, 1137 * MIB, (869 + 40 + 1202) * MIB));
    assert_eq!(error.to_string(), "an expert cache of 1.17 GiB does not fit into a memory budget of 2.00 GiB");
    assert_eq!(with("1137MiB").unwrap().staging_slots, 1);
    // 48 MiB beside the cache are 24 staging slots.
    assert_eq!(with("1091MiB").unwrap().staging_slots, 24);
    assert_eq!(with(&(1091 * MIB + 1).to_string()).unwrap().staging_slots, 23);
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
    assert_eq!((warning.n_slots, warning.n_cycle, warning.mem_budget), (88, 128, Some((869 + 40 + 569) * MIB)));
    assert_eq!(
        warning.to_string(),
        "the expert cache holds 88 experts, but one token uses 128: most of them will be read again for every token"
    );
    let small = plan(|input| input.expert_cache = ExpertCache::Percent(5.0)).unwrap();
    let needed = |plan: MemoryPlan| plan.warning.map(|warning| (warning.mem_budget, warning.expert_cache));
    assert_eq!(needed(small), Some((None, Some(512 * MIB))));
    let small = plan(|input| {
        input.budget = Budget::Bytes(1000 * MIB);
        input.expert_cache = ExpertCache::Bytes(0);
    });
    assert_eq!(needed(small.unwrap()), Some((Some(1423 * MIB), Some(512 * MIB))));
}

#[test]
fn pools_get_the_same_fraction() {
    let plan = plan(|input| {
        input.pools = vec![pool(High, &[64; 10], 3 * MIB, MIB), pool(High, &[64; 2], 4 * MIB, 2 * MIB)];
    })
    .unwrap();
    // 1139 MiB of room, 48 of them staging; 1091 of 2432 MiB are 44.9 %.
    let slots: Vec<u32> = plan.pools.iter().map(|pool| pool.n_slots).collect();
    assert_eq!(slots, [287, 57]);
    assert_eq!(plan.unused(), 2 * MIB);
}

/// As [`input`], with a low version of a quarter of the size for every expert, and a quarter of the cache for them.
fn plan_with_low(change: impl FnOnce(&mut PlanInput)) -> MemoryPlan {
    let with_low = |input: &mut PlanInput| {
        input.pools.push(pool(Low, &[32; 32], MIB, MIB / 2));
        input.low_share = LowShare::Percent(25.0);
        change(input);
    };
    plan(with_low).unwrap()
}

#[test]
fn low_versions_get_a_quarter_of_the_cache() {
    let plan = plan_with_low(|_| ());
    // 1091 MiB of cache: 272 of low versions, and 819 for high ones.
    assert_eq!((plan.n_slots, plan.n_experts, plan.n_low_slots), (204, 1024, 272));
    assert_eq!((plan.expert_cache, plan.low_cache), ((816 + 272) * MIB, 272 * MIB));
    assert_eq!((plan.staging_slots, plan.unused()), (24, 3 * MIB));
    let pools: Vec<_> = plan.pools.iter().map(|pool| (pool.precision, pool.n_slots, pool.n_versions)).collect();
    assert_eq!(pools, [(High, 204, 1024), (Low, 272, 1024)]);
    let rows = plan.to_string();
    let rows = rows.split_once("kept free\n").unwrap().1;
    assert_eq!(
        rows,
        "  expert cache  816 MiB  204 of 1024 experts (19 %)\n  \
           low cache     272 MiB  272 of 1024 experts (26 %) in low precision\n  \
           staging        48 MiB  24 slices of 2.0 MiB\n  \
           unused        3.0 MiB"
    );
}

#[test]
fn low_versions_beside_all_high_ones_take_the_rest_of_the_room() {
    let with = |budget: u64, cache: ExpertCache, is_added: bool| {
        let mut plan = plan_with_low(|input| (input.budget, input.expert_cache) = (Budget::Bytes(budget * MIB), cache));
        assert_eq!(plan.add_low_slots(cache, StagingWish::default()), is_added);
        assert_eq!(plan.expert_cache, plan.n_slots * 4 * MIB + plan.low_cache);
        (plan.n_slots, plan.n_low_slots, plan.staging_slots, plan.unused() / MIB)
    };
    // 909 MiB are for other things, 4096 for high versions, 1024 for low ones.
    let all = ExpertCache::Percent(100.0);
    for cache in [ExpertCache::Auto, all, ExpertCache::Bytes(5120 * MIB)] {
        assert_eq!(with(6100, cache, true), (1024, 1024, 0, 71), "{cache:?}");
    }
    assert_eq!(with(5505, all, true), (1024, 452, 24, 0), "the others pass through staging");
    assert_eq!(with(6100, ExpertCache::Bytes(4196 * MIB), true), (1024, 90, 5, 995), "as much as was asked for");
    assert_eq!(with(5006, all, false), (1024, 0, 0, 1), "not even staging");
    assert_eq!(with(2048, ExpertCache::Auto, true), (204, 272, 24, 3), "high versions are missing: a plan like any");
}

#[test]
fn the_low_share_can_be_given() {
    let slots = |share: &str| {
        let plan = plan_with_low(|input| input.low_share = share.parse().unwrap());
        (plan.n_slots, plan.n_low_slots)
    };
    assert_eq!(slots("auto"), slots(&format!("{LOW_SHARE_AUTO_PERCENT}%")));
    assert_eq!(slots("0%"), (272, 0));
    assert_eq!(slots("50%"), (136, 545));
    // All low versions are 1024 MiB: the rest of their share goes to high ones.
    assert_eq!(slots("100%"), (16, 1024));
    let few = plan_with_low(|input| {
        input.pools[1].n_versions = vec![1; 32];
        input.low_share = LowShare::Percent(50.0);
    });
    assert_eq!((few.n_slots, few.n_low_slots), (264, 32));
    for nonsense in [f64::NAN, -7.0, f64::INFINITY] {
        let plan = plan_with_low(|input| input.low_share = LowShare::Percent(nonsense));
        assert!(plan.expert_cache + plan.staging <= 1139 * MIB, "{nonsense}");
    }
}

/// Slices are multiples of `unit` bytes.
fn pool_spec(unit: u64) -> impl Strategy<Value = PoolSpec> {
    let precision = prop_oneof![2 => Just(High), 1 => Just(Low)];
    let pages = prop::collection::vec(1..600u64, 1..4);
    (precision, prop::collection::vec(1..80u16, 1..8), pages).prop_map(move |(precision, n_versions, pages)| PoolSpec {
        precision,
        n_versions,
        expert_stride: unit * pages.iter().sum::<u64>(),
        slice_stride_max: unit * pages.iter().max().expect("at least one slice"),
    })
}

fn any_cache(most: u64) -> impl Strategy<Value = ExpertCache> {
    prop_oneof![
        Just(ExpertCache::Auto),
        (0..most).prop_map(ExpertCache::Bytes),
        (0..=100u8).prop_map(|percent| ExpertCache::Percent(percent.into())),
    ]
}

fn any_low_share() -> impl Strategy<Value = LowShare> {
    prop_oneof![Just(LowShare::Auto), (0..=100u8).prop_map(|percent| LowShare::Percent(percent.into()))]
}

fn any_input() -> impl Strategy<Value = PlanInput> {
    let pools = prop::collection::vec(pool_spec(4096), 0..5);
    let margin = prop_oneof![Just(None), (0..9 * MIB).prop_map(Some)];
    let compute = (0..100 * MIB, 0..100 * MIB);
    let fixed = (0..300 * MIB, compute).prop_map(|(weights, (compute, prompt_only))| {
        (FixedCosts { weights, compute, ..FixedCosts::default() }, prompt_only.min(compute))
    });
    (0..2000 * MIB, any_cache(200 * MIB), any_low_share(), fixed, margin, pools, 1..10u32, 1..40u32).prop_map(
        |(budget, expert_cache, low_share, (fixed, prompt_only), margin, pools, n_expert_used, wanted)| PlanInput {
            budget: Budget::Bytes(budget),
            limits: MemoryLimits::default(),
            overcommit: false,
            expert_cache,
            low_share,
            fixed,
            prompt_only,
            margin,
            pools,
            n_expert_used,
            staging: StagingWish { min: 1, wanted },
        },
    )
}

/// Low versions take at most their share, and nothing if there are none.
fn check_low_share(input: &PlanInput, plan: &MemoryPlan) {
    let percent = match input.low_share {
        LowShare::Auto => LOW_SHARE_AUTO_PERCENT,
        LowShare::Percent(percent) => percent,
    };
    let cache = (plan.expert_cache + plan.unused()) as f64;
    assert!(plan.low_cache as f64 <= cache * percent / 100.0);
    if !input.pools.iter().any(|pool| pool.precision == Low) {
        let other = PlanInput { low_share: LowShare::Percent(100.0 - percent), ..input.clone() };
        assert_eq!(MemoryPlan::new(&other).as_ref(), Ok(plan));
    }
}

fn plan_at(input: &PlanInput, budget: u64) -> Result<MemoryPlan, PlanError> {
    MemoryPlan::new(&PlanInput { budget: Budget::Bytes(budget), ..input.clone() })
}

/// The properties of every plan: it stays within the budget, the budgets it advises suffice, and the minima are tight.
fn check(input: &PlanInput) {
    match MemoryPlan::new(input) {
        Ok(plan) => {
            let spent = plan.fixed.total() + plan.margin + plan.expert_cache + plan.staging;
            assert_eq!(spent + plan.unused(), plan.budget);
            assert_eq!(plan.pools.len(), input.pools.len());
            for (pool, spec) in plan.pools.iter().zip(&input.pools) {
                assert!(pool.n_slots <= pool.n_versions);
                assert_eq!((pool.precision, pool.expert_stride), (spec.precision, spec.expert_stride));
                assert_eq!(pool.expert_cache, spec.expert_stride * u64::from(pool.n_slots));
                let full = pool.n_slots == pool.n_versions;
                let would_fit = pool.precision == High && plan.unused() >= pool.expert_stride;
                assert!(full || !would_fit || input.expert_cache != ExpertCache::Auto, "room for a high version");
            }
            assert_eq!(plan.staging, plan.staging_slot_bytes * u64::from(plan.staging_slots));
            assert!(input.pools.iter().all(|pool| pool.slice_stride_max <= plan.staging_slot_bytes));
            if plan.is_fully_resident() {
                assert_eq!((plan.low_cache, plan.staging), (0, 0))
            } else {
                assert!(plan.staging_slots >= input.staging.min)
            }
            check_low_share(input, &plan);
            if let Some(decode) = &plan.decode {
                let fixed = plan.fixed.total() - plan.fixed.compute + decode.compute;
                assert!(fixed + plan.margin + decode.expert_cache + plan.staging <= plan.budget);
                let n_slots = |pools: &[PoolPlan]| pools.iter().map(|pool| pool.n_slots).collect::<Vec<_>>();
                let (wide, narrow) = (n_slots(&decode.pools), n_slots(&plan.pools));
                assert!(wide != narrow && wide.iter().zip(narrow).all(|(wide, narrow)| *wide >= narrow));
                assert!(decode.pools.iter().all(|pool| pool.n_slots <= pool.n_versions));
                assert!(input.expert_cache == ExpertCache::Auto && !plan.is_fully_resident());
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
        Err(other) => panic!("the budget was given, and no device: {other}"),
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
