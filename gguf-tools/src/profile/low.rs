//! Low-precision versions of a model's experts to measure with: given as a file, or made in a temporary directory.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use hobbit::engine::Ggml;
use hobbit_common::output::tell;
use hobbit_core::gguf::{ExpertMap, GgmlType, Gguf, Recode};
use hobbit_core::pack::imatrix::Imatrix;
use hobbit_core::pack::{self, PackKind, PackSpec};
use hobbit_core::profile::SliceTypes;

use crate::shared::Bar;

/// Low-precision versions that the model is opened with.
#[derive(Clone, Debug)]
pub enum LowVersions {
    File(PathBuf),
    /// In the pack itself.
    Own,
}

/// A model whose experts can be lowered.
pub struct Source<'a> {
    pub gguf: &'a Gguf,
    pub map: &'a ExpertMap,
    pub is_pack: bool,
    pub imatrix: Option<&'a Imatrix>,
    pub threads: usize,
    pub directory: &'a Path,
}

impl Source<'_> {
    fn lowers(&self, width: GgmlType) -> bool {
        self.map.layers.iter().any(|layer| SliceTypes::lowered(layer, width) != SliceTypes::own(layer))
    }

    /// The widths that make anything smaller, widest first.
    pub fn widths(&self, asked: &[GgmlType]) -> anyhow::Result<Vec<GgmlType>> {
        let mut widths = Vec::new();
        for &dtype in asked {
            Ggml.supports(dtype).context("--widths")?;
            ensure!(
                self.imatrix.is_some() || !Ggml.needs_importance(dtype),
                "--widths {dtype}: this type needs an importance matrix; give --imatrix, or choose a type like q2_k"
            );
            if self.lowers(dtype) {
                widths.push(dtype);
            } else {
                tell(format_args!("note: --widths {dtype}: not smaller than the model's experts, left out"));
            }
        }
        ensure!(
            !widths.is_empty(),
            "--widths: none is smaller than the model's experts; give smaller ones, or --no-widths"
        );
        let bits = |dtype: &GgmlType| (dtype.type_size() * 256 / dtype.block_size(), dtype.id());
        widths.sort_by_key(|dtype| std::cmp::Reverse(bits(dtype)));
        widths.dedup();
        Ok(widths)
    }

    /// The versions for `--low`: of a file, or made in the type named, else in the smallest width.
    pub fn low(&self, asked: Option<&str>, smallest: Option<GgmlType>) -> anyhow::Result<LowVersions> {
        let dtype = match asked.map(|word| (word, Path::new(word))) {
            Some((_, path)) if path.exists() => return Ok(LowVersions::File(path.to_owned())),
            Some((word, _)) => match GgmlType::from_name(word) {
                Some(dtype) => dtype,
                None => bail!(
                    "--low {word}: neither a file nor a type; give a GGUF of the model in a smaller quant, or q2_k"
                ),
            },
            None => smallest.context(
                "--no-widths leaves no type for low-precision experts; give --low FILE, or a type such as --low q2_k",
            )?,
        };
        ensure!(
            !self.is_pack,
            "--low {dtype}: low versions are not made of a pack; give a GGUF of the model in a smaller quant, or make \
             a pack with --low"
        );
        Ggml.supports(dtype).context("--low")?;
        ensure!(self.lowers(dtype), "--low {dtype}: not smaller than the model's experts; give a smaller type");
        Ok(LowVersions::File(self.lower(dtype)?))
    }

    /// Writes all experts at `width` into the temporary directory.
    pub fn lower(&self, width: GgmlType) -> anyhow::Result<PathBuf> {
        let path = self.directory.join(format!("{}.gguf", width.name()));
        let low = width.name().parse().context("--widths")?;
        let spec = PackSpec {
            low: Some(low),
            importance: self.imatrix,
            threads: self.threads,
            force: true,
            ..PackSpec::new(PackKind::Low)
        };
        let stage = format!("to {width}");
        let mut bar = Bar::new()?;
        pack::write(self.gguf, &path, &spec, &Ggml, &mut |now| bar.show(&stage, now.done, now.total))
            .with_context(|| format!("--temp-dir {}", self.directory.display()))?;
        Ok(path)
    }
}
