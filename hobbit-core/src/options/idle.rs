//! Options that are set and cannot act: on a model without experts or low versions, on a machine without devices, or
//! without the option that they refine. Requests for the absence of something that is absent are not among them.

use super::{
    Allocation, Budget, CachingOptions, CpuHelper, DeviceOptions, ExpertCache, IoMode, KernelChoice, LowShare,
    ModelOptions, PolicyKind, PrecisionMode, PredictorKind, Prefetch, Repack, RoutingOptions, SplitMode, UnifiedMemory,
    VirtualExperts, VirtualUpdate, Weights,
};

/// An option that is set and cannot act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idle {
    /// Its name in programs, with underscores: `low_share`.
    pub setting: &'static str,
    pub reason: &'static str,
}

/// Parts of a model and a machine on which options act.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    pub experts: bool,
    /// Low versions of experts.
    pub low: bool,
    /// Devices that layers are on.
    pub n_devices: usize,
    /// Devices compute experts of some layers.
    pub device_experts: bool,
    /// The whole model fits, and llama.cpp runs it.
    pub passthrough: bool,
}

/// An option's name, and whether it is set.
type Setting = (&'static str, bool);

/// [`ModelOptions::n_gpu_layers`] for all layers.
const ALL_LAYERS: i32 = -2;

impl CachingOptions {
    /// These options without those that refine another one that is not set.
    #[must_use]
    pub fn acting(self) -> Self {
        let predicts = self.predictor.is_some_and(|kind| kind != PredictorKind::None);
        let reads_ahead = self.prefetch.is_fixed_on();
        Self {
            weights: if self.policy == PolicyKind::Hobbit { self.weights } else { Weights::default() },
            prefetch: if reads_ahead && !predicts { Prefetch::Auto } else { self.prefetch },
            distance: if reads_ahead && !predicts { Self::DISTANCE } else { self.distance },
            ..self
        }
    }
}

impl ModelOptions {
    /// Whether the options configure the expert cache, or request figures that only hobbit has: then llama.cpp does not
    /// run the model by itself, although it fits. Options that cannot act ([`ModelOptions::idle`]) do not count: shares
    /// and thresholds need low versions or missing experts, placement needs devices.
    pub fn wants_a_cache(&self) -> bool {
        self.expert_cache != ExpertCache::Auto
            || self.low.is_some()
            || self.precision.demands_exactness()
            || self.caching.acting() != CachingOptions::default()
            || self.io != IoMode::default()
            || self.routes.is_some()
            || [&self.path_table, &self.trace, &self.cache_state].into_iter().any(Option::is_some)
    }

    /// Whether no option divides a model between devices and the CPU, or chooses where experts are computed: then
    /// llama.cpp runs a model of `n_layer` layers by itself if it fits on the devices.
    pub fn leaves_devices_whole(&self, n_layer: u32) -> bool {
        let DeviceOptions { cache, n_cpu_moe, override_tensors, .. } = &self.device;
        let is_divided = u32::try_from(self.n_gpu_layers).is_ok_and(|n| n <= n_layer);
        !is_divided && *cache == ExpertCache::Auto && *n_cpu_moe == 0 && override_tensors.is_empty()
    }

    /// The options that are set and cannot act.
    pub fn idle(&self, parts: Parts) -> Vec<Idle> {
        let Self { caching, routing, device, .. } = self;
        let (asked, acting) = (caching, caching.acting());
        let (of_low, of_missing) = (self.of_low(parts.low), self.of_missing());
        let of_experts: &[(&str, bool)] = &[
            ("trace", self.trace.is_some()),
            ("routes", self.routes.is_some()),
            ("path_table", self.path_table.is_some()),
            ("cache_state", self.cache_state.is_some()),
            ("expert_cache", gives_experts(self.expert_cache)),
            ("policy", caching.policy != PolicyKind::default()),
            ("expert_slots", caching.slots != Allocation::default()),
            ("predictor", caching.predictor.is_some_and(|kind| kind != PredictorKind::None)),
            ("prefetch", caching.prefetch.is_fixed_on()),
            ("device_cache", gives_experts(device.cache)),
            ("cpu_helper", helps(device.cpu_helper)),
            ("n_cpu_moe", device.n_cpu_moe > 0),
            ("device_headroom", device.headroom != DeviceOptions::HEADROOM),
            ("unified", device.unified == UnifiedMemory::On),
            ("io", self.io != IoMode::default()),
            ("kernels", self.kernels != KernelChoice::default()),
        ];
        let of_devices = self.of_devices();
        let has_devices = parts.n_devices > 0;
        let reads_ahead = [
            ("prefetch", caching.prefetch.is_fixed_on()),
            ("prefetch_distance", caching.distance != CachingOptions::DISTANCE),
        ];
        let repacks = matches!(self.repack, Repack::On | Repack::Ordinary);
        let groups: [(bool, &'static str, &[Setting]); 19] = [
            (!parts.experts, "this model has no experts", &of_missing),
            (!parts.experts, "this model has no experts", of_experts),
            (!parts.experts, "this model has no experts", &of_low),
            (!has_devices, "no layer is on a device (see list_devices)", &of_devices),
            (!parts.low, "there are no low-precision versions (see low)", &of_low),
            (parts.passthrough, "no expert is missing, because the whole model fits", &of_missing),
            (asked.weights != acting.weights, "only the policy hobbit has weights", &[("policy_weights", true)]),
            (
                parts.experts && asked.prefetch != acting.prefetch,
                "there is no predictor of experts (see predictor)",
                &[("prefetch", true), ("prefetch_distance", asked.distance != acting.distance)],
            ),
            (
                !self.is_rerouted() && routing.drop == 0.0,
                "routing is the model's own (see cache_bias)",
                &[("keep_top", routing.keep_top != RoutingOptions::KEEP_TOP)],
            ),
            (
                !self.is_rerouted(),
                "no expert is substituted (see substitute)",
                &[("substitute_max", routing.substitute_max.is_some())],
            ),
            (
                parts.experts && has_devices && !parts.passthrough && !parts.device_experts,
                "no device computes experts (see cpu_moe)",
                &[
                    ("device_cache", gives_experts(device.cache)),
                    ("cpu_helper", helps(device.cpu_helper)),
                    ("unified", device.unified == UnifiedMemory::On),
                ],
            ),
            (
                parts.experts && has_devices && caching.predictor.is_none(),
                "nothing is predicted on devices (see predictor)",
                &reads_ahead,
            ),
            (
                parts.n_devices == 1 && device.split != SplitMode::None,
                "there is one device",
                &[("tensor_split", !device.tensor_split.is_empty())],
            ),
            (
                device.split != SplitMode::None,
                "every device takes layers (see split_mode)",
                &[("main_gpu", device.main != 0)],
            ),
            (
                device.split == SplitMode::None,
                "one device takes all layers (see split_mode)",
                &[("tensor_split", !device.tensor_split.is_empty())],
            ),
            (
                parts.experts && has_devices && !parts.passthrough,
                "weights on devices are not rearranged, and then those on the CPU are not either",
                &[("repack", repacks)],
            ),
            (
                parts.passthrough && has_devices,
                "devices compute the whole model",
                &[("repack", repacks), ("kernels", self.kernels != KernelChoice::default())],
            ),
            (
                self.budget == Budget::Auto,
                "the budget is what is available (see mem_budget)",
                &[("overcommit", self.overcommit)],
            ),
            (
                routing.virtual_experts == VirtualExperts::Off,
                "there are no virtual experts (see virtual_experts)",
                &[("virtual_update", routing.virtual_update != VirtualUpdate::default())],
            ),
        ];
        named(groups.into_iter().filter(|group| group.0).map(|(_, reason, settings)| (reason, settings)))
    }

    /// The options that are set and cannot act while every expert is in memory, although hobbit runs the model.
    pub fn idle_without_misses(&self) -> Vec<Idle> {
        let Self { caching, .. } = self;
        // Experts are read once, from mirrors too. A plan of virtual experts may leave experts out.
        let acting = ["mirror", "virtual_experts", "virtual_update"];
        let of_missing = self.of_missing().into_iter().filter(|setting| !acting.contains(&setting.0));
        let of_replacement = [
            ("policy", caching.policy != PolicyKind::default()),
            ("policy_weights", caching.acting().weights != Weights::default()),
            ("expert_slots", caching.slots != Allocation::default()),
            ("prefetch", caching.acting().prefetch.is_fixed_on()),
        ];
        let settings: Vec<Setting> = of_missing.chain(self.of_low(false)).chain(of_replacement).collect();
        named([("every expert fits in memory", &settings[..])])
    }

    /// Options on low versions of experts. Thresholds are for skipping, too, in dynamic precision.
    fn of_low(&self, has_low: bool) -> [Setting; 5] {
        let precision = &self.precision;
        // Exact precision refuses them.
        let has_thresholds = precision.mode.is_none() && !has_low;
        [
            ("low_share", self.low_share != LowShare::default()),
            ("prefill_low", precision.prefill_low.is_some_and(|share| share > 0.0)),
            ("t1", has_thresholds && precision.t1.is_some()),
            ("t2", has_thresholds && precision.t2.is_some()),
            ("renormalise", has_thresholds && precision.renormalise),
        ]
    }

    /// Options on experts that are missing when they are needed.
    fn of_missing(&self) -> [Setting; 12] {
        let Self { routing, .. } = self;
        let [bias, substitute, drop] = routing.strengths().map(|(name, strength)| (name, strength > 0.0));
        [
            ("cpu_helper", helps(self.device.cpu_helper)),
            ("mirror", !self.mirrors.is_empty()),
            ("precision", self.precision.mode == Some(PrecisionMode::Dynamic)),
            bias,
            substitute,
            drop,
            ("virtual_experts", routing.virtual_experts != VirtualExperts::Off),
            ("target_latency", routing.target_latency.is_some()),
            ("keep_top", routing.keep_top != RoutingOptions::KEEP_TOP),
            ("substitute_max", routing.substitute_max.is_some()),
            ("virtual_update", routing.virtual_update != VirtualUpdate::default()),
            ("route_prompts", routing.prompts),
        ]
    }

    fn is_rerouted(&self) -> bool {
        let routing = &self.routing;
        !routing.rerouting().is_off() || routing.target_latency.is_some() || self.loss_bound.is_some()
    }

    fn of_devices(&self) -> [Setting; 10] {
        let device = &self.device;
        [
            ("n_gpu_layers", self.n_gpu_layers > 0 || self.n_gpu_layers == ALL_LAYERS),
            ("split_mode", device.split != SplitMode::default()),
            ("main_gpu", device.main != 0),
            ("tensor_split", !device.tensor_split.is_empty()),
            ("cpu_moe", device.n_cpu_moe == u32::MAX),
            ("n_cpu_moe", (1..u32::MAX).contains(&device.n_cpu_moe)),
            ("device_cache", gives_experts(device.cache)),
            ("device_headroom", device.headroom != DeviceOptions::HEADROOM),
            ("cpu_helper", helps(device.cpu_helper)),
            ("unified", device.unified == UnifiedMemory::On),
        ]
    }
}

/// Each option that is set, with the first reason.
fn named<'a>(groups: impl IntoIterator<Item = (&'static str, &'a [Setting])>) -> Vec<Idle> {
    let mut idle: Vec<Idle> = Vec::new();
    for (reason, settings) in groups {
        for &(setting, _) in settings.iter().filter(|setting| setting.1) {
            if idle.iter().all(|known| known.setting != setting) {
                idle.push(Idle { setting, reason });
            }
        }
    }
    idle
}

/// Whether a cache of experts was asked for.
fn gives_experts(cache: ExpertCache) -> bool {
    !matches!(cache, ExpertCache::Auto | ExpertCache::Bytes(0))
}

fn helps(helper: CpuHelper) -> bool {
    matches!(helper, CpuHelper::On | CpuHelper::Threads(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{PrecisionOptions, RouteOptions};

    const HERE: Parts = Parts { experts: true, low: false, n_devices: 0, device_experts: false, passthrough: false };
    const BESIDE: Parts = Parts { n_devices: 2, device_experts: true, ..HERE };

    fn names(options: &ModelOptions, parts: Parts) -> Vec<&'static str> {
        options.idle(parts).into_iter().map(|idle| idle.setting).collect()
    }

    #[test]
    fn options_without_what_they_act_on_are_named() {
        assert_eq!(names(&ModelOptions::default(), HERE), [""; 0]);
        assert_eq!(names(&ModelOptions::default(), Parts { experts: false, ..HERE }), [""; 0]);
        let precision = |mode| PrecisionOptions { mode, t1: Some(0.5), prefill_low: Some(0.1), ..Default::default() };
        let of = |mode| ModelOptions {
            precision: precision(mode),
            low_share: LowShare::Percent(20.0),
            device: DeviceOptions { n_cpu_moe: 4, cpu_helper: CpuHelper::Off, pinned: false, ..Default::default() },
            ..Default::default()
        };
        assert_eq!(names(&of(None), HERE), ["n_cpu_moe", "low_share", "prefill_low", "t1"]);
        let with_all = Parts { low: true, ..BESIDE };
        assert_eq!(names(&of(None), with_all), [""; 0]);
        // Dynamic precision skips experts without low versions too, if any are missing.
        let dynamic = of(Some(PrecisionMode::Dynamic));
        assert_eq!(names(&dynamic, HERE), ["n_cpu_moe", "low_share", "prefill_low"]);
        let fitting = Parts { passthrough: true, ..HERE };
        assert_eq!(names(&dynamic, fitting), ["n_cpu_moe", "low_share", "prefill_low", "precision"]);
        let dense = Parts { experts: false, ..HERE };
        assert_eq!(names(&dynamic, dense), ["precision", "n_cpu_moe", "low_share", "prefill_low"]);
    }

    /// An option, how to set it, and its effect where the model fits.
    type Row = (&'static str, fn(&mut ModelOptions), Fits);

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fits {
        /// hobbit runs the model for it, although it fits.
        Cache,
        /// llama.cpp heeds it, or it says something of the run itself.
        Acts,
        Named,
    }

    /// Options that may be idle, each set so that it acts on a model with low versions, missing experts and devices.
    const ROWS: [Row; 35] = [
        ("overcommit", |o| (o.overcommit, o.budget) = (true, Budget::Bytes(1 << 33)), Fits::Acts),
        ("repack", |o| o.repack = Repack::On, Fits::Acts),
        ("expert_cache", |o| o.expert_cache = ExpertCache::Percent(25.0), Fits::Cache),
        ("low_share", |o| o.low_share = LowShare::Percent(20.0), Fits::Named),
        ("precision", |o| o.precision.mode = Some(PrecisionMode::Dynamic), Fits::Named),
        ("t1", |o| o.precision.t1 = Some(0.5), Fits::Named),
        ("t2", |o| o.precision.t2 = Some(0.5), Fits::Named),
        ("prefill_low", |o| o.precision.prefill_low = Some(0.1), Fits::Named),
        ("renormalise", |o| o.precision.renormalise = true, Fits::Named),
        ("kernels", |o| o.kernels = KernelChoice::Fastest, Fits::Acts),
        ("policy", |o| o.caching.policy = PolicyKind::Lru, Fits::Cache),
        ("expert_slots", |o| o.caching.slots = "shallow-first".parse().unwrap(), Fits::Cache),
        ("predictor", |o| o.caching.predictor = Some(PredictorKind::StackedGate), Fits::Cache),
        ("io", |o| o.io = IoMode::Buffered, Fits::Cache),
        ("trace", |o| o.trace = Some("a".into()), Fits::Cache),
        ("routes", |o| o.routes = Some(RouteOptions { trace: "a".into(), recall: 1.0 }), Fits::Cache),
        ("path_table", |o| o.path_table = Some("a".into()), Fits::Cache),
        ("cache_state", |o| o.cache_state = Some("a".into()), Fits::Cache),
        ("mirror", |o| o.mirrors = vec!["m.gguf".into()], Fits::Named),
        ("cache_bias", |o| o.routing.cache_bias = 0.2, Fits::Named),
        ("keep_top", |o| (o.routing.cache_bias, o.routing.keep_top) = (0.2, 3), Fits::Named),
        ("substitute", |o| o.routing.substitute = 0.3, Fits::Named),
        ("substitute_max", |o| (o.routing.substitute, o.routing.substitute_max) = (0.3, Some(1)), Fits::Named),
        ("drop", |o| o.routing.drop = 0.5, Fits::Named),
        ("virtual_experts", |o| o.routing.virtual_experts = VirtualExperts::Auto, Fits::Named),
        (
            "virtual_update",
            |o| {
                let tokens = VirtualUpdate::Tokens(2);
                (o.routing.virtual_experts, o.routing.virtual_update) = (VirtualExperts::Auto, tokens);
            },
            Fits::Named,
        ),
        ("route_prompts", |o| (o.routing.cache_bias, o.routing.prompts) = (0.2, true), Fits::Named),
        ("target_latency", |o| o.routing.target_latency = Some(std::time::Duration::from_millis(50)), Fits::Named),
        ("n_gpu_layers", |o| o.n_gpu_layers = 9, Fits::Named),
        ("main_gpu", |o| (o.device.split, o.device.main) = (SplitMode::None, 1), Fits::Named),
        ("tensor_split", |o| o.device.tensor_split = vec![1.0, 3.0], Fits::Named),
        ("n_cpu_moe", |o| o.device.n_cpu_moe = 4, Fits::Named),
        ("device_cache", |o| o.device.cache = ExpertCache::Percent(10.0), Fits::Named),
        ("device_headroom", |o| o.device.headroom = 20.0, Fits::Named),
        ("cpu_helper", |o| o.device.cpu_helper = CpuHelper::On, Fits::Named),
    ];

    /// A new option must be added to [`ROWS`], or to the names here: requests for an absence (`fill: false`), paths
    /// that are read or refused, and what always acts.
    fn fields_are_known(options: ModelOptions) {
        let ModelOptions {
            budget: _,
            reserved_bytes: _,
            lent_bytes: _,
            overcommit: _,
            passthrough: _,
            repack: _,
            mtp: _,
            expects: _,
            expert_cache: _,
            low: _,
            low_share: _,
            precision,
            routing:
                RoutingOptions {
                    cache_bias: _,
                    keep_top: _,
                    substitute: _,
                    spares_flat: _,
                    substitute_max: _,
                    drop: _,
                    virtual_experts: _,
                    virtual_update: _,
                    target_latency: _,
                    loss_bound: _,
                    prompts: _,
                },
            // Its line at the start says what it chose.
            loss_bound: _,
            kernels: _,
            caching:
                CachingOptions {
                    policy: _,
                    weights: _,
                    slots: _,
                    predictor: _,
                    prefetch: _,
                    distance: _,
                    overlap: _,
                    fill: _,
                },
            path_table: _,
            trace: _,
            routes: _,
            cache_state: _,
            cache_state_dir: _,
            io: _,
            mirrors: _,
            n_gpu_layers: _,
            device:
                DeviceOptions {
                    devices: _,
                    rpc: _,
                    split: _,
                    main: _,
                    tensor_split: _,
                    n_cpu_moe: _,
                    op_offload: _,
                    override_tensors: _,
                    cache: _,
                    headroom: _,
                    cpu_helper: _,
                    pinned: _,
                    unified: _,
                },
            check_tensors: _,
            kv_overrides: _,
            adapters: _,
        } = options;
        let PrecisionOptions { mode: _, t1: _, t2: _, renormalise: _, prefill_low: _, upgrade: _, deterministic: _ } =
            precision;
    }

    #[test]
    fn every_option_acts_or_is_named_in_every_mode() {
        fields_are_known(ModelOptions::default());
        let everything = Parts { low: true, ..BESIDE };
        for (name, set, fits) in ROWS {
            let mut options = ModelOptions::default();
            set(&mut options);
            let is_named = |parts| names(&options, parts).contains(&name);
            // Rearranged weights are the CPU's.
            assert_eq!(is_named(everything), name == "repack", "{name} where all parts are there");

            let of_devices = options.of_devices().into_iter().any(|(device, is_set)| is_set && device == name);
            let of_low = ["low_share", "t1", "t2", "prefill_low", "renormalise"].contains(&name);
            assert_eq!(is_named(HERE), of_devices || of_low, "{name} on the CPU");
            assert_eq!(is_named(BESIDE), of_low || name == "repack", "{name} on a device");

            let fitting = Parts { passthrough: true, ..HERE };
            let found = match (options.wants_a_cache(), is_named(fitting)) {
                (true, false) => Fits::Cache,
                (false, false) => Fits::Acts,
                (_, true) => Fits::Named,
            };
            assert_eq!(found, fits, "{name} where the model fits");
            // Options of devices but for the helper divide the model or say what it may take.
            let on_devices = is_named(Parts { passthrough: true, device_experts: false, ..BESIDE });
            let of_cpu = ["repack", "kernels"].contains(&name);
            if found != Fits::Cache {
                let named = of_cpu || fits == Fits::Named && (!of_devices || name == "cpu_helper");
                assert_eq!(on_devices, named, "{name} where the model fits on devices");
            }
            // The others place experts, name files that they are read from, or do not concern experts.
            let in_memory = options.idle_without_misses().iter().any(|idle| idle.setting == name);
            let of_cache = ["policy", "expert_slots", "cpu_helper"].contains(&name);
            let of_others = of_devices || ["mirror", "virtual_experts", "virtual_update"].contains(&name);
            assert_eq!(in_memory, of_cache || fits == Fits::Named && !of_others, "{name} with all experts in memory");
            let dense = Parts { experts: false, ..HERE };
            assert_eq!(is_named(dense), !["overcommit", "repack"].contains(&name), "{name} on a dense model");
            let acts = ["overcommit", "repack", "n_gpu_layers", "main_gpu", "tensor_split"].contains(&name);
            let beside = Parts { experts: false, device_experts: false, ..BESIDE };
            assert_eq!(is_named(beside), !acts, "{name} on a dense model on devices");
        }
    }

    #[test]
    fn refinements_without_what_they_refine_are_named() {
        let caching = CachingOptions { prefetch: Prefetch::On, distance: 3, ..Default::default() };
        let weights = "1,2,3,4".parse().unwrap();
        let routing = RoutingOptions { keep_top: 3, substitute_max: Some(1), ..Default::default() };
        let options = ModelOptions { caching: CachingOptions { weights, ..caching }, routing, ..Default::default() };
        assert_eq!(
            names(&options, HERE),
            ["policy_weights", "prefetch", "prefetch_distance", "keep_top", "substitute_max"]
        );
        let devices = DeviceOptions { main: 1, tensor_split: vec![1.0], ..Default::default() };
        let named = |split| {
            let device = DeviceOptions { split, ..devices.clone() };
            names(&ModelOptions { device, ..Default::default() }, BESIDE)
        };
        assert_eq!((named(SplitMode::Layer), named(SplitMode::None)), (vec!["main_gpu"], vec!["tensor_split"]));
        let alone = ModelOptions { device: devices.clone(), ..Default::default() };
        assert_eq!(names(&alone, Parts { n_devices: 1, ..BESIDE }), ["tensor_split", "main_gpu"]);
        let device = DeviceOptions {
            cache: ExpertCache::Percent(50.0),
            n_cpu_moe: u32::MAX,
            cpu_helper: CpuHelper::On,
            ..Default::default()
        };
        let on_cpu = ModelOptions { device, ..Default::default() };
        assert_eq!(names(&on_cpu, Parts { device_experts: false, ..BESIDE }), ["device_cache", "cpu_helper"]);
        let far = CachingOptions { distance: 3, ..Default::default() };
        assert_eq!(names(&ModelOptions { caching: far, ..Default::default() }, BESIDE), ["prefetch_distance"]);
        assert_eq!(names(&ModelOptions { overcommit: true, ..Default::default() }, HERE), ["overcommit"]);
        assert_eq!(options.caching.acting(), CachingOptions::default());
        let predictor = Some(PredictorKind::StackedGate);
        let full = CachingOptions { policy: PolicyKind::Hobbit, predictor, ..options.caching };
        let routing = RoutingOptions { substitute: 0.3, ..options.routing.clone() };
        assert_eq!(names(&ModelOptions { caching: full, routing, ..Default::default() }, HERE), [""; 0]);
        assert_eq!(full.acting(), full);
    }
}
