//! The page for screen readers: names, order, announcements.

use serde_json::{Value, json};

use super::browser::{Browser, Kind};
use super::{ENTER, ESCAPE, TAB, only, page};

const FOCUSED: &str = "document.activeElement.id";
const RIGHT: &str = "\u{e014}";
const DOWN: &str = "\u{e015}";

/// Roles of what can be used or jumped to.
const NAMED: &[&str] = &[
    "application",
    "article",
    "button",
    "checkbox",
    "combobox",
    "complementary",
    "form",
    "heading",
    "image",
    "link",
    "list",
    "log",
    "meter",
    "navigation",
    "region",
    "searchbox",
    "spinbutton",
    "textbox",
];

/// The nodes that a screen reader gets, in its order: role and name, or text. `None` in Firefox, whose driver has none.
async fn tree(browser: &Browser) -> Option<Vec<(String, String)>> {
    if browser.kind != Kind::Chromium {
        return None;
    }
    let command = json!({"cmd": "Accessibility.getFullAXTree", "params": {}});
    let answer = browser.command("goog/cdp/execute", command).await;
    let nodes = answer["nodes"].as_array().unwrap();
    let find = |id: &Value| nodes.iter().find(|node| node["nodeId"] == *id);
    let mut found = Vec::new();
    let mut next = vec![&nodes[0]];
    while let Some(node) = next.pop() {
        if node["ignored"] == false {
            let word = |key: &str| node[key]["value"].as_str().unwrap_or_default().to_owned();
            found.push((word("role"), word("name")));
        }
        next.extend(node["childIds"].as_array().unwrap().iter().rev().filter_map(find));
    }
    Some(found)
}

/// Everything that can be used has a name.
async fn all_are_named(browser: &Browser) {
    let Some(tree) = tree(browser).await else { return };
    let nameless: Vec<_> = tree.iter().filter(|(role, name)| NAMED.contains(&&**role) && name.is_empty()).collect();
    assert!(nameless.is_empty(), "{nameless:?}");
    assert!(!tree.iter().any(|(_, name)| name == "Attached files"), "a list without items: {tree:?}");
    for pane in ["Conversations", "Message"] {
        assert!(tree.iter().any(|(_, name)| name == pane), "{pane}: {tree:?}");
    }
}

/// Keeps what is announced in `heard`.
const LISTEN: &str = "window.heard = [];
    for (const live of document.querySelectorAll('[aria-live], [role=log], [role=status], [role=alert]')) {
        const added = (changes) => changes.flatMap(({ addedNodes }) => [...addedNodes]);
        new MutationObserver((changes) => heard.push(...added(changes).map((node) => node.textContent).filter(Boolean)))
            .observe(live, { childList: true, subtree: true });
    }";

#[tokio::test]
async fn an_answer_is_heard_once_in_blocks() {
    let grammar = only("## One\n\nTwo, three.\n\n```c\nfour();\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n");
    page(&["--grammar", &grammar, "-b", "256", "-ub", "256", "-np", "1", "-c", "4096"], async |browser, _| {
        browser.ready().await;
        all_are_named(browser).await;
        browser.run(LISTEN).await;
        browser.keys(&format!("What is it? {}{ENTER}", "river ".repeat(1100))).await;
        browser.answered().await;
        browser.until("heard.at(-1).endsWith('The answer is complete.')").await;
        let answer = "One\nTwo, three.\nCode in c:\nfour();\na, b\n1, 2\nThe answer is complete.";
        let read = [25, 50, 75].map(|part| format!("{part} % of the prompt is read.")).join("\n");
        assert_eq!(browser.value("heard.join('\\n')").await, format!("Answering.\n{read}\n{answer}"));
        assert_eq!(browser.value(FOCUSED).await, "input");
        browser.click(".message.assistant .code button").await;
        browser.until("heard.at(-1) === 'Copied'").await;
        all_are_named(browser).await;
        if let Some(tree) = tree(browser).await {
            for name in ["Code", "Table"] {
                assert!(tree.contains(&("group".to_owned(), name.to_owned())), "{name}: {tree:?}");
            }
        }
        let again = "const spoken = await import('/page/spoken.js');
                 const article = document.querySelector('.message.assistant');
                 heard.length = 0;
                 spoken.begin(article);
                 spoken.go();";
        browser.run(again).await;
        browser.until("heard.length > 1").await;
        assert_eq!(browser.value("heard").await, json!(["Answering.", answer]), "lines that are added together");
        // Thoughts are mentioned and not read.
        browser
            .run(
                "const spoken = await import('/page/spoken.js');
                 const article = document.querySelector('.message.assistant');
                 article.querySelector('.content').replaceChildren();
                 article.querySelector('.reasoning').hidden = false;
                 article.querySelector('.reasoning .text').textContent = 'Well.';
                 article.ariaBusy = 'true';
                 heard.length = 0;
                 spoken.begin(article);
                 spoken.go();
                 spoken.go();",
            )
            .await;
        browser.until("heard.length > 1").await;
        assert_eq!(browser.value("heard").await, json!(["Answering.", "Thinking."]));
    })
    .await;
}

