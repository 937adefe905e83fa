//! The virtual file against the bytes it stands for.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::{GgmlType, Gguf, HeaderBuilder, Piece, VirtualGguf};
use super::{builder, data, file, model, tensors};

/// Reads the whole virtual file the way a stream would, from `step` positions at a time.
fn read_all(gguf: &Gguf, view: &VirtualGguf, step: u64) -> Vec<u8> {
    let sources: Vec<_> = gguf.files.iter().map(|f| fs::read(&f.path).unwrap()).collect();
    let mut out = Vec::new();
    loop {
        let n = |len: u64| len.min(step) as usize;
        match view.segment_at(out.len() as u64) {
            Piece::Header(rest) => out.extend_from_slice(&rest[..n(rest.len() as u64)]),
            Piece::Source { source, .. } => {
                let bytes = &sources[source.file as usize][source.offset as usize..source.end() as usize];
                out.extend_from_slice(&bytes[..n(source.len)]);
            }
            Piece::Zeros(len) | Piece::Absent { len, .. } => out.resize(out.len() + n(len), 0),
            Piece::End => return out,
        }
    }
}

fn assert_segments_are_sound(view: &VirtualGguf) {
    let mut pos = view.header.len() as u64;
    for s in &view.segments {
        assert!(s.start >= pos && s.len > 0, "{s:?}");
        pos = s.end();
    }
    assert!(pos <= view.len);
    assert_eq!(view.segment_at(view.len), Piece::End);
    assert_eq!(view.segment_at(u64::MAX), Piece::End);
}

/// Writes `tensors` as shards of the given sizes; the paths in order.
fn write_shards(dir: &tempfile::TempDir, sizes: &[usize]) -> Vec<PathBuf> {
    let all = tensors();
    assert_eq!(sizes.iter().sum::<usize>(), all.len());
    let mut rest = all.as_slice();
    let count = sizes.len() as u16;
    let mut paths = Vec::new();
    for (no, size) in (0..count).zip(sizes) {
        let (own, others) = rest.split_at(*size);
        rest = others;
        let header = match no {
            0 => builder(32, Some((no, count, all.len() as i32))),
            _ => {
                let mut header = HeaderBuilder::new(32).unwrap();
                header.key("split.no", no).unwrap().key("split.count", count).unwrap();
                header.key("split.tensors.count", all.len() as i32).unwrap();
                header
            }
        };
        let path = dir.path().join(format!("toy-{:05}-of-{count:05}.gguf", no + 1));
        fs::write(&path, file(header, own)).unwrap();
        paths.push(path);
    }
    paths
}

#[test]
fn a_single_file_is_shown_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("toy.gguf");
    for trailing in [0, 100] {
        let mut bytes = file(builder(4096, None), &tensors());
        bytes.resize(bytes.len() + trailing, 0xee);
        fs::write(&path, &bytes).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        let view = gguf.virtual_file();
        assert_segments_are_sound(&view);
        assert_eq!(view.len, bytes.len() as u64);
        assert!(read_all(&gguf, &view, 61) == bytes && read_all(&gguf, &view, u64::MAX) == bytes);
        for s in &view.segments {
            let name = s.tensor.map_or("", |i| &gguf.tensors[i as usize].name);
            assert_eq!(s.in_file, name.ends_with("_exps.weight"), "{name}");
        }
        let expert_bytes: u64 = view.segments.iter().filter(|s| s.in_file).map(|s| s.len).sum();
        assert_eq!(expert_bytes, gguf.experts().unwrap().bytes());
    }
}

/// Token embeddings that are the output matrix as well are multiplied with, and must be loaded.
#[test]
fn tables_stay_in_the_file_unless_they_are_tied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("toy.gguf");
    let table = |name: &str| (name.to_owned(), GgmlType::F32, vec![8, 16]);
    let (tokens, layers, output) = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight");
    for (names, expected) in [
        (&[tokens, output][..], &[tokens][..]),
        (&[tokens], &[]),
        (&[tokens, layers], &[layers]),
        (&[layers, output, tokens], &[tokens, layers]),
    ] {
        let all: Vec<_> = names.iter().map(|name| table(name)).collect();
        fs::write(&path, file(builder(32, None), &all)).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        let found: Vec<&str> = gguf.row_tables().map(|table| table.name.as_str()).collect();
        assert_eq!(found, expected);
        let is_left = |i: u32| expected.contains(&gguf.tensors[i as usize].name.as_str());
        let view = gguf.virtual_file().leaving(|tensor, is_expert| is_expert || is_left(tensor));
        let of_tensors = view.segments.iter().filter(|s| s.tensor.is_some());
        assert!(of_tensors.clone().count() == names.len() && view.segments.iter().all(|s| s.source.is_some()));
        assert_eq!(of_tensors.filter(|s| s.in_file).count(), expected.len());
    }
}

