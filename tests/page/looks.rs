//! Narrow screens and the content security policy.

use fantoccini::key::Key;
use serde_json::json;

use super::browser::Window;
use super::mock::Step::{End, Say};
use super::page;

const LONG: &str = "\
Averylongwordthatdoesnotendwherealinedoes_Averylongwordthatdoesnotendwherealinedoes

```text
a line of code that is longer than any telephone is wide, and then some, so that it must be scrolled
```
";

/// What is wider than its room: the page, or what scrolls in it, but for code.
const TOO_WIDE: &str = "
    const parts = document.querySelectorAll('html, body, .panes, .scroll, .side, .list-pane, .map-frame');
    return [...parts].filter((one) => one.clientWidth > 0 && one.scrollWidth > one.clientWidth)
        .map((one) => one.className || one.tagName);";

#[tokio::test]
async fn nothing_is_wider_than_a_telephone() {
    page(Window::Narrow, async |page| {
        page.ready().await;
        let browser = &page.browser;
        assert_eq!(browser.value("innerWidth").await, 360);
        page.server.answer([Say(LONG), End]);
        page.ask("Averylongwordthatdoesnotendwherealinedoes_Averylongwordthatdoesnotendwherealinedoes").await;
        page.answered().await;
        page.server.set_experts(json!({
            "managed": true, "n_expert": 128, "n_expert_used": 8,
            "layers": (0..48).map(|layer| json!({"layer": layer, "cells": "H".repeat(128)})).collect::<Vec<_>>(),
            "totals": {"hits": 1, "misses": 0, "bytes_read": 0, "tokens": 1, "seconds": 1.0, "io_wait_seconds": 0.0},
            "capacity_bytes": 1, "expert_bytes": 1, "requests": {"processing": 0, "waiting": 0}, "slots": [],
        }));
        let fits = async |what: &str| {
            let wide = browser.run(TOO_WIDE, json!(null)).await;
            assert_eq!(wide, json!([]), "{what}");
        };
        fits("chat").await;
        browser.click("#show-experts").await;
        browser.says("#map-summary", "6,144 of 6,144").await;
        fits("experts").await;
        browser.click("#show-settings").await;
        browser.until("document.getElementById('experts').hidden").await;
        fits("settings").await;
        // What lies over the chat goes with Escape.
        browser.keys(&char::from(Key::Escape).to_string()).await;
        browser.until("document.getElementById('settings').hidden").await;
        browser.click("#show-list").await;
        fits("conversations").await;
        browser.click("#list .open").await;
        browser.until("document.getElementById('list-pane').hidden").await;
        // The end of an answer is seen without doing anything.
        let seen = "(() => { const { bottom } = document.querySelector('.message:last-child').getBoundingClientRect(); \
                    return bottom <= document.getElementById('composer').getBoundingClientRect().top; })()";
        browser.until(seen).await;
    })
    .await;
}

const SCRIPT: &str = "
    const script = document.createElement('script');
    script.append('window.harmed = 1');
    document.body.append(script);";

/// Every test ends with an empty console; this one sees that it would not be.
#[tokio::test]
async fn the_policy_holds_and_the_console_says_so() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        assert_eq!(browser.console().await, []);
        for (violation, word) in [
            (SCRIPT, "Trusted"),
            ("document.body.innerHTML = '<b>harm</b>'", "Trusted"),
            ("document.body.setAttribute('style', 'color: red')", "style-src"),
            ("document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/x.png' }))", "img-src"),
            ("await fetch('http://127.0.0.1:9/')", "connect-src"),
        ] {
            browser.run(&format!("try {{ {violation} }} catch {{}}"), json!(null)).await;
            let said = browser.console().await;
            assert!(said.iter().any(|(_, message)| message.contains(word)), "{violation}: {said:?}");
        }
        assert_eq!(browser.value("window.harmed ?? null").await, json!(null));
    })
    .await;
}
