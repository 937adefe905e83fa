//! Architectures with sparse attention, hashed routes, multi-token prediction or per-layer tables, as data.

use super::arch::Arch;

#[rustfmt::skip]
pub(super) const ARCHS: &[Arch] = &[
];
