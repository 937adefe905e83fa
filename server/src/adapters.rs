//! Scales of LoRA adapters: the defaults, and those that requests give.

use std::sync::{Arc, Mutex};

use hobbit::Model;
use hobbit::options::SCALE_MAX;
use serde_json::{Value, json};

use super::error::ApiError;
use super::json::integer;
use super::lock;

/// One factor per adapter, in order; empty without adapters.
pub type Scales = Arc<[f32]>;

/// The default scales.
pub struct Adapters(Mutex<Scales>);

impl Adapters {
    /// The scales as loaded, or all 0.
    pub fn of(model: &Model, are_applied: bool) -> Self {
        let scales = model.adapters().map(|adapter| if are_applied { adapter.scale } else { 0.0 });
        Self(Mutex::new(scales.collect()))
    }

    pub fn scales(&self) -> Scales {
        Arc::clone(&lock(&self.0))
    }

    pub fn set(&self, scales: Scales) {
        *lock(&self.0) = scales;
    }
}

/// Reads `[{"id": 0, "scale": 0.5}, …]` for `n` adapters; adapters that are not listed are off, as in llama-server.
///
/// # Errors
/// Not such a list, an unknown adapter, or a scale beyond [`SCALE_MAX`].
pub fn read(list: &Value, n: usize) -> Result<Scales, ApiError> {
    let wrong = |what: String| ApiError::field("lora", what);
    let list = list.as_array().ok_or_else(|| wrong("expected an array of {\"id\", \"scale\"}".to_owned()))?;
    let mut scales = vec![0.0; n];
    for entry in list {
        let id = entry.get("id").and_then(integer).ok_or_else(|| wrong("expected a whole number as id".to_owned()))?;
        let scale = match entry.get("scale") {
            None => 0.0,
            Some(scale) => scale
                .as_f64()
                .map(|scale| scale as f32)
                .filter(|scale| scale.abs() <= SCALE_MAX)
                .ok_or_else(|| wrong(format!("expected a number from -{SCALE_MAX} to {SCALE_MAX} as scale")))?,
        };
        let place = usize::try_from(id).ok().and_then(|id| scales.get_mut(id));
        *place.ok_or_else(|| wrong(format!("Invalid adapter id: there is no adapter {id}, {n} are loaded")))? = scale;
    }
    Ok(scales.into())
}

/// The scales in the form that requests use.
pub fn shown(scales: &[f32]) -> Value {
    scales.iter().enumerate().map(|(id, scale)| json!({"id": id, "scale": scale})).collect()
}

/// The adapters as `/lora-adapters` lists them.
pub fn described(model: &Model, scales: &[f32]) -> Value {
    let describe = |(id, (adapter, scale)): (usize, (&hobbit::engine::AdapterInfo, &f32))| {
        json!({
            "id": id,
            "path": adapter.path.display().to_string(),
            "scale": scale,
            "task_name": adapter.task_name,
            "prompt_prefix": adapter.prompt_prefix,
        })
    };
    model.adapters().zip(scales).enumerate().map(describe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_read() {
        let read = |list: Value| read(&list, 2).map(|scales| scales.to_vec());
        assert_eq!(read(json!([{"id": 1, "scale": 0.5}])), Ok(vec![0.0, 0.5]));
        assert_eq!(read(json!([])), Ok(vec![0.0, 0.0]));
        let scaled = |scale: Value| json!([{"id": 0, "scale": scale}]);
        for wrong in [
            json!({}),
            json!([{"id": 2, "scale": 1}]),
            json!([{"scale": 1}]),
            scaled(json!("x")),
            scaled(json!(1e38)),
            scaled(json!(-1e10)),
            scaled(json!(1e300)),
            scaled(json!(100.5)),
        ] {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
        assert_eq!(read(scaled(json!(-100))), Ok(vec![-100.0, 0.0]));
        assert_eq!(shown(&[0.5]), json!([{"id": 0, "scale": 0.5}]));
    }
}
