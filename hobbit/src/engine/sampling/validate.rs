//! Limits on the settings of a sampler.

use crate::engine::error::Error;
use hobbit_core::options::SamplingOptions;

/// Maximum tokens that penalties may look back over: bounds the memory that one number can claim (64 MiB).
const LOOK_BACK_TOKENS_MAX: i32 = 1 << 24;

/// Maximum texts that end repetitions (DRY): the whole vocabulary is searched for each.
const SEQUENCE_BREAKERS_MAX: usize = 64;

/// Maximum of their bytes together.
const SEQUENCE_BREAKER_BYTES_MAX: usize = 4 << 10;

/// Refuses settings that would make llama.cpp abort, exhaust memory or choose at random.
pub(super) fn validate(options: &SamplingOptions) -> Result<(), Error> {
    let fail = |setting: &str, expected: &str, found: &dyn std::fmt::Display| {
        Err(Error::Sampling(format!("{setting} must be {expected}, not {found}")))
    };
    let penalty = options.repeat_penalty;
    if !penalty.is_finite() || penalty <= 0.0 || !(1.0 / penalty).is_finite() {
        return fail("repeat_penalty", "finite and greater than 0", &penalty);
    }
    for (setting, value) in [
        ("frequency_penalty", options.frequency_penalty),
        ("presence_penalty", options.presence_penalty),
        ("dry_multiplier", options.dry.multiplier),
        ("dry_base", options.dry.base),
    ] {
        if !value.is_finite() {
            return fail(setting, "finite", &value);
        }
    }
    for (setting, value) in [
        ("temp", options.temp),
        ("dynatemp_range", options.dynatemp_range),
        ("dynatemp_exponent", options.dynatemp_exponent),
        ("top_p", options.top_p),
        ("min_p", options.min_p),
        ("typical_p", options.typical_p),
        ("top_n_sigma", options.top_n_sigma),
        ("xtc_probability", options.xtc.probability),
        ("xtc_threshold", options.xtc.threshold),
        ("adaptive_target", options.adaptive_target),
        ("adaptive_decay", options.adaptive_decay),
        ("mirostat_tau", options.mirostat.tau),
        ("mirostat_eta", options.mirostat.eta),
    ] {
        if value.is_nan() {
            return fail(setting, "a number", &value);
        }
    }
    for (setting, tokens) in
        [("repeat_last_n", options.repeat_last_n), ("dry_penalty_last_n", options.dry.penalty_last_n)]
    {
        if tokens > LOOK_BACK_TOKENS_MAX {
            return fail(setting, &format!("at most {LOOK_BACK_TOKENS_MAX} tokens"), &tokens);
        }
    }
    // Each sampler has its own memory and its own pass over the vocabulary.
    for (at, kind) in options.samplers.iter().enumerate() {
        if options.samplers[..at].contains(kind) {
            return fail("samplers", "samplers of different names", &format!("{} twice", kind.name()));
        }
    }
    let breakers = &options.dry.sequence_breakers;
    if breakers.len() > SEQUENCE_BREAKERS_MAX {
        let expected = format!("at most {SEQUENCE_BREAKERS_MAX} texts");
        return fail("dry_sequence_breakers", &expected, &breakers.len());
    }
    let n_bytes: usize = breakers.iter().map(String::len).sum();
    if n_bytes > SEQUENCE_BREAKER_BYTES_MAX {
        let expected = format!("at most {SEQUENCE_BREAKER_BYTES_MAX} bytes together");
        return fail("dry_sequence_breakers", &expected, &n_bytes);
    }
    if options.mirostat.version > 2 {
        return fail("mirostat", "0, 1 or 2", &options.mirostat.version);
    }
    for (token, bias) in &options.logit_bias {
        if bias.is_nan() || *bias == f32::INFINITY {
            return fail(&format!("the logit bias of token {token}"), "below infinity (-inf excludes a token)", bias);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::options::SamplerKind;

    fn refusal(change: impl FnOnce(&mut SamplingOptions)) -> String {
        let mut options = SamplingOptions::default();
        change(&mut options);
        validate(&options).unwrap_err().to_string()
    }

    #[test]
    fn defaults_and_extremes_are_valid() {
        for options in [SamplingOptions::default(), SamplingOptions::greedy()] {
            assert!(validate(&options).is_ok());
        }
        let extreme = SamplingOptions {
            temp: f32::INFINITY,
            repeat_last_n: -1,
            top_p: -1.0,
            logit_bias: vec![(-5, f32::NEG_INFINITY), (i32::MAX, 1e30)],
            ..SamplingOptions::default()
        };
        assert!(validate(&extreme).is_ok());
    }

    #[test]
    fn refusals_name_the_setting_and_the_value() {
        for value in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-39] {
            let message = refusal(|o| o.repeat_penalty = value);
            assert!(message.contains("repeat_penalty must be finite and greater than 0"), "{message}");
        }
        let refusals = [
            (refusal(|o| o.presence_penalty = f32::INFINITY), "presence_penalty must be finite, not inf"),
            (refusal(|o| o.frequency_penalty = f32::NAN), "frequency_penalty must be finite, not NaN"),
            (refusal(|o| o.temp = f32::NAN), "temp must be a number, not NaN"),
            (refusal(|o| o.repeat_last_n = i32::MAX), "repeat_last_n must be at most 16777216 tokens, not 2147483647"),
            (refusal(|o| o.dry.penalty_last_n = i32::MAX), "dry_penalty_last_n must be at most 16777216 tokens"),
            (
                refusal(|o| o.samplers = vec![SamplerKind::TopK, SamplerKind::Dry, SamplerKind::TopK]),
                "samplers must be samplers of different names, not top_k twice",
            ),
            (
                refusal(|o| o.dry.sequence_breakers = vec!["a".to_owned(); 65]),
                "dry_sequence_breakers must be at most 64 texts, not 65",
            ),
            (
                refusal(|o| o.dry.sequence_breakers = vec!["a".repeat(1 << 20)]),
                "dry_sequence_breakers must be at most 4096 bytes together",
            ),
            (refusal(|o| o.mirostat.version = 3), "mirostat must be 0, 1 or 2, not 3"),
            (refusal(|o| o.logit_bias = vec![(7, f32::INFINITY)]), "the logit bias of token 7 must be below infinity"),
        ];
        for (message, expected) in refusals {
            assert!(message.starts_with("cannot sample: ") && message.contains(expected), "{message}");
        }
    }
}
