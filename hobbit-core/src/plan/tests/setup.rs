//! Set-ups of a small model: 4 layers of 8 experts, of 4 MiB in high precision and 1 MiB in low.

use std::path::Path;

use crate::expert::{Precision, SliceKind};
use crate::gguf::{Catalog, ExpertClass, GgmlType, LayerCatalog, SliceShape, VersionSource};
use crate::plan::{
    Budget, DeviceExperts, ExpertCache, FixedCosts, PlanInput, Setup, SetupError, SetupInput, StagingWish, types_of,
};
use crate::profile::{LossBound, Mixes, PLAN_FORMAT, PLAN_VERSION, PlannedLayer, VirtualPlan, VirtualPlanError};
use crate::units::MIB;

fn catalog() -> Catalog {
    let class = |dtype, bytes: u64| ExpertClass {
        slices: vec![SliceShape { kind: SliceKind::Up, dtype, ne0: 256, ne1: 1, bytes, region: 0, capacity: bytes }],
        stride: bytes,
    };
    let version = |class| VersionSource { class, slices: Vec::new(), record: None };
    let layer = |layer| LayerCatalog { layer, n_expert: 8, high: vec![version(0); 8], low: vec![Some(version(1)); 8] };
    let classes = vec![class(GgmlType::Q8_0, 4 * MIB), class(GgmlType::Q4_1, MIB)];
    Catalog { classes, layers: (0..4).map(layer).collect() }
}

/// Experts have `room` MiB.
fn input(room: u64) -> SetupInput<'static> {
    let template = super::input();
    SetupInput {
        plan: PlanInput {
            budget: Budget::Bytes(room * MIB),
            fixed: FixedCosts::default(),
            margin: Some(0),
            pools: Vec::new(),
            staging: StagingWish::default(),
            n_expert_used: 2,
            ..template
        },
        is_exact: false,
        virtual_experts: false,
        virtual_plan: None,
        loss_bound: None,
        devices: DeviceExperts::default(),
        checkpoints: 0,
        lent: 0,
    }
}

fn set_up(room: u64, change: impl FnOnce(&mut SetupInput)) -> Setup {
    let mut input = input(room);
    change(&mut input);
    Setup::new(&input, catalog()).unwrap()
}

#[test]
fn low_versions_go_where_every_high_one_has_a_slot() {
    let part = set_up(64, |_| ());
    assert!(!part.is_exact && part.catalog.has_low());
    assert_eq!((part.pools.len(), part.n_staging as u32), (2, part.plan.staging_slots));
    let bytes: Vec<usize> = part.pool_bytes().map(|(bytes, _)| bytes).collect();
    assert_eq!(bytes.iter().sum::<usize>() as u64, part.plan.expert_cache);
    let all = set_up(256, |_| ());
    assert!(all.is_exact && !all.catalog.has_low());
    assert_eq!((all.plan.n_slots, all.n_staging), (32, 0));
}

#[test]
fn without_a_cache_everything_passes_through_one_slot() {
    let none = set_up(64, |input| input.plan.expert_cache = ExpertCache::Bytes(0));
    assert_eq!((none.plan.n_slots, none.n_staging), (0, 1));
}

#[test]
fn checkpoints_give_way_to_the_model() {
    let checkpoints = |room| set_up(room, |input| input.checkpoints = 8 * MIB).checkpoints;
    assert_eq!(checkpoints(20), 8 * MIB);
    assert_eq!(checkpoints(10), 0, "one staging slot takes 4 MiB");
}

#[test]
fn slots_have_the_memory_that_they_lend() {
    let lending = set_up(64, |input| input.lent = 20 * MIB);
    assert_eq!(lending.lendable, lending.plan.expert_cache);
    assert!(lending.spare < 20 * MIB && lending.spare + lending.lendable >= 20 * MIB);
    // Memory that a device reads is not given back.
    let pinned = set_up(64, |input| {
        input.lent = 20 * MIB;
        input.devices = DeviceExperts { exist: true, have_layers: true, n_copied: 32, ..DeviceExperts::default() };
    });
    assert!(pinned.spare >= 20 * MIB);
    assert_eq!(
        (pinned.lendable, pinned.plan.expert_cache + 20 * MIB <= lending.plan.expert_cache + 4 * MIB),
        (0, true)
    );
}

