//! Browsers without a window, driven through WebDriver.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::num::NonZeroU16;
use std::path::Path;
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Chromium,
    Firefox,
}

impl Kind {
    pub const ALL: [Kind; 2] = [Kind::Chromium, Kind::Firefox];

    pub fn driver(self) -> &'static str {
        match self {
            Kind::Chromium => "chromedriver",
            Kind::Firefox => "geckodriver",
        }
    }

    /// How to install the driver.
    pub fn remedy(self) -> &'static str {
        match self {
            Kind::Chromium => "setup.sh --browser",
            Kind::Firefox => "cargo install --locked geckodriver",
        }
    }

    /// No window, and no network requests of its own.
    fn capabilities(self) -> Value {
        match self {
            Kind::Chromium => json!({
                "goog:chromeOptions": {"args": [
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-quic",
                    "--no-first-run",
                    "--disable-background-networking",
                    "--disable-component-update",
                    "--disable-sync",
                    "--disable-dev-shm-usage",
                ]},
                "goog:loggingPrefs": {"browser": "ALL"},
            }),
            // The driver turns the requests off. The console is the system's.
            Kind::Firefox => json!({"moz:firefoxOptions": {"args": ["-headless", "-remote-allow-system-access"]}}),
        }
    }
}

/// A driver; killed when dropped, with the browser it started.
struct Driver(Child);

impl Driver {
    /// Starts one on a free port, which is returned; `None` if it is not installed.
    fn start(kind: Kind, data: &Path) -> Option<(Driver, NonZeroU16)> {
        // ChromeDriver ends if the port that it took for one family of addresses is in use in the other.
        const TRIES: usize = 4;
        let mut said = Vec::new();
        for _ in 0..TRIES {
            let (driver, port) = Driver::try_start(kind, data, &mut said)?;
            if let Some(port) = port {
                return Some((driver, port));
            }
        }
        panic!("{} prints no port: {said:?}", kind.driver())
    }

    /// Starts one; its port is `None` if it ends before it prints one. `said` gets the lines that it prints.
    fn try_start(kind: Kind, data: &Path, said: &mut Vec<String>) -> Option<(Driver, Option<NonZeroU16>)> {
        let mut command = Command::new(kind.driver());
        let port = match kind {
            Kind::Chromium => 0,
            // Old ones answer no request on a port of their own choice. If this one is taken meanwhile, the driver ends.
            Kind::Firefox => TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port(),
        };
        // Browsers keep their data in a new directory below this one.
        command.arg(format!("--port={port}")).env("TMPDIR", data);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => panic!("{}: {error}", kind.driver()),
        };
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // "… on port 41093." and "… on 127.0.0.1:41093"
        let port = lines.by_ref().find_map(|line| {
            said.push(line.unwrap());
            said.last()?.trim_end_matches('.').rsplit([' ', ':']).next()?.parse().ok()
        });
        // Drain the pipe, so that the driver never blocks on it.
        std::thread::spawn(move || lines.for_each(drop));
        Some((Driver(child), port))
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
    pub kind: Kind,
    // Ends before its directory does.
    _driver: Driver,
    _data: TempDir,
}

impl Browser {
    /// Starts a browser; `None` if its driver is not installed.
    pub async fn start(kind: Kind) -> Option<Browser> {
        let data = tempfile::tempdir().unwrap();
        let (driver, port) = Driver::start(kind, data.path())?;
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(kind.capabilities().as_object().unwrap().clone())
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .unwrap_or_else(|error| panic!("{} is there, but no {kind:?} that it can start: {error}", kind.driver()));
        client.set_window_size(1400, 900).await.unwrap();
        Some(Browser { client, kind, _driver: driver, _data: data })
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
            // After its last element, Firefox goes on to the browser's own buttons.
            self.value("document.hasFocus() || window.focus()").await;
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
        self.until("document.getElementById('model').textContent !== 'hobbit'").await;
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
        let entries = match self.kind {
            Kind::Chromium => self.command("se/log", json!({"type": "browser"})).await,
            Kind::Firefox => {
                // Only the browser's own scripts see all messages.
                self.command("moz/context", json!({"context": "chrome"})).await;
                let entries = self.value(CONSOLE).await;
                self.command("moz/context", json!({"context": "content"})).await;
                entries
            }
        };
        let entries = entries.as_array().unwrap().iter();
        let entries = entries.filter(|entry| entry["source"] != "network" && entry["source"] != "rendering");
        entries.map(|entry| entry["message"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until a new console message contains `part`, in whatever case.
    pub async fn logs(&self, part: &str) {
        let logged = async {
            while !self.console().await.iter().any(|message| message.to_lowercase().contains(part)) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, logged).await.is_ok(), "never on the console: {part}");
    }

    /// A command of this browser's driver alone.
    pub async fn command(&self, path: &'static str, body: Value) -> Value {
        self.client.issue_cmd(Own { path, body }).await.unwrap()
    }
}

/// Firefox's messages about pages, which it then forgets.
const CONSOLE: &str = "(() => {
    const all = Services.console.getMessageArray().filter((one) => one instanceof Ci.nsIScriptError);
    Services.console.reset();
    const ours = all.filter((one) => one.sourceName.startsWith('http'));
    return ours.map(({ category, errorMessage }) => ({ source: category, message: errorMessage }));
})()";

/// A command that is not in the standard.
#[derive(Debug)]
struct Own {
    path: &'static str,
    body: Value,
}

impl WebDriverCompatibleCommand for Own {
    fn endpoint(&self, base: &url::Url, session: Option<&str>) -> Result<url::Url, url::ParseError> {
        base.join(&format!("session/{}/{}", session.unwrap_or_default(), self.path))
    }

    fn method_and_body(&self, _: &url::Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.body.to_string()))
    }
}
