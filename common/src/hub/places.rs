//! Endpoint, cache directories and token, from the variables that the Hub's own client and llama.cpp read.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The default endpoint.
pub const HUB: &str = "https://huggingface.co";

/// A secret that no log shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    pub fn new(text: &str) -> Result<Self, String> {
        let is_sound = !text.is_empty() && text.len() <= 1024 && text.bytes().all(|b| b.is_ascii_graphic());
        is_sound.then(|| Self(text.to_owned())).ok_or_else(|| "expected a token such as hf_...".to_owned())
    }

    /// The text as typed; it is checked when a model is fetched.
    pub fn typed(text: &str) -> Result<Self, std::convert::Infallible> {
        Ok(Self(text.trim().to_owned()))
    }

    /// The header's value.
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(...)")
    }
}

/// The flag for a token of the Hub.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TokenArgs {
    /// Token for private and gated repositories (default: the one that `hf auth login` keeps)
    #[arg(long, value_name = "TOKEN", env = "HF_TOKEN", hide_env_values = true, value_parser = Token::typed)]
    pub hf_token: Option<Token>,
}

/// The sources of models, and the places to store them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// URL of the Hub, or of one like it, without a slash at its end.
    pub endpoint: String,
    /// The Hub's cache: `models--user--name` and others.
    pub hub: PathBuf,
    /// Directory for files of other servers.
    pub urls: PathBuf,
    /// Sent to the endpoint and nowhere else.
    pub token: Option<Token>,
    /// Sends no requests.
    pub offline: bool,
}

/// Flags that set [`Places`].
#[derive(Clone, Debug, Default)]
pub struct Given {
    pub token: Option<Token>,
    pub offline: bool,
}

