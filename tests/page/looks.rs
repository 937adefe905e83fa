//! Narrow screens, the dark, and the policy.

use fantoccini::key::Key;
use serde_json::json;

use crate::browser::Window;
use crate::mock::Step::{End, Say};
use crate::page;

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

#[tokio::test]
async fn light_and_dark_by_the_system_and_by_choice() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        let background = "getComputedStyle(document.body).backgroundColor";
        let light = json!("rgb(251, 250, 247)");
        let dark = json!("rgb(24, 23, 21)");
        let system = async |scheme: &str| {
            let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
            browser.devtools("Emulation.setEmulatedMedia", features).await;
        };
        system("light").await;
        assert_eq!(browser.value(background).await, light);
        system("dark").await;
        assert_eq!(browser.value(background).await, dark);
        browser.click("#show-settings").await;
        browser.find("#theme").await.select_by_value("light").await.unwrap();
        assert_eq!(browser.value(background).await, light);
        page.reload().await;
        assert_eq!(browser.value(background).await, light);
        system("light").await;
        browser.find("#theme").await.select_by_value("dark").await.unwrap();
        assert_eq!(browser.value(background).await, dark);
        browser.find("#theme").await.select_by_value("").await.unwrap();
        assert_eq!(browser.value(background).await, light);
    })
    .await;
}

/// Pairs of colours with less contrast than WCAG 2.2 asks for: 4.5 for text (1.4.3), 3 for what is drawn (1.4.11).
const LOW_CONTRAST: &str = r"
    const probe = document.body.appendChild(document.createElement('i'));
    const luminance = (name) => {
        probe.style.color = `var(--${name})`;
        const [r, g, b] = getComputedStyle(probe).color.match(/\d+/g)
            .map((part) => part / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (a, b) => {
        const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
        return (high + 0.05) / (low + 0.05);
    };
    const pairs = [
        ...['ink', 'soft', 'accent', 'alarm'].flatMap((one) => ['paper', 'raised'].map((on) => [one, on, 4.5])),
        ['on-accent', 'accent', 4.5],
        ...['high', 'low', 'reading', 'device'].map((one) => [one, 'paper', 3]),
    ];
    const low = pairs.filter(([a, b, least]) => contrast(a, b) < least)
        .map(([a, b]) => `${a} on ${b}: ${contrast(a, b).toFixed(2)}`);
    probe.remove();
    return low;";

#[tokio::test]
async fn words_are_dark_or_light_enough_to_be_read() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        for theme in ["light", "dark"] {
            browser.value(&format!("document.documentElement.dataset.theme = '{theme}'")).await;
            let low = browser.run(LOW_CONTRAST, json!(null)).await;
            assert_eq!(low, json!([]), "{theme}");
        }
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
