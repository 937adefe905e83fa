//! The residency against plain maps: what has been read into which slot, what a step waits for, what is pinned.
//!
//! A script decides the model, and then what two sessions do in turn: layers whole or in two splits, given up halfway,
//! held by a device for longer; reads that land in any order, fail, or find no room; slots that go and come back. After
//! every call the maps say what must hold.

use std::collections::HashMap;

use proptest::prelude::*;

use super::manual::{KINDS, Manual, Small, begin_split, split};
use super::*;
use crate::cache::policy::PolicyKind;
use crate::cache::{SliceState, SlotId};
use crate::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use crate::load::prefetch::{Governor, PrefetchOptions, PrefetchRule, Prefetcher};
use crate::predict::{self, PredictShape, PredictorKind};
use crate::route::{Phase, Thresholds, resolve};

/// The next call.
#[derive(Clone, Debug)]
enum Call {
    /// A session computes a layer of tokens: `[n_tokens][n_used]`.
    Layer {
        session: usize,
        layer: u16,
        tokens: Vec<Vec<u16>>,
        how: How,
    },
    /// A read at this position lands before it is asked for.
    Land {
        position: usize,
        fails: bool,
    },
    /// Number of next reads that find no room.
    Refuse(usize),
    /// The token, or the prompt, is over.
    EndBatch(u32),
    BeginSequence,
    /// No layer runs for a while.
    Idle,
    /// A layer's shares are resized.
    Resize {
        layer: u16,
        n_slots: u32,
    },
    /// Slots that a device held are given back.
    Unpin,
    Settle,
}

#[derive(Clone, Copy, Debug)]
enum How {
    Whole,
    /// Gate and up, then down. The other session may have a layer in between.
    InTwo,
    /// Given up after this many products.
    GivenUp(usize),
    /// A device keeps the slots pinned.
    Held,
    /// Versions with an even index are on a device.
    OnDevice,
}

/// Whether a device has the versions with an even index.
#[derive(Clone, Copy)]
struct Even(bool);

impl DeviceResidency for Even {
    fn has(&self, version: Version) -> bool {
        self.0 && version.expert.index.is_multiple_of(2)
    }
}

struct Model {
    small: Small,
    residency: Residency<Manual, ()>,
    sessions: [Selection; 2],
    /// Slots that a device holds.
    held: Vec<Vec<SlotId>>,
    /// Pins of versions in slots.
    pins: HashMap<(Version, SlotId), usize>,
    hits: u64,
    misses: u64,
}

impl Model {
    fn new(small: Small, predictor: PredictorKind) -> Self {
        let mut residency = small.residency();
        let shape = PredictShape::new((0..small.n_layers).map(|layer| (layer, small.n_expert)), |_| 2);
        let options = PrefetchOptions { rule: PrefetchRule::First(2), ..PrefetchOptions::default() };
        let lookahead = Lookahead::new(
            predict::build(predictor, shape.clone(), None, 0),
            Prefetcher::new(options, Default::default()),
            Governor::fixed(true),
            LookaheadOptions { shape, distance_max: 2, hides_waits: false },
        );
        residency.lookahead = Some(lookahead);
        let [near, far] = [0, 1].map(|layer| ExpertId { layer, index: 2 });
        residency.fill_free_slots(true, vec![Version::high(far), Version::high(near), Version::low(near)]);
        let (held, pins) = (Vec::new(), HashMap::new());
        Self { small, residency, sessions: Default::default(), held, pins, hits: 0, misses: 0 }
    }

    fn call(&mut self, call: &Call) {
        match call {
            Call::Layer { session, layer, tokens, how } => {
                self.layer(*session, *layer % self.small.n_layers, tokens, *how)
            }
            Call::Land { position, fails } => {
                let n = self.residency.reads().outstanding();
                if n > 0 {
                    self.residency.reads_mut().land(position % n, *fails);
                }
            }
            Call::Refuse(n) => self.residency.reads_mut().refuses = *n,
            Call::EndBatch(n_tokens) => {
                self.residency.end_batch(Phase::of(*n_tokens as usize, true), *n_tokens, 0.1);
                self.residency.begin_batch(Phase::of(*n_tokens as usize, true), *n_tokens);
            }
            Call::BeginSequence => self.residency.begin_sequence(),
            Call::Idle => self.residency.idle(),
            Call::Resize { layer, n_slots } => self.resize(*layer % self.small.n_layers, *n_slots),
            Call::Unpin => self.unpin_held(),
            Call::Settle => self.settle(),
        }
    }

