//! Changing the type of tensor data: the contract of a recoder, and the errors of its input.

use super::GgmlType;

/// Decodes tensor data to floats and encodes them as another type. Data are whole rows; a row's blocks depend on
/// nothing outside of it, so that rows may be recoded in any grouping.
pub trait Recode: Sync {
    /// Rewrites rows of `n_per_row` elements of type `from` as type `to`; `out` is replaced. Equal types are copied.
    /// `importance` says how much each of the `n_per_row` columns counts, as in llama.cpp's imatrix.
    fn recode(
        &self,
        from: GgmlType,
        to: GgmlType,
        n_per_row: u64,
        bytes: &[u8],
        importance: Option<&[f32]>,
        out: &mut Vec<u8>,
    ) -> Result<(), RecodeError>;

    /// Decodes rows of `n_per_row` elements to floats, finite or not; `out` is replaced.
    fn dequantise(&self, from: GgmlType, n_per_row: u64, bytes: &[u8], out: &mut Vec<f32>) -> Result<(), RecodeError>;

    /// Whether data can be encoded as this type.
    fn supports(&self, to: GgmlType) -> Result<(), RecodeError>;

    /// Whether nothing can be encoded as this type without an importance of each column.
    fn needs_importance(&self, to: GgmlType) -> bool;
}

/// Why tensor data cannot be recoded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RecodeError {
    #[error("type {dtype} cannot be decoded, expected f32, f16, bf16 or a quantised type of model files")]
    NotDecodable { dtype: GgmlType },
    #[error("nothing can be quantised to type {dtype}, expected one like q2_k, q4_k or q8_0")]
    NotEncodable { dtype: GgmlType },
    #[error("rows of {n_per_row} elements do not divide into blocks of type {dtype}, expected a multiple of {}; \
        choose another type", dtype.block_size())]
    RowLength { dtype: GgmlType, n_per_row: u64 },
    #[error("{found} bytes of type {dtype}, expected whole rows of {row_bytes} bytes ({n_per_row} elements)")]
    DataLength { dtype: GgmlType, n_per_row: u64, row_bytes: u64, found: u64 },
    #[error("{rows} rows of {n_per_row} elements of type {dtype} are more than this machine can address")]
    TooLarge { dtype: GgmlType, n_per_row: u64, rows: u64 },
    #[error("type {dtype} needs an importance matrix")]
    ImportanceMissing { dtype: GgmlType },
    #[error("the importance matrix has {found} values for a row of {expected}; it was made from another model")]
    ImportanceLength { found: u64, expected: u64 },
    #[error(
        "column {column} has importance {value}, expected 0 to {:e}; compute the importance matrix again",
        IMPORTANCE_MAX
    )]
    ImportanceValue { column: u64, value: f32 },
    #[error(
        "row {row}, column {column} is {value}, expected a finite number; the model is damaged, fetch or convert it \
            again"
    )]
    NotFinite { row: u64, column: u64, value: f32 },
    #[error("row {row}, column {column} is {value}, expected at most {limit} for type {dtype}; choose a wider type")]
    OutOfRange { dtype: GgmlType, row: u64, column: u64, value: f32, limit: f32 },
    #[error("rows {row} to {} quantised to type {dtype} are not finite; choose another type", row + rows - 1)]
    Invalid { dtype: GgmlType, row: u64, rows: u64 },
}

/// Greatest importance of a column: its square still fits into the sums of ggml's quantisers.
pub(crate) const IMPORTANCE_MAX: f32 = 1e18;

/// Number of rows in `len` bytes, and bytes of a row.
pub fn count_rows(dtype: GgmlType, n_per_row: u64, len: usize) -> Result<(u64, u64), RecodeError> {
    let row_bytes = dtype.row_bytes(n_per_row).filter(|bytes| *bytes > 0);
    let row_bytes = row_bytes.ok_or(RecodeError::RowLength { dtype, n_per_row })?;
    if (len as u64).is_multiple_of(row_bytes) {
        Ok((len as u64 / row_bytes, row_bytes))
    } else {
        Err(RecodeError::DataLength { dtype, n_per_row, row_bytes, found: len as u64 })
    }
}

pub fn check_importance(importance: &[f32], n_per_row: u64) -> Result<(), RecodeError> {
    if importance.len() as u64 != n_per_row {
        return Err(RecodeError::ImportanceLength { found: importance.len() as u64, expected: n_per_row });
    }
    match importance.iter().position(|value| !(0.0..=IMPORTANCE_MAX).contains(value)) {
        Some(column) => Err(RecodeError::ImportanceValue { column: column as u64, value: importance[column] }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_rows_are_counted() {
        assert_eq!(count_rows(GgmlType::Q8_0, 64, 68 * 3), Ok((3, 68)));
        assert_eq!(count_rows(GgmlType::Q8_0, 64, 0), Ok((0, 68)));
        let found = 69;
        let expected = RecodeError::DataLength { dtype: GgmlType::Q8_0, n_per_row: 64, row_bytes: 68, found };
        assert_eq!(count_rows(GgmlType::Q8_0, 64, 69), Err(expected));
        for n_per_row in [0, 33, u64::MAX] {
            let expected = RecodeError::RowLength { dtype: GgmlType::Q8_0, n_per_row };
            assert_eq!(count_rows(GgmlType::Q8_0, n_per_row, 68), Err(expected));
        }
    }

    #[test]
    fn importance_is_a_finite_mean_of_squares() {
        assert_eq!(check_importance(&[0.0, 1e18], 2), Ok(()));
        assert_eq!(check_importance(&[1.0], 2), Err(RecodeError::ImportanceLength { found: 1, expected: 2 }));
        for value in [-1.0, 2e18, f32::INFINITY] {
            assert_eq!(check_importance(&[1.0, value], 2), Err(RecodeError::ImportanceValue { column: 1, value }));
        }
        assert!(check_importance(&[f32::NAN], 1).is_err());
    }
}
