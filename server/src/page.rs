//! The page at `/`: chat, and a map of the experts. Plain files built into the program; they load nothing from
//! elsewhere.
//!
//! A model's text is untrusted: the page makes new elements of kinds that it knows ([`super::markdown`]), never HTML
//! from a string, and [`POLICY`] allows no script should that fail.

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Content security policy: only this server's own files, and no HTML from strings.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

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
    "attach.js"
    "chat.js"
    "experts.js"
    "format.js"
    "list.js"
    "map.js"
    "message.js"
    "models.js"
    "notice.js"
    "rates.js"
    "render.js"
    "settings.js"
    "spoken.js"
    "store.js"
};

/// Serves the page at `/` and `/index.html`, and its files under `/page/`. They contain no secrets and need no key.
pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let mut router = Router::new();
    for asset in ASSETS {
        for path in paths(asset) {
            router = router.route(&path, get(async move || answer(asset)));
        }
    }
    router
}

fn paths(asset: &Asset) -> Vec<String> {
    match asset.name {
        "index.html" => vec!["/".to_owned(), "/index.html".to_owned()],
        name => vec![format!("/page/{name}")],
    }
}

fn answer(asset: &Asset) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type(asset.name)),
        // A new version of the program shows at once.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, asset.text).into_response()
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
    use axum::http::{Request, StatusCode};
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn every_file_is_served_with_its_type_and_the_policy() {
        let ask = |path: &str| router::<()>().oneshot(Request::get(path).body(Body::empty()).unwrap());
        for asset in ASSETS {
            for path in paths(asset) {
                let answer = ask(&path).await.unwrap();
                assert_eq!(answer.status(), StatusCode::OK, "{path}");
                let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
                assert_ne!(header("content-type"), "application/octet-stream", "{path}");
                assert_eq!(header("content-security-policy"), POLICY);
                assert_eq!(header("x-content-type-options"), "nosniff");
                assert_eq!(header("referrer-policy"), "no-referrer");
                let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
                assert_eq!(body, asset.text.as_bytes(), "{path}");
            }
        }
        for path in ["/page/", "/page/none.js", "/page/../page.rs", "/page/%2e%2e/lib.rs"] {
            assert_eq!(ask(path).await.unwrap().status(), StatusCode::NOT_FOUND, "{path}");
        }
    }

    #[test]
    fn every_file_of_the_page_is_built_in() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/page");
        let there: BTreeSet<_> =
            dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let built_in: BTreeSet<_> = ASSETS.iter().map(|asset| asset.name.to_owned()).collect();
        assert_eq!(there, built_in);
    }

    #[test]
    fn no_file_makes_html_of_text_or_loads_from_elsewhere() {
        const FORBIDDEN: [&str; 9] = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "DOMParser",
            "style=\"",
            "javascript:",
            "https://",
        ];
        for asset in ASSETS {
            // SVG's namespace is a name and is not fetched.
            let text = asset.text.replace("http://www.w3.org/2000/svg", "");
            let found = FORBIDDEN.iter().find(|word| text.contains(**word));
            assert!(found.is_none() && !text.contains("http://"), "{}: {found:?}", asset.name);
        }
        let page = ASSETS[0].text;
        for script in page.match_indices("<script").map(|(at, _)| &page[at..]) {
            assert!(script[..script.find('>').unwrap()].contains("src=\"page/"), "an inline script");
        }
        let has_handler = page.split_whitespace().any(|word| word.starts_with("on") && word.contains("=\""));
        assert!(!page.contains("<style") && !has_handler);
    }
}