    /// A version is complete where the maps say so of its slot.
    fn is_ready(&self, version: Version) -> bool {
        let memory = &self.residency.reads().slots;
        let slot = self.residency.cache().lookup(version);
        slot.is_some_and(|slot| KINDS.iter().all(|&kind| memory.get(&(slot, kind)) == Some(&version)))
    }

    fn layer(&mut self, session: usize, layer: u16, tokens: &[Vec<u16>], how: How) {
        match how {
            How::Whole => self.split(session, layer, tokens, &KINDS, how),
            How::InTwo => {
                self.split(session, layer, tokens, &KINDS[..2], how);
                // Between the two, another session's layer.
                self.split(1 - session, (layer + 1) % self.small.n_layers, &tokens[..1], &KINDS, How::Whole);
                self.split(session, layer, tokens, &KINDS[2..], how);
            }
            How::GivenUp(_) | How::Held | How::OnDevice => self.split(session, layer, tokens, &KINDS, how),
        }
    }

    fn split(&mut self, session: usize, layer: u16, tokens: &[Vec<u16>], kinds: &[SliceKind], how: How) {
        let small = self.small;
        let mut chosen = std::mem::take(&mut self.sessions[session]);
        let residency = &mut self.residency;
        let n_used = tokens[0].len();
        let ids = tokens.iter().flatten().map(|&index| i32::from(index % small.n_expert));
        chosen.set(&Split { kinds, ..split(&small, layer, n_used) }, ids).unwrap();
        if !chosen.is_later_split() {
            let weights = (0..tokens.len()).flat_map(|_| (0..n_used).map(|rank| 1.0 / (rank + 1) as f32));
            chosen.demand(&mut residency.precisions, &weights.collect::<Vec<_>>());
        }
        // Hits are counted when the layer begins.
        residency.catch_up();
        let devices = Even(matches!(how, How::OnDevice));
        let expected = (!chosen.is_later_split()).then(|| self.expected(&chosen, layer, devices));
        let before = self.residency.counters();
        let step = begin_split(&mut self.residency, &mut chosen, &devices);
        let after = self.residency.counters();
        match &expected {
            Some((precisions, hits)) => {
                let used: Vec<_> = step.used.iter().map(|used| (used.index, used.precision)).collect();
                assert_eq!(&used, precisions, "used versions");
                assert_eq!(after.hits - before.hits, *hits);
                assert_eq!(after.hits + after.misses - before.hits - before.misses, chosen.routing.needed.len() as u64);
                self.hits += hits;
                self.misses += chosen.routing.needed.len() as u64 - hits;
            }
            None => assert_eq!((after.hits, after.misses), (before.hits, before.misses), "counted once"),
        }
        let pinned: Vec<_> =
            step.used.iter().filter(|used| used.row.is_some()).map(|&used| step.version(used)).collect();
        for &version in &pinned {
            let slot = self.residency.cache().lookup(version).expect("what has a row is resident");
            *self.pins.entry((version, slot)).or_default() += 1;
        }
        self.check();
        if chosen.is_new_decode() && self.residency.looks_ahead() {
            // Some experts of each later layer, others for each token.
            let later = self.residency.lookahead.as_ref().unwrap().layers_to_score(layer);
            let score = |token: usize, target: u16, index: u16| (index * 5 + target * 3 + token as u16 * 7) % 11;
            let of_layer = |token: usize, target: u16| {
                (target, (0..self.small.n_expert).map(|index| f32::from(score(token, target, index))).collect())
            };
            let of_token = |token| later.iter().map(|(_, target)| of_layer(token, *target)).collect();
            let scores = (0..tokens.len()).map(of_token).collect();
            self.residency.predict(&step, &chosen.token_choices(), scores, None, &devices);
        }
        self.check();
        let most = if let How::GivenUp(n) = how { n } else { usize::MAX };
        let is_whole = self.products(&step, kinds, most);
        if matches!(how, How::Held) && is_whole {
            let slots = self.residency.finish(step);
            assert_eq!(slots.len(), pinned.len());
            self.held.push(slots);
        } else {
            self.unpin(&pinned);
            self.residency.end(step, &chosen);
        }
        self.sessions[session] = chosen;
        if !is_whole {
            self.settle();
        }
        self.check();
    }

