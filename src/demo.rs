//! The bundled model that runs when none is named.

use std::path::PathBuf;

use hobbit_common::demo::{self, VARIABLE};

/// Begins a text that the demo model can continue.
pub const PROMPT: &str = "In the beginning God created the";
/// Tokens it generates when no number is given.
pub const PREDICT: i32 = 64;

/// A text beside the demo model that it has never seen.
pub const TEXT: &str = "demo-heldout-prose.txt";

/// The demo model, or the reason why there is none.
pub fn find() -> Result<PathBuf, String> {
    // Releases have the model beside the program.
    or_advice(demo::of_this_process(cfg!(feature = "dynamic-backends"))?)
}

fn or_advice(found: Option<PathBuf>) -> Result<PathBuf, String> {
    found.ok_or_else(|| {
        format!(
            "no model given: give a file with -m FNAME, or let hobbit fetch one of the Hub, for example -hf \
             ggml-org/gpt-oss-20b-GGUF; {VARIABLE} may name hobbit's demo model"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_names_the_remedy() {
        let error = or_advice(None).unwrap_err();
        assert!(error.contains("-m FNAME") && error.contains(VARIABLE), "{error}");
    }
}
