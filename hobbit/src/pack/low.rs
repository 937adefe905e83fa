//! A pack's low versions beside another file's high ones.

use super::Pack;
use crate::expert::SliceKind;
use crate::gguf::{Catalog, LowMismatch, VersionSource};

impl Catalog {
    /// Adds the low versions of `pack`; the pack is file number `file`. Layers and experts that the pack has no low
    /// version for get none.
    ///
    /// # Errors
    /// [`LowMismatch`]: a layer, a matrix or a shape that the two do not share; nothing is added then.
    pub fn add_low_pack(&mut self, pack: &Pack, file: u32) -> Result<(), LowMismatch> {
        let theirs = pack.catalog_ref();
        let map = pack.experts();
        for layer in &self.layers {
            let Some(high) = layer.high.first() else { continue };
            let class = &self.classes[usize::from(high.class)];
            let name = |kind: SliceKind| format!("blk.{}.{}.weight", layer.layer, kind.tensor_stem());
            let low = map.layer(layer.layer);
            for slice in &class.slices {
                let expected = format!("[{}, {}, {}]", slice.ne0, slice.ne1, layer.n_expert);
                let found = low.and_then(|low| low.tensor(slice.kind));
                let found =
                    found.map_or("no such tensor".to_owned(), |t| format!("[{}, {}, {}]", t.ne0, t.ne1, t.n_expert));
                if found != expected {
                    return Err(LowMismatch { tensor: name(slice.kind), found, expected });
                }
            }
            let extra = low.into_iter().flat_map(|low| &low.tensors).find(|t| class.slice(t.kind).is_none());
            if let Some(extra) = extra {
                let expected = "no such tensor, as in the model".to_owned();
                return Err(LowMismatch { tensor: extra.name.clone(), found: "a tensor".into(), expected });
            }
        }
        for i in 0..self.layers.len() {
            let Some(theirs_layer) = theirs.layer(self.layers[i].layer) else { continue };
            let low = theirs_layer.low.iter().map(|version| {
                let version = version.as_ref()?;
                let class = self.class(theirs.classes[usize::from(version.class)].clone());
                let mut moved = VersionSource { class, ..version.clone() };
                moved.slices.iter_mut().for_each(|slice| slice.extent.file += file);
                moved.record.iter_mut().for_each(|record| record.file += file);
                Some(moved)
            });
            self.layers[i].low = low.collect();
        }
        Ok(())
    }
}