impl Places {
    /// `variable` looks into the environment, `read` has a small file's text.
    pub fn new(
        given: Given,
        variable: impl Fn(&str) -> Option<OsString>,
        read: impl Fn(&Path) -> Option<String>,
    ) -> Result<Self, String> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let home = variable("HOME").or_else(|| variable("USERPROFILE").filter(|_| cfg!(windows))).map(PathBuf::from);
        let path = |name: &str| {
            let path = PathBuf::from(variable(name)?);
            match (path.strip_prefix("~"), &home) {
                (Ok(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(path),
            }
        };
        let caches = || path("XDG_CACHE_HOME").or_else(|| home.as_ref().map(|home| home.join(".cache")));
        let hf_home = path("HF_HOME").or_else(|| caches().map(|caches| caches.join("huggingface")));
        let nowhere = || "there is no HOME to keep models in; set HF_HOME (or LLAMA_CACHE) to a directory".to_owned();
        let hub = ["LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"].iter().find_map(|name| path(name));
        let hub = hub.or_else(|| hf_home.as_ref().map(|home| home.join("hub"))).ok_or_else(nowhere)?;
        let urls = path("LLAMA_CACHE").or_else(caches).or_else(|| hf_home.clone()).ok_or_else(nowhere)?;
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let endpoint = text("MODEL_ENDPOINT").or_else(|| text("HF_ENDPOINT"));
        let endpoint = endpoint.as_deref().unwrap_or(HUB).trim_end_matches('/').to_owned();
        if !(endpoint.starts_with("https://") || endpoint.starts_with("http://")) {
            return Err(format!("HF_ENDPOINT: '{endpoint}' is no URL, expected one such as {HUB}"));
        }
        let is_set =
            |name| text(name).is_some_and(|value| matches!(&*value.to_ascii_uppercase(), "1" | "ON" | "YES" | "TRUE"));
        // A kept token is for the Hub alone: another endpoint gets a token only by flag or variable.
        let kept = || {
            let file = path("HF_TOKEN_PATH").or_else(|| hf_home.as_ref().map(|home| home.join("token")))?;
            read(&file).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let takes_kept = endpoint == HUB && !is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN");
        let token = match given.token.filter(|token| !token.0.is_empty()) {
            Some(Token(text)) => Some(Token::new(&text).map_err(|why| format!("--hf-token (or HF_TOKEN): {why}"))?),
            None if takes_kept => kept().map(|text| Token::new(&text)).transpose()?,
            None => None,
        };
        Ok(Self { endpoint, hub, urls: urls.join("hobbit"), token, offline: given.offline || is_set("HF_HUB_OFFLINE") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(set: &'static [(&str, &str)], given: Given) -> Result<Places, String> {
        let value = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        Places::new(given, value, |path| (path == Path::new("/h/.cache/huggingface/token")).then(|| "hf_kept\n".into()))
    }

    #[test]
    fn caches_are_the_hubs() {
        for (set, hub, urls) in [
            (&[("HOME", "/h")][..], "/h/.cache/huggingface/hub", "/h/.cache/hobbit"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub", "/x/hobbit"),
            (&[("HOME", "/h"), ("HF_HOME", "~/hf")], "/h/hf/hub", "/h/.cache/hobbit"),
            (&[("HOME", "/h"), ("HF_HOME", "/f"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old", "/h/.cache/hobbit"),
            (&[("HF_HUB_CACHE", "/c"), ("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HOME", "/f")], "/c", "/f/hobbit"),
            (&[("HF_HUB_CACHE", "/c"), ("LLAMA_CACHE", "/l")], "/l", "/l/hobbit"),
            (&[("HOME", "/h"), ("HF_HUB_CACHE", "")], "/h/.cache/huggingface/hub", "/h/.cache/hobbit"),
        ] {
            let found = places(set, Given::default()).unwrap();
            assert_eq!((found.hub, found.urls), (hub.into(), urls.into()), "{set:?}");
        }
        assert!(places(&[], Given::default()).unwrap_err().contains("HF_HOME"));
    }

    #[test]
    fn endpoints() {
        let endpoint = |set| places(set, Given::default()).map(|places| places.endpoint);
        assert_eq!(endpoint(&[("HOME", "/h")]).unwrap(), HUB);
        assert_eq!(endpoint(&[("HOME", "/h"), ("HF_ENDPOINT", "http://a/")]).unwrap(), "http://a");
        let both = &[("HOME", "/h"), ("HF_ENDPOINT", "http://a"), ("MODEL_ENDPOINT", "https://b/x/")];
        assert_eq!(endpoint(both).unwrap(), "https://b/x");
        assert!(endpoint(&[("HOME", "/h"), ("HF_ENDPOINT", "a")]).unwrap_err().contains("'a' is no URL"));
        let offline = |set| places(set, Given::default()).unwrap().offline;
        assert!(offline(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "yes")]));
        assert!(!offline(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "0")]));
    }

    #[test]
    fn a_kept_token_is_for_the_hub_alone() {
        let token = |set, given: Option<&str>| {
            let given = Given { token: given.map(|text| Token::new(text).unwrap()), offline: false };
            places(set, given).unwrap().token.map(|token| token.bearer())
        };
        let kept = Some("Bearer hf_kept".to_owned());
        assert_eq!(token(&[("HOME", "/h")], None), kept);
        assert_eq!(token(&[("HOME", "/h"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")], None), None);
        assert_eq!(token(&[("HOME", "/h"), ("HF_ENDPOINT", "http://a")], None), None);
        let given = Some("Bearer hf_given".to_owned());
        assert_eq!(token(&[("HOME", "/h"), ("HF_ENDPOINT", "http://a")], Some("hf_given")), given);
        let typed = |text| Given { token: Token::typed(text).ok(), offline: false };
        let places = |text| places(&[("HOME", "/h"), ("HF_ENDPOINT", "http://a")], typed(text));
        assert!(places("hf secret").unwrap_err().contains("HF_TOKEN") && places(" ").unwrap().token.is_none());
        assert!(Token::new("a b").is_err() && Token::new("a\r\nX: y").is_err() && Token::new("").is_err());
        assert_eq!(format!("{:?}", Token::new("secret").unwrap()), "Token(...)");
    }
}
