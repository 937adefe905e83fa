//! Requests: the token stays with its endpoint, statuses become errors, and busy servers are tried again.

use std::time::Duration;

use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, Uri, header, uri::Scheme};
use ureq::{Agent, Body};

use super::names::{blob_name, is_sha256};
use super::places::{Places, Token};
use super::{HubError, Witness};

const REDIRECTS_MAX: u32 = 10;
/// Tries in a row without progress.
pub const TRIES: u32 = 5;
/// Longest wait that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(15);
/// For the beginning of an answer, which interim answers (1xx) do not prolong, between two pieces of it, and for the
/// whole of a JSON answer. Files are bounded by their progress.
const SILENCE: Duration = Duration::from_secs(60);
/// Limit of JSON answers, in bytes.
const LARGEST_ANSWER: u64 = 32 << 20;

pub type Answer = Response<Body>;

/// A client for one endpoint and the servers that it redirects to.
pub struct Web {
    agent: Agent,
    /// The token is for this endpoint.
    home: Option<Uri>,
    token: Option<Token>,
    silence: Duration,
}

/// A server's metadata of a file.
#[derive(Clone, Debug, Default)]
pub struct Announced {
    pub etag: Option<String>,
    /// Lower case. The Hub gives it as the etag of large files.
    pub sha256: Option<String>,
    pub size: Option<u64>,
}

impl Web {
    pub fn new(places: &Places) -> Self {
        Self::within(places, SILENCE)
    }

