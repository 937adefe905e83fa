use rand_mt::Mt;

use super::*;

/// A host whose steps take `1 + slope * drafts` seconds, and a drafter whose tokens are accepted with `acceptance`.
struct World {
    random: Mt,
    slope: f64,
    acceptance: f64,
    /// Share of steps for which the drafter finds something.
    found: f64,
    noise: f64,
    draft_seconds: f64,
    n_sequences: usize,
    /// Seconds in which the draft model reads a token, and the tokens that it has not read.
    read_seconds: f64,
    behind: usize,
    /// Experts that a token misses, each a tenth of a second; those of other tokens in a step are others.
    n_missing: f64,
    /// How many times as many experts a token misses while there are drafts, and now: an eighth of the way with each
    /// step.
    spoils: f64,
    spoilt: f64,
    /// Factor of a step's seconds.
    pace: f64,
    /// Whether the drafter computes this many drafts in each step that has one.
    computes: Option<u32>,
    /// Whether the gate learns that they were missing.
    tells: bool,
}

impl World {
    fn new(slope: f64, acceptance: f64) -> Self {
        let random = Mt::new(7);
        Self {
            random,
            slope,
            acceptance,
            found: 1.0,
            noise: 0.0,
            draft_seconds: 0.0,
            n_sequences: 1,
            read_seconds: 0.0,
            behind: 0,
            n_missing: 0.0,
            spoils: 1.0,
            spoilt: 1.0,
            pace: 1.0,
            computes: None,
            tells: true,
        }
    }

    fn chance(&mut self) -> f64 {
        f64::from(self.random.next_u32()) / f64::from(u32::MAX)
    }

    /// Runs until `n_tokens` are there; each step's tokens and seconds.
    fn run(&mut self, gate: &mut Gate, n_tokens: u64) -> Vec<(u64, f64)> {
        let mut steps = Vec::new();
        let mut tokens = 0;
        while tokens < n_tokens {
            let n = gate.n_drafts(self.n_sequences, if self.behind > 16 { self.behind } else { 0 });
            let n_read = if n > 0 && self.behind > 16 { self.behind.min(gate.n_reads_max()) } else { 0 };
            let is_ready = n_read == 0 || n_read == self.behind;
            let drafts: Vec<(u32, u32)> = (0..self.n_sequences)
                .map(|_| {
                    let drafted = if is_ready && self.chance() < self.found { n } else { 0 };
                    let accepted = (0..drafted).take_while(|_| self.chance() < self.acceptance).count();
                    (drafted, accepted as u32)
                })
                .collect();
            let drafted: u32 = drafts.iter().map(|(drafted, _)| drafted).sum();
            let accepted: u32 = drafts.iter().map(|(_, accepted)| accepted).sum();
            let noise = 1.0 + self.noise * (2.0 * self.chance() - 1.0);
            self.spoilt += (if drafted > 0 { self.spoils } else { 1.0 } - self.spoilt) / 8.0;
            let n_missing = self.n_missing * self.spoilt;
            let missing = n_missing * f64::from(1 + drafted);
            let wait_seconds = 0.1 * missing;
            let seconds = (1.0 + self.slope * f64::from(drafted)) * self.pace * noise + wait_seconds;
            // The drafter is asked wherever the gate allows it.
            let n_computed = if is_ready { self.computes.filter(|_| n > 0).unwrap_or(n) } else { 0 };
            let draft_seconds = self.draft_seconds * f64::from(n_computed);
            let caught_up = (n_read, self.read_seconds * n_read as f64);
            let n_missing =
                if self.tells { ((n_missing * f64::from(drafted)) as u64, n_missing as u64) } else { (0, 0) };
            let wait_seconds = if self.tells { wait_seconds } else { 0.0 };
            gate.stepped(&Step { drafts, draft_seconds, caught_up, seconds, wait_seconds, n_missing });
            let n_new = self.n_sequences as u64 + u64::from(accepted);
            tokens += n_new;
            if self.read_seconds > 0.0 {
                self.behind = if n > 0 && is_ready { 0 } else { self.behind - n_read + n_new as usize };
            }
            steps.push((n_new, (seconds + draft_seconds + caught_up.1) / noise));
        }
        steps
    }
}

fn gate(n_max: u32) -> Gate {
    Gate::new(GateOptions { n_max, ..GateOptions::default() })
}

/// Tokens a second, of 1 without drafts.
fn speed(steps: &[(u64, f64)]) -> f64 {
    let tokens: u64 = steps.iter().map(|(tokens, _)| tokens).sum();
    tokens as f64 / steps.iter().map(|(_, seconds)| seconds).sum::<f64>()
}

/// The largest loss over any 256 tokens, as a share of their time without drafts.
fn worst_window(steps: &[(u64, f64)]) -> f64 {
    worst_window_beside(steps, 1.0)
}

