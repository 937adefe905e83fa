//! How large experts' weights are.

use serde::{Deserialize, Serialize};

/// Norms of one layer's experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorms {
    /// Block number.
    pub layer: u16,
    /// By expert: the Frobenius norm of all of its matrices together.
    pub norms: Vec<f32>,
}

/// As a pack carries them.
pub fn norms_to_json(norms: &[LayerNorms]) -> String {
    serde_json::to_string(norms).expect("numbers can always be written")
}

/// What [`norms_to_json`] wrote.
///
/// # Errors
/// What is wrong with it, in words.
pub fn norms_of_json(text: &str) -> Result<Vec<LayerNorms>, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}
