//! Requests: redirects followed, the token kept for the host that it is for, refusals put into words, patience with servers.

use std::time::Duration;

use ureq::http::{HeaderMap, Response, Uri, header};
use ureq::{Agent, Body};

use super::Witness;
use super::error::HubError;
use super::places::{Places, Token};

/// Redirects in a row.
const MOST_REDIRECTS: usize = 10;
/// Tries in a row that bring nothing.
pub const TRIES: u32 = 5;
/// Longest wait that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(15);
/// For the beginning of an answer, and between two pieces of it.
const SILENCE: Duration = Duration::from_secs(60);
/// Answers that are no models.
const LARGEST_ANSWER: u64 = 32 << 20;

/// Scheme, host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin(String, String, u16);

impl Origin {
    fn of(uri: &Uri) -> Option<Self> {
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let usual = match &*scheme {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        Some(Self(scheme, uri.host()?.to_ascii_lowercase(), uri.port_u16().unwrap_or(usual)))
    }
}

/// A client for one endpoint and the servers that it points to.
pub struct Web {
    agent: Agent,
    /// Whom the token is for.
    home: Option<Origin>,
    token: Option<Token>,
}

/// The beginning of an answer.
pub struct Answer {
    pub response: Response<Body>,
    /// What the server that was asked said about the file, before it sent us elsewhere.
    pub linked: Linked,
}

/// The Hub's own words about a file.
#[derive(Clone, Debug, Default)]
pub struct Linked {
    pub etag: Option<String>,
    pub size: Option<u64>,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    pub fn header(&self, name: impl header::AsHeaderName) -> Option<&str> {
        text(self.response.headers(), name)
    }
}

fn text(headers: &HeaderMap, name: impl header::AsHeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// How a request is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    /// Only what the server that is asked itself says, if it says it.
    Head,
}

impl Web {
    pub fn new(places: &Places) -> Self {
        let home: Option<Origin> = places.endpoint.parse().ok().as_ref().and_then(Origin::of);
        // Proxies are for other machines.
        let is_here = |origin: &Origin| matches!(&*origin.1, "localhost" | "127.0.0.1" | "[::1]");
        let proxy = if home.as_ref().is_some_and(is_here) { None } else { ureq::Proxy::try_from_env() };
        let config = Agent::config_builder()
            .proxy(proxy)
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("hobbit/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        Self { agent: config.into(), home, token: places.token.clone() }
    }

    /// Asks once. Any status is an answer, but those of redirects, which are followed.
    ///
    /// # Errors
    /// [`HubError::Unreachable`], [`HubError::Insecure`]; redirects that lead nowhere, or from https to http.
    pub fn ask(&self, method: Method, url: &str, what: &str, headers: &[(&str, &str)]) -> Result<Answer, HubError> {
        let no_url =
            |url: &str| HubError::Given(format!("'{url}' is no URL, expected one such as https://host/model.gguf"));
        let mut uri: Uri = url.parse().map_err(|_| no_url(url))?;
        let asked = Origin::of(&uri).ok_or_else(|| no_url(url))?;
        let mut linked = Linked::default();
        for _ in 0..=MOST_REDIRECTS {
            let origin = Origin::of(&uri);
            let mut request = match method {
                Method::Get => self.agent.get(uri.clone()),
                Method::Head => self.agent.head(uri.clone()),
            };
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            if let Some(token) = self.token.as_ref().filter(|_| origin == self.home) {
                request = request.header(header::AUTHORIZATION, token.bearer());
            }
            let host = uri.host().unwrap_or_default().to_owned();
            let response = request.call().map_err(|error| {
                let (what, why) = (what.to_owned(), error.to_string());
                match is_of_tls(&error) {
                    true => HubError::Insecure { what, host, why },
                    false => HubError::Unreachable { what, host, why },
                }
            })?;
            if origin.as_ref() == Some(&asked) {
                linked.etag = text(response.headers(), "x-linked-etag").map(str::to_owned).or(linked.etag);
                linked.size =
                    text(response.headers(), "x-linked-size").and_then(|size| size.parse().ok()).or(linked.size);
            }
            let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            let Some(location) = text(response.headers(), header::LOCATION).filter(|_| is_redirect) else {
                return Ok(Answer { response, linked });
            };
            let why = |why: &str| HubError::Redirect { what: what.to_owned(), url: shown(&uri), why: why.to_owned() };
            let next = joined(&uri, location).ok_or_else(|| why("to what is no URL"))?;
            let to = Origin::of(&next).ok_or_else(|| why("to what is neither http nor https"))?;
            if origin.is_some_and(|origin| origin.0 == "https") && to.0 == "http" {
                return Err(why("from https to http; refused"));
            }
            if method == Method::Head && to != asked && linked.etag.is_some() {
                return Ok(Answer { response, linked }); // others may answer no such question
            }
            uri = next;
        }
        Err(HubError::Redirect { what: what.to_owned(), url: shown(&uri), why: "too often".to_owned() })
    }

    /// Asks until there is an answer that is worth one: with a few tries and growing waits where a server is busy or out of reach.
    ///
    /// # Errors
    /// As [`Self::ask`]; statuses that are refusals.
    pub fn insist(
        &self,
        method: Method,
        url: &str,
        what: &str,
        headers: &[(&str, &str)],
        tries: u32,
        witness: &dyn Witness,
    ) -> Result<Answer, HubError> {
        let mut patience = Patience::new(tries);
        loop {
            let outcome = self.ask(method, url, what, headers);
            let (error, wait) = match outcome {
                Ok(answer) if !is_busy(answer.status()) => return sound(answer, what),
                Ok(answer) => {
                    let host =
                        url.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned)).unwrap_or_default();
                    let why = format!("it says {}", answer.status());
                    (HubError::Unreachable { what: what.to_owned(), host, why }, asked_wait(&answer))
                }
                Err(error @ HubError::Unreachable { .. }) => (error, None),
                Err(error) => return Err(error),
            };
            let Some(wait) = patience.next(wait) else { return Err(error) };
            if let HubError::Unreachable { host, why, .. } = &error {
                witness.note(&format!("{what}: {host}: {why}; trying again in {} s", wait.as_secs()));
            }
            witness.pause(wait);
        }
    }