    /// Versions that are used, and how many of the needed experts are there, by the maps and the rule of precisions.
    fn expected(&self, chosen: &Selection, layer: u16, devices: Even) -> (Vec<(u16, Precision)>, u64) {
        let (mut used, mut hits) = (Vec::new(), 0);
        let has_low = self.small.slots.1.is_some();
        for &index in &chosen.routing.needed {
            let expert = ExpertId { layer, index };
            let [high, low] = [Version::high(expert), Version::low(expert)];
            let is_resident = |version| devices.has(version) || self.residency.cache().lookup(version).is_some();
            let is_coming = self.residency.upgrades.is_underway(high) && !devices.has(high);
            let residents = [is_resident(high) && !is_coming, has_low && is_resident(low)];
            let Some(precision) = resolve(chosen.demands[usize::from(index)], residents, has_low) else { continue };
            used.push((index, precision));
            let version = Version { expert, precision };
            // Where nothing may depend on the disk's speed, a read that has not landed is a hit, too.
            let is_there = if self.residency.precisions.options.deterministic {
                self.residency.cache().lookup(version).is_some()
            } else {
                self.is_ready(version)
            };
            hits += u64::from(devices.has(version) || is_there);
        }
        (used, hits)
    }

    /// Multiplies at most `most` slices. `false`: it was given up, or a read failed.
    fn products(&mut self, step: &LayerStep, kinds: &[SliceKind], most: usize) -> bool {
        let slices: Vec<(SliceId, Used)> = kinds
            .iter()
            .flat_map(|&kind| step.used.iter().map(move |&used| (SliceId { version: step.version(used), kind }, used)))
            .filter(|(_, used)| !used.is_on_device)
            .collect();
        for (slice, used) in slices.into_iter().take(most) {
            loop {
                self.residency.memory.poll();
                if self.residency.memory.take_failure().is_some() {
                    assert!(self.residency.memory.take_failure().is_none(), "told once");
                    return false;
                }
                match self.residency.memory.locate(slice, used) {
                    Place::Cached => {
                        let slot = self.residency.cache().lookup(slice.version).expect("pinned");
                        let there = self.residency.reads().slots.get(&(slot, slice.kind));
                        assert_eq!(there, Some(&slice.version), "{slice} has landed where the step reads it");
                        break;
                    }
                    Place::Staged(slot) => {
                        assert_eq!(self.residency.reads().staged.get(&slot), Some(&slice), "in staging slot {slot}");
                        self.residency.memory.release(slice);
                        break;
                    }
                    Place::Pending => {
                        let goes_on = self.residency.memory.wait() || self.residency.memory.force_staging(slice, used);
                        let has_failed = self.residency.memory.in_flight.failure.is_some();
                        assert!(goes_on || has_failed, "{slice}: nothing will ever load it");
                    }
                }
                self.check();
            }
        }
        most == usize::MAX
    }

    fn unpin(&mut self, versions: &[Version]) {
        for &version in versions {
            let slot = self.residency.cache().lookup(version).expect("a pinned version stays");
            let pins = self.pins.get_mut(&(version, slot)).expect("in its slot");
            *pins -= 1;
        }
        self.pins.retain(|_, pins| *pins > 0);
    }

    fn unpin_held(&mut self) {
        for slots in std::mem::take(&mut self.held) {
            let versions: Vec<_> =
                slots.iter().map(|&slot| self.residency.cache().pools().occupant(slot).expect("held")).collect();
            self.unpin(&versions);
            self.residency.memory.unpin(slots);
        }
    }

    fn resize(&mut self, layer: u16, n_slots: u32) {
        self.residency.quiesce();
        for share in self.residency.layout().shares(layer).to_vec() {
            self.residency.memory.resize_share(share.id, n_slots);
            assert!(self.residency.cache().pools().slots_of_share(share.id).len() as u32 <= share.n_slots);
        }
    }