/// The worst window where tokens without drafts take `plain` seconds.
fn worst_window_beside(steps: &[(u64, f64)], plain: f64) -> f64 {
    let mut worst = 0.0_f64;
    for first in 0..steps.len() {
        let (mut tokens, mut seconds) = (0, 0.0);
        for (more, took) in &steps[first..] {
            tokens += more;
            seconds += took;
            if tokens >= WINDOW_TOKENS {
                worst = worst.max(seconds / (plain * tokens as f64) - 1.0);
                break;
            }
        }
    }
    worst
}

#[test]
fn it_drafts_as_many_as_pay() {
    for (slope, acceptance, at_least) in [(0.1, 0.9, 2.5), (0.25, 0.8, 1.4), (0.5, 0.8, 1.12), (0.02, 0.98, 5.0)] {
        let mut gate = gate(8);
        let steps = World::new(slope, acceptance).run(&mut gate, 2000);
        assert!(speed(&steps) > at_least, "{slope} {acceptance}: {} {:?}", speed(&steps), gate.report());
    }
}

#[test]
fn drafts_that_do_not_pay_cost_under_two_percent_of_256_tokens() {
    for (slope, acceptance) in [(1.0, 0.0), (0.8, 0.3), (0.5, 0.4), (2.0, 0.5), (0.3, 0.05), (1.0, 1.0)] {
        for noise in [0.0, 0.1] {
            let mut gate = gate(8);
            let steps = World { noise, ..World::new(slope, acceptance) }.run(&mut gate, 4000);
            let worst = worst_window(&steps);
            assert!(worst < 0.02, "{slope} {acceptance} {noise}: {worst}, {:?}", gate.report());
            assert!(speed(&steps) > 0.99, "{slope} {acceptance} {noise}: {}", speed(&steps));
        }
    }
}

#[test]
fn it_follows_a_text_that_changes() {
    let mut gate = gate(4);
    let mut world = World::new(0.3, 0.9);
    let mut all = Vec::new();
    for acceptance in [0.9, 0.05, 0.9, 0.1] {
        world.acceptance = acceptance;
        let steps = world.run(&mut gate, 3000);
        let speed = speed(&steps);
        assert!(if acceptance > 0.5 { speed > 1.3 } else { speed > 0.98 }, "{acceptance}: {speed}");
        all.extend(steps);
    }
    let worst = worst_window(&all);
    assert!(worst < 0.02, "{worst}");
}

#[test]
fn seconds_of_drafting_count() {
    let mut costly = gate(4);
    let steps = World { draft_seconds: 0.7, ..World::new(0.3, 0.9) }.run(&mut costly, 3000);
    assert!(speed(&steps) > 0.985 && worst_window(&steps) < 0.02, "{}", speed(&steps));
    let mut cheap = gate(4);
    assert!(speed(&World { draft_seconds: 0.05, ..World::new(0.3, 0.9) }.run(&mut cheap, 3000)) > 1.4);
}

#[test]
fn times_measured_while_all_was_slow_do_not_stop_drafts() {
    let mut gate = gate(3);
    let mut world = World { pace: 5.0, ..World::new(0.3, 0.1) };
    world.run(&mut gate, 400);
    (world.pace, world.acceptance) = (1.0, 0.95);
    let steps = world.run(&mut gate, 1000);
    assert!(speed(&steps) > 1.4, "{} {:?}", speed(&steps), gate.report());
}

#[test]
fn drafts_that_are_computed_anyway_cost_once() {
    let speed = |always_n_max| {
        let mut gate = Gate::new(GateOptions { n_max: 4, always_n_max, ..GateOptions::default() });
        let mut world = World { draft_seconds: 0.15, computes: Some(4), ..World::new(0.3, 0.95) };
        speed(&world.run(&mut gate, 3000))
    };
    assert!(speed(true) > 1.3 && speed(true) > speed(false) - 0.01, "{} {}", speed(true), speed(false));
}

#[test]
fn drafts_that_are_seldom_found_still_count() {
    let mut first = gate(8);
    let steps = World { found: 0.2, ..World::new(0.2, 0.95) }.run(&mut first, 3000);
    assert!(speed(&steps) > 1.2, "{} {:?}", speed(&steps), first.report());
    // A drafter that looks in vain takes time, too.
    let mut gate = gate(8);
    let steps = World { found: 0.2, draft_seconds: 0.1, ..World::new(0.2, 0.95) }.run(&mut gate, 3000);
    assert!(speed(&steps) > 0.985 && worst_window(&steps) < 0.02, "{} {:?}", speed(&steps), gate.report());
}

#[test]
fn several_sequences_share_a_batch() {
    let mut gate = gate(8);
    assert_eq!(gate.n_drafts(4, 0), 0, "nothing is measured yet");
    let mut world = World { n_sequences: 4, ..World::new(0.1, 0.9) };
    let steps = world.run(&mut gate, 3000);
    assert!(speed(&steps) > 4.0 * 1.35, "{}", speed(&steps));
    assert!(gate.n_drafts(4, 0) <= 3 && gate.n_drafts(16, 0) == 0 && gate.n_drafts(100, 0) == 0);
}

