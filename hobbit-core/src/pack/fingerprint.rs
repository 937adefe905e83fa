//! Fingerprints that identify a model in milliseconds: blocks of every tensor, spread over its length.
//!
//! Header and length do not distinguish the fine-tunes of a model. Hashing the whole file does, but adds a minute to
//! every start. Different models differ in whole tensors, because training moves every weight of the tensors it moves.
//! So a few blocks of each tensor, always the same ones, tell models apart. Edits of single blocks go unnoticed.

use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::Digest;

use super::format::Sha256;
use crate::expert::Extent;
use crate::files::FileExt;
use crate::gguf::experts::parse_name;
use crate::gguf::{Gguf, TensorInfo};
use crate::store::{Original, StoreError};

const BLOCK_BYTES: u64 = 4096;
/// Sampled blocks of an expert tensor.
const EXPERT_BLOCKS: u64 = 8;
/// Reader threads: a disk answers many small reads at once much faster than one after the other.
const THREADS: usize = 8;

/// Sampled parts of a tensor, ascending: the middle of an ordinary tensor; the first, the last and six blocks in
/// between of experts. A tensor no longer than its blocks is read whole.
fn samples(tensor: &TensorInfo) -> Vec<Extent> {
    let Extent { file, offset, len } = tensor.extent;
    let n = if parse_name(&tensor.name).is_some() { EXPERT_BLOCKS } else { 1 };
    if len <= n * BLOCK_BYTES {
        return vec![tensor.extent];
    }
    let room = len - BLOCK_BYTES;
    let start = |i: u64| if n == 1 { room / 2 } else { (u128::from(room) * u128::from(i) / u128::from(n - 1)) as u64 };
    (0..n).map(|i| Extent { file, offset: offset + start(i), len: BLOCK_BYTES }).collect()
}

/// SHA-256 of the SHA-256 of each tensor's samples, in the tensors' order. A split model and one file with the same
/// tensors have the same fingerprint.
pub fn fingerprint(model: &Gguf) -> Result<Sha256, StoreError> {
    let files: Vec<Original> =
        model.files.iter().map(|file| Original::open(&file.path, file.state)).collect::<Result<_, _>>()?;
    files.iter().for_each(|file| crate::store::advise_random(&file.file));
    let next = AtomicUsize::new(0);
    // Digests of the tensors that this thread took, by index.
    let work = || -> Result<Vec<(usize, [u8; 32])>, StoreError> {
        let (mut digests, mut bytes) = (Vec::new(), Vec::new());
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(tensor) = model.tensors.get(index) else { return Ok(digests) };
            let mut hash = sha2::Sha256::new();
            for Extent { file, offset, len } in samples(tensor) {
                let Original { path, file, .. } = &files[file as usize];
                bytes.resize(len as usize, 0); // a few blocks at most
                let read = file.read_exact_at(&mut bytes, offset);
                read.map_err(|source| StoreError::Read { path: path.clone(), offset, len, source })?;
                hash.update(&bytes);
            }
            digests.push((index, hash.finalize().into()));
        }
    };
    let taken: Vec<Result<_, StoreError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS.min(model.tensors.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("reading does not panic")).collect()
    });
    let mut digests = taken.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
    digests.sort_unstable();
    let mut hash = sha2::Sha256::new();
    digests.iter().for_each(|(_, digest)| hash.update(digest));
    Ok(Sha256(hash.finalize().into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::GgmlType;

    #[test]
    fn samples_are_spread_over_the_tensor() {
        let of = |name: &str, len| {
            let extent = Extent { file: 3, offset: 1000, len };
            let tensor = TensorInfo { name: name.into(), dtype: GgmlType::F32, dims: vec![len / 4], extent };
            let samples = samples(&tensor);
            assert!(samples.iter().all(|sample| sample.file == 3 && sample.end() <= 1000 + len));
            samples.iter().map(|sample| (sample.offset - 1000, sample.len)).collect::<Vec<_>>()
        };
        assert_eq!(of("blk.0.attn_q.weight", 4096), [(0, 4096)]);
        assert_eq!(of("blk.0.attn_q.weight", 8192), [(2048, 4096)]);
        assert_eq!(of("blk.0.ffn_up_exps.weight", 8 * 4096), [(0, 8 * 4096)]);
        let experts = of("blk.0.ffn_up_exps.weight", 8 << 30);
        assert_eq!((experts.len(), experts[0], experts[7]), (8, (0, 4096), ((8 << 30) - 4096, 4096)));
        assert!(experts.windows(2).all(|pair| pair[1].0 - pair[0].0 > 1 << 30));
    }
}