    /// A client that waits for `silence` at most.
    pub fn within(places: &Places, silence: Duration) -> Self {
        let home: Option<Uri> = places.endpoint.parse().ok();
        // Proxies are for other machines.
        let is_here =
            home.as_ref().and_then(Uri::host).is_some_and(|h| matches!(h, "localhost" | "127.0.0.1" | "[::1]"));
        // A renamed private repository redirects within its host. ureq compares names of hosts but not ports, so this
        // is safe only where no port is given.
        let follows = home.as_ref().is_some_and(|home| home.port().is_none());
        let config = Agent::config_builder()
            .proxy(if is_here { None } else { ureq::Proxy::try_from_env() })
            .http_status_as_error(false)
            .redirect_auth_headers(if follows { RedirectAuthHeaders::SameHost } else { RedirectAuthHeaders::Never })
            .user_agent(concat!("hobbit/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(silence))
            .timeout_per_read(Some(silence))
            .build();
        Self { agent: config.into(), home, token: places.token.clone(), silence }
    }

    /// Sends one request. Besides success, answers are redirects that were not to be followed, and 416.
    fn ask(
        &self,
        (is_head, redirects_max, body_max): (bool, u32, Option<Duration>),
        url: &str,
        what: &str,
        headers: &[(&str, &str)],
    ) -> Result<Answer, HubError> {
        let uri: Option<Uri> = url.parse().ok().filter(|uri: &Uri| uri.host().is_some());
        let uri = uri.filter(|uri| uri.scheme() == Some(&Scheme::HTTP) || uri.scheme() == Some(&Scheme::HTTPS));
        let uri = uri.ok_or_else(|| {
            HubError::Given(format!("'{url}' is no URL, expected one such as https://host/model.gguf"))
        })?;
        let request = if is_head { self.agent.head(uri.clone()) } else { self.agent.get(uri.clone()) };
        let is_secure = uri.scheme() == Some(&Scheme::HTTPS);
        let mut request =
            request.config().max_redirects(redirects_max).https_only(is_secure).timeout_recv_body(body_max).build();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let is_home = |home: &Uri| (home.scheme(), home.authority()) == (uri.scheme(), uri.authority());
        if let Some(token) = self.token.as_ref().filter(|_| self.home.as_ref().is_some_and(is_home)) {
            request = request.header(header::AUTHORIZATION, token.bearer());
        }
        let (what, host) = (what.to_owned(), uri.host().unwrap_or_default().to_owned());
        let answer = request.call().map_err(|error| failed_request(&error, what.clone(), host.clone()))?;
        match answer.status().as_u16() {
            200..=399 | 416 => Ok(answer),
            status @ (401 | 403) => Err(HubError::Denied { what, status }),
            404 | 410 => Err(HubError::NotFound { what }),
            status @ (408 | 425 | 429 | 500 | 502 | 503 | 504) => {
                let wait = number(&answer, "retry-after").map(Duration::from_secs);
                Err(HubError::Unreachable { what, host, why: format!("it answered {status}"), wait })
            }
            status => Err(HubError::Refused { what, status }),
        }
    }

    /// Sends one request for a file or a part of it.
    pub fn get(&self, url: &str, what: &str, headers: &[(&str, &str)]) -> Result<Answer, HubError> {
        self.ask((false, REDIRECTS_MAX, None), url, what, headers)
    }

    /// Requests a file's metadata. The Hub gives it in its redirect; the target server may refuse HEAD.
    pub fn head(&self, url: &str, what: &str, tries: u32, witness: &dyn Witness) -> Result<Announced, HubError> {
        let answer = patiently(tries, witness, || self.ask((true, 0, None), url, what, &[]))?;
        if let Some(etag) = header(&answer, "x-linked-etag")
            && let Some(sha256) = blob_name(etag).filter(|name| is_sha256(name))
        {
            let size = number(&answer, "x-linked-size");
            return Ok(Announced { etag: Some(etag.to_owned()), sha256: Some(sha256), size });
        }
        let answer = if answer.status().is_redirection() {
            patiently(tries, witness, || self.ask((true, REDIRECTS_MAX, None), url, what, &[]))?
        } else {
            answer
        };
        Ok(Announced { etag: etag(&answer), sha256: None, size: number(&answer, "content-length") })
    }

    /// Fetches a JSON answer.
    pub fn json<T: serde::de::DeserializeOwned>(
        &self,
        url: &str,
        what: &str,
        tries: u32,
        witness: &dyn Witness,
    ) -> Result<T, HubError> {
        let ways = (false, REDIRECTS_MAX, Some(self.silence));
        let mut answer = patiently(tries, witness, || self.ask(ways, url, what, &[("accept", "application/json")]))?;
        let not_understood = |why: String| HubError::Answer { what: what.to_owned(), why };
        let body = answer.body_mut().with_config().limit(LARGEST_ANSWER).read_to_vec();
        let body = body.map_err(|error| not_understood(error.to_string()))?;
        serde_json::from_slice(&body).map_err(|error| not_understood(error.to_string()))
    }
}

/// A header's text.
pub fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

/// A header's number.
pub fn number(answer: &Answer, name: &str) -> Option<u64> {
    header(answer, name)?.trim().parse().ok()
}

/// The etag, if it can be sent back in a header.
pub fn etag(answer: &Answer) -> Option<String> {
    header(answer, "etag").filter(|text| is_etag(text)).map(str::to_owned)
}

pub fn is_etag(text: &str) -> bool {
    !text.is_empty() && text.len() <= 256 && text.bytes().all(|b| b.is_ascii_graphic() || b == b' ')
}

fn failed_request(error: &ureq::Error, what: String, host: String) -> HubError {
    use ureq::Error;
    let why = error.to_string();
    match error {
        Error::TooManyRedirects => HubError::Redirect { what, why: "too often" },
        Error::RequireHttpsOnly(_) => HubError::Redirect { what, why: "from https to http; refused" },
        Error::RedirectFailed | Error::BadUri(_) | Error::Protocol(_) => HubError::Answer { what, why },
        // An untrusted certificate will not be trusted a second later.
        Error::Rustls(_) | Error::Tls(_) => HubError::Insecure { what, host, why },
        Error::Io(io) if io.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) => {
            HubError::Insecure { what, host, why }
        }
        _ => HubError::Unreachable { what, host, why, wait: None },
    }
}

/// Tries that are left, and the waits between them.
pub struct Patience {
    tries: u32,
    done: u32,
}

impl Patience {
    pub fn new(tries: u32) -> Self {
        Self { tries, done: 0 }
    }

    /// There was progress: all tries are left again.
    pub fn renew(&mut self) {
        self.done = 0;
    }

    /// Waits before the next try: 1, 2, 4 ... seconds, or what the server asked for.
    ///
    /// # Errors
    /// The error, if another try would not help or none is left.
    pub fn wait(&mut self, error: HubError, witness: &dyn Witness) -> Result<(), HubError> {
        let Some(asked) = error.may_pass() else { return Err(error) };
        self.done += 1;
        if self.done >= self.tries {
            return Err(error);
        }
        let usual = Duration::from_secs(1 << (self.done - 1).min(6));
        let wait = asked.unwrap_or(usual).min(LONGEST_WAIT);
        let text = error.to_string();
        let text = text.split("; ").next().unwrap_or_default(); // without the advice
        witness.note(&format!("{text}; trying again in {} s", wait.as_secs()));
        witness.pause(wait);
        Ok(())
    }
}

/// Tries until there is an answer, or an error that stays.
fn patiently<T>(
    tries: u32,
    witness: &dyn Witness,
    mut attempt: impl FnMut() -> Result<T, HubError>,
) -> Result<T, HubError> {
    let mut patience = Patience::new(tries);
    loop {
        match attempt() {
            Ok(answer) => return Ok(answer),
            Err(error) => patience.wait(error, witness)?,
        }
    }
}
