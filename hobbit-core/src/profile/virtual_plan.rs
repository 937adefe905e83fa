//! The number of virtual experts of each layer, as a file: `gguf-tools plan` writes it and `--virtual-experts
//! PLAN.json` reads it. It is JSON so that other tools can make one; only `format`, `version` and `layers` are
//! required.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::format::{LayerNorms, ModelId, TextId, check_norms, read_versioned};
use crate::files::{self, JSON_BYTES_MAX};

pub const PLAN_FORMAT: &str = "hobbit-plan";
/// Format version; it increases when older readers would misread the file.
pub const PLAN_VERSION: u64 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VirtualPlan {
    pub format: String,
    pub version: u64,
    /// The model that the plan was made for. It works for another quant of the same model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<TextId>,
    /// Method that made it: `hull`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planner: Option<String>,
    /// Every layer with experts, ascending.
    pub layers: Vec<PlannedLayer>,
    /// ‖W‖ of every expert, the weight of the uses of virtual experts. If empty, all experts count alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub norms: Vec<LayerNorms>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<PlanOutcome>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<PlanOutcome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedLayer {
    pub layer: u16,
    /// Experts present: at least as many as a token uses, at most all.
    pub experts: u16,
    pub of: u16,
}

impl PlannedLayer {
    /// Slots of the layer, including a spare one if experts are missing.
    pub fn slots(&self) -> u32 {
        u32::from(self.experts) + u32::from(self.experts < self.of)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanOutcome {
    /// Mean Kullback-Leibler divergence from the exact predictions, nats.
    pub kl: f64,
    pub slot_bytes: u64,
    /// Relative increase of perplexity, if measured; 0.01 is one percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity_increase: Option<f64>,
}

#[derive(Debug, thiserror::Error)]
pub enum VirtualPlanError {
    #[error("{file}: {reason}")]
    Unusable { file: String, reason: String },
    #[error("{file}: this plan takes {needed} MiB of experts' slots, and the expert cache has {given}")]
    TooLarge { file: String, needed: u64, given: u64 },
}

impl VirtualPlan {
    pub fn read(path: &Path) -> Result<Self, VirtualPlanError> {
        let text = files::read_text(path, JSON_BYTES_MAX).map_err(|error| format!("cannot read this plan: {error}"));
        let unusable = |reason| VirtualPlanError::Unusable { file: path.display().to_string(), reason };
        text.and_then(|text| Self::parse(&text)).map_err(unusable)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let plan: Self = read_versioned(text, PLAN_FORMAT, PLAN_VERSION)?;
        check_norms(&plan.norms).map(|()| plan)
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and numbers can always be written") + "\n"
    }

    /// Checks that the plan fits a model with these `layers` (block and experts, ascending), of which a token uses
    /// `n_used`.
    pub fn check(&self, architecture: &str, layers: &[(u16, u16)], n_used: u32) -> Result<(), String> {
        fn same<T: PartialEq + std::fmt::Display>(what: String, found: T, expected: T) -> Result<(), String> {
            let other = || format!("this plan is of another model: {what} is {found}, expected {expected}");
            if found == expected { Ok(()) } else { Err(other()) }
        }
        if let Some(model) = &self.model {
            same("general.architecture".to_owned(), architecture, &model.architecture)?;
        }
        same("number of layers with experts".to_owned(), layers.len(), self.layers.len())?;
        for (&PlannedLayer { layer, experts, of }, &(number, n_expert)) in self.layers.iter().zip(layers) {
            same("block number of a layer with experts".to_owned(), number, layer)?;
            same(format!("number of experts of layer {layer}"), n_expert, of)?;
            if u32::from(experts) < n_used.min(of.into()) || experts > of {
                return Err(format!(
                    "layer {layer}: {experts} experts of {of}; a layer keeps at least as many as a token uses \
                     ({n_used}), and at most all of them"
                ));
            }
        }
        Ok(())
    }

    /// Slots of `n_members` of a layer's experts that are alike: their share of the layer's slots.
    pub fn slots_of(&self, layer: u16, n_members: u32) -> u32 {
        let Some(planned) = self.layers.iter().find(|planned| planned.layer == layer) else { return 0 };
        (planned.slots() * n_members).div_ceil(u32::from(planned.of).max(1)).min(n_members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = r#"{"format": "hobbit-plan", "version": 1, "layers": [
        {"layer": 1, "experts": 4, "of": 8}, {"layer": 2, "experts": 8, "of": 8}]}"#;
    const LAYERS: [(u16, u16); 2] = [(1, 8), (2, 8)];

    fn fault(text: &str) -> String {
        let parsed = VirtualPlan::parse(text);
        parsed.and_then(|plan| plan.check("toy", &LAYERS, 2)).unwrap_err()
    }

    #[test]
    fn a_plan_by_hand_is_enough() {
        let plan = VirtualPlan::parse(PLAN).unwrap();
        plan.check("toy", &LAYERS, 2).unwrap();
        assert_eq!(plan.layers.iter().map(PlannedLayer::slots).collect::<Vec<_>>(), [5, 8], "one is spare");
        assert_eq!([(1, 8), (1, 4), (1, 3), (2, 3), (3, 8)].map(|(layer, n)| plan.slots_of(layer, n)), [5, 3, 2, 3, 0]);
        assert_eq!(VirtualPlan::parse(&plan.to_json()).unwrap(), plan);
    }

    #[test]
    fn errors_say_what_is_wrong() {
        for (own, other, part) in [
            ("hobbit-plan", "plan", "format is 'plan'"),
            ("\"version\": 1", "\"version\": 2", "version 2"),
            ("\"layer\": 2", "\"layer\": 3", "block number"),
            ("\"of\": 8}]", "\"of\": 9}]", "number of experts of layer 2 is 8"),
            ("\"experts\": 4", "\"experts\": 1", "at least as many as a token uses (2)"),
            ("\"experts\": 4", "\"experts\": 9", "layer 1: 9 experts of 8"),
            ("\"experts\": 4", "\"experts\": -1", "expected"),
        ] {
            let found = fault(&PLAN.replace(own, other));
            assert!(found.contains(part), "{found}");
        }
        for norm in ["1e39", "-1"] {
            let norms = format!(r#""version": 1, "norms": [{{"layer": 1, "norms": [0.5, {norm}]}}]"#);
            let text = PLAN.replace("\"version\": 1", &norms);
            assert!(fault(&text).contains("expected a number from 0 on"), "{}", fault(&text));
        }
        let short = r#"{"format": "hobbit-plan", "version": 1, "layers": []}"#;
        assert!(fault(short).contains("number of layers with experts is 2, expected 0"));
        let missing = VirtualPlan::read(Path::new("/nowhere/plan.json")).unwrap_err().to_string();
        assert!(missing.starts_with("/nowhere/plan.json: cannot read"), "{missing}");
    }
}