#[test]
fn a_fixed_number_is_not_judged() {
    let fixed = |n_max| Gate::new(GateOptions { n_max, fixed: true, ..GateOptions::default() });
    let mut gate = fixed(3);
    World::new(3.0, 0.0).run(&mut gate, 100);
    let report = gate.report();
    assert_eq!((report.steps_with_drafts, report.drafted, report.accepted), (100, 300, 0));
    assert_eq!(fixed(99).n_drafts(1, 0), 15, "a batch that decodes is limited");
    assert_eq!(fixed(0).n_drafts(1, 0), 0);
}

#[test]
fn unmeasured_widths_are_left_out() {
    let mut gate = gate(4);
    for seconds in [f64::NAN, -1.0, f64::INFINITY] {
        gate.stepped(&Step { drafts: vec![(0, 0)], draft_seconds: seconds, seconds, ..Step::default() });
        gate.stepped(&Step { drafts: vec![(4, 9)], caught_up: (9, seconds), seconds, ..Step::default() });
    }
    gate.stepped(&Step { seconds: 1.0, ..Step::default() });
    let report = gate.report();
    assert_eq!((report.steps, report.drafted, report.accepted), (6, 12, 12));
    assert!(report.seconds_by_width.is_empty() && report.draft_seconds == 0.0);
    assert_eq!(gate.n_drafts(1, 0), 0);
}

/// Texts change: for a while, most experts are missing, and each draft misses its own.
#[test]
fn a_cold_cache_drafts_less() {
    let seconds = |tells: bool| {
        let (mut gate, mut cold, mut all) = (gate(8), Vec::new(), 0.0);
        let mut world = World { tells, ..World::new(0.15, 0.8) };
        for n_missing in [1.0, 20.0].into_iter().cycle().take(24) {
            world.n_missing = n_missing;
            let steps = world.run(&mut gate, if n_missing > 1.0 { 20 } else { 200 });
            all += steps.iter().map(|(_, seconds)| seconds).sum::<f64>();
            let n_tokens: u64 = steps.iter().map(|(tokens, _)| tokens).sum();
            if n_missing > 1.0 {
                cold.push(steps.iter().map(|(_, seconds)| seconds).sum::<f64>() / n_tokens as f64);
            }
        }
        (cold.iter().sum::<f64>() / cold.len() as f64, all)
    };
    let (told, untold) = (seconds(true), seconds(false));
    assert!(told.0 < 0.95 * untold.0 && told.1 < 0.9 * untold.1, "{told:?}, without knowing {untold:?}");
}

#[test]
fn a_draft_model_must_win_back_what_it_reads() {
    // Reading a token takes a tenth of what evaluating one does, and drafts win 5 %.
    let mut slow = gate(4);
    let mut world = World { read_seconds: 0.1, draft_seconds: 0.1, behind: 300, ..World::new(0.45, 0.75) };
    let first = world.run(&mut slow, 3000);
    assert!(worst_window(&first) < 0.03, "{}", worst_window(&first));
    // A new text, the speed of reading is known: no part of it is spent on hope.
    world.behind = 3000;
    world.acceptance = 0.3;
    let steps = world.run(&mut slow, 3000);
    assert!(speed(&first) > 0.985 && world.behind > 3000, "{}, {}", speed(&first), world.behind);
    assert!(worst_window(&steps) < 0.02, "{}", worst_window(&steps));
    // Drafts that win much read it.
    let mut quick = gate(4);
    let mut world = World { read_seconds: 0.01, draft_seconds: 0.05, behind: 300, ..World::new(0.2, 0.9) };
    world.run(&mut quick, 1000);
    world.behind = 3000;
    let steps = world.run(&mut quick, 1000);
    assert!(world.behind < 20 && speed(&steps) > 1.5, "{} {}", world.behind, speed(&steps));
}

/// Steps of several tokens evict experts that single ones would have kept: all tokens miss more, drafts or not.
#[test]
fn where_tokens_wait_for_experts_drafts_have_to_win_trials() {
    // How many times as many are missed, and the least tokens a second beside those without drafts.
    for (spoils, gain) in [(0.5, 1.65), (0.8, 1.3), (1.0, 1.15), (1.3, 1.0), (1.4, 0.97), (1.6, 0.97), (3.0, 0.97)] {
        for seed in 0..5 {
            let mut gate = gate(1);
            let random = Mt::new(seed);
            let mut world = World { n_missing: 10.0, spoils, noise: 0.1, random, ..World::new(0.1, 0.9) };
            let steps = world.run(&mut gate, 2000);
            let (speed, worst) = (2.0 * speed(&steps), worst_window_beside(&steps, 2.0));
            assert!(speed > gain && worst < 0.08, "{spoils}: {speed} {worst} {:?}", gate.report());
        }
    }
}
