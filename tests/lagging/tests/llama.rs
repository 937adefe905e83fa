//! Stock llama.cpp runs on the device as on a GPU, whatever runs when.

mod rig;

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use ggml_sys::llama;
use lagging_device::{Device, Options, Order, Pinned, register};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo.gguf");

unsafe extern "C" fn silent(_: llama::ggml_log_level, _: *const c_char, _: *mut c_void) {}

/// Logits of the last token of a prompt and of a few tokens after it; all weights on the device, or all but the experts.
fn logits(device: Option<&Device>, experts_on_cpu: bool) -> Vec<f32> {
    let path = CString::new(MODEL).unwrap();
    let mut devices = [device.map_or(ptr::null_mut(), Device::raw), ptr::null_mut()];
    // SAFETY: no arguments.
    let cpu = unsafe { llama::ggml_backend_cpu_buffer_type() };
    let overrides = [
        llama::llama_model_tensor_buft_override { pattern: c"ffn_.*_exps".as_ptr(), buft: cpu },
        llama::llama_model_tensor_buft_override { pattern: ptr::null(), buft: ptr::null_mut() },
    ];
    // SAFETY: plain calls of llama.cpp's API; everything passed lives until the model and context are freed.
    unsafe {
        llama::llama_log_set(Some(silent), ptr::null_mut());
        let mut params = llama::llama_model_default_params();
        params.devices = devices.as_mut_ptr();
        params.n_gpu_layers = 99;
        params.use_extra_bufts = false;
        params.tensor_buft_overrides = if experts_on_cpu { overrides.as_ptr() } else { ptr::null() };
        let model = llama::llama_model_load_from_file(path.as_ptr(), params);
        assert!(!model.is_null());
        let mut params = llama::llama_context_default_params();
        (params.n_ctx, params.n_threads, params.n_threads_batch) = (128, 1, 1);
        let context = llama::llama_init_from_model(model, params);
        assert!(!context.is_null());
        let n_vocab = llama::llama_vocab_n_tokens(llama::llama_model_get_vocab(model));
        let mut logits = Vec::new();
        for start in [0, 40, 41, 42] {
            let mut tokens: Vec<i32> = (start..start.max(39) + 1).map(|i| 3 + (i * 37) % (n_vocab - 3)).collect();
            let batch = llama::llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32);
            assert_eq!(llama::llama_decode(context, batch), 0);
            let row = llama::llama_get_logits_ith(context, -1);
            logits.extend_from_slice(std::slice::from_raw_parts(row, n_vocab as usize));
        }
        llama::llama_free(context);
        llama::llama_model_free(model);
        logits
    }
}

#[test]
fn stock_llama_computes_the_same_whatever_runs_when() {
    // Registered first: what comes later reads ggml's list of devices.
    let eager = register(Options { order: Order::Eager, ..Options::default() });
    let cpu = logits(None, false);
    for experts_on_cpu in [false, true] {
        let expected = logits(Some(&eager), experts_on_cpu);
        let apart = cpu.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-3, "{apart} from the CPU");
        for options in [
            Options { order: Order::CopiesLate, ..Options::default() },
            Options { order: Order::CopiesEarly, ..Options::default() },
            Options { order: Order::CopiesLate, pinned: Pinned::Refused, ..Options::default() },
            Options { order: Order::CopiesLate, unified: true, ..Options::default() },
            Options { real_time: true, link_bandwidth: 1e12, ..Options::default() },
        ] {
            let device = register(options.clone());
            assert!(logits(Some(&device), experts_on_cpu) == expected, "{options:?}");
            assert_eq!(device.faults(), Vec::<String>::new());
            assert!(device.report().nodes > 100);
        }
    }
}
