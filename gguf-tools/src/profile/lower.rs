//! A model's experts at one width, in a temporary file that the engine takes as low-precision versions.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Read as _, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use hobbit::engine::Ggml;
use hobbit::expert::SliceKind;
use hobbit::gguf::Recode;
use hobbit::gguf::writer::Layout;
use hobbit::gguf::{ExpertMap, ExpertTensor, GgmlType, Gguf, HeaderBuilder, Value};
use hobbit::pack::imatrix::Imatrix;
use hobbit::pack::slice_name;
use hobbit::profile::{SliceError, SliceTypes, output_error};

use crate::bar::Bar;

/// What quantising needs to know.
pub struct Source<'a> {
    pub gguf: &'a Gguf,
    pub map: &'a ExpertMap,
    pub imatrix: Option<&'a Imatrix>,
    pub threads: usize,
}

/// The experts at one width, and how far their weights are from the model's.
pub struct Lowered {
    pub path: PathBuf,
    /// By layer.
    pub types: HashMap<u16, SliceTypes>,
    /// See [`output_error`], by layer and expert.
    pub errors: HashMap<u16, Vec<f64>>,
}

/// Keys that the engine compares, beside the number of tokens in the vocabulary.
const KEYS: [&str; 4] = ["block_count", "embedding_length", "expert_count", "expert_used_count"];
const VOCABULARY: &str = "tokenizer.ggml.tokens";

