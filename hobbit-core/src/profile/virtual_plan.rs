//! The number of virtual experts of each layer, as a file: `gguf-tools plan` writes it and `--virtual-experts
//! PLAN.json` reads it. It is JSON so that other tools can make one; only `format`, `version` and `layers` are
//! required.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::format::{LayerNorms, ModelId, TextId, VersionedFault, check_norms, read_versioned};
use crate::files::capped::{self, JSON_BYTES_MAX};

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
#[error("{file}: {fault}")]
pub struct VirtualPlanError {
    pub file: String,
    pub fault: PlanFault,
}

#[derive(Debug, thiserror::Error)]
pub enum PlanFault {
    #[error("cannot read this plan: {0}; gguf-tools plan makes one, --virtual-experts auto needs none")]
    Io(io::Error),
    #[error("{0}; expected what gguf-tools plan -o writes")]
    Malformed(String),
    #[error("version {found} of the format, expected {PLAN_VERSION}; make it again with this gguf-tools plan")]
    Version { found: u64 },
    #[error("this plan is of another model: {what} is {found}, expected {expected}; make one with gguf-tools plan")]
    OtherModel { what: String, found: String, expected: String },
    #[error(
        "layer {layer}: {experts} experts of {of}; a layer keeps at least as many as a token uses ({n_used}), and at \
         most all \
         of them"
    )]
    Experts { layer: u16, experts: u16, of: u16, n_used: u32 },
    #[error(
        "this plan takes {needed} MiB of experts' slots, and --expert-cache gives {given}; give --expert-cache \
         {needed}MiB, \
         leave it out, or make a plan with gguf-tools plan --budget {given}MiB"
    )]
    TooLarge { needed: u64, given: u64 },
}

impl VirtualPlan {
    pub fn read(path: &Path) -> Result<Self, VirtualPlanError> {
        let file = path.display().to_string();
        let text = capped::read_text(path, JSON_BYTES_MAX).map_err(PlanFault::Io);
        text.and_then(|text| Self::parse(&text)).map_err(|fault| VirtualPlanError { file, fault })
    }

    fn parse(text: &str) -> Result<Self, PlanFault> {
        let plan: Self = read_versioned(text, PLAN_FORMAT, PLAN_VERSION).map_err(|fault| match fault {
            VersionedFault::Version(found) => PlanFault::Version { found },
            other => PlanFault::Malformed(other.to_string()),
        })?;
        check_norms(&plan.norms).map_err(PlanFault::Malformed)?;
        Ok(plan)
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and numbers can always be written") + "\n"
    }

    /// Checks that the plan fits a model with these `layers` (block and experts, ascending), of which a token uses
    /// `n_used`.
    pub fn check(&self, architecture: &str, layers: &[(u16, u16)], n_used: u32) -> Result<(), PlanFault> {
        let other =
            |what: String, found: String, expected: String| Err(PlanFault::OtherModel { what, found, expected });
        if let Some(model) = self.model.as_ref().filter(|model| model.architecture != architecture) {
            return other("general.architecture".to_owned(), architecture.to_owned(), model.architecture.clone());
        }
        if self.layers.len() != layers.len() {
            let [found, expected] = [layers.len(), self.layers.len()].map(|n| n.to_string());
            return other("number of layers with experts".to_owned(), found, expected);
        }
        for (own, &(layer, of)) in self.layers.iter().zip(layers) {
            if own.layer != layer {
                return other(
                    "block number of a layer with experts".to_owned(),
                    layer.to_string(),
                    own.layer.to_string(),
                );
            }
            if own.of != of {
                return other(format!("number of experts of layer {layer}"), of.to_string(), own.of.to_string());
            }
            let least = n_used.min(of.into());
            if u32::from(own.experts) < least || own.experts > of {
                return Err(PlanFault::Experts { layer, experts: own.experts, of, n_used });
            }
        }
        Ok(())
    }

    /// Slots of `n_members` of a layer's experts that are alike: their share of the layer's slots.
    pub fn slots_of(&self, layer: u16, n_members: u32) -> u32 {
        let Some(own) = self.layers.iter().find(|own| own.layer == layer) else { return 0 };
        (own.slots() * n_members).div_ceil(u32::from(own.of).max(1)).min(n_members)
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
        parsed.and_then(|plan| plan.check("toy", &LAYERS, 2)).unwrap_err().to_string()
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
    fn what_is_wrong_is_told() {
        assert!(fault("{").contains("gguf-tools plan -o"));
        assert!(fault(&PLAN.replace("hobbit-plan", "plan")).contains("format is 'plan'"));
        assert!(fault(&PLAN.replace("\"version\": 1", "\"version\": 2")).contains("version 2"));
        assert!(fault(&PLAN.replace("\"layer\": 2", "\"layer\": 3")).contains("block number"));
        assert!(fault(&PLAN.replace("\"of\": 8}]", "\"of\": 9}]")).contains("number of experts of layer 2 is 8"));
        assert!(
            fault(&PLAN.replace("\"experts\": 4", "\"experts\": 1")).contains("at least as many as a token uses (2)")
        );
        assert!(fault(&PLAN.replace("\"experts\": 4", "\"experts\": 9")).contains("layer 1: 9 experts of 8"));
        assert!(fault(&PLAN.replace("\"experts\": 4", "\"experts\": -1")).contains("expected"));
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
