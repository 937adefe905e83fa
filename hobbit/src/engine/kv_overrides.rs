//! Metadata values that replace a model file's, as llama.cpp takes them.

use std::ffi::c_char;
use std::ptr;

use ggml_sys::llama;

use crate::options::{KvValue, ModelOptions};

/// `llama_model_kv_override`s, ended by an empty key.
pub(super) struct KvOverrides(Vec<llama::llama_model_kv_override>);

impl KvOverrides {
    pub(super) fn new(options: &ModelOptions) -> Self {
        // SAFETY: all-zero is a valid override: empty key, integer 0.
        let empty = || -> llama::llama_model_kv_override { unsafe { std::mem::zeroed() } };
        let mut list: Vec<_> = options
            .kv_overrides
            .iter()
            .map(|chosen| {
                let mut raw = empty();
                copy_text(&chosen.key, &mut raw.key);
                // The union's field is the one that the tag names.
                match &chosen.value {
                    KvValue::Int(value) => {
                        raw.tag = llama::LLAMA_KV_OVERRIDE_TYPE_INT;
                        raw.__bindgen_anon_1.val_i64 = *value;
                    }
                    KvValue::Float(value) => {
                        raw.tag = llama::LLAMA_KV_OVERRIDE_TYPE_FLOAT;
                        raw.__bindgen_anon_1.val_f64 = *value;
                    }
                    KvValue::Bool(value) => {
                        raw.tag = llama::LLAMA_KV_OVERRIDE_TYPE_BOOL;
                        raw.__bindgen_anon_1.val_bool = *value;
                    }
                    KvValue::Str(value) => {
                        raw.tag = llama::LLAMA_KV_OVERRIDE_TYPE_STR;
                        let mut text = [0; 128];
                        copy_text(value, &mut text);
                        raw.__bindgen_anon_1.val_str = text;
                    }
                }
                raw
            })
            .collect();
        if !list.is_empty() {
            list.push(empty());
        }
        Self(list)
    }

    pub(super) fn as_ptr(&self) -> *const llama::llama_model_kv_override {
        if self.0.is_empty() { ptr::null() } else { self.0.as_ptr() }
    }
}

/// Copies `text`, cut so that a terminating NUL remains.
fn copy_text(text: &str, to: &mut [c_char; 128]) {
    for (byte, place) in text.bytes().zip(&mut to[..127]) {
        *place = byte as c_char;
    }
}
