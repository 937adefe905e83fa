//! The page at `/`: chat, and a map of the experts. Plain files built into the program; they load nothing from
//! elsewhere.
//!
//! A model's text is untrusted: the page makes text nodes of it, never HTML, and [`POLICY`] allows no script should
//! that fail.

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use xxhash_rust::xxh3::xxh3_128;

/// Content security policy: only this server's own files, and no HTML from strings.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// Paths of the page; its other files are under [`FILES`].
const PAGE: [&str; 2] = ["/", "/index.html"];
const FILES: &str = "/page/";

struct Asset {
    name: &'static str,
    text: &'static str,
}

macro_rules! assets {
    ($($name:literal)*) => {
        &[$(Asset { name: $name, text: include_str!(concat!("page/", $name)) }),*]
    };
}

const ASSETS: &[Asset] = assets! {
    "index.html"
    "style.css"
    "icon.svg"
    "theme.js"
    "main.js"
    "answer.js"
    "api.js"
    "chat.js"
    "experts.js"
    "format.js"
    "list.js"
    "map.js"
    "message.js"
    "notice.js"
    "rates.js"
    "render.js"
    "settings.js"
    "store.js"
};

/// Serves the page at `/` and `/index.html`, and its files under `/page/`. They contain no secrets and need no key.
///
/// Browsers revalidate each file, so that a new version of the program shows at once.
pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let mut router = Router::new();
    for asset in ASSETS {
        let tag = tag(asset.text);
        let paths = match asset.name {
            "index.html" => PAGE.map(str::to_owned).to_vec(),
            name => vec![format!("{FILES}{name}")],
        };
        for path in paths {
            let tag = tag.clone();
            router = router.route(&path, get(async move |headers: HeaderMap| answer(asset, &tag, &headers)));
        }
    }
    router
}

fn answer(asset: &Asset, tag: &HeaderValue, request: &HeaderMap) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type(asset.name))),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::ETAG, tag.clone()),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    if has(request, tag) {
        (StatusCode::NOT_MODIFIED, headers).into_response()
    } else {
        (headers, asset.text).into_response()
    }
}

/// Whether the client has the file that `tag` names: `If-None-Match` lists tags, compared weakly (RFC 9110, 13.1.2).
fn has(request: &HeaderMap, tag: &HeaderValue) -> bool {
    request.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok()).any(|value| {
        value.split(',').map(str::trim).any(|one| one == "*" || one.strip_prefix("W/").unwrap_or(one) == tag)
    })
}

fn tag(text: &str) -> HeaderValue {
    let tag = format!("\"{:032x}\"", xxh3_128(text.as_bytes()));
    HeaderValue::try_from(tag).expect("digits between quotes")
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        // A test checks that no file gets here.
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    async fn ask(path: &str, known: Option<&str>) -> Response {
        let mut request = Request::get(path);
        if let Some(known) = known {
            request = request.header(header::IF_NONE_MATCH, known);
        }
        router::<()>().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    fn header<'a>(answer: &'a Response, name: &header::HeaderName) -> &'a str {
        answer.headers()[name].to_str().unwrap()
    }

    #[tokio::test]
    async fn every_file_is_served_with_its_type_and_the_policy() {
        for asset in ASSETS {
            let paths = if asset.name == "index.html" {
                PAGE.map(str::to_owned).to_vec()
            } else {
                vec![format!("/page/{}", asset.name)]
            };
            for path in paths {
                let answer = ask(&path, None).await;
                assert_eq!(answer.status(), StatusCode::OK, "{path}");
                assert_ne!(header(&answer, &header::CONTENT_TYPE), "application/octet-stream", "{path}");
                assert_eq!(header(&answer, &header::CONTENT_SECURITY_POLICY), POLICY);
                assert_eq!(header(&answer, &header::X_CONTENT_TYPE_OPTIONS), "nosniff");
                assert_eq!(header(&answer, &header::REFERRER_POLICY), "no-referrer");
                assert_eq!(header(&answer, &header::CACHE_CONTROL), "no-cache");
                let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
                assert_eq!(body, asset.text.as_bytes(), "{path}");
            }
        }
        for path in ["/page/", "/page/none.js", "/page/../page.rs", "/page/%2e%2e/mod.rs"] {
            assert_eq!(ask(path, None).await.status(), StatusCode::NOT_FOUND, "{path}");
        }
    }

    #[tokio::test]
    async fn what_a_browser_has_is_not_sent_again() {
        let first = ask("/", None).await;
        let tag = header(&first, &header::ETAG).to_owned();
        for known in [tag.clone(), format!("W/{tag}"), format!("\"other\", {tag}"), "*".to_owned()] {
            let again = ask("/", Some(&known)).await;
            assert_eq!(again.status(), StatusCode::NOT_MODIFIED, "{known}");
            assert_eq!(header(&again, &header::ETAG), tag);
            assert!(axum::body::to_bytes(again.into_body(), usize::MAX).await.unwrap().is_empty());
        }
        assert_eq!(ask("/", Some("\"other\"")).await.status(), StatusCode::OK);
        assert_eq!(ask("/page/main.js", Some(&tag)).await.status(), StatusCode::OK);
    }

    #[test]
    fn every_file_of_the_page_is_built_in() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/server/page");
        let there: BTreeSet<_> =
            dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let built_in: BTreeSet<_> = ASSETS.iter().map(|asset| asset.name.to_owned()).collect();
        assert_eq!(there, built_in);
    }

    /// The files contain nothing that the policy forbids or that makes HTML of a string.
    #[test]
    fn nothing_makes_html_of_text_or_asks_elsewhere() {
        for asset in ASSETS {
            for word in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "DOMParser",
                "style=\"",
                "javascript:",
            ] {
                assert!(!asset.text.contains(word), "{}: {word}", asset.name);
            }
            for (at, _) in asset.text.match_indices("//") {
                let before = &asset.text[..at];
                assert!(!before.ends_with("https:"), "{}: an address", asset.name);
                // SVG's namespace is a name and is not fetched.
                let after = &asset.text[at..];
                assert!(
                    !before.ends_with("http:") || after.starts_with("//www.w3.org/2000/svg"),
                    "{}: an address",
                    asset.name
                );
            }
        }
        let page = ASSETS[0].text;
        for script in page.match_indices("<script").map(|(at, _)| &page[at..]) {
            assert!(script[..script.find('>').unwrap()].contains("src=\"page/"), "an inline script");
        }
        assert!(!page.contains("<style"));
        assert!(
            !page.split_whitespace().any(|word| word.starts_with("on") && word.contains("=\"")),
            "an inline handler"
        );
    }
}
