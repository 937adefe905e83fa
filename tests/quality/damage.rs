//! Models whose experts are not what they were, while everything else is.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use hobbit::engine::Ggml;
use hobbit::gguf::{ExpertTensor, GgmlType, Gguf, Recode};

/// Bytes of a Q8_0 block, which begins with its scale (f16).
const Q8_0_BYTES: usize = 34;

/// Copies a model and lets `change` replace bytes of the tensors of one layer's experts.
fn changed(model: &Path, to: &Path, layer: u16, change: impl Fn(&ExpertTensor, &File)) {
    fs::copy(model, to).unwrap();
    let gguf = Gguf::open(to).unwrap();
    let file = File::options().read(true).write(true).open(to).unwrap();
    let experts = gguf.experts().unwrap();
    experts.layer(layer).expect("a layer of experts").tensors.iter().for_each(|tensor| change(tensor, &file));
}

fn slice(tensor: &ExpertTensor, file: &File, expert: u16) -> Vec<u8> {
    let mut bytes = vec![0; tensor.slice_bytes as usize];
    file.read_exact_at(&mut bytes, tensor.extent(expert).offset).unwrap();
    bytes
}

fn replace(tensor: &ExpertTensor, file: &File, expert: u16, bytes: &[u8]) {
    assert_eq!(bytes.len() as u64, tensor.slice_bytes);
    file.write_all_at(bytes, tensor.extent(expert).offset).unwrap();
}

/// Two experts of a layer change places; their rows of the router do not.
pub fn swap(model: &Path, to: &Path, layer: u16, [a, b]: [u16; 2]) {
    changed(model, to, layer, |tensor, file| {
        let (first, second) = (slice(tensor, file, a), slice(tensor, file, b));
        replace(tensor, file, a, &second);
        replace(tensor, file, b, &first);
    });
}

/// An expert whose blocks have lost their scales: it says nothing any more.
pub fn without_scales(model: &Path, to: &Path, layer: u16, expert: u16) {
    changed(model, to, layer, |tensor, file| {
        assert_eq!(tensor.dtype, GgmlType::Q8_0);
        let mut bytes = slice(tensor, file, expert);
        bytes.chunks_exact_mut(Q8_0_BYTES).for_each(|block| block[..2].fill(0));
        replace(tensor, file, expert, &bytes);
    });
}

/// An expert that was requantised to q2_K wrongly: the minima of its blocks were lost.
pub fn broken_quant(model: &Path, to: &Path, layer: u16, expert: u16) {
    let small = GgmlType::from_name("q2_k").expect("a type of ggml's");
    changed(model, to, layer, |tensor, file| {
        let own = slice(tensor, file, expert);
        let (mut bytes, mut back) = (Vec::new(), Vec::new());
        Ggml.recode(tensor.dtype, small, tensor.ne0, &own, None, &mut bytes).unwrap();
        // A super-block (block_q2_K) begins with 16 bytes of a scale and a minimum each, 4 bits both.
        let blocks = bytes.chunks_exact_mut(small.type_size() as usize);
        blocks.for_each(|block| block[..16].iter_mut().for_each(|pair| *pair &= 0x0f));
        Ggml.recode(small, tensor.dtype, tensor.ne0, &bytes, None, &mut back).unwrap();
        replace(tensor, file, expert, &back);
    });
}
