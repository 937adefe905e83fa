//! Chromium without a window, driven through ChromeDriver.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use axum::http::Method;
use fantoccini::elements::Element;
use fantoccini::wd::WebDriverCompatibleCommand;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Longest wait for a change of the page.
const PATIENCE: Duration = Duration::from_secs(60);

/// ChromeDriver; killed when dropped, with the browser it started.
struct Driver(Child);

impl Driver {
    /// Starts one on a port of its own choice, which is returned; `None` if it is not installed.
    fn start() -> Option<(Driver, u16)> {
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
        // Drain the pipe, so that the driver never blocks on it.
        std::thread::spawn(move || lines.for_each(drop));
        Some((Driver(child), port.expect("chromedriver prints its port")))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        #[cfg(unix)]
        {
            let group = i32::try_from(self.0.id()).unwrap();
            // SAFETY: the group of a child that was not waited for.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A window with its own storage.
pub struct Browser {
    pub client: Client,
    // Ends before its directory does.
    _driver: Driver,
    _data: TempDir,
}

/// No window, no graphics card, and no network requests of its own.
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

impl Browser {
    /// Starts a browser; `None` if ChromeDriver is not installed.
    pub async fn start() -> Option<Browser> {
        let (driver, port) = Driver::start()?;
        let data = tempfile::tempdir().unwrap();
        let mut arguments = ARGUMENTS.map(str::to_owned).to_vec();
        arguments.push(format!("--user-data-dir={}", data.path().display()));
        let capabilities = json!({"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}});
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities.as_object().unwrap().clone())
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .expect("chromedriver is there, but no Chromium starts: install chromium of the same version");
        Some(Browser { client, _driver: driver, _data: data })
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

    /// Types into the focused element.
    pub async fn keys(&self, text: &str) {
        self.client.active_element().await.unwrap().send_keys(text).await.unwrap();
    }

    /// Presses a key until an element has the focus.
    pub async fn reach(&self, selector: &str, key: &str) {
        for _ in 0..80 {
            if self.value(&format!("document.activeElement.matches({selector:?})")).await == true {
                return;
            }
            self.keys(key).await;
        }
        panic!("{selector} is not reached by keys");
    }

    /// Reloads the page.
    pub async fn reload(&self) {
        self.client.refresh().await.unwrap();
        self.ready().await;
    }

    /// Waits until the page has the model's name from its server.
    pub async fn ready(&self) {
        self.reads("#model", "demo").await;
    }

    /// Types a message and sends it.
    pub async fn ask(&self, text: &str) {
        self.ready().await;
        self.find("#input").await.send_keys(text).await.unwrap();
        self.keys("\u{e007}").await;
    }

    /// Waits until an answer is complete.
    pub async fn answered(&self) {
        self.until("document.querySelector('.message.assistant') && !document.getElementById('send').hidden").await;
    }

    /// Presses a button under a message.
    pub async fn press(&self, name: &str) {
        let path = format!("//article//footer//button[text()='{name}']");
        self.client.wait().for_element(Locator::XPath(&path)).await.unwrap().click().await.unwrap();
    }

    /// The value of an expression on the page.
    pub async fn value(&self, expression: &str) -> Value {
        let value = self.client.execute(&format!("return ({expression});"), Vec::new()).await;
        value.unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    /// Runs an async function's body on the page.
    pub async fn run(&self, body: &str) {
        let script = format!("const done = arguments[0]; (async () => {{ {body} }})().then(() => done(), done);");
        self.client.execute_async(&script, Vec::new()).await.unwrap();
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

    /// Waits until an element's text is `text`.
    pub async fn reads(&self, selector: &str, text: &str) {
        self.until(&format!("document.querySelector({selector:?})?.textContent === {}", json!(text))).await;
    }

    /// Waits until an element's text contains `part`.
    pub async fn shows(&self, selector: &str, part: &str) {
        self.until(&format!("document.querySelector({selector:?})?.textContent.includes({}) ?? false", json!(part)))
            .await;
    }

    /// New console messages, except about failed requests and about tests that read a canvas.
    pub async fn console(&self) -> Vec<String> {
        let entries = self.client.issue_cmd(Log).await.unwrap();
        let entries = entries.as_array().unwrap().iter();
        let entries = entries.filter(|entry| entry["source"] != "network" && entry["source"] != "rendering");
        entries.map(|entry| entry["message"].as_str().unwrap().to_owned()).collect()
    }
}

/// ChromeDriver's command for the console's messages, which is not in the standard.
#[derive(Debug)]
struct Log;

impl WebDriverCompatibleCommand for Log {
    fn endpoint(&self, base: &url::Url, session: Option<&str>) -> Result<url::Url, url::ParseError> {
        base.join(&format!("session/{}/se/log", session.unwrap_or_default()))
    }

    fn method_and_body(&self, _: &url::Url) -> (Method, Option<String>) {
        (Method::POST, Some(json!({"type": "browser"}).to_string()))
    }
}
