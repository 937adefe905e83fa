//! Load-or-compute against the pure choices on simulated machines: virtual seconds, seeded patterns, costs known only
//! from wrong seeds and from what is observed.

use rand_mt::Mt;

use super::*;

const STEPS: usize = 2000;
const N_USED: u16 = 8;

/// True speeds, which the policy does not know.
#[derive(Clone, Copy, Debug)]
struct Machine {
    link_bytes_per_s: f64,
    cpu_bytes_per_s: f64,
}

impl Machine {
    const LINK_LATENCY: f64 = 15e-6;
    const CPU_OVERHEAD: f64 = 60e-6;
    const DEVICE_BYTES_PER_S: f64 = 400e9;
}

/// A miss, and how long it takes on each side in a step of its own.
struct Task {
    miss: Miss,
    copy_noise: f64,
    cpu_noise: f64,
}

struct Step {
    tasks: Vec<Task>,
    device_busy: f64,
    tail: f64,
}

struct Random(Mt);

impl Random {
    fn unit(&mut self) -> f64 {
        f64::from(self.0.next_u32()) / (f64::from(u32::MAX) + 1.0)
    }

    /// `1 +- spread`, and one in a hundred takes twenty times as long.
    fn noise(&mut self, spread: f64) -> f64 {
        let noise = 1.0 + spread * (2.0 * self.unit() - 1.0);
        if self.unit() < 0.01 { 20.0 * noise } else { noise }
    }

    fn step(&mut self) -> Step {
        let bytes = (4 << 20) + (self.unit() * f64::from(12 << 20)) as u64;
        let hit_ratio = self.unit();
        let hits = (0..N_USED).filter(|_| self.unit() < hit_ratio).count() as u16;
        let task = |index| Task {
            miss: Miss { index, bytes, rows: 1, score: 1.0 / f64::from(index + 1) as f32, on_host: self.unit() < 0.95 },
            copy_noise: self.noise(0.1),
            cpu_noise: self.noise(0.3),
        };
        let product = bytes as f64 / Machine::DEVICE_BYTES_PER_S;
        Step { tasks: (0..N_USED - hits).map(task).collect(), device_busy: f64::from(hits) * product, tail: product }
    }
}

/// Runs one step as `split` says; returns its seconds and shows `observe` what can be measured.
fn run(step: &Step, split: &Split, machine: Machine, balancer: &mut Balancer) -> f64 {
    let task = |index: &u16| &step.tasks[usize::from(*index)];
    let mut copied = 0.0;
    for task in split.copy.iter().map(task) {
        let seconds = Machine::LINK_LATENCY + task.miss.bytes as f64 / machine.link_bytes_per_s * task.copy_noise;
        balancer.observe_copy(task.miss.bytes, seconds);
        copied += seconds;
    }
    let tail = if split.copy.is_empty() { 0.0 } else { step.tail };
    let device = f64::max(copied, step.device_busy) + tail;
    let of_task = |task: &Task| task.miss.bytes as f64 / machine.cpu_bytes_per_s * task.cpu_noise;
    let cpu = if split.cpu.is_empty() {
        0.0
    } else {
        Machine::CPU_OVERHEAD + split.cpu.iter().map(task).map(of_task).sum::<f64>()
    };
    balancer.observe_cpu(split.cpu.iter().map(|index| task(index).miss.bytes).sum(), cpu);
    device.max(cpu)
}

/// Seconds of every step in this mode, on the machine that each step finds.
fn times(machine: impl Fn(usize) -> Machine, link_seed: f64, cpu_seed: f64, mode: HelperMode) -> Vec<f64> {
    let mut random = Random(Mt::new(42));
    let first = machine(0);
    let costs = Costs {
        link: RunningMean::seeded(link_seed / first.link_bytes_per_s),
        cpu: RunningMean::seeded(cpu_seed / first.cpu_bytes_per_s),
        ..Costs::default()
    };
    let mut balancer = Balancer::new(costs, mode);
    (0..STEPS)
        .map(|i| {
            let step = random.step();
            let misses: Vec<Miss> = step.tasks.iter().map(|task| task.miss).collect();
            balancer.costs.tail = step.tail;
            let split = balancer.split(&misses, step.device_busy);
            run(&step, &split, machine(i), &mut balancer)
        })
        .collect()
}

