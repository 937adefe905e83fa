//! `--max-loss`: from a loss that may be given up to settings that were measured to stay below.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};

use hobbit::gguf::Gguf;
use hobbit::options::ModelOptions;
use hobbit::pack::Pack;
use hobbit::profile::{MeasuredMix, Mixes, Profile, RUNS_MAX, beside};
use hobbit::units::Percent;

/// The options with the cheapest mix of the model's profile whose loss stays below `max_loss`, a share.
///
/// # Errors
/// No profile beside the model, one of another model, or one without mixes: each with the command that makes it, and what that takes.
pub fn keep(options: ModelOptions, model: &Path, max_loss: f64) -> Result<ModelOptions> {
    let path = beside(model);
    let percent = in_percent(max_loss);
    let make = || {
        format!(
            "make one with: gguf-tools profile {} --text FILE --max-loss {percent}% --no-widths -o {} (some {} runs over half of the \
             text, token by token: with its 4096 tokens as long as generating {} takes here)",
            model.display(),
            path.display(),
            RUNS_MAX + 2,
            (RUNS_MAX + 2) * 2048,
        )
    };
    if !path.exists() {
        bail!(
            "--max-loss {percent}%: there is no profile {} that says what this model tolerates; {}",
            path.display(),
            make()
        );
    }
    let profile = Profile::read(&path).with_context(|| format!("--max-loss {percent}%"))?;
    let gguf = Gguf::open(model)?;
    let is_pack = Pack::is_pack(&gguf);
    if !is_pack {
        let checked = profile.check_model(&gguf, &gguf.experts()?);
        checked.map_err(|error| anyhow!("--max-loss {percent}%: {error}; {}", make()))?;
    }
    let has_low = options.low.is_some() || is_pack && Pack::open(model)?.catalog.has_low();
    let Some(mixes) = &profile.mixes else {
        bail!("--max-loss {percent}%: {} has no mixes; {}", path.display(), make());
    };
    Ok(apply(options, mixes, max_loss, has_low))
}

/// Without needless digits: `0.5`.
pub fn in_percent(share: f64) -> f64 {
    (share * 1e6).round() / 1e4
}

fn apply(mut options: ModelOptions, mixes: &Mixes, max_loss: f64, has_low: bool) -> ModelOptions {
    let chosen = mixes.cheapest(max_loss, has_low).copied();
    options.routing.promise = Some(words(mixes, max_loss, chosen.as_ref()));
    if let Some(MeasuredMix { mix, .. }) = chosen {
        options.routing = options.routing.with(mix);
        if has_low {
            (options.precision.t1, options.precision.t2) = (Some(mix.t1), Some(mix.t2));
        }
    } else if has_low {
        (options.precision.t1, options.precision.t2) = (Some(1.0), Some(1.0));
    }
    options
}

/// What was chosen, and by what.
fn words(mixes: &Mixes, max_loss: f64, chosen: Option<&MeasuredMix>) -> String {
    let Some(MeasuredMix { mix, loss, error, bytes_per_token }) = chosen else {
        return format!("max loss {}: nothing that was measured stays below, nothing is given up", Percent(max_loss));
    };
    format!(
        "max loss {}: {} was measured at {:+.2} +- {:.2} on {}, reading {:.0} of exact's bytes with {:.0} of the experts in memory",
        Percent(max_loss),
        mix.words(),
        Percent(*loss),
        Percent(*error),
        mixes.text,
        Percent(bytes_per_token / mixes.exact_bytes_per_token.max(1.0)),
        Percent(mixes.cache_share)
    )
}

#[cfg(test)]
mod tests {
    use hobbit::profile::Mix;

    use super::*;

    fn mixes() -> Mixes {
        let one = |cache_bias, t1, loss, bytes_per_token| MeasuredMix {
            mix: Mix { cache_bias, t1, ..Mix::EXACT },
            loss,
            error: 0.001,
            bytes_per_token,
        };
        Mixes {
            text: "prose.txt".into(),
            text_sha256: String::new(),
            tokens: 2048,
            expert_cache: "25%".into(),
            cache_share: 0.25,
            low: Some("q2_k".into()),
            exact_bytes_per_token: 1000.0,
            mixes: vec![one(0.2, 0.6, 0.009, 300.0), one(0.2, 1.0, 0.006, 450.0), one(0.1, 1.0, 0.002, 700.0)],
        }
    }

    #[test]
    fn the_cheapest_that_keeps_it_is_taken_and_named() {
        let of = |max_loss, has_low| apply(ModelOptions::default(), &mixes(), max_loss, has_low);
        let low = of(0.01, true);
        assert_eq!((low.routing.cache_bias, low.precision.t1, low.precision.t2), (0.2, Some(0.6), Some(1.0)));
        let high = of(0.01, false);
        assert_eq!((high.routing.cache_bias, high.precision.t1), (0.2, None));
        assert_eq!(
            high.routing.promise.as_deref(),
            Some(
                "max loss 1.0 %: --cache-bias 0.2 --keep-top 1 was measured at +0.60 % +- 0.10 % on prose.txt, reading 45 % of \
                 exact's bytes with 25 % of the experts in memory"
            )
        );
        assert_eq!(of(0.005, true).routing.cache_bias, 0.1, "with its standard error");
        let none = of(0.002, true);
        assert_eq!((none.routing.is_off(), none.precision.t1), (true, Some(1.0)));
        assert!(none.routing.promise.unwrap().ends_with("nothing is given up"));
    }

    #[test]
    fn without_a_profile_the_command_that_makes_it_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let model = directory.path().join("a.gguf");
        let error = keep(ModelOptions::default(), &model, 0.01).unwrap_err().to_string();
        assert!(error.contains("a.profile.json") && error.contains("gguf-tools profile"), "{error}");
        assert!(error.contains("--max-loss 1%") && error.contains("37 runs"), "{error}");
    }
}
