//! Options that are set and cannot act: on a model without experts or low versions, on a machine without devices, or
//! without the option that they refine. Requests for the absence of something that is absent are not among them.

use super::{
    Allocation, CachingOptions, CpuHelper, DeviceOptions, ExpertCache, LowShare, ModelOptions, PolicyKind,
    PrecisionMode, PredictorKind, Prefetch, RoutingOptions, SplitMode, UnifiedMemory, VirtualExperts, VirtualUpdate,
    Weights,
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
    pub devices: bool,
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
    /// The options that are set and cannot act.
    pub fn idle(&self, parts: Parts) -> Vec<Idle> {
        let Self { precision, caching, routing, device, .. } = self;
        let is_dynamic = precision.mode == Some(PrecisionMode::Dynamic);
        let (asked, acting) = (caching, caching.acting());
        let is_rerouted =
            !routing.rerouting().is_off() || routing.target_latency.is_some() || self.loss_bound.is_some();
        // Thresholds are for low versions, and for skipping in dynamic precision. Exact precision refuses them.
        let has_thresholds = precision.mode.is_none() && !parts.low;
        let of_low: &[(&str, bool)] = &[
            ("low_share", self.low_share != LowShare::default()),
            ("prefill_low", precision.prefill_low.is_some_and(|share| share > 0.0)),
            ("t1", has_thresholds && precision.t1.is_some()),
            ("t2", has_thresholds && precision.t2.is_some()),
            ("renormalise", has_thresholds && precision.renormalise),
        ];
        let [bias, substitute, drop] = routing.strengths().map(|(name, strength)| (name, strength > 0.0));
        let of_missing: [(&str, bool); 7] = [
            ("mirror", !self.mirrors.is_empty()),
            ("precision", is_dynamic),
            bias,
            substitute,
            drop,
            ("virtual_experts", routing.virtual_experts != VirtualExperts::Off),
            ("target_latency", routing.target_latency.is_some()),
        ];
        let of_experts: &[(&str, bool)] = &[
            ("expert_cache", gives_experts(self.expert_cache)),
            ("policy", caching.policy != PolicyKind::default()),
            ("expert_slots", caching.slots != Allocation::default()),
            ("predictor", caching.predictor.is_some_and(|kind| kind != PredictorKind::None)),
            ("prefetch", caching.prefetch.is_fixed_on()),
            ("device_cache", gives_experts(device.cache)),
            ("cpu_helper", helps(device.cpu_helper)),
            ("n_cpu_moe", device.n_cpu_moe > 0),
        ];
        let of_devices = self.of_devices();
        let groups: [(bool, &'static str, &[Setting]); 11] = [
            (!parts.experts, "this model has no experts", &of_missing),
            (!parts.experts, "this model has no experts", of_experts),
            (!parts.experts, "this model has no experts", of_low),
            (!parts.devices, "no layer is on a device (see list_devices)", &of_devices),
            (!parts.low, "there are no low-precision versions (see low)", of_low),
            (parts.passthrough, "no expert is missing, because the whole model fits", &of_missing),
            (asked.weights != acting.weights, "only the policy hobbit has weights", &[("policy_weights", true)]),
            (
                parts.experts && asked.prefetch != acting.prefetch,
                "there is no predictor of experts (see predictor)",
                &[("prefetch", true), ("prefetch_distance", asked.distance != acting.distance)],
            ),
            (
                !is_rerouted && routing.drop == 0.0,
                "routing is the model's own (see cache_bias)",
                &[("keep_top", routing.keep_top != RoutingOptions::KEEP_TOP)],
            ),
            (
                !is_rerouted,
                "no expert is substituted (see substitute)",
                &[("substitute_max", routing.substitute_max.is_some())],
            ),
            (
                routing.virtual_experts == VirtualExperts::Off,
                "there are no virtual experts (see virtual_experts)",
                &[("virtual_update", routing.virtual_update != VirtualUpdate::default())],
            ),
        ];
        let mut idle: Vec<Idle> = Vec::new();
        for (_, reason, settings) in groups.into_iter().filter(|group| group.0) {
            for &(setting, _) in settings.iter().filter(|setting| setting.1) {
                if idle.iter().all(|known| known.setting != setting) {
                    idle.push(Idle { setting, reason });
                }
            }
        }
        idle
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
    use crate::options::PrecisionOptions;

    const HERE: Parts = Parts { experts: true, low: false, devices: false, passthrough: false };

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
        let with_all = Parts { low: true, devices: true, ..HERE };
        assert_eq!(names(&of(None), with_all), [""; 0]);
        // Dynamic precision skips experts without low versions too, if any are missing.
        let dynamic = of(Some(PrecisionMode::Dynamic));
        assert_eq!(names(&dynamic, HERE), ["n_cpu_moe", "low_share", "prefill_low"]);
        let fitting = Parts { passthrough: true, ..HERE };
        assert_eq!(names(&dynamic, fitting), ["n_cpu_moe", "low_share", "prefill_low", "precision"]);
        let dense = Parts { experts: false, ..HERE };
        assert_eq!(names(&dynamic, dense), ["precision", "n_cpu_moe", "low_share", "prefill_low"]);
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
        assert_eq!(options.caching.acting(), CachingOptions::default());
        let predictor = Some(PredictorKind::StackedGate);
        let full = CachingOptions { policy: PolicyKind::Hobbit, predictor, ..options.caching };
        let routing = RoutingOptions { substitute: 0.3, ..options.routing.clone() };
        assert_eq!(names(&ModelOptions { caching: full, routing, ..Default::default() }, HERE), [""; 0]);
        assert_eq!(full.acting(), full);
    }
}
