//! The server's page as its users meet it: in Chromium, against a server whose answers the tests write, and against hobbit-server.

mod browser;
mod chat;
mod conversations;
mod experts;
mod looks;
mod mock;
mod served;

use std::sync::Arc;

use browser::{Browser, Window};
use fantoccini::Locator;
use mock::{Mock, Shared};

use crate::fixture::not_run;
use crate::server::rig::Server;

/// A page that is open, and its server.
pub struct Page<S = Arc<Shared>> {
    pub browser: Browser,
    pub server: S,
    address: String,
    /// The name that the server gives its model.
    model: &'static str,
}

impl<S> Page<S> {
    /// Loads the page afresh.
    pub async fn load(&self) {
        // Not only another fragment of the address.
        self.browser.client.goto("about:blank").await.unwrap();
        self.browser.client.goto(&self.address).await.unwrap();
    }

    /// Loads it again, as the browser's button does.
    pub async fn reload(&self) {
        self.browser.client.refresh().await.unwrap();
        self.ready().await;
    }

    /// Waits until the page knows its server.
    pub async fn ready(&self) {
        self.browser.reads("#model", self.model).await;
    }

    /// Types a message and sends it.
    pub async fn ask(&self, text: &str) {
        self.browser.find("#input").await.send_keys(text).await.unwrap();
        self.browser.keys("\u{e007}").await;
    }

    /// Waits until nothing is being written.
    pub async fn answered(&self) {
        self.browser
            .until("document.querySelector('.message.assistant') && !document.getElementById('send').hidden")
            .await;
    }

    /// Presses what stands under a message.
    pub async fn act(&self, name: &str) {
        let path = format!("//article//footer//button[text()='{name}']");
        let button = self.browser.client.wait().for_element(Locator::XPath(&path)).await;
        button.unwrap().click().await.unwrap();
    }
}

/// Runs a test on a page; says so where it cannot.
pub async fn page(window: Window, test: impl AsyncFnOnce(&Page)) {
    page_after(window, |_| (), test).await;
}

/// The same, with the server prepared before the page is loaded.
pub async fn page_after(window: Window, prepare: impl FnOnce(&Shared), test: impl AsyncFnOnce(&Page)) {
    let mock = Mock::start().await;
    prepare(&mock.state);
    open(window, mock.state, format!("http://{}/", mock.address), "Tiny-8x1B", test).await;
}

/// The same with hobbit-server and the demo model.
pub async fn served(flags: &[&str], test: impl AsyncFnOnce(&Page<Server>)) {
    let server = Server::start(&[&["--alias", "demo"], flags].concat());
    let address = format!("{}/", server.url);
    open(Window::Desk, server, address, "demo", test).await;
}

async fn open<S>(window: Window, server: S, address: String, model: &'static str, test: impl AsyncFnOnce(&Page<S>)) {
    let Some(browser) = Browser::start(window).await else {
        return not_run::not_run("the server's page", "chromedriver is not installed (setup.sh --browser installs it)");
    };
    let page = Page { browser, server, address, model };
    page.load().await;
    test(&page).await;
    // Nothing was against the policy, and no script failed.
    assert_eq!(page.browser.console().await, []);
    page.browser.client.clone().close().await.unwrap();
}
