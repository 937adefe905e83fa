//! The quantiser of this build.

use hobbit_core::gguf::Recode;

/// Whether it can change types.
pub const QUANTISES: bool = cfg!(feature = "engine");

/// ggml's.
///
/// # Errors
/// ggml cannot be started.
#[cfg(feature = "engine")]
pub fn recoder() -> anyhow::Result<Box<dyn Recode>> {
    Ok(Box::new(hobbit::engine::Ggml))
}

/// No quantiser: experts are packed with the types they have.
///
/// # Errors
/// Never.
#[cfg(not(feature = "engine"))]
pub fn recoder() -> anyhow::Result<Box<dyn Recode>> {
    Ok(Box::new(hobbit_core::gguf::CopyOnly))
}
