//! For builds without ggml.

use crate::gguf::{GgmlType, Recode, RecodeError};

/// No quantiser: a pack made with it holds the source's types.
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyOnly;

impl Recode for CopyOnly {
    fn recode(
        &self,
        _from: GgmlType,
        to: GgmlType,
        _n_per_row: u64,
        _bytes: &[u8],
        _importance: Option<&[f32]>,
        _out: &mut Vec<u8>,
    ) -> Result<(), RecodeError> {
        self.supports(to)
    }

    fn dequantise(
        &self,
        from: GgmlType,
        _n_per_row: u64,
        _bytes: &[u8],
        _out: &mut Vec<f32>,
    ) -> Result<(), RecodeError> {
        Err(RecodeError::NotDecodable { dtype: from })
    }

    fn supports(&self, to: GgmlType) -> Result<(), RecodeError> {
        Err(RecodeError::NotEncodable { dtype: to })
    }

    fn needs_importance(&self, _to: GgmlType) -> bool {
        false
    }
}