/// Merging the shards gives the file that was never split, to the last byte.
#[test]
fn a_split_model_is_merged() {
    let n = tensors().len();
    for sizes in [vec![4, n - 4], vec![0, 3, n - 3], vec![n, 0], vec![1; n]] {
        let dir = tempfile::tempdir().unwrap();
        let paths = write_shards(&dir, &sizes);
        for path in &paths {
            let gguf = Gguf::open(path).unwrap();
            assert_eq!(gguf.files.len(), sizes.len());
            assert_eq!(gguf.architecture(), "toy");
            let view = gguf.virtual_file();
            assert_segments_are_sound(&view);
            assert!(read_all(&gguf, &view, 977) == model(), "{sizes:?}");
            let experts = gguf.experts().unwrap();
            let tensor = &experts.layers[1].tensors[2];
            let extent = tensor.extent(3);
            let file = fs::read(&gguf.files[extent.file as usize].path).unwrap();
            let expected = data(&tensor.name, tensor.slice_bytes * 4);
            assert_eq!(
                file[extent.offset as usize..extent.end() as usize],
                expected[3 * tensor.slice_bytes as usize..]
            );
        }
    }
}

#[test]
fn a_layout_that_llama_cpp_refuses_is_laid_out_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("toy.gguf");
    let mut bytes = model();
    fs::write(&path, &bytes).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    // Move the last tensor 64 bytes on, and its offset (the last field of the header) with it.
    let last = gguf.tensors.last().unwrap().extent;
    let moved = bytes[last.offset as usize..last.end() as usize].to_vec();
    bytes.truncate(last.offset as usize);
    bytes.extend([0xee; 64]);
    bytes.extend(moved);
    let at = gguf.virtual_file().header.len() - 8;
    let offset = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    bytes[at..at + 8].copy_from_slice(&(offset + 64).to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let view = gguf.virtual_file();
    assert_segments_are_sound(&view);
    assert!(read_all(&gguf, &view, u64::MAX) == model());
    let stored = gguf.one_file();
    assert_segments_are_sound(&stored);
    assert!(read_all(&gguf, &stored, 999) == bytes, "one file is shown as it is");
}

#[test]
fn wrong_shards_are_refused() {
    let n = tensors().len();
    let dir = tempfile::tempdir().unwrap();
    let paths = write_shards(&dir, &[4, 2, n - 6]);
    let message = |path: &Path| Gguf::open(path).map(|_| ()).unwrap_err().to_string();
    let sound = fs::read(&paths[1]).unwrap();
    fs::remove_file(&paths[1]).unwrap();
    for path in [&paths[0], &paths[2]] {
        let message = message(path);
        assert!(
            message.contains("shard 2 of 3 is missing") && message.contains("toy-00002-of-00003.gguf"),
            "{message}"
        );
    }
    let mut header = HeaderBuilder::new(32).unwrap();
    let foreign = file(header.clone(), &[]);
    header.key("split.no", 1u16).unwrap().key("split.count", 3u16).unwrap();
    for (second, part) in [
        (fs::read(&paths[2]).unwrap(), "split.no: found 2, expected 1"),
        (foreign, "split.no: found none, expected 1"),
        (file(header.clone(), &[]), "tensors in all shards"),
        (file(header, &tensors()[..2]), "00002-of-00003.gguf: tensor 'blk.0.ffn_up.weight' occurs twice"),
    ] {
        fs::write(&paths[1], second).unwrap();
        assert!(message(&paths[0]).contains(part), "{}", message(&paths[0]));
    }
    fs::write(&paths[1], sound).unwrap();
    assert!(Gguf::open(&paths[0]).is_ok());
    let renamed = dir.path().join("renamed.gguf");
    fs::copy(&paths[0], &renamed).unwrap();
    let message = message(&renamed);
    assert!(message.contains("renamed.gguf") && message.contains("-of-00003.gguf"), "{message}");
}