    /// A JSON answer.
    ///
    /// # Errors
    /// As [`Self::insist`]; what is too large or not understood.
    pub fn json<T: serde::de::DeserializeOwned>(
        &self,
        url: &str,
        what: &str,
        tries: u32,
        witness: &dyn Witness,
    ) -> Result<T, HubError> {
        let headers = [("accept", "application/json")];
        let mut answer = self.insist(Method::Get, url, what, &headers, tries, witness)?;
        let not_understood = |why: String| HubError::Answer { what: what.to_owned(), why };
        let body = answer.response.body_mut().with_config().limit(LARGEST_ANSWER).read_to_vec();
        let body = body.map_err(|error| not_understood(error.to_string()))?;
        serde_json::from_slice(&body).map_err(|error| not_understood(error.to_string()))
    }
}

/// What a status that is no success means.
pub fn sound(answer: Answer, what: &str) -> Result<Answer, HubError> {
    let what = || what.to_owned();
    match answer.status() {
        200..=299 | 300..=308 | 416 => Ok(answer),
        status @ (401 | 403) => Err(HubError::Denied { what: what(), status }),
        404 | 410 => Err(HubError::NotFound { what: what() }),
        status => Err(HubError::Refused { what: what(), status }),
    }
}

/// Whether there was a connection, and TLS refused it: a certificate that nothing vouches for is no better a second later.
fn is_of_tls(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Io(error) => error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()),
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => true,
        _ => false,
    }
}

/// Whether a server with this status may answer later.
pub fn is_busy(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
}

/// How long the server asks to wait.
pub fn asked_wait(answer: &Answer) -> Option<Duration> {
    answer.header(header::RETRY_AFTER)?.trim().parse().ok().map(Duration::from_secs)
}

/// Tries that are left, and how long to wait before each.
#[derive(Debug)]
pub struct Patience {
    most: u32,
    done: u32,
}

impl Patience {
    pub fn new(most: u32) -> Self {
        Self { most, done: 0 }
    }

    /// Something came: all tries are left again.
    pub fn renew(&mut self) {
        self.done = 0;
    }

    /// The wait before the next try: 1, 2, 4 ... seconds, or what the server asks for; `None` after the last.
    pub fn next(&mut self, asked: Option<Duration>) -> Option<Duration> {
        self.done += 1;
        let usual = Duration::from_secs(1 << (self.done - 1).min(6));
        (self.done < self.most).then(|| asked.unwrap_or(usual).min(LONGEST_WAIT))
    }
}

/// A URL for people: without what may be a secret in it.
fn shown(uri: &Uri) -> String {
    format!("{}://{}{}", uri.scheme_str().unwrap_or_default(), uri.host().unwrap_or_default(), uri.path())
}

/// Where `location` leads from `base`.
fn joined(base: &Uri, location: &str) -> Option<Uri> {
    if location.len() > 1 << 13 {
        return None;
    }
    let scheme = base.scheme_str()?;
    let directory = || base.path().rsplit_once('/').map_or("", |(directory, _)| directory);
    let has_scheme = location.split('?').next().is_some_and(|path| path.contains("://"));
    let text = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{}{location}", base.authority()?),
        _ if has_scheme => location.to_owned(),
        _ => format!("{scheme}://{}{}/{location}", base.authority()?, directory()),
    };
    text.parse().ok()
}

/// `text` as a part of a URL's path; slashes stay.
pub fn path_escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => escaped.push(byte as char),
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations() {
        let base: Uri = "https://h:8/a/b?q".parse().unwrap();
        for (location, expected) in [
            ("https://x/y", "https://x/y"),
            ("//x/y", "https://x/y"),
            ("/c?d=e", "https://h:8/c?d=e"),
            ("c", "https://h:8/a/c"),
        ] {
            let found = joined(&base, location).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), Some(expected), "{location}");
        }
        assert_eq!(joined(&base, "http://[").map(|uri| uri.to_string()), None);
    }

    #[test]
    fn patience_ends() {
        let waits = |asked: Option<u64>| {
            let mut patience = Patience::new(4);
            std::iter::from_fn(|| patience.next(asked.map(Duration::from_secs)))
                .map(|wait| wait.as_secs())
                .collect::<Vec<_>>()
        };
        assert_eq!(waits(None), [1, 2, 4]);
        assert_eq!(waits(Some(7)), [7, 7, 7]);
        assert_eq!(waits(Some(1 << 40)), [60, 60, 60]);
        let mut patience = Patience::new(2);
        assert!(patience.next(None).is_some());
        patience.renew();
        assert!(patience.next(None).is_some() && patience.next(None).is_none());
    }

    #[test]
    fn paths_are_escaped() {
        assert_eq!(path_escaped("Q4/a b#c?.gguf"), "Q4/a%20b%23c%3F.gguf");
    }

    #[test]
    fn origins() {
        let origin = |url: &str| Origin::of(&url.parse().unwrap());
        assert_eq!(origin("https://H/a"), origin("https://h:443/b"));
        assert_ne!(origin("https://h/"), origin("http://h/"));
        assert_ne!(origin("http://h:1/"), origin("http://h:2/"));
        assert_eq!(origin("ftp://h/"), None);
    }
}
