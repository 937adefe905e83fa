//! Expert tensors quantised by us are those of llama-quantize, byte for byte.

use std::ffi::CString;
use std::path::Path;

use ggml_sys::llama;
use hobbit::engine::Ggml;
use hobbit_core::gguf::Recode;
use hobbit_core::gguf::{ExpertTensor, GgmlType, Gguf};
use hobbit_synth::{Format, Spec};

use crate::fixture;

/// Greatest number of values of the importance of an expert tensor here: 256 or 512 columns of 8 experts.
const N_EXPERT: u32 = 8;

/// As `llama-quantize --pure` does, with `importance` for the tensors of these names.
fn llama_quantise(from: &Path, to: &Path, kind: llama::llama_ftype, importance: &[(String, Vec<f32>)]) {
    let name = |text: &str| CString::new(text).unwrap();
    let names: Vec<CString> = importance.iter().map(|(tensor, _)| name(tensor)).collect();
    let entry = |name, data: &[f32]| llama::llama_model_imatrix_data { name, data: data.as_ptr(), size: data.len() };
    let mut entries: Vec<_> = importance.iter().zip(&names).map(|((_, v), name)| entry(name.as_ptr(), v)).collect();
    entries.push(entry(std::ptr::null(), &[]));
    let (from, to) = (name(from.to_str().unwrap()), name(to.to_str().unwrap()));
    // SAFETY: plain values, and pointers to what outlives the call; the entries end with one without a name.
    let code = unsafe {
        let mut params = llama::llama_model_quantize_default_params();
        params.ftype = kind;
        params.pure_ = true;
        params.output_tensor_type = llama::GGML_TYPE_Q8_0;
        params.token_embedding_type = llama::GGML_TYPE_Q8_0;
        if !importance.is_empty() {
            params.imatrix = entries.as_ptr();
        }
        llama::llama_model_quantize(from.as_ptr(), to.as_ptr(), &params)
    };
    assert_eq!(code, 0, "llama.cpp refuses type {kind}");
}

fn experts(model: &Gguf) -> Vec<ExpertTensor> {
    model.experts().unwrap().layers.into_iter().flat_map(|layer| layer.tensors).collect()
}

fn bytes(file: &[u8], tensor: &ExpertTensor, expert: u16) -> Vec<u8> {
    let extent = tensor.extent(expert);
    file[extent.offset as usize..extent.end() as usize].to_vec()
}

/// Importance of every column of every expert of every matrix, each its own; some experts were never reached.
fn importance_of(model: &Gguf) -> Vec<(String, Vec<f32>)> {
    let matrices = model.tensors.iter().filter(|tensor| tensor.dims.len() > 1);
    let value = |i: u64| if i % 7 == 3 { 1.0 } else { 0.25 + (i * 2654435761 % 1021) as f32 / 64.0 };
    let values = |n: u64| (0..n).map(value).collect();
    matrices.map(|t| (t.name.clone(), values(t.dims[0] * t.dims.get(2).unwrap_or(&1)))).collect()
}

#[test]
fn experts_are_quantised_as_llama_quantize_does() {
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let ggml = Ggml;
    // (source, llama.cpp's file type, type of the experts, with importance)
    let cases = [
        (Format::F16, llama::LLAMA_FTYPE_MOSTLY_Q8_0, "q8_0", false),
        (Format::F16, llama::LLAMA_FTYPE_MOSTLY_Q2_K, "q2_K", false),
        (Format::F16, llama::LLAMA_FTYPE_MOSTLY_Q4_K_S, "q4_K", false),
        (Format::Bf16, llama::LLAMA_FTYPE_MOSTLY_Q3_K_S, "q3_K", false),
        (Format::F32, llama::LLAMA_FTYPE_MOSTLY_IQ4_XS, "iq4_xs", false),
        (Format::F16, llama::LLAMA_FTYPE_MOSTLY_Q2_K, "q2_K", true),
        (Format::F16, llama::LLAMA_FTYPE_MOSTLY_Q4_0, "q4_0", true),
        (Format::Bf16, llama::LLAMA_FTYPE_MOSTLY_IQ2_XXS, "iq2_xxs", true),
    ];
    for (format, kind, to, with_importance) in cases {
        let spec = Spec { layers: 1, ff: 512, types: vec![format], seed: 5, ..Spec::tiny("qwen3moe") };
        let source = fixture::write(dir.path(), &spec);
        let model = Gguf::open(&source).unwrap();
        let importance = if with_importance { importance_of(&model) } else { Vec::new() };
        let target = dir.path().join("quantised.gguf");
        llama_quantise(&source, &target, kind, &importance);

        let to = GgmlType::from_name(to).unwrap();
        let quantised = Gguf::open(&target).unwrap();
        let (from_file, to_file) = (std::fs::read(&source).unwrap(), std::fs::read(&target).unwrap());
        let pairs: Vec<_> = experts(&model).into_iter().zip(experts(&quantised)).collect();
        assert_eq!(pairs.len(), 3);
        let mut found = Vec::new();
        for (from, expected) in &pairs {
            assert_eq!((&from.name, expected.dtype, from.n_expert), (&expected.name, to, N_EXPERT));
            let importance = importance.iter().find(|(tensor, _)| *tensor == from.name).map(|(_, values)| values);
            for expert in 0..from.n_expert as u16 {
                let columns = importance.map(|values| values.chunks(from.ne0 as usize).nth(expert.into()).unwrap());
                let source = bytes(&from_file, from, expert);
                ggml.recode(from.dtype, to, from.ne0, &source, columns, &mut found).unwrap();
                let same = found == bytes(&to_file, expected, expert);
                assert!(same, "{format} to {to} (importance: {with_importance}), {} expert {expert}", from.name);
            }
        }
    }
}
