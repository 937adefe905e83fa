//! Default context length.

/// Minimum tokens of a default context, if the model was trained on as many: llama.cpp's own minimum when it fits a
/// context to memory (`--fit-ctx`).
pub const CONTEXT_TOKENS_MIN: u32 = 4096;

/// A default context takes at most one part in this many of the memory. Experts get the rest, because each of their
/// bytes is used more often.
const PART: u64 = 8;

/// Default context length of a model that was trained on `trained` tokens and does not fit in `room` bytes together
/// with all of them. Each token takes `token_bytes`. The context is as many tokens as an eighth of the room holds, in
/// steps of 256.
pub fn context_tokens(trained: u32, token_bytes: u64, room: u64) -> u32 {
    let most = u32::try_from((room / PART).checked_div(token_bytes).unwrap_or(u64::MAX)).unwrap_or(u32::MAX);
    (most / 256 * 256).max(CONTEXT_TOKENS_MIN).min(trained)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn an_eighth_of_the_room() {
        // Qwen3-30B-A3B: 48 layers, 4 heads of 128 for keys and for values, 2 bytes each.
        let token_bytes = 48 * 4 * 256 * 2;
        let of = |gib| context_tokens(40960, token_bytes, gib * GIB);
        assert_eq!([4, 6, 8, 64].map(of), [5376, 8192, 10752, 40960]);
        assert_eq!(of(1), 4096, "fewer are no context");
        assert_eq!(context_tokens(2048, token_bytes, GIB), 2048, "more than it was trained on is for who asks for it");
        assert_eq!(context_tokens(1 << 20, 0, GIB), 1 << 20);
    }
}