#[test]
fn the_host_keeps_nothing_that_devices_hold() {
    let devices = DeviceExperts { exist: true, have_layers: true, hold_all: true, n_copied: 32, n_slots: 32 };
    let setup = set_up(64, |input| input.devices = devices);
    assert!(setup.is_exact && setup.plan.warning.is_none() && setup.n_staging > 0);
    assert_eq!(setup.plan.n_slots, 0);
}

#[test]
fn low_versions_lie_beside_all_high_ones_where_a_device_copies_them() {
    let devices = DeviceExperts { exist: true, have_layers: true, hold_all: false, n_copied: 32, n_slots: 8 };
    let setup = set_up(256, |input| input.devices = devices);
    assert!(!setup.is_exact);
    assert_eq!((setup.plan.n_slots, setup.plan.n_low_slots), (32, 32));
    assert!(set_up(256, |input| (input.devices, input.is_exact) = (devices, true)).is_exact);
}

#[test]
fn virtual_experts_need_slots_on_the_host_unless_devices_hold_all() {
    let with = |hold_all| {
        let mut input = input(64);
        (input.virtual_experts, input.plan.expert_cache) = (true, ExpertCache::Bytes(0));
        input.devices = DeviceExperts { exist: true, have_layers: true, hold_all, n_copied: 32, n_slots: 8 };
        Setup::new(&input, catalog())
    };
    assert!(matches!(with(false), Err(SetupError::NoRoomForVirtual)));
    assert!(with(true).is_ok());
}

#[test]
fn a_plan_of_virtual_experts_decides_the_slots() {
    let plan = VirtualPlan {
        format: PLAN_FORMAT.to_owned(),
        version: PLAN_VERSION,
        layers: (0..4).map(|layer| PlannedLayer { layer, experts: 4, of: 8 }).collect(),
        model: None,
        text: None,
        planner: None,
        norms: Vec::new(),
        predicted: None,
        measured: None,
    };
    let with = |cache| {
        let mut input = input(120);
        (input.virtual_experts, input.virtual_plan) = (true, Some((&plan, Path::new("plan.json"))));
        (input.plan.expert_cache, input.lent) = (cache, MIB);
        Setup::new(&input, catalog())
    };
    // Five slots for each layer: one is spare.
    let setup = with(ExpertCache::Auto).unwrap();
    assert_eq!((setup.plan.n_slots, setup.plan.n_low_slots, setup.lendable), (20, 0, 0));
    let refused = with(ExpertCache::Bytes(79 * MIB));
    let too_large = |error: &SetupError| {
        matches!(error, SetupError::VirtualPlan(VirtualPlanError::TooLarge { needed: 80, given: 79, .. }))
    };
    assert!(refused.is_err_and(|error| too_large(&error)));
}

#[test]
fn a_loss_bound_without_low_versions_frees_their_slots() {
    let measured = Mixes {
        text: "prose.txt".into(),
        text_sha256: String::new(),
        tokens: 2048,
        expert_cache: "10%".into(),
        cache_share: 0.1,
        high: types_of(&catalog(), Precision::High),
        low: None,
        exact_bytes_per_token: 1000.0,
        mixes: Vec::new(),
    };
    let bound = LossBound {
        max_loss: 0.01,
        measured: vec![measured],
        file: "m.profile.json".into(),
        model: "m.gguf".into(),
        name: str::to_owned,
    };
    let with = |room| {
        let input = SetupInput { loss_bound: Some(&bound), ..input(room) };
        Setup::new(&input, catalog())
    };
    let part = with(64).unwrap();
    assert!(part.is_exact && part.pools.len() == 1 && part.plan.n_low_slots == 0);
    assert!(with(256).unwrap().mix.unwrap().words.contains("everything is in memory"));
    assert!(matches!(with(8), Err(SetupError::LossBound(_))), "less memory than was measured");
}
