//! Writer, reader, unpacking and verification together, on small models and with a toy quantiser.

mod beside;
mod damage;
mod hostile;
mod links;
mod nested;
mod paths;
mod round_trip;
mod stopping;
mod toy;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use gguf_tools::synth::{self, Format, Spec};

use super::*;
use crate::gguf::{Gguf, Recode};
use toy::Toy;

/// A model of 3 layers with 4 experts.
fn spec() -> Spec {
    Spec {
        embd: 64,
        ff: 96,
        heads: 2,
        experts: 4,
        layers: 3,
        vocab: 300,
        types: vec![Format::F16],
        ..Spec::tiny("qwen3moe")
    }
}

/// Writes the model; of a split one, the first shard's path.
fn model(dir: &Path, spec: &Spec) -> PathBuf {
    let written = synth::write(&dir.join("model.gguf"), spec).unwrap();
    written.files[0].clone()
}

fn quietly(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Full, low versions q8_0 with q2_K for down (which falls back to iq4_nl: rows of 96).
fn low_spec() -> PackSpec<'static> {
    PackSpec { low: Some("q8_0,down=q2_k".parse().unwrap()), threads: 2, ..PackSpec::new(PackKind::Full) }
}

fn pack(model: &Path, out: &Path, spec: &PackSpec<'_>) -> Written {
    write(&Gguf::open(model).unwrap(), out, spec, &Toy, &mut quietly).unwrap_or_else(|error| panic!("{error}"))
}

/// A pack of [`spec`] in `dir`.
fn packed(dir: &Path) -> (PathBuf, Pack) {
    let out = dir.join("pack.gguf");
    pack(&model(dir, &spec()), &out, &low_spec());
    let pack = Pack::open(&out).unwrap();
    (out, pack)
}

fn unpacked(pack: &Pack, dir: &Path) -> Result<Vec<u8>, UnpackError> {
    let out = dir.join("unpacked.gguf");
    unpack(pack, &out, true, &mut |_, _| ControlFlow::Continue(()))?;
    Ok(fs::read(&out).unwrap())
}

fn verified(pack: &Pack) -> Verified {
    verify(pack, &mut |_, _| ControlFlow::Continue(())).unwrap().expect("nobody asked for an end")
}

/// Bytes of an extent in a file held in memory.
fn cut(bytes: &[u8], extent: crate::expert::Extent) -> &[u8] {
    &bytes[extent.offset as usize..extent.end() as usize]
}
