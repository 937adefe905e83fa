//! Fingerprints that identify a model in milliseconds: blocks of every tensor, spread over its length.
//!
//! Header and length do not distinguish the fine-tunes of a model. Hashing the whole file does, but adds a minute to
//! every start. Different models differ in whole tensors, because training moves every weight of the tensors it moves.
//! So a few blocks of each tensor, always the same ones, tell models apart. Edits of single blocks go unnoticed.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::Digest;

use super::bytes::{self, Interrupted, read_exact_at};
use super::format::Sha256;
use crate::expert::Extent;
use crate::files;
use crate::gguf::experts::parse_name;
use crate::gguf::{Gguf, TensorInfo};
use crate::store::{Original, StoreError};

/// Bytes of a sampled block.
const BLOCK_BYTES: u64 = 4096;
/// Sampled blocks of an expert tensor.
const EXPERT_BLOCKS: u64 = 8;
/// Reader threads: a disk answers many small reads at once much faster than one after the other.
const THREADS: usize = 8;
/// Maximum length of a fingerprint file beside a pack, in bytes.
const KEPT_BYTES_MAX: u64 = 1024;
/// First line of a fingerprint file.
const KEPT_MAGIC: &str = "hobbit-fingerprint 1";

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
///
/// # Errors
/// A file of the model cannot be read, or changed after its header was read.
pub fn fingerprint(model: &Gguf) -> Result<Sha256, StoreError> {
    let files = originals(model)?;
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
                read_exact_at(file, &mut bytes, offset).map_err(|source| StoreError::Read {
                    path: path.clone(),
                    offset,
                    len,
                    source,
                })?;
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

fn originals(model: &Gguf) -> Result<Vec<Original>, StoreError> {
    model.files.iter().map(|file| Original::open(&file.path, file.state)).collect()
}

/// SHA-256 of a plain model as one file; reads all of it. `progress` receives bytes read and total bytes. `None` if it
/// stopped the run.
///
/// # Errors
/// As [`fingerprint`].
pub fn sha256(
    model: &Gguf,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Option<Sha256>, StoreError> {
    let originals = originals(model)?;
    let files: Vec<_> = originals.iter().map(Original::again).collect::<Result<_, _>>()?;
    let view = model.one_file();
    let (mut hash, mut done) = (sha2::Sha256::new(), 0);
    let walked = bytes::walk(
        &view,
        &files,
        |_| Vec::new(),
        |bytes| {
            hash.update(bytes);
            done += bytes.len() as u64;
            if progress(done, view.len).is_break() { Err(()) } else { Ok(()) }
        },
    );
    match walked {
        Ok(()) => {}
        Err(Interrupted::Sink(())) => return Ok(None),
        Err(Interrupted::Read(file, source)) => {
            let path = originals[file as usize].path.clone();
            return Err(StoreError::Read { path, offset: done, len: 1, source });
        }
    }
    originals.iter().try_for_each(Original::check)?;
    Ok(Some(Sha256(hash.finalize().into())))
}

/// Path of the fingerprint of a pack's source, for packs by earlier versions of hobbit that do not contain it.
pub fn kept_path(pack: &Path) -> std::path::PathBuf {
    files::with_suffix(pack, ".fingerprint")
}

/// The fingerprint kept beside the pack at `path`, whose source has this digest; `None` if there is none.
pub fn kept(path: &Path, source: &Sha256) -> Option<Sha256> {
    let text = files::capped::read_text(&kept_path(path), KEPT_BYTES_MAX).ok()?;
    let mut lines = text.lines();
    let digest = |line: Option<&str>, key: &str| line?.strip_prefix(key)?.trim().parse().ok();
    let is_of_source = lines.next()? == KEPT_MAGIC && digest(lines.next(), "source ") == Some(*source);
    digest(lines.next(), "fingerprint ").filter(|_| is_of_source)
}

/// Writes a fingerprint beside the pack at `path`.
///
/// # Errors
/// The system's error; another kind of file has this name.
pub fn keep(path: &Path, source: &Sha256, fingerprint: &Sha256) -> std::io::Result<()> {
    let kept = kept_path(path);
    let is_ours = match files::capped::read(&kept, KEPT_BYTES_MAX) {
        Ok(bytes) => bytes.is_empty() || bytes.starts_with(KEPT_MAGIC.as_bytes()),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    };
    if !is_ours {
        return Err(std::io::Error::other("there is another file of this name"));
    }
    files::replace(&kept, format!("{KEPT_MAGIC}\nsource {source}\nfingerprint {fingerprint}\n").as_bytes())
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

    #[test]
    fn what_is_kept_beside_a_pack_is_of_one_source() {
        let dir = tempfile::tempdir().unwrap();
        let pack = dir.path().join("low.gguf");
        let (source, print) = (Sha256([1; 32]), Sha256([2; 32]));
        assert_eq!(kept(&pack, &source), None);
        keep(&pack, &source, &print).unwrap();
        assert_eq!(kept(&pack, &source), Some(print));
        assert_eq!(kept(&pack, &print), None, "the pack was replaced by one of another source");
        keep(&pack, &print, &source).unwrap();
        assert_eq!(kept(&pack, &print), Some(source));
        std::fs::write(kept_path(&pack), "somebody's notes").unwrap();
        assert!(keep(&pack, &source, &print).is_err());
        assert_eq!(std::fs::read(kept_path(&pack)).unwrap(), b"somebody's notes");
    }
}