    /// After a failed batch, or before a resize.
    fn settle(&mut self) {
        self.residency.memory.settle();
        assert!(self.residency.memory.take_failure().is_none(), "what has failed does not fail the next batch");
        assert_eq!(self.residency.reads().outstanding(), 0);
        assert_eq!(self.residency.memory.in_flight.outstanding().count(), 0);
        for (version, slot) in self.residency.cache().residents() {
            let states = KINDS.map(|kind| self.residency.cache().state(slot, kind));
            assert!(!states.contains(&SliceState::Loading), "{version} is not loading");
        }
        let is_loading =
            |slice| self.residency.memory.in_flight.staging.get(slice) == Some(super::in_flight::Staged::Loading);
        assert!(!self.residency.memory.in_flight.staging.slices().any(is_loading));
    }

    /// Invariants after every call.
    fn check(&self) {
        let (residency, reads) = (&self.residency, self.residency.reads());
        for (version, slot) in self.pins.keys() {
            assert_eq!(residency.cache().pools().occupant(*slot), Some(*version), "a pinned version stays");
        }
        for (version, slot) in residency.cache().residents() {
            for kind in KINDS {
                if residency.cache().state(slot, kind) == SliceState::Ready {
                    assert_eq!(reads.slots.get(&(slot, kind)), Some(&version), "{version} {kind:?} has landed");
                }
            }
        }
        let n_open = reads.n_submitted - reads.n_answered;
        assert_eq!(n_open, reads.outstanding(), "each read is answered once");
        let counters = residency.counters();
        assert_eq!((counters.hits, counters.misses), (self.hits, self.misses));
        let by_layer = residency.layer_stats();
        let sum = by_layer.iter().fold((0, 0), |(hits, misses), layer| (hits + layer.hits, misses + layer.misses));
        assert_eq!(sum, (self.hits, self.misses));
    }
}

fn smalls() -> impl Strategy<Value = Small> {
    let thresholds = prop::sample::select(vec![(0.0, 1.0), (0.3, 0.6), (0.5, 1.0), (1.0, 1.0)]);
    let policy = prop::sample::select(PolicyKind::ALL.to_vec());
    let low = prop::option::of(0..4u32);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (1..4u16, 2..7u16, (0..5u32, low), 1..8usize, policy, thresholds, flags).prop_map(
        |(n_layers, n_expert, slots, n_staging, policy, (t1, t2), (deterministic, has_records, nested))| Small {
            n_layers,
            n_expert,
            slots,
            n_staging,
            policy,
            thresholds: Thresholds { t1, t2 },
            deterministic,
            record: has_records.then_some(1 << 20),
            nested,
        },
    )
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let how = prop_oneof![
        4 => Just(How::Whole),
        2 => Just(How::InTwo),
        1 => (0..6usize).prop_map(How::GivenUp),
        2 => Just(How::Held),
        1 => Just(How::OnDevice),
    ];
    let tokens = prop_oneof![
        3 => prop::collection::vec(prop::collection::vec(0..7u16, 2), 1),
        1 => prop::collection::vec(prop::collection::vec(0..7u16, 2), 2..6),
    ];
    let layer = (0..2usize, 0..3u16, tokens, how).prop_map(|(session, layer, tokens, how)| Call::Layer {
        session,
        layer,
        tokens,
        how,
    });
    let call = prop_oneof![
        8 => layer,
        4 => (0..9usize, prop::bool::weighted(0.1)).prop_map(|(position, fails)| Call::Land { position, fails }),
        1 => (0..3usize).prop_map(Call::Refuse),
        3 => (1..3u32).prop_map(Call::EndBatch),
        1 => Just(Call::BeginSequence),
        1 => Just(Call::Idle),
        1 => (0..3u16, 0..5u32).prop_map(|(layer, n_slots)| Call::Resize { layer, n_slots }),
        2 => Just(Call::Unpin),
        1 => Just(Call::Settle),
    ];
    prop::collection::vec(call, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn maps_agree(
        small in smalls(),
        predictor in prop::sample::select(vec![PredictorKind::None, PredictorKind::StackedGate]),
        landings in prop::collection::vec((0..9usize, prop::bool::weighted(0.05)), 0..200),
        calls in calls(),
    ) {
        let mut model = Model::new(small, predictor);
        model.residency.reads_mut().script = landings;
        for call in &calls {
            model.call(call);
            model.check();
        }
        model.unpin_held();
        model.settle();
    }
}
