//! Chromium without a window, driven through ChromeDriver.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use axum::http::Method;
use fantoccini::actions::{InputSource, KeyAction, KeyActions, MouseActions, PointerAction};
use fantoccini::elements::Element;
use fantoccini::key::Key;
use fantoccini::wd::WebDriverCompatibleCommand;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tempfile::TempDir;

/// How long anything is waited for. What is waited for comes at once unless the page is broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// ChromeDriver; killed when dropped, with the browser it started.
struct Driver {
    child: Child,
    port: u16,
}

impl Driver {
    /// Starts one on a port of its own choice; none where it is not installed.
    fn start() -> Option<Driver> {
        let mut command = Command::new("chromedriver");
        command.arg("--port=0").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => panic!("chromedriver: {error}"),
        };
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let port = lines.by_ref().find_map(|line| {
            let line = line.unwrap();
            line.split_once("successfully on port ")?.1.trim_end_matches('.').parse().ok()
        });
        // What it prints later is read, lest it waits for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        Some(Driver { child, port: port.expect("chromedriver says its port") })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        #[cfg(unix)]
        {
            let group = i32::try_from(self.child.id()).unwrap();
            // SAFETY: the group of a child that was not waited for.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A window with its own storage.
pub struct Browser {
    pub client: Client,
    // Ends before its directories do.
    _driver: Driver,
    /// Where it saves files.
    pub downloads: TempDir,
    _data: TempDir,
}

/// No window, no graphics card, and nothing asked of the network by itself.
const ARGUMENTS: [&str; 10] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1400,900",
];

/// How wide the window is.
#[derive(Clone, Copy)]
pub enum Window {
    Desk,
    /// A telephone's 360 pixels.
    Narrow,
}

impl Browser {
    /// Starts a browser; none where ChromeDriver is not installed.
    pub async fn start(window: Window) -> Option<Browser> {
        let driver = Driver::start()?;
        let (data, downloads) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut arguments = ARGUMENTS.map(str::to_owned).to_vec();
        arguments.push(format!("--user-data-dir={}", data.path().display()));
        let prefs = json!({"download.default_directory": downloads.path()});
        let mut options = json!({"args": arguments, "prefs": prefs});
        if let Window::Narrow = window {
            // Chromium makes no window that narrow.
            options["mobileEmulation"] = json!({"deviceMetrics": {"width": 360, "height": 740, "pixelRatio": 2.0}});
        }
        let capabilities = json!({"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}});
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities.as_object().unwrap().clone())
            .connect(&format!("http://127.0.0.1:{}", driver.port))
            .await
            .expect("chromedriver is there, but no Chromium starts: install chromium of the same version");
        Some(Browser { client, _driver: driver, downloads, _data: data })
    }

    /// The element of a selector, once there is one.
    pub async fn find(&self, selector: &str) -> Element {
        let found = self.client.wait().at_most(PATIENCE).for_element(Locator::Css(selector)).await;
        found.unwrap_or_else(|error| panic!("{selector}: {error}"))
    }

    pub async fn text(&self, selector: &str) -> String {
        self.find(selector).await.text().await.unwrap()
    }

    pub async fn click(&self, selector: &str) {
        self.until(&format!("document.querySelector({selector:?})?.checkVisibility() ?? false")).await;
        self.find(selector).await.click().await.unwrap_or_else(|error| panic!("{selector}: {error}"));
    }

    /// Types into what has the focus.
    pub async fn keys(&self, text: &str) {
        self.client.active_element().await.unwrap().send_keys(text).await.unwrap();
    }

    /// Presses a key while others are held.
    pub async fn chord(&self, held: Key, key: char) {
        let keys = KeyActions::new("keyboard".to_owned())
            .then(KeyAction::Down { value: held.into() })
            .then(KeyAction::Down { value: key })
            .then(KeyAction::Up { value: key })
            .then(KeyAction::Up { value: held.into() });
        self.client.perform_actions(keys).await.unwrap();
    }

    /// Moves the mouse over an element, so many pixels from its middle.
    pub async fn point(&self, selector: &str, right: f64, down: f64) {
        let element = self.find(selector).await;
        let there = PointerAction::MoveToElement { element, duration: None, x: right, y: down };
        self.client.perform_actions(MouseActions::new("mouse".to_owned()).then(there)).await.unwrap();
    }

    /// The value of an expression on the page.
    pub async fn value(&self, expression: &str) -> Value {
        let value = self.client.execute(&format!("return ({expression});"), Vec::new()).await;
        value.unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    /// What an async function's body on the page returns, with `arguments` as `given`.
    pub async fn run(&self, body: &str, given: Value) -> Value {
        let script = format!(
            "const done = arguments[arguments.length - 1]; const given = arguments[0]; \
             (async () => {{ {body} }})().then((value) => done([value]), (error) => done(String(error)));"
        );
        match self.client.execute_async(&script, vec![given]).await.unwrap() {
            Value::Array(mut value) => value.remove(0),
            error => panic!("{error}\n{body}"),
        }
    }

    /// Waits until an expression holds.
    pub async fn until(&self, expression: &str) {
        let holds = async {
            while self.value(expression).await != Value::Bool(true) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, holds).await.is_err() {
            let page = self.value("document.body.innerText").await;
            panic!("never: {expression}\nthe page: {}", page.as_str().unwrap_or_default());
        }
    }

    /// Waits until an element's text is this.
    pub async fn reads(&self, selector: &str, text: &str) {
        self.until(&format!("document.querySelector({selector:?})?.textContent === {}", json!(text))).await;
    }

    /// Waits until an element's text has this part.
    pub async fn says(&self, selector: &str, part: &str) {
        self.until(&format!("document.querySelector({selector:?})?.textContent.includes({}) ?? false", json!(part)))
            .await;
    }

    /// What the console said since the last time, without what it says of every failed request and of tests that read a
    /// canvas: `(source, message)`.
    pub async fn console(&self) -> Vec<(String, String)> {
        let entries = self.client.issue_cmd(Post { path: "se/log", body: json!({"type": "browser"}) }).await.unwrap();
        let text = |entry: &Value, name: &str| entry[name].as_str().unwrap().to_owned();
        let entries = entries.as_array().unwrap().iter().map(|entry| (text(entry, "source"), text(entry, "message")));
        entries.filter(|(source, _)| !["network", "rendering"].contains(&source.as_str())).collect()
    }

    /// A command of Chromium's own protocol.
    pub async fn devtools(&self, name: &str, parameters: Value) {
        let body = json!({"cmd": name, "params": parameters});
        self.client.issue_cmd(Post { path: "goog/cdp/execute", body }).await.unwrap();
    }
}

/// A command of ChromeDriver's that is not in the standard.
#[derive(Debug)]
struct Post {
    path: &'static str,
    body: Value,
}

impl WebDriverCompatibleCommand for Post {
    fn endpoint(&self, base: &url::Url, session: Option<&str>) -> Result<url::Url, url::ParseError> {
        base.join(&format!("session/{}/{}", session.unwrap_or_default(), self.path))
    }

    fn method_and_body(&self, _: &url::Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.body.to_string()))
    }
}
