//! Architectures with recurrent layers beside attention, or with experts of a latent input, as data.

use super::arch::Arch;

#[rustfmt::skip]
pub(super) const ARCHS: &[Arch] = &[
];
