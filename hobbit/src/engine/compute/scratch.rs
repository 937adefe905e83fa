//! Memory of products besides the experts.

use hobbit_core::gguf::ExpertMap;
use hobbit_core::options::SessionOptions;

/// Maximum bytes of gathered rows for one product (more only if one expert alone has more).
pub(in crate::engine) const GATHER_BYTES_MAX: usize = 16 << 20;

/// Bytes that products need besides the experts: gathered rows, their results, and ggml's quantised copies of the rows.
pub(in crate::engine) fn products_bytes(map: &ExpertMap, n_used: u64, options: &SessionOptions) -> u64 {
    let tensors = || map.layers.iter().flat_map(|layer| &layer.tensors);
    let n_in = tensors().map(|tensor| tensor.ne0).max().unwrap_or(0);
    let row = tensors().map(|tensor| (tensor.ne0 + tensor.ne1) * 4).max().unwrap_or(0);
    let n_tokens = u64::from(options.n_ubatch.min(options.n_batch));
    let n_rows = n_tokens.saturating_mul(n_used);
    // One expert may be chosen by every token; groups of several stay below the cap.
    let gathered = n_tokens.saturating_mul(row).max(n_rows.saturating_mul(row).min(GATHER_BYTES_MAX as u64));
    gathered.saturating_add(n_rows.saturating_mul(n_in) / 4 * 5)
}