#[tokio::test]
async fn the_focus_stays_with_the_user() {
    let endless = "root ::= (\"word \")+";
    let flags = ["--grammar", endless, "--ignore-eos", "--context-shift", "--expert-cache", "50%"];
    page(&flags, async |browser, server| {
        browser.ready().await;
        browser.run(LISTEN).await;
        browser.keys(&format!("What is the best book?{ENTER}")).await;
        browser.until("document.querySelector('.message.assistant .content')?.textContent.length > 0").await;
        browser.reach("#stop", TAB).await;
        browser.keys(ENTER).await;
        browser.until("heard.at(-1).endsWith('Stopped.')").await;
        assert_eq!(browser.value(FOCUSED).await, "input");
        server.wait_for_busy(0);

        browser.reach("[aria-label='Edit your message']", TAB).await;
        browser.keys(ENTER).await;
        assert_eq!(browser.value("document.activeElement.ariaLabel").await, "Edit the message");
        all_are_named(browser).await;
        browser.keys(ESCAPE).await;
        assert_eq!(browser.value("document.activeElement.ariaLabel").await, "Edit your message");

        // A panel that is opened has the focus, and the next key leads into it.
        browser.reach("#show-settings", TAB).await;
        browser.keys(ENTER).await;
        assert_eq!(browser.value(FOCUSED).await, "settings");
        browser.keys(TAB).await;
        assert_eq!(browser.value(FOCUSED).await, "system");
        all_are_named(browser).await;
        browser.reach("#show-settings", TAB).await;
        browser.keys(ENTER).await;
        assert_eq!(browser.value(FOCUSED).await, "show-settings");
        // So it is with the list: it closes and opens.
        browser.reach("#show-list", TAB).await;
        for focused in ["show-list", "list-pane"] {
            browser.keys(ENTER).await;
            assert_eq!(browser.value(FOCUSED).await, focused);
        }
    })
    .await;
}

#[tokio::test]
async fn the_experts_are_told_in_words() {
    page(&["-n", "4", "--ignore-eos", "--expert-cache", "50%"], async |browser, server| {
        browser.ask("What is the best book?").await;
        browser.answered().await;
        browser.shows("#rates", "% since start").await;
        server.wait_for_busy(0);
        let experts = server.get("/experts").ok();
        let cells = |layer: usize| experts["layers"][layer]["cells"].as_str().unwrap().to_owned();
        let all: String = (0..experts["layers"].as_array().unwrap().len()).map(cells).collect();
        let total = format!("{} of {} experts are in memory.", all.matches('H').count(), all.len());
        browser.reads("#map-summary", &total).await;
        browser.value("document.getElementById('map').focus()").await;
        let number = |layer: usize| experts["layers"][layer]["layer"].clone();
        // A layer is summed up when it is entered.
        let within = "document.getElementById('map-axes').textContent.startsWith('Layers')";
        let (along, across) = if browser.value(within).await == true { (DOWN, RIGHT) } else { (RIGHT, DOWN) };
        for (key, layer, expert, whole) in
            [(along, 0, 0, true), (along, 0, 1, false), (across, 1, 1, true), (across, 2, 1, true)]
        {
            browser.keys(key).await;
            let cells = cells(layer);
            let state = if cells[expert..].starts_with('H') { "in memory, high precision" } else { "not in memory" };
            let here = format!(". {} of the layer's {} are in memory", cells.matches('H').count(), cells.len());
            let sum = if whole { &*here } else { "" };
            browser.reads("#map-cell", &format!("Layer {}, expert {expert}: {state}{sum}", number(layer))).await;
        }
        assert_eq!(server.get("/experts").ok()["layers"], experts["layers"], "nothing has moved");

        let Some(tree) = tree(browser).await else { return };
        let after = |name: &str, n: usize| {
            let at = tree.iter().position(|(role, text)| role == "StaticText" && text == name).unwrap();
            let rest = tree[at + 1..].iter().filter(|(role, _)| role == "StaticText");
            rest.map(|(_, text)| text.clone()).take(n).collect::<Vec<_>>()
        };
        // A value, then what explains it.
        assert_eq!(after("Requests", 2), ["0", "0 waiting"]);
        assert_eq!(after("Slots", 2), ["Slot", "0"]);
        // Orca says nothing of an application that is focused itself.
        let map = tree.iter().position(|(role, _)| role == "application").unwrap();
        assert_eq!(tree[map].1, "Map of experts");
        assert_eq!(tree[map + 1], ("image".to_owned(), total));
    })
    .await;
}
