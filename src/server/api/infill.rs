//! `/infill`: a text with a gap.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use hobbit::options::Token;
use serde_json::Value;

use super::params::Params;
use super::{Fields, get, native, prompts, text};
use crate::server::app::App;
use crate::server::error::ApiError;
use crate::server::http::Body;

/// `POST /infill`
pub async fn infill(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let read = || Ok::<_, ApiError>((prompt(&app, &body)?, Params::of(&body, &app)?));
    let (prompt, params) = app.work(read).await?;
    prompts::check(params.n, &app)?;
    drop(body);
    native::complete(&app, params, vec![prompt.into()], held).await
}

/// The prompt for a text with a gap.
fn prompt(app: &App, body: &Fields) -> Result<Vec<Token>, ApiError> {
    let loaded = app.loaded()?;
    let model = &loaded.model;
    let special = model.special_tokens();
    let (Some(prefix_token), Some(suffix_token), Some(middle_token)) =
        (special.fim_prefix, special.fim_suffix, special.fim_middle)
    else {
        let tokens = [(special.fim_prefix, "prefix"), (special.fim_suffix, "suffix"), (special.fim_middle, "middle")];
        let missing = tokens.iter().filter(|(token, _)| token.is_none());
        let missing: String = missing.map(|(_, name)| format!("{name} token is missing. ")).collect();
        return Err(ApiError::unsupported(format!("Infill is not supported by this model: {missing}")));
    };
    let plain = |text: &str| prompts::encode(model, text, false, false);
    let input = |name: &str| text(body, name)?.ok_or_else(|| ApiError::invalid(format!("\"{name}\" is required")));
    let prompt = prompts::tokens(model, text(body, "prompt")?.unwrap_or_default(), false)?;
    let (prefix, suffix) = (plain(input("input_prefix")?)?, plain(input("input_suffix")?)?);
    let mut extra = Vec::new();
    if let Some(token) = special.fim_repository {
        extra.push(token);
        extra.extend(plain("myproject\n")?);
    }
    let chunks = match get(body, "input_extra") {
        None => &[][..],
        Some(Value::Array(chunks)) => chunks,
        Some(_) => {
            let message = "\"input_extra\" must be an array of {\"filename\": string, \"text\": string}";
            return Err(ApiError::invalid(message));
        }
    };
    for chunk in chunks {
        let text = chunk.get("text").and_then(Value::as_str).ok_or_else(|| {
            ApiError::invalid("extra_context chunk must contain a \"text\" field with a string value")
        })?;
        let name = chunk.get("filename").map_or(Some("tmp"), Value::as_str);
        let name =
            name.ok_or_else(|| ApiError::invalid("extra_context chunk's \"filename\" field must be a string"))?;
        extra.extend(special.fim_separator);
        match special.fim_separator {
            Some(_) => extra.extend(plain(&format!("{name}\n"))?),
            None => extra.extend(plain("\n\n--- snippet ---\n\n")?),
        }
        extra.extend(plain(text)?);
    }
    if let Some(token) = special.fim_separator {
        extra.push(token);
        extra.extend(plain("filename\n")?);
    }
    // As llama-server divides a batch: the text nearest to the gap is kept.
    let n_prefix = prefix.len().min(3 * (loaded.n_batch / 4));
    let n_suffix = suffix.len().min((loaded.n_batch / 4).saturating_sub(2 + prompt.len()));
    let n_predict = body.get("n_predict").and_then(Value::as_u64).unwrap_or(0) as usize;
    let n_extra = extra.len().min(loaded.n_ctx.saturating_sub(loaded.n_batch + 2 * n_predict));
    let before = [&[prefix_token], &prefix[prefix.len() - n_prefix..], &prompt].concat();
    let after = [&[suffix_token], &suffix[..n_suffix]].concat();
    let mut all = extra[extra.len() - n_extra..].to_vec();
    if model.adds_bos() {
        all.extend(special.bos);
    }
    let parts = if app.settings.spm_infill { [after, before] } else { [before, after] };
    all.extend(parts.concat());
    all.push(middle_token);
    Ok(all)
}