/// Seconds of the policy over those of the better pure choice.
fn ratio(policy: &[f64], copy: &[f64], cpu: &[f64]) -> f64 {
    let total = |times: &[f64]| times.iter().sum::<f64>();
    total(policy) / total(copy).min(total(cpu))
}

const GB: f64 = 1e9;
const SEEDS: [(f64, f64); 9] =
    [(1.0, 1.0), (4.0, 1.0), (0.25, 1.0), (1.0, 4.0), (1.0, 0.25), (4.0, 4.0), (4.0, 0.25), (0.25, 4.0), (0.25, 0.25)];

#[test]
fn load_or_compute_stays_within_a_tenth_of_the_better_pure_choice() {
    use HelperMode::{Auto, Off, On};
    for cpu_bytes_per_s in [3.0 * GB, 12.0 * GB, 48.0 * GB] {
        for link_bytes_per_s in (-2..=6).map(|power| 2_f64.powi(power) * GB) {
            let machine = |_| Machine { link_bytes_per_s, cpu_bytes_per_s };
            let (copy, cpu) = (times(machine, 1.0, 1.0, Off), times(machine, 1.0, 1.0, On));
            for (link_seed, cpu_seed) in SEEDS {
                let ratio = ratio(&times(machine, link_seed, cpu_seed, Auto), &copy, &cpu);
                assert!(ratio <= 1.1, "{ratio:.3} with {:?}, seeds {link_seed} {cpu_seed}", machine(0));
            }
        }
    }
}

#[test]
fn neither_wrong_by_sixteen_nor_without_a_seed_is_it_lost() {
    use HelperMode::{Auto, Off, On};
    for link_bytes_per_s in (-2..=6).map(|power| 2_f64.powi(power) * GB) {
        let machine = |_| Machine { link_bytes_per_s, cpu_bytes_per_s: 12.0 * GB };
        let (copy, cpu) = (times(machine, 1.0, 1.0, Off), times(machine, 1.0, 1.0, On));
        for (link_seed, cpu_seed) in [(16.0, 16.0), (16.0, 1.0 / 16.0), (1.0 / 16.0, 16.0), (f64::NAN, f64::NAN)] {
            let policy = times(machine, link_seed, cpu_seed, Auto);
            let last = STEPS / 2..STEPS;
            let ratio = ratio(&policy[last.clone()], &copy[last.clone()], &cpu[last]);
            assert!(ratio <= 1.1, "{ratio:.3} with {:?}, seeds {link_seed} {cpu_seed}", machine(0));
        }
    }
}

#[test]
fn a_link_that_changes_its_speed_in_the_middle_is_followed() {
    use HelperMode::{Auto, Off, On};
    for (before, after) in [(1.0, 16.0), (16.0, 1.0), (0.5, 8.0), (2.0, 32.0), (32.0, 2.0), (4.0, 64.0), (64.0, 4.0)] {
        let machine = |step| Machine {
            link_bytes_per_s: if step < STEPS / 2 { before * GB } else { after * GB },
            cpu_bytes_per_s: 12.0 * GB,
        };
        let (copy, cpu) = (times(machine, 1.0, 1.0, Off), times(machine, 1.0, 1.0, On));
        let policy = times(machine, 1.0, 1.0, Auto);
        let all = ratio(&policy, &copy, &cpu);
        let last = STEPS * 3 / 4..STEPS;
        let last = ratio(&policy[last.clone()], &copy[last.clone()], &cpu[last]);
        assert!(all <= 1.1 && last <= 1.1, "{before} to {after} GB/s: {all:.3}, at the end {last:.3}");
    }
}
