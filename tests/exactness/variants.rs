//! Settings of hobbit under which the logits stay the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use hobbit::engine::RouterObserver;
use hobbit::options::{Prefetch, Repack};
use hobbit::{CachingOptions, Model, ModelOptions, Session};
use hobbit_core::cache::Allocation;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::{PathBatches, PredictorKind};
use hobbit_core::profile::write_path_table;
use hobbit_core::store::IoMode;

use crate::fixture::cases::Case;
use crate::fixture::compare::{ALL, HALF, NONE, Placed, QUARTER, Reference, options, same};

#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub expert_cache: ExpertCache,
    pub io: IoMode,
    /// Seed of the order in which the store answers.
    pub shuffle: Option<u64>,
    /// Predictor of experts that are always read ahead.
    pub ahead: Option<PredictorKind>,
    /// How layers share the slots.
    pub slots: Allocation,
}

impl Variant {
    const fn of(expert_cache: ExpertCache) -> Self {
        Self { expert_cache, io: IoMode::Auto, shuffle: None, ahead: None, slots: Allocation::Even }
    }

    pub const ALL: Self = Self::of(ALL);
    pub const QUARTER: Self = Self::of(QUARTER);
    pub const HALF: Self = Self::of(HALF);
    pub const ONE_SLOT: Self = Self::of(NONE);

    pub const SIZES: [Self; 3] = [Self::ALL, Self::QUARTER, Self::ONE_SLOT];
}

/// Messages about a case, one per variant; none if every logit is llama.cpp's.
pub fn check(case: &Case, variants: &[Variant]) -> Vec<String> {
    check_variants(&Reference::new(case, &Placed::default()), variants)
}

/// As [`check`], but hobbit reads a file in which one block of one expert has the opposite sign.
pub fn check_altered(case: &Case, variants: &[Variant]) -> Vec<String> {
    let reference = Reference::new(case, &Placed::default());
    let path = &reference.path;
    let experts = Gguf::open(path).and_then(|gguf| gguf.experts()).expect("the model has experts");
    let mut bytes = fs::read(path).expect("it was just written");
    // The first block's scale, 16 bits.
    bytes[experts.layers[0].tensors[0].extent(3).offset as usize + 1] ^= 0x80;
    fs::write(path, bytes).expect("it was just written");
    check_variants(&reference, variants)
}

fn check_variants(reference: &Reference, variants: &[Variant]) -> Vec<String> {
    let needs_paths = variants.iter().any(|variant| variant.ahead == Some(PredictorKind::PathTable));
    let paths = needs_paths.then(|| learn_paths(reference).expect("paths of the script itself"));
    let failure = |variant: &Variant| {
        reference.failure(format!("{variant:?}"), check_variant(reference, variant, paths.as_deref()))
    };
    variants.iter().filter_map(failure).collect()
}

/// The table of the paths that the script itself takes: predictions as good as can be.
fn learn_paths(reference: &Reference) -> Result<PathBuf> {
    let options = ModelOptions { repack: Repack::Off, ..options(ExpertCache::Auto) };
    let model = Model::open(&reference.path, &options)?;
    let batches = Arc::new(Mutex::new(PathBatches::new(model.predict_shape())));
    let seen = Arc::clone(&batches);
    let observer: RouterObserver = Box::new(move |choice| {
        let experts = choice.experts.iter().map(|&id| id as u16);
        seen.lock().expect("no thread panics").layer(choice.layer, choice.n_expert_used, experts);
    });
    reference.case.run(&mut model.session_observed(&reference.case.options, observer)?)?;
    let table = batches.lock().expect("no thread panics").build();
    ensure!(table.n_tokens() > 0, "no router was seen");
    let path = reference.dir.path().join("model.paths");
    write_path_table(&path, &table)?;
    Ok(path)
}

fn check_variant(reference: &Reference, variant: &Variant, paths: Option<&Path>) -> Result<()> {
    let even = CachingOptions { slots: variant.slots, ..CachingOptions::default() };
    let caching = match variant.ahead {
        None => even,
        predictor => {
            let policy = PolicyKind::Learned;
            CachingOptions { policy, predictor, prefetch: Prefetch::On, distance: 3, ..even }
        }
    };
    let (case, path) = (reference.case, &reference.path);
    let options = ModelOptions {
        repack: Repack::Off,
        io: variant.io,
        caching,
        path_table: paths.filter(|_| variant.ahead == Some(PredictorKind::PathTable)).map(Path::to_owned),
        ..options(variant.expert_cache)
    };
    let model = crate::fixture::compare::open(path, &options, variant.shuffle)?;
    let mut session = model.session(&case.options)?;
    same(&reference.expected, &case.run(&mut session)?)?;
    check_traffic(&session, path, variant)
}

/// The counts suit the cache's size.
fn check_traffic(session: &Session, path: &Path, variant: &Variant) -> Result<()> {
    let unseen = session.model().unseen_experts();
    ensure!(unseen.is_empty(), "products that never reached hobbit: {}", unseen.join(", "));
    let gguf = Gguf::open(path)?;
    let mut layers = gguf.experts()?.layers;
    layers.retain(|layer| u64::from(layer.layer) < gguf.n_layers_run());
    let n_experts: u64 = layers.iter().map(|layer| u64::from(layer.n_expert)).sum();
    let stats = session.stats();
    let slots: Vec<u32> = stats.layers.iter().map(|layer| layer.slots).collect();
    let n_slots: u64 = slots.iter().map(|slots| u64::from(*slots)).sum();
    let total = stats.total();
    let plausible = match variant.expert_cache {
        NONE => n_slots == 0 && total.hits < total.misses,
        ALL => n_slots == n_experts && total.misses <= n_experts && total.hits > 0,
        ExpertCache::Percent(percent) => {
            n_slots > 0 && n_slots <= (n_experts as f64 * percent / 100.0) as u64 && total.misses > 0
        }
        size => panic!("no test has a cache of {size:?}"),
    };
    ensure!(
        plausible && total.hits + total.misses > 0 && total.bytes_read > 0,
        "implausible: {n_slots} slots for {n_experts} experts, {} hits, {} misses, {} bytes read",
        total.hits,
        total.misses,
        total.bytes_read
    );
    let caching = &session.description().caching;
    let reported = caching.slots_by_layer.first().map(|reported| (reported.least, reported.most));
    let found = slots.iter().min().copied().zip(slots.iter().max().copied());
    ensure!(
        caching.slots == variant.slots.to_string() && reported == found,
        "{slots:?} are the slots, {caching:?} is reported"
    );
    let n_used = u64::from(session.model().info().n_expert_used);
    // Layers behind whole ones may have none.
    let is_short = n_slots < n_used * layers.len() as u64 || matches!(variant.slots, Allocation::ShallowFirst { .. });
    let has_enough = is_short || slots.iter().all(|slots| u64::from(*slots) >= n_used);
    ensure!(has_enough, "a layer has fewer slots than a token uses: {slots:?}");
    Ok(())
}
