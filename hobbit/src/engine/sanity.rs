//! What llama.cpp believes of a header until a kernel computes with it: then a failed assertion would end the process.

use super::error::Error;
use crate::gguf::Gguf;
use crate::options::{KvValue, ModelOptions};

/// Keys below the architecture's that norms add to a variance, of which they take the root.
const EPSILONS: [&str; 3] =
    ["attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"];

/// Checks what a model's header says, and what `options` say instead.
///
/// # Errors
/// [`Error::Load`] with the key, what it has, and what it should have.
pub(super) fn check(gguf: &Gguf, options: &ModelOptions) -> Result<(), Error> {
    for key in EPSILONS.map(|key| format!("{}.{key}", gguf.architecture())) {
        let chosen = options.kv_overrides.iter().find(|chosen| chosen.key == key).map(|chosen| &chosen.value);
        let value = match chosen {
            Some(KvValue::Float(value)) => Some(*value as f32),
            // llama.cpp refuses an override of another type.
            Some(_) => None,
            None => gguf.metadata.get_f32(&key),
        };
        if let Some(value) = value.filter(|value| value.is_nan() || *value < 0.0) {
            let reason = format!("{key} is {value}, expected a number that is not negative");
            return Err(Error::Load { path: gguf.files[0].path.clone(), reason });
        }
    }
    Ok(())
}