impl Source<'_> {
    /// Whether anything gets smaller at this width.
    pub fn lowers(&self, width: GgmlType) -> bool {
        self.map.layers.iter().any(|layer| SliceTypes::lowered(layer, width) != SliceTypes::own(layer))
    }

    /// Writes the experts at `width` into `directory`. Memory: a slice and its floats per thread.
    ///
    /// # Errors
    /// A source that cannot be read or quantised, a directory without room.
    pub fn lower(&self, width: GgmlType, directory: &Path) -> anyhow::Result<Lowered> {
        let types: HashMap<u16, SliceTypes> =
            self.map.layers.iter().map(|layer| (layer.layer, SliceTypes::lowered(layer, width))).collect();
        let layout = self.layout(&types)?;
        let tensors: HashMap<&str, (u16, &ExpertTensor)> = (self.map.layers.iter())
            .flat_map(|layer| layer.tensors.iter().map(|tensor| (tensor.name.as_str(), (layer.layer, tensor))))
            .collect();
        let n_slices: u64 = tensors.values().map(|(_, tensor)| u64::from(tensor.n_expert)).sum();
        let bar = Bar::of_units(format!("quantising to {width}"), n_slices)?;

        let path = directory.join(format!("{}.gguf", width.name()));
        let failed = || format!("{}: cannot write {} bytes; choose another --temp-dir", path.display(), layout.len);
        let mut out = BufWriter::new(File::create(&path).with_context(failed)?);
        let mut experts: HashMap<u16, Vec<Vec<(SliceKind, SliceError)>>> = HashMap::new();
        let written = layout.write(&mut out, |plan, out| {
            let Some(&(layer, tensor)) = tensors.get(plan.name.as_str()) else {
                return self.copy(&plan.name, out);
            };
            let errors = self.write_slices(tensor, plan.dtype, out, &bar).map_err(io::Error::other)?;
            let experts = experts.entry(layer).or_insert_with(|| vec![Vec::new(); errors.len()]);
            experts.iter_mut().zip(errors).for_each(|(slices, error)| slices.push((tensor.kind, error)));
            Ok(())
        });
        written.with_context(failed)?;
        let of_layer =
            |(layer, experts): (u16, Vec<Vec<_>>)| (layer, experts.iter().map(|s| output_error(s)).collect());
        let errors = experts.into_iter().map(of_layer).collect();
        Ok(Lowered { path, types, errors })
    }

    fn layout(&self, types: &HashMap<u16, SliceTypes>) -> anyhow::Result<Layout> {
        let architecture = self.gguf.architecture();
        let mut header = HeaderBuilder::new(self.gguf.alignment)?;
        header.key("general.architecture", architecture.to_owned())?;
        for key in KEYS.map(|key| format!("{architecture}.{key}")) {
            if let Some(value) = self.gguf.metadata.get_u64(&key) {
                header.key(&key, value)?;
            }
        }
        if let Some(n) = self.gguf.metadata.get_arr_len(VOCABULARY) {
            header.key(VOCABULARY, Value::array(vec![0u8; usize::try_from(n)?]))?;
        }
        for tensor in self.gguf.tensors.iter().filter(|tensor| is_router(&tensor.name)) {
            header.tensor(&tensor.name, tensor.dtype, &tensor.dims)?;
        }
        for layer in &self.map.layers {
            for tensor in &layer.tensors {
                let dtype = types[&layer.layer].get(tensor.kind).unwrap_or(tensor.dtype);
                header.tensor(&tensor.name, dtype, &[tensor.ne0, tensor.ne1, u64::from(tensor.n_expert)])?;
            }
        }
        Ok(header.finish())
    }

    fn copy(&self, name: &str, out: &mut dyn Write) -> io::Result<()> {
        let tensor = self.gguf.tensor(name).ok_or_else(|| io::Error::other(format!("no tensor '{name}'")))?;
        let mut file = File::open(&self.gguf.files[tensor.extent.file as usize].path)?;
        file.seek(SeekFrom::Start(tensor.extent.offset))?;
        io::copy(&mut file.take(tensor.extent.len), out).map(drop)
    }

    /// All experts' slices of one tensor, as many at a time as there are threads; their errors.
    fn write_slices(
        &self,
        tensor: &ExpertTensor,
        to: GgmlType,
        out: &mut dyn Write,
        bar: &Bar,
    ) -> anyhow::Result<Vec<SliceError>> {
        let path = &self.gguf.files[tensor.file as usize].path;
        let file = File::open(path).with_context(|| format!("{}: cannot open", path.display()))?;
        let experts: Vec<u16> = (0..tensor.n_expert as u16).collect();
        let mut errors = Vec::new();
        for group in experts.chunks(self.threads.max(1)) {
            let done: Vec<anyhow::Result<(Vec<u8>, SliceError)>> = std::thread::scope(|scope| {
                let recode = |&expert: &u16| {
                    let file = &file;
                    scope.spawn(move || self.recode(file, tensor, expert, to))
                };
                let workers: Vec<_> = group.iter().map(recode).collect();
                let join = |worker: std::thread::ScopedJoinHandle<'_, _>| {
                    worker.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a quantising thread panicked")))
                };
                workers.into_iter().map(join).collect()
            });
            for (expert, done) in group.iter().zip(done) {
                let (bytes, error) =
                    done.with_context(|| format!("{}: tensor '{}', expert {expert}", path.display(), tensor.name))?;
                out.write_all(&bytes)?;
                errors.push(error);
                bar.step()?;
            }
        }
        Ok(errors)
    }

    fn recode(
        &self,
        file: &File,
        tensor: &ExpertTensor,
        expert: u16,
        to: GgmlType,
    ) -> anyhow::Result<(Vec<u8>, SliceError)> {
        let extent = tensor.extent(expert);
        let mut bytes = vec![0; usize::try_from(extent.len)?];
        file.read_exact_at(&mut bytes, extent.offset)?;
        let columns = match self.imatrix {
            Some(imatrix) => imatrix.importance(&tensor.name, tensor.ne0, tensor.n_expert, expert)?,
            None => None,
        };
        let ggml = Ggml;
        let (mut lowered, mut original, mut recoded) = (Vec::new(), Vec::new(), Vec::new());
        ggml.recode(tensor.dtype, to, tensor.ne0, &bytes, columns.as_deref(), &mut lowered)?;
        ggml.dequantise(tensor.dtype, tensor.ne0, &bytes, &mut original)?;
        ggml.dequantise(to, tensor.ne0, &lowered, &mut recoded)?;
        let mut error = SliceError::default();
        error.add(&original, &recoded, columns.as_deref());
        Ok((lowered, error))
    }
}

/// The routers' tensors, which the engine compares; not the gate of shared experts.
fn is_router(name: &str) -> bool {
    let part = || name.strip_prefix("blk.")?.split('.').nth(1);
    matches!(part(), Some("ffn_gate_inp" | "exp_probs_b"))
}

/// `down:q3_K gate:q2_K`, or one name where all are equal.
pub fn describe(types: &SliceTypes) -> String {
    let named: Vec<_> = types.iter().collect();
    if let Some((_, first)) = named.first()
        && named.iter().all(|(_, dtype)| dtype == first)
    {
        return first.name().to_owned();
    }
    named.iter().map(|(kind, dtype)| format!("{}:{dtype}", slice_name(*kind))).collect::<Vec<_>>().join(" ")
}
